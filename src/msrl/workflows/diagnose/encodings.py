"""Token ids of probe texts, to compare tokenizers and templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msrl.data.render import Renderer
from msrl.data.tokenizer import load_tokenizer
from msrl.types import Conversation, Message
from msrl.workflows.engine import choose_renderer

_TEXTS = {
    "text in English": "The quick brown fox jumps over 13 lazy dogs.",
    "text in Chinese": "\u6e05\u6668\u7684\u9633\u5149\u7167\u5728\u6cb3\u9762\u4e0a\u3002",
    "code": "def f(x):\n    return {'a': [x ** 2, 0.5]}\n",
}
_CONVERSATIONS = {
    "chat template": (Message("user", "Hello. How are you?"),),
    "chat template with several turns": (
        Message("user", "Count to two."),
        Message("assistant", "One, two."),
        Message("user", "Now to three."),
    ),
}
Encode = Callable[[str], Sequence[int]]


def rendered_encodings(renderer: Renderer, encode: Encode) -> dict[str, tuple[int, ...]]:
    """Return the token ids of texts by `encode`, and of conversations by a renderer."""
    texts = {name: tuple(encode(text)) for name, text in _TEXTS.items()}
    chats = {
        name: tuple(renderer.prompt(Conversation(messages)).tolist())
        for name, messages in _CONVERSATIONS.items()
    }
    return texts | chats


def folder_encodings(folder: Path, *, with_template: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the token ids by the tokenizer of transformers and the chat template of a folder.

    Conversations are missing without `with_template`, and if the folder has no chat template.
    """
    tokenizer = load_tokenizer(folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    encodings = rendered_encodings(choose_renderer(folder, None), encode)
    if not with_template or not getattr(tokenizer, "chat_template", None):
        encodings = {name: encodings[name] for name in _TEXTS}
    return encodings
