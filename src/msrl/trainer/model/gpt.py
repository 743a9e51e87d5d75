"""Megatron's GPT with msrl's embedding scale, output layers and forward pass.

Letters: n tokens of a packed micro-batch on this rank (s of them after the split of sequence
parallelism), M positions that the loss mask selects, P = M + padding, c channels, V columns of the
vocabulary on this rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.models.shape import Shape
from msrl.models.vision.tower import Vision
from msrl.trainer.model.outputs import HiddenStates
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.model.padding import pad_tokens
from msrl.trainer.model.vision.images import touch
from msrl.trainer.model.vision.tower import VisionTower


class PolicyModel(GPTModel):
    """Megatron's GPT whose last stage computes outputs only at positions of the loss mask.

    The shape provides what Megatron has no setting for: the scale of embeddings, a score head, and
    the treatment of output weights and logits. The output layer computes its product in
    `logits_dtype`, which MiniMax-M1 (arXiv:2506.13585, section 3.2) and ScaleRL (arXiv:2510.13786)
    found necessary in float32.
    """

    def __init__(self, *, shape: Shape, logits_dtype: torch.dtype, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shape, self._logits_dtype = shape, logits_dtype
        if shape.reward_head and self.post_process:
            del self.output_layer
            self.rm_head = _score_head(self.config)
        if shape.vision is not None and self.pre_process:
            self.vision_model = _vision_tower(shape.vision, self.config)
        # True if parameters of the tower need a gradient of every micro-batch.
        self.touches_tower = False

    @contextlib.contextmanager
    def logits_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Compute the product of the output layer in another dtype."""
        configured, self._logits_dtype = self._logits_dtype, dtype
        try:
            yield
        finally:
            self._logits_dtype = configured

    def forward(
        self,
        tokens: Tensor,  # [1, n]
        packed: PackedSequences,
        loss_mask: Tensor,  # [n], or [N] if sequences share rows
        *,
        gives_hidden: bool = False,
    ) -> Tensor | HiddenStates:
        """Run this stage.

        Replaces GPTModel.forward of megatron-core, which has the same three steps. Rotary
        embeddings are part of `packed`.

        Returns:
            Hidden states [s, 1, c] for the next stage. On the last stage scores [M, 1], logits [P,
            V], or, with `gives_hidden`, `HiddenStates` in place of logits.
        """
        embedded = self._embed(tokens, packed) if self.pre_process else None
        hidden = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=packed)
        if not self.post_process:
            return hidden
        gathered = self._gather(hidden).squeeze(1)
        every = gathered if packed.shared is None else packed.shared.expand(gathered)
        selected = every[loss_mask]  # [M, c]
        if self._shape.reward_head:
            return self.rm_head(selected.unsqueeze(1))[0].squeeze(1)
        padded = pad_tokens(selected).to(self._logits_dtype)
        if self._shape.logit_scale != 1:
            padded = padded * self._shape.logit_scale
        return self._hidden_states(padded) if gives_hidden else self._logits(padded)

    def _embed(self, tokens: Tensor, packed: PackedSequences) -> Tensor:
        """Return the embeddings [s, 1, c], scaled if the family scales them.

        Features of images replace those of image tokens.
        """
        embedded = self.embedding(input_ids=tokens, position_ids=None)
        if packed.images is not None:
            return packed.images.merge(embedded, self.vision_model, self._first_row(embedded))
        if self.touches_tower and torch.is_grad_enabled():
            return touch(embedded, self.vision_model)
        scale = self._shape.embedding_scale
        if scale == 1:
            return embedded
        # The scale is rounded like the weights.
        return embedded * torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)

    def _first_row(self, embedded: Tensor) -> int:
        """Return the number of this rank's first row among those of its sequence-parallel group."""
        if not self.config.sequence_parallel:
            return 0
        return parallel_state.get_tensor_model_parallel_rank() * len(embedded)

    def _gather(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [n, 1, c] of all tokens of a sequence-parallel group."""
        if not self.config.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)

    def _hidden_states(self, hidden: Tensor) -> HiddenStates:
        weight = self._output_weight()
        weight = cast("Tensor", self.output_layer.weight) if weight is None else weight
        return HiddenStates(
            copy_to_tensor_model_parallel_region(hidden), weight, self._shape.logit_softcap
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self._output_weight()
        own = cast("Tensor", self.output_layer.weight) if weight is None else weight
        if own.dtype != hidden.dtype:
            weight = own.to(hidden.dtype)
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=weight)
        softcap = self._shape.logit_softcap
        return (logits if softcap is None else (logits / softcap).tanh() * softcap).squeeze(1)

    def _output_weight(self) -> Tensor | None:
        """Return the weight to use in place of the output layer's weight; None for the latter."""
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        if self._shape.normalized_head:
            return F.normalize(
                cast("Tensor", self.output_layer.weight if weight is None else weight)
            )
        return weight


def _vision_tower(vision: Vision, config: TransformerConfig) -> VisionTower:
    """Return the tower; a backward pass computes its blocks again if it does so for all layers."""
    recomputes = config.recompute_granularity == "full"
    tower = VisionTower(vision, config.params_dtype, recomputes=recomputes)
    for parameter in tower.parameters():
        # Ranks of sequence parallelism have gradients of their own tokens, which Megatron sums.
        vars(parameter).update(sequence_parallel=config.sequence_parallel)
    return tower


def _score_head(config: TransformerConfig) -> RowParallelLinear:
    """Return MindSpeed's head of reward models.

    Input channels are split over the tensor-parallel ranks, all of which get the score.
    """
    plain = copy.copy(config)
    plain.sequence_parallel = False
    return RowParallelLinear(
        config.hidden_size,
        1,
        config=plain,
        init_method=torch.nn.init.zeros_,
        bias=True,
        input_is_parallel=False,
        skip_bias_add=False,
    )
