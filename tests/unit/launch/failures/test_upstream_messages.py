"""Test that the messages of Megatron-Core, Megatron-LM, Megatron Bridge, Transformer Engine and CUDA about graphs have
a class and a fix."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from launch.failures.classes import classify
from tests.megatron_release import FOLDER_0_19

GRAPH = re.compile("cuda.?graph", re.IGNORECASE)
FOLDERS = {"0.16": Path(str(distribution("megatron-core").locate_file(""))), "0.19": FOLDER_0_19}
INTERNAL = re.compile(
    r"1$|Layer is not in the chunk|MTP layer 1 must have|cached metrics must|sample_args and sample_kwargs|"
    r"Tried graphing a module that returned no tensors|CUDA [Gg]raph output should be|cudagraph_tensor_store cannot|"
    r"hidden_states and probs must be|MoETransformerLayer missing|Unknown MoE cudagraph mode|zero-copy symm buffers|"
    r"CUDA graphs must use flash decode|.*(--rl-|[Ii]nference|KV cache)"
)
"""Messages about a release's own code, which no setting changes, and about inference. "1" is a message without words."""


def literal_text(node: ast.AST) -> str:
    """Return the text of a message, with a number in place of each value that is formatted into it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(literal_text, parts))
        case ast.BinOp(left=left, right=right):
            return literal_text(left) + literal_text(right)
    return "1"


def messages_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the type and message of each exception that a module raises with a text of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Assert(msg=ast.AST() as message):
                yield "AssertionError", literal_text(message)
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])):
                yield name, literal_text(message)


@pytest.mark.parametrize("release", FOLDERS)
def test_what_a_release_says_of_graphs_has_a_class(release: str) -> None:
    folder = FOLDERS[release] / "megatron" / "core"
    said = {*messages_of(folder / "full_cuda_graph.py"), *messages_of(folder / "transformer" / "cuda_graphs.py")}
    layers = (
        each
        for room in ("transformer", "models/gpt", "models/common", "../training")
        for path in sorted((folder / room).rglob("*.py"))
        if GRAPH.search(path.read_text())
        for each in messages_of(path)
    )
    said |= {each for each in layers if GRAPH.search(each[1])}
    assert len(said) > 40
    unknown = [text for name, text in said if classify(name, text, "init") is None and not INTERNAL.match(text)]
    assert not unknown


@pytest.mark.parametrize("release", FOLDERS)
def test_what_a_release_says_without_apex_names_the_flag_that_avoids_it(release: str) -> None:
    layers = FOLDERS[release] / "megatron" / "core" / "tensor_parallel" / "layers.py"
    said = [each for each in messages_of(layers) if "APEX" in each[1]]
    found = [classify(name, text, "init") for name, text in said]
    assert found and {row and (row.name, row.outcome) for row in found} == {("APEX", "ENVIRONMENT")}
    assert all(row and "--no-gradient-accumulation-fusion" in row.fix for row in found)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("AssertionError: Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access when using CUDA Graph with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.", "GRAPH_REGISTER"),
        ("AssertionError: check_for_nan_in_loss must be disabled when using full_iteration CUDA graph.", "GRAPH_NAN_CHECK"),
        ("AssertionError: --no-check-for-nan-in-loss-and-grad should be set with full_iteration CUDA graph", "GRAPH_NAN_CHECK"),
        ("AssertionError: Transformer engine's RNG tracker is required for cudagraphs, it can be enabled with use_te_rng_tracker=True'.", "GRAPH_RNG"),
        ("AssertionError: RNG tracker does not support cudagraphs!", "GRAPH_RNG"),
        ("AssertionError: moe recompute is not supported with moe_router CUDA graph with: ", "GRAPH_RECOMPUTE"),
        ("ValueError: CUDA graphs not supported with CPU offloading.", "GRAPH_OFFLOAD"),
        ("RuntimeError: Cudagraphs not supported", "GRAPH_OFFLOAD"),
        ("AssertionError: CUDA graph scope on moe and mlp is not supported with overlap_moe_expert_parallel_comm", "GRAPH_OVERLAP"),
        ("AssertionError: CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion to be enabled.", "GRAPH_OVERLAP"),
        ("AssertionError: CUDA graph with delay_wgrad_compute requires TE version >= 2.12.0.", "TRANSFORMER_ENGINE"),
        ("AssertionError: TE version >= 2.10.0 is required for delay_wgrad_compute with partial cuda graph", "TRANSFORMER_ENGINE"),
        ("AssertionError: overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling delay_wgrad_compute", "TRANSFORMER_ENGINE"),
        ("AssertionError: use_te_rng_tracker requires TransformerEngine version >= 1.5", "TRANSFORMER_ENGINE"),
        ("AssertionError: Offloading modules captured in cuda graph requires TE>=2.14.0.", "TRANSFORMER_ENGINE"),
        ("AssertionError: Offloading modules captured in cuda graph requires torch>=2.9.0.", "GRAPH_OFFLOAD"),
        ("AssertionError: CUDA graph compatible cross entropy requires TransformerEngine >= 2.7.0", "TRANSFORMER_ENGINE"),
        ("NameError: name 'te_general_gemm' is not defined", "TRANSFORMER_ENGINE"),
        ("AssertionError: cuda_graph_scope must not contain both moe and moe_router.", "GRAPH_SETTINGS"),
        ('AssertionError: Megatron Bridge supports model.cuda_graph_impl="local" only for full-iteration CUDA graphs', "GRAPH_SETTINGS"),
        ("ValueError: full_iteration CUDA graph scope cannot be combined with other scopes.", "GRAPH_SETTINGS"),
        ("ValueError: moe_expert_capacity_factor must be set to use moe_pad_expert_input_to_capacity", "GRAPH_SETTINGS"),
        ("ValueError: Flex token dispatcher with deepep backend does not support moe_pad_expert_input_to_capacity", "GRAPH_SETTINGS"),
        ("AssertionError: --cuda-graph-modules must be empty when --cuda-graph-impl=full_iteration.", "GRAPH_SETTINGS"),
        ("AssertionError: Do not use --enable-cuda-graph or --external-cuda-graph with --cuda-graph-impl.", "GRAPH_SETTINGS"),
        ("TypeError: TransformerConfig.__init__() got an unexpected keyword argument 'cuda_graph_modules'", "GRAPH_SETTINGS"),
        ("pretrain_gpt.py: error: argument --cuda-graph-impl: invalid choice: 'full' (choose from 'none', 'local')", "GRAPH_SETTINGS"),
        ("pretrain_gpt.py: error: unrecognized arguments: --cuda-graph-num-warmup-steps 3", "GRAPH_SETTINGS"),
        ("AssertionError: Hybrid context parallelism not supported with CUDA Graph", "GRAPH_SETTINGS"),
        ("AssertionError: Qwen3-VL MoE with CUDA graph requires fixed sequence lengths (variable_seq_lengths=False).", "GRAPH_SETTINGS"),
        ("AssertionError: CUDA Graphs should have been created.", "GRAPH_ORDER"),
        ("AssertionError: Partial cudagraphs for MoEs were detected during inference!", "GRAPH_SETTINGS"),
        ("ValueError: Available backends = {FlashAttention=False, FusedAttention=False, UnfusedDotProductAttention=False}", "ATTENTION_BACKEND"),
        ("ValueError: No dot product attention backend is available for the provided inputs. Please run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2", "ATTENTION_BACKEND"),
        ("AssertionError: NVTE_FUSED_ATTN set to 0, but expected 1 for attention backend type auto. unset NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN.", "ATTENTION_BACKEND"),
        ("AssertionError: CUDA graph accepts only Tensor inputs. inference_context and packed_seq_params are excluded from input list. For inference cuda graph, please use cuda_graph_impl=local instead.", "GRAPH_PACKED"),
        ("ValueError: Packed attention CUDA graphs require offline_packing_specs.pad_cu_seqlens=True. Enable it for full-iteration, whole-layer, or attention-scoped capture.", "GRAPH_PACKED"),
        ("ValueError: Offline packing with CUDA graphs requires dataset pad_to_max_length=True.", "GRAPH_PACKED"),
        ("ValueError: Micro batch size should be 1 when training with packed sequence, but your micro batch size is 2.", "GRAPH_PACKED"),
        ("AssertionError: CUDA graph argument mismatch:\nTensor mismatch at args[0]", "GRAPH_ARGUMENTS"),
        ("AssertionError: `cudagraph_created` is set to True but no matching cudagraph runners were found.", "GRAPH_ARGUMENTS"),
        ("AssertionError: order dimension mismatch", "GRAPH_ORDER"),
        ("AssertionError: Unsupported copy for tuple yet: 1", "GRAPH_BATCH"),
        ("AssertionError: Tried to cudagraph a module with user registered pre-forward hooks", "HOOKS"),
        ("RuntimeError: found NaN in local grad norm for bucket #0 in backward pass before data-parallel communication collective.", "NUMERIC"),
        ("AcceleratorError: CUDA error: the graph update was not performed because it included changes which violated constraints specific to instantiated graph update", "GRAPH_UPDATE"),
        ("DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", "COMMUNICATION"),
    ],
)  # fmt: skip
def test_upstream_messages_by_class(message: str, name: str) -> None:
    type_name, _, text = message.partition(": ")
    found = classify(type_name, text, "measure")
    assert found is not None and found.name == name and found.fix


def test_a_lack_of_kernels_for_packed_sinks_names_the_release_that_has_one() -> None:
    """Transformer Engine 2.11 turns off all three backends (attention/dot_product_attention/utils.py:718), with or
    without graphs."""
    said = "Available backends = {FlashAttention=False, FusedAttention=False, UnfusedDotProductAttention=False}"
    found = classify("ValueError", said, "warmup")
    assert found is not None and "packed sequences with attention sinks" in found.fix and "2.12" in found.fix
