"""Checks of the `environment` section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msrl import registry
from msrl.checks.plugins import check_options, check_plugin_name
from msrl.config.loader import Resolved
from msrl.config.sections.environment import EnvironmentConfig, SingleEnvironment
from msrl.plan.derived import keys_that_change_totals
from msrl.registry import own
from msrl.registry.declarations import declaration
from msrl.rewards.failures import ENVIRONMENT
from msrl.rewards.sources import Source


def check_environment(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of the environment that is invalid or has no effect."""
    section = resolved.config.environment
    if not section.is_on:
        return
    yield from _sources(resolved, section)
    yield from _tool_format(resolved, section)
    rollout = resolved.config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if section.max_tokens is not None and section.max_tokens > longest:
        yield resolved.mistake(
            "environment.max_tokens",
            f"must be at most {longest}, rollout.max_prompt_tokens + rollout.max_response_tokens",
        )
    yield from _rewards(resolved, section)


def _sources(resolved: Resolved, section: EnvironmentConfig) -> Iterator[str]:
    """Check the environments and their options."""
    if not section.mixture:
        yield from _source(resolved, "environment", section)
        return
    for name in SingleEnvironment.model_fields:
        if resolved.is_changed(f"environment.{name}"):
            yield resolved.mistake(
                f"environment.{name}", "conflicts with environment.mixture. Set it there."
            )
    for name, entry in section.mixture.items():
        yield from _source(resolved, f"environment.mixture.{name}", entry)
    if not any(entry.weight for entry in section.mixture.values()):
        yield resolved.mistake("environment.mixture", "all weights are 0. Set one.")


def _source(resolved: Resolved, key: str, entry: SingleEnvironment) -> Iterator[str]:
    """Check one environment."""
    if (entry.name is None) == (entry.path is None):
        yield resolved.mistake(key, "set either name or path")
    elif entry.name is not None:
        plugin = (registry.ENVIRONMENTS, entry.name, "environment")
        mistakes = list(check_plugin_name(resolved, f"{key}.name", *plugin[:2]))
        yield from mistakes or check_options(resolved, f"{key}.options", plugin)
    elif entry.path is not None and (problem := own.mistake(entry.path)):
        yield resolved.mistake(f"{key}.path", problem)


def _tool_format(resolved: Resolved, section: EnvironmentConfig) -> Iterator[str]:
    if section.tool_format is not None:
        yield from check_plugin_name(
            resolved, "environment.tool_format", registry.TOOL_FORMATS, section.tool_format
        )


def _rewards(resolved: Resolved, section: EnvironmentConfig) -> Iterator[str]:
    """Check reward settings that are not defined for rewards of turns."""
    config = resolved.config
    if config.reward.format_penalty and not section.is_single_turn:
        yield resolved.mistake(
            "reward.format_penalty",
            "compares one response with a format, but an episode has several answers. Remove it.",
        )
    for number, source in enumerate(config.reward.sources):
        if Source.of(source).label == ENVIRONMENT:
            yield resolved.mistake(
                f"reward.sources.{number}",
                f"has the name {ENVIRONMENT}, that of the environment's rewards. Set another one.",
            )
    estimator = config.algo.advantage.estimator
    plugin = declaration(registry.ADVANTAGES, estimator, key="algo.advantage.estimator")
    keys = keys_that_change_totals(config)
    if not plugin.constant("NEEDS_TURNS"):
        yield from _conflicting_place(resolved, keys)
        return
    keys = [] if section.reward_at == "end" else keys
    if config.algo.advantage.whiten_rewards:
        keys.append("algo.advantage.whiten_rewards")
    for key in keys:
        yield resolved.mistake(
            key,
            f"changes the total of an episode, but algo.advantage.estimator={estimator} reads "
            "rewards of turns. Remove it.",
        )


def _conflicting_place(resolved: Resolved, keys: Sequence[str]) -> Iterator[str]:
    """Refuse rewards at the end of their turns if `keys` change the total of an episode."""
    if keys and resolved.config.environment.reward_at == "turn":
        yield resolved.mistake(
            "environment.reward_at",
            f"conflicts with {keys[0]}, which changes the total of an episode. Set it to end.",
        )
