"""The parameters of an optimizer: their names, their gradients, and what this rank holds of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import count

import torch
from torch import nn

from launch.observe.state.modules import modules_of_process
from launch.train.telemetry.parameter_digest import sketch_tensors

_PREFIXES = ("module.", "_orig_mod.")


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that the optimizer will use. Megatron and Transformer Engine have their own names for it."""
    found = getattr(parameter, "decoupled_grad", None)
    found = parameter.grad if found is None else found
    return getattr(parameter, "main_grad", None) if found is None else found


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of ``tensor``. The observer asks no other rank, which may not be asking at the same time."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def describe_weights(parameters: Sequence[torch.Tensor]) -> str:
    """Return the norm of all ``parameters`` and their sums, as shares of it, in few digits. The host waits once."""
    # Their places, because a program may name them otherwise if it captures.
    found = sketch_tensors((str(place), own_part(one)) for place, one in enumerate(parameters))
    norm = math.hypot(*(one.norm for one in found))
    shares = [sum(sums) / (norm or 1.0) for sums in zip(*(one.sums for one in found), strict=True)]
    return f"norm {norm:.4g}, sums {'/'.join(f'{share:.3f}' for share in shares)}" if found else ""


def parameter_names(parameters: Sequence[torch.Tensor], taken: Collection[str]) -> dict[int, str]:
    """Return the longest name that a module of this process has for each parameter, by its id.

    Parameters without one are named by their place. A number follows a name that is ``taken``, as by another model of one class.
    """
    found, names, used = _names_in_modules({*map(id, parameters)}), dict[int, str](), {*taken}
    for place, parameter in enumerate(parameters):
        name = found.get(id(parameter), f"parameter {place} of shape {tuple(parameter.shape)}")
        if name in used:
            name = next(one for number in count(2) if (one := f"{name} ({number})") not in used)
        used.add(name)
        names[id(parameter)] = name
    return names


def _names_in_modules(wanted: Set[int]) -> dict[int, str]:
    """Return names by id. Megatron's optimizers update fp32 copies, the ``main_param`` of the model's parameters."""
    names: dict[int, str] = {}
    longest = longest_names()
    for module in modules_of_process():
        for name, parameter in module._parameters.items():
            for key in {id(parameter), id(getattr(parameter, "main_param", None))} & wanted:
                names[key] = _longer(names.get(key, ""), longest.get((id(module), name), name))
    return names


def _longer(one: str, other: str) -> str:
    return max(one, other, key=lambda name: (len(name), name))


def longest_names() -> dict[tuple[int, str], str]:
    """Return the longest name of each parameter and buffer, by the id of its module and its name there."""
    paths: dict[int, str] = {}
    modules = modules_of_process()
    counts = {id(module): sum(1 for _ in module.parameters()) for module in modules}
    for root in modules:
        for path, module in _paths(root, counts):
            paths[id(module)] = _longer(paths.get(id(module), ""), path)
    return {
        (id(module), name): f"{paths.get(id(module), '')}{name}"
        for module in modules
        for name in (*module._parameters, *module._buffers)
    }


def _paths(root: nn.Module, counts: Mapping[int, int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of ``root``, each once, with their paths, which end with a dot. ``counts`` has their parameters by id.

    Leave out the name of a child with all parameters of its module: only one side may wrap or compile it.
    """
    waiting, seen = [("", root)], {id(root)}
    for path, module in waiting:
        yield path, module
        for name, child in module.named_children():
            if id(child) not in seen:
                seen.add(id(child))
                is_wrapped = 0 < counts.get(id(module), 0) == counts.get(id(child))
                waiting.append((path if is_wrapped else f"{path}{name}.", child))


def plain_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name
