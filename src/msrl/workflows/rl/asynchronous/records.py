"""Finished groups in a checkpoint, as JSON. Arrays keep their bits."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrl.errors import MsrlError
from msrl.rollout.runtime.buffer import BufferState, FinishedGroup, Ticket
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    Prompt,
    Reward,
    RolloutGroup,
    Routes,
    ScoredGroup,
    TokenSequence,
    VersionRun,
)


def encode(state: BufferState[ScoredGroup]) -> dict[str, Any]:
    """Return the state of a buffer as JSON. Prompts are stored by their number only."""
    return {
        "next_number": state.next_number,
        "taken": state.taken,
        "pending": [[ticket.number, ticket.attempt] for ticket in state.pending],
        "finished": [_encode_finished(item) for item in state.finished],
        "filtered": [_encode_finished(item) for item in state.filtered],
    }


def decode(
    values: Mapping[str, Any], find_prompt: Callable[[int], Prompt]
) -> BufferState[ScoredGroup]:
    """Return the state that `encode` stored. `find_prompt` returns the prompt of a number.

    Raises:
        MsrlError: A number has another prompt than before.
    """
    return BufferState(
        next_number=values["next_number"],
        taken=values["taken"],
        pending=tuple(Ticket(number, attempt) for number, attempt in values["pending"]),
        finished=tuple(_decode_finished(item, find_prompt) for item in values["finished"]),
        filtered=tuple(_decode_finished(item, find_prompt) for item in values.get("filtered", ())),
    )


def _encode_finished(item: FinishedGroup[ScoredGroup]) -> dict[str, Any]:
    return {
        "number": item.ticket.number,
        "attempt": item.ticket.attempt,
        "oldest_version": item.oldest_version,
        "prompt_index": item.group.rollout.prompt.index,
        **_encode_group(item.group),
    }


def _encode_group(group: ScoredGroup) -> dict[str, Any]:
    return {
        "completions": [_encode_completion(item) for item in group.rollout.completions],
        "rewards": [
            [reward.total, dict(reward.scores), reward.is_decided] for reward in group.rewards
        ],
        "greedy": None if group.greedy is None else _encode_group(group.greedy),
    }


def _decode_group(values: Mapping[str, Any], prompt: Prompt) -> ScoredGroup:
    completions = tuple(_decode_completion(item) for item in values["completions"])
    rewards = tuple(Reward(*reward) for reward in values["rewards"])
    greedy = _decode_group(values["greedy"], prompt) if values.get("greedy") else None
    return ScoredGroup(RolloutGroup(prompt, completions), rewards, greedy)


def _decode_finished(
    values: Mapping[str, Any], find_prompt: Callable[[int], Prompt]
) -> FinishedGroup[ScoredGroup]:
    prompt = find_prompt(values["number"])
    if prompt.index != values["prompt_index"]:
        raise MsrlError(
            f"data.train: prompt {values['number']} of the order is row {prompt.index}, but the "
            f"checkpoint has a group of row {values['prompt_index']} for it. Resume with the data "
            "of the checkpoint."
        )
    ticket = Ticket(values["number"], values["attempt"])
    return FinishedGroup(ticket, values["oldest_version"], _decode_group(values, prompt))


def _encode_completion(completion: Completion) -> dict[str, Any]:
    return {
        "token_ids": _encode_array(completion.token_ids),
        "logprobs": _encode_array(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "text": completion.text,
        "versions": [list(run) for run in completion.versions],
        "episode": None if completion.episode is None else _encode_episode(completion.episode),
        "routes": _encode_routes(completion.routes),
    }


def _decode_completion(values: Mapping[str, Any]) -> Completion:
    return Completion(
        _decode_array(values["token_ids"], np.dtype(np.int64)),
        _decode_array(values["logprobs"], np.dtype(np.float32)),
        values["finish_reason"],
        values["policy_version"],
        values["text"],
        tuple(VersionRun(*run) for run in values["versions"]),
        _decode_episode(values["episode"]) if values.get("episode") else None,
        _decode_routes(values.get("routes")),
    )


def _encode_episode(episode: Episode) -> dict[str, Any]:
    return {
        "sequences": [
            [
                _encode_array(sequence.token_ids),
                _encode_array(sequence.is_sampled),
                _encode_routes(sequence.routes),
            ]
            for sequence in episode.sequences
        ],
        "turns": [asdict(turn) for turn in episode.turns],
        "messages": [dict(message) for message in episode.messages],
        "success": episode.success,
        "fault": list(episode.fault),
        "truncated_messages": episode.truncated_messages,
        "environment": episode.environment,
        "repeats": episode.repeats,
    }


def _decode_episode(values: Mapping[str, Any]) -> Episode:
    sequences = tuple(_decode_sequence(*items) for items in values["sequences"])
    turns = tuple(
        EpisodeTurn(**{**turn, "tool_calls": tuple(turn["tool_calls"])}) for turn in values["turns"]
    )
    reason, detail = values["fault"]
    return Episode(
        sequences,
        turns,
        tuple(values["messages"]),
        values["success"],
        (reason, detail),
        values["truncated_messages"],
        values.get("environment", ""),
        values.get("repeats", 0),
    )


def _decode_sequence(
    token_ids: str, mask: str, routes: Mapping[str, Any] | None = None
) -> TokenSequence:
    ids = _decode_array(token_ids, np.dtype(np.int64))
    return TokenSequence(ids, _decode_array(mask, np.dtype(np.bool_)), _decode_routes(routes))


def _encode_routes(routes: Routes | None) -> dict[str, Any] | None:
    if routes is None:
        return None
    shape, dtype = list(routes.shape), routes.dtype.name
    return {"shape": shape, "dtype": dtype, "experts": _encode_array(routes)}


def _decode_routes(values: Mapping[str, Any] | None) -> Routes | None:
    if values is None:
        return None
    flat = _decode_array(values["experts"], np.dtype(values["dtype"]))
    return flat.reshape(values["shape"])


def _encode_array(array: NDArray[Any]) -> str:
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode()


def _decode_array(text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    little = np.frombuffer(base64.b64decode(text), dtype.newbyteorder("<"))
    return little.astype(dtype)
