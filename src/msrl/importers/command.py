"""Import of another system's file or command line as native YAML (`msrl config import`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from msrl.config.show import flow, written_key
from msrl.config.sources import Node, Origin, printable_value, read
from msrl.errors import ManyErrors, MsrlError
from msrl.files import read_user_text
from msrl.importers.lightrft import command_line as lightrft
from msrl.importers.mindspeed import scripts as mindspeed_scripts
from msrl.importers.mindspeed_mm import files as mindspeed_mm
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.others import other_program
from msrl.importers.report import full
from msrl.importers.roll import files as roll
from msrl.importers.secrets import mask_secrets
from msrl.importers.shell import Word, parse_script
from msrl.importers.systems import detect_system, refuse_other, similar_marks
from msrl.importers.translation import Translation
from msrl.importers.verl import files as verl
from msrl.limits import one_line, within_import_limits

_YAML = {
    "mindspeed-rl": mindspeed_rl,
    "mindspeed-llm": mindspeed_ray,
    "mindspeed-mm": mindspeed_mm,
    "roll": roll,
    "verl": verl,
}
# MindSpeed-RL and MindSpeed-LLM share their programs.
SHELL_SYSTEMS = {
    "mindspeed-rl": mindspeed_scripts,
    "mindspeed-llm": mindspeed_scripts,
    "lightrft": lightrft,
    "verl": verl,
}
_SHELLS = ("bash", "sh")


def translate_arguments(
    system: str, arguments: Sequence[str], *, approximate: bool = False
) -> Translation:
    """Return the translation of a file, a script with arguments, or the words of a command line.

    With `approximate`, a key that msrl cannot compute as the original does takes the nearest
    setting instead of an error.

    Raises:
        ManyErrors: with one line for each error in the input.
    """
    if not arguments:
        raise MsrlError(
            f"config import --from {system}: no input. Name a file, or add flags after --."
        )

    def read_input() -> Translation:
        translation = _translate_command(system, arguments)
        translation.complete(approximate=approximate)
        return translation

    try:
        translation = within_import_limits(arguments[0], read_input)
    except MsrlError as error:
        raise ManyErrors([mask_secrets(line) for line in str(error).split("\n")]) from None
    errors = [*translation.errors, *([] if approximate else translation.differences)]
    if errors:
        raise ManyErrors([mask_secrets(line) for line in errors])
    return translation


def _translate_command(system: str, arguments: Sequence[str]) -> Translation:
    """Return the translation of a file, a script with arguments, or words of a command line."""
    if arguments[0] in _SHELLS and len(arguments) > 1 and not arguments[1].startswith("-"):
        arguments = arguments[1:]
    if _names_file(system, arguments):
        return _translate_file(system, Path(arguments[0]), arguments[1:])
    if system in SHELL_SYSTEMS:
        words = [Word(text, None) for text in arguments]
        return SHELL_SYSTEMS[system].translate_words(words, "command line")
    raise MsrlError(
        f"config import --from {system}: expected one file, got {len(arguments)} arguments"
    )


def _names_file(system: str, arguments: Sequence[str]) -> bool:
    """Return True for a file, or for a shell script with its arguments."""
    if arguments[0].startswith("-"):
        return False
    is_script = system in SHELL_SYSTEMS and Path(arguments[0]).suffix == ".sh"
    return len(arguments) == 1 or is_script


def _translate_file(system: str, file: Path, arguments: Sequence[str] = ()) -> Translation:
    if not file.is_file():
        problem = "is a folder, pipe or device, not a file" if file.exists() else "file not found"
        raise MsrlError(f"{file}: {problem}")
    text = read_user_text(file)
    is_json = system == "mindspeed-mm" and file.suffix == ".json"
    if file.suffix not in (".yaml", ".yml") and not is_json:
        return _translate_script(system, file, text, arguments)
    tree = read(file, is_old=True)
    detected = detect_system(tree, file)
    if detected is None:
        refuse_other(tree, file)
    if detected != system:
        advice = f". Use --from {detected}." if detected else similar_marks(tree, system)
        raise MsrlError(f"{file}: contains no keys of {system}{advice}")
    return _YAML[system].translate(tree, file)


def _translate_script(system: str, file: Path, text: str, arguments: Sequence[str]) -> Translation:
    try:
        if system not in SHELL_SYSTEMS:
            kinds = ".yaml or .json" if system == "mindspeed-mm" else ".yaml"
            raise MsrlError(f"{file}: must be a {kinds} file of {system}")
        return SHELL_SYSTEMS[system].translate_script(text, str(file), arguments)
    except MsrlError as error:
        if _MM_PROGRAMS.search(text):
            files = "the .yaml file that it names, or those of --mm-data and --mm-model"
            raise MsrlError(
                f"{file}: is a script of MindSpeed-MM. Import {files}: --from mindspeed-mm FILE."
            ) from error
        commands = parse_script(text, str(file), arguments).commands
        own = _own_system(commands)
        if own and own.partition("-")[0] != system.partition("-")[0]:
            of = " with the YAML file that it names" if own == "roll" else ""
            raise MsrlError(f"{file}: is a script of {own}. Use --from {own}{of}.") from error
        other = other_program([[word.text for word in words] for words in commands])
        if other is not None:
            raise MsrlError(f"{file}: is a script of {other.name}. {other.advice}") from error
        raise


_MM_PROGRAMS = re.compile(
    r"mindspeed_mm/\S*\.py|\b(pretrain|inference|evaluate)_(vlm|internvl|sora|transformers)\.py"
)
_OWN_PROGRAMS = {
    **dict.fromkeys(("train_colocate", "train_srm_al", "train_srm_vl", "train_grm_vl"), "lightrft"),
    **dict.fromkeys(("convert_ckpt", "posttrain_gpt", "pretrain_gpt", "ray_gpt"), "mindspeed-llm"),
}


def _own_system(commands: Sequence[Sequence[Word]]) -> str:
    """Return the system of the first program that only one system has; empty without one."""
    for words in commands:
        if verl.is_program(words):
            return "verl"
        for word in words:
            stem = Path(word.text).stem if word.text.endswith(".py") else ""
            if stem in _OWN_PROGRAMS:
                return _OWN_PROGRAMS[stem]
            if word.text.startswith("cli/train_"):
                return "mindspeed-rl"
            if stem.startswith("start_") and stem.endswith("_pipeline"):
                return "roll"
    return ""


def native_yaml(translation: Translation) -> str:
    """Return the native configuration as YAML, with the origin of each value as a comment.

    The YAML includes keys that this version does not support; a run refuses them.
    """
    head = [f"# Imported from {translation.system}, {translation.name}, by `msrl config import`."]
    unsupported = [f"# {line}" for line in translation.refusals()]
    if unsupported:
        head += ["# Not supported in this version. A run refuses these keys; remove them to run:"]
        head += unsupported
    head = [one_line(line) for line in head]  # a line feed would end the comment
    return "\n".join([*head, *_yaml_lines(translation.complete_tree().value, 0)]) + "\n"


def report(translation: Translation) -> str:
    """Return the report on all keys as text."""
    return "\n".join(full(translation))


def _yaml_lines(section: object, depth: int) -> list[str]:
    entries = cast("dict[str, Node]", section)
    lines: list[str] = []
    for key, node in entries.items():
        if isinstance(node.value, dict) and node.value:
            lines += [f"{'  ' * depth}{written_key(key)}:", *_yaml_lines(node.value, depth + 1)]
        else:
            text = "  " * depth + f"{written_key(key)}: {flow(printable_value(node))}"
            lines.append(f"{text:<58}  # {one_line(_short_origin(node.origin))}")
    return lines


def _short_origin(origin: Origin) -> str:
    """Return the file name and line of an origin, without the folder."""
    return f"{Path(origin.name).name}:{origin.line}" if origin.line is not None else origin.name
