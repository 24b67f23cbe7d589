"""A small Llama in Hugging Face's Trainer. It knows nothing of this project. recipes/huggingface_llama.yaml runs it.

Each token follows from the one before it, so the model has something to learn. Weights and data are drawn from fixed seeds.
"""

from __future__ import annotations

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH, SEQUENCES = 4096, 256, 1000


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
    )
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=sequences()).train()


def sequences() -> list[dict[str, torch.Tensor]]:
    tokens = [torch.randint(0, VOCABULARY, (SEQUENCES,), generator=torch.Generator().manual_seed(1))]
    for _ in range(LENGTH - 1):
        tokens.append((tokens[-1] * 5 + 1) % VOCABULARY)
    return [{"input_ids": one, "labels": one} for one in torch.stack(tokens, dim=1)]


if __name__ == "__main__":
    main()
