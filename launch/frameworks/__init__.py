"""The trainers that engine command knows: a file and a row each, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.spec import FrameworkName
from launch.frameworks import huggingface, megatron_bridge, megatron_lm, torchtitan
from launch.frameworks.framework import Framework

FRAMEWORKS: Mapping[FrameworkName, Framework] = {
    "script": Framework(),
    "huggingface": huggingface.FRAMEWORK,
    "lightning": Framework(),
    "megatron_lm": megatron_lm.FRAMEWORK,
    "megatron_bridge": megatron_bridge.FRAMEWORK,
    "torchtitan": torchtitan.FRAMEWORK,
    "logs": Framework(),
}
