"""Import of verl: its hydra configurations, and the scripts that run its trainers.

Source: verl 1dda0392, verl/trainer (main_ppo.py, config) and examples; earlier versions from v0.3
on have the same keys under other names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msrl.config.sources import Node, Origin, read
from msrl.errors import ManyErrors, MsrlError
from msrl.importers.environment import put_exports
from msrl.importers.hydra import Override
from msrl.importers.programs import put_left_out
from msrl.importers.shell import Word, parse_script
from msrl.importers.table import load_table
from msrl.importers.translation import Translation
from msrl.importers.verl import sft
from msrl.importers.verl.algorithm import put_algorithm, reads_log_probs
from msrl.importers.verl.batches import (
    POLICY,
    put_adapters,
    put_batches,
    put_data,
    put_optimizer,
)
from msrl.importers.verl.composition import OWN_FILES, Choices, compose
from msrl.importers.verl.images import put_images, refused_media
from msrl.importers.verl.layout import put_layout
from msrl.importers.verl.rewards import put_filter_source, put_rewards
from msrl.importers.verl.rollout import put_evaluation, put_rollout, put_routing
from msrl.importers.verl.run import put_critic, put_reference, put_run, record_other_engines
from msrl.importers.verl.sections import ACTOR, OPTIM, Sections

MARKS = ("actor_rollout_ref",)
PROGRAMS = ("main_ppo", "main_ppo_sync", "main_ppo_v0", "main_dapo")
_OTHER_PROGRAMS = {
    "fully_async_main": "the fully asynchronous trainer. Use rollout.async (docs/asynchronous.md)",
    "main_generation": "generation without training. Use `msrl generate`",
    "main_generation_server": "generation without training. Use `msrl generate`",
    "main_eval": "scores of generated responses. Use `msrl eval`",
    "model_merger": "conversion of checkpoints. Use `msrl convert-ckpt mcore2hf`",
}


def translate(
    tree: Node, file: Path, overrides: Sequence[Override] = (), names: Sequence[str] = ()
) -> Translation:
    """Return the translation of a configuration with changes of its keys.

    `names` are other files that choose the engine.
    """
    translation = Translation("verl", load_table("verl"), str(file))
    tree, choices = compose(tree, file, overrides, translation.errors, translation.table)
    choices.names += names
    return _translate_training(translation, tree, choices)


def _translate_supervised(
    overrides: Sequence[Override], launcher: Sequence[Word], tree: Node, file: Path, name: str
) -> Translation:
    """Return the translation of a command of the supervised trainer."""
    translation = Translation("verl", load_table("verl"), name)
    engine, changes = sft.chosen_engine(overrides)
    tree, _ = compose(tree, file, changes, translation.errors, translation.table)
    sft.put_supervised(translation, sft.with_devices(tree, launcher, name), engine)
    return translation


def _translate_training(translation: Translation, tree: Node, choices: Choices) -> Translation:
    sections = Sections.of(translation, tree)
    if feature := refused_media(sections):
        translation.errors[:] = [f"{translation.name}: not supported: {feature}"]
        translation.is_refused = True
        return translation
    engine = sections["top"].get("model_engine")
    if engine is not None:
        choices.names.append(str(engine.value))
    choices.names.append(str(sections[ACTOR].value("strategy")))
    sections.is_megatron = choices.is_megatron
    put_data(sections)
    put_layout(sections)
    put_batches(sections)
    put_optimizer(sections, OPTIM, POLICY)
    put_adapters(sections)
    put_images(sections)
    put_algorithm(sections)
    put_rollout(sections)
    put_routing(sections)
    put_rewards(sections)
    put_filter_source(sections)
    put_evaluation(sections)
    put_run(sections)
    put_critic(sections)
    put_reference(sections)
    record_other_engines(sections)
    reads_log_probs(sections)
    _put_remaining(sections)
    return translation


def _put_remaining(sections: Sections) -> None:
    """Apply the rows of all keys without a rule, and verl's defaults of keys that are not set."""
    for _, keys in list(sections):
        keys.apply_remaining()
    fill = ["data", "actor_rollout_ref.rollout", ACTOR, "trainer", "critic"]
    if sections.is_megatron:
        fill.append(f"{ACTOR}.megatron")
    for name in fill:
        present = list(sections[name])
        sections.translation.fill_defaults((sections[name].section,), present)


# --- Command lines ---


def translate_script(text: str, name: str, arguments: Sequence[str] = ()) -> Translation:
    """Return the translation of the only training of a script called with arguments.

    Raises:
        MsrlError: the script has no training of verl, or several different ones.
    """
    script = parse_script(text, name, arguments)
    commands = [words for words in script.commands if is_program(words)]
    runs = {tuple(word.text for word in words[_start(words) :]): words for words in commands}
    if len(runs) != 1:
        foreign = [program for words in script.commands if (program := _other(words))]
        if not runs and foreign:
            raise MsrlError(f"{name}: {foreign[0]}: not supported: {_OTHER_PROGRAMS[foreign[0]]}")
        programs = ", ".join((*PROGRAMS, *sft.PROGRAMS))
        raise MsrlError(f"{name}: must contain one training of verl ({programs}), has {len(runs)}")
    translation = translate_words(next(iter(runs.values())), name)
    put_exports(translation, script)
    if not translation.is_refused:
        put_left_out(translation, script, {id(words) for words in commands}, _LEFT_OUT)
    return translation


_LEFT_OUT = {
    "ray start": "`msrl cluster up` starts Ray",
    "ray stop": "`msrl cluster down` stops Ray",
    "python -m verl.model_merger": "`msrl convert-ckpt mcore2hf` writes Hugging Face folders",
    "hf": "`msrl` takes the names of models and datasets on a hub",
    **dict.fromkeys(
        ("gsm8k", "math_dataset", "dapo_math"), "verl's rows: data.train takes them as they are"
    ),
}


def translate_words(words: list[Word], name: str) -> Translation:
    """Return the translation of one command line: hydra's options and changes of keys."""
    start = _start(words)
    launcher, program = words[:start], _module(words[start - 1]) if start else ""
    words = [_with_placeholder(word) for word in words[start:] if not _is_unknown_of_ray(word)]
    known = [_with_known_name(word, name) for word in words]
    remarks = [
        f"{Origin(name, word.line)}: {short.text}: shortened, since {word.problem}"
        for word, short in zip(words, known, strict=True)
        if short is not word
    ]
    words = known
    problems = [
        f"{Origin(name, word.line)}: {word.text}: {word.problem}" for word in words if word.problem
    ]
    if problems:
        raise ManyErrors(list(dict.fromkeys(problems)))
    overrides: list[Override] = []
    options: dict[str, str] = {}
    errors: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.text.startswith("-"):
            option, equals, value = word.text.partition("=")
            option = _SHORT.get(option, option)
            if option not in _OPTIONS:
                text = "not supported: an option of hydra. Only --config-name, --config-path and "
                errors.append(f"{Origin(name, word.line)}: {option}: {text}--config-dir are read.")
                continue
            options[option] = value if equals else next(rest, word).text
            continue
        override = _override(word, name, errors)
        if override is not None:
            overrides.append(override)
        elif word.text:
            errors.append(f"{Origin(name, word.line)}: {word.text}: expected KEY=VALUE")
    file, own = _config(options, name)
    tree = read(file, is_old=True) if file is not None else Node({}, Origin(name))
    if program in sft.PROGRAMS:
        translation = _translate_supervised(overrides, launcher, tree, file or Path(name), name)
    else:
        translation = translate(tree, file or Path(name), overrides, own)
    translation.name = name
    translation.errors[:0] = errors
    translation.remarks += remarks
    return translation


# Keys of files and folders, which the user names before a run.
_PATHS = re.compile(
    r"\+*(?:data\.(?:train|val)_files|(?:actor_rollout_ref|critic)\.model\.path"
    r"|trainer\.default_local_dir|[\w.]+\.dist_checkpointing_path)="
)
_UNSET = re.compile(r"\$(\w+) is not set\b")


_REQUIRED = re.compile(r"\+*(data\.train_files|actor_rollout_ref\.model\.path)=")


def _with_placeholder(word: Word) -> Word:
    """Return a required path that is empty, or whose variable is not set, as a placeholder."""
    required = _REQUIRED.fullmatch(word.text)
    if required is not None and not word.problem:
        return Word(f"{word.text}<{required[1]}>", word.line)
    unset, key = _UNSET.match(word.problem), _PATHS.match(word.text)
    if unset is None or key is None:
        return word
    return Word(f"{key[0]}<{unset[1]}>{word.text[key.end() :]}", word.line)


# Keys of names, on which no result depends.
_NAMES = re.compile(r"\+*trainer\.(?:project|experiment)_name=")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")


def _with_known_name(word: Word, script: str) -> Word:
    """Return a name without the parts whose value is not known; if none is left, the script's."""
    key = _NAMES.match(word.text)
    if not word.problem or key is None:
        return word
    known = _COMMAND.sub("", word.text[key.end() :]).strip("-_. ")
    return Word(f"{key[0]}{known or Path(script).stem}", word.line)


# Options of Ray, and the items of arrays that a condition of a script may add to them.
_OF_RAY = ("ray_kwargs.", "+ray_kwargs.", "++ray_kwargs.")
_OPTIONS = ("--config-name", "--config-path", "--config-dir")
_SHORT = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


def _is_unknown_of_ray(word: Word) -> bool:
    """Return True for options of Ray whose text is not known, on which no result depends."""
    return word.text.startswith("$RAY") or bool(word.problem and word.text.startswith(_OF_RAY))


def _override(word: Word, name: str, errors: list[str]) -> Override | None:
    try:
        return Override.from_text(word.text, Origin(name, word.line))
    except MsrlError as error:
        errors.append(str(error))
        return Override("", None)


def _config(options: dict[str, str], script: str) -> tuple[Path | None, list[str]]:
    """Return the file that the options of hydra name; none for a file of verl, which has names."""
    name = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    folder = Path(options.get("--config-path") or options.get("--config-dir") or ".")
    parents = [Path(), *Path(script).resolve().parents[:5]]
    paths = [parent / folder / f"{name}.yaml" for parent in parents]
    paths += [parent / "config" / f"{name}.yaml" for parent in parents]
    file = next((path for path in paths if path.is_file()), None)
    if file is not None and name not in OWN_FILES:
        return file, [name]
    if name in OWN_FILES:
        return None, [name]
    raise MsrlError(f"{script}: --config-name {name}: file not found. Name it with --config-path.")


def _start(words: Sequence[Word]) -> int:
    """Return the index after the program of a command; 0 without one."""
    for number, word in enumerate(words):
        if _module(word) in (*PROGRAMS, *sft.PROGRAMS):
            return number + 1
    return 0


def is_program(words: Sequence[Word]) -> bool:
    """Return True for a command that runs a training of verl."""
    return _start(words) > 0


def _module(word: Word) -> str:
    """Return the last name of a module such as `verl.trainer.main_ppo`, or of a file."""
    if word.text.endswith(".py"):
        return Path(word.text).stem
    is_module = word.text.startswith(("verl.", "recipe.", "dapo."))
    return word.text.rpartition(".")[2] if is_module else ""


def _other(words: Sequence[Word]) -> str:
    return next((_module(word) for word in words if _module(word) in _OTHER_PROGRAMS), "")
