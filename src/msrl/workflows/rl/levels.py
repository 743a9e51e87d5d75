"""Levels of a curriculum: prompts that share a success rate, and its initial value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from msrl.config.sections.general import CurriculumConfig
from msrl.data.samplers.base import Floats
from msrl.errors import MsrlError
from msrl.types import Ints, Prompt


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of N prompts. L levels.

    Attributes:
        of_prompts: [N] level of each prompt.
        success: [L] initial success rates, NaN if there are none.
    """

    of_prompts: Ints
    success: Floats


def prompt_levels(section: CurriculumConfig, prompts: Iterable[Prompt], count: int) -> Levels:
    """Return the levels of `count` prompts, which are read only if the section names a column.

    Raises:
        MsrlError: The data lacks a column that the section names.
    """
    if section.level_column is None and not section.initial_difficulty:
        return Levels(np.arange(count), np.full(count, np.nan))
    names, rates = list[str | int](), list[float]()
    for number, prompt in enumerate(prompts):
        names.append(number if section.level_column is None else _level(section, prompt))
        rates.append(_initial_success(prompt) if section.initial_difficulty else math.nan)
    of_prompts = np.unique(names, return_inverse=True)[1].astype(np.int64)
    return Levels(of_prompts, np.bincount(of_prompts, weights=rates) / np.bincount(of_prompts))


def _level(section: CurriculumConfig, prompt: Prompt) -> str:
    column = section.level_column
    value = prompt.extra.get(str(column))
    if value is None:
        raise MsrlError(
            f"data.curriculum.level_column={column}: prompt {prompt.index} has no column "
            f"extra.{column}. Map it with preprocess.map_keys: {{extra.{column}: COLUMN}}."
        )
    return value


def _initial_success(prompt: Prompt) -> float:
    key = "data.curriculum.initial_difficulty"
    value = difficulty(prompt, key)
    if not 0 <= value <= 1:
        raise MsrlError(
            f"{key}: the column extra.difficulty of prompt {prompt.index} is {value:g}, not from 0 "
            f"(easy) to 1 (hard). Change the data, or set {key} to false."
        )
    return 1.0 - value


def difficulty(prompt: Prompt, key: str) -> float:
    """Return the difficulty of a prompt in the data, from 0 (easy) to 1 (hard).

    Raises:
        MsrlError: The data has no number for it. The message names the configuration `key`.
    """
    text = prompt.extra.get("difficulty")
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return value
    problem = "is missing" if text is None else f"is {text!r}, not a number"
    raise MsrlError(
        f"{key}: the column extra.difficulty of prompt {prompt.index} {problem}. Map it with "
        f"preprocess.map_keys: {{extra.difficulty: COLUMN}}, or set {key} to false."
    )
