"""Checks that run before a command starts, and values derived from a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from config_inputs import make_manifest, make_mcore, make_model, make_working_folder
from msrl.checks.validate import guess
from msrl.cli.configuration import load_configuration as load
from msrl.config.loader import Flag
from msrl.config.schema import Config
from msrl.config.show import to_yaml
from msrl.config.templates import template_names
from msrl.errors import MsrlError
from msrl.memory.estimate import memory_rows
from msrl.memory.states import bytes_per_device, parameters_per_rank
from msrl.models.families import load_shape, num_parameters
from msrl.models.parallel_layout import ParallelLayout
from msrl.plan.derived import derived_values, ranks
from msrl.plan.run_plan import RunPlan, resolve
from support import assert_each_mentions, assert_mentions, labelled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with all inputs of a training."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def plan_run(name: str, *sets: str) -> RunPlan:
    return resolve(load([f"{name}.yaml"], sets).config, f"train-{name}")


def mistakes(
    command: str, *sets: str, file: str | None = None, flags: tuple[Flag, ...] = ()
) -> list[str]:
    files = (
        [file or {"train-sft": "sft.yaml", "train-grpo": "grpo.yaml"}[command]]
        if file or command.startswith("train")
        else []
    )
    with pytest.raises(MsrlError) as caught:
        load(files, sets, flags, command)
    return str(caught.value).splitlines()


def test_valid_configurations_pass(folder: Path):
    assert load(["sft.yaml"], command="train-sft").config.train.steps == 10
    assert load(["grpo.yaml"], command="train-grpo").config.rollout.samples_per_prompt == 8


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("command", "sets"),
    [
        ("train-sft", ()),
        ("train-grpo", ()),
        ("train-grpo", ("train.lora.rank=4", "rollout.filter.kind=all_equal")),
        ("train-grpo", ("rollout.async.max_staleness=1", "algo.mismatch.weight=token")),
        *(("train-grpo", (f"algo.preset={name}",)) for name in ("dapo", "gspo", "cispo")),
    ],
)
def test_the_written_configuration_of_a_run_is_valid(
    folder: Path, command: str, sets: tuple[str, ...]
):
    name = command.removeprefix("train-")
    config = load([f"{name}.yaml"], sets, command=command).config
    (folder / "written.yaml").write_text(to_yaml(config))
    again = load(["written.yaml"], command=command)
    assert again.config == config
    assert guess(again) == command


def test_missing_keys_are_reported_with_their_meaning(folder: Path):
    assert_each_mentions(
        mistakes("train-grpo", file="sft"),
        ("model.path", "missing"),
        ("data.train", "missing"),
        ("train.steps", "missing", "train.epochs"),
        ("train.global_batch=16", "train-grpo"),  # of the packaged file
        ("reward.sources", "missing", "verifier"),
    )


def test_missing_files_are_reported_by_key(folder: Path):
    (folder / "empty").mkdir()
    sets = (
        "model.path=gone",
        "checkpoint.load=empty",
        "data.train=other",
        "data.eval=dat",
        "checkpoint.resume=old",
        "model.tokenizer=tok",
    )
    assert_each_mentions(
        mistakes("train-sft", *sets),
        ("--set: model.path=gone", "folder"),
        ("--set: checkpoint.load=empty", "config.json", "latest_checkpointed_iteration.txt"),
        ("--set: model.tokenizer=tok", "folder"),
        ("--set: data.train=other", "other_*.idx", "msrl preprocess"),
        ("--set: data.eval=dat", "dat_*.idx", "msrl preprocess"),
        ("--set: checkpoint.resume=old", "folder"),
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        *((
            (f"train.updates.{setting}",), (f"--set: train.updates.{setting}", "train-sft"))
            for setting in ("epochs=2", "samples_per_update=4", "shuffle=false")),
        (("train.forward_micro_batch=2",), ("--set: train.forward_micro_batch=2", "train-sft")),
        (("cluster.roles.reference.load=model",), ("cluster.roles.reference", "train-sft")),
        (("cluster.roles.rollout.devices=1",), ("cluster.roles.rollout", "train-sft")),
        (("train.global_batch=6", "train.micro_batch=4"),
            ("--set: train.global_batch=6", "multiple of 4", "data parallel", "train.micro_batch")),
        (
            ("cluster.devices_per_node=4", "train.parallel.tp=2", "train.global_batch=3"),
            ("--set: train.global_batch=3", "multiple of 2", "train.micro_batch"),
        ),
        (
            ("cluster.devices_per_node=2", "train.max_tokens_per_micro_batch=64",
                "train.global_batch=3"),
            ("--set: train.global_batch=3", "multiple of 2", "data parallel"),
        ),
        (
            ("cluster.devices_per_node=3", "train.parallel.tp=2", "train.global_batch=2"),
            ("--set: cluster.devices_per_node=3", "train.parallel", "2 ranks"),
        ),
        (("train.parallel.tp=8",), ("--set: train.parallel.tp=8", "KV heads")),
        (("train.parallel.ep=2",), ("--set: train.parallel.ep=2", "experts")),
        (("train.parallel.pp=2", "train.parallel.vpp=2"),
            ("--set: train.parallel.vpp=2", "virtual", "2 layers")),
        (("train.parallel.pp=3",), ("--set: train.parallel.pp=3", "4 layers")),
        (("train.parallel.sp=true",), ("--set: train.parallel.sp=true", "train.parallel.tp")),
        (("data.seq_length=513",), ("--set: data.seq_length=513", "512")),
        (("train.epochs=2",), ("--set: train.epochs=2", "train.steps=10", "null")),
        (("train.optimizer.min_lr=1.0",),
            ("--set: train.optimizer.min_lr=1.0", "train.optimizer.lr=1e-05")),
        (("eval.every_steps=5",), ("--set: eval.every_steps=5", "data.eval", "data.eval_fraction")),
        (("data.eval_rows=last",), ("--set: data.eval_rows=last", "data.eval_fraction")),
        (("train.freeze=['*']",), ('--set: train.freeze=["*"]',)),
        (("train.freeze=['*.bias']", "train.lora.rank=2"),
            ('--set: train.freeze=["*.bias"]', "train.lora")),
        (
            ("train.max_tokens_per_micro_batch=64", "train.micro_batch=2"),
            ("--set: train.micro_batch=2", "train.max_tokens_per_micro_batch"),
        ),
        (
            ("train.max_tokens_per_micro_batch=64", "data.seq_length=65"),
            ("--set: train.max_tokens_per_micro_batch=64", "data.seq_length=65"),
        ),
        (("model.template=qwn_r1",), ("--set: model.template=qwn_r1", "'qwen_r1'", "YAML")),
    ],
)  # fmt: skip
def test_each_invalid_sft_setting_is_one_line(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
):
    assert_each_mentions(mistakes("train-sft", *sets), fragments)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("rollout.samples_per_prompt=1",),
            ("--set: rollout.samples_per_prompt=1", "group_norm", "at least 2")),
        (
            ("train.updates.samples_per_update=12",),
            ("--set: train.updates.samples_per_update=12", "4 prompts", "8 samples", "32"),
        ),
        (("train.global_batch=16",), ("--set: train.global_batch=16", "train-grpo")),
        (
            ("train.forward_micro_batch=2", "train.max_tokens_per_micro_batch=512"),
            ("--set: train.forward_micro_batch=2", "train.max_tokens_per_micro_batch"),
        ),
        (("train.micro_batch=3",), ("train.updates.samples_per_update", "32 samples",
            "multiple of 3")),
        (
            ("rollout.max_response_tokens=500",),
            ("--set: rollout.max_response_tokens=500", "rollout.max_prompt_tokens", "564", "512"),
        ),
        (
            ("rollout.engine.max_model_len=127",),
            ("--set: rollout.engine.max_model_len=127", "rollout.max_prompt_tokens", "128 tokens"),
        ),
        (
            ("train.max_tokens_per_micro_batch=100",),
            ("--set: train.max_tokens_per_micro_batch=100", "rollout.max_prompt_tokens",
                "128 tokens"),
        ),
        (("eval.every_steps=5",), ("--set: eval.every_steps=5", "data.eval")),
        (("rollout.engine.tp=2",), ("--set: rollout.engine.tp=2", "engine",
            "cluster.devices_per_node")),
        (
            ("rollout.sampling.temperature=0",),
            ("--set: rollout.sampling.temperature=0.0", "greedy"),
        ),
        (
            ("rollout.sampling.temperature=0.001",),
            ("--set: rollout.sampling.temperature=0.001", "0.01"),
        ),
        (("algo.policy_loss=pppo",),
            ("--set: algo.policy_loss=pppo", "one of", "'ppo'")),
        (
            ("algo.advantage.estimator=group_nrm",),
            ("--set: algo.advantage.estimator=group_nrm", "one of", "'group_norm'"),
        ),
        (
            ("reward.sources.0.verifier=strict_formt",),
            ("--set: reward.sources.0.verifier=strict_formt", "rewards.verifiers",
                "'strict_format'"),
        ),
        (("log.prometheus=65535",), ("--set: log.prometheus=65535", "lower port")),
        (("algo.options={eps: 1}",), ("--set: algo.options.eps=1", "option")),
        (("reward.sources.0.weight=0",), ("reward.sources", "weights", "0")),
        (("reward.sources=[{verifier: acc}, {verifier: acc}]",),
            ("--set: reward.sources.1.verifier=acc", "weights", "name")),
        (
            ("reward.overlong={buffer: 1000, factor: 1}",),
            ("--set: reward.overlong.buffer=1000", "rollout.max_response_tokens=64"),
        ),
        (("reward.overlong.factor=2",),
            ("--set: reward.overlong.factor=2.0", "reward.overlong.buffer")),
        (("reward.length.right_above=0.5",),
            ("--set: reward.length.right_above=0.5", "reward.length.coef")),
        (
            ("reward.sources=[{verifier: acc, url: 'http://a'}]",),
            ("--set: reward.sources.0.url=http://a", "verifier, function, url, model", "2"),
        ),
        (("reward.sources=[{verifier: regex_match}]",),
            ("--set: reward.sources.0.verifier=regex_match", "options.pattern",
            "regular expression")),
        (("reward.sources.0.options={colour: red}",),
            ("--set: reward.sources.0.options.colour=red", "option", "percent, tolerance")),
    ],
)  # fmt: skip
def test_each_invalid_grpo_setting_is_one_line(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
):
    assert_each_mentions(mistakes("train-grpo", *sets), fragments)


def test_normalization_by_group_needs_several_samples(folder: Path):
    sets = (
        "rollout.samples_per_prompt=1",
        "algo.advantage.estimator=reinforce",
        "reward.norm={center: group, scale: group}",
        "reward.length.coef=1",
    )
    assert_each_mentions(
        [line for line in mistakes("train-grpo", *sets) if "reward." in line],
        ("--set: reward.length.coef=1.0", "rollout.samples_per_prompt"),
        ("--set: reward.norm.center=group", "rollout.samples_per_prompt"),
        ("--set: reward.norm.scale=group", "rollout.samples_per_prompt"),
    )


def test_an_unknown_architecture_is_refused_by_name(folder: Path):
    make_model(folder / "odd", architectures=["MambaForCausalLM"])
    (line,) = mistakes("train-sft", "model.path=odd")
    assert_mentions(line, "MambaForCausalLM", "Qwen2ForCausalLM")


def test_each_prefix_of_a_blend_is_named_with_its_line(folder: Path):
    text = (
        "data:\n  handler: pretrain\n  seq_length: 8\n  train: null\n  blend:\n    data: "
        "1.0\n    some/gone.v2: 2.0\n"
    )
    (folder / "blend.yaml").write_text("defaults: [sft.yaml]\n" + text, encoding="utf-8")
    gone = ("blend.yaml:8: data.blend.some/gone.v2=2.0", "some/gone.v2_*.idx", "msrl preprocess")
    assert_each_mentions(mistakes("train-sft", file="blend.yaml"), gone)
    make_manifest(folder / "data", "sft")
    assert_each_mentions(
        mistakes("train-sft", file="blend.yaml"),
        gone,
        ("blend.yaml:7: data.blend.data=1.0", "sft", "pretrain"),
    )
    (folder / "data_manifest.json").unlink()
    both = mistakes(
        "train-sft", "data.handler=pretrain", "data.seq_length=8", "data.blend={data: 2.0}"
    )
    assert_each_mentions(both, ("--set: data.blend={data: 2.0}", "data.train", "null"))
    load(["blend.yaml"], ["data.blend=null", "data.train=data"], command="train-sft")


def test_a_conversion_is_checked_before_it_starts(folder: Path):
    (folder / "full").mkdir()
    (folder / "full" / "x").write_text("", encoding="utf-8")
    hf2mcore = Flag("convert.command", "hf2mcore", "hf2mcore")
    flags = (
        hf2mcore,
        Flag("convert.load", "model", "--load"),
        Flag("convert.save", "full", "--save"),
        Flag("convert.tp", 3, "--tp"),
    )
    assert_each_mentions(
        mistakes("convert-ckpt", flags=flags),
        ("--tp: convert.tp=3", "KV heads"),
        ("--tp: convert.tp=3", "attention heads"),
        ("--save: convert.save=full", "empty"),
    )
    assert_each_mentions(
        mistakes("convert-ckpt", "convert.command=mcore2hf", "convert.load=model"),
        ("--set: convert.load=model", "Hugging Face", "hf2mcore"),
        ("convert.save", "missing", "--save"),
    )
    make_mcore(folder / "mcore")
    assert (
        load(
            sets=["convert.command=inspect", "convert.load=mcore"], command="convert-ckpt"
        ).config.convert.save
        is None
    )
    load(
        sets=["convert.command=reshard", "convert.load=mcore", "convert.save=new", "convert.pp=2"],
        command="convert-ckpt",
    )
    assert_each_mentions(
        mistakes(
            "convert-ckpt",
            "convert.command=hf2mcore",
            "convert.load=model",
            "convert.save=new",
            "convert.orm=true",
        ),
        ("--set: convert.orm=true", "Qwen2ForCausalLM", "score"),
    )


def test_preprocessing_is_checked_before_it_starts(folder: Path):
    (folder / "rows.jsonl").write_text("", encoding="utf-8")
    assert_each_mentions(
        mistakes(
            "preprocess",
            "preprocess.input=[rows.jsonl, '*.json', gone]",
            "preprocess.handler=alpaka",
            "preprocess.template=qwn",
            "preprocess.pack=true",
        ),
        ("preprocess.tokenizer", "missing", "--tokenizer"),
        ("preprocess.output_prefix", "missing", "--output-prefix"),
        ("--set: preprocess.input.1=*.json", "file"),
        ("--set: preprocess.input.2=gone", "file"),
        ("--set: preprocess.template=qwn", "'qwen'", "YAML"),
        ("--set: preprocess.handler=alpaka", "handler", "'alpaca'"),
        ("preprocess.seq_length", "missing", "--seq-length"),
    )
    right = [
        "preprocess.input=[rows.jsonl]",
        "preprocess.tokenizer=model",
        "preprocess.output_prefix=out",
    ]
    load(sets=[*right, "preprocess.handler=pretrain"], command="preprocess")
    load(sets=[*right, "preprocess.handler=GeneralPretrainHandler"], command="preprocess")
    load(
        sets=[
            *right,
            "preprocess.handler=AlpacaStyleInstructionHandler",
            "preprocess.template=qwen",
        ],
        command="preprocess",
    )
    (line,) = mistakes("preprocess", *right, "preprocess.handler=alpaca")
    assert_mentions(line, "preprocess.template", "missing", "--template", *template_names())


def test_generation_needs_either_a_prompt_or_a_file(folder: Path):
    either = ("generate.prompt", "--prompt", "--input")
    assert_each_mentions(mistakes("generate", "generate.model=model"), either)
    sets = (
        "generate.model=data",
        "generate.input=gone",
        "generate.raw=true",
        "generate.system=x",
        "generate.num_samples=2",
    )
    assert_each_mentions(
        mistakes("generate", *sets),
        ("--set: generate.model=data", "folder"),
        ("--set: generate.input=gone", "file"),
        ("--set: generate.raw=true", "template", "system"),
        ("--set: generate.num_samples=2", "temperature"),
    )
    load(sets=["generate.model=model", "generate.prompt=1 + 1"], command="generate")
    load(sets=["chat.model=model"], command="chat")
    for command in ("generate", "chat"):
        required = [
            f"{command}.model=model",
            *(["generate.prompt=x"] if command == "generate" else []),
        ]
        load(sets=[*required, f"{command}.temperature=2"], command=command)
        assert_each_mentions(
            mistakes(command, *required, f"{command}.temperature=2.5"),
            (f"--set: {command}.temperature=2.5", "0.01"),
        )
    assert_each_mentions(mistakes("chat"), ("chat.model", "missing", "--model"))


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
def test_the_command_of_a_configuration_is_guessed_from_its_sections(
    sets: list[str], command: str | None
):
    assert guess(load(sets=sets)) == command


def test_ranks_are_numbered_tensor_then_data_then_pipeline(folder: Path):
    sets = [
        "cluster.devices_per_node=8",
        "train.parallel.tp=2",
        "train.parallel.pp=2",
        "rollout.engine.tp=2",
        "rollout.engine.dp=2",
    ]
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


def test_derived_values_of_a_grpo_step(folder: Path):
    sets = [
        "cluster.devices_per_node=2",
        "train.updates.samples_per_update=16",
        "train.updates.epochs=3",
        "train.micro_batch=4",
    ]
    rows = derived_values(load(["grpo.yaml"], sets, command="train-grpo").config, "train-grpo")
    assert rows["data parallel"] == 2
    assert rows["samples per step"] == 4 * 8
    assert [value for label, value in rows.items() if "optimizer updates" in label] == [2 * 3, 60]
    assert labelled(rows, "micro-batches", "rank") == 16 // 2 // 4
    assert labelled(rows, "longest", "response") == 128
    assert rows["rank 1"] == "trains tp 0 dp 1 pp 0, samples in engine 1"


def test_parameters_of_a_rank_agree_with_a_count_by_hand(folder: Path):
    shape = load_shape(folder / "model")
    hidden, ffn, vocab, layers, head_dim, heads, groups = 64, 96, 1001, 4, 8, 8, 4
    qkv_rows = (heads + 2 * groups) * head_dim
    matrices = qkv_rows * hidden + qkv_rows + heads * head_dim * hidden + 3 * ffn * hidden
    norms = 2 * hidden
    assert (
        parameters_per_rank(shape, ParallelLayout())
        == num_parameters(shape)
        == layers * (matrices + norms) + vocab * hidden + hidden
    )
    assert (
        parameters_per_rank(shape, ParallelLayout(tp=2))
        == layers * (matrices // 2 + norms) + 501 * hidden + hidden
    ), "the vocabulary is padded to 1002"
    assert (
        parameters_per_rank(shape, ParallelLayout(pp=2))
        == 2 * (matrices + norms) + vocab * hidden + hidden
    ), "the last stage has a copy of the tied embedding"


def test_bytes_of_a_device_depend_on_dtype_and_data_parallelism(folder: Path):
    layout = ["cluster.devices_per_node=4", "train.parallel.tp=2"]
    plan = plan_run("grpo", *layout)
    count = parameters_per_rank(plan.shape, ParallelLayout(tp=2))
    assert bytes_per_device(plan) == {
        "weights": 4 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count // 2,
    }
    half = plan_run("grpo", *layout, "model.dtype=bfloat16")
    assert bytes_per_device(half) == {
        "weights": 2 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count // 2,
    }


def test_only_trained_parameters_have_gradients_and_optimizer_state(folder: Path):
    shape = plan_run("sft").shape
    hidden, ffn, layers, count = 64, 96, 4, parameters_per_rank(shape, ParallelLayout(tp=2))
    # LoRA factors of each matrix at TP 2: rank x (half of the sharded size + the other size).
    adapters = layers * 3 * ((hidden // 2 + hidden) + (hidden + ffn // 2))
    lora = ["train.lora.rank=3", "train.lora.targets=[o_proj, linear_fc2]"]
    layout = ["train.parallel.tp=2", "cluster.devices_per_node=2", "model.dtype=float32"]
    sizes = bytes_per_device(plan_run("sft", *layout, *lora))
    assert sizes == {
        "weights": 4 * (count + adapters),
        "gradients": 4 * adapters,
        "optimizer": 8 * adapters,
    }
    frozen = bytes_per_device(plan_run("sft", *layout, "train.freeze=['*.mlp.*']"))
    trained = count - layers * (3 * ffn * hidden // 2)
    assert frozen == {"weights": 4 * count, "gradients": 4 * trained, "optimizer": 8 * trained}
    kl = "algo.kl.loss.coef=0.1"
    assert "reference weights" in memory_rows(plan_run("grpo", kl))
    assert "reference weights" not in memory_rows(plan_run("grpo", kl, *lora))


def test_a_critic_is_a_fully_trained_policy_without_an_output_layer(
    folder: Path,
):
    layout = [
        "train.parallel.tp=2",
        "cluster.devices_per_node=4",
        "model.dtype=float32",
        "train.freeze=['*.mlp.*']",
    ]
    rows = memory_rows(plan_run("grpo", *layout, "algo.preset=ppo"))
    shape = plan_run("grpo").shape
    assert shape.tie_word_embeddings
    count = parameters_per_rank(shape, ParallelLayout(tp=2)) + shape.hidden_size // 2
    sizes = {name: rows[f"critic's {name}"] for name in ("weights", "gradients", "optimizer")}
    assert sizes == {"weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count // 2}
    assert not [name for name in memory_rows(plan_run("grpo", *layout)) if "critic" in name]


def test_nothing_is_derived_without_training_or_devices():
    assert derived_values(Config(), "chat") == {}
    assert (
        derived_values(
            load(sets=["train.parallel.tp=4", "cluster.devices_per_node=2"]).config, "train-sft"
        )
        == {}
    )


@pytest.mark.parametrize(("command", "kind"), [("train-sft", "prompts"), ("train-grpo", "sft")])
def test_data_of_the_wrong_kind_is_refused_before_anything_starts(tmp_path, command, kind):
    make_manifest(tmp_path / "data", kind)
    with pytest.raises(MsrlError, match=rf"data\.train=.*: contains {kind} data"):
        load([], [f"data.train={tmp_path / 'data'}"], [], command)


def test_a_run_folder_as_model_path_suggests_its_checkpoint_folder(folder: Path):
    make_mcore(folder / "runs/sft/checkpoints")
    for command, key in (
        ("generate", "generate.model"),
        ("train-sft", "model.path"),
        ("convert-ckpt", "convert.load"),
    ):
        lines = mistakes(
            command,
            f"{key}=runs/sft",
            "convert.command=mcore2hf",
            "convert.save=out",
            "generate.prompt=x",
        )
        assert any(
            line.startswith(f"--set: {key}=runs/sft: ") and "runs/sft/checkpoints" in line
            for line in lines
        )


@pytest.mark.parametrize("name", ["top_p=0.9", "top_k=5", "min_p=0.1"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_filters_of_greedy_sampling_are_refused(folder: Path, command: str, name: str):
    key = f"{command}.{name}"
    messages = mistakes(command, f"{command}.temperature=0", key)
    (message,) = [each for each in messages if key in each]
    assert_mentions(message, "no effect", f"{command}.temperature")
    messages = mistakes(command, f"{command}.temperature=0.5", key)
    assert not [each for each in messages if key in each]


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("log.profile.steps=[2,11]",), ("log.profile.steps", "step 11", "train.steps=10")),
        (("log.profile.steps=[2]", "log.profile.ranks=[0,64]"), ("log.profile.ranks", "rank 64")),
    ],
)
def test_a_profile_of_a_missing_step_or_rank_is_refused(
    folder: Path, sets: tuple[str, ...], fragments: tuple[str, ...]
):
    (message,) = mistakes("train-sft", *sets)
    assert_mentions(message, *fragments)


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (
            ["transfer=shared_memory", "cluster.nodes=2", "cluster.address=10.0.0.1:6379"],
            ("rollout.weights.transfer=shared_memory", "cluster.nodes"),
        ),
        (["transfer=nccl", "cluster.platform=cpu"], ("rollout.weights.transfer=nccl", "cpu")),
        (["transfer=ipc", "cluster.platform=npu"], ("rollout.weights.transfer=ipc", "npu")),
        (
            ["transfer=ipc", "rollout.async.max_staleness=1"],
            ("rollout.weights.transfer=ipc", "rollout.async"),
        ),
        (["transfer=nccl"], ("rollout.weights.transfer=nccl", "cluster.roles.rollout.devices")),
        (
            ["transfer=ipc", "cluster.roles.rollout.devices=1"],
            ("rollout.weights.transfer=ipc", "cluster.roles.rollout.devices"),
        ),
        (["bucket_bytes=100"], ("rollout.weights.bucket_bytes=100", "65536")),
        (["adapters_only=true"], ("rollout.weights.adapters_only=true", "train.lora.rank")),
    ],
)
def test_a_way_of_weights_that_cannot_work_is_refused(
    folder: Path, sets: list[str], fragments: tuple[str, ...]
):
    first, *further = sets
    messages = mistakes("train-grpo", f"rollout.weights.{first}", *further)
    (message,) = [each for each in messages if "rollout.weights" in each]
    assert_mentions(message, *fragments)
