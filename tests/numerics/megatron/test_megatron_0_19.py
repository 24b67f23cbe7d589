"""Test engine megatron on Megatron-Core 0.19.2: run some of its tests in a process that imports that release.

``make test-megatron-0-19`` runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_release import FOLDER_0_19

HERE = Path(__file__).parent
CASES = (
    "test_megatron.py::test_megatron_trains_what_torch_native_trains[gpt-oss]",
    "test_megatron.py::test_megatron_trains_what_torch_native_trains[packed]",
    "test_megatron.py::test_ranks_train_what_one_trains[cp, experts, router losses]",
    "test_megatron.py::test_experts_drifted_apart_without_ep_where_etp_is_not_tp",
    "test_megatron.py::test_megatron_core_freed_the_tokens_of_a_rank_with_one_expert",
    "test_megatron.py::test_megatron_core_takes_a_lean_optimizer_as_it_is_meant",
    "test_megatron.py::test_divided_groups_of_parameters_train_the_same",
    "test_megatron.py::test_a_router_adds_its_bias_in_the_precision_of_the_output",
    "test_megatron_graphs.py::test_layers_run_from_graphs_once_they_are_captured[attention, routers and preprocessing]",
    "test_megatron_graphs.py::test_layers_run_from_graphs_once_they_are_captured[local]",
    "test_megatron_graphs.py::test_each_micro_batch_in_a_pipeline_has_graphs_of_its_own[a stage without any]",
    "test_megatron_graphs.py::test_0_19_captures_no_local_graphs_of_a_pipelines_micro_batches",
    "test_megatron_graphs.py::test_graphs_of_packed_sequences_without_attention_and_of_whole_steps[whole step]",
    "test_megatron_graphs.py::test_megatron_core_replays_no_attention_of_packed_sequences",
    "test_megatron_graphs.py::test_the_optimizer_runs_from_a_graph_with_the_rate_of_each_step",
    "test_megatron_graphs.py::test_why_rates_and_the_norm_are_on_the_device",
    "test_megatron_graphs.py::test_transformer_engine_captures_fused_gradients_for_the_first_micro_batch",
    "test_megatron_step_check.py::test_a_learning_rate_of_an_earlier_step_is_found",
    "test_megatron_graphs.py::test_megatron_core_takes_the_settings_as_they_are_meant",
    "test_megatron_graphs.py::test_local_builds_no_layer_for_mlp_alone",
)


@pytest.mark.slow
def test_the_engine_runs_on_the_later_release() -> None:
    assert FOLDER_0_19.is_dir(), "Megatron-Core 0.19.2 is missing: make .venv/megatron-core-0.19.2"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER_0_19)}
    cases = [str(HERE / case) for case in CASES]
    done = subprocess.run([*command, *cases], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
