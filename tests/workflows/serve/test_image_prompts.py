"""Rows with images in `msrl generate`, and images in `msrl chat`, without an engine."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from msrl.config.schema import GenerateConfig
from msrl.data.render import Renderer
from msrl.errors import MsrlError
from msrl.rollout.engine import Piece
from msrl.types import Message, Prompt, SamplingParams
from msrl.workflows.engine import choose_renderer
from msrl.workflows.serve.chat import ChatPrompts, converse
from msrl.workflows.serve.generate import read_requests
from msrl.workflows.serve.images import ImagePrompts
from support import assert_mentions, mentions
from tiny_qwen2 import make_tokenizer
from vision_folders import encoded, picture, write_vision_model

IMAGE_TOKEN, TOKENS = 6, 12  # of an image of 112 x 84 pixels: 4 x 3
SAMPLING = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return choose_renderer(folder, None)


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "cat.png"
    path.write_bytes(encoded(picture(112, 84)))
    return path


def _rows(folder: Path, *rows: dict) -> GenerateConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return GenerateConfig(input=str(path))


def test_all_forms_of_a_row_give_the_same_prompt(
    folder: Path, renderer: Renderer, png: Path
) -> None:
    url = "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    section = _rows(
        png.parent,
        {"prompt": "<image>cat?", "images": ["cat.png"]},
        {"prompt": "<image>cat?", "image": str(png)},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "cat?"}]}]},
    )
    first, *others = read_requests(section, renderer, ImagePrompts.of(renderer))
    (placed,) = first.images
    assert placed.image.key == hashlib.sha256(png.read_bytes()).hexdigest()
    assert placed.image.data == png.read_bytes() and placed.image.grid == (1, 6, 8)
    is_image = first.token_ids == IMAGE_TOKEN
    assert np.flatnonzero(is_image).tolist() == [*range(placed.offset, placed.offset + TOKENS)]
    text = renderer.tokenizer.backend.decode(first.token_ids[~is_image].tolist())
    assert text.endswith("cat?\nassistant\n")
    for other in others:
        assert other.token_ids.tolist() == first.token_ids.tolist()
        assert other.images == first.images


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"prompt": "<image>cat?"}, "<image>"),
        ({"prompt": "cat?", "images": ["cat.png"]}, "1 in the column"),
        ({"prompt": "<image>cat?", "images": ["dog.png"]}, "dog.png"),
        ({"prompt": "<image>cat?", "images": ["http://localhost/cat.png"]}, "http://"),
    ],
)
def test_a_row_whose_images_cannot_be_used_is_refused(
    folder: Path, renderer: Renderer, png: Path, row: dict, word: str
) -> None:
    section = _rows(png.parent, {"prompt": "?"}, row)
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:2", word)):
        read_requests(section, renderer, ImagePrompts.of(renderer))


def test_a_model_without_a_tower_refuses_images(tmp_path: Path, png: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "text")
    renderer = choose_renderer(tmp_path / "text", None)
    section = _rows(png.parent, {"prompt": "<image>cat?", "images": ["cat.png"]})
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:1", "images", "vision tower")):
        read_requests(section, renderer)


class _Echo:
    """Engine that records its prompts."""

    max_model_len = 64

    def __init__(self) -> None:
        self.prompts = list[Prompt]()

    def stream(self, prompt: Prompt, sampling: SamplingParams):
        self.prompts.append(prompt)
        yield Piece("yes", "stop")


def test_a_picture_belongs_to_the_next_question_and_stays_in_the_conversation(
    folder: Path, renderer: Renderer, png: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = _Echo()
    prompts = ChatPrompts(renderer, images=ImagePrompts.of(renderer))
    lines = [f"/image {png}", "a", "b", "/clear", "c", f"/image {png}", "/clear", "d"]
    converse(engine, prompts, SAMPLING, lines)
    assert [len(prompt.images) for prompt in engine.prompts] == [1, 1, 0, 0]
    first, second = engine.prompts[:2]
    assert first.images == second.images
    assert (first.token_ids == IMAGE_TOKEN).sum() == TOKENS
    without = renderer.prompt(_conversation("c"))
    assert engine.prompts[2].token_ids.tolist() == without.tolist()
    assert_mentions(capsys.readouterr().err, "cat.png", "112 x 84")


def _conversation(text: str):
    from msrl.types import Conversation

    return Conversation((Message("user", text),))


def test_a_picture_that_cannot_be_read_is_named_and_the_chat_continues(
    folder: Path, renderer: Renderer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "long.png").write_bytes(encoded(picture(2000, 5)))
    engine = _Echo()
    lines = ["/image", *(f"/image {tmp_path / name}" for name in ("none", "text.png", "long.png"))]
    prompts = ChatPrompts(renderer, images=ImagePrompts.of(renderer))
    converse(engine, prompts, SAMPLING, [*lines, "a"])
    converse(engine, ChatPrompts(renderer), SAMPLING, [f"/image {tmp_path / 'text.png'}", "b"])
    assert [len(prompt.images) for prompt in engine.prompts] == [0, 0]
    notes = capsys.readouterr().err.splitlines()
    words = ("name a file", "none", "JPEG", "200", "vision tower")
    for note, word in zip(notes, words, strict=True):
        assert_mentions(note, "/image", word)
