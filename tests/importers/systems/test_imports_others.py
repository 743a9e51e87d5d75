"""Files of systems that msrl does not import are recognized by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrl.cli.configuration import load_configuration
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from support import assert_mentions

FILES = {
    "LLaMA-Factory": "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: lora\n",
    "ms-swift": "model: Qwen/Qwen2.5-7B\nrlhf_type: grpo\ndataset: [a.jsonl]\n",
    "TRL": "model_name_or_path: Qwen/Qwen2.5-7B\ndataset_name: trl-lib/tldr\n",
    "axolotl": "base_model: Qwen/Qwen2.5-7B\ndatasets: [{path: a.jsonl, type: alpaca}]\n",
    "OpenRLHF": "pretrain: Qwen/Qwen2.5-7B\nprompt_data: a.jsonl\n",
    "slime": "hf_checkpoint: Qwen2.5-7B\nprompt_data: a.jsonl\n",
    "FSDP2": "model: {model_id: qwen3_next}\nparallel: {cp_size: 1}\ntraining: {lr: 1e-5}\n",
    "NeMo-RL": "policy: {model_name: Qwen/Qwen2.5-7B}\ngrpo: {num_prompts_per_step: 32}\n",
}
SCRIPTS = {
    "LLaMA-Factory": "llamafactory-cli train sft.yaml",
    "ms-swift": "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B",
    "TRL": "trl grpo --model_name_or_path Qwen/Qwen2.5-7B",
    "axolotl": "axolotl train config.yaml",
    "OpenRLHF": "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-7B",
    "NeMo-RL": "uv run examples/run_grpo_math.py cluster.gpus_per_node=8",
    "slime": "A=(--prompt-data a)\nray job submit -- python3 train.py --hf-checkpoint b ${A[@]}",
    "--from lightrft": "torchrun examples/gsm8k_geo3k/train_colocate.py --pretrain a",
    "--from roll": "python examples/start_rlvr_pipeline.py --config_name rlvr_config",
}


@pytest.mark.parametrize("system", FILES)
def test_a_file_of_another_system_is_named_in_one_message(system: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(FILES[system])
    with pytest.raises(MsrlError) as caught:
        load_configuration([str(file)])
    assert_mentions(caught.value, file, system, "--data ROWS")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(MsrlError) as caught:
        translate_arguments("verl", [str(file)])
    assert_mentions(caught.value, system)


@pytest.mark.sample(9)
@pytest.mark.parametrize("system", SCRIPTS)
@pytest.mark.parametrize("importer", ["mindspeed-llm", "verl", "roll"])
def test_a_script_of_another_system_is_named(system: str, importer: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"set -x\n{SCRIPTS[system]}\n")
    with pytest.raises(MsrlError) as caught:
        translate_arguments(importer, [str(script)])
    if system != f"--from {importer}":
        assert_mentions(caught.value, system)


def test_a_file_of_verl_names_its_import(tmp_path: Path) -> None:
    file = tmp_path / "ppo.yaml"
    file.write_text("actor_rollout_ref: {rollout: {n: 4}}\ndata: {train_batch_size: 4}\n")
    with pytest.raises(MsrlError) as caught:
        load_configuration([str(file)])
    assert_mentions(caught.value, "msrl config import --from verl")
    with pytest.raises(MsrlError) as caught:
        translate_arguments("roll", [str(file)])
    assert_mentions(caught.value, "--from verl")
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4\n")
    for importer in ("mindspeed-llm", "lightrft", "roll"):
        with pytest.raises(MsrlError) as caught:
            translate_arguments(importer, [str(script)])
        assert_mentions(caught.value, "--from verl")


def test_a_file_of_msrl_is_that_of_no_other_system(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("model: {path: qwen}\ntrain: {lora: {rank: 8}}\npreprocess: {input: [a]}\n")
    assert load_configuration([str(file)]).config.train.lora.rank == 8
