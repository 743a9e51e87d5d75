"""Model families on a real vLLM engine: reference log-probabilities, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.glm.modeling_glm import GlmModel

import families
import parity_ranks
import reference_models
import tiny_qwen2
from families import FAMILIES
from llama_like import MINICPM3
from mixture_families import MIXTURES, QWEN3_MOE
from msrl.algorithms.packing import Sequences, has_all_routes
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.platforms import get
from msrl.rollout.engine import EngineSettings, NewTokens
from msrl.rollout.vllm import VllmEngine
from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from msrl.types import Prompt, Reward, RolloutGroup, SamplingParams, ScoredGroup
from prepared_steps import make_step
from replay_ranks import Replay
from support import mentions, python_path
from test_families import transformers_logits

FAMILY_ROWS = {**FAMILIES, **MIXTURES}
# Changes without which vLLM computes sequences of 64 tokens in another way, or has no kernel.
_CHANGES: dict[str, dict[str, object]] = {
    "phi 4 mini": {
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + number / 10 for number in range(12)],
            "long_factor": [1.0 + number for number in range(12)],
        },
    },
    "cohere 2": {"sliding_window": 64},
    "minicpm 3": {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "rope_scaling": {
            **MINICPM3["rope_scaling"],
            "original_max_position_embeddings": 64,
            "factor": 8.0,
        },
    },
}


def save_small_model(folder: Path, name: str) -> tuple[Path, dict]:
    """Save a model of the family with sizes that vLLM supports on CPU, most of them the smallest.

    Its vocabulary contains the byte tokenizer's.
    """
    config = {**FAMILY_ROWS[name].config, "hidden_size": 128}
    config |= {key: 32 for key in ("head_dim", "kv_channels") if key in config}
    config |= {key: 64 for key in ("linear_key_head_dim", "linear_value_head_dim") if key in config}
    if "kv_lora_rank" in config:
        config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if "swiglu_limit" in config:
        config["swiglu_limit"] = 7.0
    config |= {
        key: tiny_qwen2.VOCAB_SIZE for key in ("vocab_size", "padded_vocab_size") if key in config
    }
    config |= _CHANGES.get(name, {})
    families.save_model(folder, config)
    tiny_qwen2.make_tokenizer().save_pretrained(folder)
    return folder, config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("baichuan 2", "BaichuanForCausalLM"),
        ("internlm 2", "model_type internlm2"),
    ],
)
def test_a_family_that_vllm_cannot_serve_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    folder, _ = save_small_model(tmp_path, name)
    with pytest.raises(MsrlError, match=mentions("vLLM", reason)):
        VllmEngine(
            EngineSettings(folder, dtype="float32", engine=EngineConfig(max_model_len=64)),
            get("cpu"),
        )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("gemma 2", "gemma 3", "mistral v0.1", "glm 4", "glm 4 remote code", "glm 4 0414"),
        *("seed-oss", "qwen2 moe", "mixtral", "glm 4.5", "gpt-oss", "hunyuan 3", "glm 4.7 flash"),
        *("deepseek v2 lite", "deepseek v2", "deepseek v3", "kimi k2"),
        *("smollm 3", "olmo 3", "phi 4 mini", "granite 3", "ernie 4.5", "hunyuan v1", "exaone 4"),
        *("cohere 2", "minicpm 3"),
    ],
)
def test_the_engine_has_the_logprobs_of_the_reference(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("__init__", "__call__"):  # vLLM changes this class for the whole process
        monkeypatch.setattr(GlmModel, method, getattr(GlmModel, method))
    folder, config = save_small_model(tmp_path, name)
    reference, ids = FAMILY_ROWS[name].reference, parity_ranks.sequences(190)
    if reference == "transformers":
        logits = transformers_logits(folder, ids)
    else:
        logits = getattr(reference_models, reference)(config, families.weights(config), ids)
    engine = VllmEngine(
        EngineSettings(
            folder, dtype="float32", engine=EngineConfig(max_model_len=64, max_num_seqs=4)
        ),
        get("cpu"),
    )
    scores = engine.score(ids)
    engine.close()
    start = 0
    for row, logprobs in zip(ids, scores, strict=True):
        exact = (
            torch.from_numpy(np.asarray(logits[start : start + len(row) - 1]))
            .double()
            .log_softmax(-1)
        )
        picked = exact.gather(-1, torch.from_numpy(row[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(logprobs, picked, rtol=0, atol=1e-4)
        start += len(row)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "qwen3.5 moe"])
def test_an_engine_with_delta_networks_is_as_exact_as_bfloat16(tmp_path: Path, name: str) -> None:
    """Compare new weights with transformers, whose own error in bfloat16 is the tolerance."""
    folder, config = save_small_model(tmp_path, name)
    ids, weights = parity_ranks.sequences(190), families.weights(config)
    exact, rounded = (_logprobs(folder, ids, dtype) for dtype in (torch.float32, torch.bfloat16))
    tolerance = 2 * np.abs(exact - rounded).mean()
    engine = VllmEngine(
        EngineSettings(
            folder,
            dtype="bfloat16",
            random_weights=True,
            engine=EngineConfig(max_model_len=64, max_num_seqs=4, prefix_cache=False),
        ),
        get("cpu"),
    )
    for scale in (1.0, 0.5, 1.0):
        engine.load_weights((key, (scale * value).bfloat16()) for key, value in weights.items())
        error = np.abs(np.concatenate(engine.score(ids)) - exact).mean()
        assert (error < tolerance) == (scale == 1.0), (error, tolerance)
    groups = engine.generate([Prompt(0, ids[0])], replace(SAMPLING, with_routes=False), 0)
    for sample in groups[0].completions:
        scores = engine.score([np.concatenate((ids[0], sample.token_ids))])[0]
        assert np.abs(scores[len(ids[0]) - 1 :] - sample.logprobs).mean() < tolerance
    engine.close()


def _logprobs(folder: Path, ids: Sequence[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """Return transformers' log-probabilities of every token but the first of each row."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    results = list[np.ndarray]()
    for row in map(torch.from_numpy, ids):
        with torch.inference_mode():
            logits = model(row[None]).logits[0, :-1].double().log_softmax(-1)
        results.append(logits.gather(-1, row[1:, None])[:, 0].numpy())
    return np.concatenate(results)


@dataclass(frozen=True)
class Mixture:
    """An engine with a Qwen3 mixture that records routes, the folder and weights of the model."""

    engine: VllmEngine
    folder: Path
    weights: Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    folder = tmp_path_factory.mktemp("mixture")
    config = {**QWEN3_MOE, "hidden_size": 128, "vocab_size": tiny_qwen2.VOCAB_SIZE}
    weights = families.weights(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_qwen2.make_tokenizer().save_pretrained(folder)
    settings = EngineSettings(
        folder,
        dtype="float32",
        random_weights=True,
        records_routes=True,
        is_stepped=True,
        engine=EngineConfig(max_model_len=128, max_num_seqs=6, options={"block_size": 32}),
    )
    engine = VllmEngine(settings, get("cpu"))
    yield Mixture(engine, folder, weights)
    engine.close()


@pytest.mark.full
@pytest.mark.slow
def test_the_engine_uses_the_experts_that_are_loaded_into_it(mixture: Mixture) -> None:
    """Load the weights of a Qwen3 mixture twice into an engine with random weights, as after every
    update.
    """
    ids = parity_ranks.sequences(190)
    logits = torch.from_numpy(np.asarray(transformers_logits(mixture.folder, ids))).double()
    logits = logits.log_softmax(-1)
    labels = torch.from_numpy(np.concatenate([np.append(row[1:], 0) for row in ids]))
    exact = logits.gather(-1, labels[:, None])[:, 0].split([len(row) for row in ids])
    for _ in range(2):
        mixture.engine.load_weights(mixture.weights.items())
        for scores, row in zip(mixture.engine.score(ids), exact, strict=True):
            np.testing.assert_allclose(scores, row[:-1].numpy(), rtol=0, atol=1e-4)


SAMPLING = SamplingParams(max_tokens=24, num_samples=3, seed=1, ignore_eos=True, with_routes=True)


def _prompts() -> list[Prompt]:
    """Return prompts of several lengths, one of them longer than two blocks of the cache."""
    numbers = np.random.default_rng(4)
    return [Prompt(i, numbers.integers(0, 259, size)) for i, size in enumerate((5, 33, 80))]


def _run_in_steps(engine: VllmEngine, prompts: Sequence[Prompt]) -> dict[str, NewTokens]:
    """Sample one response per prompt, and compute all keys and values again in the middle.

    Returns the joined tokens of each request.
    """
    for prompt in prompts:
        engine.add_request(f"request {prompt.index}", prompt, SAMPLING, prompt.index, "0")
    engine.add_request("aborted", prompts[0], SAMPLING, 9, "0")
    finished: dict[str, NewTokens] = {}
    responses: dict[str, list[np.ndarray]] = {}
    for number in range(200):
        if number == 8:
            engine.abort_requests(["aborted"])
            engine.recompute_requests()
        for new in engine.step():
            responses.setdefault(new.request, []).append(new.token_ids)
            if new.finish_reason is not None:
                joined = np.concatenate(responses[new.request])
                finished[new.request] = replace(new, token_ids=joined)
        if len(finished) == len(prompts):
            break
    return finished


def _samples(groups: Sequence[RolloutGroup]) -> Sequences:
    """Return all responses with their routes and the fields of a policy loss."""
    scored = [
        ScoredGroup(group, tuple(Reward(1.0, {}) for _ in group.completions)) for group in groups
    ]
    num_tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    batch = make_step(scored, np.ones(num_tokens)).sequences
    assert has_all_routes(batch)
    sampler = batch.fields["sampler_logprobs"]
    return batch._replace(
        fields={**batch.fields, "old_logprobs": sampler, "reference_logprobs": sampler}
    )


@pytest.mark.slow
def test_the_trainer_replays_the_routes_of_the_engine(mixture: Mixture) -> None:
    """Compare routes of generation, of the prefix cache and of steps with the trainer's."""
    engine, prompts = mixture.engine, _prompts()
    engine.load_weights(mixture.weights.items())
    groups = engine.generate(prompts, SAMPLING, 0)
    cached = engine.generate(prompts, SAMPLING, 0)
    assert (
        engine.generate(prompts[:1], replace(SAMPLING, with_routes=False), 0)[0]
        .completions[0]
        .routes
        is None
    )
    for first, second in zip(groups, cached, strict=True):
        for own, again in zip(first.completions, second.completions, strict=True):
            np.testing.assert_array_equal(own.token_ids, again.token_ids)
            np.testing.assert_array_equal(np.sort(own.routes), np.sort(again.routes))
    stepped = _run_in_steps(engine, prompts)
    batch = _samples(groups)
    assert batch.routes is not None
    in_steps = tuple(
        np.concatenate((prompt.token_ids, stepped[f"request {prompt.index}"].token_ids))
        for prompt in prompts
    )
    step_routes = tuple(stepped[f"request {prompt.index}"].routes for prompt in prompts)
    everything = Sequences(
        (*batch.token_ids, *in_steps),
        (*batch.loss_masks, *(np.zeros(len(ids), np.bool_) for ids in in_steps)),
        {
            name: (*rows, *(np.zeros(len(ids), np.float32) for ids in in_steps))
            for name, rows in batch.fields.items()
        },
    )
    recorded_routes = (*batch.routes, *[rows for rows in step_routes if rows is not None])
    layout = Layout(tp=2, ep=2, etp=1)
    case = Replay(
        "tp2", mixture.folder, layout, batch=everything, routes=recorded_routes, temperature=1.0
    )
    (result,) = run_ranks(
        "replay_ranks:main",
        [case],
        num_ranks=2,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    for own, recorded in zip(recorded_routes, result.routes, strict=True):
        assert own.dtype == recorded.dtype and len(own) == len(recorded) - 1
        is_same = (np.sort(own) == np.sort(recorded[:-1])).all(-1)
        assert is_same.mean() > 0.99
    for values, sampler, mask in zip(
        result.replayed, everything.fields["sampler_logprobs"], everything.loss_masks, strict=True
    ):
        np.testing.assert_allclose(values[mask], sampler[mask], rtol=0, atol=1e-4)
    first, second = (report["router_disagreement"] for report in result.reports)
    assert first < 0.01 < second
