"""Test graph memory with expandable segments: NCCL must not register it, on any engine."""

from __future__ import annotations

import pytest
import torch

from launch.contract.errors import EnvironmentFault
from launch.contract.spec import CudaGraph, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.support.expandable_segments import disable_nccl_graph_register


def test_graph_memory_is_kept_from_nccl_where_segments_expand() -> None:
    assert disable_nccl_graph_register({}, graphed=True) == {}
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for graphed in (False, True):  # Eager and graphed runs must not differ in anything else.
        environment = dict(expandable)
        assert disable_nccl_graph_register(environment, graphed)["NCCL_GRAPH_REGISTER"].startswith(
            "0, beside PYTORCH_CUDA_ALLOC_CONF="
        )
        assert environment["NCCL_GRAPH_REGISTER"] == "0"
    assert disable_nccl_graph_register(
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, graphed=True
    )
    told = {**expandable, "NCCL_GRAPH_REGISTER": "1"}
    with pytest.raises(EnvironmentFault, match="NCCL_GRAPH_REGISTER=1 with PYTORCH_CUDA_ALLOC_CONF=expandable"):
        disable_nccl_graph_register(told, graphed=True)
    assert disable_nccl_graph_register(told, graphed=False)["NCCL_GRAPH_REGISTER"].startswith("1, beside")


def test_torch_native_is_not_told_by_the_host_to_have_it_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a shell or of a cluster's profile are in no recipe, so no rule sees them."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    with pytest.raises(EnvironmentFault, match="NCCL_GRAPH_REGISTER=1 with PYTORCH_CUDA_ALLOC_CONF=expandable"):
        TorchNativeEngine(RunSpec(cuda_graph=CudaGraph("full_iteration")), RankPlace(0, 1, torch.device("cuda", 0)))
