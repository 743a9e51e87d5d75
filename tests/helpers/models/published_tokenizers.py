"""Published tokenizers of the real inputs, which take a second to open: once per worker."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from msrl.data.tokenizer import TextTokenizer, load_tokenizer, text_tokenizer
from support import shared_data


@cache
def published_tokenizer(name: str) -> Any:
    """Return a tokenizer of transformers; skip the test if the real inputs are absent."""
    return load_tokenizer(shared_data("tokenizers", name))


def with_chat_template(name: str, template: str, folder: Path) -> TextTokenizer:
    """Return a published tokenizer in a new folder with another chat template."""
    tokenizer = published_tokenizer(name)
    for file in Path(tokenizer.name_or_path).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)
    return replace(text_tokenizer(tokenizer), folder=str(folder))
