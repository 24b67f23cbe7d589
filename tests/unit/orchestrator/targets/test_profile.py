"""Test reading profiles as a whole: a correct file becomes a Profile, and all mistakes are reported at once, with their
fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.targets.profile import SCHEMA, Profile, check_option, load_profile

ROOT = Path(__file__).parents[4]
FIELDS = tuple(name for name in SCHEMA.fields if name != "name")
SHIPPED = sorted((ROOT / "clusters").glob("*.yaml"))
REFERENCE = (ROOT / "docs" / "clusters.md").read_text()


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's own folder of profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "cuda-graph-orchestrator" / "clusters"
    folder.mkdir(parents=True)
    return folder


def read(folder: Path, text: str) -> Profile:
    (folder / "site.yaml").write_text(text)
    return load_profile("site")


def said(folder: Path, text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(InputError) as caught:
        read(folder, text)
    return [(p.place.replace(f"{folder}/", ""), p.message, p.fix) for p in caught.value.problems]


# --- where profiles stand -------------------------------------------------------------------------------------------


def test_the_users_own_profile_goes_before_a_shipped_one(own: Path) -> None:
    assert load_profile("example").partition == "batch"
    (own / "example.yaml").write_text("partition: mine\n")
    assert load_profile("example") == Profile("example", partition="mine")


def test_without_a_name_it_is_the_users_default_or_none(own: Path) -> None:
    assert load_profile() == Profile()
    (own / "default.yaml").write_text("account: us\n")
    assert load_profile() == load_profile("default") == Profile("default", account="us")


def test_profiles_stand_in_the_home_folder_where_no_other_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / ".config" / "cuda-graph-orchestrator" / "clusters"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text("qos: high\n")
    assert load_profile("site").qos == "high"


@pytest.mark.parametrize(("name", "way_out"), [
    ("exampel", "did you mean 'example'?"),
    ("nowhere", "known: example"),
    ("../clusters/example", "example"),
    ("default", "known: example"),
])  # fmt: skip
def test_an_unknown_profile_is_refused_with_those_that_there_are(own: Path, name: str, way_out: str) -> None:
    with pytest.raises(InputError) as caught:
        load_profile(name)
    (problem,) = caught.value.problems
    assert problem.message == f"no profile {name!r}"
    assert way_out in problem.fix


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_profile_is_one(path: Path) -> None:
    assert load_profile(path.stem).name == path.stem


def test_the_example_has_every_field() -> None:
    assert set(yaml.safe_load((ROOT / "clusters" / "example.yaml").read_text())) == set(FIELDS)


# --- what is wrong --------------------------------------------------------------------------------------------------

WRONG: Mapping[str, tuple[str, list[tuple[str, str, str]]]] = {
    "unknown fields": (
        "partion: gpu\nname: site\nnodes: 4\nmem.x: 1\n",
        [
            ('site.yaml:1: partion = "gpu"', "no such field", "did you mean 'partition'?"),
            ('site.yaml:2: name = "site"', "no such field", "the name of its file"),
            ("site.yaml:3: nodes = 4", "no such field", "did you mean 'max_nodes'?"),
            ("site.yaml:4: mem.x = 1", "mem is not a mapping", "write text, or null"),
        ],
    ),
    "wrong types and sizes": (
        "gpus: gress\nexclusive: 3\ncpus_per_task: -1\nmax_nodes: 0\nmax_pending_minutes: .inf\npartition: [a]\n",
        [
            ('site.yaml:1: gpus = "gress"', "not one of gres", "did you mean 'gres'?"),
            ("site.yaml:2: exclusive = 3", "not true or false", "write true or false"),
            ("site.yaml:3: cpus_per_task = -1", "at least 0", "leave it out"),
            ("site.yaml:4: max_nodes = 0", "at least 1", "leave it out"),
            ("site.yaml:5: max_pending_minutes", "not a finite number", "write a number"),
            ('site.yaml:6: partition = ["a"]', "not text", "write text"),
        ],
    ),
    "text that is none": (
        'account: ""\nqos: "a\\nb"\nmem: lots\ngpu_type: a b\ncontainer_image: x\npython: python3 -u\ncontainer_mounts: ["/data"]\nsetup: ["", "\\n"]\n',
        [
            ('site.yaml:1: account = ""', "not a line of text", "one line"),
            ("site.yaml:2: qos", "not a line of text", "one line"),
            ('site.yaml:3: mem = "lots"', "not memory as sbatch takes it", "500G"),
            ('site.yaml:4: gpu_type = "a b"', "not a type of GPU", "Gres=gpu:TYPE"),
            ('site.yaml:6: python = "python3 -u"', "one program", "leave its options out"),
            ('site.yaml:7: container_mounts[0] = "/data"', "not of the form FROM:TO", "/data:/data:ro"),
            ('site.yaml:8: setup[0] = ""', "not a line of text", "one line"),
            ("site.yaml:8: setup[1]", "not a line of text", "one line"),
        ],
    ),
    "lists that are none": (
        "setup: module load x, y\nsrun: --wait=60\nsbatch: [comment]\nenvironment: 3\nsetup.a: b\n",
        [
            ('site.yaml:1: setup = "module load x, y"', "not a list", "setup: [first, second]"),
            ('site.yaml:2: srun = "--wait=60"', "not a list", "srun: [first, second]"),
            ('site.yaml:3: sbatch = ["comment"]', "not a mapping", "sbatch: {NAME: 'text'}"),
            ("site.yaml:4: environment = 3", "not a mapping", "environment: {NAME: 'text'}"),
            ('site.yaml:5: setup.a = "b"', "setup.a is given twice", "keep one"),
        ],
    ),
    "options that a field has, and those that are set here": (
        "sbatch: {partition: gpu, gpus-per-node: 8, time: 60, nodes: 2, array: 0-3, requeue: , signal: USR1, p: x,\n"
        "  mail_type: END, comment: true, gpu-bind: closest}\n"
        "srun: [--mpi=pmix, --container-image=x, --nodes=2, --overlap, -n4, --gpu-bind=closest, wait]\n",
        [
            ('sbatch.partition = "gpu"', "has a field for this option", "write it as partition"),
            ("sbatch.gpus-per-node = 8", "has a field for this option", "write it as gpus,"),
            ("sbatch.time = 60", "the orchestrator sets this", "resources.minutes_per_run"),
            ("sbatch.nodes = 2", "the orchestrator sets this", "recipe's resources"),
            ('sbatch.array = "0-3"', "the orchestrator sets this", "max_nodes and max_jobs"),
            ("sbatch.requeue = null", "the orchestrator sets this", "new attempt"),
            ('sbatch.signal = "USR1"', "the orchestrator sets this", "new attempt"),
            ('sbatch.p = "x"', "not the long name", "without dashes"),
            ('site.yaml:2: sbatch.mail_type = "END"', "not the long name", "without dashes"),
            ("sbatch.comment = true", "not the text of an option", "nothing for an option without a value"),
            ('sbatch.gpu-bind = "closest"', "hides GPUs from ranks", "write none"),
            ('site.yaml:3: srun[0] = "--mpi=pmix"', "has a field for this option", "write it as mpi"),
            ('srun[1] = "--container-image=x"', "has a field for this option", "write it as container_image"),
            ('srun[2] = "--nodes=2"', "the orchestrator sets this", "recipe's resources"),
            ('srun[3] = "--overlap"', "the orchestrator sets this", "whole allocation"),
            ('srun[4] = "-n4"', "not the long name of an option of srun", "--NAME=VALUE each"),
            ('srun[5] = "--gpu-bind=closest"', "hides GPUs from ranks", "write none"),
            ('srun[6] = "wait"', "not the long name of an option of srun", "--NAME=VALUE each"),
        ],
    ),
    "secrets": (
        "environment: {HF_TOKEN: hunter2}\nsetup: [export WANDB_API_KEY=hunter2, 'HF_TOKEN=\"hunter2\" x']\n"
        "container_image: docker://me:hunter2@registry#image\nsrun: [--container-env=HF_TOKEN=hunter2]\n",
        [
            ('site.yaml:1: environment.HF_TOKEN = "***"', "looks like a secret", "in the shell"),
            ('site.yaml:2: setup[0] = "***"', "looks like a secret", "export X=$(cat FILE)"),
            ('site.yaml:2: setup[1] = "***"', "looks like a secret", "export X=$(cat FILE)"),
            ('site.yaml:3: container_image = "***"', "(a password before @)", "in the shell"),
            ('site.yaml:4: srun[0] = "***"', "looks like a secret", "in the shell"),
        ],
    ),
    "fields without the one that they are about": (
        "gpus: none\ngpu_type: h100\ncontainer_mounts: ['/data:/data']\n",
        [
            ('site.yaml:2: gpu_type = "h100"', "no job requests GPUs", "leave gpu_type out"),
            ("site.yaml:3: container_mounts", "there is no container", "name a container_image"),
        ],
    ),
    "given twice": ("qos: a\nqos: b\n", [("site.yaml:2: qos", "given twice (first in line 1)", "keep one")]),
    "empty": ("", [("site.yaml", "the file is empty", "init profile a profile")]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_every_problem_is_found_with_its_place_and_way_out(own: Path, case: str) -> None:
    text, expected = WRONG[case]
    found = said(own, text)
    assert len(found) == len(expected), found
    for (place, message, remedy), (place_part, message_part, remedy_part) in zip(found, expected, strict=True):
        assert place_part in place
        assert message_part in message, place
        assert remedy_part in remedy, place
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(("command", "names"), [
    ("sbatch", "job-name output error array dependency nodes ntasks-per-node time signal requeue no-requeue open-mode "
               "partition account qos constraint reservation gres gpus-per-node exclusive mem cpus-per-task wckey"),
    ("srun", "nodes ntasks ntasks-per-node overlap exact kill-on-bad-exit job-name output error mpi container-image "
             "container-mounts cpus-per-task gpus-per-task distribution time"),
])  # fmt: skip
def test_whatever_the_orchestrator_writes_itself_cannot_be_added(command: Any, names: str) -> None:
    assert all(check_option(command, name, "1") for name in names.split())


# --- what is read ---------------------------------------------------------------------------------------------------


def test_values_come_in_their_fields_types(own: Path) -> None:
    found = read(own, """
partition: 2024
mem: 0
cpus_per_task: "4"
exclusive: yes
max_pending_minutes: 5
qos: null
setup: ['module load ${MODULES:-cuda}', "if true; then\\n  export HF_TOKEN=$(cat ~/.token)\\nfi"]
srun: ['--cpu-bind=map_cpu:0,1', --no-container-mount-home, --gpu-bind=none]
sbatch: {mail-type: END, contiguous: , comment: '${x}', nodelist: 'node[1-3]'}
environment: {NCCL_DEBUG: INFO, NCCL_X: 0}
""")  # fmt: skip
    assert found == Profile(
        "site",
        partition="2024",
        mem="0",
        cpus_per_task=4,
        exclusive=True,
        max_pending_minutes=5.0,
        setup=("module load ${MODULES:-cuda}", "if true; then\n  export HF_TOKEN=$(cat ~/.token)\nfi"),
        srun=("--cpu-bind=map_cpu:0,1", "--no-container-mount-home", "--gpu-bind=none"),
        sbatch={"mail-type": "END", "contiguous": "", "comment": "${x}", "nodelist": "node[1-3]"},
        environment={"NCCL_DEBUG": "INFO", "NCCL_X": "0"},
    )


def test_comments_and_empty_mappings_leave_every_choice_to_slurm(own: Path) -> None:
    assert read(own, "sbatch: {}\nenvironment: {}\nsetup: []\n") == Profile("site")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=8) | st.sampled_from(["gres", "${x}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES, min_size=1, max_size=5))
def test_any_tree_is_a_profile_or_a_list_of_problems(own: Path, fields: dict[str, Any]) -> None:
    try:
        found = read(own, yaml.safe_dump(fields, allow_unicode=True))
    except InputError as error:
        assert all(p.place and p.message for p in error.problems)
    else:
        assert found.name == "site"
        one_line = [found.partition, found.account, found.mem, *found.sbatch, *found.sbatch.values(), *found.srun]
        assert all(text.isprintable() for text in one_line if text)


# --- the reference --------------------------------------------------------------------------------------------------


EXAMPLES = re.findall(r"```yaml\n(.*?)```", REFERENCE, re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_references_examples_are_profiles(own: Path, text: str) -> None:
    assert read(own, text) != Profile("site")
