"""Self-attention whose output is multiplied by gates (Qwen3-Next).

Letters: N tokens of a packed micro-batch, c channels, h heads and g query groups of this rank, d
head size.
"""

from __future__ import annotations

from typing import Any, cast

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedAttention(SelfAttention):
    """Megatron's attention with `attention_output_gate`, with the gates in the order of the files.

    The rows of a query group are the query and the gate of its first head, of its second, and so
    on, then its key and value. Megatron orders all queries of a group before all gates.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,  # [N, 1, c]
        key_value_states: Tensor | None = None,
        output_gate: bool = True,
        split_qkv: bool = True,
    ) -> Any:
        """Return queries [N, 1, h, d], keys and values [N, 1, g, d] and gates [N, 1, h, d].

        Replaces SelfAttention.get_query_key_value_tensors of megatron-core.
        """
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        linear, query_norm, key_norm = (
            cast("Any", module) for module in (self.linear_qkv, self.q_layernorm, self.k_layernorm)
        )
        mixed = linear(hidden_states)[0].unflatten(-1, (groups, -1))
        query_gate, key, value = mixed.split([mixed.shape[-1] - 2 * size, size, size], -1)
        query, gate = query_gate.unflatten(-1, (-1, 2, size)).flatten(2, 3).unbind(3)
        return query_norm(query), key_norm(key), value, gate
