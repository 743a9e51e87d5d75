"""Reward model with a scalar head in a separate process.

The process is killed and restarted if it does not answer in time; `worker.py` is its program. The
model is a Hugging Face folder of a sequence classifier with one label.
"""

from __future__ import annotations

import json
import selectors
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msrl.errors import MsrlError, hub_hint
from msrl.models.hf_config import ReadConfig, read_hf_config
from msrl.processes.child import MAX_REPEATS, WorkerProcess, kill
from msrl.processes.messages import READY, Frame
from msrl.rewards.models.worker import Settings
from msrl.rewards.pool import CallResult
from msrl.rewards.remote import Item

START_LIMIT_S = 900.0
MAX_FAILED_BATCHES = 4  # failed batches without an answer before the remaining ones are skipped


class RewardModel:
    """Reward model in a separate process.

    Args:
        path: Hugging Face folder.
        timeout_s: Limit of one batch.
        template: `plain` scores the prompt of the policy followed by the response and the token
            that ended it. `chat` formats the bare question and the response with the chat template
            of the model's tokenizer.
        prompt_column: Extra column with the bare question.
        batch: Completions per forward pass.
        max_tokens: Longer texts are not scored; 0 uses the limit of the model.
        device: Device name of torch.
    """

    def __init__(
        self,
        path: str,
        timeout_s: float,
        *,
        template: Literal["plain", "chat"] = "plain",
        prompt_column: str = "",
        batch: int = 8,
        max_tokens: int = 0,
        device: str = "cpu",
    ) -> None:
        self._settings = Settings(path, template, batch, max_tokens, device, tuple(sys.path))
        self._timeout_s, self._batch, self._prompt_column = timeout_s, batch, prompt_column
        self._process: _ModelProcess | None = None

    @staticmethod
    def refusal(
        path: str,
        *,
        template: str = "plain",
        prompt_column: str = "",
        batch: int = 8,
        max_tokens: int = 0,
        read_config: ReadConfig = read_hf_config,
        **_: Any,
    ) -> str | None:
        """Return the reason why the folder or these options cannot be used, or None."""
        file = Path(path) / "config.json"
        if not file.is_file():
            remedy = "use a Hugging Face folder or, with engine: megatron, an mcore checkpoint"
            return f"has no config.json; {remedy}{hub_hint(path)}"
        try:
            config = read_config(Path(path))
        except MsrlError as error:
            return str(error)
        architectures = config.values.get("architectures") or ["none"]
        if not any("SequenceClassification" in name for name in architectures):
            remedy = "use a ...ForSequenceClassification model"
            return f"is {architectures[0]}, which has no scalar head; {remedy}"
        return option_refusal(template, prompt_column, batch, max_tokens)

    def score(self, items: Sequence[Item]) -> list[CallResult]:
        """Return the score of every item, or the reason why it has none.

        Raises:
            MsrlError: The model cannot be loaded.
        """
        texts = [item.use_prompt_column(self._prompt_column) for item in items]
        parts = [(item.prompt, item.response, item.full_response) for item in texts]
        # Batches of similar lengths need less padding.
        order = sorted(range(len(parts)), key=lambda n: sum(map(len, parts[n])))
        results: dict[int, CallResult] = {}
        num_failed, has_answered = 0, False
        for start in range(0, len(order), self._batch):
            numbers = order[start : start + self._batch]
            if num_failed >= MAX_FAILED_BATCHES and not has_answered:
                skipped = CallResult(None, "skipped", "not scored: earlier batches failed")
                results.update(dict.fromkeys(numbers, skipped))
                continue
            batch = self._score_batch([parts[n] for n in numbers])
            if all(result.failure in ("timeout", "crash") for result in batch):
                num_failed += 1
            else:
                has_answered = True
            results.update(zip(numbers, batch, strict=True))
        return [results[n] for n in range(len(items))]

    def take_counts(self) -> dict[str, float]:
        """Return no counts: only batches of a process that was killed are repeated."""
        return {}

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _score_batch(
        self, texts: Sequence[tuple[str, str, str]], num_repeats: int = 0
    ) -> list[CallResult]:
        """Return the scores of a batch. It is repeated if others have killed the process."""
        process = self._started_process()
        process.send(texts)
        start = time.monotonic()
        answer = process.answer(self._timeout_s)
        if answer is not None:
            return [_call_result(score, error) for score, error in json.loads(answer[2])]
        is_late = time.monotonic() - start >= self._timeout_s
        was_killed = not is_late and process.was_killed()
        self.close()
        if was_killed and num_repeats < MAX_REPEATS:
            return self._score_batch(texts, num_repeats + 1)
        result = CallResult(None, "crash", "the process of the reward model died")
        if is_late:
            result = CallResult(None, "timeout", f"no answer within {self._timeout_s:g} s")
        return [result] * len(texts)

    def _started_process(self) -> _ModelProcess:
        """Return the process, and start it first if necessary."""
        if self._process is None:
            self._process = _ModelProcess(self._settings)
            status = self._process.answer(START_LIMIT_S)
            if status is None or status[0] != READY:
                self.close()
                reason = "the process ended" if status is None else status[2]
                setting = f"reward.sources: model={self._settings.path}"
                raise MsrlError(f"{setting}: cannot be loaded: {reason}")
        return self._process


def option_refusal(template: str, prompt_column: str, batch: int, max_tokens: int) -> str | None:
    """Return the reason why options of a reward model cannot be used, or None."""
    if template == "chat" and not prompt_column:
        return "options.template=chat needs options.prompt_column, the column of the bare question"
    if batch < 1 or max_tokens < 0:
        return "options.batch must be at least 1 and max_tokens at least 0"
    return None


def _call_result(score: float | None, error: str | None) -> CallResult:
    return CallResult(score) if error is None else CallResult(None, "error", error)


class _ModelProcess(WorkerProcess):
    """Process of a reward model; it is killed when this object is collected."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            "msrl.rewards.models.worker", settings, settings.path_of_modules, environment={}
        )
        self.close = weakref.finalize(self, kill, self.process)

    def answer(self, timeout_s: float) -> Frame | None:
        """Return the next frame, or None if none arrives in time or the process ended."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                frames = self.receive()
                if frames is None:
                    return None
                if frames:
                    return frames[0]
        return None
