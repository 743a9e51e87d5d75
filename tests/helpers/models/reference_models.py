"""Reference forward passes of families that transformers lacks (their checkpoints include code).

They follow the published `modeling_*.py` of each family, read the raw Hugging Face tensors without
msrl's rules, and compute one sequence at a time in float64. Letters: T tokens, c hidden, h heads,
g key/value groups, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of [T, h, d] with [T, g, d]; the heads of a group are adjacent."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v
    ).flatten(1)


def _rotate_halves(x: Tensor, theta: float) -> Tensor:
    """Apply Llama's rotary embedding to [T, h, d], which pairs channels i and i + d / 2."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * theta ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _rotate_adjacent(x: Tensor, theta: float) -> Tensor:
    """Apply ChatGLM's rotary embedding to [T, h, d].

    It rotates the first half of the channels and pairs each even channel with the next one.
    """
    rotated_dim = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (
        -torch.arange(0, rotated_dim, 2, dtype=torch.float64) / rotated_dim
    )
    pairs = torch.view_as_complex(x[..., :rotated_dim].unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    return torch.cat((rotated.flatten(-2), x[..., rotated_dim:]), -1)


def _run(
    forward: Callable[[Tensor, Weights], Tensor], weights: Weights, ids: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the concatenated logits of all sequences."""
    weights_64 = {name: tensor.double() for name, tensor in weights.items()}
    with torch.inference_mode():
        return torch.cat([forward(torch.from_numpy(row), weights_64) for row in ids]).numpy()


def internlm2(config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of InternLM 2. `wqkv` has rows of heads, key and value per group."""
    heads, groups, eps = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["rms_norm_eps"],
    )
    head_dim = config["hidden_size"] // heads

    def forward(tokens: Tensor, w: Weights) -> Tensor:
        x = w["model.tok_embeddings.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            qkv = _norm(x, w[p + "attention_norm.weight"], eps) @ w[p + "attention.wqkv.weight"].T
            qkv = qkv.view(len(x), groups, heads // groups + 2, head_dim)
            q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
            q, k = _rotate_halves(q, config["rope_theta"]), _rotate_halves(k, config["rope_theta"])
            x = x + _attend(q, k, v) @ w[p + "attention.wo.weight"].T
            y = _norm(x, w[p + "ffn_norm.weight"], eps)
            gate, up = (y @ w[p + f"feed_forward.w{number}.weight"].T for number in (1, 3))
            x = x + (F.silu(gate) * up) @ w[p + "feed_forward.w2.weight"].T
        return _norm(x, w["model.norm.weight"], eps) @ w["output.weight"].T

    return _run(forward, weights, ids)


def baichuan(config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of Baichuan 7B, whose `W_pack` concatenates q, k and v.

    Baichuan2's output layer (NormHead) divides each row by its norm.
    """
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]

    def forward(tokens: Tensor, w: Weights) -> Tensor:
        x = w["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            qkv = (
                _norm(x, w[p + "input_layernorm.weight"], eps) @ w[p + "self_attn.W_pack.weight"].T
            )
            q, k, v = qkv.view(len(x), 3, heads, -1).unbind(1)
            x = (
                x
                + _attend(_rotate_halves(q, 1e4), _rotate_halves(k, 1e4), v)
                @ w[p + "self_attn.o_proj.weight"].T
            )
            y = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = (y @ w[p + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        head = w["lm_head.weight"]
        head = (
            head / head.norm(dim=1, keepdim=True)
            if config["architectures"] == ["BaichuanForCausalLM"]
            else head
        )
        return _norm(x, w["model.norm.weight"], eps) @ head.T

    return _run(forward, weights, ids)


def chatglm(config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of ChatGLM 2, ChatGLM 3 and GLM-4.

    `query_key_value` has all heads, all keys, all values; `dense_h_to_4h` has gate, then up.
    """
    heads, groups, head_dim, eps = (
        config[key]
        for key in (
            "num_attention_heads",
            "multi_query_group_num",
            "kv_channels",
            "layernorm_epsilon",
        )
    )
    theta = 10000.0 * config.get("rope_ratio", 1)

    def forward(tokens: Tensor, w: Weights) -> Tensor:
        x = w["transformer.embedding.word_embeddings.weight"][tokens]
        for layer in range(config["num_layers"]):
            p = f"transformer.encoder.layers.{layer}."
            y = _norm(x, w[p + "input_layernorm.weight"], eps)
            qkv = (
                y @ w[p + "self_attention.query_key_value.weight"].T
                + w[p + "self_attention.query_key_value.bias"]
            )
            q, k, v = qkv.view(len(x), -1, head_dim).split([heads, groups, groups], 1)
            x = (
                x
                + _attend(_rotate_adjacent(q, theta), _rotate_adjacent(k, theta), v)
                @ w[p + "self_attention.dense.weight"].T
            )
            y = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = (y @ w[p + "mlp.dense_h_to_4h.weight"].T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ w[p + "mlp.dense_4h_to_h.weight"].T
        return (
            _norm(x, w["transformer.encoder.final_layernorm.weight"], eps)
            @ w["transformer.output_layer.weight"].T
        )

    return _run(forward, weights, ids)


def bailing_moe_v2(
    config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the logits of Ling 2. `query_key_value` has all heads, all keys, all values."""
    heads, groups, head_dim, eps = (
        config[key]
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    )
    rotated = int(head_dim * config["partial_rotary_factor"])

    def rotate(x: Tensor) -> Tensor:
        turned = _rotate_halves(x[..., :rotated], config["rope_theta"])
        return torch.cat((turned, x[..., rotated:]), -1)

    def gated(x: Tensor, w: Weights, prefix: str) -> Tensor:
        gate, up = (x @ w[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
        return (F.silu(gate) * up) @ w[f"{prefix}down_proj.weight"].T

    def experts(x: Tensor, w: Weights, prefix: str) -> Tensor:
        scores = (x @ w[f"{prefix}gate.weight"].T).sigmoid()
        merit = scores + w[f"{prefix}gate.expert_bias"]
        output = []
        for token, own_scores, own_merit in zip(x, scores, merit, strict=True):
            by_group = own_merit.view(config["n_group"], -1)
            best = by_group.topk(2, -1).values.sum(-1).topk(config["topk_group"]).indices
            allowed = torch.full_like(by_group, -torch.inf)
            allowed[best] = by_group[best]
            chosen = allowed.flatten().topk(config["num_experts_per_tok"]).indices
            shares = own_scores[chosen] / own_scores[chosen].sum() * config["routed_scaling_factor"]
            mixed = gated(token[None], w, f"{prefix}shared_experts.")
            for number, share in zip(chosen.tolist(), shares, strict=True):
                mixed = mixed + share * gated(token[None], w, f"{prefix}experts.{number}.")
            output.append(mixed)
        return torch.cat(output)

    def forward(tokens: Tensor, w: Weights) -> Tensor:
        x = w["model.word_embeddings.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            y = _norm(x, w[p + "input_layernorm.weight"], eps)
            qkv = (y @ w[p + "attention.query_key_value.weight"].T).view(len(x), -1, head_dim)
            q, k, v = qkv.split([heads, groups, groups], 1)
            q = rotate(_norm(q, w[p + "attention.query_layernorm.weight"], eps))
            k = rotate(_norm(k, w[p + "attention.key_layernorm.weight"], eps))
            x = x + _attend(q, k, v) @ w[p + "attention.dense.weight"].T
            y = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
            is_dense = layer < config["first_k_dense_replace"]
            x = x + (gated if is_dense else experts)(y, w, f"{p}mlp.")
        return _norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T

    return _run(forward, weights, ids)


def minicpm(config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of MiniCPM.

    It is Granite with other names of the factors, but that scores have the usual one.
    """
    values = {
        **config,
        "model_type": "granite",
        "attention_multiplier": (config["hidden_size"] // config["num_attention_heads"]) ** -0.5,
        "embedding_multiplier": config["scale_emb"],
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
    }
    return _of_transformers("Granite", values, weights, ids)


def mimo(config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of MiMo, which is Qwen2 without its layers for multi-token prediction."""
    return _of_transformers("Qwen2", {**config, "model_type": "qwen2"}, weights, ids)


def _of_transformers(
    name: str, config: dict[str, Any], weights: Weights, ids: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the logits of a class of transformers in float64."""
    import transformers

    config_class = getattr(transformers, f"{name}Config")
    values = {key: value for key, value in config.items() if key != "architectures"}
    model = getattr(transformers, f"{name}ForCausalLM").from_pretrained(
        None, config=config_class(**values), state_dict=dict(weights), dtype=torch.float64,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.inference_mode():
        return torch.cat([model(torch.from_numpy(row)[None]).logits[0] for row in ids]).numpy()
