"""Exact bytes of the persistent state of a training rank: weights, gradients, optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from msrl.config.sections.train import LoraConfig, TrainConfig, VisionConfig
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.reward_head import BIAS, WEIGHT
from msrl.models.rules import Replicated, Sharded, Vocab
from msrl.models.select import frozen_names, is_layer
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor, stage_tensors
from msrl.plan.run_plan import RunPlan


def _elements(tensor: StageTensor) -> int:
    """Return the number of elements of a tensor on a rank."""
    rule, size = tensor.rule, tensor.num_shards
    if isinstance(rule.layout, Replicated):
        return sum(math.prod(shape) for shape in rule.shapes)
    if isinstance(rule.layout, Vocab):
        hidden = math.prod(rule.shapes[0][1:])
        return -(-rule.layout.vocab_size // size) * hidden
    return sum(math.prod(shape) for shape in rule.shapes) // size


@functools.lru_cache(maxsize=1024)
def _stage_elements(shape: Shape, layout: ParallelLayout, stage: int) -> int:
    """Return the number of parameters of a rank of a pipeline stage."""
    return sum(map(_elements, stage_tensors(shape, layout, Coords(pp=stage))))


def parameters_per_rank(shape: Shape, layout: ParallelLayout) -> int:
    """Return the most parameters of a rank; a tied embedding is on the first and last stage."""
    return max(_stage_elements(shape, layout, stage) for stage in range(layout.pp))


def element_bytes(plan: RunPlan) -> int:
    """Return the bytes of a weight or an activation."""
    return _element_bytes(plan.dtype)


def logits_bytes(plan: RunPlan) -> int:
    """Return the bytes of a logit."""
    return _element_bytes(plan.logits_dtype)


def _element_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


@dataclass(frozen=True, slots=True)
class _ParameterCounts:
    """Parameters of a rank: all, trained without experts, and trained experts.

    Experts are separate because their optimizer is sharded over fewer ranks.
    """

    total: int
    trained: int
    trained_experts: int


def _parameter_counts(
    shape: Shape, layout: ParallelLayout, train: TrainConfig, stage: int
) -> _ParameterCounts:
    """Return the parameters of a rank of a pipeline stage, with the parameters of LoRA adapters."""
    # A search of layouts asks again with another micro-batch or recomputation.
    counted = {name: getattr(train, name) for name in _COUNTED}
    own = TrainConfig().model_copy(update=counted)
    # Frozen models have a hash.
    return _count(shape, layout, own, stage)  # pyright: ignore[reportArgumentType]


_COUNTED = ("lora", "freeze", "vision", "indexer_loss_coef")  # what the counts depend on


@functools.lru_cache(maxsize=1024)
def _count(
    shape: Shape, layout: ParallelLayout, train: TrainConfig, stage: int
) -> _ParameterCounts:
    tensors = stage_tensors(shape, layout, Coords(pp=stage))
    weights = sum(map(_elements, tensors))
    adapters: list[tuple[StageTensor, int]] = []
    if train.lora.rank is None:
        trained = _unfrozen_elements(shape, tensors, train)
    else:
        adapters = [
            (tensor, _adapter_elements(tensor, train.lora.rank))
            for tensor in tensors
            if is_layer(tensor.rule.mcore, tensor.rule.hf, train.lora.targets)
        ]
        heads = [tensor for tensor in tensors if tensor.rule.mcore == WEIGHT]
        trained = adapters + [(tensor, _elements(tensor)) for tensor in heads]
    num_trained = sum(size for _, size in trained)
    num_experts = sum(size for tensor, size in trained if tensor.rule.expert is not None)
    copies = 1 if train.lora.load is None else 2  # the rank keeps the adapters of the start
    total = weights + copies * sum(size for _, size in adapters)
    return _ParameterCounts(total, num_trained - num_experts, num_experts)


def _unfrozen_elements(
    shape: Shape, tensors: Iterable[StageTensor], train: TrainConfig
) -> list[tuple[StageTensor, int]]:
    """Return the tensors that are trained without LoRA, with their elements on a rank."""
    frozen = frozen_names(shape, train.freeze, train.vision.trained)
    return [
        (tensor, _elements(tensor))
        for tensor in tensors
        if tensor.rule.mcore not in frozen and (not tensor.rule.frozen or train.indexer_loss_coef)
    ]


def _adapter_elements(tensor: StageTensor, rank: int) -> int:
    """Return the elements of the two LoRA factors of a layer on a rank.

    One factor is sharded like the layer, the other is replicated.
    """
    layout, shapes, shards = tensor.rule.layout, tensor.rule.shapes, tensor.num_shards
    rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
    if isinstance(layout, Replicated):
        return rank * (rows + columns)
    if isinstance(layout, Sharded) and layout.axis == 1:
        return rank * (rows + columns // shards)
    return rank * (rows // shards + columns)


def state_bytes(
    plan: RunPlan, shape: Shape, stage: int, train: TrainConfig | None = None
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer on a rank of a stage.

    `train` selects the trained parameters; by default the policy's. Gradients are float32.
    The optimizer has float32 moments, and float32 master weights for bfloat16; it is sharded over
    the ranks with equal parameters.
    """
    layout, element = plan.layout, element_bytes(plan)
    counts = _parameter_counts(shape, layout, train or plan.train, stage)
    stage_ranks = plan.world_size // layout.pp
    expert_copies = max(stage_ranks // (layout.etp_size * layout.num_expert_groups), 1)
    state_size = 12 if element == 2 else 8  # bytes per trained parameter
    optimizer = counts.trained * state_size // (stage_ranks // layout.tp)
    optimizer += counts.trained_experts * state_size // expert_copies
    return {
        "weights": counts.total * element,
        "gradients": (counts.trained + counts.trained_experts) * 4,
        "optimizer": optimizer,
    }


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of a trained model."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0


NO_STATE = State()


def critic_state(plan: RunPlan, stage: int) -> State:
    """Return the state of the critic on a rank of a pipeline stage; zeros if there is no critic.

    All of its parameters are trained, except for the bias of the head.
    """
    if plan.critic is None or plan.separate_model("critic") is not None:
        return NO_STATE
    return _critic_state(plan, plan.critic.require_shape(), stage)


def _critic_state(plan: RunPlan, shape: Shape, stage: int) -> State:
    """Return the state of a critic in the layout of the plan."""
    changes = {
        "lora": LoraConfig(),
        "freeze": (BIAS,),
        "indexer_loss_coef": 0.0,
        "vision": VisionConfig(),
    }
    train = plan.train.model_copy(update=changes)
    return State(**state_bytes(plan, shape, stage, train))


def reward_model_bytes(plan: RunPlan, stage: int) -> int:
    """Return the bytes of the reward models' weights on a rank of a pipeline stage."""
    if plan.separate_model("reward") is not None:
        return 0
    shapes = [model.require_shape() for model in plan.rank_models]
    num_elements = sum(_stage_elements(shape, plan.layout, stage) for shape in shapes)
    return element_bytes(plan) * num_elements


def teacher_bytes(plan: RunPlan) -> int:
    """Return the bytes of the teachers' weights on a training device."""
    shapes = [model.require_shape() for model in plan.rank_teachers.values()]
    return element_bytes(plan) * sum(parameters_per_rank(shape, plan.layout) for shape in shapes)


def bytes_per_device(plan: RunPlan) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer on the rank with most of them.

    Gradients and optimizer cover trained parameters only: all, those that are not frozen, or
    adapters.
    """
    states = [state_bytes(plan, plan.shape, stage) for stage in range(plan.layout.pp)]
    return max(states, key=lambda state: sum(state.values()))


def reference_bytes(plan: RunPlan) -> int:
    """Return the bytes of the reference's weights on a training device.

    0 without a reference or with separate devices, and with LoRA, where the reference is the policy
    without its adapters unless it has its own weights.
    """
    if plan.reference is None or plan.separate_model("reference") is not None:
        return 0
    if not plan.has_own_reference:
        return bytes_per_device(plan)["weights"] if plan.train.lora.rank is None else 0
    return element_bytes(plan) * parameters_per_rank(plan.reference.require_shape(), plan.layout)


def separate_bytes(plan: RunPlan) -> dict[str, int]:
    """Return the bytes of the states on a device of each model with separate devices, by role."""
    sizes: dict[str, int] = {}
    for model in plan.separate_models:
        shapes = [item.require_shape() for item in plan.models(model.role)]
        if model.role == "critic":
            own = replace(plan, layout=model.layout, world_size=model.num_ranks)
            states = [_critic_state(own, shapes[0], stage) for stage in range(own.layout.pp)]
            sizes["critic"] = max(sum(astuple(state)) for state in states)
        else:
            counts = [parameters_per_rank(shape, model.layout) for shape in shapes]
            sizes[model.role] = element_bytes(plan) * sum(counts)
    return sizes
