"""Import of MindSpeed-LLM scripts: flags, and defaults of the original."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from config_inputs import make_model
from msrl.cli.configuration import load_configuration as load
from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.report import full
from msrl.importers.translation import KeyStatus, Translation
from support import assert_each_mentions, assert_mentions, mentions
from test_cli import msrl

TUNE = (
    "posttrain_gpt.py --stage sft --finetune --load ckpt --data-path data --lr 1e-5 "
    "--global-batch-size 16 --train-iters 20"
)


def convert(line: str) -> Translation:
    return translate_arguments("mindspeed-llm", line.split())


def native_tree(line: str) -> Any:
    return plain(parse(native_yaml(convert(line)), "native.yaml"))


def mistakes(line: str) -> list[str]:
    with pytest.raises(MsrlError) as caught:
        convert(line)
    return str(caught.value).splitlines()


def test_torchrun_sets_the_devices_of_the_training(tmp_path: Path):
    launcher = (
        "torchrun --nproc_per_node 8 --nnodes=4 --node_rank 0 --master_addr localhost "
        "--master_port 6000 "
    )
    (tmp_path / "native.yaml").write_text(native_yaml(convert(launcher + TUNE)), encoding="utf-8")
    cluster = load([str(tmp_path / "native.yaml")]).config.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (4, 8)
    assert_each_mentions(
        mistakes(f"torchrun --nnodes 1:4 {TUNE}"),
        ("command line", "nnodes=1:4", "integer", "cluster.nodes"),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{TUNE} --spec mindspeed_llm.tasks.models.spec.longcat_spec layer_spec", "longcat"),
        (f"{TUNE} --lora-modules-to-save x --model-type-hf plm", "plm"),
        ("convert_ckpt_v2.py --load-dir a --save-dir b --model-type-hf phi3.5-moe", "phi3.5-moe"),
        ("inference.py --load a --spec mindspeed_llm.tasks.models.spec.plm_spec layer_spec", "plm"),
        ("inference.py --load a --task chat --enable-mhc", "hyper-connections"),
        ("inference.py --load a --task chat --num-zero-experts 4", "experts without computation"),
    ],
)
def test_a_model_without_a_family_is_the_only_reason_of_a_refusal(line: str, words: str) -> None:
    (message,) = mistakes(line)
    assert_mentions(message, "not supported: the model", words)


@pytest.mark.parametrize(
    "flags",
    [
        "--model-type-hf HYV3 --spec mindspeed_llm.tasks.models.spec.bailing_spec layer_spec",
        "--model-type-hf bailing_mini",
        "--model-type-hf glm5",
        "--model-type-hf minimax_m2 --spec mindspeed_llm.tasks.models.spec.minimax_spec layer_spec",
        "--model-type-hf qwen3-next --spec mindspeed_llm.tasks.models.spec.qwen3_next_spec x "
        "--full-attention-interval 4 --mamba-d-conv 4 --mamba-expand 1 --mamba-chunk-size 64 "
        "--no-enable-linear-qkv",
        *(f"--model-type-hf {model}" for model in ("phi3.5", "minicpm", "minicpm3")),
    ],
)
def test_models_whose_checkpoints_are_read_are_imported(flags: str) -> None:
    assert native_tree(f"{TUNE} {flags}") == native_tree(TUNE)


def test_a_conversion_has_the_names_that_the_original_gives_to_qwen3_next() -> None:
    line = "convert_ckpt_v2.py --load-model-type hf --save-model-type mg --load-dir a --save-dir b"
    trees = [native_tree(f"{line} --model-type-hf {model}") for model in ("qwen3-next", "qwen3")]
    assert [tree["convert"].get("names") for tree in trees] == ["mindspeed", None]


def test_a_training_without_the_flag_bf16_uses_float32():
    assert native_tree(TUNE)["model"]["dtype"] == "float32"
    assert native_tree(f"{TUNE} --bf16")["model"]["dtype"] == "bfloat16"


def test_dropout_is_refused_in_a_supervised_script_too():
    (line,) = mistakes(f"{TUNE} --hidden-dropout 0.1 --attention-dropout 0")
    assert_mentions(line, "command line: hidden_dropout=0.1: ", "dropout", 0)


@pytest.mark.parametrize("flag", ["--lr 1e-5", "--global-batch-size 16"])
def test_a_script_must_set_learning_rate_and_batch_size(flag: str):
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
def test_load_balancing_flags_of_a_script_are_translated(
    flags: str, router: dict[str, object] | None, tmp_path: Path
):
    mixture = (
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --norm-topk-prob "
        "--moe-grouped-gemm "
    )
    speed = (
        "--moe-token-dispatcher-type alltoall_seq --use-ascend-mc2 --reuse-fp32-param "
        "--use-cp-send-recv-overlap --neat-pack "
    )
    line = f"{TUNE} {mixture}{speed}{flags}"
    assert native_tree(line)["train"].get("router") == router
    (tmp_path / "native.yaml").write_text(native_yaml(convert(line)), encoding="utf-8")
    assert load([str(tmp_path / "native.yaml")])


@pytest.mark.parametrize(
    ("flags", "coef"),
    [
        ("--enable-dsa-indexer", 1.0),
        ("--enable-dsa-indexer --indexer-loss-coeff 0.01", 0.01),
        ("--enable-dsa-indexer --lora-target-modules linear_proj", None),
        ("--indexer-loss-coeff 0.01", None),
    ],
)
def test_indexers_are_trained_where_the_original_trains_them(
    flags: str, coef: float | None
) -> None:
    translation = translate_arguments("mindspeed-llm", f"{TUNE} {flags}".split(), approximate=True)
    tree: Any = plain(parse(native_yaml(translation), "native.yaml"))
    assert tree["train"].get("indexer_loss_coef") == coef


def test_irrelevant_model_properties_are_not_checked(tmp_path: Path):
    """Scripts set max_position_embeddings to the sequence length and an unused ffn width."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    make_model(tmp_path / "mixture", **mixture)
    translation = convert(
        f"{TUNE} --tokenizer-name-or-path {tmp_path}/mixture --max-position-embeddings 77 "
        "--ffn-hidden-size 8192"
    )
    statuses = {key_result.entry.key: key_result.status for key_result in translation.key_results}
    assert (statuses["max_position_embeddings"], statuses["ffn_hidden_size"]) == (
        KeyStatus.SAME,
        KeyStatus.DEAD,
    )
    make_model(tmp_path / "dense")
    (line,) = mistakes(f"{TUNE} --tokenizer-name-or-path {tmp_path}/dense --ffn-hidden-size 8192")
    assert_mentions(line, "ffn_hidden_size=8192", "config.json")


def test_unknown_load_balancing_is_refused():
    (line,) = mistakes(f"{TUNE} --moe-router-load-balancing-type sinkhorn")
    assert_mentions(line, "sinkhorn", "aux_loss", "seq_aux_loss", "none")


def test_an_evaluation_script_names_benchmarks():
    """The flags of evaluate_qwen3_8b_ptd.sh, and those of other tasks."""
    line = (
        "torchrun --nproc_per_node 8 evaluation.py --spec "
        "mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --task-data-path data "
        "--task mmlu human_eval --use-mcore-models "
        "--tensor-model-parallel-size 2 --num-layers 36 --num-attention-heads 32 "
        "--max-new-tokens 2 --load ckpt --no-chat-template --tokenizer-name-or-path tok "
        "--micro-batch-size 1 --evaluation-batch-size 1 --max-eval-samples 8 --seed 42 --bf16"
    )
    tree = native_tree(line)
    assert tree["evaluate"] == {
        "benchmarks": ["mmlu", "humaneval"],
        "models": ["ckpt"],
        "chat_template": False,
    }
    assert tree["model"] == {"dtype": "bfloat16"} and tree["eval"] == {"prompts": 8}
    assert tree["rollout"]["engine"]["tp"] == 2
    report = "\n".join(full(convert(line)))
    assert_mentions(report, "task_data_path", "evaluate.benchmark_data", "accuracies differ")
    (message,) = mistakes("evaluation.py --load ckpt --task needlebench --bf16")
    assert_mentions(message, "task=needlebench", "needlebench")
    (message,) = mistakes("evaluation.py --load ckpt --task mmul --bf16")
    assert_mentions(message, "task=mmul", "mmlu")


def test_an_inference_script_samples_like_the_original():
    model = (
        "--use-mcore-models --tensor-model-parallel-size 1 --num-layers 24 --seq-length 4096 "
        "--micro-batch-size 1 --bf16"
    )
    line = (
        f"torchrun --nproc_per_node 1 inference.py {model} --load ckpt --tokenizer-name-or-path "
        "tok --seed 42"
    )
    sampling = {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "max_tokens": 128}
    tree = native_tree(line)
    both = {"model": "ckpt", "seed": 42, "dtype": "bfloat16", "raw": True, **sampling}
    assert tree == {
        "rollout": {"engine": {"tp": 1}},
        "generate": {"prompt": "how are you?", **both},
        "chat": {"history_turns": 3, "history_keeps": "oldest", **both},
    }
    statuses = {key_result.entry.key: key_result.status for key_result in convert(line).key_results}
    assert statuses["num_layers"] is KeyStatus.SAME
    assert statuses["nproc_per_node"] is KeyStatus.PLACEMENT


def test_the_inference_task_sets_the_sampling():
    translation = convert("inference.py --task greedy --load ckpt --temperature 0.9 --top-k 5")
    sampling = plain(translation.tree)["generate"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0, 1, -1)
    assert {
        key_result.entry.key
        for key_result in translation.key_results
        if key_result.status is KeyStatus.DEAD
    } == {
        "temperature",
        "top_k",
    }
    assert (
        plain(convert("inference.py --task do_sample --load ckpt --temperature 0.9").tree)[
            "generate"
        ]["temperature"]
        == 0.9
    )
    (line,) = mistakes("inference.py --task beam_search --load ckpt")
    assert_mentions(line, "command line: task=beam_search: ", "beam")


def test_a_greedy_task_beside_a_chat_stays_greedy_and_the_chat_samples():
    line = "inference.py --task greedy chat --load ckpt --temperature 0.9"
    tree = plain(convert(line).complete_tree())
    assert (tree["generate"]["temperature"], tree["generate"]["top_k"]) == (0, -1)
    assert (tree["chat"]["temperature"], tree["chat"]["top_k"]) == (0.9, 50)


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
def test_lora_target_modules_of_a_script_enable_adapters(
    flags: str, lora: dict[str, object] | None
):
    assert native_tree(f"{TUNE} {flags}")["train"].get("lora") == lora


def test_warmup_is_a_fraction_or_a_number_of_updates():
    assert (
        native_tree(f"{TUNE} --lr-warmup-fraction 0.01 --lr-warmup-iters 0")["train"]["optimizer"][
            "warmup"
        ]
        == 0.01
    )
    (line,) = mistakes(f"{TUNE} --lr-warmup-fraction 0.01 --lr-warmup-iters 5")
    assert_mentions(line, "lr_warmup_iters=5", "lr_warmup_fraction")


@pytest.mark.parametrize(
    ("flag", "from_zero"),
    [("--lr-warmup-fraction 0.01", True), ("--lr-warmup-iters 5", True), ("", None),
     ("--lr-warmup-fraction 0.0", None)],
)  # fmt: skip
def test_a_warmup_of_megatron_begins_at_zero(flag: str, from_zero: bool | None):
    optimizer = native_tree(f"{TUNE} {flag}")["train"]["optimizer"]
    assert optimizer.get("warmup_from_zero") is from_zero


SFT = """\
defaults: [{model: [small]}]
sft:
  {model: small, stage: sft, tokenizer_name_or_path: hf, load: ckpt, finetune: true,
   data_path: data,
   global_batch_size: 4, micro_batch_size: 2, train_iters: 5,
   lr: 5e-5, min_lr: 1e-6, lr_decay_style: cosine, lr_warmup_fraction: 0.01,
   no_shuffle: true, lora_target_modules: [linear_qkv]}
"""


def test_a_supervised_file_of_mindspeed_rl_trains_unchanged(
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
        ("stage: sft", "stage: trl_ppo", ("stage=trl_ppo", "sft", "msrl train-grpo")),
        ("stage: sft", "stage: prm", ("reward_tokens", "missing", "steps")),
        (
            "sft:\n",
            "rl_config: {}\nsft:\n",
            ("rl_config", "key", "MindSpeed-RL", "defaults", "sft"),
        ),
        ("model: small, ", "model: large, ", ("large", "defaults", "small")),
        ("lr: 5e-5, ", "", ("lr", "missing", "learning rate")),
    ],
)
def test_errors_in_a_supervised_file_are_reported(
    old: str, new: str, fragments: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("small: {num_layers: 4}", encoding="utf-8")
    (tmp_path / "tune.yaml").write_text(SFT.replace(old, new), encoding="utf-8")
    with pytest.raises(MsrlError) as caught:
        load([str(tmp_path / "tune.yaml")])
    assert_mentions(caught.value, *fragments)


def test_hydra_overrides_are_refused_with_the_msrl_syntax(
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


def test_float16_and_losses_over_devices_are_approximated_only_on_request():
    moe = "--moe-router-load-balancing-type group_limited_greedy --moe-comm-aux-loss-coeff 0.02"
    lines = mistakes(f"{TUNE} --fp16 {moe}")
    assert_each_mentions(
        lines, ("fp16=true", "--approximate"), ("moe_comm_aux_loss_coeff", "--approximate")
    )
    translation = translate_arguments(
        "mindspeed-llm", f"{TUNE} --fp16 {moe}".split(), approximate=True
    )
    tree = plain(parse(native_yaml(translation), "native.yaml"))
    assert tree["model"]["dtype"] == "bfloat16"
    status = {o.entry.key: o.status for o in translation.key_results}
    assert status["moe_comm_aux_loss_coeff"] is KeyStatus.DROPPED
    unread = moe.replace("group_limited_greedy", "aux_loss")
    (result,) = [o for o in convert(f"{TUNE} {unread}").key_results if "comm_aux" in o.entry.key]
    assert result.status is KeyStatus.DEAD


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hidden-dropout 0", ("hidden_dropout", 0.1)),
        ("--split 100,0,0", ("969,30,1",)),
    ],
)
def test_defaults_that_msrl_does_not_have_are_reported(flags: str, words: tuple[object, ...]):
    for line, is_reported in ((TUNE, True), (f"{TUNE} {flags}", False)):
        lines = full(convert(line))
        assert any(re.search(mentions(*words), text) for text in lines) == is_reported


def test_a_loss_is_averaged_as_in_the_original():
    """Without --calculate-per-token-loss, it is the mean over micro-batches of token means."""
    groups = {"mode": "micro-batch-mean", "samples_per_group": 2}
    assert native_tree(f"{TUNE} --micro-batch-size 2")["algo"]["aggregate"] == groups
    tree = native_tree(f"{TUNE} --micro-batch-size 2 --calculate-per-token-loss")
    assert "algo" not in tree


def test_attention_across_packed_sequences_is_reported():
    words = mentions("reset-attention-mask", "attend")
    packs = {"": False, "--pack": True, "--pack --reset-attention-mask": False}
    for flags, is_reported in packs.items():
        lines = full(convert(f"{TUNE} {flags}"))
        assert any(re.search(words, line) for line in lines) == is_reported


def test_properties_of_experts_are_compared_with_the_config_of_the_model(tmp_path: Path):
    model = make_model(tmp_path / "model", **MIXTURE)
    line = f"{TUNE} --tokenizer-name-or-path {model} --num-experts"
    (result,) = [o for o in convert(f"{line} 8").key_results if o.entry.key == "num_experts"]
    assert_mentions(result.text, "equals", "config.json")
    (error,) = mistakes(f"{line} 16")
    assert_mentions(error, "num_experts=16", "config.json", 8)


def test_groups_of_experts_that_the_original_does_not_read_are_not_compared(tmp_path: Path):
    model = make_model(tmp_path / "model", **MIXTURE)
    line = f"{TUNE} --tokenizer-name-or-path {model} --moe-router-num-groups 4"
    balancing = "--moe-router-load-balancing-type"
    (result,) = [
        o
        for o in convert(f"{line} {balancing} pai_megatron_aux_loss").key_results
        if o.entry.key == "moe_router_num_groups"
    ]
    assert_mentions(result.text, "pai_megatron_aux_loss", "no groups")
    (error,) = mistakes(f"{line} {balancing} aux_loss")
    assert_mentions(error, "moe_router_num_groups=4", "config.json")


def test_the_number_of_layers_includes_empty_ones(tmp_path: Path):
    model = make_model(tmp_path / "model", num_hidden_layers=4)
    line = f"{TUNE} --tokenizer-name-or-path {model} --noop-layers 4,5 --num-layers"
    (result,) = [o for o in convert(f"{line} 6").key_results if o.entry.key == "num_layers"]
    assert_mentions(result.text, "equals", "config.json")
    (error,) = mistakes(f"{line} 4")
    assert_mentions(error, "num_layers=4", "config.json", 6)


MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32,
    "attention_bias": False, "sliding_window": None, "num_experts": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}  # fmt: skip


def test_a_conversion_without_a_dtype_keeps_that_of_the_weights_with_a_report():
    line = "{}.py --load-model-type hf --save-model-type mg --load-dir a --save-dir b {}"
    lines = {
        (program, flags): convert(line.format(program, flags)).remarks
        for program in ("convert_ckpt", "convert_ckpt_v2")
        for flags in ("", "--params-dtype bf16")
    }
    (remark,) = lines.pop(("convert_ckpt", ""))
    assert_mentions(remark, "params-dtype", "float16")
    assert not any(lines.values())
