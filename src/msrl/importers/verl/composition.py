"""Composition of verl's configurations: `defaults`, config groups and overrides.

The defaults of verl's own files are in the table, so these files are not read. Which of them a
configuration names tells its engine. Source: verl 1dda0392, verl/trainer/config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from msrl.config.sources import Node, plain
from msrl.importers.hydra import Override, compose_file
from msrl.importers.table import Table
from msrl.importers.verl.sections import with_defaults

_OWN_FOLDER = ("verl", "trainer", "config")
_TRAINERS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
_ENGINES = ("dp", "fsdp", "megatron", "veomni", "torchtitan", "automodel")
_ROLES = ("actor", "ref", "critic", "reward_model", "reward_loop")
OWN_FILES = frozenset(
    (
        *_TRAINERS,
        *(f"_generated_{name}" for name in _TRAINERS),
        *_ENGINES,
        *(f"{engine}_{role}" for engine in _ENGINES for role in _ROLES),
        *_ROLES,
        "legacy_data", "rollout", "hf_model", "npu_profile", "profiler", "reward", "distillation",
        "legacy_reward_impl", "rollout_correction", "transfer_queue",
    )
)  # fmt: skip


@dataclass
class Choices:
    """Config groups and files of verl that a configuration chooses."""

    names: list[str] = field(default_factory=list[str])

    @property
    def is_megatron(self) -> bool:
        return any("megatron" in name for name in self.names)


def compose(
    tree: Node, file: Path, overrides: Sequence[Override], errors: list[str], table: Table
) -> tuple[Node, Choices]:
    """Return a configuration with its overrides and references resolved, and its choices."""
    choices = Choices(list(_chosen_groups(tree)))
    keys: list[Override] = []
    for override in overrides:
        is_group = "@" in override.path or "/" in override.path
        if is_group and override.node is not None:
            choices.names.append(str(plain(override.node)))
        else:
            keys.append(override)

    def skip(name: str) -> bool:
        choices.names.append(name)
        path = file.parent / f"{name.removesuffix('.yaml')}.yaml"
        is_theirs = not path.is_file() or path.parts[-5:-2] == _OWN_FOLDER
        is_theirs = is_theirs or path.parts[-4:-1] == _OWN_FOLDER
        return "${" in name or (PurePosixPath(name).name in OWN_FILES and is_theirs)

    def prepare(node: Node) -> Node:
        return with_defaults(node, node, table)

    tree = compose_file(tree, file, errors, skip=skip, prepare=prepare, overrides=keys)
    entries = dict(tree.value) if isinstance(tree.value, dict) else {}
    for name in ("defaults", "hydra"):
        entries.pop(name, None)
    return Node(entries, tree.origin), choices


def _chosen_groups(tree: Node) -> Iterator[str]:
    """Yield the values of the groups in a `defaults` list."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    defaults = entries.get("defaults")
    for item in defaults.value if defaults and isinstance(defaults.value, tuple) else ():
        if isinstance(item.value, dict):
            yield from (str(plain(node)) for node in item.value.values())
