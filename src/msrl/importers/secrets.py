"""Secrets in files of other systems, by the names of variables and keys and by the form of texts.

A value of a variable whose name shows that it is a secret is written as `${env:NAME}`. A literal
secret is refused, and printed as ***.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from msrl.importers.table import canonical

_WORDS = re.compile(r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|API_?KEY|ACCESS_?KEY")
# First words of names that end with KEY or TOKEN and are columns, lengths or special tokens.
_ORDINARY = frozenset({
    "INPUT", "OUTPUT", "LABEL", "LABELS", "PROMPT", "PROMPTS", "QUESTION", "ANSWER", "RESPONSE",
    "QUERY", "SYSTEM", "TOOL", "TOOLS", "TEXT", "MESSAGE", "MESSAGES", "CHOSEN", "REJECTED",
    "IMAGE", "IMAGES", "AUDIO", "AUDIOS", "VIDEO", "VIDEOS", "REWARD", "MAP", "JSON", "DATA",
    "DATASET", "COLUMN", "GROUP", "MERGE", "SORT", "REFERENCE", "MEMORY", "TAG", "DOMAIN",
    "SOURCE", "METRIC", "CONFIG", "PAD", "EOS", "BOS", "UNK", "MASK", "PLACEHOLDER", "SEP",
    "CLS", "STOP", "END", "START", "SPECIAL", "THINK", "PREFIX", "SUFFIX", "MIDDLE", "EOD",
    "MAX", "MIN", "PER", "NUM", "NEW", "FIRST", "LAST", "LOSS", "CUT", "LEN", "BEGIN",
    "ADDITIONAL", "SEQ", "KEYWORD", "TRIGGER",
})  # fmt: skip
# Tokens of services, JSON web tokens, and passwords in addresses and headers.
_LITERAL = re.compile(
    r"(?:(?<![^\W_])(?:hf|ghp|gho|ghs|github_pat|glpat)|\b(?:xox[abprs]|sk|pk|rk))[-_][\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=://)[^/\s:@${}]*:[^/\s@${}]+(?=@)"
    r"|(?<=[?&])(?:api_?key|key|token|access_token|auth|secret|password|sig|signature)=[^&\s${}]+"
    r"|\b(?:Bearer|Basic) +[\w.~+/=-]{8,}",
    re.I,
)
_HEX_KEY = re.compile(r"(?:local-)?[0-9a-f]{40}", re.I)  # the keys of W&B


def is_secret_name(name: str) -> bool:
    """Return True if the name of a variable or key shows that its value is a secret.

    >>> [is_secret_name(name) for name in ("WANDB_API_KEY", "HF_TOKEN", "label_key", "MAX_TOKENS")]
    [True, True, False, False]
    """
    upper = canonical(name).upper()
    *before, last = upper.split("_")
    ends = last in ("KEY", "TOKEN", "PAT", "PWD", "PASS")
    is_ordinary = any(word in _ORDINARY for word in before) or upper in ("PWD", "OLDPWD")
    return _WORDS.search(upper) is not None or (ends and not is_ordinary)


def holds_secret(value: object) -> bool:
    """Return True if a value, or an item of it, is or contains a literal secret."""
    if isinstance(value, dict):
        return any(holds_secret(item) for item in cast("dict[str, object]", value).values())
    if isinstance(value, (list, tuple)):
        return any(holds_secret(item) for item in cast("Iterable[object]", value))
    if not isinstance(value, str):
        return False
    return _HEX_KEY.fullmatch(value.strip()) is not None or _LITERAL.search(value) is not None


def is_secret(name: str, value: object) -> bool:
    """Return True if the name or the value of a variable shows that it is a secret."""
    return is_secret_name(name) or holds_secret(value)


def mask_secrets(text: str) -> str:
    """Return a text with *** in place of literal secrets.

    >>> masked("https://me:pw@host/x?token=abc&n=1")
    'https://***@host/x?***&n=1'
    """
    words = re.compile(r"(?<![\w/.-])(?:local-)?[0-9a-f]{40}(?![\w/.-])", re.I)
    return words.sub("***", _LITERAL.sub("***", text))


def reference(name: str) -> str:
    """Return the reference to an environment variable, which the loader replaces by its value."""
    return f"${{env:{name}}}"


REFUSAL = (
    "holds a secret, which is not written to files. Export a variable and refer to it: $NAME in a "
    "script, ${oc.env:NAME} in YAML."
)
