# Two commands: `make demo` and `make test`. Each sets up its own virtual environment on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MEGATRON_0_19 := $(VENV)/megatron-core-0.19.2

# Tests wait more than they compute. Those that wait longest are collected first, and begin first.
AT_ONCE ?= --numprocesses 3 --dist loadgroup --no-loadscope-reorder

# The other folders need a GPU, Slurm or a browser. Each process would import their tests only to leave them out.
ON_ANY_HOST := tests/integration tests/numerics tests/unit

# Rewriting the asserts of all tests takes ten CPU seconds in each process: keep the byte code, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo collect test test-slow test-on-any-host test-exhaustive test-megatron-0-19 test-slurm test-browser slurm-up slurm-down check docs ci clean requirements

demo: $(VENV)/installed
	$(BIN)/python -m orchestrator sweep recipes/tiny_moe.yaml

test: $(VENV)/installed-dev $(MEGATRON_0_19)
	$(BIN)/python -m pytest $(ON_ANY_HOST) -m "not slow" $(AT_ONCE)

# Long compilations, layouts of many ranks, trainers of other libraries, most of Megatron-Core 0.19.2. No process imports
# files without such a test: tests/conftest.py refuses the mark in a file that does not name it.
test-slow: $(VENV)/installed-dev $(MEGATRON_0_19)
	$(BIN)/python -m pytest $$(grep -rl --include='test_*.py' pytest.mark.slow $(ON_ANY_HOST) | sort) -m slow $(AT_ONCE)

# Both of these: half as many processes import and compile, and what a module's tests compare with is trained once.
test-on-any-host: $(VENV)/installed-dev $(MEGATRON_0_19)
	$(BIN)/python -m pytest $(ON_ANY_HOST) $(AT_ONCE)

# Compile the tests, and the modules that they import, for all processes of the targets above.
collect: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(ON_ANY_HOST) --collect-only >/dev/null

# What the tests above hold a cover of: more values of options that take the same path, in minutes, and in hours every
# legal parallel layout, some ten thousand.
test-exhaustive: $(VENV)/installed-dev
	EXHAUSTIVE=1 $(BIN)/python -m pytest $$(grep -rl --include='test_*.py' pytest.mark.exhaustive $(ON_ANY_HOST) | sort) \
	    -m exhaustive $(AT_ONCE)

# Engine megatron on Megatron-Core 0.19.2, where `make test-slow` runs some of these.
test-megatron-0-19: $(VENV)/installed-dev $(MEGATRON_0_19)
	PYTHONPATH=$(MEGATRON_0_19) $(BIN)/python -m pytest tests/numerics/megatron $(AT_ONCE) \
	    --ignore=tests/numerics/megatron/test_megatron_0_19.py

# On a real Slurm cluster of four nodes, brought up on this host: docs/slurm.md. Its folder is named so that no process
# imports the tests of others, and with them PyTorch.
test-slurm: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/slurm -m slurm $(AT_ONCE)

# Reports in a real browser, headless: apt-get install chromium.
test-browser: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/browser -m browser

# The same cluster as of test-slurm, to work with.
SLURM_FOLDER ?= /tmp/slurm-$(shell id -un)
slurm-up: requirements
	@$(PYTHON) -m tests.slurm.cluster up $(SLURM_FOLDER)

slurm-down: requirements
	@$(PYTHON) -m tests.slurm.cluster down $(SLURM_FOLDER)

check: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docs/Dockerfile

# The documentation site, build/site/index.html. Any warning fails: a link to nothing, a page in no part.
docs: $(VENV)/installed-dev
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --jobs 2 --fresh-env docs build/site

clean:
	rm -rf $(VENV)

requirements:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Python 3.11 or later is needed, and $(PYTHON) is older: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	    || { echo "Python's venv is needed: apt-get install python3-venv python3-dev"; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	    || { echo "Python's headers are needed by torch.compile: apt-get install python3-dev"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null \
	    || { echo "A C++ compiler is needed by torch.compile: apt-get install g++"; exit 1; }

$(VENV)/installed: pyproject.toml | requirements
	@echo "downloading PyTorch and other packages into $(VENV), which takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml | requirements
	@echo "downloading PyTorch and other packages into $(VENV), which takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev,docs]'
	touch $(VENV)/installed $@

# pip installs this release on Python 3.12 or later alone. Its sources run on earlier ones too.
$(MEGATRON_0_19): | $(VENV)/installed-dev
	rm -rf $@.part
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest $@.part megatron-core==0.19.2
	$(BIN)/python -m zipfile -e $@.part/*.whl $@.part && rm $@.part/*.whl
	mv $@.part $@
