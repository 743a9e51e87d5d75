"""Checks and advice for the `algo` section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from msrl.checks import plugins
from msrl.config.loader import Resolved
from msrl.config.presets import preset_values
from msrl.config.schema import AlgoConfig
from msrl.plan.derived import needs_critic, updates_per_step
from msrl.registry import ADVANTAGES, LOSSES
from msrl.registry.declarations import declaration

SEQUENCE_CLIP_LIMIT = 0.05
MAX_KL_TARGET = 0.1


_WITH_DEVIATIONS = ("group_norm", "pass_at_k", "reinforce_baseline", "reinforce_pp")


def check_algorithm(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of `algo` that is invalid or has no effect."""
    algo = resolved.config.algo
    both = (
        (ADVANTAGES, algo.advantage.estimator, "advantages"),
        (LOSSES, algo.policy_loss, "policy_loss"),
    )
    yield from plugins.check_options(resolved, "algo.options", *both)
    yield from _preset(resolved)
    yield from _estimator(resolved)
    yield from _loss(resolved)
    yield from _one_advantage(resolved)
    yield from _token_selection(resolved)
    yield from _kl(resolved)
    yield from _terms(resolved)
    yield from _mismatch(resolved)
    yield from _correction(resolved)
    yield from check_aggregate(resolved)
    if algo.mask.difficulty is not None and algo.mask.difficulty[0] >= algo.mask.difficulty[1]:
        yield resolved.mistake("algo.mask.difficulty", "the first number must be below the second")


def _preset(resolved: Resolved) -> Iterator[str]:
    """Check that a preset provides a value, beside a file such as a run's that sets all keys."""
    name = resolved.config.algo.preset
    origin = resolved.origins.get("algo.preset")
    if name is None or origin is None:
        return
    values = dict(_flat(preset_values(name), "algo"))
    sources = [resolved.origins[key] for key in values]
    others = {key: value for key, value in values.items() if resolved.value(key) != value}
    if others and all(item.is_given and item.name != origin.name for item in sources):
        shown = ", ".join(f"{key}={value}" for key, value in others.items())
        problem = f"has no effect, because {sources[0].name} sets all its keys. Set {shown}."
        yield resolved.mistake("algo.preset", problem)


def _flat(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of values in sections, with their values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{section}.{name}")
        else:
            yield f"{section}.{name}", value


def check_sft_aggregate(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of `algo.aggregate` that train-sft does not have."""
    aggregate = resolved.config.algo.aggregate
    if aggregate.mode not in ("token-mean", "micro-batch-mean"):
        yield resolved.mistake(
            "algo.aggregate.mode", "train-sft has token-mean and micro-batch-mean only."
        )
        return
    yield from check_aggregate(resolved)


def check_aggregate(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each key that the mode of `algo.aggregate` does not read, or lacks."""
    aggregate, value = resolved.config.algo.aggregate, resolved.config.algo.value.aggregate
    sizes = ("samples_per_group", "tokens_per_group")
    modes = {"algo.aggregate.mode": aggregate.mode, "algo.value.aggregate": value}
    grouped = [key for key, mode in modes.items() if mode == "micro-batch-mean"]
    if grouped and all(getattr(aggregate, name) is None for name in sizes):
        yield resolved.mistake(
            grouped[0],
            "needs the size of its groups. Set algo.aggregate.samples_per_group or "
            "algo.aggregate.tokens_per_group.",
        )


def _estimator(resolved: Resolved) -> Iterator[str]:
    name = resolved.config.algo.advantage.estimator
    plugin = declaration(ADVANTAGES, name, key="algo.advantage.estimator")
    if plugin.constant("COMPARES_GROUPS") and resolved.config.rollout.samples_per_prompt < 2:
        yield resolved.mistake(
            "rollout.samples_per_prompt",
            f"{name} needs at least 2 samples per prompt. Set it to 2 or more.",
        )
    if plugin.constant("NEEDS_GREEDY"):
        yield from _same_scale(resolved, name)
    if plugin.constant("NEEDS_TURNS") and not resolved.config.environment.is_on:
        yield resolved.mistake(
            "algo.advantage.estimator",
            "needs episodes with several turns. Set environment.name, or choose another estimator.",
        )


def _same_scale(resolved: Resolved, name: str) -> Iterator[str]:
    """Yield a line for each key that would scale rewards differently from those of greedy ones."""
    config = resolved.config
    for key, is_set in (
        ("reward.norm.center", config.reward.norm.center != "none"),
        ("reward.norm.scale", config.reward.norm.scale != "none"),
        ("reward.length.coef", config.reward.length.coef > 0),
        ("algo.advantage.whiten_rewards", config.algo.advantage.whiten_rewards),
    ):
        if is_set:
            yield resolved.mistake(
                key,
                f"compares the responses of a step, but algo.advantage.estimator={name} compares "
                "each with a greedy one. Remove it.",
            )


def _loss(resolved: Resolved) -> Iterator[str]:
    """Check the bounds of the clip range, and that the loss does not define the ratio."""
    algo = resolved.config.algo
    clip = algo.clip
    if clip.dual is not None and clip.dual <= 1.0 + clip.high:
        yield resolved.mistake(
            "algo.clip.dual", f"must be above 1 + algo.clip.high = {1.0 + clip.high:g}"
        )
    plugin = declaration(LOSSES, algo.policy_loss, key="algo.policy_loss")
    if algo.ratio == "sequence" and plugin.constant("OWN_RATIO"):
        yield resolved.mistake(
            "algo.ratio",
            f"algo.policy_loss={algo.policy_loss} defines its own ratio. Set algo.ratio to token.",
        )


def _one_advantage(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each key that varies advantages within a sequence, if that is invalid."""
    algo, varying = resolved.config.algo, dict(_varying_by_token(resolved))
    loss = declaration(LOSSES, algo.policy_loss, key="algo.policy_loss")
    if loss.constant("ONE_ADVANTAGE"):
        limit = (
            f"algo.policy_loss={algo.policy_loss} is defined only for one advantage and one weight "
            "per sequence"
        )
        for key, (effect, remedy) in varying.items():
            yield resolved.mistake(key, f"{effect}, but {limit}. {remedy}.")


def _token_selection(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each key that is not defined for a loss that selects tokens."""
    algo = resolved.config.algo
    loss = declaration(LOSSES, algo.policy_loss, key="algo.policy_loss")
    if not loss.constant("SELECTS_TOKENS"):
        return
    selection = f"algo.policy_loss={algo.policy_loss} selects tokens by their advantages"
    if algo.ratio == "sequence":
        yield resolved.mistake("algo.ratio", f"{selection} and ratios. Set it to token.")
    for key in ("difficulty", "length"):
        if getattr(algo.sample_weight, key):
            yield resolved.mistake(
                f"algo.sample_weight.{key}", f"{selection}, which weights distort. Set it to false."
            )


def _varying_by_token(resolved: Resolved) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (key, (effect, remedy)) for keys that vary advantages or weights within a sequence."""
    algo = resolved.config.algo
    estimator = declaration(ADVANTAGES, algo.advantage.estimator, key="algo.advantage.estimator")
    if estimator.constant("NEEDS_VALUES") or estimator.constant("NEEDS_DISTRIBUTION"):
        remedy = "Use an estimator with one advantage per response, such as group_norm"
        yield "algo.advantage.estimator", ("gives each token its own advantage", remedy)
    elif estimator.constant("NEEDS_TURNS"):
        remedy = "Use an estimator with one advantage per response, such as group_norm"
        yield "algo.advantage.estimator", ("gives each turn its own advantage", remedy)
    elif estimator.has_parameter("advantages", "gamma"):
        yield from _varying_returns(algo)
    for key in ("weight", "filter"):
        if getattr(algo.mismatch, key) == "token":
            yield (
                f"algo.mismatch.{key}",
                ("gives each token its own weight", "Set it to sequence or none"),
            )
    if algo.top_entropy < 1.0:
        yield "algo.top_entropy", ("selects tokens of a sequence", "Set it to 1")
    if algo.distill.has_servers:
        remedy = "Use teachers with model, or another policy loss"
        yield "algo.distill.teachers", ("with url, gives each token its own advantage", remedy)


def _varying_returns(algo: AlgoConfig) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (key, (effect, remedy)) for keys that vary the returns of tokens within a sequence.

    Returns are equal without a discount and without token-level rewards.
    """
    effect = (
        f"with algo.advantage.estimator={algo.advantage.estimator}, gives each token its own "
        "advantage"
    )
    group = "use an estimator that compares groups, such as group_norm"
    if algo.advantage.gamma != 1.0:
        yield "algo.advantage.gamma", (effect, "Set it to 1")
    if algo.kl.reward.coef:
        yield "algo.kl.reward.coef", (effect, f"Set algo.kl.loss.coef instead, or {group}")
    if algo.advantage.whiten_rewards:
        yield "algo.advantage.whiten_rewards", (effect, f"Set it to false, or {group}")


def _has_clip(policy_loss: str) -> bool:
    return declaration(LOSSES, policy_loss, key="algo.policy_loss").has_parameter(
        "policy_loss", "clip_low"
    )


def _kl(resolved: Resolved) -> Iterator[str]:
    kl = resolved.config.algo.kl
    yield from _kl_bias_correction(resolved)
    if kl.controller.kind == "adaptive" and kl.controller.target is None:
        yield resolved.mistake(
            "algo.kl.controller.kind",
            "needs a target. Set algo.kl.controller.target to the desired mean divergence per "
            "token.",
        )


def _kl_bias_correction(resolved: Resolved) -> Iterator[str]:
    loss = resolved.config.algo.kl.loss
    if not loss.bias_correction:
        return
    key = "algo.kl.loss.bias_correction"
    if loss.estimator not in ("k1", "k3"):
        yield resolved.mistake(
            key,
            f"is not defined for algo.kl.loss.estimator={loss.estimator}. Use k1 or k3, or set it "
            "to false.",
        )


def _terms(resolved: Resolved) -> Iterator[str]:
    algo = resolved.config.algo
    has_teachers = algo.distill.on_ranks and algo.distill.coef
    if not (algo.rl_coef or algo.sft.coef or algo.entropy_coef or has_teachers):
        yield resolved.mistake(
            "algo.rl_coef",
            "the loss has no term. Set algo.rl_coef, algo.sft.coef, algo.entropy_coef or, with "
            "algo.distill.teachers, algo.distill.coef above 0.",
        )


def _correction(resolved: Resolved) -> Iterator[str]:
    """Refuse a correction of variances that nothing computes."""
    settings = resolved.config.algo.advantage
    reads = settings.whiten or settings.whiten_rewards or settings.estimator in _WITH_DEVIATIONS
    if settings.correction != 1 and not reads:
        yield resolved.mistake(
            "algo.advantage.correction",
            f"has no effect with estimator={settings.estimator} and without whiten. Remove it.",
        )


def _mismatch(resolved: Resolved) -> Iterator[str]:
    mismatch = resolved.config.algo.mismatch
    if mismatch.low >= mismatch.high:
        yield resolved.mistake(
            "algo.mismatch.low", f"must be below algo.mismatch.high={mismatch.high}"
        )
    filters = _sampling_filters(resolved)
    for key in ("weight", "filter", "off_policy_limit"):
        if filters and getattr(mismatch, key) not in ("none", None):
            message = (
                f"the log-probabilities are not comparable with {' and '.join(filters)}. "
                f"Set it to {'null' if key == 'off_policy_limit' else 'none'}."
            )
            yield resolved.mistake(f"algo.mismatch.{key}", message)


def _sampling_filters(resolved: Resolved) -> list[str]:
    """Return the keys of active sampling filters, which the distribution of the trainer ignores."""
    sampling = resolved.config.rollout.sampling
    active = {
        "top_p": sampling.top_p < 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p > 0.0,
    }
    return [f"rollout.sampling.{name}" for name, is_on in active.items() if is_on]


def advice(resolved: Resolved, command: str) -> list[str]:
    """Return one line for each setting that is valid but known to train badly."""
    return list(_advice(resolved)) if command == "train-grpo" else []


def _advice(resolved: Resolved) -> Iterator[str]:
    config, algo = resolved.config, resolved.config.algo
    widest = max(algo.clip.low, algo.clip.high)
    if algo.ratio == "sequence" and widest > SEQUENCE_CLIP_LIMIT and _has_clip(algo.policy_loss):
        yield resolved.mistake(
            "algo.clip.high" if algo.clip.high == widest else "algo.clip.low",
            "is a width for token ratios, but sequence ratios stay close to 1. "
            "GSPO uses 3e-4 and 4e-4.",
        )
    has_baseline = algo.advantage.whiten or config.reward.norm.center != "none"
    if algo.advantage.estimator == "reinforce" and not has_baseline:
        yield resolved.mistake(
            "algo.advantage.estimator",
            "has no baseline, so its gradient is noisy. Consider rloo or reinforce_pp.",
        )
    loss = algo.kl.loss
    if loss.coef and loss.estimator == "k1" and not loss.bias_correction:
        yield resolved.mistake(
            "algo.kl.loss.estimator",
            "k1 in the loss has zero expected gradient, so it does not limit the divergence. "
            "Use k2 or k3, or set algo.kl.loss.bias_correction.",
        )
    if algo.kl.reward.coef and algo.kl.reward.estimator != "k1":
        message = (
            "also penalizes tokens that have become too rare, which makes them rarer. "
            "In rewards, only k1 has the gradient of the divergence."
        )
        yield resolved.mistake("algo.kl.reward.estimator", message)
    critic, lr = config.cluster.roles.critic.optimizer, config.train.optimizer.lr
    if needs_critic(config) and critic.lr is not None and critic.lr < lr:
        yield resolved.mistake(
            "cluster.roles.critic.optimizer.lr",
            f"is below that of the policy, {lr}. A critic usually learns faster than its policy.",
        )
    target = algo.kl.controller.target
    if algo.kl.controller.kind == "adaptive" and target is not None and target > MAX_KL_TARGET:
        message = "allows the policy to move far. Usual targets are 0.001 to 0.01."
        yield resolved.mistake("algo.kl.controller.target", message)
    if algo.policy_loss in ("vanilla", "gpg") and updates_per_step(config) > 1:
        message = (
            f"has no importance ratio, but a rollout has {updates_per_step(config)} updates, which "
            "are off-policy. Consider tis."
        )
        yield resolved.mistake("algo.policy_loss", message)
    if algo.policy_loss == "kl_cov" and updates_per_step(config) == 1:
        yield resolved.mistake(
            "algo.policy_loss",
            "penalizes the movement since the rollout, which is 0 with one update per rollout. "
            "Set train.updates.",
        )
    filters = _sampling_filters(resolved)
    if filters:
        yield (
            f"{', '.join(filters)}: the log-probabilities of sampler and trainer are not "
            "comparable, so train/sampler_* metrics are unreliable"
        )
