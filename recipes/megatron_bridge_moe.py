"""A small mixture of experts in Megatron Bridge 0.6.2. It knows nothing of this project. recipes/megatron_bridge_moe.yaml runs
it. Arguments are overrides of the configuration, such as ``train.train_iters=120``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

LENGTH, VOCABULARY, STEPS = 1024, 32000, 120


def main() -> None:
    pretrain(process_config_with_overrides(configuration(), cli_overrides=read_overrides(sys.argv[1:])), forward_step)


def read_overrides(arguments: list[str]) -> list[str]:
    """Return ``arguments`` without ``--own-stream``, which leaves the default stream.

    PyTorch 2.11 cannot capture the backward pass of a model that was wrapped on that stream. Bridge leaves it only for graphs of
    Transformer Engine in the language model.
    """
    if "--own-stream" in arguments:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_stream(torch.cuda.Stream())
    return [word for word in arguments if word != "--own-stream"]


def configuration() -> ConfigContainer:
    return ConfigContainer(
        model=model(),
        train=TrainingConfig(train_iters=STEPS, global_batch_size=2, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=1000, eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer="adam",
            bf16=True,
            fp16=False,
            lr=1e-4,
            min_lr=1e-5,
            weight_decay=0.01,
            clip_grad=1.0,
            use_distributed_optimizer=False,
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=STEPS,
            override_opt_param_scheduler=True,
        ),
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
        dataset=MockGPTDatasetConfig(
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=LENGTH,
            num_dataset_builder_threads=1,
            data_sharding=True,
            dataloader_type="single",
            num_workers=1,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        checkpoint=CheckpointConfig(save=None),
        rng=RNGConfig(seed=1234),
    )


COMMON: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "normalization": "RMSNorm",
    "activation_func": torch.nn.functional.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "share_embeddings_and_output_weights": False,
    # Shared graphs overwrite gradients that are accumulated by a fused kernel.
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,  # Deterministic mode requires this.
    "make_vocab_size_divisible_by": 128,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}
"""Settings that this model shares with that of megatron_bridge_vision.py."""


def model() -> GPTModelProvider:
    """Return four layers of sixteen experts each."""
    return GPTModelProvider(
        **COMMON,
        ffn_hidden_size=1024,
        num_moe_experts=16,
        moe_router_topk=4,
        moe_ffn_hidden_size=512,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        position_embedding_type="rope",
        rotary_base=500000,
        attention_dropout=0.0,
        seq_length=LENGTH,
        vocab_size=None,
    )


if __name__ == "__main__":
    main()
