"""Client of a teacher on an OpenAI-compatible server: log-probabilities of given tokens.

A request is `POST url/completions` with token ids as the prompt and `prompt_logprobs` 0, a
parameter of vLLM. The answer has one object per token, which maps its id to its log-probability at
temperature 1 and to its text. The value of the first token is null. T tokens of a sequence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from msrl.config.sections.algo import TeacherConfig
from msrl.config.variables import with_environment
from msrl.errors import MsrlError
from msrl.http_requests import RemoteError, Server, get_json, post_json
from msrl.rewards.remote import HEADER_TEXT, address_refusal
from msrl.types import Floats, Ints

_REFERENCE = re.compile(r"\$\{env:[^{}]+\}")
_SHOWN = 200  # characters of an unexpected answer in a message


def url_refusal(url: str) -> str | None:
    """Return the reason why the address of a server cannot be used, or None."""
    if "?" in url:
        return "must be a base URL without a query, as in http://host:8000/v1"
    return address_refusal(url)


def key_refusal(api_key: str) -> str | None:
    """Return the reason why an API key cannot be used, or None. It does not contain the key."""
    if not _REFERENCE.fullmatch(api_key):
        return "must be the name of an environment variable as ${env:NAME}, never the key"
    try:
        value = with_environment(api_key)
    except KeyError as error:
        return f"environment variable {error.args[0]} is not set"
    if value and HEADER_TEXT.fullmatch(value):
        return None
    return "must be a single line of Latin-1 characters; check for a line feed at its end"


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """A teacher on a server, whose model has a name.

    Attributes:
        section: Section of the configuration.
        key: Key of the address, for messages.
        name: Name of the model on the server.
    """

    section: TeacherConfig
    key: str
    name: str = ""

    @property
    def setting(self) -> str:
        """Key and address, without secrets."""
        return f"{self.key}={self.section.url}"

    def logprobs(self, token_ids: Ints) -> Floats:  # [T] -> [T]
        """Return the log-probability of every token after those before it; 0 for the first.

        Raises:
            MsrlError: The server returned no usable answer in time.
        """
        ids = token_ids.tolist()
        values = [
            self._value(position, token_id, entry)
            for position, (token_id, entry) in enumerate(zip(ids, self._entries(ids), strict=True))
        ]
        return np.array(values, np.float32)

    def connect(self, num_tokens: int) -> TeacherServer:
        """Return the teacher with the name of its model, and check that the server has it.

        `num_tokens` is the maximum length of a sequence.

        Raises:
            MsrlError: The server does not answer, or its model does not fit.
        """
        models = self._models()
        name = self.section.served_name
        if name is None and len(models) == 1:
            name = next(iter(models))
        if name not in models:
            problem = "serves several models" if name is None else f"does not serve {name}"
            raise MsrlError(
                f"{self.setting}: {problem}. Set served_name to one of {', '.join(models)}."
            )
        limit = models[name].get("max_model_len")
        if isinstance(limit, int) and limit <= num_tokens:
            raise MsrlError(
                f"{self.setting}: {name} reads at most {limit} tokens, but prompt plus response "
                f"have up to {num_tokens}, and the server samples one more. Raise its "
                "max_model_len, or lower rollout.max_response_tokens."
            )
        return TeacherServer(self.section, self.key, name)

    def compare_tokens(self, texts: Mapping[int, str]) -> bool:
        """Compare the texts of tokens by id with the server's texts.

        Returns:
            False if the server does not return texts.

        Raises:
            MsrlError: The server has another token for an id.
        """
        ids = list(texts)
        num_compared = 0
        for token_id, entry in zip(ids, self._entries(ids), strict=True):
            text = None if entry is None else _token(entry, token_id).get("decoded_token")
            if not isinstance(text, str):
                continue
            num_compared += 1
            if not _is_same(text, texts[token_id]):
                raise MsrlError(
                    f"{self.setting}: has another tokenizer than the policy: token {token_id} is "
                    f"{text!r} there and {texts[token_id]!r} here. Use a teacher with the same "
                    "tokenizer."
                )
        return num_compared > 0

    def _models(self) -> dict[str, Mapping[str, Any]]:
        """Return the models of the server by name."""
        try:
            answer = get_json(self._server("models"))
        except RemoteError as error:
            raise self._error(error) from error
        data = cast("dict[str, Any]", answer).get("data") if isinstance(answer, dict) else None
        models = cast("list[Any]", data) if isinstance(data, list) else []
        entries = [cast("dict[str, Any]", m) for m in models if isinstance(m, dict)]
        named: dict[str, Mapping[str, Any]] = {str(m["id"]): m for m in entries if "id" in m}
        if not named:
            raise self._answer_error("a list of models", answer)
        return named

    def _entries(self, token_ids: Sequence[int]) -> list[Any]:  # T of {id: {...}} or None
        """Return the entry of the server for every token."""
        request = {
            "model": self.name,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        try:
            answer, _ = post_json(self._server("completions"), request)
        except RemoteError as error:
            raise self._error(error) from error
        entries = _prompt_logprobs(answer)
        if entries is None or len(entries) != len(token_ids):
            raise self._answer_error(f"prompt_logprobs of {len(token_ids)} tokens", answer)
        return entries

    def _value(self, position: int, token_id: int, entry: Any) -> float:
        if position == 0:
            return 0.0
        value = _token(entry, token_id).get("logprob")
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        expected = f"a log-probability of token {token_id} at position {position}"
        raise self._answer_error(expected, entry)

    def _server(self, path: str) -> Server:
        section = self.section
        assert section.url is not None
        headers: dict[str, str] = {}
        if section.api_key is not None:
            headers["Authorization"] = f"Bearer {with_environment(section.api_key)}"
        url = f"{section.url.rstrip('/')}/{path}"
        return Server(url, section.timeout_s, section.retries, headers=headers)

    def _error(self, error: RemoteError) -> MsrlError:
        return MsrlError(
            f"{self.setting}: the teacher returned no log-probabilities: {error}. Check the server "
            "and its address."
        )

    def _answer_error(self, expected: str, answer: object) -> MsrlError:
        text = self._server("").without_secrets(str(answer)[:_SHOWN])
        return MsrlError(
            f"{self.setting}: expected {expected}, got {text}. Use a server that returns "
            "prompt_logprobs, such as vLLM or msrl serve."
        )


def _prompt_logprobs(answer: Any) -> list[Any] | None:
    """Return the list of an answer, or None if it has none."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError):
        return None
    return cast("list[Any]", entries) if isinstance(entries, list) else None


def _token(entry: Any, token_id: int) -> Mapping[str, Any]:
    """Return the entry of a token; nothing if there are entries of other tokens only."""
    values = entry.get(str(token_id)) if isinstance(entry, dict) else None
    return cast("dict[str, Any]", values) if isinstance(values, dict) else {}


def _is_same(text: str, other: str) -> bool:
    """Return True if two texts of a token agree, as far as they can be compared.

    A part of a character has no text, and servers differ in the spaces around a token.
    """
    text, other = text.strip(), other.strip()
    return text == other or not text or not other or "\ufffd" in text + other
