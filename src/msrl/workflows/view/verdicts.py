"""Verdicts of samples: recorded ones, else computed from recorded scores and the configuration."""

from __future__ import annotations

import os
from collections import UserDict
from pathlib import Path
from typing import Any

from msrl.config.loader import load
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.rewards.sources import TAG
from msrl.rewards.verdicts import Judge
from msrl.tracking.run import CONFIG
from msrl.types import Prompt
from msrl.workflows.scoring import make_judge
from msrl.workflows.view.samples import ViewSample


class Verdicts:
    """Judge of the samples of a run. Without a readable configuration, it knows no verdict."""

    def __init__(self, config: Config | None) -> None:
        self._judge: Judge | None = None if config is None else make_judge(config)
        self._labels: dict[str, str | None] = {}

    def verdict(self, sample: ViewSample, *, is_reported: bool = False) -> bool | None:
        """Return True for a right answer; None if neither a source nor an environment decides.

        With `is_reported`, the environment reports success, so an episode without a report, which
        a limit or fault ended, is not successful.
        """
        if sample.is_right is not None:
            return sample.is_right
        label = self._label(sample)
        if self._judge is None or label is None or label not in sample.scores:
            return False if sample.success is None and is_reported else sample.success
        return sample.scores[label] >= self._judge.right_from

    def _label(self, sample: ViewSample) -> str | None:
        """Return the source that decides about a sample, which its tag selects."""
        if self._judge is None:
            return None
        if sample.tag not in self._labels:
            try:
                self._labels[sample.tag] = self._judge.source_for(_prompt(sample))
            except MsrlError:
                self._labels[sample.tag] = None
        return self._labels[sample.tag]


class _Environment(UserDict[str, str]):
    """Environment of this process, in which every other variable has a placeholder as its value.

    Verdicts need no secrets, such as the key of a reward server.
    """

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a variable."""
        return super().get(key, "unset")


def read_config(run_dir: Path) -> Config | str:
    """Return the configuration of a run, or the reason why this version cannot read it."""
    try:
        return load([str(run_dir / CONFIG)], environment=_Environment(os.environ)).config
    except (MsrlError, ManyErrors) as error:
        return str(error)


def _prompt(sample: ViewSample) -> Prompt:
    extra = {TAG: sample.tag} if sample.tag else {}
    return Prompt(sample.prompt_index, sample.token_ids[:0], sample.answer, extra)
