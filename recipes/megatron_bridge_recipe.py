"""Train with a recipe that Megatron Bridge 0.6.2 ships, without a network. It knows nothing of this project.

    cd hugging_face && torchrun ../megatron_bridge_recipe.py llama32_1b_sft_config train.train_iters=120 ...

Run it in a folder in which the recipe's name on the Hugging Face hub is a folder with its config.json. Weights are random.
Recipes for fine-tuning train on lines of Python's standard library, in bytes; ``dataset.dataset_root`` is where they are kept.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

from megatron.bridge import recipes
from megatron.bridge.data.builders import GPTSFTDatasetConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron_bridge_moe import read_overrides
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EXAMPLES = 4000


def main() -> None:
    name, *overrides = read_overrides(sys.argv[1:])
    config = process_config_with_overrides(getattr(recipes, name)(), cli_overrides=overrides)
    if isinstance(config.dataset, GPTSFTDatasetConfig):
        use_text_of_python(config.dataset)
        config.tokenizer.tokenizer_model = str(config.dataset.dataset_root)
    if config.checkpoint.pretrained_checkpoint is None:
        adapt_random_weights(config)
    pretrain(config, forward_step)


def use_text_of_python(dataset: GPTSFTDatasetConfig) -> None:
    """Replace the recipe's dataset by lines of Python's standard library: each is to be answered by the next line."""
    dataset.hf_dataset = dataset.hf_validation_proportion = None
    dataset.do_validation = dataset.do_test = False
    if dataset.offline_packing_specs is not None:
        # Otherwise the whole path of the tokenizer becomes the name of one folder, which may be too long.
        dataset.offline_packing_specs.tokenizer_model_name = "bytes"
    folder = Path(dataset.dataset_root)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines += [line[:200] for line in path.read_text(errors="replace").splitlines() if len(line) > 24]
    with (folder / "training.jsonl").open("w") as file:
        for prompt, answer in pairwise(lines[: EXAMPLES + 1]):
            file.write(json.dumps({"input": prompt, "output": answer}) + "\n")
    write_byte_tokenizer(folder)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def adapt_random_weights(config: ConfigContainer) -> None:
    """Add the recipe's adapters to random weights. Bridge adds them only to those of a checkpoint."""
    if (adapters := config.peft) is not None:
        config.peft = None
        config.model.register_pre_wrap_hook(lambda model: adapters(model, training=True))


if __name__ == "__main__":
    main()
