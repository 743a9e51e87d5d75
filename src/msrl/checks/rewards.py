"""Checks of the `reward` section."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks.roles import check_shared_layout
from msrl.config.loader import Resolved
from msrl.models.paths import runs_on_ranks
from msrl.plan.run_plan import RunPlan
from msrl.rewards import sources


def check_rewards(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check the reward sources, the reward models on training ranks, and the reward processing."""
    if plan.scores_responses:
        yield from check_sources(resolved, plan)
        yield from _rank_models(resolved, plan)
    yield from _reward_steps(resolved)


def check_sources(resolved: Resolved, plan: RunPlan, hint: str = "") -> Iterator[str]:
    """Check the reward sources. `hint` follows a message about all of them."""
    sections, environment = resolved.config.reward.sources, resolved.config.environment
    gives_rewards = environment.is_on and not environment.is_single_turn
    if not sections and (gives_rewards or plan.is_distillation):
        return
    entries = [sources.Source.of(section) for section in sections]
    for number, key, message in sources.mistakes(entries, plan.hf_config):
        if number is None:
            yield f"reward.sources: {message}{hint}"
        else:
            yield resolved.mistake(f"reward.sources.{number}.{key}", message)


def _rank_models(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that reward models on training ranks fit the parallel layout of the policy."""
    for number, section in enumerate(resolved.config.reward.sources):
        if section.model is None or not runs_on_ranks(section.model, section.engine):
            continue
        shape = plan.reward_models[section.model].shape
        if shape is None:
            continue  # the check of the source reports it
        if plan.separate_model("reward") is not None:
            continue  # the check of the role compares its layout
        yield from check_shared_layout(resolved, f"reward.sources.{number}.model", plan, shape)


def _reward_steps(resolved: Resolved) -> Iterator[str]:
    reward, rollout = resolved.config.reward, resolved.config.rollout
    if reward.overlong.buffer > rollout.max_response_tokens:
        yield resolved.mistake(
            "reward.overlong.buffer",
            f"must be at most rollout.max_response_tokens={rollout.max_response_tokens}",
        )
    clip = reward.norm.clip
    if clip is not None and clip[0] >= clip[1]:
        yield resolved.mistake("reward.norm.clip", "must be [low, high] with low below high")
