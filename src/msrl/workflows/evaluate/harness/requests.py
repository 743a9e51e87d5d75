"""Questions of a benchmark for a model: their requests, their sizes and their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msrl.workflows.evaluate.harness.sampling import AnswerSampling
from msrl.workflows.evaluate.harness.tasks import ROW_ERRORS, LoadedBenchmark, unreadable
from msrl.workflows.evaluate.harness.text import ModelText

if TYPE_CHECKING:
    from msrl.rollout.vllm import VllmEngine


@dataclass(frozen=True, slots=True)
class Size:
    """Number of requests, and the largest number of tokens of one with its answer."""

    count: int
    longest: int


@dataclass(frozen=True, slots=True)
class BenchmarkAnswers:
    """Results of the harness.

    Attributes:
        results: Metrics by task and group.
        samples: Questions with responses and metrics, by task.
        num_answers: Number of generated answers.
        num_truncated: Number of answers that reached the limit of tokens.
    """

    results: Mapping[str, Any]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    num_answers: int
    num_truncated: int

    @property
    def num_questions(self) -> int:
        """Number of questions of all tasks."""
        ids = {(task, row["doc_id"]) for task, rows in self.samples.items() for row in rows}
        return len(ids)


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions of a benchmark for the tokenizer and chat template of a model.

    `limit` is the number of questions of each task; None for all.
    """

    loaded: LoadedBenchmark
    sampling: AnswerSampling
    limit: int | None

    def measure(self) -> Size:
        """Return the number of requests and the length of the longest one."""
        instances = self._build()
        texts = list(dict.fromkeys(instance.args[0] for instance in instances))
        lengths = dict(zip(texts, map(len, self.sampling.text.encode(texts)), strict=True))
        longest = max(lengths[each.args[0]] + self._num_tokens(each.args[1]) for each in instances)
        return Size(len(instances), longest)

    def _num_tokens(self, rest: str | Mapping[str, Any]) -> int:
        """Return the number of tokens after a question, at most.

        A choice has one more if the tokenizer splits it from the question in another place, and
        the engine samples a token after it.
        """
        if not isinstance(rest, str):
            return self.sampling.max_tokens(rest)
        return len(self.sampling.text.encode([rest], with_special=False)[0]) + 2

    def _build(self) -> list[Any]:
        """Return the requests of all tasks."""
        text, is_chat = self.sampling.text, self.sampling.is_chat
        self.loaded.begin()
        with _without_bars():
            for name, task in self.loaded.tasks.items():
                try:
                    task.build_all_requests(
                        limit=self.limit,
                        apply_chat_template=is_chat,
                        fewshot_as_multiturn=is_chat,
                        chat_template=_renderer(text) if is_chat else None,
                    )
                    _check_targets(name, task)
                except ROW_ERRORS as error:
                    raise unreadable(name, error, _bad_row(task)) from error
        return [each for task in self.loaded.tasks.values() for each in task.instances]

    def ask(
        self,
        engine: VllmEngine,
        policy_version: int,
        on_finished: Callable[[int], object],
    ) -> BenchmarkAnswers:
        """Return the results of the harness with the answers of an engine."""
        from msrl.workflows.evaluate.harness.model import EngineModel

        model = EngineModel(engine, self.sampling, policy_version, on_finished)
        self.loaded.begin()
        with _without_bars():
            results = import_module("lm_eval.evaluator").evaluate(
                model,
                self.loaded.loaded,
                limit=self.limit,
                bootstrap_iters=0,
                apply_chat_template=self.sampling.is_chat,
                fewshot_as_multiturn=self.sampling.is_chat,
                confirm_run_unsafe_code=self.loaded.benchmark.runs_code,  # in the sandbox
            )
        counts = model.counts
        return BenchmarkAnswers(
            results["results"], results["samples"], counts.answers, counts.truncated
        )


def _check_targets(name: str, task: Any) -> None:
    """Raise MsrlError if the correct choice of a row is none of its choices."""
    if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
        return
    counts = Counter(instance.doc_id for instance in task.instances)
    for instance in task.instances:
        target = task.doc_to_target(instance.doc) if instance.idx == 0 else []
        numbers = target if isinstance(target, list) else [target]
        count = counts[instance.doc_id]
        if any(isinstance(number, int) and not 0 <= number < count for number in numbers):
            error = ValueError(f"the correct choice is {target} of {count} choices")
            raise unreadable(name, error, instance.doc_id)


def _bad_row(task: Any) -> int | None:
    """Return the first row whose texts cannot be made; None if another step fails."""
    for number, doc in enumerate(task.eval_docs):
        try:
            task.doc_to_text(doc)
            task.doc_to_target(doc)
            if task.config.doc_to_choice is not None:
                task.doc_to_choice(doc)
        except ROW_ERRORS:
            return number
    return None


def _renderer(text: ModelText) -> Callable[..., str]:
    """Return the chat template as the harness calls it."""

    def render(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        del add_generation_prompt  # it is False if an answer has begun
        return text.render(messages)

    return render


@contextmanager
def _without_bars() -> Generator[None, None, None]:
    """Let the harness show no progress bars of its own beside that of msrl."""
    module: Any = import_module("lm_eval.api.task")
    original = module.tqdm
    module.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        module.tqdm = original
