"""Programs of a script that an import leaves out: each is reported with its line and a reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msrl.config.sources import Node, Origin, plain
from msrl.errors import ManyErrors
from msrl.importers.shell import Script, Word
from msrl.importers.translation import KeyStatus, SourceKey, Translation

# Commands that only prepare folders, the shell and its output.
_HOUSEKEEPING = frozenset({
    "cd", "pushd", "popd", "ls", "pwd", "mkdir", "touch", "sleep", "wait", "date", "tee",
    "ulimit", "umask", "trap", "alias", "shopt", "clear", "sync", "hostname", "true", "false",
    ":", "[", "]", "test", "getopts",
})  # fmt: skip
_WRAPPERS = frozenset({
    "nohup", "sudo", "time", "exec", "nice", "env", "stdbuf", "timeout", "numactl", "taskset",
    "srun",
})  # fmt: skip
_UNKNOWN = "msrl imports no such program and does not run it"


def program_name(words: Sequence[Word]) -> str:
    """Return the program of a command: its Python file or module, else its first words."""
    texts = [word.text for word in words]
    for position, text in enumerate(texts):
        if text.endswith((".py", ".sh")):
            return text.rpartition("/")[2]
        if (
            text == "-m"
            and position + 1 < len(texts)
            and "torch.distributed" not in texts[position + 1]
        ):
            return f"python -m {texts[position + 1]}"
    while len(texts) > 1 and (texts[0] in _WRAPPERS or texts[0].startswith("-") or "=" in texts[0]):
        texts.pop(0)
    name = texts[0].rpartition("/")[2] if texts else ""
    has_subcommand = len(texts) > 1 and texts[1].isalpha() and name not in ("kill", "pkill", "rm")
    return f"{name} {texts[1]}" if has_subcommand else name


def left_out(
    script: Script, used: Collection[int], reasons: Mapping[str, str]
) -> list[tuple[str, int | None, str]]:
    """Return name, line and reason of each program that is not imported.

    Args:
        script: the script.
        used: ids of the commands (`id(words)`) that are imported.
        reasons: reasons by program; one that ends with .py has its name without it.
    """
    programs: list[tuple[str, int | None, str]] = []
    for words in script.commands:
        name = program_name(words)
        if id(words) in used or not name or name.split()[0] in _HOUSEKEEPING:
            continue
        reason = reasons.get(name.removesuffix(".py"), _UNKNOWN)
        if name.endswith(".sh"):
            reason = "another script. Import it by itself"
        programs.append((name, words[0].line, reason))
    return list(dict.fromkeys(programs))


def put_left_out(
    translation: Translation, script: Script, used: Collection[int], reasons: Mapping[str, str]
) -> None:
    """Report every program that is left out; refuse a script of which nothing is imported.

    Raises:
        ManyErrors: the script sets no key of msrl.
    """
    programs = left_out(script, used, reasons)
    for name, line, reason in programs:
        node = Node({}, Origin(translation.name, line))
        entry = SourceKey("program", name, name, node)
        translation.record(entry, KeyStatus.DROPPED, f"not imported: {reason}")
    if _is_empty(translation) and not translation.errors:
        raise ManyErrors(
            [
                f"{translation.name}: nothing to import: no command sets a key.",
                *_reasons(translation),
            ]
        )


def _is_empty(translation: Translation) -> bool:
    """Return True if no command sets a key; variables of workers alone configure nothing."""
    sections = plain(translation.complete_tree())
    variables = {"cluster": {"env": sections.get("cluster", {}).get("env")}}
    return sections in ({}, variables)


def _reasons(translation: Translation) -> list[str]:
    """Return one line for each program and flag of a script without a result."""
    sections = ("program", "override", "ray", "ray_start")
    results = [item for item in translation.key_results if item.entry.section in sections]
    return [f"{result.entry}: {result.text}" for result in results]
