"""Verdicts and reasons of verifiers for the samples of a run, from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from msrl.config.loader import load
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.rewards.sources import TAG, Source
from msrl.rewards.verdicts import Judge
from msrl.tracking.run import CONFIG
from msrl.types import Prompt
from msrl.workflows.rl.evaluation import judge
from msrl.workflows.view.samples import ViewSample

_MAX_CHARACTERS = 20_000  # of a response whose score is explained


class Verdicts:
    """Judge of the samples of a run. Without a readable configuration, it knows no verdict."""

    def __init__(self, config: Config | None) -> None:
        self._judge: Judge | None = None if config is None else judge(config)

    def verdict(self, sample: ViewSample) -> bool | None:
        """Return True for a right answer; None if no source decides."""
        if sample.verdict is not None or self._judge is None:
            return sample.verdict
        try:
            label = self._judge.source_for(_prompt(sample))
        except MsrlError:
            return None
        if label is None or label not in sample.scores:
            return None
        return sample.scores[label] >= self._judge.right_from

    def reasons(self, sample: ViewSample) -> Mapping[str, str]:
        """Return why each verifier gave its score, for those that explain it."""
        sources = self._judge.sources if self._judge is not None else ()
        scored = [source for source in sources if source.label in sample.scores]
        reasons = {source.label: _reason(source, sample) for source in scored}
        return {label: reason for label, reason in reasons.items() if reason}


def read_config(run_dir: Path) -> Config | None:
    """Return the configuration of a run; None if this version cannot read it."""
    try:
        return load([str(run_dir / CONFIG)]).config
    except (MsrlError, ManyErrors):
        return None


def _prompt(sample: ViewSample) -> Prompt:
    extra = {TAG: sample.tag} if sample.tag else {}
    return Prompt(sample.prompt_index, sample.token_ids[:0], sample.answer, extra)


def _reason(source: Source, sample: ViewSample) -> str:
    if source.verifier is None or len(sample.response) > _MAX_CHARACTERS:
        return ""
    explain = getattr(source.module, "explain", None)
    if explain is None:
        return ""
    names = inspect.signature(explain).parameters
    options = {name: value for name, value in source.options.items() if name in names}
    return explain(sample.response, sample.answer, **options)
