"""Memory of a training per device: weights, gradients, optimizer, activations, logits and engine.

Weights and optimizer are exact. Activations are those of the largest micro-batch that the
configuration allows (`memory/activations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.memory.activations import (
    LINEARS,
    LayerBytes,
    Pass,
    Recomputed,
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
    parameters_per_rank,
    reference_bytes,
    reward_model_bytes,
    state_bytes,
)
from msrl.models.families import rules_for
from msrl.models.kv_cache import kv_bytes_per_token
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.rules import Vocab
from msrl.models.select import chosen, is_layer
from msrl.models.shape import Shape
from msrl.plan.derived import (
    accumulation,
    dp_size,
    layout_from,
    max_model_len,
    model_shape,
    replica_size,
    world_size,
)

GB = 10**9


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device.

    `working` is temporary memory of the backward pass; it does not coincide with `logits`.
    `resting` names the states that are offloaded to host memory, like the keys of `train.offload`.
    `forward` is a pass without gradients, if it is larger than one with gradients.
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
    forward: int = 0
    critic: State = NO_STATE
    reward_models: int = 0

    @property
    def engine(self) -> int:
        return self.engine_weights + self.kv_cache

    @property
    def training(self) -> int:
        """Peak during training: in a backward pass or in the optimizer step."""
        held = self.weights + self.reference + self.gradients + self.reward_models
        held += self.critic.weights + self.critic.gradients
        optimizer = self.optimizer
        if "optimizer" in self.resting:
            optimizer = 0
        else:
            held += self.critic.optimizer
        if not self.engine_sleeps:
            held += self.engine
        passes = max(self.activations + max(self.working, self.logits), self.forward)
        return held + max(self.optimizer, optimizer + passes)

    @property
    def generating(self) -> int:
        """Peak during generation; 0 without an engine."""
        if not self.engine:
            return 0
        kinds = {
            "params": self.weights + self.reference + self.critic.weights + self.reward_models,
            "grads": self.gradients + self.critic.gradients,
            "optimizer": self.optimizer + self.critic.optimizer,
        }
        return self.engine + sum(size for kind, size in kinds.items() if kind not in self.resting)

    @property
    def peak(self) -> int:
        return max(self.training, self.generating)

    def rows(self) -> dict[str, int]:
        """Return the table of all nonzero components, followed by the peaks."""
        is_forward_peak = self.forward > self.activations + self.logits
        sizes = {
            "weights": self.weights,
            "reference weights": self.reference,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reward models' weights": self.reward_models,
            "critic's weights": self.critic.weights,
            "critic's gradients": self.critic.gradients,
            "critic's optimizer": self.critic.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "temporary memory of the backward pass": (
                self.working if self.working > self.logits else 0
            ),
            "log-probabilities without gradients": self.forward if is_forward_peak else 0,
            "engine's weights": self.engine_weights,
            "engine's KV cache": self.kv_cache,
            "peak during training": self.training,
            "peak during generation": self.generating,
        }
        return {name: size for name, size in sizes.items() if size}


def full_pass(config: Config, command: str, longest: int | None = None) -> Pass | None:
    """Return the largest micro-batch that is possible; None if row lengths are unknown.

    `longest` is the length of the longest row in tokens, if it is known from the data.
    """
    train, is_grpo = config.train, command == "train-grpo"
    longest = longest or (max_model_len(config) if is_grpo else config.data.seq_length)
    tokens = train.max_tokens_per_micro_batch
    if tokens is None and longest is not None:
        tokens = train.micro_batch * longest
    if not tokens:
        return None
    trained_share = config.rollout.max_response_tokens / max_model_len(config) if is_grpo else 1.0
    has_token_budget = train.max_tokens_per_micro_batch is not None
    return Pass(
        num_tokens=tokens,
        num_trained=min(tokens, math.ceil(tokens * trained_share)),
        longest=min(longest or tokens, tokens),
        is_packed=has_token_budget or train.micro_batch > 1 or config.data.pack,
        element_bytes=element_bytes(config),
    )


def _forward_bytes(config: Config, shape: Shape, batch: Pass, spread: Spread) -> int:
    """Return the bytes of a train-grpo pass without gradients: one layer and the logits.

    0 unless `train.forward_micro_batch` makes it larger than a pass with gradients.
    """
    train = config.train
    forward_size = train.forward_micro_batch or 0
    if train.max_tokens_per_micro_batch is not None or forward_size <= train.micro_batch:
        return 0
    factor = forward_size / train.micro_batch
    num_tokens, num_trained = int(batch.num_tokens * factor), int(batch.num_trained * factor)
    larger = replace(batch, num_tokens=num_tokens, num_trained=num_trained)
    layers = {0, shape.num_layers - 1}
    layer = max(layer_bytes(shape, number, larger, spread).total for number in layers)
    rows = num_trained // spread.cp
    if train.chunk is not None:
        rows = min(train.chunk, rows)
    return layer + rows * -(-shape.vocab_size // spread.tp) * batch.element_bytes


def passes_in_flight(config: Config, shape: Shape, command: str, stage: int) -> tuple[int, int]:
    """Return (micro-batches whose activations a stage holds, virtual stages that divide them).

    The schedule is Megatron's: one forward, one backward (arXiv:2104.04473, section 2.2).
    """
    pp = config.train.parallel.pp
    num_virtual = layout_from(config.train.parallel).num_chunks(shape.num_layers)
    batches = accumulation(config, command) or pp * 2
    if num_virtual == 1:
        return min(pp - stage, batches), 1
    in_flight = (pp - stage - 1) * 2 + (num_virtual - 1) * pp + 1
    return min(in_flight, batches * num_virtual), num_virtual


def _spread(config: Config, shape: Shape) -> Spread:
    """Return the parallel sizes; mixtures of experts always use sequence parallelism with TP."""
    parallel, layout = config.train.parallel, layout_from(config.train.parallel)
    return Spread(parallel.tp, layout.etp_size, parallel.cp, parallel.sp or shape.moe is not None)


def _saved_inputs(config: Config, shape: Shape) -> frozenset[str]:
    """Return the linear layers that save inputs: those that are trained or have an adapter."""
    lora = config.train.lora
    if lora.rank is None:
        return frozenset(LINEARS)
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    return frozenset(
        rule.mcore.split(".")[-2]
        for layer in layers
        for rule in layer
        if is_layer(rule.mcore, rule.hf, lora.targets)
    )


def _trains_head(config: Config, shape: Shape) -> bool:
    """Return True if the weights of the output layer, or of a tied embedding, are trained."""
    train, rules = config.train, rules_for(shape)
    if train.lora.rank is not None or not train.freeze:
        return train.lora.rank is None
    head_rules = rules.first if shape.tie_word_embeddings else rules.last
    frozen = chosen(shape, train.freeze, key="train.freeze")
    return not any(isinstance(rule.layout, Vocab) and rule.mcore in frozen for rule in head_rules)


def _recomputed(config: Config) -> Recomputed:
    section = config.train.recompute
    return Recomputed(section.granularity, section.method, section.layers, section.modules)


def _stage_memory(
    config: Config,
    shape: Shape,
    command: str,
    stage: int,
    batch: Pass | None,
    temporary_elements: int,
) -> Memory:
    """Return the memory of a rank of a pipeline stage, without activations if `batch` is None."""
    is_grpo = command == "train-grpo"
    state = state_bytes(config, shape, stage)
    offload = config.train.offload.model_dump()
    memory = Memory(
        weights=state["weights"],
        reference=reference_bytes(config, shape) if is_grpo else 0,
        gradients=state["gradients"],
        optimizer=state["optimizer"],
        resting=frozenset(kind for kind, is_on in offload.items() if is_on),
        critic=critic_state(config, stage) if is_grpo else NO_STATE,
        reward_models=reward_model_bytes(config, stage) if is_grpo else 0,
    )
    if batch is None:
        return memory
    activations, working = _activations(config, shape, command, stage, batch)
    memory = replace(memory, activations=activations, working=working)
    if stage < config.train.parallel.pp - 1:
        return memory
    spread, is_trained = _spread(config, shape), _trains_head(config, shape)
    chunk = config.train.chunk
    logits = head_bytes(shape, batch, spread, chunk, temporary_elements, is_trained=is_trained)
    forward = _forward_bytes(config, shape, batch, spread) if is_grpo else 0
    return replace(memory, logits=logits, forward=forward)


def _activations(
    config: Config, shape: Shape, command: str, stage: int, batch: Pass
) -> tuple[int, int]:
    """Return (saved bytes of the passes in flight, temporary bytes of the backward pass)."""
    spread, saved_inputs = _spread(config, shape), _saved_inputs(config, shape)
    saved, working = 0, 0
    for chunk in layout_from(config.train.parallel).chunks(shape.num_layers, stage):
        numbers = [layer for layer in chunk if layer is not None]
        layers = [layer_bytes(shape, layer, batch, spread, saved_inputs) for layer in numbers]
        mixtures = tuple(shape.moe is not None and shape.moe.layers[layer] for layer in numbers)
        size, recomputed = saved_bytes(layers, _recomputed(config), mixtures)
        saved, working = saved + size, max(working, recomputed + _gradient_bytes(layers))
    tokens = batch.num_tokens // spread.cp
    rotary_tables = 2 * tokens * shape.rotated_channels * batch.element_bytes
    count, num_virtual = passes_in_flight(config, shape, command, stage)
    in_flight = -(-(saved + rotary_tables) * count // num_virtual)
    if stage == config.train.parallel.pp - 1:  # the input of the final norm
        norm_tokens = tokens // (spread.tp if spread.sp else 1)
        in_flight += norm_tokens * shape.hidden_size * batch.element_bytes
    return in_flight, working


def _gradient_bytes(layers: list[LayerBytes]) -> int:
    """Return the bytes of gradients in a layer, about as many as its feed-forward block saves."""
    return max((layer.feed_forward + 2 * layer.input for layer in layers), default=0)


def training_memory(
    config: Config,
    shape: Shape,
    command: str,
    *,
    longest: int | None = None,
    temporary_elements: int = 0,
    attention_bytes: int | None = None,
) -> Memory:
    """Return the memory of the rank with most of it, without the engine.

    Activations are 0 if row lengths are unknown.
    """
    batch = full_pass(config, command, longest)
    batch = None if batch is None else replace(batch, attention_bytes=attention_bytes)
    stages = range(config.train.parallel.pp)
    memories = (
        _stage_memory(config, shape, command, stage, batch, temporary_elements) for stage in stages
    )
    return max(memories, key=lambda memory: memory.training)


def with_engine(
    memory: Memory,
    config: Config,
    shape: Shape,
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
    engine, element = config.rollout.engine, element_bytes(config)
    weights = parameters_per_rank(shape, ParallelLayout(tp=engine.tp)) * element
    cache = engine.kv_cache_bytes
    if cache is None:
        sequence = kv_bytes_per_token(shape, element, engine.tp) * max_model_len(config)
        all_sequences = sequence * engine.max_num_seqs
        if total is None:
            cache = all_sequences
        elif is_shared:
            cache = min(all_sequences, int(total * engine.memory_fraction))
        else:
            cache = max(int(total * engine.memory_fraction) - weights, 0)
    return replace(memory, engine_weights=weights, kv_cache=cache, engine_sleeps=sleeps)


def memory_rows(config: Config, command: str) -> dict[str, int]:
    """Return the memory table of a training on an unknown device.

    Empty if the model is unreadable, which the checks report.
    """
    if (
        command not in ("train-sft", "train-grpo")
        or dp_size(config) < 1
        or world_size(config) % replica_size(config)
    ):
        return {}
    try:
        shape = model_shape(config)
        if shape is None:
            return {}
        memory = training_memory(config, shape, command)
    except MsrlError:
        return {}
    return (with_engine(memory, config, shape) if command == "train-grpo" else memory).rows()


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
