"""Bytes of what a training rank holds all the time: weights, gradients, optimizer, and the reference's weights. Exact, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from msrl.config.schema import Config, LoraConfig
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.reward_head import BIAS
from msrl.models.rules import Replicated, Sharded, Vocab
from msrl.models.select import chosen, is_layer
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor, stage_tensors
from msrl.plan.derived import critic_shape, layout_from, needs_critic, needs_reference, rank_model_shapes, world_size


def _elements(placed: StageTensor) -> int:
    """Elements of a rank's tensor."""
    rule, size = placed.rule, placed.num_shards
    if isinstance(rule.layout, Replicated):
        return sum(math.prod(shape) for shape in rule.shapes)
    if isinstance(rule.layout, Vocab):
        hidden = math.prod(rule.shapes[0][1:])
        return -(-rule.layout.vocab_size // size) * hidden
    return sum(math.prod(shape) for shape in rule.shapes) // size


def parameters_per_rank(shape: Shape, cut: ParallelLayout) -> int:
    """Parameters on the fullest rank. A tied embedding stands on the first and on the last stage."""
    return max(sum(_elements(placed) for placed in stage_tensors(shape, cut, Coords(pp=stage))) for stage in range(cut.pp))


def element_bytes(config: Config) -> int:
    """Bytes of a weight or an activation."""
    return 2 if config.model.dtype == "bfloat16" else 4


@dataclass(frozen=True, slots=True)
class _Held:
    """Parameters of a rank, and those of them that are trained: experts apart, whose optimizer is spread over fewer ranks."""

    held: int
    trained: int
    trained_experts: int


def _held(config: Config, shape: Shape, stage: int) -> _Held:
    placed, lora = stage_tensors(shape, layout_from(config.train.parallel), Coords(pp=stage)), config.train.lora
    held = sum(_elements(one) for one in placed)
    if lora.rank is not None:
        adapted = [one for one in placed if is_layer(one.rule.mcore, one.rule.hf, lora.targets)]
        adapters = sum(_adapter_elements(one, lora.rank) for one in adapted)
        experts = sum(_adapter_elements(one, lora.rank) for one in adapted if one.rule.expert is not None)
        return _Held(held + adapters, adapters - experts, experts)
    frozen = chosen(shape, config.train.freeze, key="train.freeze") if config.train.freeze else frozenset[str]()
    trained = [one for one in placed if one.rule.mcore not in frozen]
    experts = sum(_elements(one) for one in trained if one.rule.expert is not None)
    return _Held(held, sum(map(_elements, trained)) - experts, experts)


def _adapter_elements(placed: StageTensor, rank: int) -> int:
    """Elements of a layer's two factors on a rank: one of them is cut as the layer is, the other whole."""
    rows, columns, layout = sum(size[0] for size in placed.rule.shapes), placed.rule.shapes[0][1], placed.rule.layout
    if isinstance(layout, Replicated):
        return rank * (rows + columns)
    is_row = isinstance(layout, Sharded) and layout.axis == 1
    return rank * (rows + columns // placed.num_shards if is_row else rows // placed.num_shards + columns)


def state_bytes(config: Config, shape: Shape, stage: int) -> dict[str, int]:
    """Weights; gradients (fp32); optimizer (fp32 moments, and masters for bfloat16; spread over the ranks that hold the same)."""
    parallel, held, element = config.train.parallel, _held(config, shape, stage), element_bytes(config)
    cut, per_stage = layout_from(parallel), world_size(config) // parallel.pp
    moments = 12 if element == 2 else 8
    spread = held.trained * moments // (per_stage // parallel.tp)
    spread += held.trained_experts * moments // max(per_stage // (cut.etp_size * cut.num_expert_groups), 1)
    return {"weights": held.held * element, "gradients": (held.trained + held.trained_experts) * 4, "optimizer": spread}


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of a model in training."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0


NO_STATE = State()


def critic_state(config: Config, stage: int) -> State:
    """The critic's on a rank of a pipeline stage; nothing where none is trained. It is trained whole but for its head's bias."""
    shape = critic_shape(config) if needs_critic(config) else None
    if shape is None:
        return NO_STATE
    train = config.train.model_copy(update={"lora": LoraConfig(), "freeze": (BIAS,)})
    return State(**state_bytes(config.model_copy(update={"train": train}), shape, stage))


def reward_model_bytes(config: Config, stage: int) -> int:
    """The weights of the reward models that stand on a rank of a pipeline stage."""
    cut, shapes = layout_from(config.train.parallel), rank_model_shapes(config)
    return element_bytes(config) * sum(_elements(one) for shape in shapes for one in stage_tensors(shape, cut, Coords(pp=stage)))


def bytes_per_device(config: Config, shape: Shape) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer on the fullest rank, of what is trained: all, what is not frozen, or the adapters alone."""
    return max((state_bytes(config, shape, stage) for stage in range(config.train.parallel.pp)), key=lambda found: sum(found.values()))


def reference_bytes(config: Config, shape: Shape) -> int:
    """Bytes of the reference's weights on a device: none where there is none, or where it is the policy without its adapters."""
    is_held = needs_reference(config) and config.train.lora.rank is None
    return bytes_per_device(config, shape)["weights"] if is_held else 0
