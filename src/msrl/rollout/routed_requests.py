"""Requests of an engine whose routes its worker records (`vllm_routes.py`).

The engine has read every token but the last one of a finished request, which it has only sampled.

P prompt tokens, R response tokens, T = P + R, L mixture layers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

from msrl.models.shape import Moe
from msrl.rollout.engine import NewTokens
from msrl.types import Completion, Prompt, Routes


class RoutedRequests:
    """Requests with routes.

    Args:
        call_workers: Function that calls a method of all workers and returns their results.
    """

    def __init__(self, call_workers: Callable[..., list[Any]]) -> None:
        self._call_workers = call_workers
        self._numbers = count()
        self._lengths = dict[str, int]()  # of running requests

    def begin(self, num_layers: int, moe: Moe) -> None:
        """Record the routes of all tokens through `num_layers` mixtures from now on.

        Raises:
            MsrlError: vLLM does not show the experts of this model.
        """
        self._call_workers("record_routes", num_layers, moe.expert_number_bytes)

    def new_keys(self, num_requests: int) -> list[str]:
        """Return keys for requests that `start` is not called for."""
        return [f"generated {number}" for number in islice(self._numbers, num_requests)]

    def add_routes(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], keys: Sequence[str]
    ) -> list[Completion]:
        """Return the completions of the prompts with their routes."""
        lengths = [
            len(prompt.token_ids) + len(completion.token_ids)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        routes = self._take(keys, lengths)
        return [
            replace(completion, routes=rows)
            for completion, rows in zip(completions, routes, strict=True)
        ]

    def start(self, request: str, num_prompt_tokens: int) -> None:
        """Begin a request that runs in steps."""
        self._lengths[request] = num_prompt_tokens

    def add_step_routes(self, outputs: Sequence[NewTokens]) -> list[NewTokens]:
        """Return the new tokens of a step with the routes of the requests that it finished."""
        routed = [new for new in outputs if new.request in self._lengths]
        for new in routed:
            self._lengths[new.request] += len(new.token_ids)
        finished = [new.request for new in routed if new.finish_reason is not None]
        if not finished:
            return list(outputs)
        rows = self._take(finished, [self._lengths.pop(request) for request in finished])
        routes = dict(zip(finished, rows, strict=True))
        return [replace(new, routes=routes.get(new.request)) for new in outputs]

    def abort(self, requests: Sequence[str]) -> None:
        """Forget the requests that run and have routes."""
        aborted = [request for request in requests if request in self._lengths]
        for request in aborted:
            del self._lengths[request]
        if aborted:
            self._call_workers("drop_routes", aborted)

    def _take(self, keys: Sequence[str], lengths: Sequence[int]) -> list[Routes]:
        """Return the routes of finished requests of `lengths` tokens, [T - 1, L, k] each.

        Raises:
            RuntimeError: The engine has not read all of these tokens.
        """
        recorded: list[Routes] = self._call_workers("take_routes", list(keys))[0]
        for key, rows, length in zip(keys, recorded, lengths, strict=True):
            if len(rows) < length - 1:
                raise RuntimeError(f"{key}: the engine routed {len(rows)} of {length - 1} tokens")
        return [rows[: length - 1] for rows, length in zip(recorded, lengths, strict=True)]
