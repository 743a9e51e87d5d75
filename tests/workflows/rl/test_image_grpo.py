"""Prompts with images in train-grpo: sequences of a step, a run and refusals."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vision_models
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset
from msrl.errors import MsrlError
from msrl.models.families import rules_for
from msrl.models.vision.tensors import is_tower
from msrl.plan.run_plan import resolve
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.types import Completion, Reward, RolloutGroup, ScoredGroup
from msrl.workflows.evaluate import run as evaluation
from msrl.workflows.preprocess import run as preprocess
from msrl.workflows.rl import setup
from one_process import one_process
from support import mentions
from test_killed_grpo import at_step, killed_at
from test_rollout_families import save_small_model
from test_train_grpo import rollouts
from training_runs import metrics, run_training, write_config
from vision_folders import encoded, picture


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, and prompts of which every second one has an image.

    `text` are prompts without images.
    """
    return _make_inputs(tmp_path_factory.mktemp("grpo"), "qwen2.5-vl")


def _make_inputs(folder: Path, name: str) -> Path:
    model = vision_models.save_model(folder / "model", name)
    rows: list[dict[str, Any]] = []
    for number in range(8):
        data = base64.b64encode(encoded(picture(84, 56 + 28 * number, number))).decode()
        row = {"instruction": "<image>what?", "images": [f"data:image/png;base64,{data}"]}
        rows.append({**(row if number % 2 else {"instruction": "why?"}), "output": "a"})
    _preprocess(folder / "data", model, rows)
    _preprocess(folder / "text", model, rows[::2])
    return folder


def _preprocess(prefix: Path, model: Path, rows: list[dict[str, Any]]) -> None:
    file = prefix.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "input": [str(file)], "tokenizer": str(model), "handler": "r1", "template": "native",
        "output_prefix": str(prefix),
    }  # fmt: skip
    preprocess(Config.model_validate({"preprocess": keys}, strict=False))


def _settings(inputs: Path, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": "images", "dir": str(inputs / "runs"), "seed": 5},
        "model": {"path": str(inputs / "model"), "dtype": "float32"},
        "data": {"train": str(inputs / "data")},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 600.0},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_prompt_tokens": 160,
            "max_response_tokens": 6,
            "engine": {"max_num_seqs": 8},
        },
        "reward": {"sources": [{"verifier": "strict_format"}]},
        "train": {
            "steps": 2,
            "micro_batch": 4,
            "optimizer": {"lr": 1e-3},
            "vision": {"tower_lr": 1e-3},
        },
        "algo": {"kl": {"loss": {"coef": 0.1}}},
        **sections,
    }  # fmt: skip


@pytest.mark.slow
def test_engine_and_ranks_agree_on_pictures_before_and_after_an_update(inputs: Path) -> None:
    """A trained tower reaches the engine: else the second step would have a gap."""
    name = {"name": "picture-run", "dir": str(inputs / "runs"), "seed": 5}
    data = {"train": str(inputs / "data"), "eval": str(inputs / "data")}
    settings = _settings(inputs, run=name, data=data, eval={"every_steps": 2})
    with one_process(inputs) as workers:
        file = write_config(inputs / "picture-run.yaml", settings)
        (problem,) = workers.call("run", "train-grpo", "-c", str(file))
    assert not problem, problem
    run = inputs / "runs" / "picture-run"
    first, second = metrics(run)
    assert first["rollout/logprob_gap"] < 1e-5 and second["rollout/logprob_gap"] < 1e-5
    rows = [json.loads(line) for line in (run / "eval/step_000002.jsonl").open()]
    assert [len(row.get("images", ())) for row in rows] == [0, 1] * 4


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", ["internvl", "qwen3-vl moe"])
def test_engine_and_ranks_agree_on_pictures_of_other_models(name: str, tmp_path: Path) -> None:
    inputs = _make_inputs(tmp_path, name)
    first, second = metrics(run_training(inputs, _settings(inputs)))
    assert first["rollout/logprob_gap"] < 1e-5 and second["rollout/logprob_gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3.5, language model", "qwen3-next"])
def test_engine_and_ranks_agree_with_delta_networks(name: str, tmp_path: Path) -> None:
    """Train in bfloat16, which their engines on CPU need, with updates of more than one nat."""
    if name in vision_models.TOWERS:
        settings = _killable(_make_inputs(tmp_path, name), "delta")
    else:
        save_small_model(tmp_path / "model", name)
        rows = [{"instruction": f"{number}?", "output": "a"} for number in range(8)]
        _preprocess(tmp_path / "data", tmp_path / "model", rows)
        settings = _killable(tmp_path, "delta")
        del settings["train"]["vision"]
    settings["model"]["dtype"] = "bfloat16"
    settings["rollout"]["engine"]["prefix_cache"] = False
    steps = metrics(run_training(tmp_path, settings))
    assert len(steps) == 3 and all(step["train/grad_norm"] > 1 for step in steps)
    assert max(step["rollout/logprob_gap"] for step in steps) < 0.2


def _killable(inputs: Path, name: str) -> dict[str, Any]:
    """Return a run that trains the tower on varying rewards, four times per step, and saves it."""
    (inputs / "score.py").write_text(
        "def score(response: str) -> float:\n    return sum(map(ord, response)) % 7 / 6\n"
    )
    train = {
        **_settings(inputs)["train"],
        "steps": 3,
        "updates": {"samples_per_update": 4, "epochs": 2},
        "vision": {"tower_lr": 1e-3, "projector_lr": 1e-3},
    }
    return _settings(
        inputs,
        run={"name": name, "dir": str(inputs / "runs"), "seed": 5},
        reward={"sources": [{"function": f"{inputs}/score.py:score"}]},
        train=train,
        checkpoint={"every_steps": 1, "resume": "auto"},
    )


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_run_with_a_trained_tower_equals_the_uninterrupted_one(inputs: Path) -> None:
    whole = run_training(inputs, _killable(inputs, "whole"))
    run = inputs / "runs" / "killed"
    killed = killed_at(inputs, _killable(inputs, "killed"), [(at_step(run, 2), 0.0)])
    assert metrics(run) == metrics(whole) and len(metrics(whole)) == 3
    assert killed.lives[0] == metrics(whole)[: len(killed.lives[0])]
    for step in (1, 2, 3):
        assert rollouts(run, step) == rollouts(whole, step)
    saved = [SavedTraining(each / "checkpoints", 3) for each in (whole, run)]
    assert saved[0].state() == saved[1].state()  # with the checksums of weights and moments
    sources = open_weights(inputs / "model"), open_mcore(saved[0].root)
    of_tower = next(rule for rule in rules_for(sources[0].shape).first if is_tower(rule))
    before, after = (source.hf_tensors(of_tower)[0] for source in sources)
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"environment": {"name": "single_turn"}}, "environment"),
        ({"algo": {"advantage": {"estimator": "gae"}}}, "algo.advantage.estimator"),
        ({"reward": {"sources": [{"model": "scores"}]}}, "reward.sources"),
    ],
)
def test_parts_of_a_run_that_read_no_images_are_refused(
    inputs: Path, sections: dict[str, Any], key: str
) -> None:
    config = Config.model_validate(_settings(inputs, **sections), strict=False)
    with pytest.raises(MsrlError, match=mentions(key, "images")):
        setup.prepare(resolve(config, "train-grpo"))


def test_an_evaluation_with_an_environment_refuses_images(inputs: Path) -> None:
    models = {"models": [str(inputs / "model")], "output": str(inputs / "out")}
    data = {"eval": str(inputs / "data")}
    sections = {"environment": {"name": "single_turn"}, "evaluate": models, "data": data}
    config = Config.model_validate(_settings(inputs, **sections), strict=False)
    with pytest.raises(MsrlError, match=mentions("environment", "images")):
        evaluation.prepare(config)


def test_keys_of_images_are_refused_for_prompts_of_text(inputs: Path) -> None:
    settings = _settings(inputs, data={"train": str(inputs / "text")})
    config = Config.model_validate(settings, strict=False)
    with pytest.raises(MsrlError, match=mentions("train.vision.tower_lr", "images")):
        setup.prepare(resolve(config, "train-grpo"))


def test_prompts_with_more_patches_than_a_micro_batch_are_refused(inputs: Path) -> None:
    train = {"steps": 1, "max_tokens_per_micro_batch": 999, "max_patches_per_micro_batch": 9}
    config = Config.model_validate(_settings(inputs, train=train), strict=False)
    with pytest.raises(MsrlError, match=mentions("max_patches_per_micro_batch=9", "patches")):
        setup.prepare(resolve(config, "train-grpo"))


def test_the_sequences_of_a_step_have_the_pictures_of_their_prompts(inputs: Path) -> None:
    prompts = [PromptDataset(str(inputs / "data"))[number] for number in range(2)]
    completion = Completion(np.array([9, 2]), np.zeros(2, np.float32), "stop", 0, "")
    groups = [
        ScoredGroup(RolloutGroup(prompt, (completion,) * 2), (Reward(1.0, {}), Reward(0.0, {})))
        for prompt in prompts
    ]
    sequences = rollout_arrays(groups).sequences
    assert sequences.images is not None
    assert [len(images) for images in sequences.images] == [0, 0, 1, 1]
    assert sequences.images[2] == prompts[1].images
    assert rollout_arrays(groups[:1]).sequences.images is None
