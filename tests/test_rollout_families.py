"""Model families on a real vLLM engine: reference log-probabilities, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import families
import parity_ranks
import reference_models
import tiny_qwen2
from families import FAMILIES
from mixture_families import QWEN3_MOE
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.platforms import get
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from support import mentions
from test_families import transformers_logits


def _save(folder: Path, name: str) -> tuple[Path, dict]:
    """Save a model of the family with heads of 32 channels, the smallest that vLLM supports on CPU.

    Its vocabulary holds that of the byte tokenizer.
    """
    config = {**FAMILIES[name].config, "hidden_size": 128}
    config |= {key: 32 for key in ("head_dim", "kv_channels") if key in config}
    config |= {
        key: tiny_qwen2.VOCAB_SIZE for key in ("vocab_size", "padded_vocab_size") if key in config
    }
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
    folder, _ = _save(tmp_path, name)
    with pytest.raises(MsrlError, match=mentions("vLLM", reason)):
        VllmEngine(
            EngineSettings(folder, dtype="float32", engine=EngineConfig(max_model_len=64)),
            get("cpu"),
        )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma 2", "mistral v0.1", "glm 4", "glm 4 remote code"])
def test_the_engine_has_the_logprobs_of_the_reference(tmp_path: Path, name: str) -> None:
    folder, config = _save(tmp_path, name)
    reference, ids = FAMILIES[name].reference, parity_ranks.sequences(190)
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


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_engine_uses_the_experts_that_are_loaded_into_it(ep: int, tmp_path: Path) -> None:
    """Load the weights of a Qwen3 mixture twice into an engine with random weights, as after every
    update.
    """
    config = {**QWEN3_MOE, "hidden_size": 128, "vocab_size": tiny_qwen2.VOCAB_SIZE}
    weights = families.weights(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tiny_qwen2.make_tokenizer().save_pretrained(tmp_path)
    ids = parity_ranks.sequences(190)
    logits = (
        torch.from_numpy(np.asarray(transformers_logits(tmp_path, ids))).double().log_softmax(-1)
    )
    labels = torch.from_numpy(np.concatenate([np.append(row[1:], 0) for row in ids]))
    exact = logits.gather(-1, labels[:, None])[:, 0].split([len(row) for row in ids])
    engine = VllmEngine(
        EngineSettings(
            tmp_path,
            dtype="float32",
            random_weights=True,
            engine=EngineConfig(
                max_model_len=64, max_num_seqs=4, tp=ep, ep=ep, options={"max_logprobs": 7}
            ),
        ),
        get("cpu"),
    )
    assert engine._llm.llm_engine.model_config.max_logprobs == 7
    for _ in range(2):
        engine.load_weights(weights.items())
        for scores, row in zip(engine.score(ids), exact, strict=True):
            np.testing.assert_allclose(scores, row[:-1].numpy(), rtol=0, atol=1e-4)
    engine.close()
