"""Rewards of a server: `POST url` with a batch of completions, `{"rewards": [...]}` back; LightRFT's form, with two more lists.

A request is `{"queries", "prompts", "responses", "references", "extra"}`, lists of equal length: prompt and response as one text, each of
the two, the ground truth, the further columns of the row. A reward of null is undecided. `http.py` says what is tried again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from msrl.config.interpolate import with_environment
from msrl.errors import MsrlError
from msrl.rewards.http import RemoteError, Server, post_json
from msrl.rewards.pool import CallResult

_HEADER = re.compile(r"[\t -~\xa0-\xff]*")


@dataclass(frozen=True, slots=True)
class Item:
    """One completion to score: the prompt as the policy saw it, special tokens included, and what goes with it."""

    prompt: str
    response: str
    answer: str = ""
    extra: Mapping[str, str] = field(default_factory=dict[str, str])

    def with_prompt_of(self, column: str) -> Item:
        """Itself with the prompt of a further column of the row (the bare question, say). Raises MsrlError where the row has none."""
        if not column:
            return self
        if column not in self.extra:
            raise MsrlError(
                f"reward.sources: options.prompt_column={column}: a row has no such column; add it with "
                f"preprocess.map_keys: {{extra.{column}: COLUMN}}"
            )
        return Item(self.extra[column], self.response, self.answer, self.extra)


def _in_force(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers as they are sent. Raises KeyError for an environment variable that is not set."""
    return {name: with_environment(value) for name, value in (headers or {}).items()}


class Remote:
    """A reward server. `timeout_s` is the deadline of one request with all its attempts.

    `batch`: completions of a request; `concurrency`: requests at a time; `retries` after the first attempt, with pauses from `backoff_s` on
    that double; `headers`: of every request, `${env:NAME}` in them read here alone; `prompt_column`: column to send as the prompt.
    """

    def __init__(
        self, url: str, timeout_s: float, *, batch: int = 64, concurrency: int = 4, retries: int = 5, backoff_s: float = 0.5,
        headers: Mapping[str, str] | None = None, prompt_column: str = "",
    ) -> None:  # fmt: skip
        self._server = Server(url, timeout_s, retries, backoff_s, _in_force(headers))
        self._batch, self._concurrency, self._prompt_column = batch, concurrency, prompt_column
        self._retried = 0
        self._num_failed, self._has_answered = 0, False  # requests of the present `outcomes`

    @staticmethod
    def refusal(
        url: str, *, batch: int = 64, concurrency: int = 4, retries: int = 5, backoff_s: float = 0.5,
        headers: Mapping[str, str] | None = None, **_: Any,
    ) -> str | None:  # fmt: skip
        """What is wrong with these options."""
        if not url.startswith(("http://", "https://")):
            return "must begin with http:// or https://"
        try:
            broken = [name for name, value in _in_force(headers).items() if not _HEADER.fullmatch(f"{name}{value}")]
        except KeyError as error:
            return f"options.headers: the environment variable {error.args[0]} is not set"
        if broken:
            return f"options.headers.{broken[0]} has to be one line of Latin letters; look for a line feed at its end"
        wrong = min(batch, concurrency) < 1 or retries < 0 or backoff_s < 0
        return "options.batch and concurrency have to be 1 or more, retries and backoff_s 0 or more" if wrong else None

    def outcomes(self, items: Sequence[Item]) -> list[CallResult]:
        """A score for every item, or why there is none."""
        items = [item.with_prompt_of(self._prompt_column) for item in items]
        parts = [items[start : start + self._batch] for start in range(0, len(items), self._batch)]
        self._num_failed, self._has_answered = 0, False
        with ThreadPoolExecutor(self._concurrency) as threads:
            answers = list(threads.map(self._part, parts))
        self._retried += sum(retried for _, retried in answers)
        return [outcome for outcomes, _ in answers for outcome in outcomes]

    def take_retried(self) -> int:
        """Attempts that failed and were made again, since this was last asked."""
        retried, self._retried = self._retried, 0
        return retried

    def close(self) -> None:
        """Nothing stays open between two requests."""

    def _part(self, items: Sequence[Item]) -> tuple[list[CallResult], int]:
        # A server that never answers must not take its deadline for every request.
        if self._num_failed >= 2 * self._concurrency and not self._has_answered:
            return [CallResult(None, "skipped", "not sent: the requests before it failed")] * len(items), 0
        request = {
            "queries": [item.prompt + item.response for item in items],
            "prompts": [item.prompt for item in items],
            "responses": [item.response for item in items],
            "references": [item.answer for item in items],
            "extra": [dict(item.extra) for item in items],
        }
        try:
            answer, retried = post_json(self._server, request)
            outcomes = self._read(answer, len(items))
            self._has_answered = True
            return outcomes, retried
        except RemoteError as error:
            self._num_failed += 1
            return [CallResult(None, error.kind, str(error))] * len(items), 0

    def _read(self, answer: Any, count: int) -> list[CallResult]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != count:
            raise RemoteError(f'{self._server.url}: wanted {{"rewards": [{count} numbers]}}, got {str(answer)[:200]}', "error")
        return [self._outcome(reward) for reward in rewards]

    def _outcome(self, reward: object) -> CallResult:
        if isinstance(reward, int | float) and not isinstance(reward, bool) and abs(reward) <= sys.float_info.max:
            return CallResult(float(reward))
        return CallResult(None, "error", f"{self._server.url}: gave {str(reward)[:200]} as a reward, no finite number")
