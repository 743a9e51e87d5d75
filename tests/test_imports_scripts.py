"""Scripts of MindSpeed-LLM as its users have them: each flag is taken or told, and what is left out
has the original's default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from config_inputs import make_model
from msrl.cli.configuration import load_configuration as load
from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.translation import KeyStatus, Translation
from support import assert_each_mentions, assert_mentions
from test_cli import msrl

TUNE = "posttrain_gpt.py --stage sft --finetune --load ckpt --data-path data --lr 1e-5 --global-batch-size 16 --train-iters 20"


def imported(line: str) -> Translation:
    return translate_arguments("mindspeed-llm", line.split())


def tree_of(line: str) -> Any:
    return plain(parse(native_yaml(imported(line)), "native.yaml"))


def mistakes(line: str) -> list[str]:
    with pytest.raises(MsrlError) as caught:
        imported(line)
    return str(caught.value).splitlines()


def test_the_devices_that_torchrun_starts_are_those_of_the_training(tmp_path: Path):
    launcher = "torchrun --nproc_per_node 8 --nnodes=4 --node_rank 0 --master_addr localhost --master_port 6000 "
    (tmp_path / "native.yaml").write_text(native_yaml(imported(launcher + TUNE)), encoding="utf-8")
    cluster = load([str(tmp_path / "native.yaml")]).config.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (4, 8)
    assert_each_mentions(
        mistakes(f"torchrun --nnodes 1:4 {TUNE}"),
        ("command line", "nnodes=1:4", "integer", "cluster.nodes"),
    )


def test_a_training_without_the_flag_bf16_is_one_in_float32():
    assert tree_of(TUNE)["model"]["dtype"] == "float32"
    assert tree_of(f"{TUNE} --bf16")["model"]["dtype"] == "bfloat16"


def test_dropout_is_refused_in_a_supervised_script_too():
    (line,) = mistakes(f"{TUNE} --hidden-dropout 0.1 --attention-dropout 0")
    assert_mentions(line, "command line: hidden_dropout=0.1: ", "dropout", 0)


@pytest.mark.parametrize("flag", ["--lr 1e-5", "--global-batch-size 16"])
def test_a_script_says_its_learning_rate_and_its_batch(flag: str):
    (line,) = mistakes(TUNE.replace(flag, ""))
    assert_mentions(line, flag.split()[0].removeprefix("--").replace("-", "_"), "missing")


@pytest.mark.parametrize(
    ("flags", "router"),
    [
        ("--moe-aux-loss-coeff 0.001", {"aux_loss_coef": 0.001, "aux_loss_over": "micro_batch"}),
        (
            "--moe-aux-loss-coeff 0.001 --seq-aux",
            {"aux_loss_coef": 0.001, "aux_loss_over": "sequence"},
        ),
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.001",
            {"aux_loss_coef": 0.001, "aux_loss_over": "sequence"},
        ),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.001", None),
        ("--moe-router-load-balancing-type aux_loss", None),
        ("--moe-router-enable-expert-bias", {"bias_update_rate": 0.001}),
        ("--moe-router-bias-update-rate 0.01", None),
        ("--moe-z-loss-coeff 0.01", {"z_loss_coef": 0.01}),
    ],
)
def test_what_balances_experts_in_a_script_balances_them_here(
    flags: str, router: dict[str, object] | None, tmp_path: Path
):
    mixture = "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-topk-prob --moe-grouped-gemm "
    speed = "--moe-token-dispatcher-type alltoall_seq --use-ascend-mc2 --reuse-fp32-param --use-cp-send-recv-overlap --neat-pack "
    line = f"{TUNE} {mixture}{speed}{flags}"
    assert tree_of(line)["train"].get("router") == router
    (tmp_path / "native.yaml").write_text(native_yaml(imported(line)), encoding="utf-8")
    assert load([str(tmp_path / "native.yaml")])


def test_facts_of_a_model_that_change_nothing_are_not_held_against_its_config(tmp_path: Path):
    """Shipped scripts say their sequence length for max_position_embeddings, and a width that no
    layer of a mixture has.
    """
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [],
    }  # fmt: skip
    make_model(tmp_path / "mixture", **mixture)
    found = imported(
        f"{TUNE} --tokenizer-name-or-path {tmp_path}/mixture --max-position-embeddings 77 --ffn-hidden-size 8192"
    )
    fates = {one.entry.key: one.status for one in found.outcomes}
    assert (fates["max_position_embeddings"], fates["ffn_hidden_size"]) == (
        KeyStatus.SAME,
        KeyStatus.DEAD,
    )
    make_model(tmp_path / "dense")
    (line,) = mistakes(f"{TUNE} --tokenizer-name-or-path {tmp_path}/dense --ffn-hidden-size 8192")
    assert_mentions(line, "ffn_hidden_size=8192", "config.json")


def test_an_unknown_balance_of_experts_is_refused():
    (line,) = mistakes(f"{TUNE} --moe-router-load-balancing-type sinkhorn")
    assert_mentions(line, "sinkhorn", "aux_loss", "seq_aux_loss", "none")


def test_a_script_of_inference_repeats_the_model_and_draws_as_the_original_does():
    model = "--use-mcore-models --tensor-model-parallel-size 1 --num-layers 24 --seq-length 4096 --micro-batch-size 1 --bf16"
    line = f"torchrun --nproc_per_node 1 inference.py {model} --load ckpt --tokenizer-name-or-path tok --seed 42"
    sampling = {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "max_tokens": 128}
    tree = tree_of(line)
    assert tree == {
        "generate": {"model": "ckpt", "seed": 42, **sampling},
        "chat": {"model": "ckpt", "seed": 42, **sampling},
    }
    fates = {one.entry.key: one.status for one in imported(line).outcomes}
    assert fates["num_layers"] is fates["nproc_per_node"] is KeyStatus.SAME


def test_the_task_of_inference_says_how_answers_are_drawn():
    found = imported("inference.py --task greedy --load ckpt --temperature 0.9 --top-k 5")
    assert plain(found.tree)["generate"]["temperature"] == 0
    assert {one.entry.key for one in found.outcomes if one.status is KeyStatus.DEAD} == {
        "temperature",
        "top_k",
    }
    assert (
        plain(imported("inference.py --task do_sample --load ckpt --temperature 0.9").tree)[
            "generate"
        ]["temperature"]
        == 0.9
    )
    (line,) = mistakes("inference.py --task beam_search --load ckpt")
    assert_mentions(line, "command line: task=beam_search: ", "beam")


@pytest.mark.parametrize(
    ("flags", "lora"),
    [
        (
            "--lora-target-modules linear_qkv linear_proj",
            {"rank": 16, "alpha": 32, "targets": ["linear_qkv", "linear_proj"]},
        ),
        (
            "--lora-r 8 --lora-target-modules linear_qkv",
            {"rank": 8, "alpha": 32, "targets": ["linear_qkv"]},
        ),
        ("--lora-r 8 --lora-alpha 16", None),
    ],
)
def test_adapters_of_a_script_are_trained_where_it_names_their_layers(
    flags: str, lora: dict[str, object] | None
):
    assert tree_of(f"{TUNE} {flags}")["train"].get("lora") == lora


def test_warm_up_is_a_share_or_a_number_not_both():
    assert (
        tree_of(f"{TUNE} --lr-warmup-fraction 0.01 --lr-warmup-iters 0")["train"]["optimizer"][
            "warmup"
        ]
        == 0.01
    )
    (line,) = mistakes(f"{TUNE} --lr-warmup-fraction 0.01 --lr-warmup-iters 5")
    assert_mentions(line, "lr_warmup_iters=5", "lr_warmup_fraction")


SFT = """\
defaults: [{model: [small]}]
sft:
  {model: small, stage: sft, tokenizer_name_or_path: hf, data_path: data, global_batch_size: 4, micro_batch_size: 2, train_iters: 5,
   lr: 5e-5, min_lr: 1e-6, lr_decay_style: cosine, lr_warmup_fraction: 0.01, no_shuffle: true, lora_target_modules: [linear_qkv]}
"""


def test_a_supervised_file_of_mindspeed_rl_trains_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "hf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text(
        "small: {num_layers: 4, hidden_size: 64, qk_layernorm: false}", encoding="utf-8"
    )
    (tmp_path / "tune.yaml").write_text(SFT, encoding="utf-8")
    config = load(["tune.yaml"]).config
    assert (config.run.name, config.run.seed, config.data.train, config.data.shuffle) == (
        "tune",
        1234,
        "data",
        False,
    )
    assert (
        config.model.path,
        config.model.dtype,
        config.train.global_batch,
        config.train.steps,
    ) == ("hf", "bfloat16", 4, 5)
    optimizer = config.train.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.schedule, optimizer.warmup) == (
        5e-5,
        1e-6,
        "cosine",
        0.01,
    )
    assert (
        optimizer.weight_decay,
        optimizer.betas,
        config.train.lora.rank,
        config.train.lora.alpha,
    ) == (0.01, (0.9, 0.999), 8, 16)


@pytest.mark.parametrize(
    ("old", "new", "fragments"),
    [
        ("train_iters", "train_iter", ("train_iter", "key", "MindSpeed-RL", "'train_iters'")),
        ("stage: sft", "stage: orm", ("stage=orm", "sft", "msrl train-grpo")),
        ("sft:\n", "rl_config: {}\nsft:\n", ("rl_config", "key", "MindSpeed-RL", "defaults, sft")),
        ("model: small, ", "model: large, ", ("large", "defaults", "small")),
        ("lr: 5e-5, ", "", ("lr", "missing", "learning rate")),
    ],
)
def test_mistakes_in_a_supervised_file_are_named(
    old: str, new: str, fragments: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("small: {num_layers: 4}", encoding="utf-8")
    (tmp_path / "tune.yaml").write_text(SFT.replace(old, new), encoding="utf-8")
    with pytest.raises(MsrlError) as caught:
        load([str(tmp_path / "tune.yaml")])
    assert_mentions(caught.value, *fragments)


def test_overrides_as_hydra_has_them_are_told_how_msrl_takes_them(
    capsys: pytest.CaptureFixture[str],
):
    assert msrl("train-grpo", "actor_config.lr=1e-6") == 2
    message = capsys.readouterr().err
    assert (
        "actor_config.lr=1e-6" in message
        and "--set KEY=VALUE" in message
        and "--set actor_config" not in message
    )
    with pytest.raises(MsrlError) as caught:
        load(
            sets=[
                "+actor_config.lr=1e-6",
                "rl_config.clip_ratio=0.3",
                "generate_config.sampling_config.top_k=5",
                "rl_config.foo=1",
            ]
        )
    assert_each_mentions(
        str(caught.value).splitlines(),
        ("actor_config.lr", "set train.optimizer.lr"),
        ("rl_config.clip_ratio", "algo.clip.low", "algo.clip.high", "clip_higher_enable"),
        ("generate_config.sampling_config.top_k", "set rollout.sampling.top_k"),
        ("rl_config.foo", "file"),
    )
