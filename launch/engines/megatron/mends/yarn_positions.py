"""Capture the attention of a YaRN model with its positions.

TECudaGraphHelper passes a rotary embedding to captured attention only for the type ``rope`` (0.16.1
transformer/cuda_graphs.py:1863, 0.19.2 :2296), and a graphed callable ignores keywords that it was not captured with. Here the
helper's static inputs get the embedding of GPTModel's own forward pass (models/gpt/gpt_model.py, ``_preprocess``). No release
or pull request corrects this fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from launch.engines.graph_protocol import replaced


@contextmanager
def positions_captured() -> Iterator[None]:
    make_inputs = TECudaGraphHelper._get_sample_arguments

    def with_positions(helper: Any, *arguments: Any, **named: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return the static inputs and keywords of each layer and microbatch. The embedding is (sequence, 1, 1, channels)."""
        inputs, keywords = make_inputs(helper, *arguments, **named)
        model = next(chunk for chunk in helper.chunks_with_decoder if chunk is not None)
        length = model.rotary_pos_emb.get_rotary_seq_len(None, model.decoder, inputs[0][0], helper.config, None)
        positions, _ = model.rotary_pos_emb(length)
        for each in keywords:
            each["rotary_pos_emb"] = positions
        return inputs, keywords

    with replaced(TECudaGraphHelper, "_get_sample_arguments", with_positions):
        yield
