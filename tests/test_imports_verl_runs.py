"""Ten scripts of verl, with other paths and sizes, train a tiny model for two steps."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import verl_oracle as oracle
from msrl.importers.command import native_yaml, translate_arguments
from msrl.workflows.import_config import validate
from tiny_qwen2 import save_model
from training_runs import metrics, succeed

pytestmark = [pytest.mark.full, pytest.mark.slow]
SCRIPTS = (
    "grpo_trainer/run_qwen3_8b_fsdp.sh",
    "grpo_trainer/run_qwen3_8b_megatron.sh",
    "gspo_trainer/run_qwen3_8b_fsdp.sh",
    "cispo_trainer/run_qwen3_8b_fsdp.sh",
    "gpg_trainer/run_qwen3_8b_fsdp.sh",
    "sapo_trainer/run_qwen3_8b_fsdp.sh",
    "remax_trainer/run_qwen3_8b_fsdp.sh",
    "rloo_trainer/run_qwen3_8b_fsdp.sh",
    "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp.sh",
    "ppo_trainer/run_qwen3_8b_fsdp.sh",
)
SIZES = (
    "data.train_batch_size=4",
    "data.max_prompt_length=96",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.max_model_len=104",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    *(
        f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size=1"
        for name in ("tensor", "pipeline", "expert")
    ),
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
    "trainer.experiment_name=tiny",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and with rows in verl's format."""
    folder = tmp_path_factory.mktemp("verl")
    save_model(folder / "model", tied=True)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + {number}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_verl_trains_for_two_steps(script: str, inputs: Path, tmp_path: Path) -> None:
    file = oracle.checkout() / "examples" / script
    paths = (
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        f"critic.model.path={inputs / 'model'}",
        f"data.train_files={inputs / 'train.parquet'}",
        "data.val_files=null",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
    )
    arguments = [str(file), *paths, *SIZES]
    translation = translate_arguments("verl", arguments, approximate=True)
    validation = validate(translation)
    assert validation.commands == ("train-grpo",) and not validation.errors
    config = tmp_path / "run.yaml"
    config.write_text(native_yaml(translation))
    cache = "rollout.engine.kv_cache_bytes=50000000"
    folder = f"run.dir={tmp_path / 'runs'}"
    log = tmp_path / "log.txt"
    succeed("train-grpo", "-c", str(config), "--set", cache, "--set", folder, log=log)
    steps = metrics(tmp_path / "runs" / "tiny")
    assert len(steps) == 2
