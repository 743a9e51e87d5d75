"""`msrl config import`: complete examples of the guides of every system, key by key."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from config_inputs import make_data, make_model, skip_input_checks
from guides import guide
from msrl.cli.configuration import load_configuration as load
from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.mindspeed.scripts import translate_script
from msrl.importers.roll.devices import device_count
from msrl.importers.systems import foreign
from msrl.importers.translation import KeyStatus, Translation
from support import ROOT, assert_mentions, mentions
from test_cli import msrl

EXAMPLES = ROOT / "examples" / "mindspeed"
RLVR = """\
exp_name: rlvr
num_gpus_per_node: 8
max_steps: 10
rollout_batch_size: 64
prompt_length: 1024
response_length: 2048
num_return_sequences_in_group: 8
adv_estimator: grpo
use_kl_loss: true
kl_loss_coef: 0.002
pretrain: model
actor_train:
  training_args:
    {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 16,
     warmup_steps: 20}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}
  device_mapping: list(range(0,16))
  infer_batch_size: 4
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.99}
  strategy_args:
    strategy_name: vllm
    strategy_config: {gpu_memory_utilization: 0.6, max_model_len: 8000}
  num_gpus_per_worker: 2
  device_mapping: list(range(0,16))
reference: {strategy_args: {strategy_name: megatron_infer, strategy_config: "${deepspeed_zero2}"}}
rewards:
  math_rule: {worker_cls: roll.rewards.MathRuleRewardWorker, tag_included: [math]}
"""


def convert(system: str, text: str, folder: Path, suffix: str) -> Translation:
    file = folder / f"given.{suffix}"
    file.write_text(text, encoding="utf-8")
    return translate_arguments(system, [str(file)])


def native_tree(translation: Translation) -> Any:
    return plain(parse(native_yaml(translation), "native.yaml"))


def edit(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


# --- ROLL


def test_models_of_the_roles_count_only_where_all_have_one_as_in_the_original(tmp_path: Path):
    path = "model_args: {model_name_or_path: %s}"
    policy = ("actor_train:\n", f"actor_train:\n  {path % 'policy'}\n")
    engine = ("actor_infer:\n", f"actor_infer:\n  {path % 'policy'}\n")
    other = ("reference: {", f"reference: {{{path % 'other'}, ")
    text = edit(RLVR, policy, other)
    tree = native_tree(convert("roll", text, tmp_path, "yaml"))
    assert tree["model"]["path"] == "model" and "roles" not in tree["cluster"]
    tree = native_tree(convert("roll", edit(text, engine), tmp_path, "yaml"))
    assert tree["model"]["path"] == "policy"
    assert tree["cluster"]["roles"]["reference"]["load"] == "other"


def test_a_reference_of_another_dtype_is_no_exact_import(tmp_path: Path):
    train = ("actor_train:\n", "actor_train:\n  model_args: {dtype: bf16}\n")
    text = edit(RLVR, train, ("reference: {", "reference: {model_args: {dtype: fp32}, "))
    with pytest.raises(MsrlError, match=mentions("reference.model_args.dtype=fp32", "bf16")):
        convert("roll", text, tmp_path, "yaml")


def test_batches_of_roll_follow_from_devices_and_accumulation(tmp_path: Path):
    tree = native_tree(convert("roll", RLVR, tmp_path, "yaml"))
    assert tree["cluster"] == {"devices_per_node": 8, "nodes": 2, "rpc_timeout_s": 3600}
    assert tree["train"]["updates"]["samples_per_update"] == 2 * 16 * (
        16 // 2
    )  # per device * accumulation * data parallel size
    assert (tree["rollout"]["prompts_per_step"], tree["rollout"]["samples_per_prompt"]) == (64, 8)
    assert tree["rollout"]["engine"] == {
        "tp": 2,
        "dp": 8,
        "memory_fraction": 0.6,
        "max_model_len": 8000,
        "max_num_seqs": 128,
    }
    assert tree["rollout"]["sampling"] == {
        "temperature": 0.99,
        "top_p": 0.7,
        "top_k": 50,
    }  # two of them ROLL's defaults
    assert tree["algo"]["kl"] == {"loss": {"coef": 0.002, "estimator": "k3"}}
    assert tree["algo"]["aggregate"] == {"mode": "seq-mean-token-mean"}
    assert tree["train"]["optimizer"]["warmup"] == 20 and tree["train"]["parallel"] == {
        "tp": 2,
        "pp": 1,
        "sp": True,
    }
    assert tree["reward"] == {"sources": [{"verifier": "math_17k_acc", "tags": ["math"]}]}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("use_kl_loss: true", "use_kl_loss: false", "algo.kl", None),
        (
            "use_kl_loss: true",
            "add_token_level_kl: true\nkl_penalty: mse",
            "algo.kl.reward",
            {"coef": 0.2, "estimator": "k2"},
        ),
        (
            "adv_estimator: grpo",
            "adv_estimator: grpo\npg_clip: 0.1\ndual_clip_loss: true",
            "algo.clip",
            {"low": 0.1, "high": 0.1, "dual": 1.2},
        ),
        (
            "adv_estimator: grpo",
            "adv_estimator: grpo\npg_clip: 1\ndual_clip_loss: true",
            "algo.clip",
            {"low": 1, "high": 1, "dual": 3},
        ),
        (
            "adv_estimator: grpo",
            "adv_estimator: grpo\nuse_pg_clip_range: true\npg_clip_high: 0.28",
            "algo.clip",
            {"low": 0.2, "high": 0.28},
        ),
        (
            "adv_estimator: grpo",
            "adv_estimator: grpo\nimportance_sampling: seq",
            "algo.ratio",
            "sequence",
        ),
        (
            "adv_estimator: grpo",
            "adv_estimator: grpo\nmax_len_mask: true",
            "algo.mask.truncated",
            True,
        ),
        (
            "adv_estimator: grpo",
            "adv_estimator: grpo\ndifficulty_mask: true\ndifficulty_low_threshold: 0.1",
            "algo.mask.difficulty",
            [0.1, 1.0],
        ),
        (
            "response_length: 2048",
            "sequence_length: 4096\nresponse_length: 7",
            "rollout.max_response_tokens",
            3072,
        ),
        (
            "list(range(0,16))\n  infer",
            "list(range(0,4)) + [8, 9, 10, 11]\n  infer",
            "train.updates.samples_per_update",
            128,
        ),
        ("warmup_steps: 20", "warmup_ratio: 0.1", "train.optimizer.warmup", 0.1),
    ],
)
def test_a_changed_key_of_roll_changes_its_translation(
    old: str, new: str, key: str, value: object, tmp_path: Path
):
    tree = native_tree(convert("roll", edit(RLVR, (old, new)), tmp_path, "yaml"))
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    assert tree == value


@pytest.mark.parametrize(
    ("args", "lora"),
    [
        (
            "lora_rank: 32, lora_target: 'q_proj, v_proj'",
            {"rank": 32, "alpha": 64, "targets": ["q_proj", "v_proj"]},
        ),  # alpha is twice the rank
        ("lora_target: all-linear, lora_alpha: 5", {"rank": 8, "alpha": 5}),
        ("lora_rank: 32", None),
    ],
)
def test_lora_target_of_roll_enables_adapters(args: str, lora: object, tmp_path: Path):
    text = edit(RLVR, ("  infer_batch_size: 4", f"  infer_batch_size: 4\n  model_args: {{{args}}}"))
    assert native_tree(convert("roll", text, tmp_path, "yaml"))["train"].get("lora") == lora


@pytest.mark.parametrize(
    ("args", "warmup"),
    [
        ("warmup_steps: 20, warmup_ratio: 0.1", 20),
        ("warmup_ratio: 0.1, warmup_steps: 20", 20),
        ("warmup_ratio: 0.1, warmup_steps: 0", 0.1),
    ],
)
def test_warmup_steps_of_roll_override_the_ratio(args: str, warmup: float, tmp_path: Path):
    text = edit(RLVR, ("warmup_steps: 20", args))
    assert (
        native_tree(convert("roll", text, tmp_path, "yaml"))["train"]["optimizer"]["warmup"]
        == warmup
    )


def test_virtual_stages_of_roll_become_layers_per_stage(tmp_path: Path):
    make_model(tmp_path / "model", num_hidden_layers=8)
    stages = (
        "tensor_model_parallel_size: 2, pipeline_model_parallel_size: "
        "2, virtual_pipeline_model_parallel_size: 2"
    )
    text = edit(
        RLVR,
        ("tensor_model_parallel_size: 2", stages),
        ("pretrain: model", f"pretrain: {tmp_path}/model"),
    )
    assert (
        native_tree(convert("roll", text, tmp_path, "yaml"))["train"]["parallel"]["vpp"] == 2
    )  # 8 layers in 2 * 2 stages
    absent = convert("roll", edit(text, (f"{tmp_path}/model", "absent")), tmp_path, "yaml")
    assert "vpp" not in native_tree(absent)["train"]["parallel"]
    (key_result,) = [o for o in absent.key_results if o.entry.key.startswith("virtual_")]
    assert key_result.status is KeyStatus.SPEED and "train.parallel.vpp" in key_result.text
    with pytest.raises(MsrlError, match=mentions("8 layers", "2 * 3 stages")):
        convert(
            "roll",
            edit(
                text,
                (
                    "virtual_pipeline_model_parallel_size: 2",
                    "virtual_pipeline_model_parallel_size: 3",
                ),
            ),
            tmp_path,
            "yaml",
        )


HELD_OUT = """\
eval_steps: 5
validation:
  data_args: {template: qwen2_5, file_name: [val.jsonl]}
  generating_args: {temperature: 0.6, top_k: 0, num_return_sequences: 4, max_new_tokens: 7}
"""


def test_validation_of_roll_becomes_evaluation_before_and_during_training(tmp_path: Path):
    translation = convert("roll", RLVR + HELD_OUT, tmp_path, "yaml")
    sampling = {"temperature": 0.6, "top_p": 0.7, "top_k": -1}  # the second is ROLL's default
    assert native_tree(translation)["eval"] == {
        "every_steps": 5,
        "at_start": True,
        "sampling": sampling,
        "samples_per_prompt": 4,
    }
    assert any(
        "--set data.eval=PREFIX" in str(key_result) for key_result in translation.key_results
    )
    longer = convert(
        "roll",
        RLVR + HELD_OUT + "val_prompt_length: 1024\nval_sequence_length: 5120\n",
        tmp_path,
        "yaml",
    )
    assert native_tree(longer)["eval"]["max_response_tokens"] == 4096
    often = convert("roll", edit(RLVR + HELD_OUT, ("eval_steps: 5\n", "")), tmp_path, "yaml")
    assert native_tree(often)["eval"]["every_steps"] == 10  # ROLL's default
    greedy = convert(
        "roll",
        edit(
            RLVR + HELD_OUT,
            ("temperature: 0.6", "temperature: 0"),
            ("_sequences: 4", "_sequences: 1"),
        ),
        tmp_path,
        "yaml",
    )
    assert native_tree(greedy)["eval"]["sampling"] == {"temperature": 0}


@pytest.mark.parametrize(
    "text",
    [
        RLVR + "eval_steps: 5\n",
        RLVR + "validation: {}\n",
        RLVR + edit(HELD_OUT, ("eval_steps: 5", "eval_steps: 0")),
    ],
)
def test_roll_does_not_evaluate_without_validation_data_or_eval_steps(text: str, tmp_path: Path):
    assert "eval" not in native_tree(convert("roll", text, tmp_path, "yaml"))


def test_roll_validation_needs_both_lengths(tmp_path: Path):
    with pytest.raises(MsrlError, match=mentions("val_sequence_length=2048", "val_prompt_length")):
        convert("roll", RLVR + HELD_OUT + "val_sequence_length: 2048\n", tmp_path, "yaml")


def test_dead_keys_of_roll_are_reported(tmp_path: Path):
    text = (
        RLVR
        + "l2: 0.1\nreward_norm: group\nuse_topr_loss: false\ninit_kl_coef: 0.5\n"
        + "add_len_reward: true\nsft_loss_coef: 0\n"
    )
    translation = convert("roll", text, tmp_path, "yaml")
    dead = {
        key_result.entry.key
        for key_result in translation.key_results
        if key_result.status is KeyStatus.DEAD
    }
    assert dead >= {
        "l2",
        "reward_norm",
        "use_topr_loss",
        "init_kl_coef",
        "add_len_reward",
        "sft_loss_coef",
        "max_new_tokens",
    }


def test_a_misspelt_key_of_roll_is_named_with_its_line(tmp_path: Path):
    with pytest.raises(
        MsrlError,
        match=mentions("given.yaml:8: adv_estimater=grpo", "key", "ROLL", "'adv_estimator'"),
    ):
        convert("roll", RLVR.replace("adv_estimator", "adv_estimater"), tmp_path, "yaml")


def test_a_file_of_roll_is_imported_not_run(tmp_path: Path):
    (tmp_path / "roll.yaml").write_text(RLVR, encoding="utf-8")
    with pytest.raises(MsrlError, match="msrl config import --from roll"):
        load([str(tmp_path / "roll.yaml")])


def roll_roles(folder: Path, infer: str, reference: str) -> Any:
    """Return cluster.roles of a run that trains on devices 0 to 15."""
    layout = "{strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 4}}"
    text = edit(
        RLVR,
        ("  num_gpus_per_worker: 2\n  device_mapping: list(range(0,16))", infer),
        (
            "reference: {strategy_args: {strategy_name: megatron_infer, strategy_config: "
            '"${deepspeed_zero2}"}}',
            f"reference: {{strategy_args: {layout}, device_mapping: '{reference}'}}",
        ),
    )
    tree = native_tree(convert("roll", text, folder, "yaml"))
    return tree["cluster"].get("roles", {}), tree["rollout"]["engine"]


def test_roles_of_roll_with_other_devices_than_training_have_separate_devices(tmp_path: Path):
    infer = "  num_gpus_per_worker: 2\n  device_mapping: list(range(16,24))"
    roles, engine = roll_roles(tmp_path, infer, "list(range(24,32))")
    assert roles == {
        "rollout": {"devices": 8},
        "reference": {"devices": 8, "parallel": {"tp": 4}},
    }
    assert "dp" not in engine


def test_roles_of_roll_that_share_a_device_share_those_of_training(tmp_path: Path):
    infer = "  num_gpus_per_worker: 2\n  device_mapping: list(range(8,24))"
    roles, engine = roll_roles(tmp_path, infer, "list(range(0,8))")
    assert roles == {} and engine["dp"] == 8


def test_device_mappings_are_counted_without_evaluating_code():
    assert device_count("list(range(0,8)) + list(range(8, 16, 2))") == 12
    assert device_count("__import__('os').system('true')") is None
    assert device_count("list(range(0, exit()))") is None


# --- LightRFT

FLAGS = (
    "python train.py --pretrain model --prompt_data x --rollout_batch_size 64 "
    "--n_samples_per_prompt 8 --train_batch_size 128 --advantage_estimator group_norm"
)


def test_a_command_of_lightrft_is_not_refused_for_defaults_that_change_no_results(tmp_path: Path):
    translation = translate_arguments("lightrft", FLAGS.split())
    assert not translation.refusals()
    (tmp_path / "native.yaml").write_text(native_yaml(translation), encoding="utf-8")
    assert load([str(tmp_path / "native.yaml")]).config.log.trackers == ()


@pytest.mark.parametrize(("ratio", "from_zero"), [("0.1", True), ("0", False)])
def test_a_warmup_of_lightrft_begins_at_zero_as_in_transformers(ratio: str, from_zero: bool):
    translation = translate_arguments("lightrft", f"{FLAGS} --lr_warmup_ratio {ratio}".split())
    optimizer = native_tree(translation)["train"]["optimizer"]
    assert optimizer.get("warmup_from_zero", False) is from_zero


def test_packed_micro_batches_of_lightrft_are_exact_with_one_sample_only():
    line = f"{FLAGS} --packing_samples --micro_train_batch_size"
    result = translate_arguments("lightrft", f"{line} 1".split()).key_results
    assert [r.status for r in result if r.entry.key == "packing_samples"] == [KeyStatus.SAME]
    with pytest.raises(MsrlError, match=mentions("packing_samples", "tokens")):
        translate_arguments("lightrft", f"{line} 4".split())


def test_the_complete_examples_of_lightrft_are_read_key_by_key(tmp_path: Path):
    blocks = [
        block
        for block in re.findall(r"^```bash\n(.*?)^```", guide("lightrft-parameters"), re.S | re.M)
        if "python" in block
    ]
    assert len(blocks) == 2
    for block in blocks:
        translation = convert("lightrft", block, tmp_path, "sh")
        assert {key_result.entry.path for key_result in translation.key_results} == set(
            re.findall(r"--(\w+)", block)
        )
    assert native_tree(convert("lightrft", blocks[0], tmp_path, "sh"))["train"]["updates"] == {
        "samples_per_update": 128,
        "epochs": 1,
    }


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("", "rollout.prompts_per_step", 64),
        ("", "algo.kl.reward", {"coef": 0.01, "estimator": "k1"}),
        ("--use_kl_loss --kl_estimator k3", "algo.kl.loss", {"coef": 0.01, "estimator": "k3"}),
        ("--kl_target 0.01", "algo.kl.controller", {"target": 0.01, "kind": "adaptive"}),
        ("--clip_range 0.1 --clip_range_higher 0.3", "algo.clip", {"low": 0.1, "high": 0.3}),
        ("--eps_clip 0.1", "algo.clip", {"low": 0.1, "high": 0.1}),
        ("--adam_betas 0.8 0.9", "train.optimizer.betas", [0.8, 0.9]),
        ("--actor_learning_rate 1e-6", "train.optimizer.min_lr", 1e-07),
        ("--max_norm 0", "train.optimizer.grad_clip", None),
        ("--load_checkpoint", "checkpoint.resume", "auto"),
        ("--reward_clip 5", "reward.clip", 5),
        ("--advantage_clip 0", "algo.advantage.clip", None),
        (
            "--overlong_buffer --overlong_buffer_len 512",
            "reward.overlong",
            {"buffer": 512, "factor": 1.0},
        ),
    ],
)
def test_a_flag_of_lightrft_changes_its_translation(
    flags: str, key: str, value: object, tmp_path: Path
):
    tree = native_tree(convert("lightrft", f"{FLAGS} {flags}", tmp_path, "sh"))
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    assert tree == value


def test_gspo_and_gmpo_are_a_ratio_and_a_loss(tmp_path: Path):
    gspo = native_tree(convert("lightrft", FLAGS.replace("group_norm", "gspo"), tmp_path, "sh"))[
        "algo"
    ]
    assert (gspo["advantage"]["estimator"], gspo["ratio"]) == ("group_norm", "sequence")
    gmpo = native_tree(convert("lightrft", FLAGS.replace("group_norm", "gmpo"), tmp_path, "sh"))[
        "algo"
    ]
    assert (gmpo["advantage"]["estimator"], gmpo["policy_loss"]) == ("group_norm", "gmpo")


def test_flags_are_accepted_as_separate_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "native.yaml"
    assert (
        msrl(
            "config",
            "import",
            "--from",
            "lightrft",
            "--output",
            str(output),
            "--",
            *FLAGS.split()[2:],
            "--remote_rm_url",
            "http://localhost:1",
        )
        == 0
    )
    assert_mentions(capsys.readouterr().err, "command line: ", "LightRFT", "group_norm", "7 keys")
    assert plain(parse(output.read_text(encoding="utf-8"), "native"))["model"]["path"] == "model"
    assert msrl("config", "import", "--from", "lightrft", "--", "--pretrian", "model") == 2
    assert_mentions(capsys.readouterr().err, "key", "LightRFT", "'pretrain'")


# --- MindSpeed-LLM


def test_the_commands_of_the_mindspeed_guides_are_translated(tmp_path: Path):
    text = guide("mindspeed-llm-full-pipeline") + guide("mindspeed-rl-r1-zero")
    blocks = [
        block
        for block in re.findall(r"^```(?:shell|bash)\n(.*?)^```", text, re.S | re.M)
        if re.search(r"convert_ckpt.py|preprocess_data.py", block)
    ]
    assert len(blocks) == 6
    trees = [native_tree(convert("mindspeed-llm", block, tmp_path, "sh")) for block in blocks]
    assert trees[0]["convert"] == {
        "command": "hf2mcore",
        "load": "/root/llm_dataset/models/Qwen/Qwen2.5-0.5B",
        "dtype": "bf16",
        "save": "/root/llm_dataset/models/mindspeed/qwen2.5_mcore/qwen2.5_0.5b/",
        "tp": 2,
        "pp": 2,
    }
    assert (
        trees[5]["convert"]["save"]
        == "/root/llmtuner/hfhub/mindspeed/models/Qwen/Qwen2.5-7B/mcore_tp2_pp4"
    )  # of variables
    preprocess = trees[4]["preprocess"]
    assert (
        preprocess["handler"] == "PPOAlpacaStyleInstructionHandler"
        and preprocess["template"] == "llama3"
    )
    assert preprocess["map_keys"] == {
        "prompt": "prompt",
        "query": "",
        "response": "prompt",
        "system": "",
    }


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("convert_ckpt.py --use-mcore-models", None),
        ("convert_ckpt.py", "legacy"),
        ("convert_ckpt_v2.py", None),
        ("convert_ckpt.py --load-model-type mg --load-from-legacy", None),
        ("convert_ckpt.py --load-model-type mg --save-to-legacy", "legacy"),
    ],
)
def test_conversions_write_legacy_names_if_the_original_does(flags: str, names: str | None):
    words = ["python", *flags.split(), "--load-dir", "a", "--save-dir", "b"]
    assert native_tree(translate_arguments("mindspeed-llm", words))["convert"].get("names") == names


def test_a_supervised_script_with_variables_becomes_train_sft(tmp_path: Path):
    script = """\
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \\
    --sequence-parallel
    --micro-batch-size 4 --global-batch-size 16
    --lr 1.25e-5 --lr-decay-style cosine --adam-beta2 0.95
    --train-iters 2000 --bf16
"
torchrun --nproc_per_node 8 posttrain_gpt.py $GPT_ARGS --stage sft --load ckpt --finetune \
    --data-path data/alpaca  # go
"""
    translation = convert("mindspeed-llm", script, tmp_path, "sh")
    tree = native_tree(translation)
    assert (
        tree["train"]["parallel"] == {"tp": 2, "sp": True, "pp": 1}
        and tree["train"]["global_batch"] == 16
    )
    assert tree["train"]["optimizer"]["betas"] == [0.9, 0.95] and tree["checkpoint"] == {
        "load": "ckpt"
    }
    assert tree["cluster"] == {
        "devices_per_node": 8,
        "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    } and tree["model"] == {"dtype": "bfloat16"}
    lines = {
        key_result.entry.key: key_result.entry.origin.line for key_result in translation.key_results
    }
    assert (lines["tensor_model_parallel_size"], lines["lr"], lines["stage"]) == (4, 7, 10)


def test_an_undefined_variable_of_a_script_is_named():
    with pytest.raises(MsrlError, match=mentions("s.sh:2: $NOBODY_SETS_THIS")):
        translate_script("a=1\npython convert_ckpt.py --load $NOBODY_SETS_THIS\n", "s.sh")


def test_unsupported_flags_are_refused_with_a_reason(tmp_path: Path):
    with pytest.raises(MsrlError, match=mentions("qlora_nf4=true", "weights")):
        convert(
            "mindspeed-llm",
            "python convert_ckpt.py --load-dir a --save-dir b --qlora-nf4",
            tmp_path,
            "sh",
        )


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ("--optimizer muon --muon-momentum 0.9", ("optimizer=muon", "emerging_optimizers")),
        ("--optimizer sgd", ("optimizer=sgd", "adamw")),
    ],
)
def test_other_optimizers_than_adam_are_refused_with_a_reason(
    flags: str, fragments: tuple[str, ...], tmp_path: Path
):
    script = (
        "python posttrain_gpt.py --stage sft --load a --data-path b --train-iters 3 --lr 1e-5 "
        "--global-batch-size 8"
    )

    def refused(flags: str) -> str:
        return "\n".join(convert("mindspeed-llm", f"{script} {flags}", tmp_path, "sh").refusals())

    assert_mentions(refused(flags), *fragments)
    assert "optimizer=" not in refused("--optimizer adam --muon-momentum 0.9")


def test_first_generation_files_of_mindspeed_run_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for name in ("llama-3.2-1b-instruct", "llama-3.2-1b-instruct-tp1-pp1"):
        make_model(tmp_path / name, max_position_embeddings=2048)
    (tmp_path / "dataset").mkdir()
    make_data(tmp_path / "dataset" / "data")
    file = str(EXAMPLES / "grpo_llama32_1b.yaml")
    skip_input_checks(monkeypatch)
    assert msrl("train-grpo", "-c", file, "--dry-run") == 0
    config = load([file]).config
    assert config.train.updates.samples_per_update == 8 * 2  # on each of two data-parallel ranks
    assert config.rollout.max_response_tokens == 512 - 256
    assert (config.algo.kl.loss.coef, config.algo.kl.loss.estimator) == (0.05, "k3")
    assert config.algo.advantage.whiten and config.rollout.engine.dp == 2
    roles = config.cluster.roles
    assert (roles.rollout.devices, roles.reference.devices, roles.reward.devices) == (2, 1, None)
    assert roles.reference.micro_batch == 4 and roles.reference.load is None


@pytest.mark.parametrize(
    ("old", "new", "fragments"),
    [
        (
            "num_gpus_for_train: 2",
            "num_gpus_for_trian: 2",
            ("num_gpus_for_trian", "key", "MindSpeed-LLM", "'num_gpus_for_train'"),
        ),
        ("do_sample: true", "do_sample: false", ("do_sample=false", "greedy")),
        ("seq_length: 512", "seq_length: 256", ("seq_length=256", "max_prompt_length=256")),
        ("gamma: 1.0", "gamma: 0.9", ("gamma=0.9", "discount")),
        ("  ref:\n", "  reff:\n", ("reff", "key", "MindSpeed-LLM", "'ref'")),
    ],
)
def test_errors_in_first_generation_files_are_reported(
    old: str, new: str, fragments: tuple[str, ...], tmp_path: Path
):
    text = (EXAMPLES / "grpo_llama32_1b.yaml").read_text(encoding="utf-8")
    (tmp_path / "given.yaml").write_text(edit(text, (old, new)), encoding="utf-8")
    translation = foreign(str(tmp_path / "given.yaml"))
    assert translation is not None and any(
        re.match(mentions(*fragments), line) for line in translation.errors
    ), translation and translation.errors


def test_the_critic_of_roll_averages_sequences_and_has_the_batches_of_the_actor(tmp_path: Path):
    text = edit(RLVR, ("adv_estimator: grpo", "adv_estimator: gae"))
    tree = native_tree(convert("roll", text, tmp_path, "yaml"))
    assert tree["algo"]["value"]["aggregate"] == "seq-mean-token-mean"
    other = f"{text}critic: {{training_args: {{gradient_accumulation_steps: 3}}}}\n"
    with pytest.raises(MsrlError, match=mentions("steps=3", "policy", "16", "--approximate")):
        convert("roll", other, tmp_path, "yaml")


def test_a_name_of_something_else_than_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, keyword in (("pipe.yaml", "pipe"), ("", "folder"), ("none.yaml", "not found")):
        with pytest.raises(MsrlError, match=mentions(tmp_path / name, keyword)):
            translate_arguments("verl", [str(tmp_path / name)])
