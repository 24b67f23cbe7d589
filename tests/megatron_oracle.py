"""Ask the installed Megatron-Core's own TransformerConfig about cells, without a GPU::

    python -m tests.megatron_oracle < specs.json > answers.json

Answers are in the order of the specs. Each says why Megatron-Core rejects the cell, or is "" if it accepts it.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from launch.contract.spec import RunSpec, spec_from_json
from launch.megatron_config.transformer_config import Layers, transformer_settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns about missing features without Transformer Engine.
    import torch

    import tests.megatron_release  # noqa: F401 - first: something stands in for triton
    from launch.engines.megatron import model


def answer(spec: RunSpec) -> str:
    try:
        model.make_config(spec, "local", torch.device("cpu"))
    except (AssertionError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_grouped_products(spec: RunSpec, layers: Layers) -> dict[str, Any]:
    """Return the settings together with those of Transformer Engine's experts, which the engine uses."""
    return transformer_settings(spec, layers) | ({"moe_grouped_gemm": True} if spec.model.is_moe else {})


def main() -> None:
    from megatron.core.transformer import transformer_config

    model.transformer_settings = with_grouped_products
    # Megatron-Core asks Transformer Engine only for its version.
    transformer_config.is_te_min_version = lambda version: True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = [answer(spec_from_json(content)) for content in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
