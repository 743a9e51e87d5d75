"""A vLLM engine with images: transformers' log-probabilities, new weights, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import vision_models
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.platforms import get
from msrl.rollout.engine import EngineImages, EngineSettings
from msrl.rollout.sleep import EngineMemory
from msrl.rollout.vllm import VllmEngine
from msrl.types import SamplingParams
from msrl.vision.settings import read_vision_settings
from support import mentions

pytestmark = pytest.mark.slow
ENGINE = EngineConfig(
    max_model_len=256, max_num_batched_tokens=256, max_num_seqs=8, options={"block_size": 32}
)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Running:
    """An engine, the folder of its first weights, and one with other weights."""

    engine: VllmEngine
    name: str
    folder: Path
    other: Path

    def load(self, seed: int) -> None:
        self.engine.load_weights(vision_models.weights(self.name, seed).items())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("qwen2-vl", marks=pytest.mark.full),
        pytest.param("qwen2.5-vl", marks=pytest.mark.full),
        "qwen3-vl",
        pytest.param("qwen3-vl moe", marks=pytest.mark.full),
        pytest.param("internvl", marks=pytest.mark.full),
    ],
)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("models")
    folder, other = (
        vision_models.save_model(root / str(seed), request.param, seed) for seed in (0, 1)
    )
    images = EngineImages(2, read_vision_settings(folder))
    settings = EngineSettings(
        folder, dtype="float32", engine=ENGINE, images=images, is_stepped=True
    )
    engine = VllmEngine(settings, get("cpu"))
    yield Running(engine, request.param, folder, other)
    engine.close()


def _scores(running: Running) -> list[np.ndarray]:
    rows = vision_models.prompts(running.folder)
    ids, images = [row.token_ids for row in rows], [row.images for row in rows]
    return list(running.engine.score(ids, images))


def _assert_equal(scores: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for row, exact in zip(scores, expected, strict=True):
        np.testing.assert_allclose(row, exact, rtol=0, atol=1e-5)


def test_new_weights_give_the_logprobs_of_transformers(running: Running) -> None:
    """Score images before and after an update, whose features and keys were cached."""
    rows = vision_models.prompts(running.folder)
    for seed, folder in enumerate((running.folder, running.other, running.folder)):
        if seed:
            running.load(seed % 2)
        _assert_equal(_scores(running), vision_models.logprobs(folder, rows))


def test_generated_tokens_have_the_logprobs_of_transformers(running: Running) -> None:
    """Generate twice: the second time, keys and features of all prompts are cached."""
    running.load(0)
    rows = vision_models.prompts(running.folder)
    groups = [running.engine.generate(rows, GREEDY, version) for version in (0, 1)]
    for group in groups:
        completions = [each.completions[0] for each in group]
        complete = [
            replace(row, token_ids=np.append(row.token_ids, completion.token_ids))
            for row, completion in zip(rows, completions, strict=True)
        ]
        expected = vision_models.logprobs(running.folder, complete)
        _assert_equal(
            [completion.logprobs for completion in completions],
            [
                logprobs[-len(c.token_ids) :]
                for logprobs, c in zip(expected, completions, strict=True)
            ],
        )
    first, second = (group[3].completions[0].logprobs for group in (groups[0], groups[1]))
    other = groups[0][4].completions[0].logprobs
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-5)
    assert np.abs(first[0] - other[0]) > 1e-3, "equal tokens with another image"


def test_running_requests_with_pictures_are_recomputed(running: Running) -> None:
    """Change the weights after the second token, as in asynchronous rollouts."""
    engine = running.engine
    running.load(0)
    (prompt,) = vision_models.prompts(running.folder)[:1]
    engine.add_request("a", prompt, GREEDY, 1, "salt")
    tokens, logprobs = list[int](), list[float]()
    for step in range(10):
        if len(tokens) == 2 and step < 5:
            running.load(1)
            engine.recompute_requests()
        for new in engine.step():
            tokens += new.token_ids.tolist()
            logprobs += new.logprobs.tolist()
    complete = replace(prompt, token_ids=np.append(prompt.token_ids, tokens))
    exact = [vision_models.logprobs(x, [complete])[0][-6:] for x in (running.folder, running.other)]
    _assert_equal([np.array(logprobs)], [np.append(exact[0][:2], exact[1][2:])])


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_has_the_features_of_its_weights(
    running: Running, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let vLLM's scheduler and caches sleep and wake; its worker on CPU keeps its memory."""
    engine = running.engine
    monkeypatch.setattr(engine, "_memory", EngineMemory(engine._llm, level))
    running.load(0)
    rows = vision_models.prompts(running.folder)
    expected = [vision_models.logprobs(x, rows) for x in (running.folder, running.other)]
    _assert_equal(_scores(running), expected[0])
    engine.sleep()
    engine.wake()
    _assert_equal(_scores(running), expected[0])
    engine.sleep(discard_weights=True)
    engine.wake(before_loading=True)
    running.load(1)
    _assert_equal(_scores(running), expected[1])


def test_pictures_that_do_not_fit_are_refused(running: Running) -> None:
    rows = vision_models.prompts(running.folder)
    two, (placed,) = rows[2], rows[0].images
    shifted = replace(rows[0], images=(replace(placed, offset=placed.offset + 1),))
    many = replace(two, images=(*two.images, two.images[0]))
    for prompt, word in ((shifted, "tokens"), (many, "at most 2")):
        with pytest.raises(MsrlError, match=mentions(f"prompt {prompt.index}", word)):
            running.engine.generate([prompt], GREEDY, 0)


def test_a_full_cache_of_images_does_not_change_the_samples(running: Running) -> None:
    """Compute the text before an image in one step and the image in the next.

    The engine computes at most two images per step. Of the first two prompts, it has the keys but
    for the last block, and no features. So their images are computed again, and those of the others
    must wait.
    """
    running.load(0)
    rows = [
        vision_models.make_prompt(
            index, [20, 2], [vision_models.picture(running.folder, index, 336, 308)], index
        )
        for index in range(6)
    ]
    sampling = replace(GREEDY, temperature=1.0, seed=3, num_samples=2)

    def sample(*indices: int) -> dict[int, list[list[int]]]:
        groups = running.engine.generate([rows[index] for index in indices], sampling, 0)
        return {
            index: [each.token_ids.tolist() for each in group.completions]
            for index, group in zip(indices, groups, strict=True)
        }

    alone = sample(0) | sample(1) | sample(4) | sample(5)
    together = sample(0, 1, 2, 3)
    alone |= sample(2) | sample(3)
    assert together == {index: alone[index] for index in together}


@pytest.mark.full
@pytest.mark.skipif(
    shutil.disk_usage("/dev/shm").free < 1 << 28,
    reason="vLLM on several devices needs 160 MiB of shared memory",
)
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "internvl"])
def test_an_engine_on_two_devices_reads_pictures(name: str, tmp_path: Path) -> None:
    folders = [vision_models.save_model(tmp_path / str(seed), name, seed) for seed in (0, 1)]
    images = EngineImages(2, read_vision_settings(folders[0]))
    settings = EngineSettings(
        folders[0], dtype="float32", engine=ENGINE.model_copy(update={"tp": 2}), images=images
    )
    engine = VllmEngine(settings, get("cpu"))
    running = Running(engine, name, *folders)
    rows = vision_models.prompts(folders[0])
    try:
        for seed, folder in enumerate(folders):
            running.load(seed)
            _assert_equal(_scores(running), vision_models.logprobs(folder, rows))
    finally:
        engine.close()


@pytest.mark.full
def test_an_engine_without_pictures_reads_text_only(tmp_path: Path) -> None:
    folder = vision_models.save_model(tmp_path, "qwen2.5-vl")
    engine = VllmEngine(EngineSettings(folder, dtype="float32", engine=ENGINE), get("cpu"))
    with_image, text = vision_models.prompts(folder)[:2]
    _assert_equal(list(engine.score([text.token_ids])), vision_models.logprobs(folder, [text]))
    with pytest.raises(MsrlError, match=mentions("images")):
        engine.generate([with_image], GREEDY, 0)
    engine.load_weights(vision_models.weights("qwen2.5-vl", 1).items())
    other = vision_models.save_model(tmp_path / "other", "qwen2.5-vl", 1)
    _assert_equal(list(engine.score([text.token_ids])), vision_models.logprobs(other, [text]))
    engine.close()
