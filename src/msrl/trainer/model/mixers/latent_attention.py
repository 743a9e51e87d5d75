"""Multi-head latent attention (DeepSeek V2, arXiv:2405.04434) under MindSpeed's parameter names.

Letters: N tokens of a packed micro-batch (n tokens on this rank: fewer under sequence parallelism,
otherwise all), c channels, h heads of this rank; q, l: channels of the latent of the queries, and
of the keys and values; r, p, v: channels of a head with position embedding, without it, and of its
values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.models.shape import Mla
from msrl.trainer.model.attention import packed_attention
from msrl.trainer.model.layers import RmsNorm, column_parallel, output_projection
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.model.rope import rotate


class _ReplicatedLinear(torch.nn.Module):
    """Linear layer that is replicated on all tensor-parallel ranks.

    Under sequence parallelism, every rank applies it to its own tokens.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters so marked over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Latent attention in place of Megatron's self-attention."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, mla: Mla, **_: object
    ) -> None:
        super().__init__(config=config)
        self.mla, self.layer_number = mla, layer_number
        tp = parallel_state.get_tensor_model_parallel_world_size()
        self.num_heads = config.num_attention_heads // tp
        self.query_size = config.num_attention_heads * (mla.nope_head_dim + mla.rope_head_dim)
        qkv_size = (mla.q_lora_rank or self.query_size) + mla.kv_lora_rank + mla.rope_head_dim
        self.linear_qkv = _ReplicatedLinear(config, config.hidden_size, qkv_size)
        if mla.q_lora_rank is not None:
            self.q_layernorm = RmsNorm(config, mla.q_lora_rank, mla.norm_eps)
            self.linear_q_up_proj = column_parallel(config, mla.q_lora_rank, self.query_size)
        self.kv_layernorm = RmsNorm(config, mla.kv_lora_rank, mla.norm_eps)
        self.linear_kv_up_proj = column_parallel(
            config,
            mla.kv_lora_rank,
            config.num_attention_heads * (mla.nope_head_dim + mla.v_head_dim),
        )
        self.linear_proj = output_projection(config, config.num_attention_heads * mla.v_head_dim)

    def forward(
        self,
        hidden: Tensor,  # [n, 1, c]
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:  # [n, 1, c]
        assert packed_seq_params is not None, "every micro-batch is packed"
        packed, mla = packed_seq_params, self.mla
        query, latent, shared = self.linear_qkv(hidden).split(
            [mla.q_lora_rank or self.query_size, mla.kv_lora_rank, mla.rope_head_dim], dim=-1
        )
        query_latent = query if mla.q_lora_rank is None else self.q_layernorm(query)
        query, query_rope = self._queries(query_latent).split(
            [mla.nope_head_dim, mla.rope_head_dim], dim=-1
        )
        key, value = self._keys_and_values(latent).split(
            [mla.nope_head_dim, mla.v_head_dim], dim=-1
        )
        key_rope = self._for_own_heads(shared).unsqueeze(2)  # [N, 1, 1, r]
        rotation = packed.rotations[mla.rotary]
        query_rope, key_rope = (rotate(x, rotation) for x in (query_rope, key_rope))
        query = torch.cat([query, query_rope], -1).squeeze(1)  # [N, h, p + r]
        key = torch.cat([key, key_rope.expand(-1, -1, self.num_heads, -1)], -1).squeeze(1)
        choice = self._choose(hidden, query_latent, packed)
        mixed = packed_attention(
            query, key, value.squeeze(1), packed, mla.scale, choice=choice
        )  # [N, h, v]
        mixed = self._train_indexer(mixed, query, key, choice, (hidden, query_latent), packed)
        return self.linear_proj(mixed.flatten(1).unsqueeze(1))

    def _choose(
        self,
        hidden: Tensor,  # [n, 1, c]
        query_latent: Tensor,  # [n, 1, q]
        packed: PackedSequences,
    ) -> Tensor | None:
        """Return the keys that each query attends to, as `packed_attention` takes them."""
        return None

    def _train_indexer(
        self,
        mixed: Tensor,  # [N, h, v]
        query: Tensor,  # [N, h, p + r]
        key: Tensor,  # [N, h, p + r]
        choice: Tensor | None,
        inputs: tuple[Tensor, Tensor],  # as of `_choose`
        packed: PackedSequences,
    ) -> Tensor:
        """Return the same output; its backward pass also goes through the loss of an indexer."""
        return mixed

    def _queries(self, query: Tensor) -> Tensor:
        """Project the normed latent [n, 1, q], or all heads [n, 1, h (p + r)], to [N, 1, h, p + r].

        Without a latent, every rank has computed all heads of its tokens.
        """
        if self.mla.q_lora_rank is not None:
            return self.linear_q_up_proj(query)[0].unflatten(-1, (self.num_heads, -1))
        if not self.config.sequence_parallel:
            return scatter_to_tensor_model_parallel_region(query).unflatten(
                -1, (self.num_heads, -1)
            )
        gathered = gather_from_sequence_parallel_region(query)
        first = parallel_state.get_tensor_model_parallel_rank() * self.num_heads
        heads = gathered.unflatten(-1, (self.config.num_attention_heads, -1))
        return heads.narrow(-2, first, self.num_heads)

    def _keys_and_values(self, latent: Tensor) -> Tensor:
        """Project [n, 1, l] to [N, 1, h, p + v]."""
        return self.linear_kv_up_proj(self.kv_layernorm(latent))[0].unflatten(
            -1, (self.num_heads, -1)
        )

    def _for_own_heads(self, shared: Tensor) -> Tensor:
        """Gather channels that the heads of all ranks share, [n, 1, r] -> [N, 1, r].

        The gradient is summed over the ranks.
        """
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(shared)
        return copy_to_tensor_model_parallel_region(shared)
