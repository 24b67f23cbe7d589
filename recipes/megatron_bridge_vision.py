"""A small vision-language model of Qwen3-VL's kind in Megatron Bridge 0.6.2, with random weights, images and texts. It knows
nothing of this project. recipes/megatron_bridge_vision.yaml runs it. Arguments are overrides of the configuration.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.bridge.models.qwen_vl.qwen3_vl_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron_bridge_moe import COMMON, VOCABULARY, configuration, read_overrides
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

LENGTH = 512
# An image is a square of 16 by 16 patches; the model sees 2 by 2 of them as one token.
SIDE, MERGED = 16, 2
PATCHES = SIDE**2
PATCH_SIZE, FRAMES = 16, 2
IMAGE, VIDEO, START, END = range(VOCABULARY - 5, VOCABULARY - 1)


def main() -> None:
    config = configuration()
    config.model, config.dataset = model(), ImagesDataset(dataloader_type="single", num_workers=1)
    pretrain(process_config_with_overrides(config, cli_overrides=read_overrides(sys.argv[1:])), forward_step)


def model() -> Qwen3VLModelProvider:
    return Qwen3VLModelProvider(
        **COMMON,
        ffn_hidden_size=2816,
        kv_channels=64,
        mrope_section=[12, 10, 10],
        seq_length=LENGTH,
        language_max_sequence_length=LENGTH,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        # Graphs of the encoder capture this many patches.
        max_vision_cuda_graph_seq_length=PATCHES,
        vision_config=Qwen3VLVisionConfig(
            depth=4,
            hidden_size=512,
            intermediate_size=2048,
            num_heads=8,
            patch_size=PATCH_SIZE,
            temporal_patch_size=FRAMES,
            spatial_merge_size=MERGED,
            num_position_embeddings=PATCHES,
            out_hidden_size=1024,
            deepstack_visual_indexes=[1, 2],
        ),
    )


@dataclass
class ImagesDataset(DatasetProvider):
    """Random texts, each after a random image."""

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Images, None, None]:
        return Images(context.train_samples), None, None


class Images(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [LENGTH + 1] and patches [PATCHES, numbers of a patch], the same for each ``index`` in every run."""
        generator = torch.Generator().manual_seed(index)
        image = [START, *[IMAGE] * (PATCHES // MERGED**2), END]
        text = torch.randint(0, IMAGE, (LENGTH + 1 - len(image),), generator=generator)
        return torch.cat([torch.tensor(image), text]), torch.randn(
            PATCHES, 3 * FRAMES * PATCH_SIZE**2, generator=generator
        )

    @staticmethod
    def collate_fn(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, object]:
        tokens = torch.stack([sample[0] for sample in samples])
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": (tokens[:, 1:] < IMAGE).float(),
            "attention_mask": None,
            "position_ids": None,
            "visual_inputs": GenericVisualInputs(
                pixel_values=torch.cat([sample[1] for sample in samples]),
                image_grid_thw=torch.tensor([[1, SIDE, SIDE]] * len(samples)),
            ),
        }


if __name__ == "__main__":
    main()
