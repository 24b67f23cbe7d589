"""Test advice from a recipe to its block of YAML, on a CPU with two ranks."""

from __future__ import annotations

from typing import Any

from launch.common.atomic_files import read_json
from tests.integration.host import Host, program_recipe, recipe
from tests.integration.test_user_command import GRAPHS, PROGRAM, RUN
from tests.schemas import validated

MOE = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 8,
    "vocab_size": 256, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8,
}  # fmt: skip


def routed(**fields: Any) -> dict[str, Any]:
    """Return a mixture of experts whose dispatcher receives sizes that depend on the router's choices. Its tokens are
    not those of the Python text corpus, in which two steps may have equal sizes by chance."""
    written = recipe("routed", steps=500, graphed=True, wandb={"mode": "offline"}, **fields)
    data = {"kind": "synthetic"}
    return {**written, "model": MOE, "data": data, "parallelism": {"dp": 2, "ep": 2, "dispatcher": "alltoall"}}


def test_a_second_advise_reuses_the_runs_on_disk(host: Host) -> None:
    path = host.write(routed(cuda_graph={"impl": "full_iteration"}))
    first = host.run("advise", path, "--executor", "local", seconds=600)
    assert first.returncode == 0 and first.stderr == "", first.stderr
    assert "routed-advice: 1 cell to run (1 run in 1 bundle)" in first.stdout
    limits = "on a CPU the advice will not say whether graphs help. Fix: run it on a host with a GPU"
    assert limits in first.stdout.partition("1 run to start")[0]
    assert "There are no CUDA graphs on a CPU" in first.stdout
    assert "`launch/engines/torch_native/moe/token_dispatcher.py:" in first.stdout, "the line that sizes what arrives"
    sweep = host.sweep("routed-advice")
    text = (sweep.report / "advice.md").read_bytes()
    assert text.decode() in first.stdout
    assert not sweep.tracking.exists(), "nothing is tracked"

    again = host.run("advise", path, "--executor", "local", "--json")
    assert again.returncode == 0 and "1 on disk" in again.stderr
    assert (sweep.report / "advice.md").read_bytes() == text
    (workload,) = validated("advise", again.stdout)["workloads"]
    assert workload == read_json(sweep.report / "advice.json")["workloads"][0]
    assert (workload["label"], workload["device"], workload["worth"]) == ("eager", "cpu", "unknown")
    assert {finding["kind"] for finding in workload["findings"]} == {"shape"}
    assert workload["points"] == [] and "torch_native.impl" in [one["rule"] for one in workload["rejected"]]
    assert host.states("routed-advice") == {next(iter(host.states("routed-advice"))): "COMPLETED"}


def test_what_failed_is_advised_by_the_rules_alone(host: Host) -> None:
    """The command fails. It says why nothing was measured, and what can be swept nevertheless."""
    path = host.write(recipe("wild", steps=30, graphed=True, training={"learning_rate": 1e30}))
    done = host.run("advise", path, "--executor", "local", seconds=600)
    assert done.returncode == 3
    assert "**Not measured:** its run ended NUMERIC in" in done.stdout
    assert "- {cuda_graph.impl: torch_compile}" in done.stdout


def test_a_users_program_is_advised_from_its_eager_run(host: Host) -> None:
    """Its eager command runs once under the observer. On a CPU only its operators are inspected."""
    changes = "    data[data > step / 32].sum()\n    optimizer.zero_grad()\n"
    (host.folder / "train.py").write_text(PROGRAM.replace("    optimizer.zero_grad()\n", changes))
    path = host.write(program_recipe("mine", RUN, GRAPHS))
    first = host.run("advise", path, "--executor", "local")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "on a CPU the advice will not say whether graphs help. Fix" in first.stdout
    assert "There are no CUDA graphs on a CPU" in first.stdout
    assert (
        "| `train.py:11` in `<module>`: `data[data > step / 32].sum()` | a shape depends on the data: " in first.stdout
    )
    assert "Where the host waits shows only on a GPU." in first.stdout
    assert "  graphs:\n    none: []\n    compiled: [--compile]\n" in first.stdout
    (spec,) = (read_json(run / "spec.json") for run in (host.sweep("mine-advice").root / "runs").iterdir())
    assert (spec["training"]["steps"], spec["inspect"], spec["cuda_graph"]["impl"]) == (26, True, "none")

    again = host.run("advise", path, "--executor", "local", "--json")
    assert again.returncode == 0 and "1 on disk" in again.stderr
    (workload,) = validated("advise", again.stdout)["workloads"]
    assert ([one["kind"] for one in workload["findings"]], workload["worth"]) == (["shape"], "unknown")
    assert "synchronisation" not in workload["sought"]
    assert workload["points"] == [{"command.graphs.compiled": ["--compile"]}]
