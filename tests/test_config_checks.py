"""What is known wrong before any device is asked for, and what follows from a configuration by arithmetic."""
# ruff: noqa: E501  (lines as users see them)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config_inputs import make_mcore, make_model, make_working_folder
from msrl.checks.validate import guess
from msrl.cli.configuration import load_configuration as load
from msrl.config.loader import Flag
from msrl.config.schema import Config
from msrl.config.templates import template_names
from msrl.errors import MsrlError
from msrl.memory.estimate import memory_rows
from msrl.memory.states import bytes_per_device, parameters_per_rank
from msrl.models.families import load_shape, num_parameters
from msrl.models.parallel_layout import Cut
from msrl.plan.derived import derived, model_shape, ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with everything that trainings need."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def mistakes(command: str, *sets: str, file: str | None = None, flags: tuple[Flag, ...] = ()) -> list[str]:
    files = [file or {"train-sft": "sft.yaml", "train-grpo": "grpo.yaml"}[command]] if file or command.startswith("train") else []
    with pytest.raises(MsrlError) as caught:
        load(files, sets, flags, command)
    return str(caught.value).splitlines()


def test_right_configurations_pass(folder: Path):
    assert load(["sft.yaml"], command="train-sft").config.train.steps == 10
    assert load(["grpo.yaml"], command="train-grpo").config.rollout.samples_per_prompt == 8


def test_missing_keys_say_what_they_mean(folder: Path):
    assert mistakes("train-grpo", file="sft") == [
        "model.path: is missing; set model.path: Hugging Face folder or mcore checkpoint folder to start from",
        "data.train: is missing; set data.train: Prefix of the training data: examples for train-sft, prompts for train-grpo",
        "train.steps: is missing; set train.steps or train.epochs",
        "reward.sources: is missing; name at least one, as in reward: {sources: [{verifier: acc}]}",
    ]


def test_missing_files_are_named_by_key(folder: Path):
    (folder / "empty").mkdir()
    sets = ("model.path=gone", "checkpoint.load=empty", "data.train=other", "data.eval=dat", "checkpoint.resume=old", "model.tokenizer=tok")
    assert mistakes("train-sft", *sets) == [
        "--set: model.path=gone: there is no such folder",
        "--set: checkpoint.load=empty: holds neither config.json (Hugging Face) nor latest_checkpointed_iteration.txt (mcore)",
        "--set: model.tokenizer=tok: there is no such folder",
        "--set: data.train=other: there is no preprocessed data of this prefix (other_*.idx); write it with `msrl preprocess`",
        "--set: data.eval=dat: there is no preprocessed data of this prefix (dat_*.idx); write it with `msrl preprocess`",
        "--set: checkpoint.resume=old: must be none, auto, or the folder of a checkpoint; there is no such folder",
    ]


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (("train.global_batch=6", "train.micro_batch=4"), "--set: train.global_batch=6: must be a multiple of 4 (data parallel 1 * train.micro_batch 4)"),
        (
            ("cluster.devices_per_node=4", "train.parallel.tp=2", "train.global_batch=3"),
            "--set: train.global_batch=3: must be a multiple of 2 (data parallel 2 * train.micro_batch 1)",
        ),
        (
            ("cluster.devices_per_node=2", "train.max_tokens_per_micro_batch=64", "train.global_batch=3"),
            "--set: train.global_batch=3: must be a multiple of 2 (data parallel 2)",
        ),
        (
            ("cluster.devices_per_node=3", "train.parallel.tp=2", "train.global_batch=2"),
            "--set: cluster.devices_per_node=3: must be a multiple of the 2 ranks that train.parallel (tp 2, pp 1) makes of one model",
        ),
        (("train.parallel.tp=8",), "--set: train.parallel.tp=8: must divide the model's 4 query groups"),
        (("train.parallel.ep=2",), "--set: train.parallel.ep=2: the model has no experts; leave it out"),
        (("train.parallel.pp=2", "train.parallel.vpp=2"), "--set: train.parallel.vpp=2: is all of the 2 layers of a stage; fewer make virtual stages, or leave it out"),
        (("train.parallel.pp=3",), "--set: train.parallel.pp=3: must divide the model's 4 layers"),
        (("train.parallel.sp=true",), "--set: train.parallel.sp=true: spreads over tensor-parallel ranks; set train.parallel.tp above 1, or false"),
        (("data.seq_length=513",), "--set: data.seq_length=513: the model takes at most 512 tokens"),
        (("train.epochs=2",), "--set: train.epochs=2: stands beside train.steps=10; set only one of them, the other to null"),
        (("train.optimizer.min_lr=1.0",), "--set: train.optimizer.min_lr=1.0: must be at most train.optimizer.lr=1e-05"),
        (("eval.every_steps=5",), "--set: eval.every_steps=5: needs data.eval, the prefix of the held-out data, or data.eval_fraction, a share of data.train"),
        (("train.freeze=['*']",), '--set: train.freeze=["*"]: leaves nothing to train'),
        (("train.freeze=['*.bias']", "train.lora.rank=2"), '--set: train.freeze=["*.bias"]: stands beside train.lora, which freezes the whole model; set only one of them'),
        (
            ("train.max_tokens_per_micro_batch=64", "train.micro_batch=2"),
            "--set: train.micro_batch=2: has no effect beside train.max_tokens_per_micro_batch; set only one of them",
        ),
        (
            ("train.max_tokens_per_micro_batch=64", "data.seq_length=65"),
            "--set: train.max_tokens_per_micro_batch=64: must hold at least one row: data.seq_length=65",
        ),
        (("model.template=qwn_r1",), "--set: model.template=qwn_r1: there is no template of this name; did you mean 'qwen_r1'?; or give the path of a YAML file"),
    ],
)  # fmt: skip
def test_what_does_not_fit_in_sft_is_one_line(folder: Path, sets: tuple[str, ...], line: str):
    assert mistakes("train-sft", *sets) == [line]


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (("rollout.samples_per_prompt=1",), "--set: rollout.samples_per_prompt=1: group_norm compares the completions of a prompt and needs at least 2; set 2 or more"),
        (
            ("train.updates.samples_per_update=12",),
            "--set: train.updates.samples_per_update=12: must divide the samples of a step: 4 prompts * 8 samples = 32",
        ),
        (("train.micro_batch=3",), "train.updates.samples_per_update: 32 samples must be a multiple of 3 (data parallel 1 * train.micro_batch 3)"),
        (
            ("rollout.max_response_tokens=500",),
            "--set: rollout.max_response_tokens=500: rollout.max_prompt_tokens 64 + max_response_tokens 500 = 564 tokens, and the model takes at most 512",
        ),
        (
            ("rollout.engine.max_model_len=127",),
            "--set: rollout.engine.max_model_len=127: must hold rollout.max_prompt_tokens 64 + max_response_tokens 64 = 128 tokens",
        ),
        (
            ("train.max_tokens_per_micro_batch=100",),
            "--set: train.max_tokens_per_micro_batch=100: must hold one sequence: rollout.max_prompt_tokens 64 + max_response_tokens 64 = 128 tokens",
        ),
        (("eval.every_steps=5",), "--set: eval.every_steps=5: needs data.eval, the prefix of the held-out data"),
        (("rollout.engine.tp=2",), "--set: rollout.engine.tp=2: 1 engines of 2 devices need 2, and training has 1; set cluster.devices_per_node"),
        (
            ("rollout.sampling.temperature=0",),
            "--set: rollout.sampling.temperature=0.0: must be above 0: with greedy sampling all samples of a prompt are the same",
        ),
        (
            ("rollout.sampling.temperature=0.001",),
            "--set: rollout.sampling.temperature=0.001: the engine samples at temperatures from 0.01 to 2; set one of them",
        ),
        (("algo.policy_loss=pppo",), "--set: algo.policy_loss=pppo: there is no such plugin in algorithms.losses; did you mean 'ppo'?"),
        (
            ("algo.advantage.estimator=group_nrm",),
            "--set: algo.advantage.estimator=group_nrm: there is no such plugin in algorithms.advantages; did you mean 'group_norm'?",
        ),
        (
            ("reward.sources.0.verifier=strict_formt",),
            "--set: reward.sources.0.verifier=strict_formt: there is no such plugin in rewards.verifiers; did you mean 'strict_format'?",
        ),
        (("algo.options={eps: 1}",), "--set: algo.options.eps=1: not an option here; it takes none"),
        (("reward.sources.0.weight=0",), "reward.sources: all weights are 0, so that every completion scores the same; set one"),
        (("reward.sources=[{verifier: acc}, {verifier: acc}]",), "--set: reward.sources.1.verifier=acc: is named twice; add the two weights, or tell them apart by name"),
        (
            ("reward.overlong={buffer: 1000, factor: 1}",),
            "--set: reward.overlong.buffer=1000: must be at most rollout.max_response_tokens=64",
        ),
        (("reward.overlong.factor=2",), "--set: reward.overlong.factor=2.0: has no effect without reward.overlong.buffer"),
        (("reward.length.right_above=0.5",), "--set: reward.length.right_above=0.5: has no effect without reward.length.coef"),
        (
            ("reward.sources=[{verifier: acc, url: 'http://a'}]",),
            "--set: reward.sources.0.url=http://a: exactly one of verifier, function, url, model says what scores; there are 2",
        ),
        (("reward.sources=[{verifier: regex_match}]",), "--set: reward.sources.0.verifier=regex_match: needs options.pattern, a regular expression"),
        (("reward.sources.0.options={colour: red}",), "--set: reward.sources.0.options.colour=red: not an option here; known: percent, tolerance"),
    ],
)  # fmt: skip
def test_what_does_not_fit_in_grpo_is_one_line(folder: Path, sets: tuple[str, ...], line: str):
    assert mistakes("train-grpo", *sets) == [line]


def test_normalising_by_group_needs_a_group(folder: Path):
    sets = (
        "rollout.samples_per_prompt=1",
        "algo.advantage.estimator=reinforce",
        "reward.norm={center: group, scale: group}",
        "reward.length.coef=1",
    )
    said = "compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more"
    assert [line for line in mistakes("train-grpo", *sets) if "reward." in line] == [
        f"--set: reward.norm.center=group: {said}", f"--set: reward.norm.scale=group: {said}", f"--set: reward.length.coef=1.0: {said}"
    ]  # fmt: skip


def test_an_unknown_architecture_is_refused_by_name(folder: Path):
    make_model(folder / "odd", architectures=["MambaForCausalLM"])
    (line,) = mistakes("train-sft", "model.path=odd")
    assert "architecture MambaForCausalLM is not supported; supported: " in line and "Qwen2ForCausalLM" in line


def test_each_prefix_of_a_blend_is_named_with_its_line(folder: Path):
    text = "data:\n  handler: pretrain\n  seq_length: 8\n  train: null\n  blend:\n    data: 1.0\n    some/gone.v2: 2.0\n"
    (folder / "blend.yaml").write_text("defaults: [sft.yaml]\n" + text, encoding="utf-8")
    gone = "there is no preprocessed data of this prefix (some/gone.v2_*.idx); write it with `msrl preprocess`"
    assert mistakes("train-sft", file="blend.yaml") == [f"blend.yaml:8: data.blend.some/gone.v2=2.0: {gone}"]
    (folder / "data_manifest.json").write_text(json.dumps({"kind": "sft"}), encoding="utf-8")
    line = mistakes("train-sft", file="blend.yaml")[1]
    assert line == "blend.yaml:7: data.blend.data=1.0: holds sft data, and pretrain is needed; preprocess it with handler pretrain"
    (folder / "data_manifest.json").unlink()
    both = "stands beside data.train; set one of them to null, data.train where all prefixes stand here"
    assert mistakes("train-sft", "data.handler=pretrain", "data.seq_length=8", "data.blend={data: 2.0}") == [
        f"--set: data.blend={{data: 2.0}}: {both}"
    ]
    load(["blend.yaml"], ["data.blend=null", "data.train=data"], command="train-sft")


def test_a_conversion_is_checked_before_it_starts(folder: Path):
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("", encoding="utf-8")
    hf2mcore = Flag("convert.command", "hf2mcore", "hf2mcore")
    flags = (hf2mcore, Flag("convert.load", "model", "--load"), Flag("convert.save", "full", "--save"), Flag("convert.tp", 3, "--tp"))
    assert mistakes("convert-ckpt", flags=flags) == [
        "--tp: convert.tp=3: must divide the model's 4 query groups",
        "--tp: convert.tp=3: must divide the model's 8 attention heads",
        "--save: convert.save=full: exists and is not an empty folder; name another, or remove it",
    ]
    assert mistakes("convert-ckpt", "convert.command=mcore2hf", "convert.load=model") == [
        "--set: convert.load=model: holds no latest_checkpointed_iteration.txt; give the folder of an mcore checkpoint",
        "convert.save: is missing; give --save: Folder to write; new or empty",
    ]
    make_mcore(folder / "mcore")
    assert load(sets=["convert.command=inspect", "convert.load=mcore"], command="convert-ckpt").config.convert.save is None
    load(sets=["convert.command=reshard", "convert.load=mcore", "convert.save=new", "convert.pp=2"], command="convert-ckpt")
    assert mistakes("convert-ckpt", "convert.command=hf2mcore", "convert.load=model", "convert.save=new", "convert.orm=true") == [
        "--set: convert.orm=true: Qwen2ForCausalLM has no score head, as a reward model (...ForSequenceClassification) has; leave it out"
    ]


def test_preprocessing_is_checked_before_it_starts(folder: Path):
    (folder / "rows.jsonl").write_text("", encoding="utf-8")
    assert mistakes(
        "preprocess",
        "preprocess.input=[rows.jsonl, '*.json', gone]",
        "preprocess.handler=alpaka",
        "preprocess.template=qwn",
        "preprocess.pack=true",
    ) == [
        "preprocess.tokenizer: is missing; give --tokenizer: Folder of the Hugging Face tokenizer",
        "preprocess.output_prefix: is missing; give --output-prefix: Beginning of the names of all files written",
        "--set: preprocess.input.1=*.json: there is no such file or folder",
        "--set: preprocess.input.2=gone: there is no such file or folder",
        "--set: preprocess.template=qwn: there is no template of this name; did you mean 'qwen'?; or give the path of a YAML file",
        "--set: preprocess.handler=alpaka: there is no such plugin in data.handlers; did you mean 'alpaca'?",
        "preprocess.seq_length: is missing; give --seq-length: Longest row in tokens; longer ones are dropped and counted",
    ]
    right = ["preprocess.input=[rows.jsonl]", "preprocess.tokenizer=model", "preprocess.output_prefix=out"]
    load(sets=[*right, "preprocess.handler=pretrain"], command="preprocess")
    load(sets=[*right, "preprocess.handler=GeneralPretrainHandler"], command="preprocess")
    load(sets=[*right, "preprocess.handler=AlpacaStyleInstructionHandler", "preprocess.template=qwen"], command="preprocess")
    (line,) = mistakes("preprocess", *right, "preprocess.handler=alpaca")
    assert line.startswith("preprocess.template: is missing; give --template")
    assert line.endswith("packaged: " + ", ".join(template_names()) + " (native is the tokenizer's own)") and "qwen_math_r1, " in line


def test_generation_takes_one_prompt_or_one_file(folder: Path):
    either = "generate.prompt: give either --prompt TEXT or --input FILE, one of the two"
    assert mistakes("generate", "generate.model=model") == [either]
    assert mistakes(
        "generate", "generate.model=data", "generate.input=gone", "generate.raw=true", "generate.system=x", "generate.num_samples=2"
    ) == [
        "--set: generate.model=data: there is no such folder",
        "--set: generate.input=gone: there is no such file",
        "--set: generate.raw=true: takes prompts as they are; leave out template and system",
        "--set: generate.num_samples=2: all samples would be the same at temperature 0; set a temperature above 0",
    ]
    load(sets=["generate.model=model", "generate.prompt=1 + 1"], command="generate")
    load(sets=["chat.model=model"], command="chat")
    hot = "the engine samples at temperatures from 0.01 to 2; set one of them"
    for command in ("generate", "chat"):
        given = [f"{command}.model=model", *(["generate.prompt=x"] if command == "generate" else [])]
        load(sets=[*given, f"{command}.temperature=2"], command=command)
        assert mistakes(command, *given, f"{command}.temperature=2.5") == [f"--set: {command}.temperature=2.5: {hot}"]
    assert mistakes("chat") == ["chat.model: is missing; give --model: Hugging Face folder or mcore checkpoint folder"]


@pytest.mark.parametrize(
    ("sets", "command"),
    [
        (["reward.sources=[{verifier: acc}]", "data.train=x"], "train-grpo"),
        (["data.train=x", "train.steps=1"], "train-sft"),
        (["convert.tp=2"], "convert-ckpt"),
        (["chat.model=x"], "chat"),
        (["run.name=x"], None),
    ],
)
def test_the_command_of_a_configuration_is_guessed_from_its_sections(sets: list[str], command: str | None):
    assert guess(load(sets=sets)) == command


def test_ranks_are_numbered_tensor_then_data_then_pipeline(folder: Path):
    sets = ["cluster.devices_per_node=8", "train.parallel.tp=2", "train.parallel.pp=2", "rollout.engine.tp=2", "rollout.engine.dp=2"]
    table = ranks(load(["grpo.yaml"], sets, command="train-grpo").config, "train-grpo")
    assert [(rank.tp, rank.dp, rank.pp) for rank in table] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 1),
        (1, 1, 1),
    ]
    assert [rank.engine for rank in table] == [0, 0, 1, 1, None, None, None, None]


def test_the_arithmetic_of_a_grpo_step(folder: Path):
    sets = ["cluster.devices_per_node=2", "train.updates.samples_per_update=16", "train.updates.epochs=3", "train.micro_batch=4"]
    rows = derived(load(["grpo.yaml"], sets, command="train-grpo").config, "train-grpo")
    assert rows["data parallel"] == 2
    assert rows["samples per step"] == 4 * 8
    assert rows["optimizer updates per step"] == 2 * 3
    assert rows["optimizer updates in all"] == 60
    assert rows["micro-batches per update on a rank"] == 16 // 2 // 4
    assert rows["longest prompt plus response"] == 128
    assert rows["rank 1"] == "trains tp 0 dp 1 pp 0"


def test_parameters_of_a_rank_agree_with_a_count_by_hand(folder: Path):
    shape = load_shape(folder / "model")
    hidden, ffn, vocab, layers, head_dim, heads, groups = 64, 96, 1001, 4, 8, 8, 4
    qkv_rows = (heads + 2 * groups) * head_dim
    matrices = qkv_rows * hidden + qkv_rows + heads * head_dim * hidden + 3 * ffn * hidden
    norms = 2 * hidden
    assert parameters_per_rank(shape, Cut()) == num_parameters(shape) == layers * (matrices + norms) + vocab * hidden + hidden
    assert parameters_per_rank(shape, Cut(tp=2)) == layers * (matrices // 2 + norms) + 501 * hidden + hidden, (
        "the vocabulary is padded to 1002"
    )
    assert parameters_per_rank(shape, Cut(pp=2)) == 2 * (matrices + norms) + vocab * hidden + hidden, (
        "the last stage has a copy of the tied embedding"
    )


def test_bytes_of_a_device_follow_from_type_and_data_parallelism(folder: Path):
    config = load(["grpo.yaml"], ["cluster.devices_per_node=4", "train.parallel.tp=2"]).config
    shape = model_shape(config)
    assert shape is not None
    count = parameters_per_rank(shape, Cut(tp=2))
    assert bytes_per_device(config, shape) == {"weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count // 2}
    half = load(["grpo.yaml"], ["cluster.devices_per_node=4", "train.parallel.tp=2", "model.dtype=bfloat16"]).config
    assert bytes_per_device(half, shape) == {"weights": 2 * count, "gradients": 4 * count, "optimizer": 12 * count // 2}


def test_only_what_is_trained_has_gradients_and_a_place_in_the_optimizer(folder: Path):
    shape = model_shape(load(["sft.yaml"]).config)
    assert shape is not None
    hidden, ffn, layers, count = 64, 96, 4, parameters_per_rank(shape, Cut(tp=2))
    # Of each matrix at TP 2: rank x (what is cut, halved, and what is not).
    adapters = layers * 3 * ((hidden // 2 + hidden) + (hidden + ffn // 2))
    lora = ["train.lora.rank=3", "train.lora.targets=[o_proj, linear_fc2]"]
    cut = ["train.parallel.tp=2", "cluster.devices_per_node=2", "model.dtype=float32"]
    found = bytes_per_device(load(["sft.yaml"], [*cut, *lora]).config, shape)
    assert found == {"weights": 4 * (count + adapters), "gradients": 4 * adapters, "optimizer": 8 * adapters}
    frozen = bytes_per_device(load(["sft.yaml"], [*cut, "train.freeze=['*.mlp.*']"]).config, shape)
    trained = count - layers * (3 * ffn * hidden // 2)
    assert frozen == {"weights": 4 * count, "gradients": 4 * trained, "optimizer": 8 * trained}
    assert "reference weights" in memory_rows(load(["grpo.yaml"], ["algo.kl.loss.coef=0.1"]).config, "train-grpo")
    assert "reference weights" not in memory_rows(load(["grpo.yaml"], ["algo.kl.loss.coef=0.1", *lora]).config, "train-grpo")


def test_a_critic_takes_what_a_policy_without_an_output_layer_takes_and_is_trained_whole(folder: Path):
    cut = ["train.parallel.tp=2", "cluster.devices_per_node=4", "model.dtype=float32", "train.freeze=['*.mlp.*']"]
    rows = memory_rows(load(["grpo.yaml"], [*cut, "algo.preset=ppo"]).config, "train-grpo")
    shape = model_shape(load(["grpo.yaml"]).config)
    assert shape is not None and shape.tie_word_embeddings
    count = parameters_per_rank(shape, Cut(tp=2)) + shape.hidden_size // 2
    found = {name: rows[f"critic's {name}"] for name in ("weights", "gradients", "optimizer")}
    assert found == {"weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count // 2}
    assert not [name for name in memory_rows(load(["grpo.yaml"], cut).config, "train-grpo") if "critic" in name]


def test_nothing_is_derived_without_training_or_devices():
    assert derived(Config(), "chat") == {}
    assert derived(load(sets=["train.parallel.tp=4", "cluster.devices_per_node=2"]).config, "train-sft") == {}


@pytest.mark.parametrize(("command", "kind"), [("train-sft", "prompts"), ("train-grpo", "sft")])
def test_data_of_the_wrong_kind_is_refused_before_anything_starts(tmp_path, command, kind):
    (tmp_path / "data_manifest.json").write_text(json.dumps({"kind": kind}))
    with pytest.raises(MsrlError, match=rf"data\.train=.*: holds {kind} data"):
        load([], [f"data.train={tmp_path / 'data'}"], [], command)


def test_the_folder_of_a_run_is_answered_with_that_of_its_checkpoints(folder: Path):
    make_mcore(folder / "runs/sft/checkpoints")
    for command, key in (("generate", "generate.model"), ("train-sft", "model.path"), ("convert-ckpt", "convert.load")):
        lines = mistakes(command, f"{key}=runs/sft", "convert.command=mcore2hf", "convert.save=out", "generate.prompt=x")
        assert any(
            line.startswith(f"--set: {key}=runs/sft: holds n") and line.endswith("; did you mean runs/sft/checkpoints?") for line in lines
        )
