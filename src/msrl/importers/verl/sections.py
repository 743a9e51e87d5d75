"""Keys of a verl configuration by section, with the defaults of verl where it refers to them.

Two generations share a table: sections of versions before v0.7 (`reward_model`,
`custom_reward_function`) are read as those that replaced them. The reference and the critic have
the engine keys of the actor. Source: verl 1dda0392, verl/trainer/config and
verl/experimental/reward_loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msrl.config.messages import node_at
from msrl.config.show import flow
from msrl.config.sources import Node, scalar
from msrl.importers.sections import Keys
from msrl.importers.table import Table
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_ARR = "actor_rollout_ref"
ACTOR, MODEL, ROLLOUT = f"{_ARR}.actor", f"{_ARR}.model", f"{_ARR}.rollout"
OPTIM, FSDP, MEGATRON = f"{ACTOR}.optim", f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron"
VEOMNI, TRANSFORMER = f"{ACTOR}.veomni", f"{MEGATRON}.override_transformer_config"
_OPTIM_OVERRIDE = f"{OPTIM}.override_optimizer_config"
LOSS, CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"
_ENGINES = {
    "fsdp_config": FSDP,
    "fsdp": FSDP,
    "megatron": MEGATRON,
    "veomni": VEOMNI,
    "megatron.override_transformer_config": TRANSFORMER,
}
# Table sections of the sections of a configuration; the second is searched for other keys.
_PATHS: dict[str, tuple[str, ...]] = {
    "": ("top",),
    **{
        path: (path,)
        for path in (
            "data", "algorithm", "algorithm.kl_ctrl", "algorithm.filter_groups", CORRECTION, _ARR,
            MODEL, f"{MODEL}.lora", ACTOR, LOSS, OPTIM, _OPTIM_OVERRIDE, FSDP, MEGATRON, VEOMNI,
            TRANSFORMER, f"{_ARR}.ref", ROLLOUT, f"{ROLLOUT}.engine_kwargs",
            f"{ROLLOUT}.val_kwargs", f"{ROLLOUT}.multi_turn", "critic", "critic.model", "reward",
            "reward.custom_reward_function", "reward.reward_manager", "reward.reward_model",
            "trainer",
        )
    },
    "custom_reward_function": ("reward.custom_reward_function",),
    "reward_model": ("reward.reward_model", "reward"),
    "critic.optim": (OPTIM,),
    "critic.optim.override_optimizer_config": (_OPTIM_OVERRIDE,),
    "critic.model.fsdp_config": (FSDP,),
    f"{ACTOR}.rollout_correction": (CORRECTION,),
    **{f"{_ARR}.ref.{name}": (section,) for name, section in _ENGINES.items()},
    **{f"critic.{name}": (section,) for name, section in _ENGINES.items()},
}  # fmt: skip
# Sections of the supervised trainer, whose engine has one of three sections.
_SUPERVISED: dict[str, tuple[str, ...]] = {
    "": ("sft.top",),
    "data": ("sft.data",),
    "model": (MODEL,),
    "model.lora": (f"{MODEL}.lora",),
    "model.fsdp_config": (FSDP,),
    "optim": (OPTIM,),
    "optim.override_optimizer_config": (_OPTIM_OVERRIDE,),
    "trainer": ("trainer",),
}


def supervised_paths(engine: str) -> dict[str, tuple[str, ...]]:
    """Return the sections of the supervised trainer with an engine."""
    section = {"megatron": MEGATRON, "veomni": VEOMNI}.get(engine, FSDP)
    paths = {**_SUPERVISED, "engine": (section,)}
    if section == MEGATRON:
        paths["engine.override_transformer_config"] = (TRANSFORMER,)
    return paths


# Sections of which the configuration of a single model has its own copy.
_OWN = (f"{_ARR}.ref.", "critic.")
_EARLIER = ("custom_reward_function", "reward_model")  # null there means "not set"
_TARGET = "_target_"  # class of verl that holds a section


@dataclass
class Sections:
    """Keys of a configuration: of the table section of a name, or of a path below a model."""

    translation: Translation
    is_megatron: bool = False
    is_supervised: bool = False
    _keys: dict[str, Keys] = field(default_factory=dict[str, Keys])

    @staticmethod
    def of(
        translation: Translation, tree: Node, paths: Mapping[str, tuple[str, ...]] = _PATHS
    ) -> Sections:
        """Return the keys of a tree; add errors for unknown ones."""
        entries_by_name: dict[str, list[SourceKey]] = {}
        for name, entry in _entries(translation, tree, "", paths):
            entries_by_name.setdefault(name, []).append(entry)
        sections = Sections(translation)
        for name, entries in entries_by_name.items():
            sections._keys[name] = Keys(translation, entries[0].section, entries)
        return sections

    def __getitem__(self, name: str) -> Keys:
        if name not in self._keys:
            table_section = _PATHS.get(name, (name,))[0]
            self._keys[name] = Keys(self.translation, table_section, ())
        return self._keys[name]

    def __iter__(self) -> Iterator[tuple[str, Keys]]:
        return iter(self._keys.items())


def _entries(
    translation: Translation, section: Node, path: str, paths: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, SourceKey]]:
    """Yield the keys of a section and of those below it, with the name of their group."""
    leaves: dict[str, Node] = {}
    values = section.value if isinstance(section.value, dict) else {}
    for key, node in values.items():
        below = f"{path}.{key}" if path else key
        if below in paths and (node.value is None or isinstance(node.value, dict)):
            yield from _entries(translation, node, below, paths)
        elif key != _TARGET and node.value != _MISSING:
            leaves[key] = _expand_user(node)
    name, *also = paths[path]
    for entry in translation.entries(Node(leaves, section.origin), name, path, also=also):
        is_unset = entry.value is None or entry.value == {}
        if path in _EARLIER and is_unset:
            translation.record(entry, KeyStatus.OFF, "not set")
        else:
            yield path if path.startswith(_OWN) else entry.section, entry


def _expand_user(node: Node) -> Node:
    """Return a path below `~` with the folder of the user, as the original expands it."""
    text = node.value
    if not isinstance(text, str) or not text.startswith("~/"):
        return node
    path = str(Path(text).expanduser())
    return Node(path, node.origin, path)


# --- References to keys that a file does not set ---

_INSIDE = r"[^${}]|\{\}|\$\{[^${}]*\}"  # a default may be another reference
_REFERENCE = re.compile(rf"\$\{{(oc\.select:)?\s*(\.*[\w.]+)\s*(?:,\s*((?:{_INSIDE})*?)\s*)?\}}")
_MISSING = "???"  # a value that a user must set


def with_defaults(node: Node, tree: Node, table: Table, path: tuple[str, ...] = ()) -> Node:
    """Replace references to keys that the tree lacks by verl's defaults of these keys."""
    if isinstance(node.value, dict):
        entries = {
            key: with_defaults(child, tree, table, (*path, key))
            for key, child in node.value.items()
        }
        return Node(entries, node.origin)
    if isinstance(node.value, tuple):
        items = (
            with_defaults(child, tree, table, (*path, str(number)))
            for number, child in enumerate(node.value)
        )
        return Node(tuple(items), node.origin)
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    text = node.value
    for _ in range(8):  # selections inside selections
        changed = _REFERENCE.sub(lambda match: _target(match, tree, table, path), text)
        if changed == text:
            break
        text = changed
    is_whole = node.value.strip().startswith("${") and "${" not in text
    return Node(scalar(text) if is_whole else text, node.origin, text)


def _target(match: re.Match[str], tree: Node, table: Table, path: tuple[str, ...]) -> str:
    """Return the reference to a key that the tree has, else the default of the key."""
    selects, name, default = match.groups()
    dots = len(name) - len(name.lstrip("."))
    if dots:
        name = ".".join((*path[: max(0, len(path) - dots)], name.lstrip(".")))
    if node_at(tree, name.split(".")) is not None:
        return "${" + name + "}"
    section, _, key = name.rpartition(".")
    rows = (table.row(part, key) for part in _PATHS.get(section, ()))
    row = next((row for row in rows if row is not None and row.has_default), None)
    if row is not None:
        return flow(row.default)
    return (default or "null") if selects else match[0]


def table_sections() -> set[str]:
    """Return the sections of the table that a configuration can have."""
    names = (*_PATHS.values(), *_SUPERVISED.values())
    return {name for sections in names for name in sections}
