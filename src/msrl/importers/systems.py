"""Which system a file is of, and its translation."""

from __future__ import annotations

from msrl.config.sources import Node, find, read
from msrl.errors import MsrlError
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.table import canonical, load_table
from msrl.importers.translation import Translation

_MARKS = {
    "mindspeed-rl": mindspeed_rl.MARKS,
    "mindspeed-llm": mindspeed_ray.MARKS,
    "roll": ("actor_train", "actor_infer", "rollout_batch_size", "num_return_sequences_in_group"),
}
_BY_COMMAND = "roll"
_SECTIONS = {"megatron_training": "megatron", "actor_config": "megatron", "rl_config": "", "generate_config": "", "sampling_config": ""}


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


def refuse_foreign_key(path: str) -> None:
    """Raises MsrlError for a dotted key of MindSpeed-RL's files where msrl's own are meant: it names them."""
    first, *rest = path.lstrip("+").split(".")
    if first not in _SECTIONS or not rest:
        return
    section = rest[-2] if len(rest) > 1 else first
    row = load_table("mindspeed_rl").row(_SECTIONS.get(section) or section, rest[-1])
    advice = f"set {' and '.join(row.to)}" + (f" ({row.by})" if row.by else "") if row is not None and row.to else "change it in the file"
    raise MsrlError(f"--set {path}: is a key of MindSpeed-RL's files, and msrl's own are set; {advice}")
