"""Metrics of episodes: turns, success, faults, tool calls and waiting times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from msrl.rewards.verdicts import reporting_environments
from msrl.types import Episode, RolloutGroup


def episode_metrics(groups: Iterable[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of all episodes without their prefix; empty without episodes."""
    completions = [item for group in groups for item in group.completions]
    pairs = [(item, item.episode) for item in completions if item.episode is not None]
    if not pairs:
        return {}
    episodes = [episode for _, episode in pairs]
    turns = [turn for episode in episodes for turn in episode.turns]
    counts = np.array([len(episode.turns) for episode in episodes])
    metrics = {
        "turns": float(counts.mean()),
        "turns_max": float(counts.max()),
        "turn_length": _mean([turn.num_tokens for turn in turns]),
        "truncated_turns": _mean([turn.finish_reason == "length" for turn in turns]),
        "invalid_actions": _mean([turn.is_invalid for turn in turns]),
        "environment_s": _mean([turn.environment_s for turn in turns]),
        "observation_tokens": _mean([_num_observed(episode) for episode in episodes]),
        "sequences": _mean([len(episode.sequences) for episode in episodes]),
        "faults": _mean([bool(episode.fault[0]) for episode in episodes]),
        "truncated_messages": float(sum(episode.truncated_messages for episode in episodes)),
    }
    for reason in ("turns", "time"):
        metrics[f"ended_by_{reason}"] = _mean([item.finish_reason == reason for item, _ in pairs])
    repeats = sum(episode.repeats for episode in episodes)
    if repeats:
        metrics["repeats"] = float(repeats)
    return {**metrics, **_success(episodes), **_tools(episodes)}


def _success(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the share of successful episodes, without those whose environment failed.

    Episodes that ended at a limit are not successful. There is no share if no environment
    reports success.
    """
    reporting = reporting_environments(episodes)
    judged = [
        episode.success is True
        for episode in episodes
        if episode.environment in reporting and not episode.fault[0]
    ]
    return {"success": _mean(judged)} if judged else {}


def _tools(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the number of tool calls per episode, and the share of calls with an error."""
    calls = [call for episode in episodes for turn in episode.turns for call in turn.tool_calls]
    if not calls:
        return {}
    return {
        "tool_calls": len(calls) / len(episodes),
        "tool_errors": _mean([bool(call.get("error")) for call in calls]),
    }


def _num_observed(episode: Episode) -> int:
    """Return the number of tokens of messages after the first answer."""
    count = 0
    for sequence in episode.sequences:
        if sequence.is_sampled.any():
            start = int(sequence.is_sampled.argmax())
            count += int((~sequence.is_sampled[start:]).sum())
    return count


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
