"""A model as lm-evaluation-harness 0.4.13 calls it, on an engine of msrl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from msrl.rollout.vllm import VllmEngine
from msrl.thoughts import THOUGHT, split_thought
from msrl.types import Completion, Prompt, SamplingParams
from msrl.workflows.evaluate.harness.sampling import AnswerSampling, stops

TemplateLM: Any = import_module("lm_eval.api.model").TemplateLM
_BATCH = 512  # requests per call of the engine; between calls, progress is shown


@dataclass
class Counts:
    """Answers of a benchmark, and those that reached the limit of tokens."""

    answers: int = 0
    truncated: int = 0


class EngineModel(TemplateLM):
    """Model whose likelihoods and answers come from an engine."""

    def __init__(
        self,
        engine: VllmEngine,
        sampling: AnswerSampling,
        policy_version: int,
        on_finished: Callable[[int], object],
    ) -> None:
        super().__init__()
        self._engine, self._sampling, self._text = engine, sampling, sampling.text
        self._version, self._on_finished = policy_version, on_finished
        self.counts = Counts()

    @property
    def eot_token_id(self) -> int:
        return self._text.first_token

    @property
    def prefix_token_id(self) -> int:
        return self._text.first_token

    @property
    def tokenizer_name(self) -> str:
        return str(self._text.folder)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._text.template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._text.render(chat_history)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self._text.encode([string], with_special=add_special_tokens is not False)[0]

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for batch in _batches(requests):
            scored = self._engine.score_ranked(
                [np.array([*context, *rest], dtype=np.int64) for _, context, rest in batch],
                on_finished=self._on_finished,
            )
            for (_, _, rest), (logprobs, ranks) in zip(batch, scored, strict=True):
                count = len(rest)
                total = float(logprobs[len(logprobs) - count :].sum(dtype=np.float64))
                is_likeliest = bool((ranks[len(ranks) - count :] == 1).all())
                results.append((total, is_likeliest))
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no benchmark of msrl needs the likelihood of whole documents")

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts, all_options = zip(*(request.args for request in requests), strict=True)
        prompts = self._text.encode(texts)
        answers = [""] * len(requests)
        for params, until, numbers in self._groups(all_options):
            for batch in _batches(numbers):
                inputs = [
                    Prompt(number, np.array(prompts[number], dtype=np.int64)) for number in batch
                ]
                groups = self._engine.generate(
                    inputs, params, self._version, on_finished=self._on_finished
                )
                for number, group in zip(batch, groups, strict=True):
                    answers[number] = self._answer(group.completions[0], texts[number], until)
        return answers

    def _groups(
        self, all_options: Sequence[dict[str, Any]]
    ) -> Iterable[tuple[SamplingParams, tuple[str, ...], list[int]]]:
        """Yield the numbers of requests with equal parameters."""
        groups: dict[tuple[SamplingParams, tuple[str, ...]], list[int]] = {}
        for number, options in enumerate(all_options):
            key = self._sampling.of(options), stops(options)
            groups.setdefault(key, []).append(number)
        return ((params, until, numbers) for (params, until), numbers in groups.items())

    def _answer(self, completion: Completion, prompt: str, until: Sequence[str]) -> str:
        """Return an answer without its thought, up to the first text that ends it."""
        self.counts.answers += 1
        self.counts.truncated += completion.finish_reason == "length"
        answer = completion.text
        if self._sampling.has_thoughts:
            answer = split_thought(answer, is_open=prompt.rstrip().endswith(THOUGHT[0])).text
        for word in until:
            answer = answer.partition(word)[0]
        return answer


def _batches(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[first : first + _BATCH] for first in range(0, len(items), _BATCH))
