"""Outcomes of `msrl config import` over a folder: `python -m benchmarks imports FOLDER`.

Every YAML file and shell script below the folder is imported and validated as `msrl config import`
does. A file counts as imported if the result is a valid configuration; paths that this machine
lacks do not count. Nor does the prompt of the language model that judges responses in ROLL's files:
the last column counts the files that have one. The table has one row per kind of
file; the list below it has one line per reason of a file that is refused, or imported with
`--approximate` only.

The line between them counts the files of supported models: all but those whose refusal names the
model or a property of its architecture. Files of programs without a command of msrl have their own
number.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.import_kinds import script_kinds, yaml_kind
from msrl.errors import ManyErrors, MsrlError
from msrl.importers.command import translate_arguments
from msrl.workflows.import_config import validate

IMPORTED, APPROXIMATED, REFUSED, OTHER = "imported", "approximated", "refused", "not an input"

_JUDGE = "a language model as judge"
_MODEL = re.compile(r"\bnot (?:supported|imported): the model |msrl does not support the model ")
_NO_COMMAND = "nothing to import: no command"


@dataclass(frozen=True, slots=True)
class FileResult:
    """FileResult of one file. `reasons` are the errors of a refused one."""

    file: Path
    kind: str
    state: str
    reasons: tuple[str, ...] = ()

    @property
    def has_judge(self) -> bool:
        return any(_JUDGE in reason for reason in self.reasons)

    @property
    def has_unsupported_model(self) -> bool:
        return any(_MODEL.search(reason) for reason in self.reasons)

    @property
    def has_command(self) -> bool:
        return not any(_NO_COMMAND in reason for reason in self.reasons)


def main(arguments: Sequence[str]) -> int:
    """Print the results of a folder; return 1 if a file raised an unexpected exception."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks imports", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of foreign files")
    parser.add_argument("--files", action="store_true", help="print one line per refused file")
    parser.add_argument("--match", default="", help="only files whose path matches this expression")
    args = parser.parse_args(arguments)
    if not args.folder.is_dir():
        parser.error(f"{args.folder}: folder not found")
    files = [file for file in sorted(args.folder.rglob("*")) if _is_candidate(file, args.match)]
    results = [result for file in files for result in classify_file(file)]
    print("\n".join([*table(results), "", *supported(results), "", *reasons(results)]))
    if args.files:
        print("\n".join(["", *refused_lines(results)]))
    return int(any("unexpected" in result.reasons for result in results))


def _is_candidate(file: Path, match: str) -> bool:
    is_script = file.suffix in (".sh", ".yaml", ".yml") and file.is_file()
    return is_script and re.search(match, str(file)) is not None


def classify_file(file: Path) -> list[FileResult]:
    """Return the result of a file; files that no importer reads are `not an input`."""
    try:
        is_yaml = file.suffix != ".sh"
        system, kind = yaml_kind(file) if is_yaml else script_kinds(file)
    except (MsrlError, UnicodeDecodeError) as error:
        return [FileResult(file, "unreadable", REFUSED, (str(error),))]
    if system is None:
        return [FileResult(file, kind, OTHER)]
    return [FileResult(file, f"{system} {kind}", *_import(system, file))]


def _import(system: str, file: Path) -> tuple[str, tuple[str, ...]]:
    """Import a file exactly, else with `--approximate`; the prompt of a judge does not count."""
    state, reasons = _attempt(system, file, approximate=False)
    if state == IMPORTED:
        return state, reasons
    if _attempt(system, file, approximate=True)[0] == REFUSED:
        return REFUSED, reasons
    is_exact = all(_JUDGE in reason for reason in reasons)
    return (IMPORTED if is_exact else APPROXIMATED), reasons


def _attempt(system: str, file: Path, *, approximate: bool) -> tuple[str, tuple[str, ...]]:
    try:
        translation = translate_arguments(system, [str(file)], approximate=approximate)
        validation = validate(translation)
    except ManyErrors as error:
        return REFUSED, error.messages
    except MsrlError as error:
        return REFUSED, (str(error),)
    except Exception as error:  # count the remaining files; the exit code reports the failure
        return REFUSED, ("unexpected", f"{type(error).__name__}: {error}")
    return (REFUSED, validation.errors) if validation.errors else (IMPORTED, ())


def table(results: Sequence[FileResult]) -> list[str]:
    """Return a table with one row per kind of file."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        rows[result.kind][result.state] += 1
        rows[result.kind][_JUDGE] += result.has_judge and result.state != REFUSED
    lines = [
        "| kind | files | imported | with --approximate | refused | imported in all | judge |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, states in sorted(rows.items()):
        done = states[IMPORTED] + states[APPROXIMATED]
        total = done + states[REFUSED]
        if total == 0:
            lines.append(f"| {kind} (not an input) | {states[OTHER]} | | | | | |")
            continue
        numbers = [total, states[IMPORTED], states[APPROXIMATED], states[REFUSED]]
        lines.append(
            f"| {kind} | {' | '.join(map(str, numbers))} | {done / total:.0%} | {states[_JUDGE]} |"
        )
    return lines


def supported(results: Sequence[FileResult]) -> list[str]:
    """Return the share of imported files of supported models, and the refused ones by name."""
    inputs = [result for result in results if result.state != OTHER]
    models = [result for result in inputs if not result.has_unsupported_model]
    counted = [result for result in models if result.has_command]
    refused = [result for result in counted if result.state == REFUSED]
    done = len(counted) - len(refused)
    programs = Counter(result.kind for result in models if not result.has_command)
    names = ", ".join(f"{number} of {kind}" for kind, number in sorted(programs.items()))
    lines = [
        f"Files of supported models: {done} of {len(counted)} imported "
        f"({done / max(1, len(counted)):.1%}). Not counted: {len(inputs) - len(models)} of other "
        f"models; without a command of msrl: {names or 'none'} "
        f"({done / max(1, len(models)):.1%} with these)."
    ]
    return [*lines, *(f"- refused: {line}" for line in refused_lines(refused))]


def reasons(results: Sequence[FileResult]) -> list[str]:
    """Return the reasons of refusal by class, with the number of files that have each."""
    classes: Counter[str] = Counter()
    only: Counter[str] = Counter()
    for result in results:
        names = {reason_class(reason) for reason in result.reasons}
        classes.update(names)
        if len(names) == 1:
            only.update(names)
    return [
        f"- {count} files ({only[name]} by it alone): {name}"
        for name, count in classes.most_common()
    ]


def refused_lines(results: Sequence[FileResult]) -> list[str]:
    """Return one line per refused file with its first reasons."""
    refused = [result for result in results if result.state == REFUSED]
    return [f"{result.file}: {' | '.join(result.reasons[:3])}" for result in refused]


def reason_class(reason: str) -> str:
    """Return a reason without location, values and list indices.

    >>> reason_class("/a/grpo.yaml:14: rl_config.gamma=0.9: not supported: discounts")
    'rl_config.gamma: not supported: discounts'
    """
    text = re.sub(r"^\S+\.(?:sh|ya?ml)(?::\d+)?: ", "", reason.splitlines()[0] if reason else "")
    text = re.sub(r"^([\w.$]+)=.*?: ", r"\1: ", text)
    text = re.sub(r"\S*/\S+", "PATH", text)
    return re.sub(r"=\S+|\b\d+(\.\d+)?\b", "N", text)[:160]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
