"""Check that tests do not depend on the wording of messages, only on keys, values and keywords."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT, TESTS

SOURCE = ROOT / "src" / "msrl"

# Consecutive words of prose in texts that a test compares or searches for.
MAX_PINNED = 4
# Consecutive words that another text of a test may have in common with a text of the package.
MAX_SHARED = 3
SEARCHES = {
    "startswith",
    "endswith",
    "count",
    "search",
    "match",
    "fullmatch",
    "mentions",
    "assert_mentions",
    "assert_each_mentions",
}
ALLOWED = {
    "No space left on device": "the operating system's text",
    "The current node timed out during startup": "Ray's text, raised by the test",
    "END OF TERMS AND CONDITIONS": "the text of the license",
    "and this is a rather longer one": "input of a reward model",
    "out of memory returned failed": "words that the program of a test prints",
}

WORD = r"[A-Za-z]+(['-][A-Za-z]+)*"
PUNCTUATION = "()\"'`,;:.?!"

Text = tuple[int, str]


def prose_runs(text: str) -> Iterator[list[str]]:
    """Yield runs of words that only spaces separate; punctuation, digits and code end a run."""
    run: list[str] = []
    for token in re.sub(r"\\[bsSdDwWAZ]", " | ", text).replace("\\", "").split():
        word = token.strip(PUNCTUATION)
        if not re.fullmatch(WORD, word):
            yield run
            run = []
            continue
        if not token[0].isalpha():
            yield run
            run = []
        run.append(word.lower())
        if not token[-1].isalpha():
            yield run
            run = []
    yield run


def longest_run(text: str) -> int:
    """Return the number of words of the longest run."""
    return max((len(run) for run in prose_runs(text)), default=0)


def word_sequences(text: str, length: int) -> set[str]:
    """Return all sequences of that many words within the runs of a text."""
    return {
        " ".join(run[i : i + length])
        for run in prose_runs(text)
        for i in range(len(run) - length + 1)
    }


def literal_text(node: ast.AST) -> str | None:
    """Return the text of a string literal, with `|` for the expressions of an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(item.value) if isinstance(item, ast.Constant) else " | " for item in node.values
        )
    return None


def texts(node: ast.AST) -> Iterator[Text]:
    """Yield the string literals below a node with lines, except docstrings and assert messages."""
    text = literal_text(node)
    if text is not None:
        yield getattr(node, "lineno", 0), text
        return
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
        is_reason = isinstance(node, ast.Assert) and child is node.msg
        if not is_docstring and not is_reason:
            yield from texts(child)


def pins(tree: ast.AST) -> Iterator[Text]:
    """Yield the texts that are compared, searched for or passed as `match=`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield from texts(node.value)
        elif isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                yield from _literals(side)
        elif isinstance(node, ast.Call) and _name(node.func) in SEARCHES:
            for argument in node.args:
                yield from _literals(argument)


def _literals(node: ast.expr) -> Iterator[Text]:
    """Yield the texts of a literal, of a sequence or of a sum, but not the arguments of calls."""
    nodes: list[ast.expr] = []
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        nodes = node.elts
    elif isinstance(node, ast.BinOp):
        nodes = [node.left, node.right]
    for item in nodes:
        yield from _literals(item)
    text = literal_text(node)
    if text is not None:
        yield node.lineno, text


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_allowed(text: str) -> bool:
    """Return True for texts that are not messages of this package."""
    return any(item in text for item in ALLOWED)


def sentences(tree: ast.AST, known: set[str]) -> list[Text]:
    """Return the texts of a test file that pin a sentence.

    `known` are the word sequences in the package's texts.
    """
    violations = {(line, text) for line, text in pins(tree) if longest_run(text) > MAX_PINNED}
    violations |= {
        (line, text) for line, text in texts(tree) if word_sequences(text, MAX_SHARED + 1) & known
    }
    return sorted((line, text) for line, text in violations if not is_allowed(text))


@pytest.mark.slow
def test_no_test_pins_a_sentence():
    known = {
        sequence
        for path in SOURCE.rglob("*.py")
        for _, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for sequence in word_sequences(text, MAX_SHARED + 1)
    }
    assert len(known) > 100
    violations = [
        f"{path.name}:{line}: {text!r}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for line, text in sentences(ast.parse(path.read_text(encoding="utf-8")), known)
    ]
    assert not violations, "\n".join(violations)


def test_the_search_reports_pinned_sentences_in_all_forms():
    known = word_sequences("--set: {key}={value}: there is no such folder", MAX_SHARED + 1)
    for source in (
        'with pytest.raises(MsrlError, match=r"the tokenizer has fewer tokens than"): pass',
        'assert f"{name}: the tokenizer has fewer tokens than" in output',
        'assert message == ["one", "the tokenizer has fewer tokens than"]',
        'assert text.startswith("the tokenizer has fewer tokens than")',
        'CASES = [("model.path=gone", "model.path=gone: there is no such folder")]',
    ):
        assert len(sentences(ast.parse(source), known)) == 1, source
    for source in (
        'with pytest.raises(MsrlError, match=mentions("--set: model.path=gone", "folder")): pass',
        'assert value == 3, "the tokenizer has fewer tokens than"',
        'assert labels == ["a.b", "1 of 4 groups", "tp 2 pp 1"]',
    ):
        assert not sentences(ast.parse(source), known), source


# Phrases that a native reader would not write in this sense, and the words to use instead.
PHRASES = {
    r"\bbehind (?:the|each|a|it)\b": "after",
    r"\bbeside the (?:training|trainer|rollouts|policy)\b": "alongside",
    r"\b(?:goes|go|went) on\b": "continue",
    r"\bmakes? (?:every|all|the same|these|its) (?:checks?|tests?|evaluations?)\b": "run",
    r"\bmeanwhile\.": "during this call, in the meantime",
    r"\botherwise than\b": "differently",
    r"\bmodel takes\b": "the model supports",
    r"\bat once, (?:also|even)\b": "immediately",
}


def test_texts_have_no_phrases_of_another_language():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    files = {path: path.read_text(encoding="utf-8") for path in (*SOURCE.rglob("*.py"), *pages)}
    # Without the line breaks and quotes between the parts of a text.
    prose = {path: re.sub(r'["\s]+', " ", text) for path, text in files.items()}
    violations = [
        f"{path.relative_to(ROOT)}: {match[0]}: write {word}"
        for path, text in prose.items()
        for phrase, word in PHRASES.items()
        for match in re.finditer(phrase, text)
    ]
    assert not violations, "\n".join(violations)


def test_messages_about_settings_without_effect_name_a_remedy():
    violations = [
        f"{path.name}:{line}: {text}"
        for folder in ("checks", "plan")
        for path in (SOURCE / folder).rglob("*.py")
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if text.startswith("has no effect") and not re.search(r"\b(Add|Remove|Set|Use)\b", text)
    ]
    assert not violations, "\n".join(violations)
