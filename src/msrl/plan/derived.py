"""What follows from a configuration by arithmetic alone: world size, batches, updates, the place of every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from msrl import registry
from msrl.config.schema import Config, ConvertConfig, OptimizerConfig, ParallelConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.paths import config_dir, runs_on_ranks
from msrl.models.reward_head import with_score
from msrl.models.shape import Shape

_TRAINING = ("train-sft", "train-grpo")


def layout_from(section: ParallelConfig | ConvertConfig) -> ParallelLayout:
    """The cut that a section of the configuration asks for."""
    return ParallelLayout(
        **{field.name: getattr(section, field.name) for field in fields(ParallelLayout) if field.name in type(section).model_fields}
    )


def replica_size(config: Config) -> int:
    """Ranks that train one copy of the model."""
    return layout_from(config.train.parallel).ranks_per_replica(config.train.parallel.cp)


def world_size(config: Config) -> int:
    """Training ranks: one per device of every node; on a node as many as one copy of the model needs, where nothing is said."""
    return config.cluster.nodes * (config.cluster.devices_per_node or replica_size(config))


def dp_size(config: Config) -> int:
    """Data-parallel size: ranks, or groups of them, that train on rows of their own. 0 when the devices don't hold one copy of the model.

    Expert parallelism spreads experts over these ranks, and makes them no fewer.
    """
    parallel, world = config.train.parallel, world_size(config)
    return world // (parallel.tp * parallel.pp * parallel.cp) if world >= replica_size(config) else 0


def samples_per_step(config: Config) -> int:
    """Completions of one train-grpo step."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def samples_per_update(config: Config) -> int:
    """Completions of one optimizer update of train-grpo."""
    return config.train.updates.samples_per_update or samples_per_step(config)


def updates_per_step(config: Config) -> int:
    """Optimizer updates of one train-grpo step."""
    return samples_per_step(config) // samples_per_update(config) * config.train.updates.epochs


def aggregate_constant(config: Config) -> float | None:
    """Divisor of the losses of an update; None for the modes that count tokens or sequences."""
    if config.algo.aggregate.mode != "seq-sum-over-constant":
        return None
    return config.algo.aggregate.constant or float(samples_per_update(config) * config.rollout.max_response_tokens)


def needs_reference(config: Config) -> bool:
    """Whether a reference model is held beside the policy."""
    return config.algo.kl.loss.coef > 0 or config.algo.kl.reward.coef > 0


def needs_critic(config: Config) -> bool:
    """Whether a value model is trained beside the policy."""
    package, name = "msrl.algorithms.advantages", config.algo.advantage.estimator
    return name in registry.names(package) and bool(registry.declaration(package, name, key="").constant("NEEDS_VALUES"))


def critic_optimizer(config: Config) -> OptimizerConfig:
    """The policy's, with what the critic has of its own."""
    own = config.cluster.roles.critic.optimizer
    return config.train.optimizer.model_copy(update={name: value for name, value in own if value is not None})


def critic_shape(config: Config) -> Shape | None:
    """The shape of the critic; None when no model is named. Raises MsrlError when it cannot be read."""
    load = config.cluster.roles.critic.load
    shape = model_shape(config) if load is None else load_shape(config_dir(load))
    return shape if shape is None or shape.reward_head else with_score(shape, shape.architecture)


def rank_model_shapes(config: Config) -> list[Shape]:
    """The shapes of the reward models on the training ranks. Raises MsrlError when one cannot be read."""
    sources = [source for source in config.reward.sources if runs_on_ranks(source.model, source.engine)]
    return [load_shape(config_dir(str(source.model))) for source in sources]


def accumulation(config: Config, command: str) -> int | None:
    """Micro-batches of one optimizer update on a rank; None when they are cut by tokens."""
    if config.train.max_tokens_per_micro_batch is not None:
        return None
    batch = config.train.global_batch if command == "train-sft" else samples_per_update(config)
    return batch // (dp_size(config) * config.train.micro_batch)


def eval_response_tokens(config: Config) -> int:
    """Longest answer to a held-out prompt, in tokens."""
    return config.eval.max_response_tokens or config.rollout.max_response_tokens


def max_model_len(config: Config) -> int:
    """Longest prompt plus response of a rollout or an evaluation, in tokens."""
    rollout = config.rollout
    longest = max(rollout.max_response_tokens, eval_response_tokens(config))
    return rollout.engine.max_model_len or rollout.max_prompt_tokens + longest


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of one training rank; `cp` is None without context parallelism.

    Tensor-parallel ranks are neighbours, then context-, data- and pipeline-parallel ones.
    """

    rank: int
    tp: int
    cp: int | None
    dp: int
    pp: int
    engine: int | None

    def __str__(self) -> str:
        context = "" if self.cp is None else f" cp {self.cp}"
        place = f"trains tp {self.tp}{context} dp {self.dp} pp {self.pp}"
        return place if self.engine is None else f"{place}, samples in engine {self.engine}"


def ranks(config: Config, command: str) -> tuple[Rank, ...]:
    """What every rank does. Engines of rollouts share the first devices."""
    tp, cp, dp = config.train.parallel.tp, config.train.parallel.cp, dp_size(config)
    engine = config.rollout.engine
    taken = engine.tp * engine.dp if command == "train-grpo" else 0
    return tuple(
        Rank(r, r % tp, r // tp % cp if cp > 1 else None, r // (tp * cp) % dp, r // (tp * cp * dp), r // engine.tp if r < taken else None)
        for r in range(world_size(config))
    )


def model_shape(config: Config) -> Shape | None:
    """The shape of the model that is trained; None when no model is named. Raises MsrlError when it cannot be read."""
    load, path = config.checkpoint.load, config.model.path
    if load is not None and (path is None or (config_dir(load) / "config.json").is_file()):
        path = load
    shape = None if path is None else load_shape(config_dir(path))
    if shape is not None and shape.reward_head:
        raise MsrlError(f"{path}: {shape.architecture} gives scores, no text; it can be a reward.sources model, and be converted")
    return shape


def derived(config: Config, command: str) -> dict[str, str | int]:
    """The arithmetic of `config show` and `--dry-run`, as name and value in the order of display; empty for commands without training."""
    if command not in _TRAINING or dp_size(config) < 1:
        return {}
    rows: dict[str, str | int] = {"ranks": world_size(config), "data parallel": dp_size(config)}
    rows.update(_sft_rows(config) if command == "train-sft" else _grpo_rows(config))
    steps = accumulation(config, command)
    rows["micro-batches per update on a rank"] = (
        f"by tokens, at most {config.train.max_tokens_per_micro_batch} each" if steps is None else steps
    )
    rows.update({f"rank {rank.rank}": str(rank) for rank in ranks(config, command)})
    return rows


def _sft_rows(config: Config) -> dict[str, str | int]:
    rows: dict[str, str | int] = {"rows per optimizer update": config.train.global_batch}
    if config.data.seq_length:
        rows["tokens per optimizer update, at most"] = config.train.global_batch * config.data.seq_length
    if config.train.steps:
        rows["rows in all"] = config.train.global_batch * config.train.steps
    return rows


def _grpo_rows(config: Config) -> dict[str, str | int]:
    rows: dict[str, str | int] = {
        "samples per step": samples_per_step(config),
        "samples per optimizer update": samples_per_update(config),
        "optimizer updates per step": updates_per_step(config),
        "longest prompt plus response": max_model_len(config),
    }
    constant = aggregate_constant(config)
    if constant is not None:
        rows["divisor of an update's loss"] = f"{constant:,g}"
    if config.train.steps:
        warmup = config.algo.value.warmup_steps
        rows["optimizer updates in all"] = updates_per_step(config) * (config.train.steps - warmup)
        if needs_critic(config):
            rows["optimizer updates of the critic"] = updates_per_step(config) * config.train.steps
    return rows
