"""Client of a reward server: `POST url` with a batch of completions returns `{"rewards": [...]}`.

The format is LightRFT's with two additional lists. A request has these lists of equal length:

- `queries`: prompt and response as one text with special tokens, also the one that ended the
  response, as the decoded sequences of LightRFT and OpenRLHF have them.
- `prompts` and `responses`: the two texts separately.
- `references`: the ground truths.
- `extra`: the extra columns of the rows.

A reward of null is a failed call. `msrl.http_requests` defines which errors are retried.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from msrl.config.variables import with_environment
from msrl.errors import MsrlError
from msrl.http_requests import RemoteError, Server, post_json
from msrl.rewards.pool import CallResult

_ADDRESS = re.compile(r"[!-~]+")
HEADER_TEXT = re.compile(r"[\t -~\xa0-\xff]*")


@dataclass(frozen=True, slots=True)
class Item:
    """Completion to score.

    `prompt` is the text that the policy received, with special tokens. `response` is the text that
    verifiers score. `decoded` is the text of all its tokens, also of special ones such as the
    `<|im_end|>` that ended it; it is empty for a response without tokens.
    """

    prompt: str
    response: str
    answer: str = ""
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    decoded: str = ""

    @property
    def full_response(self) -> str:
        """Response as a reward model reads it, with special tokens."""
        return self.decoded or self.response

    def use_prompt_column(self, column: str) -> Item:
        """Return the item with an extra column of its row as the prompt.

        The column may hold the bare question. An empty `column` keeps the prompt.

        Raises:
            MsrlError: The row has no such column.
        """
        if not column:
            return self
        if column not in self.extra:
            raise MsrlError(
                f"reward.sources: options.prompt_column={column}: a row has no such column. "
                f"Add it with preprocess.map_keys: {{extra.{column}: COLUMN}}."
            )
        return replace(self, prompt=self.extra[column])


def resolve_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers with environment variables resolved. Raises KeyError for an unset one."""
    return {name: with_environment(value) for name, value in (headers or {}).items()}


def address_refusal(url: str) -> str | None:
    """Return the reason why an address cannot be used, or None."""
    try:
        address = with_environment(url)
    except KeyError as error:
        return f"environment variable {error.args[0]} is not set"
    if not address.startswith(("http://", "https://")):
        return "must begin with http:// or https://"
    if not _ADDRESS.fullmatch(address):
        return "must consist of ASCII characters without spaces"
    return _authority_refusal(address)


def _authority_refusal(address: str) -> str | None:
    """Return the reason why the host and port of an address cannot be used, or None.

    urllib would name the values in its errors.
    """
    try:
        url = urlsplit(address)
        if "@" in url.netloc:
            return "contains a user name or password, which are not sent. Send a header instead"
        is_valid = bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    return None if is_valid else "must have a host, and a port between 1 and 65535 if any"


class Remote:
    """Client of a reward server.

    Args:
        url: Address of the server. `${env:NAME}` is resolved only for requests.
        timeout_s: Deadline of one request with all its attempts.
        batch: Completions per request.
        concurrency: Number of concurrent requests.
        retries: Attempts after the first one.
        backoff_s: First pause between attempts; it doubles with each attempt.
        headers: Headers of every request. `${env:NAME}` is resolved only here.
        prompt_column: Extra column to send as the prompt.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        batch: int = 64,
        concurrency: int = 4,
        retries: int = 5,
        backoff_s: float = 0.5,
        headers: Mapping[str, str] | None = None,
        prompt_column: str = "",
    ) -> None:
        self._server = Server(url, timeout_s, retries, backoff_s, resolve_headers(headers))
        self._batch, self._concurrency, self._prompt_column = batch, concurrency, prompt_column
        self._num_retried = 0
        self._num_failed, self._has_answered = 0, False  # requests of the current `score`

    @staticmethod
    def refusal(
        url: str,
        *,
        batch: int = 64,
        concurrency: int = 4,
        retries: int = 5,
        backoff_s: float = 0.5,
        headers: Mapping[str, str] | None = None,
        **_: Any,
    ) -> str | None:
        """Return the reason why these options cannot be used, or None."""
        reason = address_refusal(url)
        if reason is not None:
            return reason
        try:
            resolved = resolve_headers(headers)
        except KeyError as error:
            return f"options.headers: environment variable {error.args[0]} is not set"
        invalid = [name for name in resolved if not HEADER_TEXT.fullmatch(name + resolved[name])]
        if invalid:
            limits = "must be a single line of Latin-1 characters"
            return f"options.headers.{invalid[0]} {limits}; check for a line feed at its end"
        if min(batch, concurrency) < 1 or retries < 0 or backoff_s < 0:
            return (
                "options.batch and concurrency must be at least 1, retries and backoff_s at least 0"
            )
        return None

    def score(self, items: Sequence[Item]) -> list[CallResult]:
        """Return the score of every item, or the reason why it has none."""
        items = [item.use_prompt_column(self._prompt_column) for item in items]
        batches = [items[i : i + self._batch] for i in range(0, len(items), self._batch)]
        self._num_failed, self._has_answered = 0, False
        with ThreadPoolExecutor(self._concurrency) as threads:
            answers = list(threads.map(self._score_batch, batches))
        self._num_retried += sum(num_retried for _, num_retried in answers)
        return [result for results, _ in answers for result in results]

    def take_counts(self) -> dict[str, float]:
        """Return the number of attempts that were retried since the previous call."""
        num_retried, self._num_retried = self._num_retried, 0
        return {"retried": num_retried} if num_retried else {}

    def close(self) -> None:
        """Do nothing: no connection stays open between requests."""

    def _score_batch(self, items: Sequence[Item]) -> tuple[list[CallResult], int]:
        """Return the results of one request and the number of its retries."""
        # A server that never answers must not use up the deadline of every request.
        if self._num_failed >= 2 * self._concurrency and not self._has_answered:
            skipped = CallResult(None, "skipped", "not sent: earlier requests failed")
            return [skipped] * len(items), 0
        request = {
            "queries": [item.prompt + item.full_response for item in items],
            "prompts": [item.prompt for item in items],
            "responses": [item.response for item in items],
            "references": [item.answer for item in items],
            "extra": [dict(item.extra) for item in items],
        }
        try:
            answer, num_retried = post_json(self._server, request)
            results = self._read(answer, len(items))
            self._has_answered = True
            return results, num_retried
        except RemoteError as error:
            self._num_failed += 1
            return [CallResult(None, error.kind, str(error))] * len(items), 0

    def _read(self, answer: Any, count: int) -> list[CallResult]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != count:
            expected = f'{{"rewards": [{count} numbers]}}'
            raise self._server.error(f"expected {expected}, got {str(answer)[:200]}", "error")
        return [self._result(reward) for reward in rewards]

    def _result(self, reward: object) -> CallResult:
        text = self._server.without_secrets(str(reward)[:200])
        detail = f"{self._server.url}: the reward {text} is not a finite number"
        if not isinstance(reward, int | float) or isinstance(reward, bool):
            return CallResult(None, "error", detail)
        # The comparison also rejects NaN and integers that are too large for a float.
        if abs(reward) <= sys.float_info.max:
            return CallResult(float(reward))
        return CallResult(None, "error", detail)
