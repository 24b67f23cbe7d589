"""Test checkpoints in the Hugging Face layout: all problems are reported at once, before a tensor is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.checkpoints.checkpoint import open_checkpoint
from launch.checkpoints.config_check import config_mismatches
from launch.checkpoints.digest import digest_of_all
from launch.checkpoints.parameter_map import shape_mismatches, table
from launch.checkpoints.safetensors_header import read_header
from launch.contract.errors import CheckpointError
from launch.contract.spec import Model
from tests.presets import parameters, preset

DENSE = Model(num_layers=2, hidden_size=16, kv_channels=4, ffn_hidden_size=24, vocab_size=31)
QWEN3_MOE = replace(
    DENSE, qk_layernorm=True, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8, num_query_groups=2
)
GPT_OSS = replace(
    QWEN3_MOE,
    hidden_size=64,
    moe_ffn_hidden_size=32,
    activation="clamped_quick_gelu_glu",
    qk_layernorm=False,
    add_qkv_bias=True,
    add_bias_linear=True,
    attention_sinks=True,
    moe_router_order="topk_then_softmax",
    window_size=4,
    window_attn_skip_freq=2,
)
MODELS = {"dense": DENSE, "tied": replace(DENSE, tie_embeddings=True), "qwen3_moe": QWEN3_MOE, "gpt_oss": GPT_OSS}

Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: Model, packed: bool = False) -> Shapes:
    return {tensor.name: tensor.shape for entry in table(model, packed) for tensor in entry.tensors}


def write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], **dtypes: str) -> None:
    """Write a safetensors file of zeros in float32, except for the named tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        dtype = dtypes.get(name, "F32")
        start, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 1)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_shards(folder: Path, shapes: Shapes, count: int = 3) -> list[str]:
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    shard_of = {name: files[position % count] for position, name in enumerate(shapes)}
    for file in files:
        write_file(folder / file, {name: shape for name, shape in shapes.items() if shard_of[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return files


def refusal(model: Model, path: Path) -> str:
    """Return the message for a relative path. It must not show anything of the file's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(replace(model, weights=path.name))
    message = str(caught.value)
    assert message.startswith(f"model.weights={path.name!r}: ")
    assert str(path.parent) not in message
    return message


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_whole_checkpoint_is_opened_as_file_folder_and_shards(model: Model, tmp_path: Path) -> None:
    shapes = shapes_of(model)
    write_file(tmp_path / "model.safetensors", shapes)
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", shapes)
    for path in (tmp_path / "model.safetensors", tmp_path, tmp_path / "shards"):
        checkpoint = open_checkpoint(replace(model, weights=str(path)))
        assert checkpoint.tensors.keys() == shapes.keys()
        assert all(tensor.file.is_file() for tensor in checkpoint.tensors.values())


def test_what_no_decoder_needs_is_no_surplus(tmp_path: Path) -> None:
    model = replace(DENSE, tie_embeddings=True, weights=str(tmp_path))
    surplus = {"lm_head.weight": (31, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    write_file(tmp_path / "model.safetensors", shapes_of(model) | surplus)
    open_checkpoint(model)
    write_file(tmp_path / "model.safetensors", shapes_of(model) | {"lm_head.bias": (31,)})
    assert "surplus tensors (1): lm_head.bias; " in refusal(model, tmp_path)


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "gpt_oss_20b"])
def test_a_table_holds_every_parameter_of_a_model_once(name: str) -> None:
    entries = table(preset(name))
    shapes = [tensor.shape for entry in entries for tensor in entry.tensors]
    assert sum(map(math.prod, shapes)) == parameters(preset(name))
    assert len(shapes) == len(shapes_of(preset(name)))
    assert len(entries) == len({entry.parameter for entry in entries})


def test_packed_experts_have_the_published_shapes(tmp_path: Path) -> None:
    """The shapes are those of openai/gpt-oss-20b, from its model.safetensors.index.json and the gpt-oss repository's
    weights.py."""
    published = shapes_of(preset("gpt_oss_20b"), packed=True)
    assert published["model.layers.23.mlp.experts.gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert published["model.layers.23.mlp.experts.gate_up_proj_scales"] == (32, 5760, 90)
    assert published["model.layers.23.mlp.experts.down_proj_blocks"] == (32, 2880, 90, 16)
    assert published["model.layers.23.self_attn.sinks"] == (64,)

    shapes = shapes_of(GPT_OSS, packed=True)
    bytes_ = {name: "U8" for name in shapes if name.endswith(("_blocks", "_scales"))}
    write_file(tmp_path / "model.safetensors", shapes, **bytes_)
    open_checkpoint(replace(GPT_OSS, weights=str(tmp_path)))
    write_file(tmp_path / "model.safetensors", shapes)  # Blocks in float32 are invalid.
    assert "tensors of another shape or type (8)" in refusal(GPT_OSS, tmp_path)

    uneven = replace(GPT_OSS, hidden_size=72)  # This is two blocks and a quarter of a third, which no file can hold.
    write_file(tmp_path / "model.safetensors", shapes_of(uneven, packed=True), **bytes_)
    assert "blocks of 32, but model.hidden_size=72" in refusal(uneven, tmp_path)


# --- what is refused --------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(model=st.sampled_from(list(MODELS.values())), data=st.data())
def test_every_fault_of_a_tensor_is_in_the_one_message(model: Model, data: st.DataObject, tmp_path: Path) -> None:
    shapes = shapes_of(model)
    lost, bent, typed = data.draw(st.lists(st.sampled_from(sorted(shapes)), min_size=3, max_size=3, unique=True))
    shape = shapes[bent]
    del shapes[lost]
    write_file(tmp_path / "model.safetensors", shapes | {bent: (*shape, 1), "extra.weight": (2,)}, **{typed: "F8_E4M3"})
    message = refusal(model, tmp_path)
    assert f"missing tensors (1): {lost}; " in message
    assert "surplus tensors (1): extra.weight; " in message
    assert f"{bent} is {[*shape, 1]} F32, not {list(shape)} floating-point" in message
    assert f"{typed} is {list(shapes[typed])} F8_E4M3, not {list(shapes[typed])} floating-point" in message


def test_a_message_lists_some_names_and_counts_the_rest(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", shapes_of(DENSE))
    message = refusal(replace(DENSE, num_layers=3), tmp_path)
    assert "missing tensors (9): model.layers.2.input_layernorm.weight, " in message
    assert "and 1 more; set the model section" in message


def test_shards_at_fault_are_named_and_their_tensors_are_not_called_missing(tmp_path: Path) -> None:
    lost, short, _whole = write_shards(tmp_path, shapes_of(DENSE))
    (tmp_path / lost).unlink()
    (tmp_path / short).write_bytes((tmp_path / short).read_bytes()[:-1])
    message = refusal(DENSE, tmp_path)
    assert f"{lost}, which model.safetensors.index.json names, is not there" in message
    assert f"{short} is damaged (incomplete metadata, file not fully covered)" in message
    assert "missing tensors" not in message
    assert message.endswith("copy or download it again")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {}}'],
    ids=["empty", "one byte", "no header", "a list", "no shape"],
)
def test_a_file_of_another_kind_is_damaged_and_nothing_else(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(DENSE, tmp_path)
    assert "model.safetensors is damaged (" in message
    assert "missing tensors" not in message


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", "", ".."])
def test_an_index_cannot_lead_out_of_its_folder(shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for name in ("checkpoint", "other"):
        (tmp_path / name).mkdir()
        write_file(tmp_path / name / "model.safetensors", shapes_of(DENSE))
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(shapes_of(DENSE), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names {shard!r}, which is not a file of its folder" in refusal(DENSE, folder)


def test_a_fifo_is_no_checkpoint(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, shapes_of(DENSE))
    for name in (shards[0], "config.json"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    message = refusal(DENSE, tmp_path)
    assert f"{shards[0]} cannot be read (not a regular file)" in message
    assert "config.json cannot be read (not a regular file)" in message
    assert "config.json cannot be read (not a regular file)" in refusal(DENSE, tmp_path / "config.json")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is damaged (" in refusal(DENSE, tmp_path)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    assert "nowhere is not there; name a folder that holds model.safetensors" in refusal(DENSE, tmp_path / "nowhere")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(DENSE, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").mkdir()
    message = refusal(DENSE, tmp_path / "pickled")
    assert "model.safetensors cannot be read (Is a directory); give the job's user the right" in message
    assert "missing tensors" not in message


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (replace(DENSE, add_qkv_bias=True), "model.add_qkv_bias=True, not False"),
        (replace(DENSE, activation="clamped_quick_gelu_glu"), "not 'swiglu'"),
        (replace(DENSE, window_size=4), "model.window_size=4, not 0"),
        (replace(QWEN3_MOE, qk_layernorm=False), "model.qk_layernorm=False, not True"),
        (replace(QWEN3_MOE, moe_shared_expert_ffn_hidden_size=8), "model.moe_shared_expert_ffn_hidden_size=8, not 0"),
        (replace(QWEN3_MOE, moe_router_enable_expert_bias=True), "model.moe_router_enable_expert_bias=True, not False"),
        (replace(QWEN3_MOE, moe_router_score_function="sigmoid"), "model.moe_router_score_function='sigmoid'"),
        (replace(GPT_OSS, moe_layer_freq=2), "model.moe_layer_freq=2, not 1"),
        (replace(GPT_OSS, moe_router_order="softmax_then_topk"), "not 'topk_then_softmax'"),
    ],
)
def test_a_model_of_no_architecture_is_refused_by_field(model: Model, field: str, tmp_path: Path) -> None:
    assert field in refusal(model, tmp_path)


# --- headers and shards -----------------------------------------------------------------------------------------------

dtypes = st.sampled_from(["F32", "BF16", "U8", "F4", "BOOL", "F8_E4M3", "X7"])
numbers = st.integers(-1, 6) | st.sampled_from([True, 1.0, "1", None, 1 << 62, 1 << 64])
described = st.fixed_dictionaries(
    {"dtype": dtypes, "shape": st.lists(numbers, max_size=3), "data_offsets": st.lists(numbers, min_size=1, max_size=3)}
)


@st.composite
def headers(draw: st.DrawFn) -> tuple[Any, int]:
    """Draw a header and the bytes after it. They are valid except where a drawn value replaces a part."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.permutations(["a", "b", "c"])):
        shape, dtype = draw(st.lists(st.integers(0, 4), max_size=3)), draw(st.sampled_from(["F32", "BF16", "U8"]))
        start, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    metadata = st.sampled_from([None, {}, {"format": "pt"}, {"format": 1}, [], "pt"])
    changed = {"a": described, "__metadata__": metadata, "d": st.just([0, 0]) | described}
    header |= draw(st.fixed_dictionaries({}, optional=changed))
    return header, end + draw(st.sampled_from([0, 0, 0, 1, -1]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(drawn=headers())
def test_a_header_is_refused_where_the_library_refuses_it(drawn: tuple[Any, int], tmp_path: Path) -> None:
    header, size = drawn
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(max(0, size))
    (tmp_path / "a.safetensors").write_bytes(content)
    try:
        expected = {name: (tuple(told["shape"]), told["dtype"]) for name, told in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        with pytest.raises(ValueError):
            read_header(tmp_path / "a.safetensors")
    else:
        found = read_header(tmp_path / "a.safetensors")
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == expected


def test_json_that_is_nested_deeply_is_damaged(tmp_path: Path) -> None:
    deep = b'{"a":' * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    (tmp_path / "config.json").write_bytes(deep)
    message = refusal(DENSE, tmp_path)
    assert "model.safetensors is damaged (invalid JSON in header: recursion limit exceeded" in message
    assert "config.json is damaged (it is nested too deeply); " in message


def test_a_tensor_in_two_shards_or_in_another_than_the_index_says_is_told_with_its_files(tmp_path: Path) -> None:
    one, _two, three = write_shards(tmp_path, shapes_of(DENSE))
    index = tmp_path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": shards | {"model.norm.weight": one}}))
    assert shards["model.norm.weight"] != one
    message = refusal(DENSE, tmp_path)
    astray = f"model.norm.weight in {shards['model.norm.weight']}, not {one}; "
    assert f"tensors in a different file than model.safetensors.index.json says (1): {astray}" in message
    index.write_text(json.dumps({"weight_map": shards}))
    held = {name: shape for name, shape in shapes_of(DENSE).items() if shards[name] == three}
    write_file(tmp_path / three, held | {"model.embed_tokens.weight": (31, 16)})
    message = refusal(DENSE, tmp_path)
    assert shards["model.embed_tokens.weight"] == one
    assert f"tensors in more than one file (1): model.embed_tokens.weight in {one} and {three}; rewrite" in message


@pytest.mark.parametrize("change", ["bytes", "shape", "dtype"])
def test_a_head_of_its_own_is_not_tied(change: str, tmp_path: Path) -> None:
    model, file = replace(DENSE, tie_embeddings=True), tmp_path / "model.safetensors"
    shapes = {"lm_head.weight": (31, 16), **shapes_of(model)}
    write_file(file, shapes)
    open_checkpoint(replace(model, weights=str(tmp_path)))
    if change == "bytes":
        overwrite(file, "lm_head.weight", 31 * 16 * 4 - 1)
    if change == "shape":
        write_file(file, shapes | {"lm_head.weight": (16, 31)})
    if change == "dtype":
        write_file(file, shapes, **{"lm_head.weight": "F8_E4M3"})
    message = refusal(model, tmp_path)
    assert message.endswith(
        ": model.tie_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight; "
        "set model.tie_embeddings=false"
    )


def test_a_path_that_holds_a_nul_is_told() -> None:
    with pytest.raises(
        CheckpointError, match=r"model\.weights='a\\x00b': a path cannot hold a NUL character; correct the path"
    ):
        open_checkpoint(replace(DENSE, weights="a\0b"))


# --- the digest -------------------------------------------------------------------------------------------------------


def overwrite(file: Path, name: str, position: int) -> None:
    with open(file, "r+b") as content:
        content.seek(read_header(file)[name].start + position)
        content.write(b"\x01")


def digest_of_file(file: Path) -> str:
    return digest_of_all(read_header(file))


def test_the_digest_sees_any_byte_of_a_small_tensor_however_large_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    large, router = 40 << 20, 1 << 20
    write_file(file, {"up": (large,), "router": (router // 4,), "down": (large,)}, up="U8", down="U8")
    before = digest_of_file(file)
    assert digest_of_file(file) == before
    for name, position in (("router", 0), ("router", 12345), ("router", router - 1), ("up", 0), ("up", large // 2)):
        overwrite(file, name, position)
        before, changed = digest_of_file(file), before
        assert before != changed, (name, position)
    overwrite(file, "down", large - 1)
    assert digest_of_file(file) != before


def test_the_digest_sees_names_types_and_shapes_and_not_the_shards(tmp_path: Path) -> None:
    variants: list[tuple[Shapes, dict[str, str]]] = [
        ({"a": (8, 2), "b": (4,)}, {}),
        ({"a": (2, 8), "b": (4,)}, {}),
        ({"a": (8, 2), "c": (4,)}, {}),
        ({"a": (8, 2), "b": (16,)}, {"b": "U8"}),
    ]
    digests = set()
    for shapes, types in variants:
        write_file(tmp_path / "a.safetensors", shapes, **types)
        digests.add(digest_of_file(tmp_path / "a.safetensors"))
    assert len(digests) == len(variants)

    write_file(tmp_path / "model.safetensors", shapes_of(DENSE))
    whole = open_checkpoint(replace(DENSE, weights=str(tmp_path))).digest
    (tmp_path / "shards").mkdir()
    files = write_shards(tmp_path / "shards", shapes_of(DENSE))
    shards = open_checkpoint(replace(DENSE, weights=str(tmp_path / "shards")))
    assert shards.digest == whole
    (tmp_path / "shards" / files[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{files[1]} cannot be read \(No such file"):
        _ = shards.digest


# --- config.json ------------------------------------------------------------------------------------------------------

# The published config.json of each model, without the fields for training and generation.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "qwen3_30b_a3b": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt_oss_20b": {
        "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_agree_with_the_published_configurations(name: str) -> None:
    assert shape_mismatches(preset(name)) == ()
    assert config_mismatches(preset(name), PUBLISHED[name]) == ()
    assert config_mismatches(preset(name), {}) == ()


@pytest.mark.parametrize(
    ("name", "field", "value", "key"),
    [
        ("llama3_8b", "rotary_base", 1e4, "rope_theta=500000.0"),
        ("llama3_8b", "rope_scaling", "llama3", "rope_type='default'"),
        ("llama3_8b", "norm_epsilon", 1e-6, "rms_norm_eps=1e-05"),
        ("llama3_8b", "ffn_hidden_size", 14337, "intermediate_size=14336"),
        ("llama3_8b", "tie_embeddings", True, "tie_word_embeddings=False"),
        ("qwen3_30b_a3b", "num_query_groups", 8, "num_key_value_heads=4"),
        ("qwen3_30b_a3b", "moe_router_normalize_topk", False, "norm_topk_prob=True"),
        ("qwen3_30b_a3b", "moe_router_topk", 4, "num_experts_per_tok=8"),
        ("qwen3_30b_a3b", "num_moe_experts", 64, "num_experts=128"),
        ("qwen3_30b_a3b", "window_size", 128, "config.json to []"),
        ("gpt_oss_20b", "rope_truncate", True, "truncate=False"),
        ("gpt_oss_20b", "rope_beta_fast", 16.0, "beta_fast=32.0"),
        ("gpt_oss_20b", "rope_original_max_position", 8192, "original_max_position_embeddings=4096"),
        ("gpt_oss_20b", "moe_ffn_hidden_size", 1440, "intermediate_size=2880"),
        ("gpt_oss_20b", "window_size", 129, "sliding_window=128"),
        ("gpt_oss_20b", "window_attn_skip_freq", 3, "config.json to [0, 2, 4, "),
    ],
)
def test_every_other_value_is_named_with_both_sides(name: str, field: str, value: object, key: str) -> None:
    (text,) = config_mismatches(replace(preset(name), **{field: value}), PUBLISHED[name])
    assert f"model.{field}={value!r}" in text
    assert key in text


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama3_8b", {"model_type": "granite"}, "model_type='granite'"),
        ("llama3_8b", {"hidden_act": "gelu"}, "hidden_act='silu', but config.json says 'gelu'"),
        ("llama3_8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama3_8b", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta=10000.0"),
        ("llama3_8b", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ("gpt_oss_20b", {"swiglu_limit": 9.0}, "swiglu_limit=7.0, but config.json says 9.0"),
        (
            "gpt_oss_20b",
            {"rope_scaling": {"rope_type": "yarn", "truncate": False, "attention_factor": 1.0}},
            "attention_factor=1.0",
        ),
        ("gpt_oss_20b", {"rope_scaling": {"rope_type": "yarn"}}, "truncate=True"),
    ],
)
def test_what_the_model_section_cannot_say_is_named_too(name: str, change: dict[str, Any], said: str) -> None:
    (text,) = config_mismatches(preset(name), PUBLISHED[name] | change)
    assert said in text


@pytest.mark.parametrize(
    ("change", "model_type", "said"),
    [
        (
            {"rope_scaling": "yarn", "rope_scaling_factor": 4.0},
            "qwen3",
            "model.rope_scaling='yarn', but config.json says",
        ),
        ({"rope_scaling": "llama3", "rope_scaling_factor": 4.0}, "qwen3", "model.rope_scaling='llama3', but config"),
        ({}, "llama", "model.qk_layernorm=True, but config.json says model_type='llama', which does not normalise"),
        (
            {"qk_layernorm": False},
            "qwen3",
            "model.qk_layernorm=False, but config.json says model_type='qwen3', which nor",
        ),
    ],
)
def test_a_model_type_says_what_its_configuration_leaves_out(
    change: dict[str, Any], model_type: str, said: str
) -> None:
    model = replace(DENSE, qk_layernorm=True)
    assert config_mismatches(model, {"model_type": "qwen3"}) == ()
    (text,) = config_mismatches(replace(model, **change), {"model_type": model_type})
    assert said in text


def test_gpt_oss_without_rotary_scaling_is_that_of_transformers() -> None:
    config = {key: value for key, value in PUBLISHED["gpt_oss_20b"].items() if key != "rope_scaling"}
    assert config_mismatches(preset("gpt_oss_20b"), config) == ()
    (text,) = config_mismatches(replace(preset("gpt_oss_20b"), rope_scaling="none"), config)
    assert "rope_type='yarn'" in text


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt_oss_20b", {"layer_types": 5}, "layer_types=5, which is not a list of names"),
        ("gpt_oss_20b", {"layer_types": [["sliding_attention"]] * 24}, "layer_types=[["),
        ("llama3_8b", {"rope_scaling": [1]}, "rope_scaling=[1], which is not a JSON object"),
        ("llama3_8b", {"rope_scaling": "linear"}, "rope_scaling='linear', which is not a JSON object"),
        ("llama3_8b", {"rope_parameters": False}, "rope_parameters=False, which is not a JSON object"),
        ("llama3_8b", {"rope_scaling": {"rope_type": ["default"]}}, "rope_type=['default']"),
        ("llama3_8b", {"model_type": {"llama": 1}}, "model_type={'llama': 1}"),
        ("llama3_8b", {"num_hidden_layers": "32"}, "num_hidden_layers='32'"),
        ("llama3_8b", {"partial_rotary_factor": True}, "partial_rotary_factor=True"),
        ("gpt_oss_20b", {"rope_scaling": PUBLISHED["gpt_oss_20b"]["rope_scaling"] | {"attention_factor": "1"}}, "='1'"),
        ("gpt_oss_20b", {"rope_scaling": PUBLISHED["gpt_oss_20b"]["rope_scaling"] | {"attention_factor": 9**999}}, "=1942079"),
    ],
)  # fmt: skip
def test_values_of_another_type_are_told_in_words(name: str, change: dict[str, Any], said: str) -> None:
    (text,) = config_mismatches(preset(name), PUBLISHED[name] | change)
    assert said in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["yarn", "llama", "default", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ROTARY_KEYS = ["rope_type", "type", "rope_theta", "factor", "attention_factor", "mscale", "mscale_all_dim"]


@settings(max_examples=150)
@given(name=st.sampled_from(list(PUBLISHED)), data=st.data())
def test_whatever_a_configuration_holds_it_is_compared(name: str, data: st.DataObject) -> None:
    keys = [*PUBLISHED[name], "rope_parameters", "partial_rotary_factor", "layer_types", "use_sliding_window"]
    change = data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=3))
    rotary = PUBLISHED[name]["rope_scaling"] or {}
    inside = rotary | data.draw(st.dictionaries(st.sampled_from([*ROTARY_KEYS, *rotary]), JSON, max_size=3))
    for config in (PUBLISHED[name] | change, PUBLISHED[name] | {"rope_scaling": inside}):
        assert all("config.json" in text for text in config_mismatches(preset(name), config))


def test_a_checkpoint_tells_whether_a_config_lies_beside(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", shapes_of(DENSE))
    model = replace(DENSE, weights=str(tmp_path))
    assert not open_checkpoint(model).has_config
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16}))
    assert open_checkpoint(model).has_config


def test_config_beside_a_checkpoint_is_part_of_the_one_message(tmp_path: Path) -> None:
    shapes = shapes_of(DENSE)
    del shapes["lm_head.weight"]
    write_file(tmp_path / "model.safetensors", shapes)
    (tmp_path / "config.json").write_text(json.dumps({"rope_theta": 5e5, "num_hidden_layers": 3}))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        message = refusal(DENSE, path)
        assert "missing tensors (1): lm_head.weight; " in message
        assert "model.rotary_base=10000.0, but config.json says rope_theta=500000.0; " in message
        assert "model.num_layers=2, but config.json says num_hidden_layers=3; " in message
    (tmp_path / "config.json").write_text("{")
    assert "config.json is damaged (" in refusal(DENSE, tmp_path)
