"""Module of the core attention, which the layer spec passes to Megatron in place of Megatron's own.

Megatron's core attention has neither packing nor fast kernels on CPU.

Letters: N tokens of a packed micro-batch, h query heads and g key/value groups of this rank, d head
size.
"""

from __future__ import annotations

from typing import cast

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.models.shape import PLAIN, Attention
from msrl.trainer.model.attention import packed_attention
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.model.rope import rotate


class CoreAttention(MegatronModule):
    """Core attention module of a layer, between the projections.

    Megatron's layer spec creates it with Megatron's arguments. `traits` belong to the model;
    `layer` is the number of the layer in the model, counted from 0 over all pipeline stages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
        traits: Attention = PLAIN,
        layer: int = 0,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if traits.scale is None else traits.scale
        self.softcap = traits.softcap
        self.window = traits.layer_window(layer)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = (
            torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            if traits.sinks
            else None
        )
        self.register_parameter("softmax_offset", sinks)  # Megatron's name

    def forward(
        self,
        query: Tensor,  # [N, 1, h, d]
        key: Tensor,  # [N, 1, g, d]
        value: Tensor,  # [N, 1, g, d]
        attention_mask: None = None,
        attn_mask_type: object = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:  # [N, 1, h * d]
        assert packed_seq_params is not None, "every micro-batch is packed"
        packed = packed_seq_params
        query, key = (
            rotate(x, packed.cos, packed.sin, interleaved=packed.interleaved) for x in (query, key)
        )
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        sinks = cast("Tensor | None", self.softmax_offset)
        mixed = packed_attention(
            query, key, value, packed, self.scale, self.window, self.softcap, sinks
        )
        return mixed.flatten(1).unsqueeze(1)
