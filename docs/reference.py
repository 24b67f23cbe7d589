"""Write the tables of the reference from the code: `python -m docs.reference`.

Each table stands in a page of this folder between two comments, ``<!-- NAME of docs/reference.py -->`` and ``<!-- end -->``. The
meaning of a field is written by hand in its row. This program keeps it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from launch.common.command_line import Parser
from launch.contract import bundle, outcomes, paths, plan
from launch.contract.exit_codes import OF_EVERY_COMMAND, OWN, ExitCode
from launch.contract.records import (
    clocks,
    events,
    gpu_rates,
    graph_stats,
    inspection,
    kernels,
    memory,
    probe,
    sketch,
    step_check,
    step_metrics,
)
from launch.failures.classes import EXCEPTION_CLASSES, FAILURE_CLASSES
from launch.support import SUPPORT, megatron
from launch.support.rule import RELEASES, Rule
from orchestrator.cli.arguments import PROGRAM, add_store
from orchestrator.cli.verbs import VERBS
from orchestrator.recipe.expand import expand
from orchestrator.recipe.field_check import Schema
from orchestrator.recipe.fields import RECIPE, SECTIONS, TopLevel
from orchestrator.recipe.recipe import load
from orchestrator.rules import TABLES
from orchestrator.targets.profile import SCHEMA as PROFILE
from orchestrator.targets.profile import Profile

DOCS = Path(__file__).resolve().parent
PACKAGES = ("orchestrator", "analysis", "launch")
BLOCK = re.compile(r"(<!-- ([^\n]+) of docs/reference\.py -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = (
    "architecture",
    "choosing_a_scope",
    "clusters",
    "commands",
    "failures",
    "recipes",
    "records",
    "rules",
    "upstream_faults",
)
MORE_ON_VERBS = {
    "advise": "advise", "bisect": "bisect", "compare": "compare", "doctor": "clusters", "export": "megatron", "init": "megatron",
    "wrap": "your_own_job",
}  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# --- the command line -----------------------------------------------------------------------------------------------


def verbs_table() -> str:
    return table(("verb", "what it does"), ((f"[`{verb}`](#{verb})", summary) for verb, summary in VERBS.items()))


def verbs_with_options() -> str:
    return "\n\n".join(f"### {verb}\n\n{_describe_verb(verb)}" for verb in VERBS)


def _describe_verb(verb: str) -> str:
    module = import_module(f"orchestrator.cli.verbs.{verb}")
    parser = Parser(add_help=False)
    module.add_arguments(parser)
    add_store(parser)
    page = MORE_ON_VERBS.get(verb)
    more = f" More: [{page}.md]({page}.md)." if page else ""
    summary = f"{VERBS[verb][0].upper()}{VERBS[verb][1:]}. {getattr(module, 'NOTE', '').strip()}".strip()
    # argparse offers its arguments only under this name.
    options = table(("argument", "meaning"), map(_describe_argument, parser._actions))
    return f"{summary}{more}\n\n    {PROGRAM} {module.EXAMPLE}\n\n{options}"


def _describe_argument(action: Any) -> tuple[str, str]:
    metavar = action.metavar or action.dest
    value = "\\|".join(action.choices or ()) or (metavar if isinstance(metavar, str) else " ".join(metavar))
    words = f"{value} ..." if action.nargs in ("*", "+") else value
    if action.option_strings:
        words = f"{action.option_strings[-1]} {'' if action.nargs == 0 else words}".rstrip()
    return f"`{words}`", (action.help or "") % vars(action)


def exit_codes() -> str:
    rows = [("every command", int(code), meaning) for code, meaning in OF_EVERY_COMMAND.items()]
    commands: dict[tuple[tuple[ExitCode, str], ...], list[str]] = {}
    for command, own in OWN.items():
        commands.setdefault(tuple(own.items()), []).append(f"`{command}`")
    rows += [(", ".join(names), int(code), meaning) for own, names in commands.items() for code, meaning in own]
    return table(("command", "code", "meaning"), rows)


# --- fields of recipes and profiles -----------------------------------------------------------------------------------


def fields_table(schema: Schema, cls: type, page: str) -> str:
    """Return the table of a section's fields. Their meanings come from the table on ``page``, and so do rows that
    describe no field."""
    rows = [line.strip("| ").split(" | ", 3) for line in page.splitlines() if line.startswith("| ")][2:]
    written = {row[0].strip("`"): row for row in rows}
    defaults = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
    }
    names = [name for name in schema.fields if (cls, name) != (Profile, "name")]
    if missing := [name for name in names if name not in written]:
        raise SystemExit(
            f"write rows with the meaning of {', '.join(missing)} into the table: | `name` | | | meaning |"
        )
    of_fields = [
        (f"`{name}`", schema.describe_type(name), f"`{_spell(defaults[name])}`", written[name][3]) for name in names
    ]
    others = [row for name, row in written.items() if name not in schema.fields]
    return table(("field", "takes", "default", "meaning"), [*of_fields, *others])


def _spell(default: object) -> str:
    return json.dumps(list(default) if isinstance(default, tuple) else default)


def _fields_of(section: str) -> Callable[[str], str]:
    return lambda page: fields_table(RECIPE.sections[section], SECTIONS[section], page)


def shipped_recipes() -> str:
    folder = DOCS.parent / "recipes"
    files = [*sorted(folder.glob("*.yaml")), *sorted((folder / "exhibits").glob("*.yaml"))]
    return table(("recipe", "question", "engine", "runs on"), map(_describe_recipe, files))


def _describe_recipe(file: Path) -> tuple[str, str, str, str]:
    text = file.read_text()
    header = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    question = re.sub(r"^(Exhibit|The demo): ", "", re.split(r"(?<=[.?])\s", header)[0])
    recipe: Mapping[str, Any] = yaml.safe_load(text)
    name = file.stem if file.parent.name == "recipes" else f"exhibits/{file.name}"
    return f"`{name}`", question[0].upper() + question[1:], recipe.get("engine", "torch_native"), _place(recipe)


def _place(recipe: Mapping[str, Any]) -> str:
    resources = recipe.get("resources", {})
    gpus, nodes = resources.get("gpus_per_node", 0), resources.get("nodes", 1)
    on_each = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    return "any machine" if gpus == 0 else on_each if nodes == 1 else f"{nodes} nodes of {on_each}"


# --- records --------------------------------------------------------------------------------------------------------

RECORDS: Mapping[str, tuple[type, ...]] = {
    "outcome.json": (outcomes.Outcome,),
    "metrics.jsonl": (step_metrics.StepMetrics,),
    "events/rank<r>.jsonl": (
        memory.Memory, clocks.Clocks, graph_stats.GraphStats, probe.Probe, probe.Launches, gpu_rates.GpuRates,
        sketch.ChangedTensor, sketch.Sketch,
        step_check.StepCheck, step_check.TensorDifference, step_check.RoutingDifference, step_check.LayerResult,
        inspection.Inspection, inspection.Finding, kernels.Kernels, kernels.KernelTime,
    ),
    "plan.json": (plan.Plan, plan.Cell, plan.PlannedBundle, plan.Reason),
    "bundle.json": (bundle.BundleOrder, bundle.Step),
}  # fmt: skip
EVENTS = (inspect.getdoc(events) or "").partition("\n\n")[2]


def files_of_a_sweep() -> str:
    tree = (inspect.getdoc(paths) or "").partition(":\n\n")[2]
    return f"```text\n{textwrap.dedent(tree)}\n```"


def records() -> str:
    return "\n\n".join(
        f"### `{name}`\n\n"
        + (f"{EVENTS}\n\n" if name.startswith("events") else "")
        + "\n\n".join(map(_describe_record, classes))
        for name, classes in RECORDS.items()
    )


def _describe_record(cls: type) -> str:
    attributes = [(f"`{name}: {kind}`", meaning) for name, kind, meaning in _attributes(cls)]
    plain = ", ".join(field for field, meaning in attributes if not meaning)
    lines = [f"- {field}: {meaning}" for field, meaning in attributes if meaning]
    return "\n".join((f"**{cls.__name__}**. {inspect.getdoc(cls)}\n", *([f"- {plain}"] if plain else []), *lines))


def _attributes(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and docstring of each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    for field, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            said = behind.value.value if isinstance(behind, ast.Expr) else ""
            yield ast.unparse(field.target), ast.unparse(field.annotation), " ".join(said.split())


def json_objects() -> str:
    objects = json.loads((DOCS / "schemas.json").read_text())["$defs"].values()
    return table(
        ("printed by", "fields that stay"),
        ((each["description"], ", ".join(f"`{name}`" for name in each["required"])) for each in objects),
    )


# --- upstream faults ------------------------------------------------------------------------------------------------

SILENT = {
    "megatron.precision": "observed",
    "megatron.router_bias": "observed",
    "megatron.recompute_norm": "seen on a CPU",
    "megatron.tp": "seen on a CPU",
    "megatron.overlap_moe_expert_parallel_comm": "seen on a CPU",
}
"""The evidence for the silent faults of Megatron-Core that these rules reject, or that the engine corrects."""


IN_0_16 = {"megatron.router_bias": "read; with 2.11 absent, seen on an H200"}
"""The evidence for faults of 0.16.1 that nobody has seen in it."""
IN_0_19 = {
    "megatron.local_inputs": "seen on an H200",
    "megatron.yarn_positions": "seen on an H200",
    "megatron.fused_gradients": "seen on an H200, with Transformer Engine 2.11",
    "megatron.precision": "as an error, seen on an H200",
    "megatron.router_bias": "seen on an H200",
    "megatron.tp": "seen on a CPU",
    "megatron.overlap_moe_expert_parallel_comm": "seen on a CPU",
}
"""The evidence that 0.19.2 has, or does not have, a fault of 0.16.1."""
WITHOUT_RULE = (
    (
        "`perform_initialization=False` drops the marks of split parameters",
        "present",
        "absent, but for sinks (read)",
        "-",
    ),
    ("an expert's second bias is summed over tensor-parallel ranks", "present", "present (read)", "-"),
    ("transfers of interleaved stages on two ranks are mixed up", "present", "present (read)", "CPU"),
    ("warm-up passes of a local capture count into the experts' load", "present (read)", "absent (read)", "-"),
    ("a local graph draws from the default generator", "present", "present (read)", "two GPUs"),
    ("local graphs leave the process in warm-up", "present (read)", "absent (read)", "-"),
    (
        "gradient accumulators are on a different stream than the step's",
        "present",
        "present (read), absent for whole steps",
        "-",
    ),
    ("the copies of a whole step wait for nothing", "present", "absent (read)", "-"),
    ("weight decay without its scheduler decays norms and biases", "present", "present (read)", "-"),
    ("token dispatchers keep the last micro-batch's graph", "present", "present (read)", "-"),
    ("`get_batch_on_this_cp_rank` without a group splits by the global rank", "absent", "present", "CPU"),
    (
        "HybridEP with a rank capacity and no paged stash drops tokens",
        "absent: it has no rank capacity",
        "present (read)",
        "-",
    ),
    ("graphs of an image encoder's attention leave out its rotary embeddings", "absent", "present (read)", "one GPU"),
)
"""Faults of Megatron-Core that no rule rejects, as the page describes them."""


def faults_by_release() -> str:
    rules = [*megatron.KNOWN_FAULTS, *megatron.SILENT_REFUSALS, *megatron.CORRECTED]
    head = ("fault", *(f"megatron-core {release}" for release in RELEASES), "runs on")
    return table(head, [*map(_releases_of, rules), *WITHOUT_RULE])


def _releases_of(fault: Rule) -> tuple[str, ...]:
    known = {
        r: f" ({told[fault.id]})" for r, told in zip(RELEASES, (IN_0_16, IN_0_19), strict=True) if fault.id in told
    }
    words = (f"{'present' if r in fault.releases else 'absent'}{known.get(r, '')}" for r in RELEASES)
    return f"`{fault.id}`: {fault.statement.partition(' (observed')[0]}", *words, _runs_on(fault)


def _runs_on(fault: Rule) -> str:
    """Return the least hardware on which the fault was seen, or on which its exhibit runs."""
    if fault.id in SILENT:
        return "CPU" if SILENT[fault.id] == "seen on a CPU" else "one GPU"
    specs = [cell.spec for file in _exhibits(fault) for cell in expand(load(file), "cuda") if fault.judge(cell.spec)]
    return {1: "one GPU", 2: "two GPUs"}[min(spec.parallelism.world_size for spec in specs)]


def known_faults() -> str:
    return "\n\n".join(map(_describe_fault, megatron.KNOWN_FAULTS))


def _describe_fault(fault: Rule) -> str:
    name = fault.id.removeprefix("megatron.")
    rows = [
        ("symptom", f"{fault.statement[0].upper()}{fault.statement[1:]}"),
        ("releases", fault.versions),
        ("where", fault.source),
        ("avoid it", fault.fix),
        *([("mend", f"`cuda_graph: {{mend: [{name}]}}` repairs it in a cell")] if name in megatron.MENDS else []),
        *(("smallest recipe", f"`recipes/exhibits/{file.name}`{_verdict_of(file)}") for file in _exhibits(fault)),
    ]
    return f"### `{fault.id}`\n\n{table(('', ''), rows)}"


def _exhibits(fault: Rule) -> Iterator[Path]:
    """Yield the exhibits with a cell that has the fault."""
    for file in sorted((DOCS.parent / "recipes" / "exhibits").glob("*.yaml")):
        if any(fault.judge(cell.spec) for cell in expand(load(file), "cuda")):
            yield file


def _verdict_of(exhibit: Path) -> str:
    """Return what the report of an exhibit says of the cells that DIVERGED, if it ran."""
    report = DOCS / "results" / exhibit.stem / "report.json"
    if not report.exists():
        return " (no report yet)"
    cells = [
        cell for cell in json.loads(report.read_text())["cells"] if (cell["verdict"] or {}).get("verdict") == "DIVERGED"
    ]
    said = "; ".join(f"`{cell['label']}` DIVERGED, {cell['verdict']['reason']}" for cell in cells)
    return f". On an H200: {said} ([report](results/{exhibit.stem}/report.md))"


def silent_refusals() -> str:
    return table(
        ("rule", "symptom", "releases", "known", "avoid it", "where"),
        (
            (f"`{rule.id}`", rule.statement, rule.versions, SILENT[rule.id], rule.fix, rule.source)
            for rule in megatron.SILENT_REFUSALS
        ),
    )


# --- measurements ---------------------------------------------------------------------------------------------------

MEASURED = {
    "launch_bound": "A dense model whose host is the limit, one H200, torch_native",
    "launch_bound_compiled": "The same model compiled whole, one H200, torch_native",
    "qwen3_8l": "Eight layers of Qwen3-30B-A3B, one H200, torch_native",
    "qwen3_8l_parallel": "The same over four H200s",
    "qwen3_8l_megatron": "The same on Megatron-Core, one H200",
    "qwen3_8l_megatron_parallel": "The same on Megatron-Core, over four H200s",
    "gpt_oss_20b_2gpu_engines": "GPT-OSS-20B whole, over two H200s, both engines",
    "hybrid_mamba": "A hybrid of Mamba-2 layers, attention and MLPs, one H200, Megatron-Core 0.19",
    "llama3_8l": "Eight layers of Llama 3 8B, one H200, Megatron-Core 0.19",
    "two_nodes": "A small mixture of experts over two nodes, four H200s, torch_native",
}
SHORTER = {
    "moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True": "padded experts",
    "schedule=interleaved": "interleaved",
    ", sequence_parallel=True": "",
    "engine=megatron, dispatcher=alltoall, compile=none, deterministic=false": "Megatron-Core",
}


def measured_scopes() -> str:
    head = ("captured", "settings", "losses", "step ms, eager to graphed", "speed-up", "memory")
    return "\n\n".join(
        f"**{title}** ([report](results/{name}/report.md))\n\n{table(head, _measured(name))}"
        for name, title in MEASURED.items()
    )


def _measured(name: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each graphed cell of a report that has a speed-up."""
    cells = json.loads((DOCS / "results" / name / "report.json").read_text())["cells"]
    eager = {cell["workload_id"]: cell["memory"]["peak"] for cell in cells if cell["impl"] == "none"}
    for cell in cells:
        if speed := cell["speed"]:
            settings = cell["label"].partition(", ")[2]
            for long, short in SHORTER.items():
                settings = settings.replace(long, short)
            added = (cell["memory"]["peak"] - eager[cell["workload_id"]]) / 2**30
            times = f"{speed['eager_ms']:.1f} to {speed['graphed_ms']:.1f}"
            yield _captured(cell), settings, cell["verdict"]["verdict"], times, _ratio(speed), f"{added:+.2f} GiB"


def _captured(cell: Mapping[str, Any]) -> str:
    if cell["impl"] == "full_iteration":
        return "`full_iteration`" + (" with the optimizer" if ".optimizer" in cell["label"] else "")
    mended = ", mended" if ".mended" in cell["label"] else ""
    return f"`{cell['impl']}`: {', '.join(cell['scope']) or 'whole layers'}{mended}"


def _ratio(speed: Mapping[str, Any]) -> str:
    if speed["low"] is None:
        return f"{speed['ratio']:.2f}x"
    return f"{speed['ratio']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f}) {speed['verdict'] or ''}".rstrip()


# --- modules --------------------------------------------------------------------------------------------------------


def modules() -> str:
    """Return the tree of the three packages: each module with the beginning of its docstring."""
    return "\n".join(("```", *(line for name in PACKAGES for line in _tree(DOCS.parent / name, 0)), "```"))


def _tree(folder: Path, depth: int) -> Iterator[str]:
    yield _line(depth, f"{folder.name}/", folder / "__init__.py")
    yield from (_line(depth + 1, file.name, file) for file in sorted(folder.glob("*.py")) if file.name != "__init__.py")
    for each in sorted(folder.iterdir()):
        if any(each.rglob("*.py")):
            yield from _tree(each, depth + 1)


def _line(depth: int, name: str, module: Path) -> str:
    """Return the line of a module. Its text is the beginning of the docstring's first sentence, as far as it fits."""
    said = ast.get_docstring(ast.parse(module.read_text())) if module.exists() else None
    words = textwrap.shorten(re.split(r"\.\s", f"{said or ''} ")[0], 100, placeholder=" ...")
    return f"{'  ' * depth + name:<30} # {words}".rstrip(" #")


# --- failures -------------------------------------------------------------------------------------------------------


def failure_classes() -> str:
    return table(
        ("class", "outcome", "evidence", "infrastructure", "skips repeats", "fix"),
        (
            (f"`{row.name}`", row.outcome, "exception" if row in EXCEPTION_CLASSES else "ending",
             "yes" if row.infrastructure else "", "yes" if row.repeats_alike else "", row.fix)
            for row in FAILURE_CLASSES
        ),
    )  # fmt: skip


# --- rules ----------------------------------------------------------------------------------------------------------


def rule_tables(tables: Mapping[str, Iterable[Rule]], heading: str) -> str:
    head = ("rule", "what must hold", "engines", "versions", "fix", "source")
    return "\n\n".join(
        f"{heading} {title}\n\n"
        + table(
            head,
            (
                (f"`{rule.id}`", rule.statement, ", ".join(rule.engines), rule.versions, rule.fix, rule.source)
                for rule in rules
            ),
        )
        for title, rules in tables.items()
    )


BLOCKS: Mapping[str, Callable[[str], str]] = {
    "verbs": lambda _: verbs_table(),
    "options": lambda _: verbs_with_options(),
    "exit codes": lambda _: exit_codes(),
    "shipped recipes": lambda _: shipped_recipes(),
    "fields at the top": lambda page: fields_table(RECIPE.top, TopLevel, page),
    **{f"fields of {section}": _fields_of(section) for section in SECTIONS},
    "fields of a profile": lambda page: fields_table(PROFILE, Profile, page),
    "faults by release": lambda _: faults_by_release(),
    "known faults": lambda _: known_faults(),
    "silent refusals": lambda _: silent_refusals(),
    "measured scopes": lambda _: measured_scopes(),
    "modules": lambda _: modules(),
    "failure classes": lambda _: failure_classes(),
    "rules": lambda _: rule_tables(TABLES, "##"),
    "engine rules": lambda _: rule_tables(SUPPORT, "###"),
    "files of a sweep": lambda _: files_of_a_sweep(),
    "records": lambda _: records(),
    "json objects": lambda _: json_objects(),
}
"""The function that writes the text between two comments, from the text that is there."""


def with_tables(page: str) -> str:
    """Return the text of a page with tables from the code."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](found[0])}\n\n{found[3]}", page)


def main() -> None:
    for name in PAGES:
        page = DOCS / f"{name}.md"
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
