"""Bytes that a training takes of a device, rank by rank: weights, gradients, optimizer, activations, logits and, in train-grpo, the engine.

Weights and optimizer are exact; activations are those of a pass as full as the configuration allows (`models/activations.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.memory.activations import LINEARS, LayerBytes, Pass, Recomputed, Spread, head_bytes, kept_bytes, layer_bytes
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
from msrl.plan.derived import accumulation, dp_size, layout_from, max_model_len, model_shape, replica_size, world_size

GB = 10**9


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device. `working`: what a part of the backward pass makes besides; it and `logits` do not exist at the same time."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int = 0
    working: int = 0
    logits: int = 0
    resting: frozenset[str] = frozenset()  # what waits in the machine's memory, as `train.offload` names it
    engine_weights: int = 0
    kv_cache: int = 0
    engine_sleeps: bool = False  # while the training works
    forward: int = 0  # of a pass without gradients, where it is larger than one with them
    critic: State = NO_STATE
    reward_models: int = 0

    @property
    def engine(self) -> int:
        return self.engine_weights + self.kv_cache

    @property
    def training(self) -> int:
        """Most at once while the ranks train: in a backward pass, or in the optimizer's step."""
        held = self.weights + self.reference + self.gradients + (0 if self.engine_sleeps else self.engine)
        held += (
            self.reward_models + self.critic.weights + self.critic.gradients + (0 if "optimizer" in self.resting else self.critic.optimizer)
        )
        optimizer = 0 if "optimizer" in self.resting else self.optimizer
        passes = max(self.activations + max(self.working, self.logits), self.forward)
        return held + max(self.optimizer, optimizer + passes)

    @property
    def generating(self) -> int:
        """While the engine generates; 0 without one."""
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
        """The table: every part that is there, then what is needed at once."""
        parts = {
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
            "other work of the backward pass": self.working if self.working > self.logits else 0,
            "log-probabilities without gradients": self.forward if self.forward > self.activations + self.logits else 0,
            "engine's weights": self.engine_weights,
            "engine's KV cache": self.kv_cache,
        }
        sums = {"at once while training": self.training, "at once while generating": self.generating}
        return {name: size for name, size in {**parts, **sums}.items() if size}


def full_pass(config: Config, command: str, longest: int | None = None) -> Pass | None:
    """The fullest micro-batch that the configuration allows; `longest` tokens has the longest row, where that is known better.

    None where nothing says how long rows are.
    """
    train, is_grpo = config.train, command == "train-grpo"
    longest = longest or (max_model_len(config) if is_grpo else config.data.seq_length)
    tokens = train.max_tokens_per_micro_batch or (None if longest is None else train.micro_batch * longest)
    if tokens is None:
        return None
    longest = min(longest or tokens, tokens)
    share = config.rollout.max_response_tokens / max_model_len(config) if is_grpo else 1.0
    is_packed = train.max_tokens_per_micro_batch is not None or train.micro_batch > 1 or config.data.pack
    return Pass(tokens, min(tokens, math.ceil(tokens * share)), longest, is_packed, element_bytes(config))


def _forward_bytes(config: Config, shape: Shape, batch: Pass, spread: Spread) -> int:
    """A pass of train-grpo without gradients, where `train.forward_micro_batch` makes it larger than one with them: a layer and logits."""
    train = config.train
    if train.max_tokens_per_micro_batch is not None or (train.forward_micro_batch or 0) <= train.micro_batch:
        return 0
    factor = (train.forward_micro_batch or 1) / train.micro_batch
    larger = replace(batch, num_tokens=int(batch.num_tokens * factor), num_trained=int(batch.num_trained * factor))
    layer = max(layer_bytes(shape, number, larger, spread).whole for number in {0, shape.num_layers - 1})
    rows = larger.num_trained // spread.cp if train.chunk is None else min(train.chunk, larger.num_trained // spread.cp)
    return layer + rows * -(-shape.vocab_size // spread.tp) * batch.element_bytes


def passes_in_flight(config: Config, shape: Shape, command: str, stage: int) -> tuple[int, int]:
    """(micro-batches that a stage holds the activations of at the same time, virtual stages that these are divided into).

    One forward, one backward in turn (arXiv:2104.04473, section 2.2), which is Megatron's schedule.
    """
    pp, chunks = config.train.parallel.pp, layout_from(config.train.parallel).num_chunks(shape.num_layers)
    batches = accumulation(config, command) or pp * 2
    if chunks == 1:
        return min(pp - stage, batches), 1
    return min((pp - stage - 1) * 2 + (chunks - 1) * pp + 1, batches * chunks), chunks


def spread_of(config: Config, shape: Shape) -> Spread:
    """Mixtures train under sequence parallelism wherever there is tensor parallelism."""
    parallel, cut = config.train.parallel, layout_from(config.train.parallel)
    return Spread(parallel.tp, cut.etp_size, parallel.cp, parallel.sp or shape.moe is not None)


def _kept_inputs(config: Config, shape: Shape) -> frozenset[str]:
    """The linear layers that keep their inputs: those that are trained, or have an adapter."""
    lora = config.train.lora
    if lora.rank is None:
        return frozenset(LINEARS)
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    return frozenset(rule.mcore.split(".")[-2] for layer in layers for rule in layer if is_layer(rule.mcore, rule.hf, lora.targets))


def _trains_head(config: Config, shape: Shape) -> bool:
    """Whether the weights of the output layer, or the embedding that stands in for them, are trained."""
    train, rules = config.train, rules_for(shape)
    if train.lora.rank is not None or not train.freeze:
        return train.lora.rank is None
    places = rules.first if shape.tie_word_embeddings else rules.last
    frozen = chosen(shape, train.freeze, key="train.freeze")
    return not any(isinstance(rule.layout, Vocab) and rule.mcore in frozen for rule in places)


def _recomputed(config: Config) -> Recomputed:
    asked = config.train.recompute
    return Recomputed(asked.granularity, asked.method, asked.layers, asked.modules)


def _stage_memory(config: Config, shape: Shape, command: str, stage: int, batch: Pass | None, temporary_elements: int) -> Memory:
    """What a rank of a pipeline stage takes; without activations where there is no pass to go by."""
    state, reference = state_bytes(config, shape, stage), reference_bytes(config, shape) if command == "train-grpo" else 0
    resting = frozenset(kind for kind, is_on in config.train.offload.model_dump().items() if is_on)
    critic = critic_state(config, stage) if command == "train-grpo" else NO_STATE
    rewards = reward_model_bytes(config, stage) if command == "train-grpo" else 0
    memory = Memory(
        state["weights"], reference, state["gradients"], state["optimizer"], resting=resting, critic=critic, reward_models=rewards
    )  # fmt: skip
    if batch is None:
        return memory
    spread, is_last = spread_of(config, shape), stage == config.train.parallel.pp - 1
    activations, working = _activations(config, shape, command, stage, batch)
    if is_last:
        forward = _forward_bytes(config, shape, batch, spread) if command == "train-grpo" else 0
        is_trained = _trains_head(config, shape)
        logits = head_bytes(shape, batch, spread, config.train.chunk, temporary_elements, is_trained=is_trained)
        memory = replace(memory, logits=logits, forward=forward)
    return replace(memory, activations=activations, working=working)


def _activations(config: Config, shape: Shape, command: str, stage: int, batch: Pass) -> tuple[int, int]:
    """(bytes that a stage keeps of the passes in flight, bytes that its backward pass makes besides)."""
    spread, with_inputs, kept, working = spread_of(config, shape), _kept_inputs(config, shape), 0, 0
    for chunk in layout_from(config.train.parallel).chunks(shape.num_layers, stage):
        numbers = [layer for layer in chunk if layer is not None]
        layers = [layer_bytes(shape, layer, batch, spread, with_inputs) for layer in numbers]
        mixtures = tuple(shape.moe is not None and shape.moe.layers[layer] for layer in numbers)
        size, again = kept_bytes(layers, _recomputed(config), mixtures)
        kept, working = kept + size, max(working, again + _gradients_of(layers))
    tokens = batch.num_tokens // spread.cp
    rotary_tables = 2 * tokens * shape.rotated_channels * batch.element_bytes
    count, parts = passes_in_flight(config, shape, command, stage)
    in_flight = -(-(kept + rotary_tables) * count // parts)
    if stage == config.train.parallel.pp - 1:  # the final norm's input
        in_flight += tokens // (spread.tp if spread.sp else 1) * shape.hidden_size * batch.element_bytes
    return in_flight, working


def _gradients_of(layers: list[LayerBytes]) -> int:
    """What the backward pass of a layer makes: about as much again as its feed-forward part keeps."""
    return max((layer.feed_forward + 2 * layer.input for layer in layers), default=0)


def training_memory(
    config: Config, shape: Shape, command: str, *,
    longest: int | None = None, temporary_elements: int = 0, attention_bytes: int | None = None,
) -> Memory:  # fmt: skip
    """What the fullest rank takes, the engine left out; without activations where nothing says how long rows are."""
    batch = full_pass(config, command, longest)
    batch = None if batch is None else replace(batch, attention_bytes=attention_bytes)
    stages = range(config.train.parallel.pp)
    found = (_stage_memory(config, shape, command, stage, batch, temporary_elements) for stage in stages)
    return max(found, key=lambda memory: memory.training)


def with_engine(
    memory: Memory, config: Config, shape: Shape, *, total: int | None = None, is_shared: bool = False, sleeps: bool = False
) -> Memory:
    """The same with the engine of train-grpo beside it.

    Its cache is `rollout.engine.kv_cache_bytes`; else what `memory_fraction` of a device of `total` bytes leaves beside its weights, in
    main memory (`is_shared`) or on an unknown device at most as much as all sequences take that may run at the same time.
    """
    engine, element = config.rollout.engine, element_bytes(config)
    weights = parameters_per_rank(shape, ParallelLayout(tp=engine.tp)) * element
    all_at_once = kv_bytes_per_token(shape, element, engine.tp) * engine.max_num_seqs * max_model_len(config)
    cache = engine.kv_cache_bytes
    if cache is None:
        allowed = all_at_once if total is None else int(total * engine.memory_fraction)
        cache = min(all_at_once, allowed) if total is None or is_shared else max(allowed - weights, 0)
    return replace(memory, engine_weights=weights, kv_cache=cache, engine_sleeps=sleeps)


def memory_rows(config: Config, command: str) -> dict[str, int]:
    """The table of a training whose model can be read, whatever the device; empty otherwise (the checks say why)."""
    if command not in ("train-sft", "train-grpo") or dp_size(config) < 1 or world_size(config) % replica_size(config):
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
    """A number of bytes, as a user reads it.

    >>> bytes_text(62_900_000), bytes_text(1_234_567_890)
    ('62.9 MB', '1.23 GB')
    """
    return f"{count / GB:,.2f} GB" if count >= GB else f"{count / 10**6:,.1f} MB"


def table(rows: Mapping[str, int]) -> list[str]:
    """The rows as aligned lines."""
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {bytes_text(count):>10}" for name, count in rows.items()]
