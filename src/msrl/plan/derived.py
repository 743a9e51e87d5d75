"""Values computed from a configuration: world size, batches, updates and the roles of each rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields

from msrl import registry
from msrl.config.options import TRAININGS
from msrl.config.schema import Config
from msrl.config.sections.roles import DevicesConfig
from msrl.config.sections.train import LayoutConfig, OptimizerConfig
from msrl.models.parallel_layout import ParallelLayout
from msrl.registry.declarations import declaration

_WITH_ROLLOUTS = ("train-grpo", "train-distill")


def has_rollouts(command: str) -> bool:
    """Return True if a training samples responses."""
    return command in _WITH_ROLLOUTS


def is_replay(config: Config) -> bool:
    """Return True if train-grpo trains from recorded rollouts, without engines."""
    return config.rollout.replay.path is not None


def has_engines(config: Config, command: str) -> bool:
    """Return True if a training starts engines."""
    return has_rollouts(command) and not is_replay(config)


def layout_from(section: LayoutConfig) -> ParallelLayout:
    """Return the parallel layout that a section of the configuration defines."""
    keys = _layout_keys(type(section))
    return ParallelLayout(**{key: getattr(section, key) for key in keys})


@functools.cache
def _layout_keys(section: type[LayoutConfig]) -> tuple[str, ...]:
    names = [field.name for field in fields(ParallelLayout)]
    return tuple(name for name in names if name in section.model_fields)


def replica_size(config: Config) -> int:
    """Return the number of ranks of one model replica."""
    return layout_from(config.train.parallel).ranks_per_replica(config.train.parallel.cp)


def world_size(config: Config) -> int:
    """Return the number of training ranks: one per device.

    By default, a node has as many devices as one model replica needs.
    """
    return config.cluster.nodes * (config.cluster.devices_per_node or replica_size(config))


def dp_size(config: Config) -> int:
    """Return the data-parallel size; 0 if the devices do not hold one model replica.

    Expert parallelism distributes experts over these ranks and does not reduce the size.
    """
    parallel, world = config.train.parallel, world_size(config)
    return (
        world // (parallel.tp * parallel.pp * parallel.cp) if world >= replica_size(config) else 0
    )


def num_separate_devices(role: DevicesConfig) -> int:
    """Return the number of devices that a role has separately; 0 if it shares the training's."""
    if role.devices is None:
        return 0
    return role.devices if isinstance(role.devices, int) else len(role.devices)


def num_engine_devices(config: Config) -> int:
    """Return the number of devices that the engines may use."""
    return num_separate_devices(config.cluster.roles.rollout) or world_size(config)


def num_engines(config: Config) -> int:
    """Return the number of rollout engines, by default on every device that they may use."""
    engine = config.rollout.engine
    return engine.dp or max(num_engine_devices(config) // engine.tp, 1)


def keys_that_change_totals(config: Config) -> list[str]:
    """Return the keys after whose change the reward of an episode is no sum of its turns."""
    norm = config.reward.norm
    keys = {
        "reward.norm.center": norm.center != "none",
        "reward.norm.scale": norm.scale != "none",
        "reward.norm.clip": norm.clip is not None,
        "reward.clip": config.reward.clip is not None,
    }
    return [key for key, is_set in keys.items() if is_set]


def rewards_turns(config: Config) -> bool:
    """Return True if tokens earn the rewards of turns, and not the reward of the episode."""
    reward_at = config.environment.reward_at
    return not keys_that_change_totals(config) if reward_at is None else reward_at == "turn"


def samples_per_step(config: Config) -> int:
    """Return the number of responses of one train-grpo step."""
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def samples_per_update(config: Config) -> int:
    """Return the number of responses of one optimizer update of train-grpo."""
    return config.train.updates.samples_per_update or samples_per_step(config)


def updates_per_step(config: Config) -> int:
    """Return the number of optimizer updates of one train-grpo step."""
    return samples_per_step(config) // samples_per_update(config) * config.train.updates.epochs


def needs_old_logprobs(config: Config) -> bool:
    """Return True if a step computes the log-probabilities of the policy before its first update.

    Without several updates or normalized weights, the loss of the only update computes them.
    """
    if config.algo.old_logprobs != "trainer":
        return False
    return updates_per_step(config) > 1 or config.algo.mismatch.normalize


def aggregate_constant(config: Config) -> float | None:
    """Return the divisor of seq-sum-over-constant; None if no loss has this mode."""
    if "seq-sum-over-constant" not in (config.algo.aggregate.mode, config.algo.value.aggregate):
        return None
    return config.algo.aggregate.constant or float(
        samples_per_update(config) * config.rollout.max_response_tokens
    )


def needs_reference(config: Config) -> bool:
    """Return True if the run needs a reference model."""
    return config.algo.kl.loss.coef > 0 or config.algo.kl.reward.coef > 0


def needs_critic(config: Config) -> bool:
    """Return True if the run trains a value model."""
    estimator = declaration(registry.ADVANTAGES, config.algo.advantage.estimator, key="")
    return bool(estimator.constant("NEEDS_VALUES"))


def needs_draws(config: Config) -> bool:
    """Return True if the policy loss draws tokens at random."""
    loss = declaration(registry.LOSSES, config.algo.policy_loss, key="")
    return bool(loss.constant("DRAWS_TOKENS"))


def needs_distribution(config: Config) -> bool:
    """Return True if the advantages need the policy's distribution over the vocabulary."""
    estimator = declaration(registry.ADVANTAGES, config.algo.advantage.estimator, key="")
    return bool(estimator.constant("NEEDS_DISTRIBUTION"))


def needs_greedy(config: Config) -> bool:
    """Return True if the advantages need the reward of a greedy response to every prompt."""
    estimator = declaration(registry.ADVANTAGES, config.algo.advantage.estimator, key="")
    return bool(estimator.constant("NEEDS_GREEDY"))


@dataclass(frozen=True, slots=True)
class PreferencePlan:
    """Preference loss of train-dpo with the declarations of its plugin.

    Attributes:
        name: Name of the loss.
        beta: Scale of the implicit rewards.
        sft_coef: Coefficient of the likelihood of the chosen answers.
        options: Further options of the loss.
        data: Kind of data that it trains on: pairs or labeled.
        needs_reference: Whether it reads log-probabilities of the reference.
        is_precomputed: Whether these are computed before the training.
        reads_margins: Whether it reads the margins of the data.
    """

    name: str
    beta: float
    sft_coef: float
    options: Mapping[str, object]
    data: str
    needs_reference: bool
    is_precomputed: bool
    reads_margins: bool


def preference_plan(config: Config) -> PreferencePlan:
    """Return the preference loss of a configuration."""
    section = config.algo.preference
    plugin = declaration(registry.PREFERENCES, section.loss, key="algo.preference.loss")
    return PreferencePlan(
        name=section.loss,
        beta=plugin.constant("BETA", 0.1) if section.beta is None else section.beta,
        sft_coef=section.sft_coef,
        options=section.options,
        data=plugin.constant("DATA", "pairs"),
        needs_reference=plugin.constant("NEEDS_REFERENCE", False),
        is_precomputed=section.reference == "precomputed",
        reads_margins=plugin.constant("READS_MARGINS", False),
    )


def has_pairs(config: Config, command: str) -> bool:
    """Return True if a training reads preference pairs."""
    is_pairwise = command == "train-dpo" and preference_plan(config).data == "pairs"
    return is_pairwise or (command == "train-rm" and not trains_steps(config, command))


def data_kind(config: Config, command: str) -> str:
    """Return the kind of preprocessed data that a command reads."""
    if command == "train-dpo":
        return preference_plan(config).data
    if command == "train-rm":
        return "steps" if trains_steps(config, command) else "pairs"
    if has_rollouts(command) or command == "eval":
        return "prompts"
    return "pretrain" if config.data.handler == "pretrain" else "sft"


def trains_steps(config: Config, command: str) -> bool:
    """Return True if a training trains a process reward model, which labels steps."""
    return command == "train-rm" and config.algo.reward_model.kind == "process"


def critic_optimizer(config: Config) -> OptimizerConfig:
    """Return the optimizer settings of the policy with the overrides of the critic."""
    overrides = config.cluster.roles.critic.optimizer
    return config.train.optimizer.model_copy(
        update={name: value for name, value in overrides if value is not None}
    )


def accumulation(config: Config, command: str) -> int | None:
    """Return the micro-batches of one optimizer update on a rank; None if tokens define them."""
    if config.train.max_tokens_per_micro_batch is not None:
        return None
    batch = samples_per_update(config) if has_rollouts(command) else config.train.global_batch
    return batch // (dp_size(config) * config.train.micro_batch)


def eval_response_tokens(config: Config) -> int:
    """Return the maximum response length of an evaluation, in tokens."""
    return config.eval.max_response_tokens or config.rollout.max_response_tokens


def max_model_len(config: Config) -> int:
    """Return the maximum length of prompt plus response in rollouts and evaluations, in tokens."""
    rollout = config.rollout
    longest = max(rollout.max_response_tokens, eval_response_tokens(config))
    return rollout.engine.max_model_len or rollout.max_prompt_tokens + longest


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates of one training rank; `cp` is None without context parallelism.

    Ranks are ordered by tensor, context, data and pipeline coordinate; the tensor coordinate
    changes fastest.
    """

    rank: int
    tp: int
    cp: int | None
    dp: int
    pp: int
    engine: int | None

    def __str__(self) -> str:
        context = "" if self.cp is None else f" cp {self.cp}"
        training = f"trains tp {self.tp}{context} dp {self.dp} pp {self.pp}"
        return training if self.engine is None else f"{training}, samples in engine {self.engine}"


def ranks(config: Config, command: str) -> tuple[Rank, ...]:
    """Return the coordinates of all ranks. Engines without separate devices share the first."""
    tp, cp, dp = config.train.parallel.tp, config.train.parallel.cp, dp_size(config)
    engine = config.rollout.engine
    is_separate = num_separate_devices(config.cluster.roles.rollout) > 0
    shares_devices = has_engines(config, command) and not is_separate
    num_shared = engine.tp * num_engines(config) if shares_devices else 0
    return tuple(
        Rank(
            rank=rank,
            tp=rank % tp,
            cp=rank // tp % cp if cp > 1 else None,
            dp=rank // (tp * cp) % dp,
            pp=rank // (tp * cp * dp),
            engine=rank // engine.tp if rank < num_shared else None,
        )
        for rank in range(world_size(config))
    )


def derived_values(config: Config, command: str) -> dict[str, str | int]:
    """Return the derived values of `config show` and `--dry-run` by label, in the order of display.

    Empty for commands without training.
    """
    if command not in TRAININGS or dp_size(config) < 1:
        return {}
    rows: dict[str, str | int] = {"ranks": world_size(config), "data parallel": dp_size(config)}
    rows.update(_grpo_rows(config) if has_rollouts(command) else _sft_rows(config, command))
    label = "micro-batches per update on a rank"
    micro_batches = accumulation(config, command)
    if micro_batches is None:
        rows[label] = f"by tokens, at most {config.train.max_tokens_per_micro_batch} each"
    else:
        rows[label] = micro_batches
    rows.update({f"rank {rank.rank}": str(rank) for rank in ranks(config, command)})
    if has_engines(config, command):
        rows.update(_engine_rows(config))
    return rows


def _engine_rows(config: Config) -> dict[str, str | int]:
    """Return the engines and the devices that stay idle while others work."""
    engine, devices = config.rollout.engine, num_engine_devices(config)
    num_used = num_engines(config) * engine.tp
    is_separate = num_separate_devices(config.cluster.roles.rollout) > 0
    rows: dict[str, str | int] = {"engines": f"{num_engines(config)} of {engine.tp} device(s)"}
    first = world_size(config) if is_separate else 0
    idle = [str(first + number) for number in range(num_used, devices)]
    if idle:
        rows["idle devices"] = f"{', '.join(idle)} have no engine (rollout.engine.dp)"
    if is_separate:
        rows["devices of engines"] = f"{num_used}, which are idle while the policy trains"
    return rows


def _sft_rows(config: Config, command: str) -> dict[str, str | int]:
    rows: dict[str, str | int] = {"rows per optimizer update": config.train.global_batch}
    if config.data.seq_length:
        rows["tokens per optimizer update, at most"] = (
            config.train.global_batch
            * config.data.seq_length
            * (2 if has_pairs(config, command) else 1)
        )
    if command == "train-dpo":
        rows["beta"] = f"{preference_plan(config).beta:g}"
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
