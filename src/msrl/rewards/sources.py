"""What a completion is scored by: the entries of `reward.sources`, what is wrong with them, and which rows they are for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Literal

from msrl import registry
from msrl.errors import ManyErrors, MsrlError
from msrl.rewards import functions
from msrl.rewards.worker import Function

VERIFIERS = "msrl.rewards.verifiers"
KINDS = ("verifier", "function")
TAG = "tag"
OnFailure = Literal["wrong", "undecided", "fail"]
Mistake = tuple[int | None, str, str]  # entry (None: all of them), field of it, what is wrong


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `reward.sources`: exactly one of `verifier` and `function` says what scores.

    `tags`: only rows whose column `tag` (`Prompt.extra`) is one of them; empty: all rows. `wrong`: the score of what could not be decided
    (unset: the verifier's own, 0.0 for a function). `on_failure`: what that means, see `score.py`.
    """

    verifier: str | None = None
    weight: float = 1.0
    timeout_s: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    function: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    wrong: float | None = None
    on_failure: OnFailure | None = None

    @classmethod
    def of(cls, section: object) -> Source:
        """The source that a section of the configuration describes."""
        return cls(**{f.name: getattr(section, f.name) for f in fields(cls) if hasattr(section, f.name)})

    @property
    def kind(self) -> str:
        return next((kind for kind in KINDS if getattr(self, kind) is not None), "")

    @property
    def label(self) -> str:
        """Its name in metrics and rollouts."""
        if self.name is not None:
            return self.name
        return functions.split(self.function)[1] if self.function is not None else str(getattr(self, self.kind, ""))

    @property
    def policy(self) -> OnFailure:
        return self.on_failure or "wrong"

    @property
    def wrong_score(self) -> float:
        """The score of a completion that the source could not decide on, where it counts as wrong."""
        if self.wrong is not None:
            return self.wrong
        return float(self.module.WRONG) if self.verifier is not None else 0.0

    @property
    def needs_answer(self) -> bool:
        return self.verifier is not None and bool(self.module.NEEDS_ANSWER)

    @property
    def module(self) -> ModuleType:
        """The verifier's. Raises MsrlError when there is none of this name."""
        assert self.verifier is not None
        return registry.load(VERIFIERS, self.verifier, key="verifier")

    def applies_to(self, extra: Mapping[str, str]) -> bool:
        return not self.tags or extra.get(TAG) in self.tags

    def worker_function(self, number: int) -> Function:
        """What the workers of the pool run for this source."""
        if self.verifier is not None:
            return Function(self.module.__name__, "score", dict(self.options), self.timeout_s)
        assert self.function is not None
        file, name = functions.split(self.function)
        return Function(f"msrl_function_{number}", name, dict(self.options), self.timeout_s, file)


def checked(sources: Sequence[Source]) -> tuple[Source, ...]:
    """The sources, if everything about them is in order. Raises ManyErrors with one line for each thing that is not."""
    lines = [_line(mistake, sources) for mistake in mistakes(sources)]
    if lines:
        raise ManyErrors(lines)
    return tuple(sources)


def _line(mistake: Mistake, sources: Sequence[Source]) -> str:
    number, key, message = mistake
    if number is None:
        return f"reward.sources: {message}"
    value = getattr(sources[number], key, None)
    return f"reward.sources[{number}].{key}{'' if value is None or value == {} else f'={value}'}: {message}"


def mistakes(sources: Sequence[Source]) -> Iterator[Mistake]:
    """All that is wrong with the sources and can be known before a process starts."""
    if not sources:
        yield None, "", "is missing; name at least one, as in reward: {sources: [{verifier: acc}]}"
    elif not any(source.weight for source in sources):
        yield None, "", "all weights are 0, so that every completion scores the same; set one"
    labels = [source.label for source in sources]
    for number, source in enumerate(sources):
        yield from ((number, key, message) for key, message in _mistakes_of(source))
        if source.label in labels[:number]:
            key = "name" if source.name is not None else source.kind
            yield number, key, "is named twice; add the two weights, or tell them apart by name"


def _mistakes_of(source: Source) -> Iterator[tuple[str, str]]:
    given = [kind for kind in KINDS if getattr(source, kind) is not None]
    if len(given) != 1:
        yield given[-1] if given else "verifier", f"exactly one of {', '.join(KINDS)} says what scores; there are {len(given)}"
        return
    if source.timeout_s <= 0:
        yield "timeout_s", f"the limit of {source.label} has to be positive"
    yield from _verifier_mistakes(source) if source.verifier is not None else _function_mistakes(source)


def _verifier_mistakes(source: Source) -> Iterator[tuple[str, str]]:
    try:
        module = source.module
    except MsrlError as error:
        yield "verifier", str(error).partition(": ")[2]
        return
    known = registry.options_of(module.score)
    unknown = [name for name in source.options if name not in known]
    yield from ((f"options.{name}", _no_option(name, known)) for name in unknown)
    wrong = registry.wrong_values(module.score, {n: v for n, v in source.options.items() if n not in unknown})
    yield from ((f"options.{name}", message) for name, message in wrong.items())
    if not unknown and not wrong and hasattr(module, "refusal") and (reason := module.refusal(**source.options)):
        yield "verifier", reason


def _no_option(name: str, known: Mapping[str, object]) -> str:
    return f"not an option here; {registry.nearest(name, known) if known else 'it takes none'}"


def _function_mistakes(source: Source) -> Iterator[tuple[str, str]]:
    assert source.function is not None
    message = functions.mistake(source.function, source.options)
    if message:
        yield "function", message
