"""Megatron's distributed AdamW over float32 master weights.

Experts are data parallel over other ranks than the rest of a model and need their own optimizer;
both share one gradient norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from msrl.config.sections import train
from msrl.models.vision.tensors import PROJECTOR, TOWER
from msrl.trainer.gradient_norm import use_accurate_norms

MOMENTS = ("exp_avg", "exp_avg_sq")
LR_FACTOR = "msrl_lr_factor"


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel],
    settings: train.OptimizerConfig,
    vision: train.VisionConfig,
    *,
    is_bf16: bool,
) -> ChainedOptimizer:
    """Return the optimizer of a rank's model, which may have several virtual pipeline stages.

    Every group of parameters has the factor `LR_FACTOR` of the learning rate.
    """
    use_accurate_norms()
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.grad_clip or 0.0,
        bf16=is_bf16,
        params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
    overrides = get_standard_config_overrides(config)  # no decay of biases and norms
    for name, lr in (("projector", vision.projector_lr), ("tower", vision.tower_lr)):
        if lr is not None:
            overrides[_of_vision(name)] = cast("Any", {"max_lr": lr})
    chain = get_megatron_optimizer(config, list(wrapped), overrides, use_gloo_process_groups=False)
    assert isinstance(chain, ChainedOptimizer)
    for distributed in active_optimizers(chain):
        for group in distributed.optimizer.param_groups:
            # Megatron's scheduler, which msrl does not use, would apply the multiplier.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            # A rate that equals the model's leaves it in every bit.
            own = group["max_lr"]
            group[LR_FACTOR] = 1.0 if own == settings.lr else own / settings.lr
            if is_torch_adamw(distributed):
                # One pass over each shard instead of ten.
                group["fused"], group["foreach"] = True, False
    return chain


def _of_vision(name: str) -> ParamKey:
    """Return Megatron's key of the parameters of a vision tower: its `projector`, or the others.

    Names may have prefixes of wrappers.
    """

    def matches(_: Tensor, parameter: str) -> bool:
        own = parameter[parameter.find(TOWER) :]
        return own.startswith(TOWER) and own.startswith(PROJECTOR) is (name == "projector")

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=matches))


def is_torch_adamw(distributed: DistributedOptimizer) -> bool:
    """Return True if the optimizer is torch's AdamW, which counts updates per parameter.

    Megatron uses Transformer Engine's or Apex's where installed, and MindSpeed has its own; these
    count updates in the parameter groups.
    """
    return isinstance(distributed.optimizer, torch.optim.AdamW)


def active_optimizers(chain: ChainedOptimizer) -> Iterator[DistributedOptimizer]:
    """Yield the optimizers that have parameters on this rank."""
    for optimizer in chain.chained_optimizers:
        if not getattr(optimizer, "is_stub_optimizer", False):
            yield cast("DistributedOptimizer", optimizer)


def state_tensors(chain: ChainedOptimizer, *, is_bf16: bool) -> Iterator[Tensor]:
    """Yield the moments, and the master weights where they are not the parameters themselves."""
    for distributed in active_optimizers(chain):
        for state in distributed.optimizer.state.values():
            yield from (state[moment] for moment in MOMENTS if moment in state)
        for masters in distributed.shard_fp32_from_float16_groups if is_bf16 else ():
            yield from masters


def clip_gradients(chain: ChainedOptimizer, max_norm: float) -> float:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`.

    Returns the norm before.
    """
    norm = float(chain.get_grad_norm() or 0.0)
    # `clip_grad_by_total_norm_fp32` takes a norm that includes the gradients of all optimizers.
    for optimizer in active_optimizers(chain):
        clip_grad_by_total_norm_fp32(
            cast("list[Tensor]", optimizer.get_parameters()), max_norm, norm
        )
    return norm
