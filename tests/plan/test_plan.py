"""The plan of a run: paths, models and datasets, each read once."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from config_inputs import GENERATING, make_mcore, make_model, make_working_folder
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.data import tokenizer
from msrl.errors import MsrlError
from msrl.memory.estimate import memory_rows
from msrl.plan.run_plan import RunPlan, resolve
from msrl.platforms import get
from msrl.rewards.score import Scorer
from msrl.rewards.sources import Source
from msrl.workflows.preprocess import run as preprocess
from msrl.workflows.rl import setup as rl_setup
from msrl.workflows.sft.run import SftTask
from msrl.workflows.training import supervised
from msrl.workflows.training.integrity import verify_models
from msrl.workflows.training.memory_check import check_memory
from msrl.workflows.training.settings import loaded_models, rank_settings
from support import checked_plan, mentions
from tiny_qwen2 import VOCAB_SIZE, make_tokenizer

SCORES = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
SCORER = {"model": "scorer", "engine": "megatron", "name": "scorer"}
GRPO = {
    "model": {"path": "model"},
    "data": {"train": "prompts"},
    "rollout": {"prompts_per_step": 2, "max_prompt_tokens": 64, "max_response_tokens": 32},
    "algo": {"preset": "ppo"},
    "cluster": {"platform": "cpu", "roles": {"critic": {"load": "critic"}}},
    "reward": {"sources": [{"model": "judge"}, SCORER]},
    "train": {"steps": 1},
}
SFT = {
    "model": {"path": "model"},
    "data": {"train": "rows"},
    "cluster": {"platform": "cpu"},
    "train": {"steps": 1, "global_batch": 2},
}

_opened: list[Path] = []
_is_counting = False


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    is_config = event == "open" and str(arguments[0]).endswith("/config.json")
    if _is_counting and is_config and not _opens_tokenizer():
        _opened.append(Path(str(arguments[0])).absolute())


def _opens_tokenizer() -> bool:
    """Return True if msrl/data/tokenizer.py reads the type of the model."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__") == tokenizer.__name__:
            return True
    return False


@contextmanager
def opened_configs(folder: Path) -> Iterator[Counter[str]]:
    """Count the opened config.json by model folder. An audit hook cannot be removed."""
    global _is_counting
    counts = Counter[str]()
    if not _opened:
        sys.addaudithook(_count)
    _opened.clear()
    _is_counting = True
    try:
        yield counts
    finally:
        _is_counting = False
        counts.update(path.parent.relative_to(folder).as_posix() for path in _opened)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a policy, a critic, two reward models and data of both trainings."""
    monkeypatch.chdir(tmp_path)
    for name, changes in (
        ("model", GENERATING),
        ("critic", {}),
        ("judge", SCORES),
        ("scorer", SCORES),
    ):
        make_model(tmp_path / name, vocab_size=VOCAB_SIZE, **changes)
        make_tokenizer().save_pretrained(tmp_path / name)
    rows = [{"instruction": "ab", "output": "ba"}, {"instruction": "b", "output": "a"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for handler, prefix in (("alpaca", "rows"), ("r1", "prompts")):
        preprocess(
            Config.model_validate(
                {
                    "preprocess": {
                        "input": ["in.jsonl"],
                        "tokenizer": "model",
                        "handler": handler,
                        "template": "qwen",
                        "output_prefix": prefix,
                    }
                }
            )
        )
    (tmp_path / "sft.yaml").write_text(json.dumps(SFT))
    (tmp_path / "grpo.yaml").write_text(json.dumps(GRPO))
    return tmp_path


def show(plan: RunPlan) -> None:
    """Compute what a dry run prints."""
    assert memory_rows(plan)


def test_validation_and_setup_of_train_sft_read_the_config_of_the_model_once(folder: Path) -> None:
    with opened_configs(folder) as counts:
        plan = checked_plan(load(["sft.yaml"]), "train-sft")
        show(plan)
        job = supervised.prepare(plan, get("cpu"), SftTask())
        check_memory(plan, get("cpu"), longest=job.train.longest)
        verify_models(loaded_models(plan, job.resume))
    assert counts == {"model": 1}


def test_validation_and_setup_of_train_grpo_read_every_config_once(folder: Path) -> None:
    with opened_configs(folder) as counts:
        plan = checked_plan(load(["grpo.yaml"]), "train-grpo")
        show(plan)
        job = rl_setup.prepare(plan)
        check_memory(plan, job.platform)
        verify_models(loaded_models(plan, job.resume))
        sources = [Source.of(section) for section in plan.config.reward.sources]
        scorer = Scorer(sources, 1, read_config=plan.hf_config)
        names = {name: Path(model.path) for name, model in scorer.rank_models.items()}
        rank_settings(plan, "cpu", reward_models=names)
    assert counts == {"model": 1, "critic": 1, "judge": 1, "scorer": 1}


def test_a_plan_is_frozen_and_its_paths_are_absolute(folder: Path) -> None:
    plan = resolve(load(["grpo.yaml"]).config, "train-grpo")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.world_size = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert plan.critic is not None
    paths = (plan.model.weights, plan.model.hf_dir, plan.critic.weights, plan.tokenizer_dir)
    assert all(path.is_absolute() for path in (*paths, plan.run_dir, plan.checkpoint_dir))


def test_a_critic_without_own_weights_is_the_policy_with_a_score_head(folder: Path) -> None:
    plan = resolve(load(["grpo.yaml"], ["cluster.roles.critic.load=null"]).config, "train-grpo")
    assert plan.critic is not None and plan.critic.weights == plan.model.weights
    assert plan.critic.require_shape().reward_head and not plan.shape.reward_head


def test_a_checkpoint_without_a_config_uses_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    load_path, path = str(tmp_path / "weights"), str(make_mcore(tmp_path / "mcore"))
    config = Config.model_validate({"model": {"path": path}, "checkpoint": {"load": load_path}})
    model = resolve(config, "train-sft").model
    assert model.weights == tmp_path / "weights" and model.hf_dir == tmp_path / "mcore" / "hf"
    assert model.shape is not None


def test_a_run_without_a_model_is_refused_where_the_model_is_needed(tmp_path: Path) -> None:
    plan = resolve(Config(), "train-sft")
    assert plan.shape_or_none is None and memory_rows(plan) == {}
    with pytest.raises(MsrlError, match=mentions("model.path", "not set")):
        _ = plan.shape


def test_an_unreadable_config_is_an_error_of_the_plan_and_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_working_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{")
    resolved = load(["sft.yaml"])
    plan = resolve(resolved.config, "train-sft")
    assert plan.shape_or_none is None and "config.json" in plan.model.error
    with pytest.raises(MsrlError, match=mentions("config.json", "JSON")):
        checked_plan(resolved, "train-sft")
