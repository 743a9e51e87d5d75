"""Which system a file is of, and its translation."""

from __future__ import annotations

from msrl.config.imports import mindspeed_ray, mindspeed_rl
from msrl.config.imports.table import canonical
from msrl.config.imports.translation import Translation
from msrl.config.sources import Node, find, read
from msrl.errors import MsrlError

_MARKS = {
    "mindspeed-rl": mindspeed_rl.MARKS,
    "mindspeed-llm": mindspeed_ray.MARKS,
    "roll": ("actor_train", "actor_infer", "rollout_batch_size", "num_return_sequences_in_group"),
}
_BY_COMMAND = "roll"


def system_of(tree: Node) -> str | None:
    """The system that a file's top-level keys are of; None for msrl's own."""
    keys = {canonical(key) for key in tree.value} if isinstance(tree.value, dict) else set[str]()
    return next((name for name, marks in _MARKS.items() if keys & set(marks)), None)


def foreign(path: str) -> Translation | None:
    """The translation of a file of MindSpeed's; None for msrl's own. Raises MsrlError for files that are to be imported first."""
    file = find(path)
    tree = read(file)
    system = system_of(tree)
    if system == _BY_COMMAND:
        raise MsrlError(f"{file}: is a file of ROLL's; write msrl's own with `msrl config import --from roll {file} --output FILE`")
    if system is None:
        return None
    return (mindspeed_rl if system == "mindspeed-rl" else mindspeed_ray).translate(tree, file)
