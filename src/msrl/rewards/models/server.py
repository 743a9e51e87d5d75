"""Reward model with a scalar head in a separate process.

The process is killed and restarted if it does not answer in time; `worker.py` is its program. The
model is a Hugging Face folder of a sequence classifier with one label.
"""

from __future__ import annotations

import contextlib
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
from msrl.models.hf_config import ReadConfig, read_hf_config
from msrl.rewards.models.worker import Settings
from msrl.rewards.pool import CallResult
from msrl.rewards.remote import Item
from msrl.rewards.worker import LENGTH, send
from msrl.rewards.worker_process import KILLED, MAX_REPEATS
from msrl.user_files import python_command

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

    def take_retried(self) -> int:
        """Return 0: only batches of a process that was killed are repeated."""
        return 0

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
        answer = process.receive(self._timeout_s)
        if isinstance(answer, list):
            return [_call_result(score, error) for score, error in answer]
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
            status = self._process.receive(START_LIMIT_S)
            if status != "ready":
                self.close()
                reason = status or "the process ended"
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


class _ModelProcess:
    """Process of a reward model and its pipes; it is killed when this object is collected."""

    def __init__(self, settings: Settings) -> None:
        module_path = os.pathsep.join(folder for folder in settings.path_of_modules if folder)
        self._process = subprocess.Popen(
            python_command("-m", "msrl.rewards.models.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": module_path},
            start_new_session=True,
        )
        self.close = weakref.finalize(self, _kill, self._process)
        self.send(settings)

    def send(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the process died, its output ends too
            send(self._process.stdin, message)

    def was_killed(self) -> bool:
        """Return True if others ended the process, whose output has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=5.0) in KILLED
        return False

    def receive(self, timeout_s: float) -> Any:
        """Return the next answer, or None if none arrives in time or the process ended."""
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


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()
