"""Curriculum: the prompts of a run, chosen by their measured success rates. N prompts, L levels.

The prompt of a position is chosen once, from the success rates of that time and from random numbers
that depend on `run.seed` and the position only. A choice is open until its group was measured.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrl import registry
from msrl.data.samplers.base import Floats, Pool, draw
from msrl.errors import MsrlError
from msrl.types import Prompt, ScoredGroup
from msrl.workflows.rl.setup import GenerationSetup
from msrl.workflows.scoring import make_judge


def open_curriculum(
    job: GenerationSetup, position: int, state: Mapping[str, Any]
) -> Curriculum | None:
    """Return the curriculum of a run that continues at a position; None if it has none."""
    return None if job.levels is None else Curriculum(job, position, state)


class Curriculum:
    """Prompts by their position in the run. Its state are success rates, draws and open choices."""

    def __init__(self, job: GenerationSetup, position: int, state: Mapping[str, Any]) -> None:
        """Start at a position, from the values of `state()` at that position or empty ones."""
        assert job.levels is not None
        self._prompts, self._levels = job.prompts, job.levels
        self._rows = np.array(job.prompts.rows, np.int64)
        self._section, self._seed = job.config.data.curriculum, job.config.run.seed
        self._batch = job.config.rollout.prompts_per_step
        self._judge = make_judge(job.config)
        values = state.get("curriculum", {})
        self._first = int(values.get("first", position))  # position of the first choice
        self._choices: list[int] = list(values.get("choices", ()))
        self._num_draws = np.zeros(len(self._rows), np.int64)
        self._success = self._levels.success.copy()
        if values:
            self._num_draws = _decode(values["num_draws"], np.dtype(np.int64))
            self._success = _decode(values["success"], np.dtype(np.float64))

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {
            "curriculum": {
                "first": self._first,
                "choices": self._choices,
                "num_draws": _encode(self._num_draws),
                "success": _encode(self._success),
            }
        }

    def after(self, position: int, count: int) -> list[Prompt]:
        """Return `count` prompts, starting at a position; choose those that are not chosen yet.

        The choices of a step differ from each other, and from open ones if there are others.
        """
        start = position - self._first
        assert start >= 0, "the groups of earlier positions were measured"
        while (missing := start + count - len(self._choices)) > 0:
            self._choose(min(missing, self._batch))
        choices = self._choices[start : start + count]
        return [self._prompts.dataset[int(self._rows[number])] for number in choices]

    def measure(self, groups: Sequence[ScoredGroup], first_open: int) -> dict[str, float]:
        """Update the success rates from the groups of a step, and return metrics.

        Args:
            groups: All groups of the step, in the order of prompts.
            first_open: First position whose group was not measured.

        Raises:
            MsrlError: Nothing has ever decided if a response is right.
        """
        self._choices = self._choices[first_open - self._first :]
        self._first = first_open
        verdicts = self._judge.verdicts(groups)
        numbers = np.searchsorted(self._rows, [group.rollout.prompt.index for group in groups])
        rates: dict[int, list[float]] = {}
        for number, verdict in zip(numbers.tolist(), verdicts, strict=True):
            if verdict is not None:
                level = int(self._levels.of_prompts[number])
                rates.setdefault(level, []).append(float(np.mean(verdict)))
        for level, values in rates.items():
            self._update(level, float(np.mean(values)))
        if not rates and np.isnan(self._success).all():
            raise MsrlError(
                f"data.curriculum.sampler={self._section.sampler}: no reward source and no "
                "environment decided if the responses of the step are right. Set eval.source to "
                "a reward source that scores every prompt."
            )
        return self._metrics(repeated=float((self._num_draws[numbers] > 1).mean()))

    def _update(self, level: int, rate: float) -> None:
        before, momentum = self._success[level], self._section.momentum
        is_first = np.isnan(before)
        self._success[level] = rate if is_first else momentum * before + (1 - momentum) * rate

    def _metrics(self, repeated: float) -> dict[str, float]:
        success = self._success[self._levels.of_prompts]
        is_measured = ~np.isnan(success)
        return {
            "curriculum/measured": float(is_measured.mean()),
            "curriculum/success": float(success[is_measured].mean()),
            "curriculum/first_pool": float(self._pools()[0].is_member.mean()),
            "curriculum/repeated": repeated,
        }

    def _pools(self) -> Sequence[Pool]:
        name, key = str(self._section.sampler), "data.curriculum.sampler"
        plugin = registry.load(registry.SAMPLERS, name, key=key)
        success: Floats = self._success[self._levels.of_prompts]
        return plugin.pools(success, **self._section.options)

    def _choose(self, count: int) -> None:
        is_open = np.zeros(len(self._rows), np.bool_)
        is_open[self._choices] = True
        seeds = np.random.SeedSequence(self._seed, spawn_key=(self._first + len(self._choices),))
        generator = np.random.Generator(np.random.Philox(seeds))
        drawn = draw(self._pools(), self._num_draws, is_open, count, generator)
        self._num_draws[drawn] += 1
        self._choices += drawn.tolist()


def _encode(array: NDArray[Any]) -> str:
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes())).decode()


def _decode(text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    little = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype.newbyteorder("<"))
    return little.astype(dtype)
