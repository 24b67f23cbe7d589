"""Recipe: what the user writes, read from YAML and checked whole before anything else happens.

Every problem is reported at once, each with its file and line, the key, the value and the way out. Fields are typed by
the frozen dataclasses below and in launch.spec, which OmegaConf takes as structured configs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.record import Expectation, Margins
from launch.redact import is_secret_name
from launch.spec import CudaGraph, Data, Model, Parallelism, Training
from orchestrator.errors import InputError, Problem, wrong
from orchestrator.schema import Schema, suggestion
from orchestrator.spelling import normalize_keys
from orchestrator.yaml_lines import LineIndex

Tree = dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What a run is given. ``gpus_per_node`` 0 asks for one device a rank, on one node."""

    nodes: int = 1
    gpus_per_node: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = 1
    minutes_per_run: float = 30.0
    hang_minutes: float = 10.0


@dataclass(frozen=True)
class Tracking:
    """Weights & Biases. ``auto`` is online where there is a key and a network, else offline."""

    project: str = "cuda-graphs"
    entity: Optional[str] = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Head:
    """The fields that stand alone at a recipe's top."""

    name: str = ""
    engine: Literal["torch_native", "megatron"] = "torch_native"
    repeats: int = 2


SECTIONS: Mapping[str, type] = {
    "model": Model,
    "parallelism": Parallelism,
    "training": Training,
    "data": Data,
    "cuda_graph": CudaGraph,
    "expect": Expectation,
    "equivalence": Margins,
    "resources": Resources,
    "wandb": Tracking,
}
NOT_SWEPT = ("name", "repeats", "equivalence", "wandb", "sweep")
"""What is one for the whole sweep, and so cannot be an axis."""

_HEAD = Schema(Head)
_SCHEMAS = {name: Schema(cls) for name, cls in SECTIONS.items()}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Recipe:
    """A recipe whose every field has been checked. Trees hold plain values, in this project's spelling."""

    name: str
    file: Path
    base: Tree
    """Every section that can be swept, as written (defaults not filled in)."""
    axes: tuple[tuple[Tree, ...], ...]
    """The sweep's axes: each a list of patches to ``base``; cells are their product."""
    repeats: int
    equivalence: Margins
    wandb: Tracking
    text: str
    """The recipe with its overrides, as YAML."""
    presets: Mapping[str, Tree] = field(default_factory=dict)
    """The model presets that it names, by name."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``path`` with ``overrides`` (OmegaConf dotlist: ``training.steps=50``).

    Raises:
        InputError: with every problem of the recipe.
    """
    tree = _read(path, overrides)
    return _Reader(path, tree, LineIndex(path)).recipe()


def _read(path: Path, overrides: Sequence[str]) -> Tree:
    for override in overrides:
        if "=" not in override:
            raise wrong(
                "", f"override {override!r} is not of the form key=value", "write for example training.steps=50"
            )
    try:
        written = OmegaConf.load(path)
        if not OmegaConf.is_dict(written):
            raise wrong(path.name, "a recipe is a mapping of fields to values", "see recipes/tiny_moe.yaml")
        merged = OmegaConf.merge(written, OmegaConf.from_dotlist(list(overrides)))
        tree = OmegaConf.to_container(merged, resolve=True)
    except FileNotFoundError:
        others = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise wrong(str(path), "no such recipe", suggestion(path.name, others)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(str(path), f"cannot be read ({error})") from error
    except OmegaConfBaseException as error:
        raise wrong(path.name, str(error).splitlines()[0]) from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise wrong(path.name, f"not YAML: {' '.join(str(error).split())}") from error
        raise
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


class _Reader:
    """Reads one recipe's tree, gathering problems as it goes."""

    def __init__(self, path: Path, tree: Tree, lines: LineIndex) -> None:
        self._path = path
        self._tree = tree
        self._lines = lines
        self._problems: list[Problem] = []
        self._presets: dict[str, Tree] = {}

    def recipe(self) -> Recipe:
        tree = dict(self._tree)
        sweep = tree.pop("sweep", None)
        base = self._patch(tree, "")
        axes = self._axes(sweep)
        head = Head(**{k: base.pop(k) for k in ("name", "engine", "repeats") if k in base})
        self._check_head(head)
        equivalence = Margins(**base.pop("equivalence", {}))
        wandb = Tracking(**base.pop("wandb", {}))
        if self._problems:
            raise InputError(self._problems)
        return Recipe(
            head.name,
            self._path,
            base | {"engine": head.engine},
            axes,
            head.repeats,
            equivalence,
            wandb,
            OmegaConf.to_yaml(OmegaConf.create(self._tree)),
            self._presets,
        )

    def _check_head(self, head: Head) -> None:
        if not _NAME.fullmatch(head.name):
            self._problem("name", head.name, "not usable as the name of a folder", "use letters, digits, '.', '_', '-'")
        if head.repeats < 1:
            self._problem("repeats", head.repeats, "below 1", "2 or more give a noise floor")

    def _patch(self, raw: Mapping[str, Any], prefix: str) -> Tree:
        """``raw`` checked: known keys only, values converted to their fields' types, one spelling."""
        checked: Tree = {}
        for key, value in normalize_keys(_nested(raw)).items():
            place = f"{prefix}{key}"
            if key in _HEAD.fields:
                self._leaf(_HEAD, checked, key, value, place)
            elif key == "environment":
                checked[key] = self._environment(value, place)
            elif key in SECTIONS:
                checked[key] = self._section(key, value, place)
            else:
                known = [*_HEAD.fields, *SECTIONS, "environment", "sweep"]
                self._problem(place, value, "no such field", suggestion(key, known))
        return checked

    def _section(self, name: str, value: Any, place: str) -> Tree:
        if name == "model" and isinstance(value, str):
            value = {"preset": value}
        if not isinstance(value, Mapping):
            self._problem(
                place,
                value,
                "a section is a mapping of fields to values",
                f"fields: {', '.join(_SCHEMAS[name].fields)}",
            )
            return {}
        checked: Tree = {}
        for key, item in value.items():
            self._leaf(_SCHEMAS[name], checked, str(key), item, f"{place}.{key}")
        if name == "model" and checked.get("preset"):
            self._load_preset(checked["preset"], f"{place}.preset")
        return checked

    def _leaf(self, schema: Schema, into: Tree, key: str, value: Any, place: str) -> None:
        if key not in schema.fields:
            self._problem(place, value, "no such field", suggestion(key, schema.fields))
            return
        try:
            into[key] = schema.convert(key, value)
        except ValueError as error:
            self._problem(place, value, str(error), suggestion(value, schema.choices(key)))

    def _environment(self, value: Any, place: str) -> Tree:
        if not isinstance(value, Mapping):
            self._problem(place, value, "a mapping of variables to values", "environment: {NCCL_GRAPH_REGISTER: '0'}")
            return {}
        for name in value:
            if is_secret_name(str(name)):
                self._problem(
                    f"{place}.{name}",
                    "***",
                    "looks like a secret, and recipes are recorded",
                    "set it in the shell that runs the orchestrator",
                )
        return {str(name): str(item) for name, item in value.items()}

    def _axes(self, sweep: Any) -> tuple[tuple[Tree, ...], ...]:
        if sweep is None:
            return ()
        if not isinstance(sweep, Mapping):
            self._problem(
                "sweep",
                sweep,
                "a mapping with grid, points or both",
                "sweep: {grid: {training.precision: [fp32, bf16]}}",
            )
            return ()
        for key in sweep:
            if key not in ("grid", "points"):
                self._problem(
                    f"sweep.{key}",
                    sweep[key],
                    "no such field",
                    suggestion(str(key), ("grid", "points"), "axes stand under sweep.grid or in sweep.points"),
                )
        axes = [
            self._grid_axis(str(key), values) for key, values in self._mapping(sweep.get("grid"), "sweep.grid").items()
        ]
        points = sweep.get("points")
        if points is not None:
            axes.append(self._points(points))
        return tuple(axis for axis in axes if axis)

    def _mapping(self, value: Any, place: str) -> Mapping[Any, Any]:
        if value is None or isinstance(value, Mapping):
            return value or {}
        self._problem(
            place, value, "a mapping of keys to lists of values", f"{place}: {{training.precision: [fp32, bf16]}}"
        )
        return {}

    def _grid_axis(self, key: str, values: Any) -> tuple[Tree, ...]:
        place = f"sweep.grid.{key}"
        if not isinstance(values, list) or not values:
            self._problem(place, values, "an axis is a list of at least one value", f"{key}: [first, second]")
            return ()
        if key.endswith("scope") and not all(isinstance(value, (list, str)) for value in values):
            self._problem(place, values, "an axis over a list is a list of lists", "[[attn], [attn, mlp]]")
            return ()
        return tuple(self._axis_patch({key: value}, f"{place}[{index}]") for index, value in enumerate(values))

    def _points(self, points: Any) -> tuple[Tree, ...]:
        if not isinstance(points, list) or not points:
            self._problem("sweep.points", points, "a list of at least one mapping", "points: [{parallelism.dp: 2}]")
            return ()
        patches = []
        for index, point in enumerate(points):
            if isinstance(point, Mapping):
                patches.append(self._axis_patch(point, f"sweep.points[{index}]"))
            else:
                self._problem(
                    f"sweep.points[{index}]", point, "a point is a mapping of keys to values", "{parallelism.dp: 2}"
                )
        return tuple(patches)

    def _axis_patch(self, raw: Mapping[str, Any], place: str) -> Tree:
        for key in raw:
            top = str(key).split(".")[0]
            if top in NOT_SWEPT:
                self._problem(
                    place, key, f"{top} is one for the whole sweep and cannot be an axis", "write another recipe"
                )
                return {}
        return self._patch(raw, f"{place}.")

    def _load_preset(self, name: str, place: str) -> None:
        if name in self._presets:
            return
        found = find_preset(name, self._path)
        if found is None:
            self._problem(place, name, "no such preset", suggestion(name, preset_names(self._path)))
            return
        preset = _Reader(found, {}, LineIndex(found))
        self._presets[name] = preset._section("model", _read(found, ()), "")
        self._problems += preset._problems

    def _problem(self, key: str, value: Any, message: str, remedy: str = "") -> None:
        line = self._lines.line(key)
        where = f"{self._path.name}:{line}" if line else self._path.name
        self._problems.append(Problem(f"{where}: {key.lstrip('.')} = {_shown(value)}", message, remedy))


def find_preset(name: str, recipe: Path) -> Optional[Path]:
    """The file of a model preset: beside the recipe under models/, else among those that ship."""
    return next((p for folder in _preset_folders(recipe) if (p := folder / f"{name}.yaml").is_file()), None)


def preset_names(recipe: Path) -> list[str]:
    return sorted({path.stem for folder in _preset_folders(recipe) for path in folder.glob("*.yaml")})


def _preset_folders(recipe: Path) -> tuple[Path, ...]:
    return (recipe.parent / "models", Path(__file__).resolve().parent.parent / "recipes" / "models")


def _nested(raw: Mapping[str, Any]) -> Tree:
    """Dotted keys as nested mappings: {"a.b": 1} -> {"a": {"b": 1}}."""
    tree: Tree = {}
    for key, value in raw.items():
        first, dot, rest = str(key).partition(".")
        if not dot:
            present = tree.get(first)
            tree[first] = present | value if isinstance(present, dict) and isinstance(value, dict) else value
        else:
            inner = tree.get(first)
            tree[first] = _nested({**(inner if isinstance(inner, dict) else {}), rest: value})
    return tree


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
