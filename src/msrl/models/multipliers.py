"""Constant factors of Granite and MiniCPM (arXiv:2404.06395, section 3)."""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import with_attention
from msrl.models.hf_config import HfConfig
from msrl.models.shape import Shape


def with_multipliers(config: HfConfig, shape: Shape) -> Shape:
    """Return the shape with Granite's factors of embeddings, scores, residuals and logits."""
    return replace(
        with_attention(shape, scale=config.positive("attention_multiplier", 1.0)),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )


def with_depth_scale(
    config: HfConfig, shape: Shape, *, embedding: float, depth: float, width: int
) -> Shape:
    """Return the shape with MiniCPM's factors; arguments are the defaults of the config class.

    Residuals have the factor `scale_depth` / sqrt(number of layers), logits `dim_model_base` /
    hidden size.
    """
    scale = config.positive("scale_depth", depth)
    return replace(
        shape,
        embedding_scale=config.positive("scale_emb", embedding),
        residual_scale=scale * shape.num_layers**-0.5,
        logit_scale=config.count("dim_model_base", width) / shape.hidden_size,
    )
