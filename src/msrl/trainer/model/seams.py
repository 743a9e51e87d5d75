"""Internals of megatron-core that msrl overrides or calls, with the parameters it relies on.

They are not public, so another version may change them: 0.16.1 and 0.18.0 to 0.19.2 have these
parameters. `check_seams` compares signatures once, when the first model is built. It accepts
wrappers that hide their signature, such as MindSpeed's patches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron.core
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from msrl.errors import MsrlError

VERSIONS = "0.16.1 or 0.18 to 0.19"


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of Megatron and the parameters that must keep their names and order."""

    function: Callable[..., Any]
    parameters: tuple[str, ...]
    used_by: str  # file of msrl

    def is_intact(self) -> bool:
        """Return True if the function has these parameters first, and others only with defaults."""
        actual = inspect.signature(self.function).parameters
        if any(
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in actual.values()
        ):
            return True
        known = [name for name in actual if name in self.parameters]
        required = {
            name for name, parameter in actual.items() if parameter.default is parameter.empty
        }
        return known == list(self.parameters) and required <= set(self.parameters)


SEAMS = (
    Seam(GPTModel.shared_embedding_or_output_weight, ("self",), "model/gpt.py"),
    Seam(
        TransformerBlock.forward,
        ("self", "hidden_states", "attention_mask", "packed_seq_params"),
        "model/gpt.py",
    ),
    Seam(
        SelfAttention.get_query_key_value_tensors,
        ("self", "hidden_states", "key_value_states", "output_gate", "split_qkv"),
        "model/mixers/gated_attention.py",
    ),
    Seam(
        TransformerLayer._forward_attention,
        ("self", "hidden_states", "packed_seq_params"),
        "model/experts.py",
    ),
    Seam(
        TransformerLayer._forward_pre_mlp_layernorm, ("self", "hidden_states"), "model/experts.py"
    ),
    Seam(
        TransformerLayer._forward_post_mlp,
        ("self", "mlp_output_with_bias", "residual"),
        "model/experts.py",
    ),
    Seam(MoELayer.shared_experts_compute, ("self", "hidden_states"), "model/experts.py"),
    Seam(
        MoELayer.preprocess, ("self", "hidden_states", "probs", "routing_map"), "model/experts.py"
    ),
    Seam(MoELayer.dispatch, ("self", "hidden_states", "probs"), "model/experts.py"),
    Seam(MoELayer.routed_experts_compute, ("self", "hidden_states", "probs"), "model/experts.py"),
    Seam(MoELayer.combine, ("self", "output"), "model/experts.py"),
    Seam(MoELayer.postprocess, ("self", "output", "shared_expert_output"), "model/experts.py"),
    Seam(
        SequentialMLP.forward,
        ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
        "model/experts.py",
    ),
    Seam(TopKRouter._maintain_float32_expert_bias, ("self",), "model/experts.py"),
    Seam(
        P2PCommunicator._communicate,
        ("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape"),
        "model/pipeline.py",
    ),
    Seam(DistributedOptimizer._get_model_param_range_map, ("self", "param"), "optimizer_state.py"),
)


def check_seams(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Raise MsrlError if the installed Megatron has changed one of the functions."""
    changed = [
        f"{seam.function.__qualname__} ({seam.used_by})" for seam in seams if not seam.is_intact()
    ]
    if changed:
        raise MsrlError(
            f"megatron-core={megatron.core.__version__}: msrl relies on other parameters of "
            f"{', '.join(changed)}. Install megatron-core {VERSIONS}."
        )


@functools.cache
def check_seams_once() -> None:
    """Check the seams on the first call in a process."""
    check_seams()
