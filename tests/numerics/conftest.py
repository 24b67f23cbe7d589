import os
import warnings
from collections.abc import Iterator

# Some virtual machines advertise AMX but forbid it. oneDNN's bfloat16 products then die of an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from tests.distributed import end_workers
from tests.numerics.tiny import no_inductor

torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Importing Inductor warns about PyTorch's own deprecations.
    import torch._inductor.compile_fx

# A run builds one engine, which compiles a function at most three times. A test process builds many engines, in any
# order.
torch._dynamo.config.recompile_limit = 64


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """Reset what an engine sets for its whole process."""
    yield
    torch.use_deterministic_algorithms(False)
    torch._inductor.config.deterministic = False


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Run PyTorch's own kernels instead of Inductor's, because the number of compilations and replays does not depend
    on kernels."""
    with no_inductor():
        yield


@pytest.fixture(autouse=True, scope="module")
def own_workers() -> Iterator[None]:
    """End the worker processes of each module. The next module forks new ones."""
    yield
    end_workers()


@pytest.fixture(autouse=True)
def own_workers_of_megatron(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the workers after each test of Megatron-Core, which keeps its process groups.

    Each group of gloo has three polling threads.
    """
    yield
    if "megatron" in request.path.stem:
        end_workers()
