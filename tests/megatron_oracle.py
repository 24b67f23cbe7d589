"""Ask the installed Megatron-Core's own TransformerConfig about cells, without a GPU::

    python -m tests.megatron_oracle < specs.json > answers.json

Answers are in the order of the specs: why Megatron-Core rejects the cell, "" where it accepts it.
"""

from __future__ import annotations

import json
import sys
import warnings

from launch.contract.spec import RunSpec, spec_from_json

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns of what it does without Transformer Engine
    import torch

    import tests.megatron_release  # noqa: F401 - first: something stands in for triton
    from launch.engines.megatron.model import make_config


def answer(spec: RunSpec) -> str:
    try:
        make_config(spec, "local", torch.device("cpu"))
    except (AssertionError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    from megatron.core.transformer import transformer_config

    transformer_config.is_te_min_version = lambda version: True  # it is asked for its version alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers = [answer(spec_from_json(content)) for content in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
