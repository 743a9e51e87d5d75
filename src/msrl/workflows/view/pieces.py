"""Text of single tokens, for pages that show a value per token.

A token of a byte-level vocabulary may hold a part of a character. Such tokens are lists of bytes,
which the page joins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.packages import missing_package
from msrl.workflows.view.recorded import is_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Piece = str | list[int]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """Texts of the tokens of one tokenizer, looked up once per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._bytes = byte_alphabet() if "ByteLevel" in json.dumps(decoder) else None

    def pieces(self, token_ids: Iterable[int]) -> dict[int, Piece]:
        """Return the texts of tokens; an unknown token has none."""
        texts = {number: self._piece(number) for number in token_ids}
        return {number: piece for number, piece in texts.items() if piece is not None}

    def _piece(self, number: int) -> Piece | None:
        if number in self._added:
            return self._added[number]
        token = self._tokenizer.id_to_token(number)
        if token is None:
            return None
        if self._bytes is None:
            byte = _BYTE.fullmatch(token)
            return [int(byte[1], 16)] if byte else token.replace("\u2581", " ")
        if any(character not in self._bytes for character in token):
            return token
        return _text_or_bytes(bytes(self._bytes[character] for character in token))


def byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that represent them in byte-level vocabularies (GPT-2).

    Printable bytes represent themselves. The others have the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    plain = {chr(byte): byte for byte in printable}
    return plain | {chr(0x100 + index): byte for index, byte in enumerate(unprintable)}


def open_pieces(folders: Iterable[Path]) -> TokenPieces | None:
    """Return the texts of the first folder that has a usable tokenizer, or None."""
    for folder in folders:
        if is_folder(folder):
            try:
                return TokenPieces(open_tokenizer(folder).backend)
            except MsrlError:
                continue
            except ModuleNotFoundError as error:
                note = missing_package(error)
                if note is None:
                    raise
                print_note(f"pages show tokens by their numbers. {note}")
                return None
    return None


def _text_or_bytes(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
