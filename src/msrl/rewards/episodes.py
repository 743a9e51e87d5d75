"""Rewards and faults of environments in scored groups."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msrl.rewards.failures import SourceCalls, error_line
from msrl.types import Completion, Episode, Prompt, Reward, ScoredGroup

LABEL = "environment"  # of the environment's rewards among the scores
_REMEDY = "Fix the environment, or raise environment.timeout_s"


def with_environment(group: ScoredGroup, weight: float) -> ScoredGroup:
    """Return a group whose rewards contain those of its environment.

    An episode that ended with a fault gets the mean reward of the others in its group, so that it
    has no advantage and does not change theirs.
    """
    completions = group.rollout.completions
    rewards = [
        _joined(reward, completion.episode, weight)
        for reward, completion in zip(group.rewards, completions, strict=True)
    ]
    has_fault = [completion.finish_reason == "fault" for completion in completions]
    totals = [reward.total for reward, fault in zip(rewards, has_fault, strict=True) if not fault]
    neutral = _mean(totals)
    for number, fault in enumerate(has_fault):
        if fault:
            rewards[number] = replace(rewards[number], total=neutral)
    return replace(group, rewards=tuple(rewards))


def episode_calls(groups: Sequence[ScoredGroup]) -> SourceCalls:
    """Return the number of episodes and faults as calls of a reward source."""
    episodes = [item.episode for group in groups for item in group.rollout.completions]
    faults = [item.fault for item in episodes if item is not None and item.fault[0]]
    counts = Counter(reason for reason, _ in faults)
    last_error = error_line(faults[-1][1]) if faults else ""
    return SourceCalls(LABEL, _REMEDY, len(episodes), dict(counts), last_error)


def fault_notes(groups: Sequence[ScoredGroup]) -> tuple[str, ...]:
    """Return one message per kind of fault, with the row and detail of the first one."""
    counts, first = Counter[str](), dict[str, str]()
    for group in groups:
        for completion in group.rollout.completions:
            if completion.episode is not None and completion.episode.fault[0]:
                reason, detail = completion.episode.fault
                counts[reason] += 1
                text = f"prompt {group.rollout.prompt.index}: {error_line(detail)}"
                first.setdefault(reason, text)
    return tuple(
        f"{LABEL}/{reason}: {count} episodes are not trained; first at {first[reason]}"
        for reason, count in counts.items()
    )


def row_columns(prompt: Prompt, completion: Completion) -> Mapping[str, str]:
    """Return the columns for verifiers: those of the row, and the messages of an episode."""
    if completion.episode is None:
        return prompt.extra
    messages = [dict(message) for message in completion.episode.messages]
    return {**prompt.extra, "messages": json.dumps(messages, ensure_ascii=False)}


def _joined(reward: Reward, episode: Episode | None, weight: float) -> Reward:
    own = None if episode is None else episode.reward
    if own is None:
        return reward
    return Reward(reward.total + weight * own, {**reward.scores, LABEL: own})


def _mean(totals: Sequence[float]) -> float:
    """Return the mean; of equal numbers, exactly that number."""
    if not totals:
        return 0.0
    return totals[0] if len(set(totals)) == 1 else sum(totals) / len(totals)
