"""What a completion is scored by: the entries of `reward.sources`, what is wrong with them, and which rows they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import ModuleType
from typing import Any, Literal

from msrl import registry
from msrl.errors import ManyErrors, MsrlError
from msrl.models.paths import runs_on_ranks
from msrl.rewards import functions
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.models.server import RewardModel
from msrl.rewards.remote import Remote
from msrl.rewards.worker import Function

VERIFIERS = "msrl.rewards.verifiers"
KINDS = ("verifier", "function", "url", "model")
TAG = "tag"
OnFailure = Literal["wrong", "undecided", "fail"]
Client = Remote | RewardModel | RankModel
Mistake = tuple[int | None, str, str]  # entry (None: all of them), field of it, what is wrong


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `reward.sources`: exactly one of `verifier`, `function`, `url` (a server) and `model` (a folder) says what scores.

    `engine`: what runs a model, transformers (`hf`) or the training ranks (`megatron`); unset, by the folder's format. `tags`: only rows
    whose column `tag` (`Prompt.extra`) is one of them; empty: all rows. `wrong`: the score of what could not be decided (unset: the
    verifier's own, 0.0 for anything else). `on_failure`: what that means, see `score.py`.
    """

    verifier: str | None = None
    weight: float = 1.0
    timeout_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    function: str | None = None
    url: str | None = None
    model: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    wrong: float | None = None
    on_failure: OnFailure | None = None
    engine: Literal["hf", "megatron"] | None = None

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
        if self.function is not None:
            return functions.split(self.function)[1]
        return {"url": "remote", "model": "reward_model"}.get(self.kind) or str(self.verifier)

    @property
    def policy(self) -> OnFailure:
        """What a failure means; unset, a server or a model that fails ends the run: nothing would be learnt from what it did not say."""
        return self.on_failure or ("wrong" if self.in_pool else "fail")

    @property
    def wrong_score(self) -> float:
        """The score of a completion that the source could not decide on, where it counts as wrong."""
        if self.wrong is not None:
            return self.wrong
        return float(self.module.WRONG) if self.verifier is not None else 0.0

    @property
    def needs_answer(self) -> bool:
        return self.verifier is not None and bool(self.module.NEEDS_ANSWER)

    def answer_refusal(self, answer: str) -> str | None:
        """Return why the verifier can score no response by this ground truth, None where it can."""
        refusal = getattr(self.module, "answer_refusal", None) if self.verifier is not None else None
        return refusal(answer, **self.options) if refusal else None

    @property
    def module(self) -> ModuleType:
        """The verifier's. Raises MsrlError when there is none of this name."""
        assert self.verifier is not None
        return _verifier(self.verifier)

    def applies_to(self, extra: Mapping[str, str]) -> bool:
        return not self.tags or extra.get(TAG) in self.tags

    @property
    def limit_s(self) -> float:
        """Seconds for one call of a verifier or function, one batch of a server or model."""
        return self.timeout_s if self.timeout_s is not None else 10.0 if self.in_pool else 120.0

    @property
    def in_pool(self) -> bool:
        """Whether the workers of the pool run it; else it has a client of its own."""
        return self.kind not in ("url", "model")

    @property
    def on_ranks(self) -> bool:
        """Whether the training ranks hold and run its model."""
        return runs_on_ranks(self.model, self.engine)

    @property
    def client_class(self) -> type[Client]:
        return Remote if self.kind == "url" else RankModel if self.on_ranks else RewardModel

    def client(self) -> Client:
        """The client of a server or a model; nothing is started by that."""
        if self.model is not None and self.on_ranks:
            return RankModel(self.model, **self.options)
        return (Remote if self.kind == "url" else RewardModel)(getattr(self, self.kind), self.limit_s, **self.options)

    def worker_function(self, number: int) -> Function:
        """What the workers of the pool run for this source."""
        if self.verifier is not None:
            return Function(self.module.__name__, "score", dict(self.options), self.limit_s)
        assert self.function is not None
        file, name = functions.split(self.function)
        return Function(f"msrl_function_{number}", name, dict(self.options), self.limit_s, file)


@cache
def _verifier(name: str) -> ModuleType:
    return registry.load(VERIFIERS, name, key="verifier")


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
    if source.engine is not None and source.model is None:
        yield "engine", "is for a model"
    if source.limit_s <= 0:
        yield "timeout_s", f"the limit of {source.label} has to be positive"
    if source.function is not None:
        message = functions.mistake(source.function, source.options)
        yield from [("function", message)] if message else []
    elif source.verifier is not None:
        yield from _verifier_mistakes(source)
    else:
        client, place = source.client_class, getattr(source, source.kind)
        if source.on_ranks and source.timeout_s is not None:
            yield "timeout_s", "is not for a model on the training ranks; cluster.rpc_timeout_s is their limit"
        yield from _plugin_mistakes(source, client.__init__, lambda **options: client.refusal(place, **options))


def _verifier_mistakes(source: Source) -> Iterator[tuple[str, str]]:
    try:
        module = source.module
    except MsrlError as error:
        yield "verifier", str(error).partition(": ")[2]
        return
    yield from _plugin_mistakes(source, module.score, getattr(module, "refusal", None))


def _plugin_mistakes(source: Source, main: Callable[..., Any], refusal: Callable[..., str | None] | None) -> Iterator[tuple[str, str]]:
    """Options that `main` does not take, or not with such a value; else what the source's own `refusal` says of them."""
    known = registry.plugin_options(main)
    unknown = [name for name in source.options if name not in known]
    yield from ((f"options.{name}", _no_option(name, known)) for name in unknown)
    wrong = registry.wrong_values(main, {n: v for n, v in source.options.items() if n not in unknown})
    yield from ((f"options.{name}", message) for name, message in wrong.items())
    if not unknown and not wrong and refusal and (reason := refusal(**source.options)):
        yield source.kind, reason


def _no_option(name: str, known: Mapping[str, object]) -> str:
    return f"not an option here; {registry.nearest(name, known) if known else 'it takes none'}"
