"""The policy: Megatron's GPT with the ends that our families and losses need."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.models.shape import Shape
from msrl.trainer.model.padding import pad_tokens


class PolicyModel(GPTModel):
    """Megatron's GPT whose last stage computes logits only at the M positions that `loss_mask` selects, and at P - M of padding after them.

    From `shape` it takes what Megatron's own has no setting for: the scale of embeddings, and what becomes of output weights and logits.
    """

    def __init__(self, *, shape: Shape, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shape = shape
        if shape.reward_head and self.post_process:
            del self.output_layer
            self.rm_head = _score_head(self.config)
        self.gives_hidden = False  # in place of logits: for `chunked_logprobs`

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`padding_mask` is what `balance.py` says of this rank's tokens, for the layers; Megatron's own would cut it like tokens."""
        scale = self._shape.embedding_scale
        if scale != 1 and self.pre_process and decoder_input is None:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
            decoder_input = embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)  # rounded like the weights
        found = super()._preprocess(input_ids, position_ids, decoder_input, **kwargs)  # pyright: ignore[reportArgumentType]
        return (*found[:5], padding_mask, *found[6:])

    def _postprocess(self, hidden_states: Tensor, *args: Any, loss_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        hidden = hidden_states.squeeze(1)  # [N, hidden]
        if loss_mask is not None:
            hidden = hidden[loss_mask]
        if self._shape.reward_head:
            return self.rm_head(hidden.unsqueeze(1))[0].squeeze(1)  # [M, 1]
        hidden = pad_tokens(hidden)
        if self.gives_hidden:
            return copy_to_tensor_model_parallel_region(hidden)  # [P, hidden]
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=self._output_weight())
        softcap = self._shape.logit_softcap
        return (logits if softcap is None else (logits / softcap).tanh() * softcap).squeeze(1)  # [P, vocabulary of this rank]

    def head(self) -> Tensor:
        """The output weights of this rank, [vocabulary of this rank, hidden]."""
        return cast("Tensor", _there(self._output_weight(), self.output_layer.weight))

    def _output_weight(self) -> Tensor | None:
        """What takes the place of the output layer's own weight; None: nothing."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        if self._shape.normalized_head:
            return F.normalize(cast("Tensor", self.output_layer.weight if weight is None else weight))
        return weight


def _score_head(config: TransformerConfig) -> RowParallelLinear:
    """MindSpeed's head of reward models: hidden channels are cut over the tensor-parallel ranks, the score is on all of them."""
    plain = copy.copy(config)
    plain.sequence_parallel = False
    return RowParallelLinear(
        config.hidden_size, 1, config=plain, init_method=torch.nn.init.zeros_, bias=True, input_is_parallel=False, skip_bias_add=False
    )


def _there(value: Tensor | None, other: Any) -> Any:
    return other if value is None else value
