"""Shell completion of option values: keys, choices, files, plugins and templates."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Candidate = tuple[str, str]  # the value and its explanation, which zsh, fish and PowerShell show
Completer = Callable[[str], list[Candidate]]

_YAML = (".yaml", ".yml")
_EXPLANATION_WIDTH = 72  # characters


def assignments(incomplete: str) -> list[Candidate]:
    """Complete the KEY=VALUE of `--set`."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [(f"{key}={word}", text) for word, text in _values(key) if word.startswith(value)]
    from msrl.config.facts import key_facts, settable_keys

    matches = [name for name in settable_keys() if name.startswith(key)]
    candidates = [
        (f"{name}=", _first_line(facts.description))
        for name in matches
        if (facts := key_facts(name))
    ]
    if len(matches) == 1:
        # With a single candidate, the shell would add a space after the equals sign.
        values = _values(matches[0]) or [("null", "Not set")]
        candidates += [(f"{matches[0]}={word}", text) for word, text in values]
    return candidates


def _first_line(text: str) -> str:
    """Return a text for one line: typer breaks longer ones, also inside of quotes."""
    return textwrap.shorten(text, _EXPLANATION_WIDTH, placeholder=" ...")


def values(key: str) -> Completer | None:
    """Return a completer for the values of a configuration key; None if it has no names."""
    from msrl.config.facts import key_facts

    name = key.rpartition(".")[2]
    facts = key_facts(key)
    if name in _COMPLETERS or facts is None or not (facts.choices or facts.examples):
        return _COMPLETERS.get(name)

    def complete(incomplete: str) -> list[Candidate]:
        return _starting(_values(key), incomplete)

    return complete


def config_files(incomplete: str) -> list[Candidate]:
    """Complete the FILE of `-c`: YAML files, folders, and packaged configurations by name."""
    from msrl.config.sources import packaged_names

    packaged = [(name, "Packaged configuration") for name in packaged_names()]
    return _starting(packaged, incomplete) + [(path, "") for path in _yaml_files(incomplete)]


def config_names(incomplete: str) -> list[Candidate]:
    """Complete the NAME of `--config-name`."""
    from msrl.config.sources import packaged_names

    local = [(file.stem, str(file)) for file in sorted(Path("configs").glob("*.yaml"))]
    packaged = [(name, "Packaged configuration") for name in packaged_names()]
    return _starting([*local, *packaged], incomplete)


def template_names(incomplete: str) -> list[Candidate]:
    """Complete the NAME of `--template`: packaged templates and YAML files."""
    return _starting(_template_values(), incomplete) + [
        (path, "") for path in _yaml_files(incomplete)
    ]


def resume(incomplete: str) -> list[Candidate]:
    """Complete the value of `--resume`."""
    values = [
        ("auto", "Newest complete checkpoint of the run"),
        ("none", "Start from the beginning"),
    ]
    return _starting(values, incomplete)


# Completers by the last part of a key.
_COMPLETERS: dict[str, Completer] = {"resume": resume, "template": template_names}


def _starting(candidates: Iterable[Candidate], incomplete: str) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate[0].startswith(incomplete)]


def _values(key: str) -> list[Candidate]:
    """Return the values to suggest for a key: its choices, examples or default."""
    from msrl.config.facts import key_facts

    facts = key_facts(key)
    if facts is None:
        return []
    if facts.choices or facts.examples:
        return [(choice, "") for choice in facts.choices or facts.examples]
    is_plain = isinstance(facts.default, (str, int, float))
    return [(str(facts.default), "Default")] if is_plain else []


def _template_values() -> list[Candidate]:
    from msrl.config.templates import template_names as names

    return [(name, "Prompt template") for name in names()]


def _yaml_files(incomplete: str) -> list[str]:
    """Return YAML files and folders whose path starts with `incomplete`.

    If only one folder matches, its content is returned instead.
    """
    folder, _, name = incomplete.rpartition("/")
    prefix = f"{folder}/" if "/" in incomplete else ""
    paths = [
        path
        for path in sorted(Path(prefix or ".").glob("*"))
        if path.name.startswith(name) and not path.name.startswith(".")
    ]
    folders = [f"{prefix}{path.name}/" for path in paths if path.is_dir()]
    files = [f"{prefix}{path.name}" for path in paths if path.suffix in _YAML and path.is_file()]
    if len(folders) == 1 and not files:
        return _yaml_files(folders[0]) or folders
    return [*files, *folders]


def complete_bash(run: Callable[[], Any]) -> None:
    """Answer a completion request of bash.

    Bash splits words at `=` and `:`, and replaces only the text after the last of them. The request
    gets the complete words, and the text before the last `=` or `:` is removed from the answers.

    Args:
        run: reads the request from the environment, prints the answers and ends the process.
    """
    words, current, prefix = rejoined(
        os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    )
    os.environ["COMP_WORDS"] = "\n".join(words)
    os.environ["COMP_CWORD"] = str(current)
    answer = io.StringIO()
    try:
        with contextlib.redirect_stdout(answer):
            run()
    finally:
        lines = (line.removeprefix(prefix) for line in answer.getvalue().splitlines())
        sys.stdout.write("".join(f"{line}\n" for line in lines if line))


def rejoined(words: list[str], current: int) -> tuple[list[str], int, str]:
    """Join words that bash split at `=` or `:`.

    Return the words, the index of the current word, and the prefix of it that bash keeps.

    >>> rejoined(["msrl", "--set", "=", "run.name", "=", "a"], 5)
    (['msrl', '--set', 'run.name=a'], 2, 'run.name=')
    """
    joined: list[str] = []
    position, prefix, is_open = len(words), "", False
    for index, word in enumerate(words):
        is_break = bool(word) and not word.strip("=:")
        is_option_value = is_break and bool(joined) and joined[-1].startswith("--")
        if is_option_value:  # start a new word for the value
            joined.append("")
            before = word = ""
        else:
            before = joined.pop() if joined and (is_break or is_open) else ""
            joined.append(before + word)
        is_open = is_break
        if index == current:
            position, prefix = len(joined) - 1, before + (word if is_break else "")
    return joined, min(position, len(joined)), prefix
