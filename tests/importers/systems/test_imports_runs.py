"""Shipped files of other systems train a tiny model for two steps; ten files of each system.

The checkouts are the same as for the oracles. Only paths, sizes and devices are changed. One
process runs all files (`one_process.py`). The advantages of GRPO and its kin, and the prompts of
fine-tuning, are compared with the originals' functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import mindspeed_oracle
import mindspeed_rl_oracle
import roll_oracle
import verl_oracle
from answering_model import save_answering_model
from msrl.importers.command import native_yaml, translate_arguments
from msrl.workflows.import_config import validate
from one_process import one_process
from test_imports_prompts import expected_ids
from training_runs import rows

pytestmark = [pytest.mark.full, pytest.mark.slow]
MOVES = ("Left", "Down", "Right")  # in grid games
# Every verifier and every game reads its format in one of these texts. A third of them is right.
ANSWERS = [
    f"<think>\n<answer>{move}</answer>\n#### {n}\nAnswer: {n}\n</think>"
    f"<answer>\\boxed{{{n}}}</answer>"
    for n, move in enumerate(MOVES)
]
SPECIALS = ["<用户>", "<AI>"]  # of templates


def problems(source: str) -> list[dict[str, Any]]:
    """Return rows in verl's format."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i}%3="}],
            "reward_model": {"style": "rule", "ground_truth": str(i % 3)},
        }
        for i in range(24)
    ]


DATA: dict[str, list[dict[str, Any]]] = {
    "problems": problems("openai/gsm8k"),
    "deepmath": problems("deepmath_103k"),
    "alpaca": [
        {"instruction": f"{i}%3=", "input": "", "output": f"{i % 3}"} for i in range(16)
    ],
    "text": [{"text": f"{i}%3={i % 3}"} for i in range(16)],
    "pairs": [
        {"system": "s", "question": f"{i}%3=", "chosen": f"{i % 3}", "rejected": "no"}
        for i in range(8)
    ],
}  # fmt: skip
COMMON: dict[str, Any] = {  # sizes and paths of this machine, in place of the files' values
    "cluster.platform": "cpu", "cluster.nodes": 1, "cluster.devices_per_node": 1,
    "cluster.env": "null", "model.path": "tiny", "model.tokenizer": "null",
    "model.template": "null",
    "model.dtype": "float32", "checkpoint.load": "null", "checkpoint.resume": "none",
    "checkpoint.save": "null", "checkpoint.every_steps": "null", "train.steps": 2,
    "train.epochs": "null",
    "train.parallel": "null", "train.offload": "null", "train.recompute": "null",
    "train.router": "null", "data.eval": "null",
    "log.trackers": "[]", "log.options": "null", "eval": "null", "run.dir": "runs",
}  # fmt: skip
TUNE: dict[str, Any] = {
    **COMMON, "train.global_batch": 4, "data.seq_length": 256,
}  # fmt: skip
SMALL = {"train.micro_batch": 2}
# All games end alike after two turns; the teacher is the policy.
WITHOUT_GRADIENT = ("agentic_val_sokoban", "onpolicy_distill_config")
RL: dict[str, Any] = {
    **COMMON, "data.train": "problems.parquet",
    "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
    "rollout.max_prompt_tokens": 64, "rollout.max_response_tokens": 8,
    "train.updates.samples_per_update": 8, "rollout.engine": "null",
    "rollout.engine.max_model_len": 2048, "rollout.engine.kv_cache_bytes": 50_000_000,
}  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """Runs of one process in a folder."""

    folder: Path
    call: Callable[..., list[str]]

    def msrl(self, command: str, *arguments: str, **changes: Any) -> None:
        """Run a command with other values of some keys."""
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        (problem,) = self.call("run", command, *arguments, *words)
        assert not problem, problem

    def import_file(self, system: str, file: Path, command: str) -> Path:
        """Import a file and return the native one."""
        translation = translate_arguments(system, [str(file)], approximate=True)
        validation = validate(translation)
        assert command in validation.commands and not validation.errors, validation.errors
        native = self.folder / f"{file.parent.name}-{file.stem}.yaml"
        native.write_text(without_paths(native_yaml(translation)), encoding="utf-8")
        return native

    def train(self, command: str, system: str, file: Path, **changes: Any) -> Path:
        """Train with an imported file for two steps; return the run's folder."""
        native = self.import_file(system, file, command)
        self.msrl(command, "-c", native.name, **changes, **{"run.name": native.stem})
        run = self.folder / "runs" / native.stem
        steps = [row for row in rows(run) if "train/grad_norm" in row["metrics"]]
        assert [row["step"] for row in steps] == [1, 2]
        if file.stem not in WITHOUT_GRADIENT:
            assert all(row["metrics"]["train/grad_norm"] > 0 for row in steps)
        return run


def without_paths(text: str) -> str:
    """Return a configuration without paths, whose roles share the device of the policy."""
    tree = yaml.safe_load(text)
    for path in ("input", "tokenizer", "output_prefix"):
        tree.get("preprocess", {}).pop(path, None)
    for role in tree.get("cluster", {}).get("roles", {}).values():
        for size in ("devices", "parallel"):
            role.pop(size, None)
        role.update({"load": "tiny"} if "load" in role else {})
    return yaml.safe_dump(tree)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Start the process, in a folder with models and rows."""
    folder = tmp_path_factory.mktemp("runs")
    save_answering_model(folder / "tiny", ANSWERS, specials=SPECIALS)
    for name, samples in DATA.items():
        pq.write_table(pa.Table.from_pylist(samples), folder / f"{name}.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with one_process(folder) as workers:
            yield Runs(folder, lambda *arguments: workers.call(*arguments))


def trained_groups(run: Path) -> list[list[dict[str, Any]]]:
    """Return the groups of samples of a run's first step."""
    log = run / "rollouts" / "step_000001.jsonl"
    samples = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    trained = [sample for sample in samples if sample["is_trained"]]
    assert len({sample["reward"] for sample in trained}) > 1
    return [list(group) for _, group in groupby(trained, lambda row: row["prompt_index"])]


def assert_advantages(samples: list[dict[str, Any]], expected: Any) -> None:
    actual = [sample["advantage"] for sample in samples]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


# --- MindSpeed-RL

OVERLONG = {"reward.overlong.buffer": 4}
MINDSPEED_RL: dict[str, dict[str, Any]] = {
    "grpo_qwen25_7b_A3": {},  # averages over micro-batches of 4 samples
    "grpo_qwen25_32b_A2": {},
    "grpo_qwen3_8b_A3": {},
    "grpo_qwen3_235b_a22b_A2": {},
    "grpo_lora_qwen25_32b_A2": {"train.lora.rank": 4},
    "grpo_deepseek_r1_671b_A2": {},  # micro-batches by their tokens
    "dapo_qwen25_32b_A3": OVERLONG,  # with a filter
    "dapo_qwen25_32b_A2_20k": OVERLONG,
    "ppo_qwen25_32b_A3": {},
}


@pytest.mark.parametrize("name", MINDSPEED_RL)
def test_a_file_of_mindspeed_rl_trains_for_two_steps(name: str, runs: Runs) -> None:
    functions = mindspeed_rl_oracle.functions()
    file = mindspeed_rl_oracle.checkout() / "configs" / f"{name}.yaml"
    run = runs.train("train-grpo", "mindspeed-rl", file, **{**RL, **MINDSPEED_RL[name]})
    if name.startswith("ppo"):
        return  # advantages of the critic's values
    for group in trained_groups(run):
        rewards = torch.tensor([[sample["reward"]] for sample in group])
        if name.startswith("dapo"):  # the penalty begins 4 tokens before the longest answer
            lengths = torch.tensor([[sample["num_response_tokens"]] for sample in group])
            rewards -= (lengths - 4).clamp(min=0) / 4
        ones = torch.ones_like(rewards)
        expected, _ = functions.compute_group_norm_advantage_return(rewards, ones, ones, len(group))
        assert_advantages(group, expected[:, 0])


def test_a_dpo_file_of_mindspeed_rl_trains_for_two_steps(runs: Runs) -> None:
    file = mindspeed_rl_oracle.checkout() / "configs" / "dpo_qwen3_30b_a3b_A3.yaml"
    pairs = preprocess(runs, "qwen3_moe/data_convert_qwen3_moe_pairwise", "pairs")
    runs.train("train-dpo", "mindspeed-rl", file, **{**TUNE, "data.train": pairs})


# --- MindSpeed-LLM: the script that prepares the data of each script of a training

CONVERT = "qwen3_moe/data_convert_qwen3_moe"
QWEN25 = "qwen25/data_convert_qwen25_instruction"
MINDSPEED_LLM: dict[str, tuple[str, str, str]] = {
    "qwen25/tune_qwen25_72b_4k_full_ptd": (QWEN25, "alpaca", "sft"),
    "qwen25/tune_qwen25_72b_4k_lora_ptd": (QWEN25, "alpaca", "sft"),
    "qwen25/tune_qwen25_72b_4k_full_pack": (
        f"{QWEN25}_pack", "alpaca", "sft",
    ),
    "qwen3/tune_qwen3_0point6b_4K_full_ptd": (
        "qwen3/data_convert_qwen3_instruction", "alpaca", "sft",
    ),
    "qwen3_moe/tune_qwen3_30b_a3b_32K_full_pack_A3_ptd": (
        f"{CONVERT}_instruction_pack", "alpaca", "sft",
    ),
    "qwen3/tune_qwen3_0point6b_4K_lora_ptd": (
        "qwen3/data_convert_qwen3_instruction", "alpaca", "sft",
    ),
    "seed_oss/tune_seed_oss_36b_ptd_A3": (
        "seed_oss/data_convert_seed_oss_instruction", "alpaca", "sft",
    ),
    "llama2/pretrain_llama2_13b_ptd": ("llama2/data_convert_llama2_pretrain", "text", "sft"),
    "llama2/pretrain_llama2_13b_pack_ptd": (
        "llama2/data_convert_llama2_pretrain_pack", "text", "sft",
    ),
    "qwen3_moe/dpo_qwen3_30b_a3b_16K_A3_ptd": (f"{CONVERT}_pairwise", "pairs", "dpo"),
}  # fmt: skip

PROMPTS = {  # templates of scripts whose prompts are compared
    QWEN25: "qwen",
}


def preprocess(runs: Runs, script: str, data: str) -> str:
    """Run an imported script that prepares data, unless it ran already; return its output."""
    prefix = Path(script).name
    if not (runs.folder / f"{prefix}_manifest.json").exists():
        file = mindspeed_oracle.checkout() / "examples" / "mcore" / f"{script}.sh"
        paths = {"input": f"[{data}.parquet]", "tokenizer": "tiny", "output_prefix": prefix}
        sizes = {"workers": 1} | (
            {"seq_length": 256} if prefix.endswith("instruction_pack") else {}
        )
        changes = {f"preprocess.{key}": value for key, value in {**paths, **sizes}.items()}
        native = runs.import_file("mindspeed-llm", file, "preprocess")
        runs.msrl("preprocess", "-c", native.name, **changes)
    return prefix


@pytest.mark.parametrize("name", MINDSPEED_LLM)
def test_a_script_of_mindspeed_llm_trains_for_two_steps(name: str, runs: Runs) -> None:
    script, data, stage = MINDSPEED_LLM[name]
    file = mindspeed_oracle.checkout() / "examples" / "mcore" / f"{name}.sh"
    changes = {"data.train": preprocess(runs, script, data)}
    if "lora" in name:
        changes |= {"train.lora.rank": 4}
    runs.train(f"train-{stage}", "mindspeed-llm", file, **{**TUNE, **changes})
    if (template := PROMPTS.get(script)) is not None:
        prompt = expected_ids(runs.folder / "tiny", template, None, ["0%3="])
        tokens = runs.folder / f"{Path(script).name}_packed_input_ids_document.bin"
        assert np.fromfile(tokens, np.int32)[: len(prompt)].tolist() == prompt


# --- ROLL

GAME = {
    "rollout.max_prompt_tokens": 1024, "rollout.max_response_tokens": 1000,
    "environment.max_turns": 2, "environment.max_turn_tokens": 8, **SMALL,
}  # fmt: skip
RLVR = {"data.train": "deepmath.parquet", "preprocess.map_keys": "{extra.tag: data_source}"}
ROLL: dict[str, dict[str, Any]] = {
    "qwen2.5-7B-rlvr_megatron/rlvr_config": RLVR,
    "qwen2.5-7B-rlvr_megatron/rlvr_config_lora": {**RLVR, "train.lora.rank": 4},
    "qwen2.5-7B-rlvr-offpolicy/rlvr_config": RLVR,
    "docs_examples/example_gspo": RLVR,
    "docs_examples/example_ppo": RLVR,
    "docs_examples/example_reinforce_pp": RLVR,
    "qwen2.5-0.5B-agentic/agent_val_frozen_lake_gigpo": GAME,
    "qwen2.5-0.5B-agentic/agentic_val_sokoban": {**GAME, "environment.max_tokens": 2024},
}
ROLL_TUNE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-7B-sft_megatron/sft_config": ("train-sft", {**TUNE, "data.train": "alpaca.parquet"}),
    "dpo_examples/qwen2.5-3B_dpo_megatron": (
        "train-dpo", {**TUNE, **SMALL, "data.train": "pairs.parquet"},
    ),
    "qwen3-8B-onpolicy-distill-megatron/onpolicy_distill_config": (
        "train-distill", {**RL, **SMALL, "algo.distill.teachers": "[{model: tiny}]"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLL)
def test_a_file_of_roll_trains_for_two_steps(name: str, runs: Runs) -> None:
    file = roll_oracle.checkout() / "examples" / f"{name}.yaml"
    run = runs.train("train-grpo", "roll", file, **{**RL, **ROLL[name]})
    if name == "docs_examples/example_gspo":
        samples = [sample for group in trained_groups(run) for sample in group]
        config = roll_oracle.pipeline_config(
            4, adv_estimator="grpo", advantage_clip=2.0, reward_clip=10, whiten_advantages=False
        )
        mask, rewards = masks_and_scores(samples)
        prompt = torch.ones(len(samples), 1, dtype=torch.bool)
        attention = torch.cat([prompt, mask], 1).long()
        batch = roll_oracle.Batch(
            attention_mask=attention,
            position_ids=torch.arange(attention.shape[1]).expand(len(samples), -1).clone(),
            response_mask=torch.cat([~prompt, mask], 1).long(),
            response_level_rewards=rewards.sum(1),
            scores=rewards.sum(1),
            old_log_probs=torch.zeros(mask.shape),
            ref_log_probs=torch.zeros(mask.shape),
        )
        assert_advantages(samples, means(roll_oracle.advantages(config, batch), mask))


@pytest.mark.parametrize("name", ROLL_TUNE)
def test_a_supervised_file_of_roll_trains_for_two_steps(name: str, runs: Runs) -> None:
    command, changes = ROLL_TUNE[name]
    file = roll_oracle.checkout() / "examples" / f"{name}.yaml"
    runs.train(command, "roll", file, **changes)


# --- verl

VERL = {  # estimators by script
    "grpo_trainer/run_qwen3_8b_fsdp": "grpo",
    "grpo_trainer/run_qwen3_8b_megatron": "grpo",
    "gspo_trainer/run_qwen3_8b_fsdp": "grpo",
    "cispo_trainer/run_qwen3_8b_fsdp": "grpo",
    "gpg_trainer/run_qwen3_8b_fsdp": "gpg",
    "sapo_trainer/run_qwen3_8b_fsdp": "grpo",
    "remax_trainer/run_qwen3_8b_fsdp": None,  # by a further sample
    "rloo_trainer/run_qwen3_8b_fsdp": "rloo",  # the first step has no divergence
    "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp": "reinforce_plus_plus",
    "ppo_trainer/run_qwen3_8b_fsdp": None,  # by the critic
}


@pytest.mark.parametrize("name", VERL)
def test_a_script_of_verl_trains_for_two_steps(name: str, runs: Runs) -> None:
    file = verl_oracle.checkout() / "examples" / f"{name}.sh"
    run = runs.train("train-grpo", "verl", file, **RL)
    samples = [sample for group in trained_groups(run) for sample in group]
    if (estimator := VERL[name]) is not None:
        lines = [f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=4"]
        settings = verl_oracle.config(verl_oracle.changes(lines))
        mask, scores = masks_and_scores(samples)
        batch = verl_oracle.Batch(response_mask=mask.long(), token_level_scores=scores)
        labels = np.array([sample["prompt_index"] for sample in samples])
        assert_advantages(samples, means(verl_oracle.advantages(settings, batch, labels), mask))


def masks_and_scores(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of the responses, and scores with the reward at the last token, [B, T]."""
    lengths = torch.tensor([sample["num_response_tokens"] for sample in samples])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(samples)), lengths - 1] = torch.tensor([s["reward"] for s in samples])
    return mask, scores


def means(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (advantages * mask).sum(1) / mask.sum(1)
