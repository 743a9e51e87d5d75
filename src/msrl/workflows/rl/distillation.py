"""Teachers of a step: the term of the loss, and the rows that each teacher teaches.

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from msrl.algorithms.rollout_arrays import RolloutArrays
from msrl.algorithms.selection import Flags
from msrl.config.sections.algo import DistillConfig, TeacherConfig
from msrl.errors import MsrlError
from msrl.registry import own
from msrl.rewards.sources import TAG
from msrl.trainer.objective.losses import Distillation, teacher_weight
from msrl.types import Floats, Prompt


def distillation(section: DistillConfig) -> Distillation | None:
    """Return the term of the loss; None without teachers on the ranks."""
    if not section.on_ranks:
        return None
    weights = {teacher.name: teacher.weight for teacher in section.on_ranks}
    divergence = own.located(section.divergence)
    return Distillation(section.coef, weights, divergence, section.options)


def teaches(teacher: TeacherConfig, prompt: Prompt) -> bool:
    """Return True if a teacher teaches a row of the data."""
    return not teacher.tags or prompt.extra.get(TAG) in teacher.tags


def check_tags(
    teachers: Sequence[TeacherConfig], prompts: Iterable[Prompt], *, needs_teacher: bool
) -> None:
    """Check the tags of teachers against those of the data.

    Args:
        teachers: Teachers of the run.
        prompts: Rows of the training data.
        needs_teacher: True if every row needs a teacher.

    Raises:
        MsrlError: The data has no row with a tag of a teacher, or a row has no teacher.
    """
    if not any(teacher.tags for teacher in teachers):
        return
    missing = {(number, tag) for number, teacher in enumerate(teachers) for tag in teacher.tags}
    for prompt in prompts:
        missing -= {(number, prompt.extra.get(TAG)) for number in range(len(teachers))}
        if needs_teacher and not any(teaches(teacher, prompt) for teacher in teachers):
            raise MsrlError(
                f"algo.distill.teachers: no teacher has the tag {prompt.extra.get(TAG)} of row "
                f"{prompt.index} of the data. Add it to the tags of a teacher, or add a teacher "
                "without tags."
            )
    if missing:
        number, tag = min(missing)
        raise MsrlError(
            f"algo.distill.teachers.{number}.tags: no row of the data has the tag {tag}. Map the "
            f"tags with preprocess.map_keys: {{extra.{TAG}: COLUMN}}, or remove it."
        )


def teacher_fields(
    arrays: RolloutArrays, teachers: Sequence[TeacherConfig]
) -> dict[str, tuple[Floats, ...]]:
    """Return fields with the weight of each teacher at every sampled token, if a teacher has tags.

    It is 0 in rows that the teacher does not teach.
    """
    if not any(teacher.tags for teacher in teachers):
        return {}
    fields = dict[str, tuple[Floats, ...]]()
    for number, teacher in enumerate(teachers):
        weights = (teacher.weight * taught_completions(teacher, arrays)).astype(np.float32)
        fields[teacher_weight(number)] = arrays.scatter(arrays.repeat_by_token(weights))
    return fields


def taught_completions(teacher: TeacherConfig, arrays: RolloutArrays) -> Flags:  # [P, G]
    """Return the completions that a teacher teaches."""
    rows = np.array([teaches(teacher, prompt) for prompt in arrays.prompts])
    return np.broadcast_to(rows[:, None], arrays.lengths.shape)
