"""`msrl config import`: a file or command line of another system, as msrl's own YAML and a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from msrl.config.show import flow
from msrl.config.sources import Node, Origin, plain, read
from msrl.errors import ManyErrors, MsrlError
from msrl.importers.lightrft import command_line as lightrft
from msrl.importers.mindspeed_llm import scripts as mindspeed_llm
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.report import full
from msrl.importers.roll import files as roll
from msrl.importers.shell import Word
from msrl.importers.systems import system_of
from msrl.importers.translation import Translation

SYSTEMS = ("mindspeed-rl", "mindspeed-llm", "roll", "lightrft")
_YAML = {"mindspeed-rl": mindspeed_rl, "mindspeed-llm": mindspeed_ray, "roll": roll}
_SHELL = {"mindspeed-rl": mindspeed_llm, "mindspeed-llm": mindspeed_llm, "lightrft": lightrft}  # their programs are the same


def translation_of(system: str, arguments: Sequence[str]) -> Translation:
    """The translation of one file, or of a command line given word by word. Raises ManyErrors for every mistake in it."""
    if not arguments:
        raise MsrlError(f"config import --from {system}: name a file, or give the flags after --")
    if len(arguments) == 1 and not arguments[0].startswith("-"):
        translation = _of_file(system, Path(arguments[0]))
    elif system in _SHELL:
        translation = _SHELL[system].translate_words([Word(text, None) for text in arguments], "command line")
    else:
        raise MsrlError(f"config import --from {system}: takes one file, not {len(arguments)} words")
    if translation.errors:
        raise ManyErrors(translation.errors)
    return translation


def _of_file(system: str, file: Path) -> Translation:
    if not file.is_file():
        raise MsrlError(f"{file}: there is no such file")
    if file.suffix not in (".yaml", ".yml"):
        if system not in _SHELL:
            raise MsrlError(f"{file}: must be a .yaml file of {system}'s")
        return _SHELL[system].translate_script(file.read_text(encoding="utf-8"), str(file))
    tree = read(file)
    found = system_of(tree)
    if found != system:
        raise MsrlError(f"{file}: holds no keys of {system}'s" + (f"; try --from {found}" if found else ""))
    return _YAML[system].translate(tree, file)


def native_yaml(translation: Translation) -> str:
    """The native configuration with where every value came from; keys that are to come stand in it, and a run refuses them."""
    head = [f"# Imported from {translation.system}, {translation.name}, by `msrl config import`."]
    missing = [f"# {line}" for line in translation.refused()]
    if missing:
        head += ["# Not in this version yet; a run refuses these until they are there or taken away:", *missing]
    return "\n".join([*head, *_lines(translation.whole().value, 0)]) + "\n"


def report(translation: Translation) -> str:
    return "\n".join(full(translation))


def _lines(section: object, depth: int) -> list[str]:
    entries = cast("dict[str, Node]", section)
    lines: list[str] = []
    for key, node in entries.items():
        if isinstance(node.value, dict) and node.value:
            lines += [f"{'  ' * depth}{key}:", *_lines(node.value, depth + 1)]
        else:
            text = "  " * depth + f"{key}: {flow(plain(node))}"
            lines.append(f"{text:<58}  # {_short(node.origin)}")
    return lines


def _short(origin: Origin) -> str:
    """The origin by the file's own name."""
    return f"{Path(origin.name).name}:{origin.line}" if origin.line is not None else origin.name
