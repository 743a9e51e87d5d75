"""Keys without effect: the command does not read them, or other keys are not as they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msrl import registry
from msrl.config.effects import NEEDS, READ_BY, Needs, NeedsPlugin
from msrl.config.facts import key_facts
from msrl.config.loader import Resolved
from msrl.config.messages import written
from msrl.config.options import TRAININGS
from msrl.errors import alternatives
from msrl.registry.declarations import declaration

_TRAINING = ("checkpoint", "cluster.roles", "cluster.tls", "data", "eval", "log", "train")
_ROLLOUTS = (*_TRAINING, "environment", "reward", "rollout")
# Sections that are checked for a command; a file may have others for other commands.
_SECTIONS = {
    "train-sft": (
        *_TRAINING,
        *(f"algo.{name}" for name in ("aggregate", "distill", "preference", "reward_model")),
    ),
    "train-dpo": (*_TRAINING, "algo"),
    "train-rm": (*_TRAINING, "algo"),
    "train-grpo": (*_ROLLOUTS, "algo"),
    "train-distill": (*_ROLLOUTS, "algo.aggregate", "algo.distill"),
    "generate": ("environment", "generate"),
    "chat": ("chat",),
    "eval": (
        *("environment", "eval.right_from", "eval.sampling", "eval.source"),
        *("evaluate.benchmark_data", "evaluate.num_fewshot"),
        *("evaluate.chat_template", "evaluate.enable_thinking"),
    ),
}


def check_effects(resolved: Resolved, command: str) -> Iterator[str]:
    """Yield a line for each changed key that has no effect in a run of the command."""
    sections = _SECTIONS.get(command, ())
    given = (name for name, origin in resolved.origins.items() if origin.is_given)
    for key in dict.fromkeys(map(_key_of_field, given)):
        if _is_in(_unnumbered(key), sections) and resolved.is_changed(key):
            problem = _unread(key, command) or next(_unmet(resolved, key, command), None)
            if problem is not None:
                yield resolved.mistake(key, problem)


def _unnumbered(key: str) -> str:
    return ".".join(name for name in key.split(".") if not name.isdigit())


def _is_in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _key_of_field(name: str) -> str:
    """Return the key of the list or mapping that a value belongs to, or the key itself.

    Of a value in an unknown section, which another message reports, it is the section.
    """
    key = name
    while key_facts(_unnumbered(key)) is None or key.rpartition(".")[2].isdigit():
        if "." not in key:
            break
        key = key.rpartition(".")[0]
    return key


def _unread(key: str, command: str) -> str | None:
    """Return the problem of a key that the training does not read, or None."""
    entries = [section for section in READ_BY if _is_in(key, (section,))]
    if not entries or command not in TRAININGS:
        return None
    readers = READ_BY[max(entries, key=len)]
    if command in readers.commands:
        return None
    why = f", {readers.why}" if readers.why else ""
    if not why and len(readers.commands) < 3:
        why = f", only in {' and '.join(readers.commands)}"
    remedy = f" and set {readers.instead}" if readers.instead else ""
    return f"has no effect in {command}{why}. Remove it{remedy}."


def _unmet(resolved: Resolved, key: str, command: str) -> Iterator[str]:
    """Yield a message for each need of a key or of a section around it that is not met."""
    plain = _unnumbered(key)
    for section, needs in NEEDS.items():
        for need in needs if _is_in(plain, (section,)) else ():
            if need.commands and command not in need.commands:
                continue
            if isinstance(need, NeedsPlugin):
                yield from _plugin(resolved, need)
            elif plain not in need.keys:
                yield from _values(resolved, need, key)


def _plugin(resolved: Resolved, need: NeedsPlugin) -> Iterator[str]:
    """Yield a message if the plugin does not have what a key needs."""
    name: str = resolved.value(need.key)
    if not _has(need, name):
        others = [other for other in registry.names(need.package) if _has(need, other)]
        why = f", {need.why}" if need.why else ""
        yield (
            f"has no effect with {need.key}={name}{why}. Use {alternatives(others)} there, or "
            "remove this key."
        )


def _has(need: NeedsPlugin, name: str) -> bool:
    plugin = declaration(need.package, name, key=need.key)
    if need.function:
        return plugin.has_parameter(need.function, need.name)
    return bool(plugin.constant(need.name))


def _values(resolved: Resolved, need: Needs, key: str) -> Iterator[str]:
    """Yield a message if no key has a value that another one needs."""
    section, plain = key.rpartition(".")[0], _unnumbered(key.rpartition(".")[0])
    names = [
        f"{section}{name.removeprefix(plain)}" if name.rpartition(".")[0] == plain else name
        for name in need.keys
    ]
    values = [resolved.value(name) for name in names]
    if any(value in need.values if need.values else _is_on(value) for value in values):
        return
    name, value = names[0], values[0]
    why = f", {need.why}" if need.why else ""
    if need.values == (None,):
        yield f"has no effect with {name}={written(value)}{why}. Remove one of the two keys."
    elif need.values:
        choices = alternatives([str(value) for value in need.values])
        yield (
            f"has no effect with {name}={written(value)}{why}. Set that key to {choices}, or "
            "remove this one."
        )
    elif len(names) > 1:
        yield f"has no effect without {alternatives(names)}{why}. Set one, or remove this key."
    elif value is False:
        yield f"has no effect without {name}=true{why}. Set that key, or remove this one."
    elif value in (None, "none", ()):
        yield f"has no effect without {name}{why}. Set that key, or remove this one."
    else:
        yield f"has no effect with {name}={value}{why}. Set that key above 0, or remove this one."


def _is_on(value: Any) -> bool:
    return bool(value) and value != "none"
