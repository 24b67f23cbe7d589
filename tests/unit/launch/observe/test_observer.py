"""Test the observer on a small real program: the records that it writes, and the name of each way to fail."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

import analysis.records.events
from launch.common.typed_json import from_json
from launch.contract.paths import IMAGE
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.sketch import StepSketch
from launch.contract.spec import Parallelism
from tests.unit.launch.observe.observed import PROGRAM, STEPS, Observed, observe, spec_of

CLIP = PROGRAM.replace(
    "    optimizer.step()", "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()"
)
SAYS = PROGRAM.replace("import torch\n", "import torch\nfrom launch.observe import step\n", 1).replace(
    '    print({"step": number, "loss": loss.item()})', "    step(loss=loss, grad_norm=model.weight.grad.norm())"
)
TWO = (
    PROGRAM.replace("optimizer = ", "second = torch.optim.SGD([model.bias], lr=0.1)\noptimizer = ")
    .replace("model.parameters()", "[model.weight]")
    .replace("    optimizer.step()", "    optimizer.step()\n    second.step()")
)
CLOSURE = PROGRAM.replace("    loss = run(batch)", "    def closure():\n     loss = run(batch)")
CLOSURE = CLOSURE.replace("    model.zero", "     model.zero").replace("    loss.back", "     loss.back")
CLOSURE = CLOSURE.replace("    optimizer.step()", "     return loss\n    loss = optimizer.step(closure)")

SHOW = '    print({"step": number, "loss": loss.item()})'
EARLY = PROGRAM.replace(SHOW, "").replace("    model.zero", "    print('loss', loss.item())\n    model.zero")
TRIES = PROGRAM.replace("for number", "print('loss: 9.0')\nprint('loss: 8.0')\nfor number") + "print('loss: 7.0')\n"
"""The program shows a loss before its first step and after its last one. These losses belong to no step."""
KEEPS = PROGRAM.replace("data = ", "kept = []\ndata = ").replace(
    SHOW,
    """    kept.append((number, loss.detach()))
    if (number + 1) % EVERY == 0:
        for step, value in kept: print(f"step {step} loss {value.item()}")
        kept.clear()""",
)
"""The program shows the losses of many steps at once, so that the host waits seldom."""
IN_BACKWARD = PROGRAM.replace(
    "optimizer = ", "optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}\nowner = "
)
IN_BACKWARD = IN_BACKWARD.replace(
    "data = ",
    """
def update(parameter):
    optimizers[parameter].step()
    parameter.grad = None
for one in optimizers: one.register_post_accumulate_grad_hook(update)
data = """,
).replace("    optimizer.step()", "")
"""Each parameter has an optimizer, which steps in the backward pass and frees the gradient. Their order may differ from step to step."""
SPARSE = PROGRAM.replace("Linear(4, 2)", "Embedding(9, 2, sparse=True)").replace(
    "(STEPS, 8, 4)", "(STEPS, 8).mul(2).long() % 9"
)
DENSE = SPARSE.replace(", sparse=True", "")
NESTED = TWO.replace(
    "data = ",
    """
class Container(torch.optim.Optimizer):
    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([one for optimizer in optimizers for one in optimizer.param_groups[0]["params"]], {})
    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
container = Container(optimizer, second)
data = """,
).replace("    optimizer.step()\n    second.step()", "    container.step()")
"""The program nests optimizers as torchtitan's container does. The container's hooks run around those of each
optimizer."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tmp_path_factory.mktemp("plain"), PROGRAM, spec_of())


@pytest.mark.parametrize(
    ("program", "loss", "norm"),
    [
        (PROGRAM, "printed", "computed by the observer"),
        (CLIP, "printed", "the program's own functions"),
        (SAYS, "launch.observe.step", "launch.observe.step"),
        (TWO, "printed", "computed by the observer"),
        (NESTED, "printed", "computed by the observer"),
        (IN_BACKWARD, "printed", "computed by the observer"),
        (CLOSURE, "printed", "computed by the observer"),
        (EARLY, "printed", "computed by the observer"),
        (TRIES, "printed", "computed by the observer"),
        (KEEPS.replace("EVERY", "STEPS"), "printed", "computed by the observer"),
        (KEEPS.replace("EVERY", "4"), "printed", "computed by the observer"),
    ],
    ids=(
        "plain",
        "clips",
        "says",
        "two optimizers",
        "a container of optimizers",
        "optimizers in the backward pass",
        "a closure",
        "prints before the optimizer",
        "tries first",
        "prints at the end",
        "prints every four steps",
    ),
)
def test_steps_losses_and_norms_are_seen_whatever_shows_them(
    plain: Observed, tmp_path: Path, program: str, loss: str, norm: str
) -> None:
    seen = observe(tmp_path, program, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS))
    if program is not SAYS:
        # The observer learns of the second optimizer only when it steps.
        before, after = ([one.grad_norm for one in run.steps[1:]] for run in (plain, seen))
        assert after == pytest.approx(before)
    assert [one.loss for one in seen.steps] == pytest.approx([one.loss for one in plain.steps])
    assert [one.phase for one in seen.steps] == ["warmup"] * 3 + ["settle"] * 2 + ["measure", "check"] + ["measure"] * (
        STEPS - 7
    )
    assert all(one.step_time_ms > 0 for one in seen.steps[1:])
    (choices,) = seen.events("choices")
    assert (choices["choices"]["loss"], choices["choices"]["grad_norm"]) == (loss, norm)
    first, last = seen.events("parameters")
    assert first["digest"] != last["digest"] and not first["sketches"]
    assert {one["last"]["name"] for one in last["sketches"]} >= {"weight", "bias"} and all(
        one["change"] > 0 for one in last["sketches"]
    )


def test_the_order_in_which_optimizers_step_shows_in_no_record(tmp_path: Path) -> None:
    """A graph or compiled code may call them in another order than the eager backward pass."""
    other = TWO.replace("    optimizer.step()\n    second.step()", "    second.step()\n    optimizer.step()")
    one, two = (observe(tmp_path / name, text, spec_of()) for name, text in (("a", TWO), ("b", other)))
    assert [step.grad_norm for step in one.steps] == [step.grad_norm for step in two.steps]
    assert [event["digest"] for event in one.events("parameters")] == [
        event["digest"] for event in two.events("parameters")
    ]
    assert one.events("choices")[0]["choices"] == two.events("choices")[0]["choices"]


def test_a_sparse_gradient_has_the_norm_of_a_dense_one(tmp_path: Path) -> None:
    """A token that occurs twice in a batch has two rows in the gradient, whose sum counts."""
    seen, dense = (observe(tmp_path / name, text, spec_of()) for name, text in (("a", SPARSE), ("b", DENSE)))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.grad_norm for one in seen.steps] == pytest.approx([one.grad_norm for one in dense.steps])


def test_a_pattern_reads_lines_of_any_form(tmp_path: Path) -> None:
    program = PROGRAM.replace(SHOW, "    print(f'it {number} nll {loss.item():.17g} loss 9.0', 'test' * number)")
    spec = spec_of()
    command = dataclasses.replace(spec.command, pattern=r"it (?P<step>\d+) nll (?P<loss>\S+)( gn (?P<grad_norm>\S+))?")
    plain = observe(tmp_path / "a", PROGRAM, spec)
    seen = observe(tmp_path / "b", program, dataclasses.replace(spec, command=command))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.loss for one in seen.steps] == [one.loss for one in plain.steps]


REPLACED = {
    "another stream": "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)",
    "cuts lines": """
class Cut:
    def write(self, text, to=sys.stdout): to.write("".join(one + "\\n" * (one == ".") for one in text))
    def flush(self): pass
sys.stdout = Cut()""",
}


@pytest.mark.parametrize("how", REPLACED)
def test_lines_on_a_stream_that_the_program_sets_are_seen(plain: Observed, tmp_path: Path, how: str) -> None:
    program = PROGRAM.replace("torch.manual", f"import io, sys\n{REPLACED[how]}\ntorch.manual", 1)
    seen = observe(tmp_path, program, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.loss for one in seen.steps] == [one.loss for one in plain.steps]


@pytest.mark.parametrize("program", [PROGRAM, EARLY.replace("'loss'", "'step', number, 'loss'")])
def test_the_programs_own_number_of_its_first_step_is_recorded(tmp_path: Path, program: str) -> None:
    """It shows that a program resumed a checkpoint."""
    (choices,) = observe(tmp_path, program.replace("(data)", "(data, 110)"), spec_of()).events("choices")
    assert choices["choices"]["first_number"] == "110"


LOGS = "    Run().log({'train/loss': loss, 'lr': 0.1}, commit=True)"
SOME = LOGS.replace("    Run", "    if number % 4 == FIRST: Run")


@pytest.mark.parametrize(
    ("shows", "loss", "message"),
    [
        (LOGS, "its logger", ""),
        (f"{LOGS}\n{SHOW}", "its logger", ""),
        (f"{SHOW}\n{SOME.replace('FIRST', '0')}", "printed", ""),
        (f"{SHOW}\n{SOME.replace('FIRST', '3')}", "printed", ""),
        (SOME.replace("FIRST", "0"), "its logger", "the program's logger shows no loss of step 1 of its 12 steps"),
    ],
    ids=("each step", "each step, and prints", "some steps, and prints", "a late one, and prints", "some steps"),
)
def test_what_goes_to_wandb_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows: str, loss: str, message: str
) -> None:
    """The class replaces W&B's Run, which takes seconds to start. The loss still has its gradient, which must not cause
    a warning. Of a program that prints every step and logs some, the printed losses count."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "wandb" / "sdk").mkdir(parents=True)
    run = "class Run:\n    def log(self, data, step=None, commit=None, sync=None): pass\n"
    for name, text in {"__init__.py": "", "sdk/__init__.py": "", "sdk/wandb_run.py": run}.items():
        (tmp_path / "wandb" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    program = PROGRAM.replace(SHOW, shows)
    seen = observe(
        tmp_path,
        f"import warnings\nfrom wandb.sdk.wandb_run import Run\nwarnings.simplefilter('error')\n{program}",
        spec_of(),
    )
    assert seen.diagnosis.outcome == ("CONFIG" if message else "COMPLETED"), seen.diagnosis
    assert message in seen.diagnosis.message
    assert seen.events("choices")[0]["choices"]["loss"] == loss


SHARDED = """
import os
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=MEETING, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 2), mesh, [Shard(0)]))
optimizer = torch.optim.SGD([weight], lr=0.1)
from launch.observe import running, step
for number in range(STEPS):
    loss = weight.full_tensor().square().sum()
    optimizer.zero_grad()
    loss.backward()
    norm = NORM
    optimizer.step()
    if rank == 0:
        step(loss=loss, grad_norm=norm)
assert dist.get_world_size() == 2  # both are still there
dist.barrier()
dist.destroy_process_group()
"""
"""Each of two ranks holds a part of a parameter. Only rank 0 reports."""


@pytest.mark.parametrize(
    ("norm", "outcome", "message"),
    [
        ("1.0 + number", "COMPLETED", ""),
        ("running().take_own('grad_norm', weight.grad.norm()) or 1.0 + number", "COMPLETED", ""),
        ("weight.grad", "CONFIG", r"grad_norm of which each rank holds a part: pass grad_norm.full_tensor\(\)"),
    ],
)
def test_a_rank_that_reports_alone_waits_for_no_other(tmp_path: Path, norm: str, outcome: str, message: str) -> None:
    program = SHARDED.replace("NORM", norm).replace("MEETING", repr(f"file://{tmp_path}/meeting"))
    spec = dataclasses.replace(spec_of(), parallelism=Parallelism(dp=2))
    seen = observe(tmp_path, program, spec)
    assert seen.diagnosis.outcome == outcome and re.search(message, seen.diagnosis.message), seen.diagnosis
    if outcome == "COMPLETED":
        assert [one.step for one in seen.steps] == list(range(STEPS))
        assert len({event["digest"] for event in seen.events("parameters")}) == 2, "the optimizer changes parameters"


@pytest.mark.parametrize("rate", ["0.1", "torch.tensor(0.1)"])
def test_optimizers_are_described_as_they_begin(tmp_path: Path, rate: str) -> None:
    """A graph that contains the optimizer needs the learning rate in a tensor."""
    scheduled = PROGRAM.replace("lr=0.1)", f"lr={rate})").replace(
        "data = ", "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)\ndata = "
    )
    seen = observe(tmp_path, scheduled.replace("    print", "    schedule.step()\n    print"), spec_of())
    (choices,) = seen.events("choices")
    assert choices["choices"]["optimizers"] == "lr 0.1, weight_decay 0, momentum 0"


SGD = "SGD(model.parameters(), lr=0.1)"
IN_BFLOAT16 = """
def forward(batch):
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        return model(batch).float()
run = torch.compile(forward, backend="aot_eager", dynamic=False) if COMPILE else forward
optimizer = """
SETTINGS = {
    "plain": ((), {}),
    "fused": ((SGD, "Adam(model.parameters(), fused=True, amsgrad=True)"), {"optimizer_kinds": "Adam fused amsgrad"}),
    "for loops": ((SGD, f"{SGD[:-1]}, foreach=False)"), {"optimizer_kinds": "SGD one parameter at a time"}),
    "capturable": ((SGD, "Adam(model.parameters(), capturable=False, foreach=True)"), {"optimizer_kinds": "Adam"}),
    "types": (("Linear(4, 2)", "Linear(4, 2, dtype=torch.float64)"), {"parameters": "torch.float64"}),
    "autocast": (("optimizer = ", IN_BFLOAT16), {"mixed_precision": "autocast cpu bfloat16"}),
    "no autocast": (("optimizer = ", IN_BFLOAT16.replace("torch.bfloat16)", "enabled=False)")), {}),
    "a clipped norm": (
        ("    optimizer", "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)\n    optimizer"),
        {"clipping": "max_norm 0.3"},
    ),
    "only a norm": (
        ("    optimizer", "    torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n    optimizer"),
        {},
    ),
    "two micro-batches": (
        ("    loss.backward", "    loss.backward(retain_graph=True)\n    loss.backward"),
        {"backward_passes": "2"},
    ),
    "a warm-up": (("for number", "model(data[0]).sum().backward()\nfor number"), {}),
    "evaluation": (
        ("run = ", "model.eval()\nmodel.bias.requires_grad_(False)\nrun = "),
        {"modules": "1 of 1 module in evaluation mode", "trained": "10 numbers, 2 of them frozen"},
    ),
    "dropout": (
        ("run = ", "dropout = torch.nn.Dropout(0.2)\nrun = "),
        {"modules": "training, dropout 0.2"},
    ),
    "buckets": (
        (
            "optimizer = ",
            "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
            "shared = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)\n"
            "with shared.no_sync(): pass\noptimizer = ",
        ),
        {
            "data_parallel": "bucket_bytes_cap 1048576, gradient_as_bucket_view False, find_unused_parameters False, "
            "static_graph False, broadcast_buffers True",
            "gradient_sync": "without some backward passes (no_sync)",
        },
    ),
    "a data loader": (
        ("enumerate(data)", "enumerate(torch.utils.data.DataLoader(data, batch_size=None, pin_memory=False))"),
        {"data_loaders": "num_workers 0, pin_memory False", "samplers": "SequentialSampler"},
    ),
    "a scheduler": (
        ("data = ", "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)\ndata = "),
        {
            "schedulers": "ReduceLROnPlateau (mode min, factor 0.1, patience 3, threshold 0.0001, threshold_mode rel, cooldown 0, min_lr 0, "
            "eps 1e-08)"
        },
    ),
    "a scheduler that is gone": (
        ("data = ", "torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 3)\ndata = "),
        {},
    ),
}


USUAL = {
    "optimizer_kinds": "SGD", "parameters": "torch.float32", "mixed_precision": "none", "data_loaders": "none", "clipping": "none",
    "backward_passes": "1", "modules": "training", "data_parallel": "none", "trained": "10 numbers",
    "gradient_sync": "each backward pass", "schedulers": "none", "recomputation": "none",
}  # fmt: skip


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_program_uses_in_its_first_steps_is_recorded(tmp_path: Path, name: str, graphed: bool) -> None:
    edit, expected = SETTINGS[name]
    program = PROGRAM.replace("torch.randn(STEPS, 8, 4)", "torch.randn(STEPS, 8, 4, dtype=model.weight.dtype)")
    hooked = "torch.set_autocast_dtype, torch.optim.lr_scheduler.LRScheduler.__init__, torch.utils.data.dataloader._BaseDataLoaderIter.__next__"
    program += f"assert not any(hasattr(one, '__wrapped__') for one in ({hooked})), 'timed steps pay for no hook'\n"
    seen = observe(tmp_path, program.replace(*edit) if edit else program, spec_of(graphed=graphed))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    (choices,) = seen.events("choices")
    assert {one: choices["choices"][one] for one in USUAL | expected} == USUAL | expected


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_computed_again_are_recorded(tmp_path: Path, reentrant: bool, graphed: bool) -> None:
    """Compiled code calls no function of torch.utils.checkpoint."""
    again = f"functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant={reentrant})(model, batch)"
    program = f"import functools, torch.utils.checkpoint{PROGRAM}".replace("compile(model", "compile(forward")
    program = program.replace("run = ", f"def forward(batch): return {again}\nrun = ").replace(
        "else model", "else forward"
    )
    program = program.replace("run(batch)", "run(batch.requires_grad_())")
    (choices,) = observe(tmp_path, program, spec_of(graphed=graphed)).events("choices")
    assert choices["choices"]["recomputation"] == "checkpoints"
    # In a backward pass, the reentrant one starts another for each part.
    assert choices["choices"]["backward_passes"] == str(1 + (reentrant and not graphed))


LOADER = "torch.utils.data.DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(SEED), num_workers=WORKERS)"


@pytest.mark.parametrize("graphed", [False, True])
def test_the_batches_of_a_data_loader_are_recorded(tmp_path: Path, graphed: bool) -> None:
    first, same, other = (
        observe(
            tmp_path / str(place),
            PROGRAM.replace("(data)", f"({LOADER.replace('SEED', seed).replace('WORKERS', workers)})"),
            spec_of(graphed=graphed),
        ).events("choices")[0]["choices"]
        for place, (seed, workers) in enumerate([("1", "0"), ("1", "2"), ("2", "0")])
    )
    assert re.fullmatch(r"\w{8} \w{8}", first["batches"]), first
    assert first["batches"] == same["batches"] != other["batches"]
    assert first["samplers"] == "RandomSampler (replacement False, generator seed 1)"


@pytest.mark.parametrize(
    ("steps", "unknown"),
    [(1, set()), (3, {"batches", "samplers"}), (STEPS, {"batches", "samplers", "data_loaders", "schedulers"})],
)
def test_what_begins_after_many_steps_to_warm_up_is_unknown(tmp_path: Path, steps: int, unknown: set[str]) -> None:
    """After three steps with compiled code, steps may be timed. Once readings are processed, hooks are gone."""
    warm = f"""for _ in range({steps}):
    run(data[0]).sum().backward()
    optimizer.step()
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
for number"""
    program = SAYS.replace("for number", warm).replace("(data)", "(torch.utils.data.DataLoader(data, batch_size=None))")
    seen = observe(tmp_path, program, spec_of(graphed=True))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    (choices,) = seen.events("choices")
    assert {"batches", "samplers", "data_loaders", "schedulers"} - choices["choices"].keys() == unknown


def test_the_weights_with_which_a_program_begins_are_recorded(tmp_path: Path) -> None:
    edits = (
        ("lr=0.1)", "lr=0.3)"),
        ("optimizer = ", "torch.rand(1)\noptimizer = "),
        ("model = ", "torch.rand(1)\nmodel = "),
    )
    first, *others = (
        observe(tmp_path / str(place), program, spec_of()).events("choices")[0]["choices"]["weights"]
        for place, program in enumerate([PROGRAM, *(PROGRAM.replace(*edit) for edit in edits)])
    )
    assert re.fullmatch(r"norm \d\.\d+, sums (-?\d\.\d{3}/?){17}", first), first
    assert [one == first for one in others] == [True, True, False], "only other weights count"


def test_settings_that_change_after_the_first_step_are_recorded(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "    print", "    if number > 2: torch.backends.cudnn.benchmark = True; gc.disable()\n    print"
    )
    (_, at_end) = observe(tmp_path, f"import gc{program}", spec_of()).events("choices")
    assert at_end["choices"] == {"torch_at_end": "cudnn_benchmark True, garbage_collection False"}


def test_a_compiled_program_shows_in_which_step_it_compiled(tmp_path: Path) -> None:
    seen = observe(tmp_path, PROGRAM, spec_of(graphed=True))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.phase for one in seen.steps] == ["capture", "settle", "settle"] + ["measure"] * 3 + ["check"] + [
        "measure"
    ] * (STEPS - 7)
    (proof,) = seen.events("proof")
    assert proof["graphs"]["impl"] == "command" and proof["graphs"]["graphs"] == 1
    assert proof["graphs"]["recompilations"] == 0 and proof["graphs"]["compiled"] == 1


@pytest.mark.parametrize(
    ("gradients", "recompilations"), [("torch.no_grad()", 0), ("torch.inference_mode()", 0), ("torch.enable_grad()", 1)]
)
def test_what_is_compiled_for_an_evaluation_is_no_recompilation(
    tmp_path: Path, gradients: str, recompilations: int
) -> None:
    evaluates = f"{SHOW}\n    if number == 8:\n        model.eval()\n        with {gradients}: run(batch[:4])\n        model.train()"
    seen = observe(tmp_path, PROGRAM.replace(SHOW, evaluates), spec_of(graphed=True))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    (proof,) = seen.events("proof")
    assert proof["graphs"]["recompilations"] == recompilations and proof["graphs"]["compiled"] == 2


@pytest.mark.parametrize("where", ["optimizer", "backward"])
def test_what_is_compiled_in_an_optimizer_or_a_backward_pass_is_a_recompilation(tmp_path: Path, where: str) -> None:
    """Gradients are off there, too."""
    makes = """
@torch.compile(backend="eager", dynamic=False)
def scale(values): return values * 1.0
class Optimizer(torch.optim.SGD):
    size = 1
    @torch.no_grad()
    def step(self):
        if WHERE == "optimizer": scale(torch.ones(self.size))
        super().step()
optimizer = Optimizer(model.parameters(), lr=0.1)
data ="""
    program = PROGRAM.replace("optimizer =", "unused =").replace("data =", makes.replace("WHERE", repr(where)), 1)
    hook = "    loss.register_hook(lambda _: (scale(torch.ones(size)), None)[1])\n" if where == "backward" else ""
    program = program.replace(
        "    loss.backward()", f"    optimizer.size = size = 2 if number == 8 else 1\n{hook}    loss.backward()"
    )
    seen = observe(tmp_path, program, spec_of(graphed=True))
    (proof,) = seen.events("proof")
    assert (proof["graphs"]["recompilations"], proof["graphs"]["compiled"]) == (1, 3)


@pytest.mark.parametrize("since", [0, 8])
def test_an_eager_run_that_compiles_does_not_pass_as_eager(tmp_path: Path, since: int) -> None:
    program = PROGRAM.replace("run(batch)", f"(run if number >= {since} else model)(batch)")
    (proof,) = observe(tmp_path, program, spec_of(), compiled=True).events("proof")
    assert proof["graphs"]["impl"] == "command" and proof["graphs"]["graphs"] == 1


BAR = """
import torch
from tqdm import tqdm
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bar = tqdm(torch.randn(STEPS, 8, 4), mininterval=0)
for number, batch in enumerate(bar):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    EARLY
    optimizer.step()
    LATE
    print("truth", loss.item(), norm.item())
"""
"""The bar is drawn again before each step, with the loss of the step before."""
AGAIN = "bar.update(1); bar.refresh(); "
BARS = {
    "before the optimizer": ("bar.set_postfix(loss=loss.item())", "pass"),
    "after the optimizer": ("pass", "bar.set_postfix({'loss': loss})"),
    "after a redraw": ("pass", AGAIN + "bar.set_postfix_str(f'loss={loss}')"),
    "in the title": ("bar.set_description(f'loss {loss}')", "pass"),
    "without a redraw": ("bar.set_postfix(loss=loss, refresh=False)", "pass"),
    "beside an evaluation": ("bar.set_postfix(loss=loss)", "tqdm([], desc='eval').set_postfix(loss=9.0)"),
    "beside a disabled bar": (
        "bar.set_postfix(loss=loss)",
        "tqdm([], desc='eval', disable=True).set_postfix(loss=9.0)",
    ),
    "beside printed lines": ("bar.set_postfix(loss=8.0)", "print({'step': number, 'loss': loss.item()})"),
    "beside a few lines": ("bar.set_postfix(loss=loss)", "number % 5 or print({'step': number, 'loss': loss.item()})"),
}


def truth(seen: Observed) -> list[tuple[float, float]]:
    """Return the loss and the norm of each step, which the program prints in a form that is not read."""
    return [(float(loss), float(norm)) for loss, norm in re.findall(r"truth (\S+) (\S+)", seen.log)]


@pytest.mark.parametrize("name", BARS)
def test_a_bar_counts_when_the_program_gives_it_a_loss_and_not_when_it_is_drawn(tmp_path: Path, name: str) -> None:
    early, late = BARS[name]
    seen = observe(tmp_path, BAR.replace("EARLY", early).replace("LATE", late), spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [(one.loss, one.grad_norm) for one in seen.steps] == truth(seen), "in all digits"


def test_a_loss_that_a_bar_holds_over_steps_is_not_that_of_each(tmp_path: Path) -> None:
    program = BAR.replace("EARLY", "pass").replace("LATE", "number % 3 or bar.set_postfix(loss=loss.item())")
    found = observe(tmp_path, program, spec_of()).diagnosis
    assert found.outcome == "CONFIG" and "no loss of step 1 of its 12 steps" in found.message, found


GAN = """
import torch
torch.manual_seed(0)
critic, generator = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, generator)]
def train(one, optimizer, batch):
    loss = one(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 10.0)
    if SHOW == "early" and one is critic: print("loss", loss.item())
    optimizer.step()
    return loss.item(), norm.item()
for number, batch in enumerate(torch.randn(STEPS, 8, 4)):
    if FIRST and number % 5 == AT: train(generator, optimizers[1], batch)
    loss, norm = train(critic, optimizers[0], batch)
    if not FIRST and number % 5 == AT: train(generator, optimizers[1], batch)
    if SHOW == "late": print("loss", loss)
    print("truth", loss, norm)
"""


@pytest.mark.parametrize("shows", ["early", "late"])
@pytest.mark.parametrize(("first", "at"), [(True, 0), (True, 3), (False, 1), (False, 2), (False, 4)])
def test_an_optimizer_may_step_in_some_steps_only(tmp_path: Path, first: bool, at: int, shows: str) -> None:
    program = GAN.replace("FIRST", str(first)).replace("AT", str(at)).replace("SHOW", repr(shows))
    seen = observe(tmp_path, program, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [(one.loss, one.grad_norm) for one in seen.steps] == truth(seen)


UNFREEZES = """
import torch
torch.manual_seed(0)
body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
parts = [*head.parameters()]
optimizer = torch.optim.SGD(parts, lr=0.1)
body.requires_grad_(False)
for number, batch in enumerate(torch.randn(STEPS, 8, 4)):
    if number == WHEN:
        body.requires_grad_(True)
        parts = [*body.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(parts, lr=0.1)
    loss = head(body(batch)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in parts])
    if EARLY: print("loss", loss.item())
    optimizer.step()
    if not EARLY: print("loss", loss.item())
    print("truth", loss.item(), norm.item())
"""


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("when", [2, 3, 8, STEPS - 2])
def test_an_optimizer_may_replace_another_one(tmp_path: Path, when: int, early: bool) -> None:
    seen = observe(tmp_path, UNFREEZES.replace("WHEN", str(when)).replace("EARLY", str(early)), spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    losses, norms = zip(*truth(seen), strict=True)
    assert [one.loss for one in seen.steps] == list(losses)
    assert [one.grad_norm for one in seen.steps] == pytest.approx(norms)
    sketched = [event["sketch"]["step"] for event in seen.events("gradients")]
    assert sketched == list(range(5)), "each step before the timed ones"


ALWAYS = (
    PROGRAM.replace("model =", "torch._dynamo.config.recompile_limit = 99\nmodel =", 1)
    .replace("run(batch)", "run(batch[: number + 1])")
    .replace("randn(STEPS, 8", "randn(STEPS, STEPS")
)
BAD = {
    "ends before step 1": ("raise SystemExit('no such data')", "FAILED", "before its first optimizer step"),
    "fails before step 1": ("import torch\nopen('/no/such/file')", "FAILED", "No such file"),
    "ends early": (PROGRAM.replace("(STEPS", "(STEPS - 4"), "CONFIG", r"after 8 of 12 optimizer steps.*\{steps\}"),
    "takes turns": (TWO.replace("    optimizer.step()\n    second", "    (optimizer if number % 2 else second)"), "CONFIG", "after 6 of 12 steps of its 2 optimizers.*launch.observe.step"),
    "never captures": (PROGRAM, "CAPTURE_FAILED", "made no compiled function"),
    "compiles what Dynamo skips": (PROGRAM.replace("Linear(4, 2)", "LSTM(4, 2)").replace("run(batch)", "run(batch)[0]"), "CAPTURE_FAILED", "made no compiled function.*Dynamo does not support RNN, GRU, or LSTM"),
    "captures at every step": (ALWAYS, "CAPTURE_FAILED", "still compiled functions.*same shapes"),
    "has an old PyTorch": (PROGRAM.replace("torch.manual", "del torch.nn.utils.get_total_norm\ntorch.manual", 1), "ENVIRONMENT", r"needs PyTorch 2\.6 or later, and its Python has 2\."),
    "prints no metrics": (PROGRAM.replace("print(", "str("), "CONFIG", "shows no loss"),
    "numbers micro-batches": (PROGRAM.replace("(STEPS", "(2 * STEPS").replace("    optimizer", "    if number % 2: optimizer"), "CONFIG", "losses of 2[34] steps in 12 steps"),
    "warms up by steps": (PROGRAM.replace("for number", "model(data[0]).sum().backward()\nfor _ in range(3): optimizer.step()\nfor number"), "CONFIG", "no loss of its first optimizer step, and took 15 of them instead of 12.*launch.observe.step"),
    "prints some metrics": (PROGRAM.replace("    print", "    if number % 5 == 0: print"), "CONFIG", "no loss of step 1 of its"),
    "prints two losses": (PROGRAM + "    print({'step': number, 'loss': 9.0})\n", "CONFIG", "a loss of .* and one of 9 in step 0 and .*: describe the line that counts in command.pattern, or call launch.observe.step"),
    "writes NaN": (PROGRAM.replace("loss.item()", "loss.item() if number < 7 else float('nan')"), "NUMERIC", "loss is nan at step 7"),
    "is killed": (PROGRAM.replace("    print", "    if number == 6: __import__('os').kill(__import__('os').getpid(), 9)\n    print"), "FAILED", "SIGKILL"),
    "raises": (PROGRAM.replace("    print", "    assert number < 6, 'broken'\n    print"), "FAILED", "broken"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_bad_program_has_an_outcome_and_a_fix(tmp_path: Path, name: str) -> None:
    program, outcome, message = BAD[name]
    compiled = name in ("compiles what Dynamo skips", "captures at every step")
    found = observe(
        tmp_path, program, spec_of(graphed=compiled or name == "never captures"), compiled=compiled
    ).diagnosis
    assert found.outcome == outcome, found
    assert re.search(message, found.message), found
    assert found.remedy


def test_a_program_prints_its_stack_when_the_supervisor_asks(tmp_path: Path) -> None:
    """Before the supervisor ends a hanging program, it asks for the stack."""
    asked = PROGRAM.replace(
        SHOW, f"{SHOW}\n    if number == 6: import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    )
    seen = observe(tmp_path, asked, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", "it goes on"
    line = next(number for number, text in enumerate(asked.splitlines(), 1) if "SIGUSR1" in text)
    assert f'File "train.py", line {line} in <module>' in seen.attempt.log(0).read_text()


def test_a_program_that_goes_on_after_its_last_step_loses_nothing(tmp_path: Path) -> None:
    seen = observe(tmp_path, PROGRAM, spec_of(steps=8))
    assert seen.diagnosis.outcome == "COMPLETED" and len(seen.steps) == 8


@pytest.mark.parametrize(
    ("restarts", "said"),
    [("0", "let the command start one"), ("1", "torchrun restarted the program after a rank failed")],
)
def test_a_program_that_trains_again_in_another_process_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: str, said: str
) -> None:
    """torchrun starts a program that failed again, from its last checkpoint."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    fails = PROGRAM.replace("    print", "    if number == 5: os._exit(7)\n    print").replace(
        "data = ", "import os\ndata = "
    )
    twice = f"import os\nif (child := os.fork()) == 0: exec({fails!r})\nos.waitpid(child, 0)\n{PROGRAM}"
    seen = observe(tmp_path, twice, spec_of())
    assert seen.diagnosis.outcome == "CONFIG" and said in seen.diagnosis.message, seen.diagnosis


def test_a_rank_that_the_program_forks_counts_and_other_children_do_not(tmp_path: Path) -> None:
    forks = """
import os
if (child := os.fork()) == 0:
    exec(PROGRAM)
    import atexit; atexit._run_exitfuncs(); os._exit(0)
os.waitpid(child, 0)
"""
    seen = observe(tmp_path / "own", forks.replace("exec(PROGRAM)", f"exec({PROGRAM!r})"), spec_of())
    assert seen.diagnosis.outcome == "COMPLETED" and len(seen.steps) == STEPS
    loader = PROGRAM.replace("data = ", "import os, atexit\ndata = ").replace(
        "    print", "    if number == 5 and os.fork() == 0: atexit._run_exitfuncs(); os._exit(0)\n    print"
    )
    assert observe(tmp_path / "child", loader, spec_of()).diagnosis.outcome == "COMPLETED"


def test_the_environment_names_command_code_image_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE, "docker://site/image:1")
    (tmp_path / "train.py").write_text(PROGRAM)
    first = json.loads(observe(tmp_path, PROGRAM, spec_of(), is_described=True).attempt.environment.read_text())
    (tmp_path / "train.py").write_text(PROGRAM + "\n")
    again = dataclasses.replace(spec_of(), repeat=1)
    sets = (
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.set_num_threads(3)",
        "import os; os.environ['MALLOC_CONF'] = 'retain:true'; os.environ['CUDA_MODULE_LOADING'] = 'LAZY'",
        "optimizer =",
    )
    faster = PROGRAM.replace("optimizer =", "\n".join(sets), 1)
    second = json.loads(observe(tmp_path, faster, again, is_described=True).attempt.environment.read_text())
    assert first["program"]["command"] == "python train.py"
    assert first["packages"]["torch"] == metadata.version("torch")
    assert first["image"] == "docker://site/image:1"
    assert first["digests"]["libraries"] == second["digests"]["libraries"]
    assert first["digests"]["code"] != second["digests"]["code"]
    differing = {name for name, value in first["torch"].items() if second["torch"][name] != value}
    assert differing == {"float32_products", "attention", "threads"}
    assert second["settings"].keys() - first["settings"].keys() == {"MALLOC_CONF"}


BY_HAND = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
graph = torch.cuda.CUDAGraph()
def compute(number):
    model.zero_grad()
    loss = torch.ones(8, 4).mul(model(torch.full((8, 4), 0.1 * number)).sum()).mean()
    loss.backward()
    return loss
for number in range(STEPS):
    if number == 4:
        graph.capture_begin()
        compute(number)
        print({"step": number, "loss": 0.5})
        graph.capture_end()
    if number > 4 and number not in EAGER:
        graph.replay()
    loss = compute(number)
    optimizer.step()
    print({"step": number, "loss": loss.item()})
"""


@pytest.mark.parametrize("eager_steps", [(), (8,)])
def test_replays_of_every_step_are_the_proof(tmp_path: Path, eager_steps: tuple[int, ...]) -> None:
    """The profiler traces three steps after the timed ones."""
    program = BY_HAND.replace("EAGER", repr(eager_steps))
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.phase for one in seen.steps] == ["warmup"] * 4 + ["capture", "settle", "settle"] + ["measure"] * (
        STEPS - 10
    )
    assert [event["phase"] for event in seen.events("enter")] == [
        "init", "warmup", "capture", "settle", "measure", "probe", "teardown"
    ]  # fmt: skip
    (proof,), (probe,) = seen.events("proof"), seen.events("probe")
    stats, steps = GraphStats(**proof["graphs"]), STEPS - 3 - 5
    assert (stats.graphs, stats.expected_replays, stats.launches_per_step) == (1, steps, 1)
    assert stats.replays == steps - (8 in eager_steps) and probe["probe"]["graph_launches"] == 1.0
    assert stats.proven == (8 not in eager_steps)


@pytest.mark.parametrize(
    ("graph", "proven"), [("torch.cuda.CUDAGraph()", True), ("graph", False)], ids=["of its own", "captured again"]
)
def test_a_graph_of_an_evaluation_leaves_the_proof_of_training_as_it_is(
    tmp_path: Path, graph: str, proven: bool
) -> None:
    program = BY_HAND.replace("EAGER", "()").replace(
        "    if number == 4:",
        f"""    if number == 8:
        evaluation = {graph}
        evaluation.capture_begin()
        evaluation.capture_end()
    if number in (8, 10): evaluation.replay()
    if number == 4:""",
    )
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    (proof,) = seen.events("proof")
    stats = GraphStats(**proof["graphs"])
    assert (stats.proven, stats.recompilations) == (proven, 0 if proven else 1)
    assert stats.launches_per_step == 1 and stats.expected_replays == STEPS - 3 - 5


EVALUATES = """
    with torch.no_grad():
        if number == {first}:
            evaluation = torch.cuda.CUDAGraph()
            evaluation.capture_begin()
            evaluation.capture_end()
        if number >= {first} and number % {every} == 0: evaluation.replay()
    if number == 4:"""


@pytest.mark.parametrize(("first", "every"), [(0, 1), (2, 2), (5, 2), (8, 1), (9, 3)])
@pytest.mark.parametrize("eager_steps", [(), (8,), (9, 10)])
def test_graphs_without_gradients_neither_prove_nor_disprove_training(
    tmp_path: Path, first: int, every: int, eager_steps: tuple[int, ...]
) -> None:
    evaluates = EVALUATES.format(first=first, every=every)
    program = BY_HAND.replace("EAGER", repr(eager_steps)).replace("\n    if number == 4:", evaluates)
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS, device="cuda"))
    (proof,) = seen.events("proof")
    stats, steps = GraphStats(**proof["graphs"]), STEPS - 5
    assert (stats.graphs, stats.recompilations, stats.launches_per_step) == (1, 0, 1)
    assert (stats.replays, stats.expected_replays) == (steps - len(eager_steps), steps)
    assert [one.phase for one in seen.steps] == ["warmup"] * 4 + ["capture", "settle", "settle"] + ["measure"] * (
        STEPS - 7
    )
    assert [event["phase"] for event in seen.events("enter")][:5] == ["init", "warmup", "capture", "settle", "measure"]


def test_a_program_that_only_evaluates_from_graphs_has_no_proof(tmp_path: Path) -> None:
    program = BY_HAND.replace("number == 4", "False").replace("number > 4", "number < 0")
    program = program.replace("    if False:", EVALUATES.format(first=0, every=1).replace("number == 4", "False"), 1)
    seen = observe(tmp_path, program.replace("EAGER", "()"), spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert seen.diagnosis.outcome == "CAPTURE_FAILED", seen.diagnosis
    assert "captured graphs only where gradients were off" in seen.diagnosis.message
    assert not GraphStats(**seen.events("proof")[0]["graphs"]).proven


@pytest.mark.parametrize("where", ["backward", "optimizer", "evaluation"])
def test_a_graph_trains_if_it_is_captured_in_a_backward_pass_or_an_optimizer(tmp_path: Path, where: str) -> None:
    calls = {
        "backward": "    loss.register_hook(lambda _: capture(number))\n    loss.backward()",
        "optimizer": "    loss.backward()\n    optimizer.number = number",
        "evaluation": "    loss.backward()\n    with torch.no_grad(): capture(number)",
    }
    makes = """
class Optimizer(torch.optim.SGD):
    number = 0
    @torch.no_grad()
    def step(self):
        capture(self.number)
        super().step()
def capture(number):
    if number == 4:
        graph.capture_begin()
        graph.capture_end()
optimizer = Optimizer(model.parameters(), lr=0.1)
def compute"""
    program = BY_HAND.replace("number == 4", "False").replace("EAGER", "()").replace("def compute", makes, 1)
    program = program.replace("    loss.backward()", calls[where])
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert GraphStats(**seen.events("proof")[0]["graphs"]).proven == (where != "evaluation")


@pytest.mark.parametrize(("mode", "proven"), [("FORWARD", True), ("BACKWARD", True), ("INFERENCE", False)])
def test_inductor_says_whether_a_graph_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, proven: bool
) -> None:
    """It records with gradients off in every mode."""

    class Manager:
        id_to_mode: ClassVar = {7: mode}

        def record_function(self, inputs: Any, function: int) -> None:
            inputs.capture_begin()
            inputs.capture_end()

    modes = SimpleNamespace(INFERENCE="INFERENCE")
    trees = SimpleNamespace(CUDAGraphTreeManager=Manager, CompilationMode=modes)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", cast(Any, trees))
    records = """        import sys
        manager = sys.modules["torch._inductor.cudagraph_trees"].CUDAGraphTreeManager()
        with torch.no_grad(): manager.record_function(graph, 7)
        print({"step": number, "loss": 0.5})
    if number > 4"""
    program = BY_HAND.replace("EAGER", "()")
    captures = program[program.index("        graph.capture_begin()") : program.index("    if number > 4")]
    program = program.replace(captures + "    if number > 4", records)
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert GraphStats(**seen.events("proof")[0]["graphs"]).proven == proven


def test_graphs_of_the_accelerator_count_too(tmp_path: Path) -> None:
    program = BY_HAND.replace("EAGER", "()").replace("torch.cuda.CUDAGraph()", "torch.accelerator.Graph()")
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert GraphStats(**seen.events("proof")[0]["graphs"]).proven


def test_graphs_made_before_the_first_step_count_as_captured_in_it(tmp_path: Path) -> None:
    program = BY_HAND.replace("number == 4", "False").replace("number > 4", "True").replace("EAGER", "()")
    program = program.replace("def compute", "graph.capture_begin(); graph.capture_end()\ndef compute", 1)
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert [one.phase for one in seen.steps][:4] == ["capture", "settle", "settle", "measure"]
    (proof,) = seen.events("proof")
    assert GraphStats(**proof["graphs"]).proven


WHOLE = BY_HAND.replace(
    "    loss = compute(number)\n    optimizer.step()",
    "    loss = compute(number)\n    if number < 4: optimizer.step()",
)


def test_a_graph_that_holds_the_optimizer_needs_the_two_lines(tmp_path: Path) -> None:
    silent = observe(
        tmp_path / "a", WHOLE.replace("EAGER", "()"), spec_of(graphed=True, steps=STEPS - 3, device="cuda")
    )
    assert silent.diagnosis.outcome == "CONFIG" and "launch.observe.step" in silent.diagnosis.message
    says = WHOLE.replace("EAGER", "()").replace(
        '    print({"step": number, "loss": loss.item()})\n', "    step(loss=loss, grad_norm=1.0)\n"
    )
    warms_up = "from launch.observe import step\nimport torch\nold = torch.optim.SGD([torch.zeros(1)], lr=1.0)\n[old.step() for _ in '123']\n"
    seen = observe(tmp_path / "b", warms_up + says, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS - 3))
    assert [one.phase for one in seen.steps][3:6] == ["warmup", "capture", "settle"]


def test_gradients_of_the_first_steps_are_sketched_by_name(tmp_path: Path) -> None:
    program = BY_HAND.replace("EAGER", "()")
    right, wrong = (
        observe(tmp_path / name, text, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
        for name, text in (
            ("a", program),
            (
                "b",
                program.replace(
                    "    optimizer.step()", "    if number > 4: model.weight.grad *= 2\n    optimizer.step()"
                ),
            ),
        )
    )
    sketches = [[from_json(StepSketch, event["sketch"]) for event in one.events("gradients")] for one in (right, wrong)]
    assert [[one.step for one in each] for each in sketches] == [list(range(7))] * 2, "none of a timed step"
    before, after = ({one.step: {row.name: row for row in one.gradients} for one in each} for each in sketches)
    assert list(before[4]) == ["weight", "bias"]
    assert before[4] == after[4]
    assert after[5]["weight"].distance(before[5]["weight"]) == pytest.approx(before[5]["weight"].norm, rel=1.0)
    assert after[5]["bias"] == before[5]["bias"]


@pytest.mark.parametrize(("graphed", "sketched"), [(False, 16), (True, 7)])
def test_a_long_eager_run_sketches_every_step_in_which_a_program_may_first_replay(
    tmp_path: Path, graphed: bool, sketched: int
) -> None:
    """A program may capture after many eager steps, as those of data parallelism. Steps that sketches slow down are not timed."""
    program = PROGRAM.replace("run = ", "late = ").replace("STEPS", "100")
    program = program.replace("    loss = run(", "    run = late if number > 3 else model\n    loss = run(")
    seen = observe(tmp_path, program, spec_of(graphed=graphed, steps=100))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [event["sketch"]["step"] for event in seen.events("gradients")] == list(range(sketched))
    phases = [one.phase for one in seen.steps]
    begins = {
        False: ["warmup"] * 3 + ["settle"] * 2 + ["check"] * 11,
        True: ["warmup"] * 4 + ["capture"] + ["settle"] * 2,
    }
    assert phases[: sketched + 1] == [*begins[graphed], "measure"]
    assert phases[sketched:].count("check") == 1, "the step after the digest in the middle"


CRITIC = """
import torch
from launch.observe import step
torch.manual_seed(0)
critic, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, critic, critic, model)]
run = torch.compile(model, backend="eager", dynamic=False) if COMPILE else model
for batch in torch.randn(STEPS, 8, 4):
    for optimizer, one in zip(optimizers, (critic, critic, critic, run)):
        optimizer.zero_grad()
        loss = one(batch).square().mean()
        loss.backward()
        optimizer.step()
    step(loss=loss, grad_norm=1.0)
"""


def test_sketches_belong_to_the_steps_that_the_program_announces(tmp_path: Path) -> None:
    """The critic steps three times in each training step. The first of these steps were counted before the announcement."""
    found = []
    for graphed in (False, True):
        seen = observe(tmp_path / str(graphed), CRITIC, spec_of(graphed=graphed))
        problems: list[str] = []
        events = analysis.records.events.read_events(seen.attempt, 1, problems)[0]
        assert not problems and seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
        sketches = [from_json(StepSketch, event["sketch"]) for event in events if event["kind"] == "gradients"]
        found.append({(one.step, row.name): row for one in sketches for row in one.gradients})
    eager, graphed = found
    assert {name for _, name in eager} == {"weight", "bias", "weight (2)", "bias (2)"}
    assert {step for step, _ in eager} == {*range(5)} and {step for step, _ in graphed} == {*range(3)}
    assert all(eager[place].distance(row) < 1e-6 for place, row in graphed.items())
