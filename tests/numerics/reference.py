"""Define the decoder a second time, with plain formulas, loops over tokens and heads, and weights by name."""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping

import torch

from launch.contract.spec import Model

Weights = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def wavelength(pair: int, model: Model) -> float:
    """Return the number of positions in which a pair turns once."""
    plain = 2 * math.pi * model.rotary_base ** (2 * pair / model.kv_channels)
    original, factor = model.rope_original_max_position, model.rope_scaling_factor
    if model.rope_scaling == "llama3":
        if plain < original / model.rope_high_freq_factor:
            return plain
        if plain > original / model.rope_low_freq_factor:
            return plain * factor
        smooth = (original / plain - model.rope_low_freq_factor) / (
            model.rope_high_freq_factor - model.rope_low_freq_factor
        )
        return plain / ((1 - smooth) / factor + smooth)
    if model.rope_scaling == "yarn":
        # A pair that turns b times within the original length has the wavelength original / b.
        first, last = (
            model.kv_channels / 2 * math.log(original / (beta * 2 * math.pi), model.rotary_base)
            for beta in (model.rope_beta_fast, model.rope_beta_slow)
        )
        if model.rope_truncate:
            first, last = math.floor(first), math.ceil(last)
        ramp = min(1.0, max(0.0, (pair - max(first, 0)) / (min(last, model.kv_channels - 1) - max(first, 0))))
        return plain / (ramp / factor + 1 - ramp)
    return plain


def turned(x: torch.Tensor, position: int, model: Model) -> torch.Tensor:
    """Rotate the pairs (i, i + half) of a vector: as complex numbers, multiply each by exp(2 pi j * position /
    wavelength).
    """
    half = len(x) // 2
    factor = 0.1 * math.log(model.rope_scaling_factor) + 1 if model.rope_scaling == "yarn" else 1.0
    out = list(x)
    for i in range(half):
        turn = factor * cmath.exp(2j * math.pi * position / wavelength(i, model))
        out[i] = x[i] * turn.real - x[i + half] * turn.imag
        out[i + half] = x[i] * turn.imag + x[i + half] * turn.real
    return torch.stack(out)


def linear(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def positions_of(tokens: list[int], eod_token: int | None) -> tuple[list[int], list[int]]:
    """Return each token's position within its document, and the document's number."""
    positions, documents = [], []
    position, document = 0, 0
    for token in tokens:
        positions.append(position)
        documents.append(document)
        position += 1
        if token == eod_token:
            position, document = 0, document + 1
    return positions, documents


def attention(
    x: torch.Tensor, w: Weights, name: str, model: Model, number: int, places: tuple[list[int], list[int]]
) -> torch.Tensor:
    """Compute attention, one position and one head at a time: (sequence, hidden) -> (sequence, hidden)."""
    heads, groups, d = model.num_attention_heads, model.num_query_groups, model.kv_channels
    qkv = linear(x, w, f"{name}.qkv").view(len(x), heads + 2 * groups, d)
    positions, documents = places
    full = not model.window_size or (
        model.window_attn_skip_freq > 0 and number % model.window_attn_skip_freq == model.window_attn_skip_freq - 1
    )

    def head(place: int, index: int, norm: str) -> torch.Tensor:
        vector = qkv[place, index]
        if model.qk_layernorm:
            vector = rms_norm(vector, w[f"{name}.{norm}.weight"], model.norm_epsilon)
        return turned(vector, positions[place], model)

    rows = []
    for place in range(len(x)):
        seen = [
            past
            for past in range(place + 1)
            if documents[past] == documents[place] and (full or place - past < model.window_size)
        ]
        outputs = []
        for index in range(heads):
            group = index * groups // heads
            query = head(place, index, "query_norm")
            scores = torch.exp(
                torch.stack([query @ head(past, heads + group, "key_norm") / math.sqrt(d) for past in seen])
            )
            total = scores.sum()
            if model.attention_sinks:
                total = total + torch.exp(w[f"{name}.sinks"][index])
            outputs.append(scores / total @ qkv[seen, heads + groups + group])
        rows.append(torch.cat(outputs))
    return linear(torch.stack(rows), w, f"{name}.output")


def activation(x: torch.Tensor, model: Model) -> torch.Tensor:
    gate, up = x[: len(x) // 2], x[len(x) // 2 :]
    if model.activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    gate, up = torch.minimum(gate, torch.tensor(7.0)), torch.clamp(up, -7.0, 7.0)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def kept_choices(chosen: list[dict[int, torch.Tensor]], model: Model) -> list[set[int]]:
    """Return the experts that have room for each token: each expert takes the tokens with the largest weights."""
    if model.moe_expert_capacity_factor is None:
        return [set(weights) for weights in chosen]
    room = math.ceil(len(chosen) * model.moe_router_topk / model.num_moe_experts * model.moe_expert_capacity_factor)
    kept: list[set[int]] = [set() for _ in chosen]
    for expert in range(model.num_moe_experts):
        asking = [token for token, weights in enumerate(chosen) if expert in weights]
        for token in sorted(asking, key=lambda t: -chosen[t][expert].item())[:room]:
            kept[token].add(expert)
    return kept


def routes(logits: torch.Tensor, bias: torch.Tensor | None, model: Model) -> dict[int, torch.Tensor]:
    """Return one token's experts and their weights."""
    scores = torch.sigmoid(logits) if model.moe_router_score_function == "sigmoid" else torch.exp(logits)
    if model.moe_router_score_function == "softmax":
        scores = scores / scores.sum()
    steered = scores if bias is None else scores + bias
    chosen = sorted(range(model.num_moe_experts), key=lambda e: -steered[e].item())[: model.moe_router_topk]
    weights = scores[chosen]
    if model.moe_router_order == "topk_then_softmax" or model.moe_router_normalize_topk:
        weights = weights / weights.sum()
    return dict(zip(chosen, weights, strict=True))


def experts(tokens: torch.Tensor, w: Weights, name: str, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (T, hidden) -> (T, hidden) and the router's loss, one token at a time."""
    logits = linear(tokens, w, f"{name}.router")
    chosen = [routes(row, w.get(f"{name}.router.expert_bias"), model) for row in logits]
    rows = []
    for token, weights, kept in zip(tokens, chosen, kept_choices(chosen, model), strict=True):
        row = torch.zeros_like(token)
        if model.moe_shared_expert_ffn_hidden_size:
            inner = activation(linear(token, w, f"{name}.shared.gate_up"), model)
            row = row + linear(inner, w, f"{name}.shared.down")
        for expert in kept:
            inner, bias = token @ w[f"{name}.gate_up"][expert], torch.zeros_like(row)
            if model.add_bias_linear:
                inner, bias = inner + w[f"{name}.gate_up_bias"][expert], w[f"{name}.down_bias"][expert]
            row = row + weights[expert] * (activation(inner, model) @ w[f"{name}.down"][expert] + bias)
        rows.append(row)
    unsteered = [routes(row, None, model) for row in logits]
    counts = torch.tensor([sum(e in weights for weights in unsteered) for e in range(model.num_moe_experts)])
    counts = counts.to(tokens.dtype)
    scores = torch.sigmoid(logits) if model.moe_router_score_function == "sigmoid" else torch.exp(logits)
    probabilities = scores / scores.sum(-1, keepdim=True)
    balance = model.num_moe_experts * (counts / counts.sum() * probabilities.mean(0)).sum()
    z = torch.log(torch.exp(logits).sum(-1)).pow(2).mean()
    return torch.stack(rows), model.moe_aux_loss_coeff * balance + model.moe_z_loss_coeff * z


def losses(
    tokens: torch.Tensor, w: Weights, model: Model, eod_token: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to differentiate and the cross-entropy, from tokens of shape (batch, sequence + 1)."""
    x = w["embedding.weight"][tokens[:, :-1]]
    places = [positions_of(sequence.tolist(), eod_token) for sequence in tokens[:, :-1]]
    router_loss = torch.zeros((), dtype=x.dtype)
    for number in range(model.num_layers):
        name = f"layers.{number}"
        normed = rms_norm(x, w[f"{name}.attention_norm.weight"], model.norm_epsilon)
        mixed = [
            attention(sequence, w, f"{name}.attention", model, number, place)
            for sequence, place in zip(normed, places, strict=True)
        ]
        x = x + torch.stack(mixed)
        normed = rms_norm(x, w[f"{name}.mlp_norm.weight"], model.norm_epsilon).flatten(0, 1)
        if model.is_moe and number % model.moe_layer_freq == 0:
            change, loss = experts(normed, w, f"{name}.mlp", model)
            router_loss = router_loss + loss
        else:
            change = torch.stack(
                [linear(activation(linear(t, w, f"{name}.mlp.gate_up"), model), w, f"{name}.mlp.down") for t in normed]
            )
        x = x + change.view_as(x)
    head = w["embedding.weight" if model.tie_embeddings else "head.weight"]
    logits = rms_norm(x, w["final_norm.weight"], model.norm_epsilon) @ head.T
    picked = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    cross_entropy = (torch.log(torch.exp(logits).sum(-1)) - picked).mean()
    return cross_entropy + router_loss, cross_entropy
