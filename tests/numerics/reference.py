"""The decoder written down a second time: plain formulas, loops over tokens and heads, weights by name."""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping

import torch

from launch.spec import Model

Weights = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def turned(x: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """Pairs (i, i + half) of a vector as complex numbers, each multiplied by exp(j * position * base^(-2i/d))."""
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        turn = cmath.exp(1j * position * base ** (-2 * i / len(x)))
        out[i] = x[i] * turn.real - x[i + half] * turn.imag
        out[i + half] = x[i] * turn.imag + x[i + half] * turn.real
    return torch.stack(out)


def attention(x: torch.Tensor, w: Weights, name: str, model: Model) -> torch.Tensor:
    """(sequence, hidden) -> (sequence, hidden), one position, one head at a time."""
    heads, groups, d = model.num_attention_heads, model.num_query_groups, model.kv_channels
    qkv = (x @ w[f"{name}.qkv.weight"].T).view(len(x), heads + 2 * groups, d)

    def head(position: int, number: int, norm: str) -> torch.Tensor:
        vector = qkv[position, number]
        if model.qk_layernorm:
            vector = rms_norm(vector, w[f"{name}.{norm}.weight"], model.norm_epsilon)
        return turned(vector, position, model.rotary_base)

    rows = []
    for position in range(len(x)):
        outputs = []
        for number in range(heads):
            group = number * groups // heads
            query = head(position, number, "query_norm")
            scores = torch.stack(
                [query @ head(past, heads + group, "key_norm") / math.sqrt(d) for past in range(position + 1)]
            )
            values = qkv[: position + 1, heads + groups + group]
            outputs.append(torch.exp(scores) / torch.exp(scores).sum() @ values)
        rows.append(torch.cat(outputs))
    return torch.stack(rows) @ w[f"{name}.output.weight"].T


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[: len(x) // 2], x[len(x) // 2 :]
    return gate * torch.sigmoid(gate) * up


def experts(tokens: torch.Tensor, w: Weights, name: str, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, hidden) -> (T, hidden) and the router's loss, one token at a time."""
    logits = tokens @ w[f"{name}.router.weight"].T
    probabilities = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    counts = [0] * model.num_moe_experts
    rows = []
    for token, logit, probability in zip(tokens, logits, probabilities, strict=True):
        chosen = sorted(range(model.num_moe_experts), key=lambda e: -logit[e].item())[: model.moe_router_topk]
        weights = probability[chosen]
        if model.moe_router_order == "topk_then_softmax" or model.moe_router_normalize_topk:
            weights = weights / weights.sum()
        row = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights, strict=True):
            counts[expert] += 1
            row = row + weight * (swiglu(token @ w[f"{name}.gate_up"][expert]) @ w[f"{name}.down"][expert])
        rows.append(row)
    shares = torch.tensor(counts, dtype=tokens.dtype) / sum(counts)
    balance = model.num_moe_experts * (shares * probabilities.mean(0)).sum()
    z = torch.log(torch.exp(logits).sum(-1)).pow(2).mean()
    return torch.stack(rows), model.moe_aux_loss_coeff * balance + model.moe_z_loss_coeff * z


def losses(tokens: torch.Tensor, w: Weights, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, sequence + 1) -> what is differentiated, and the cross-entropy."""
    x = w["embedding.weight"][tokens[:, :-1]]
    router_loss = torch.zeros((), dtype=x.dtype)
    for number in range(model.num_layers):
        name = f"layers.{number}"
        normed = rms_norm(x, w[f"{name}.attention_norm.weight"], model.norm_epsilon)
        x = x + torch.stack([attention(sequence, w, f"{name}.attention", model) for sequence in normed])
        normed = rms_norm(x, w[f"{name}.mlp_norm.weight"], model.norm_epsilon).flatten(0, 1)
        if model.is_moe and number % model.moe_layer_freq == 0:
            change, loss = experts(normed, w, f"{name}.mlp", model)
            router_loss = router_loss + loss
        else:
            up, down = w[f"{name}.mlp.gate_up.weight"], w[f"{name}.mlp.down.weight"]
            change = torch.stack([down @ swiglu(up @ token) for token in normed])
        x = x + change.view_as(x)
    head = w["embedding.weight" if model.tie_embeddings else "head.weight"]
    logits = rms_norm(x, w["final_norm.weight"], model.norm_epsilon) @ head.T
    picked = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    cross_entropy = (torch.log(torch.exp(logits).sum(-1)) - picked).mean()
    return cross_entropy + router_loss, cross_entropy
