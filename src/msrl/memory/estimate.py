"""Memory of a training per device: weights, gradients, optimizer, activations, logits and engine.

Weights and optimizer are exact. Activations belong to the largest micro-batch that the
configuration allows (`memory/activations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msrl.config.sections.train import LoraConfig, TrainConfig
from msrl.errors import MsrlError
from msrl.memory.activations import (
    INDEXER,
    LINEARS,
    LayerBytes,
    Pass,
    Spread,
    head_bytes,
    layer_bytes,
    saved_bytes,
)
from msrl.memory.states import (
    NO_STATE,
    State,
    critic_state,
    element_bytes,
    logits_bytes,
    parameters_per_rank,
    reference_bytes,
    reward_model_bytes,
    separate_bytes,
    state_bytes,
    teacher_bytes,
)
from msrl.memory.tower import TowerBytes, tower_bytes
from msrl.models.families import rules_for
from msrl.models.kv_cache import kv_bytes_per_token, state_bytes_per_sequence
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.rules import Vocab
from msrl.models.select import is_layer, select_names
from msrl.models.shape import Moe, Shape
from msrl.plan.run_plan import RunPlan

GB = 10**9


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device.

    `working` is temporary memory of the backward pass; it does not coincide with `logits`.
    `resting` names the states that are offloaded to host memory, like the keys of `train.offload`.
    `forward` is a pass without gradients, if it is larger than one with gradients. `separate` has
    the states of models on separate devices, by role.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int = 0
    working: int = 0
    logits: int = 0
    resting: frozenset[str] = frozenset()
    engine_weights: int = 0
    kv_cache: int = 0
    engine_sleeps: bool = False  # True if the engine sleeps during training
    engine_is_separate: bool = False  # True if the engine has separate devices
    forward: int = 0
    critic: State = NO_STATE
    reward_models: int = 0
    teachers: int = 0
    separate: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def engine(self) -> int:
        return self.engine_weights + self.kv_cache

    @property
    def training(self) -> int:
        """Peak during training: in a backward pass or in the optimizer step."""
        held = self.weights + self.reference + self.gradients + self.reward_models
        held += self.teachers
        held += self.critic.weights + self.critic.gradients
        optimizer = self.optimizer
        if "optimizer" in self.resting:
            optimizer = 0
        else:
            held += self.critic.optimizer
        if not (self.engine_sleeps or self.engine_is_separate):
            held += self.engine
        passes = max(self.activations + max(self.working, self.logits), self.forward)
        return held + max(self.optimizer, optimizer + passes)

    @property
    def generating(self) -> int:
        """Peak during generation; 0 without an engine."""
        if not self.engine or self.engine_is_separate:
            return self.engine
        kinds = {
            "params": sum(
                (
                    self.weights,
                    self.reference,
                    self.critic.weights,
                    self.reward_models,
                    self.teachers,
                )
            ),
            "grads": self.gradients + self.critic.gradients,
            "optimizer": self.optimizer + self.critic.optimizer,
        }
        return self.engine + sum(size for kind, size in kinds.items() if kind not in self.resting)

    @property
    def peak(self) -> int:
        return max(self.training, self.generating, *self.separate.values())

    def rows(self) -> dict[str, int]:
        """Return the table of all nonzero components, followed by the peaks."""
        is_forward_peak = self.forward > self.activations + self.logits
        sizes = {
            "weights": self.weights,
            "reference weights": self.reference,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reward models' weights": self.reward_models,
            "teachers' weights": self.teachers,
            "critic's weights": self.critic.weights,
            "critic's gradients": self.critic.gradients,
            "critic's optimizer": self.critic.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "temporary memory of the backward pass": (
                self.working if self.working > self.logits else 0
            ),
            "passes without gradients": self.forward if is_forward_peak else 0,
            "engine's weights": self.engine_weights,
            "engine's KV cache": self.kv_cache,
            **{f"{role} on separate devices": size for role, size in self.separate.items()},
            "peak during training": self.training,
            "peak during generation": self.generating,
        }
        return {name: size for name, size in sizes.items() if size}


def full_pass(plan: RunPlan, longest: int | None = None) -> Pass | None:
    """Return the largest micro-batch that is possible; None if row lengths are unknown.

    `longest` is the length of the longest row in tokens, if it is known from the data.
    """
    train, has_rollouts = plan.train, plan.has_rollouts
    if longest is None and plan.data.seq_length is not None:
        longest = plan.data.seq_length * plan.sides
    longest = plan.max_model_len if has_rollouts else longest
    tokens = train.max_tokens_per_micro_batch
    if tokens is None and longest is not None:
        tokens = train.micro_batch * longest
    if not tokens:
        return None
    trained_share = plan.rollout.max_response_tokens / plan.max_model_len if has_rollouts else 1.0
    has_token_budget = train.max_tokens_per_micro_batch is not None
    return Pass(
        num_tokens=tokens,
        num_trained=min(tokens, math.ceil(tokens * trained_share)),
        longest=min(_longest_sequence(plan, longest) or tokens, tokens),
        is_packed=has_token_budget or train.micro_batch * plan.sides > 1 or plan.data.pack,
        element_bytes=element_bytes(plan),
        logits_bytes=logits_bytes(plan),
    )


def _longest_sequence(plan: RunPlan, longest_row: int | None) -> int | None:
    """Return the length in tokens of the longest sequence of a row, as far as it is known."""
    side = plan.data.seq_length if plan.sides > 1 else None
    return longest_row if side is None or longest_row is None else min(side, longest_row)


def _forward_bytes(train: TrainConfig, shape: Shape, batch: Pass, spread: Spread) -> int:
    """Return the bytes of a train-grpo pass without gradients: one layer and the logits.

    0 unless `train.forward_micro_batch` makes it larger than a pass with gradients.
    """
    forward_size = train.forward_micro_batch or 0
    if train.max_tokens_per_micro_batch is not None or forward_size <= train.micro_batch:
        return 0
    factor = forward_size / train.micro_batch
    num_tokens, num_trained = int(batch.num_tokens * factor), int(batch.num_trained * factor)
    larger = replace(batch, num_tokens=num_tokens, num_trained=num_trained)
    layers = {0, shape.num_layers - 1}
    layer = max(layer_bytes(shape, shape.layers[number], larger, spread).total for number in layers)
    rows = num_trained // spread.cp
    if train.chunk is not None:
        rows = min(train.chunk, rows)
    return layer + rows * -(-shape.vocab_size // spread.tp) * batch.head_bytes


def passes_in_flight(
    layout: ParallelLayout, shape: Shape, stage: int, num_batches: int | None
) -> tuple[int, int]:
    """Return (micro-batches whose activations a stage holds, virtual stages that divide them).

    `num_batches` are the micro-batches of an update; None: enough to fill the pipeline. The
    schedule is Megatron's: one forward, one backward (arXiv:2104.04473, section 2.2).
    """
    pp, num_virtual = layout.pp, layout.num_chunks(shape.num_layers)
    batches = num_batches or pp * 2
    if num_virtual == 1:
        return min(pp - stage, batches), 1
    in_flight = (pp - stage - 1) * 2 + (num_virtual - 1) * pp + 1
    return min(in_flight, batches * num_virtual), num_virtual


def spread_sizes(plan: RunPlan, shape: Shape) -> Spread:
    """Return the parallel sizes; mixtures of experts always use sequence parallelism with TP."""
    parallel, etp = plan.train.parallel, plan.layout.etp_size
    return Spread(
        parallel.tp,
        etp,
        parallel.cp,
        parallel.sp or shape.moe is not None,
        gathers_keys=parallel.cp > 1 and parallel.cp_algo == "allgather",
        head_ranks=parallel.num_head_ranks,
    )


def _saved_inputs(train: TrainConfig, shape: Shape) -> frozenset[str]:
    """Return the linear layers that save inputs: those that are trained or have an adapter."""
    lora = train.lora
    if lora.rank is None:
        return frozenset((*LINEARS, INDEXER) if train.indexer_loss_coef else LINEARS)
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    return frozenset(
        rule.mcore.split(".")[-2]
        for layer in layers
        for rule in layer
        if is_layer(rule.mcore, rule.hf, lora.targets)
    )


def adapts_experts(lora: LoraConfig, shape: Shape) -> bool:
    """Return True if experts have adapters, so that they run one after the other."""
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    return lora.rank is not None and any(
        rule.expert is not None and is_layer(rule.mcore, rule.hf, lora.targets)
        for layer in layers
        for rule in layer
    )


def _trains_head(train: TrainConfig, shape: Shape) -> bool:
    """Return True if the weights of the output layer, or of a tied embedding, are trained."""
    rules = rules_for(shape)
    if train.lora.rank is not None or not train.freeze:
        return train.lora.rank is None
    head_rules = rules.first if shape.tie_word_embeddings else rules.last
    frozen = select_names(shape, train.freeze, key="train.freeze")
    return not any(isinstance(rule.layout, Vocab) and rule.mcore in frozen for rule in head_rules)


def _tower(plan: RunPlan, shape: Shape, stage: int, batch: Pass) -> TowerBytes:
    """Return the bytes of the vision tower, which only the first stage computes."""
    if stage or shape.vision is None:
        return TowerBytes()
    recomputes = plan.train.recompute.granularity == "full"
    trained, most = plan.train.vision.trained, plan.train.max_patches_per_micro_batch
    spread = spread_sizes(plan, shape)
    return tower_bytes(shape, batch, spread, trained, recomputes=recomputes, max_patches=most)


def _stage_memory(
    plan: RunPlan,
    shape: Shape,
    stage: int,
    batch: Pass | None,
    temporary_elements: int,
    *,
    has_images: bool,
) -> Memory:
    """Return the memory of a rank of a pipeline stage, without activations if `batch` is None."""
    train, has_rollouts, state = plan.train, plan.has_rollouts, state_bytes(plan, shape, stage)
    offload = train.offload.model_dump()
    memory = Memory(
        weights=state["weights"],
        reference=reference_bytes(plan) if plan.has_reference_on_ranks else 0,
        gradients=state["gradients"],
        optimizer=state["optimizer"],
        resting=frozenset(kind for kind, is_on in offload.items() if is_on),
        critic=critic_state(plan, stage) if has_rollouts else NO_STATE,
        reward_models=reward_model_bytes(plan, stage) if has_rollouts else 0,
        teachers=teacher_bytes(plan),
        separate=separate_bytes(plan),
    )
    if batch is None:
        return memory
    activations, working = _activations(plan, shape, stage, batch)
    tower = _tower(plan, shape, stage, batch) if has_images else TowerBytes()
    in_flight, _ = passes_in_flight(plan.layout, shape, stage, plan.accumulation)
    activations, working = activations + tower.saved * in_flight, max(working, tower.working)
    memory = replace(memory, activations=activations, working=working, forward=tower.forward)
    if stage < plan.layout.pp - 1 or shape.reward_head:
        return memory
    spread, is_trained = spread_sizes(plan, shape), _trains_head(train, shape)
    # A process reward model has logits of its reward tokens only.
    chunk = 1 if plan.trains_steps else train.chunk
    logits = head_bytes(shape, batch, spread, chunk, temporary_elements, is_trained=is_trained)
    forward = _forward_bytes(train, shape, batch, spread) if has_rollouts else 0
    forward = max(forward, memory.forward)
    return replace(memory, logits=logits, forward=forward)


def _activations(plan: RunPlan, shape: Shape, stage: int, batch: Pass) -> tuple[int, int]:
    """Return (saved bytes of the passes in flight, temporary bytes of the backward pass)."""
    spread, saved_inputs = spread_sizes(plan, shape), _saved_inputs(plan.train, shape)
    is_grouped = not adapts_experts(plan.train.lora, shape)
    saved, working = 0, 0
    for chunk in plan.layout.chunks(shape.num_layers, stage):
        own = [shape.layers[number] for number in chunk if number is not None]
        layers = [
            layer_bytes(shape, layer, batch, spread, saved_inputs, is_grouped=is_grouped)
            for layer in own
        ]
        mixtures = tuple(isinstance(layer.feed_forward, Moe) for layer in own)
        size, recomputed = saved_bytes(layers, plan.train.recompute, mixtures)
        saved, working = saved + size, max(working, recomputed + gradient_bytes(layers))
    tokens = batch.num_tokens // spread.cp
    rotated = sum(rotary.channels for rotary in shape.rotaries)
    rotary_tables = 2 * tokens * rotated * batch.element_bytes
    count, num_virtual = passes_in_flight(plan.layout, shape, stage, plan.accumulation)
    in_flight = -(-(saved + rotary_tables) * count // num_virtual)
    if stage == plan.layout.pp - 1:  # the input of the final norm
        norm_tokens = tokens // (spread.tp if spread.sp else 1)
        in_flight += norm_tokens * shape.hidden_size * batch.element_bytes
    return in_flight, working


def gradient_bytes(layers: list[LayerBytes]) -> int:
    """Return the bytes of gradients in a layer, about as many as its feed-forward block saves."""
    sizes = (layer.feed_forward + 2 * layer.input for layer in layers)
    return max(*sizes, *(layer.temporary for layer in layers), 0)


def training_memory(
    plan: RunPlan,
    *,
    longest: int | None = None,
    temporary_elements: int = 0,
    attention_bytes: int | None = None,
    has_images: bool = False,
) -> Memory:
    """Return the memory of the rank with most of it, without the engine.

    Activations are 0 if row lengths are unknown. With images, all tokens may be of images.
    """
    batch = full_pass(plan, longest)
    batch = None if batch is None else replace(batch, attention_bytes=attention_bytes)
    memories = (
        _stage_memory(plan, plan.shape, stage, batch, temporary_elements, has_images=has_images)
        for stage in range(plan.layout.pp)
    )
    return max(memories, key=lambda memory: memory.training)


def with_engine(
    memory: Memory,
    plan: RunPlan,
    *,
    total: int | None = None,
    is_shared: bool = False,
    sleeps: bool = False,
) -> Memory:
    """Return the memory with the engine of train-grpo added.

    The KV cache has `rollout.engine.kv_cache_bytes`. By default, it fills the `memory_fraction` of
    a device with `total` bytes, minus the weights. In host memory (`is_shared`) or on an unknown
    device, it is limited to the cache of `max_num_seqs` sequences of maximum length.
    """
    engine, element, shape = plan.rollout.engine, element_bytes(plan), plan.shape
    weights = parameters_per_rank(shape, ParallelLayout(tp=engine.tp)) * element
    cache = engine.kv_cache_bytes
    if cache is None:
        sequence = kv_bytes_per_token(shape, element, engine.tp) * plan.max_model_len
        sequence += state_bytes_per_sequence(shape, element, engine.tp)
        all_sequences = sequence * engine.max_num_seqs
        if total is None:
            cache = all_sequences
        elif is_shared:
            cache = min(all_sequences, int(total * engine.memory_fraction))
        else:
            cache = max(int(total * engine.memory_fraction) - weights, 0)
    return replace(
        memory,
        engine_weights=weights,
        kv_cache=cache,
        engine_sleeps=sleeps,
        engine_is_separate=plan.has_separate_engines,
    )


def memory_rows(plan: RunPlan) -> dict[str, int]:
    """Return the memory table of a training on an unknown device.

    Empty if the model is unreadable, which the checks report.
    """
    is_divisible = plan.dp_size > 0 and plan.world_size % plan.replica_size == 0
    if not plan.is_training or plan.shape_or_none is None or not is_divisible:
        return {}
    try:
        memory = training_memory(plan)
    except MsrlError:
        return {}
    if plan.has_engines:
        # The checks refuse this key where vLLM has no sleep mode, so a set level is in effect.
        memory = with_engine(memory, plan, sleeps=bool(plan.rollout.engine.sleep))
    return memory.rows()


def bytes_text(count: int) -> str:
    """Return a number of bytes with its unit.

    >>> bytes_text(62_900_000), bytes_text(1_234_567_890)
    ('62.9 MB', '1.23 GB')
    """
    return f"{count / GB:,.2f} GB" if count >= GB else f"{count / 10**6:,.1f} MB"


def table(rows: Mapping[str, int]) -> list[str]:
    """Return the rows as aligned lines."""
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {bytes_text(count):>10}" for name, count in rows.items()]
