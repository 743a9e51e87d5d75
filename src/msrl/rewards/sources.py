"""Reward sources: the entries of `reward.sources`, their checks and the rows they apply to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from msrl import registry
from msrl.config.sections.reward import OnFailure, RewardSource
from msrl.errors import ManyErrors, MsrlError
from msrl.models.families import shape_from_config
from msrl.models.hf_config import ReadConfig, read_hf_config
from msrl.models.paths import config_dir, runs_on_ranks
from msrl.registry import own
from msrl.registry.declarations import declaration
from msrl.rewards import functions
from msrl.rewards.judge import Judge
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.models.server import RewardModel
from msrl.rewards.remote import Remote
from msrl.rewards.worker import Function

KINDS = ("verifier", "function", "url", "model", "judge")
TAG = "tag"
Client = Remote | Judge | RewardModel | RankModel
Mistake = tuple[int | None, str, str]  # entry (None: all entries), field, message


class Source(RewardSource):
    """Entry of `reward.sources`: its keys, and what they mean."""

    @classmethod
    def of(cls, section: RewardSource) -> Source:
        """Return the source that a section of the configuration describes."""
        return cls.model_construct(section.model_fields_set, **dict(section))

    @property
    def kind(self) -> str:
        return next((kind for kind in KINDS if getattr(self, kind) is not None), "")

    @property
    def own_function(self) -> str | None:
        """Function or verifier in a file of the user, as `path/file.py:NAME`, or None."""
        is_own_verifier = self.verifier is not None and own.is_own(self.verifier)
        return self.verifier if is_own_verifier else self.function

    @property
    def label(self) -> str:
        """Name of the source in metrics and rollouts."""
        if self.name is not None:
            return self.name
        if self.own_function is not None:
            return own.split(self.own_function)[1]
        labels = {"url": "remote", "model": "reward_model", "judge": "judge"}
        return labels.get(self.kind) or str(self.verifier)

    @property
    def policy(self) -> OnFailure:
        """Effect of a failed call.

        By default, failures of a server or model end the run: they are not the policy's fault, and
        a missing score carries no training signal. A judge may fail at a single response.
        """
        if self.on_failure is not None:
            return self.on_failure
        if self.kind == "judge":
            return "undecided"
        return "wrong" if self.in_pool else "fail"

    @property
    def wrong_score(self) -> float:
        """Score of a failed call that counts as wrong."""
        if self.wrong is not None:
            return self.wrong
        return float(self._constant("WRONG", 0.0))

    @property
    def needs_answer(self) -> bool:
        return bool(self._constant("NEEDS_ANSWER", False))

    def _constant(self, name: str, default: Any) -> Any:
        """Return a constant of the verifier's file, or the default."""
        if self.verifier is None:
            return default
        if self.own_function is None:
            return getattr(self.module, name)
        plugin = declaration(registry.VERIFIERS, self.verifier, key="verifier")
        return plugin.constant(name, default)

    def answer_refusal(self, answer: str) -> str | None:
        """Return the reason why the verifier cannot use this ground truth, or None."""
        if self.verifier is None or self.own_function is not None:
            return None
        refusal = getattr(self.module, "answer_refusal", None)
        return refusal(answer, **self.options) if refusal else None

    @property
    def module(self) -> ModuleType:
        """Module of the verifier. Raises MsrlError if no verifier has this name."""
        assert self.verifier is not None
        return _verifier(self.verifier)

    def applies_to(self, extra: Mapping[str, str]) -> bool:
        return not self.tags or extra.get(TAG) in self.tags

    @property
    def limit_s(self) -> float:
        """Seconds for one call of a verifier or function, or one batch of a server or model."""
        if self.timeout_s is not None:
            return self.timeout_s
        return 10.0 if self.in_pool else 120.0

    @property
    def in_pool(self) -> bool:
        """True if the workers of the pool run the source, False if it has a client."""
        return self.kind not in ("url", "model", "judge")

    @property
    def reads_images(self) -> bool:
        """True if the source is a function of the user that has a parameter for images."""
        function = self.own_function
        return function is not None and functions.reads_images(function, self.options)

    @property
    def on_ranks(self) -> bool:
        """True if the training ranks run the model of the source."""
        return runs_on_ranks(self.model, self.engine)

    @property
    def client_class(self) -> type[Client]:
        if self.kind == "model":
            return RankModel if self.on_ranks else RewardModel
        return Remote if self.kind == "url" else Judge

    def client(self, read_config: ReadConfig = read_hf_config) -> Client:
        """Return the client of a server or a model, without starting it."""
        if self.url is not None:
            return Remote(self.url, self.limit_s, **self.options)
        if self.judge is not None:
            return Judge(self.judge, self.limit_s, **self.options)
        assert self.model is not None
        if self.on_ranks:
            config = read_config(config_dir(self.model))
            limit = shape_from_config(config).max_position_embeddings
            return RankModel(self.model, limit, **self.options)
        return RewardModel(self.model, self.limit_s, **self.options)

    def worker_function(self, number: int) -> Function:
        """Return the function that the workers of the pool run for this source."""
        if self.own_function is None:
            return Function(self.module.__name__, "score", dict(self.options), self.limit_s)
        file, name = own.split(self.own_function)
        module, options = f"msrl_function_{number}", dict(self.options)
        return Function(module, name, options, self.limit_s, file, self.reads_images)


@cache
def _verifier(name: str) -> ModuleType:
    return registry.load(registry.VERIFIERS, name, key="verifier")


def check_sources(
    sources: Sequence[Source], read_config: ReadConfig = read_hf_config
) -> tuple[Source, ...]:
    """Return the sources. Raises ManyErrors with one line per mistake."""
    lines = [_mistake_line(mistake, sources) for mistake in mistakes(sources, read_config)]
    if lines:
        raise ManyErrors(lines)
    return tuple(sources)


def _mistake_line(mistake: Mistake, sources: Sequence[Source]) -> str:
    number, key, message = mistake
    if number is None:
        return f"reward.sources: {message}"
    value = getattr(sources[number], key, None)
    setting = f"reward.sources[{number}].{key}"
    if value is not None and value != {}:
        setting += f"={value}"
    return f"{setting}: {message}"


def mistakes(
    sources: Sequence[Source], read_config: ReadConfig = read_hf_config
) -> Iterator[Mistake]:
    """Yield the mistakes of the sources that are detectable before a process starts.

    `read_config` returns the config.json of a folder; a run passes the one in its plan, which has
    read each file once.
    """
    if not sources:
        yield None, "", "is missing; set at least one, as in reward: {sources: [{verifier: acc}]}"
    elif not any(source.weight for source in sources):
        yield None, "", "all weights are 0, so every completion scores the same; set one"
    labels = [source.label for source in sources]
    for number, source in enumerate(sources):
        for key, message in _source_mistakes(source, read_config):
            yield number, key, message
        if source.label in labels[:number]:
            key = "name" if source.name is not None else source.kind
            yield number, key, "is a duplicate; add up the weights, or set different names"


def _source_mistakes(source: Source, read_config: ReadConfig) -> Iterator[tuple[str, str]]:
    kinds = [kind for kind in KINDS if getattr(source, kind) is not None]
    if len(kinds) != 1:
        message = f"set exactly one of {', '.join(KINDS)}, not {len(kinds)}"
        yield kinds[-1] if kinds else "verifier", message
        return
    if source.engine is not None and source.model is None:
        yield "engine", "applies only to a model"
    if source.own_function is not None:
        message = functions.mistake(source.own_function, source.options)
        if message:
            yield source.kind, message
    elif source.verifier is not None:
        yield from _verifier_mistakes(source)
    else:
        yield from _client_mistakes(source, read_config)


def _client_mistakes(source: Source, read_config: ReadConfig) -> Iterator[tuple[str, str]]:
    client, address = source.client_class, getattr(source, source.kind)
    if source.on_ranks and source.timeout_s is not None:
        message = "does not apply to a model on the training ranks; set cluster.rpc_timeout_s"
        yield "timeout_s", message

    def refusal(**options: Any) -> str | None:
        if client is Remote or client is Judge:
            return client.refusal(address, **options)
        return client.refusal(address, read_config=read_config, **options)

    yield from _plugin_mistakes(source, client.__init__, refusal)


def _verifier_mistakes(source: Source) -> Iterator[tuple[str, str]]:
    try:
        module = source.module
    except MsrlError as error:
        yield "verifier", str(error).partition(": ")[2]
        return
    yield from _plugin_mistakes(source, module.score, getattr(module, "refusal", None))


def _plugin_mistakes(
    source: Source, main: Callable[..., Any], refusal: Callable[..., str | None] | None
) -> Iterator[tuple[str, str]]:
    """Yield unknown options of `main` and wrong values, or else the reason of `refusal`."""
    known = registry.plugin_options(main)
    unknown = [name for name in source.options if name not in known]
    yield from ((f"options.{name}", _unknown_option(name, known)) for name in unknown)
    valid_names = {name: value for name, value in source.options.items() if name in known}
    wrong = registry.wrong_values(main, valid_names)
    yield from ((f"options.{name}", message) for name, message in wrong.items())
    if not unknown and not wrong and refusal and (reason := refusal(**source.options)):
        yield source.kind, reason


def _unknown_option(name: str, known: Mapping[str, object]) -> str:
    hint = registry.nearest(name, known) if known else "it takes no options"
    return f"unknown option; {hint}"
