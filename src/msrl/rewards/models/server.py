"""Rewards of a model with a scalar head, in a process of its own that is killed when it does not answer in time, and started anew.

The model is a Hugging Face folder of a sequence classifier with one label; `model_worker.py` is the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msrl.errors import MsrlError, hub_hint
from msrl.rewards.models.worker import LENGTH, Settings
from msrl.rewards.pool import CallResult
from msrl.rewards.remote import Item
from msrl.rewards.worker import send

START_LIMIT_S = 900.0
MAX_FAILED_BATCHES = 4  # without one answer; then the remaining batches are skipped


class RewardModel:
    """A reward model. `timeout_s` is the limit of one batch.

    `template`: plain gives it the prompt as the policy saw it and the response behind it; chat gives the bare question, from the column
    `prompt_column` of the row, and the response to the chat template of its own tokenizer. `batch`: completions of one pass;
    `max_tokens`: no longer text is scored (0: what the model takes); `device` as torch names it.
    """

    def __init__(
        self, path: str, timeout_s: float, *, template: Literal["plain", "chat"] = "plain", prompt_column: str = "", batch: int = 8,
        max_tokens: int = 0, device: str = "cpu",
    ) -> None:  # fmt: skip
        self._settings = Settings(path, template, batch, max_tokens, device, tuple(sys.path))
        self._timeout_s, self._batch, self._prompt_column = timeout_s, batch, prompt_column
        self._process: _Process | None = None

    @staticmethod
    def refusal(
        path: str, *, template: str = "plain", prompt_column: str = "", batch: int = 8, max_tokens: int = 0, **_: Any
    ) -> str | None:
        """What is wrong with the model's folder or these options."""
        config = Path(path) / "config.json"
        if not config.is_file():
            wanted = "give the folder of a Hugging Face model or, with engine: megatron, an mcore checkpoint"
            return f"holds no config.json; {wanted}{hub_hint(path)}"
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or ["none"]
        if not any("SequenceClassification" in name for name in architectures):
            return f"is {architectures[0]}, no model with a scalar head (...ForSequenceClassification)"
        if template == "chat" and not prompt_column:
            return "options.template=chat needs options.prompt_column, the column with the bare question"
        return "options.batch has to be 1 or more, max_tokens 0 or more" if batch < 1 or max_tokens < 0 else None

    def outcomes(self, items: Sequence[Item]) -> list[CallResult]:
        """A score for every item, or why there is none. Raises MsrlError when the model cannot be loaded."""
        items = [item.with_prompt_of(self._prompt_column) for item in items]
        order = sorted(range(len(items)), key=lambda n: len(items[n].prompt) + len(items[n].response))  # less padding
        outcomes: dict[int, CallResult] = {}
        num_failed, has_answered = 0, False
        for start in range(0, len(order), self._batch):
            part = order[start : start + self._batch]
            if num_failed >= MAX_FAILED_BATCHES and not has_answered:
                outcomes.update(dict.fromkeys(part, CallResult(None, "skipped", "not scored: the batches before it failed")))
                continue
            scored = self._part([(items[n].prompt, items[n].response) for n in part])
            is_lost = all(outcome.failure in ("timeout", "crash") for outcome in scored)
            num_failed, has_answered = num_failed + is_lost, has_answered or not is_lost
            outcomes.update(zip(part, scored, strict=True))
        return [outcomes[n] for n in range(len(items))]

    def take_retried(self) -> int:
        """Nothing is tried again: what a model could not do once, it cannot."""
        return 0

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _part(self, texts: Sequence[tuple[str, str]]) -> list[CallResult]:
        if self._process is None:
            self._process = _Process(self._settings)
            started = self._process.receive(START_LIMIT_S)
            if started != "ready":
                self.close()
                raise MsrlError(f"reward.sources: model={self._settings.path}: cannot be loaded: {started or 'the process ended'}")
        self._process.send(texts)
        start = time.monotonic()
        answer = self._process.receive(self._timeout_s)
        if isinstance(answer, list):
            return [CallResult(score) if error is None else CallResult(None, "error", error) for score, error in answer]
        late = time.monotonic() - start >= self._timeout_s
        self.close()
        if late:
            return [CallResult(None, "timeout", f"no answer within {self._timeout_s:g} s")] * len(texts)
        return [CallResult(None, "crash", "the process of the reward model died")] * len(texts)


class _Process:
    """The process and its pipes; it ends with this object."""

    def __init__(self, settings: Settings) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in settings.path_of_modules if p)}
        command = [sys.executable, "-m", "msrl.rewards.models.worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )  # fmt: skip
        self.close = weakref.finalize(self, _end, self._process)
        self.send(settings)

    def send(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: its output ends too
            send(self._process.stdin, message)

    def receive(self, timeout_s: float) -> Any:
        """The next answer; None when there is none in time, or the process has ended."""
        deadline, data = time.monotonic() + timeout_s, bytearray()
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(number, selectors.EVENT_READ)
            while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(number, 1 << 16)
                if not chunk:
                    return None
                data += chunk
        return pickle.loads(bytes(data[LENGTH.size :]))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()
