"""Images in `msrl eval`, `chat` and `serve`, beside the answers of one engine."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vision_folders
import vision_models
from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset
from msrl.platforms import get
from msrl.rollout.engine import EngineImages, EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.types import Prompt, SamplingParams
from msrl.vision.settings import read_vision_settings
from msrl.workflows import preprocess
from msrl.workflows.engine import choose_renderer
from msrl.workflows.evaluate import engines
from msrl.workflows.evaluate import run as evaluation
from msrl.workflows.serve.chat import ChatPrompts, converse
from msrl.workflows.serve.images import ImagePrompts
from served_commands import Server
from support import mentions
from vision_folders import encoded, picture

pytestmark = pytest.mark.slow
QUESTION, NUM_TOKENS = "cat?", 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, stop_token_ids=(2,))


@pytest.fixture(
    scope="module", params=["qwen2.5-vl", pytest.param("internvl", marks=pytest.mark.full)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, whose template renders images, an image, and two prompts."""
    folder, is_tiled = tmp_path_factory.mktemp("images"), request.param == "internvl"
    template = vision_folders.TILED_TEMPLATE if is_tiled else vision_folders.TEMPLATE
    model = vision_models.save_model(folder / "model", request.param, template=template)
    (folder / "cat.png").write_bytes(encoded(picture(112, 84)))
    rows = [
        {"instruction": f"<image>{QUESTION}", "images": ["cat.png"], "output": "a"},
        {"instruction": "why?", "output": "b"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "input": [str(folder / "rows.jsonl")], "tokenizer": str(model), "handler": "alpaca",
        "template": "native", "kind": "prompts", "output_prefix": str(folder / "held"),
    }  # fmt: skip
    preprocess.run(Config.model_validate({"preprocess": keys}, strict=False))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    model = folder / "model"
    settings = EngineSettings(
        model, dtype="float32", images=EngineImages(2, read_vision_settings(model))
    )
    changes = {"max_model_len": 256, "max_num_seqs": 8}
    settings = replace(settings, engine=settings.engine.model_copy(update=changes))
    engine = VllmEngine(settings, get("cpu"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return list(PromptDataset(str(folder / "held")))


def test_rows_with_images_are_evaluated(
    folder: Path, engine: VllmEngine, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[EngineSettings]()

    @contextlib.contextmanager
    def running(_config: object, _source: object, settings: EngineSettings) -> Iterator[VllmEngine]:
        started.append(settings)
        yield engine

    monkeypatch.setattr(engines, "running_engine", running)
    values: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"eval": str(folder / "held")},
        "rollout": {"max_prompt_tokens": 100, "max_response_tokens": NUM_TOKENS},
        "reward": {"sources": [{"verifier": "exact_match"}]},
        "evaluate": {"models": [str(folder / "model")], "output": str(folder / "out")},
    }
    evaluation.run(Config.model_validate(values))
    expected = [group.completions[0] for group in engine.generate(prompts, GREEDY, 0)]
    rows = [json.loads(line) for line in (folder / "out/samples/model.jsonl").open()]
    assert [row["response_ids"] for row in rows] == [one.token_ids.tolist() for one in expected]
    for row, one in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row["logprobs"], one.logprobs, rtol=0, atol=1e-5)
    (settings,) = started
    assert settings.images is not None
    assert settings.images.vision == read_vision_settings(folder / "model")


def test_the_question_of_a_chat_has_the_image_of_a_row(
    folder: Path, engine: VllmEngine, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stream = list[Prompt](), engine.stream

    def recorded(prompt: Prompt, sampling: SamplingParams) -> Any:
        asked.append(prompt)
        return stream(prompt, sampling)

    monkeypatch.setattr(engine, "stream", recorded)
    renderer = choose_renderer(folder / "model", None)
    chat = ChatPrompts(renderer, images=ImagePrompts.of(renderer))
    converse(engine, chat, GREEDY, [f"/image {folder / 'cat.png'}", QUESTION])
    first, second = (
        group.completions[0] for group in engine.generate([asked[0], prompts[0]], GREEDY, 0)
    )
    assert first.token_ids.tolist() == second.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, second.logprobs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    model = str(folder / "model")
    server = Server(
        tmp_path_factory.mktemp("server") / "log", model, "--dtype", "float32", "--max-images", "2"
    )
    yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    server.command.kill()


def _data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _ask(client: Any, *urls: str) -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": QUESTION}]
    return client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": content}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )


@pytest.mark.full
def test_a_served_model_reads_the_pixels_of_a_row(
    folder: Path, engine: VllmEngine, prompts: list[Prompt], client: Any
) -> None:
    answer = _ask(client, _data_url((folder / "cat.png").read_bytes()))
    (group, _) = engine.generate(prompts, GREEDY, 0)
    expected = group.completions[0]
    assert answer.prompt_token_ids == prompts[0].token_ids.tolist()
    assert answer.choices[0].token_ids == expected.token_ids.tolist()
    logprobs = [each.logprob for each in answer.choices[0].logprobs.content]
    np.testing.assert_allclose(logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.full
def test_images_that_a_server_does_not_read_are_errors_of_the_client(
    folder: Path, client: Any
) -> None:
    openai = pytest.importorskip("openai")
    png = (folder / "cat.png").read_bytes()
    tiff, url = io.BytesIO(), _data_url(png)
    picture(112, 84).save(tiff, "TIFF")
    refused = {
        ("http://127.0.0.1:1/cat.png",): ("127.0.0.1", "serve.image_hosts", "data URL"),
        (f"file://{folder / 'cat.png'}",): ("image_url", "files"),
        ("data:image/png,abc",): ("image_url", "base64"),
        (_data_url(b"%PDF-1.7"),): ("image_url", "not an image"),
        (_data_url(png[: len(png) // 2]),): ("image_url", "damaged"),
        (_data_url(tiff.getvalue()),): ("image_url", "JPEG"),
        (url, url, url): ("2",),
    }
    for urls, words in refused.items():
        with pytest.raises(openai.BadRequestError, match=mentions(*words)):
            _ask(client, *urls)
