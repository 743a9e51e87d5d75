"""Checks of `rollout.async` and of the off-policy correction that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.loader import Resolved
from msrl.config.schema import AlgoConfig
from msrl.plan.derived import num_separate_devices, updates_per_step
from msrl.registry import LOSSES
from msrl.registry.declarations import declaration
from msrl.rewards.sources import Source


def check_async(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of `rollout.async` that is invalid or has no effect."""
    options = resolved.config.rollout.asynchronous
    if not options.is_on:
        return
    yield from _check_unsupported(resolved)
    if not options.allow_uncorrected and not is_corrected(resolved.config.algo):
        yield resolved.mistake(
            "rollout.async.max_staleness",
            "needs an off-policy correction. Set algo.mismatch.weight or algo.mismatch.filter, or "
            "force it with rollout.async.allow_uncorrected=true.",
        )


def check_old_logprobs(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting that contradicts `algo.old_logprobs`."""
    algo = resolved.config.algo
    if algo.old_logprobs == "trainer":
        return
    key = f"algo.old_logprobs={algo.old_logprobs}"
    if algo.mismatch.normalize:
        message = f"needs the log-probabilities of the trainer, but {key}. Set it to false."
        yield resolved.mistake("algo.mismatch.normalize", message)
    if algo.old_logprobs == "log-linear" and updates_per_step(resolved.config) == 1:
        yield resolved.mistake(
            "algo.old_logprobs",
            "has no effect with one update per step. Set it to trainer.",
        )
    if not _uses_ratio(algo) and algo.old_logprobs == "behavior":
        yield resolved.mistake(
            "algo.old_logprobs",
            f"has no effect with algo.policy_loss={algo.policy_loss}, which uses no ratio. Set it "
            "to trainer.",
        )


def is_corrected(algo: AlgoConfig) -> bool:
    """Return True if the loss accounts for samples of older policies."""
    mismatch = algo.mismatch
    if mismatch.weight != "none" or mismatch.filter != "none":
        return True
    return algo.old_logprobs == "behavior" and _uses_ratio(algo)


def _uses_ratio(algo: AlgoConfig) -> bool:
    loss = declaration(LOSSES, algo.policy_loss, key="algo.policy_loss")
    return not loss.constant("NO_RATIO")


def _check_unsupported(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each other key that asynchronous rollouts cannot use."""
    config = resolved.config
    has_ranks = num_separate_devices(config.cluster.roles.reward) > 0
    if config.rollout.engine.options.get("async_scheduling"):
        yield resolved.mistake(
            "rollout.engine.options.async_scheduling",
            "lets tokens of older weights arrive after an update, so their versions would be "
            "wrong. Remove it.",
        )
    for number, section in enumerate(config.reward.sources):
        source = Source.of(section)
        if source.kind == "model" and source.on_ranks and not has_ranks:
            yield resolved.mistake(
                f"reward.sources.{number}.model",
                "runs on the training ranks, which train while groups are scored. Set "
                "cluster.roles.reward.devices, use a reward server, or set "
                "rollout.async.max_staleness to 0.",
            )
