"""Checks of train-dpo and train-rm, values derived from their configurations, and dry runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import families
from config_inputs import make_model
from mixture_families import QWEN3_MOE
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.tensor_layouts import shard_shape
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.config.sections.train import LoraConfig
from msrl.errors import MsrlError
from msrl.memory.estimate import memory_rows
from msrl.memory.states import bytes_per_device
from msrl.models.families import load_shape
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.select import is_layer
from msrl.models.stages import stage_tensors
from msrl.plan.derived import preference_plan
from msrl.plan.run_plan import resolve
from msrl.platforms import get
from msrl.workflows.preference.batches import make_batch
from msrl.workflows.preference.reference import StoredReference
from msrl.workflows.preference.reward_model import scored_sequences
from msrl.workflows.preference.rows import checked_rows
from msrl.workflows.training.data_checks import check_reference_tokenizer
from msrl.workflows.training.supervised import row_order
from support import ROOT, assert_mentions, labelled, mentions
from test_cli import msrl
from tiny_qwen2 import VOCAB_SIZE, make_tokenizer, save_model
from training_runs import write_rows

PAIRS = [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(12)]
LABELED = [{"prompt": f"{i}", "completion": "yes", "label": i % 2 == 0} for i in range(12)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    save_model(folder / "model", tied=False, positions=128)
    margins = [{**row, "margin": 0.5} for row in PAIRS]
    for name, rows in (("pairs", PAIRS), ("labeled", LABELED), ("margins", margins)):
        source = str(write_rows(folder / f"{name}.jsonl", rows))
        arguments = ["--input", source, "--tokenizer", str(folder / "model"), "--template", "qwen"]
        handler = "labeled" if name == "labeled" else "pairs"
        prefix = str(folder / name)
        assert msrl("preprocess", *arguments, "--handler", handler, "--output-prefix", prefix) == 0
    config = {
        "run": {"dir": str(folder / "runs")},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "pairs")},
        "cluster": {"platform": "cpu"},
        "train": {"steps": 2, "global_batch": 4},
    }
    (folder / "dpo.yaml").write_text(yaml.safe_dump(config))
    return folder


def check(inputs: Path, command: str, *sets: str) -> Any:
    return load([str(inputs / "dpo.yaml")], sets, command=command)


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("command", "sets", "fragments"),
    [
        ("train-dpo", ("algo.preference.loss=ppo",), ("algo.preference.loss", "ppo", "simpo")),
        ("train-dpo", ("algo.preference.beta=0",), ("algo.preference.beta", 0, "above")),
        ("train-dpo", ("algo.preference.options.gama=1",), ("options.gama", "unknown")),
        (
            "train-dpo",
            ("algo.preference.options.label_smoothing=0.9",),
            ("options.label_smoothing", 0.9, "at most 0.5"),
        ),
        (
            "train-dpo",
            ("algo.preference.options.label_smoothing=-0.1",),
            ("options.label_smoothing", -0.1, "at least 0"),
        ),
        (
            "train-dpo",
            ("algo.preference.options.label_smoothing=.nan",),
            ("options.label_smoothing", "nan", "finite"),
        ),
        (
            "train-dpo",
            ("algo.preference.loss=simpo", "algo.preference.options.gamma=.inf"),
            ("options.gamma", "inf", "finite"),
        ),
        (
            "train-dpo",
            ("algo.preference.options={form: hinge, label_smoothing: 0.1}",),
            ("label_smoothing", 0.1, "hinge"),
        ),
        ("train-dpo", ("algo.preference.loss=kto",), ("data.train", "pairs", "labeled")),
        ("train-dpo", ("algo.kl.loss.coef=0.1",), ("algo.kl.loss.coef", 0.1, "train-dpo")),
        ("train-dpo", ("data.blend={x: 1.0}",), ("data.blend", "data.train")),
        (
            "train-rm",
            ("data.blend={x: 1.0}", "data.train=null", "data.eval_fraction=0.1"),
            ("data.eval_fraction", 0.1, "data.eval"),
        ),
        ("train-dpo", ("data.handler=pretrain",), ("data.handler", "pretrain", "train-sft")),
        (
            "train-dpo",
            ("algo.preference.loss=orpo", "algo.preference.reference=precomputed"),
            ("algo.preference.reference", "precomputed", "orpo"),
        ),
        (
            "train-dpo",
            ("cluster.roles.reference.devices=1",),
            ("cluster.roles.reference", "precomputed"),
        ),
        ("train-dpo", ("cluster.roles.critic.load=x",), ("cluster.roles.critic", "train-dpo")),
        ("train-sft", ("algo.preference.beta=0.3",), ("algo.preference.beta", 0.3, "train-dpo")),
        ("train-sft", (), ("data.train", "pairs", "sft")),
        ("train-rm", ("train.lora.rank=4", "train.freeze=['*']"), ("train.freeze", "train.lora")),
        ("train-dpo", ("train.lora.load=x",), ("train.lora.load", "train.lora.rank")),
        (
            "train-dpo",
            ("train.lora.rank=4", "train.lora.load=gone"),
            ("train.lora.load", "gone", "not found"),
        ),
        (
            "train-dpo",
            ("train.lora.rank=4", "train.lora.load=tests"),
            ("train.lora.load", "tests", "latest_checkpointed_iteration.txt"),
        ),
        (
            "train-dpo",
            (
                "train.lora.rank=4",
                "train.lora.load=tests",
                "algo.preference.reference=precomputed",
            ),
            ("train.lora.load", "tests", "on-the-fly"),
        ),
        ("train-dpo", ("train.updates.epochs=2",), ("train.updates.epochs", 2, "train-dpo")),
        ("train-rm", ("train.updates.epochs=2",), ("train.updates.epochs", 2, "train-rm")),
        (
            "train-rm",
            ("train.forward_micro_batch=2",),
            ("train.forward_micro_batch", 2, "train-rm"),
        ),
        (
            "train-dpo",
            ("algo.preference.loss=orpo", "train.forward_micro_batch=2"),
            ("train.forward_micro_batch", 2, "orpo"),
        ),
        ("train-rm", ("train.chunk=8",), ("train.chunk", 8, "logits")),
        ("train-rm", ("algo.reward_model.kind=process",), ("data.train", "pairs", "steps")),
        (
            "train-rm",
            ("algo.reward_model.kind=process", "algo.reward_model.center_coef=0.1"),
            ("center_coef", 0.1, "process"),
        ),
        (
            "train-rm",
            ("algo.reward_model.reward_tokens=[a, b]",),
            ("reward_tokens", "outcome"),
        ),
        ("train-rm", ("algo.preference.beta=0.3",), ("algo.preference.beta", 0.3, "train-rm")),
        ("train-rm", ("model.init=random",), ("model.init", "random", "train-sft")),
    ],
)
def test_a_setting_that_is_invalid_or_has_no_effect_is_refused(
    command: str,
    sets: tuple[str, ...],
    fragments: tuple[Any, ...],
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        check(inputs, command, *sets)


SCORES = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("changes", "sets", "fragments"),
    [
        (SCORES, (), ("Qwen2ForSequenceClassification", "scores")),
        ({"vocab_size": 300}, (), (300, VOCAB_SIZE, "vocab_size")),
        ({"max_position_embeddings": 8}, (), ("at most 8", "data")),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, ("train.parallel.tp=2",), ("tp",)),
        (QWEN3_MOE, ("train.parallel.tp=2",), ("train.parallel.sp", "experts")),
    ],
)
def test_a_reference_that_does_not_fit_the_policy_is_refused(
    changes: dict[str, object],
    sets: tuple[str, ...],
    fragments: tuple[object, ...],
    inputs: Path,
    tmp_path: Path,
) -> None:
    fitting = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
    own = f"cluster.roles.reference.load={make_model(tmp_path / 'own', **fitting)}"
    assert check(inputs, "train-dpo", own)
    other = make_model(tmp_path / "other", **{**fitting, **changes})
    with pytest.raises(MsrlError, match=mentions("cluster.roles.reference.load", *fragments)):
        check(inputs, "train-dpo", f"cluster.roles.reference.load={other}", *sets)


def test_a_reference_with_another_tokenizer_is_refused(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("stranger", "twin", "bare"):
        shutil.copytree(inputs / "model", tmp_path / name, ignore=shutil.ignore_patterns("token*"))
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "twin")
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "stranger")

    def check_tokenizer(name: str) -> None:
        load = f"cluster.roles.reference.load={tmp_path / name}"
        check_reference_tokenizer(resolve(check(inputs, "train-dpo", load).config, "train-dpo"))

    check_tokenizer("twin")
    assert capsys.readouterr().err == ""
    check_tokenizer("bare")
    assert_mentions(capsys.readouterr().err, "bare", "no tokenizer")
    arguments = ["train-dpo", "-c", str(inputs / "dpo.yaml"), "--dry-run", "--set"]
    assert msrl(*arguments, f"cluster.roles.reference.load={tmp_path / 'stranger'}") == 2
    assert_mentions(capsys.readouterr().err, "reference.load", "stranger", "tokenizer")


def test_a_reward_model_without_a_class_in_transformers_is_not_exported(
    inputs: Path, tmp_path: Path
) -> None:
    model = families.save_model(tmp_path / "model", families.FAMILIES["chatglm 2"].config)
    with pytest.raises(MsrlError) as caught:
        check(inputs, "train-rm", f"model.path={model}", "checkpoint.export_hf=true")
    assert_mentions(caught.value, "checkpoint.export_hf", "ChatGLMModel", "classifier")


def test_kto_needs_two_rows_and_no_precomputed_reference(inputs: Path) -> None:
    kto = ("algo.preference.loss=kto", f"data.train={inputs / 'labeled'}")
    check(inputs, "train-dpo", *kto)
    with pytest.raises(MsrlError) as caught:
        check(
            inputs,
            "train-dpo",
            *kto,
            "train.global_batch=1",
            "algo.preference.reference=precomputed",
        )
    assert_mentions(caught.value, "train.global_batch=1", "algo.preference.reference", "baseline")


@pytest.mark.parametrize(
    ("loss", "beta", "data", "needs_reference"),
    [
        ("dpo", 0.1, "pairs", True),
        ("simpo", 2.0, "pairs", False),
        ("kto", 0.1, "labeled", True),
        ("cpo", 0.1, "pairs", False),
    ],
)
def test_a_loss_declares_its_default_beta_its_data_and_its_reference(
    loss: str, beta: float, data: str, needs_reference: bool
) -> None:
    config = Config.model_validate({"algo": {"preference": {"loss": loss}}})
    plan = preference_plan(config)
    assert (plan.beta, plan.data, plan.needs_reference) == (beta, data, needs_reference)
    chosen = Config.model_validate({"algo": {"preference": {"loss": loss, "beta": 0.7}}})
    assert preference_plan(chosen).beta == 0.7


def test_the_memory_has_a_reference_only_where_the_ranks_hold_one(inputs: Path) -> None:
    def memory(command: str, *sets: str) -> dict[str, int]:
        return memory_rows(resolve(check(inputs, command, *sets).config, command))

    own = memory("train-dpo", "data.seq_length=64")
    assert labelled(own, "reference") == own["weights"]
    for sets in (
        ("algo.preference.loss=simpo",),
        ("algo.preference.reference=precomputed",),
        ("train.lora.rank=4",),
    ):
        assert "reference weights" not in memory("train-dpo", "data.seq_length=64", *sets)
    scores = memory("train-rm", "data.seq_length=64")
    assert "logits" not in scores and scores["weights"] < own["weights"]
    adapted = memory("train-rm", "data.seq_length=64", "train.lora.rank=4")
    assert 0 < adapted["gradients"] < scores["gradients"]
    single = memory_rows(resolve(check(inputs, "train-dpo").config, "train-sft"))
    assert "activations" not in single


def test_the_score_of_an_answer_is_that_of_the_token_that_ends_it(inputs: Path) -> None:
    """The line break of the template after <|im_end|> is no part of a response in train-grpo."""
    plan = resolve(check(inputs, "train-rm").config, "train-rm")
    rows, _ = checked_rows(plan, "pairs", reads_margins=True)
    batch = make_batch(rows, [0, 1], 2)
    end, line_break = batch.sides[0].token_ids[-2:]
    assert not batch.sides[0].loss_mask[-1] and end != line_break
    sequences = scored_sequences(batch)
    for ids, mask, weights in zip(
        sequences.token_ids, sequences.loss_masks, sequences.fields["weights"], strict=True
    ):
        assert ids[-2:].tolist() == [end, end]  # the last one is a label that is not read
        assert mask.nonzero()[0].tolist() == [len(ids) - 1] and len(weights) == len(ids)


def test_a_blend_reads_rows_of_all_datasets_in_proportion(inputs: Path) -> None:
    pairs, margins = (str(inputs / name) for name in ("pairs", "margins"))
    blend = (f"data.blend={{'{pairs}': 3, '{margins}': 1}}", "data.train=null")
    plan = resolve(check(inputs, "train-rm", *blend).config, "train-rm")
    rows, held_out = checked_rows(plan, "pairs", reads_margins=True)
    assert held_out is None and rows.num_rows == (12, 12) and len(rows) == 24
    assert [rows.examples(number).value for number in (11, 12)] == [0.0, 0.5]
    order = row_order(plan.config, rows)
    for step in range(3):
        numbers = order.of_step(step)
        assert sum(number < 12 for number in numbers) == 3
    packed = resolve(check(inputs, "train-rm", *blend, "data.pack=true").config, "train-rm")
    together, _ = checked_rows(packed, "pairs", reads_margins=True)
    assert sum(together.num_rows) == len(together.members)
    assert {n // 12 for row in together.members[: together.num_rows[0]] for n in row} == {0}


def test_a_dry_run_checks_the_pairs(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(inputs / "dpo.yaml")
    for command in ("train-dpo", "train-rm"):
        assert msrl(command, "-c", file, "--dry-run") == 0
        assert_mentions(capsys.readouterr().out, command, "2 steps", "peak")
    sets = ["--set", f"data.train={inputs / 'margins'}", "--set", "algo.preference.loss=ipo"]
    assert msrl("train-dpo", "-c", file, *sets, "--dry-run") == 2
    assert_mentions(capsys.readouterr().err, "algo.preference.loss=ipo", "margin")
    tokens = ["--set", "train.max_tokens_per_micro_batch=20"]
    assert msrl("train-dpo", "-c", file, *tokens, "--dry-run") == 2
    assert_mentions(capsys.readouterr().err, "train.max_tokens_per_micro_batch=20", "longest")


def save_adapters(
    folder: Path,
    model: Path,
    layout: ParallelLayout,
    *,
    has_head: bool = False,
    targets: tuple[str, ...] = LoraConfig().targets,
) -> None:
    """Write new adapters of rank 4 as a training does, with the score head of a reward model."""
    shape = load_shape(model)
    for at in layout.ranks():
        args = mcore.namespace(shape, layout)
        vars(args).update(lora_r=4, lora_alpha=8.0, lora_target_modules=list(targets))
        tensors = {"rm_head.weight": torch.ones(1, shape.hidden_size)} if has_head else {}
        for placed in stage_tensors(shape, layout, at):
            if is_layer(placed.rule.mcore, placed.rule.hf, targets):
                rows, columns = shard_shape(placed.layout, placed.rule.shapes, placed.num_shards)
                name = placed.name.removesuffix(".weight")
                tensors[f"{name}.lora_A.default.weight"] = torch.ones(4, columns)
                tensors[f"{name}.lora_B.default.weight"] = torch.zeros(rows, 4)
        mcore.write_rank_file(mcore.rank_file(folder, 7, layout, at), tensors, args, 7)
    mcore.publish(folder, 7)


def test_a_dry_run_compares_the_settings_of_adapters_with_those_that_they_start_from(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapters(inputs / "adapters", inputs / "model", ParallelLayout(tp=2))
    save_adapters(inputs / "scorer", inputs / "model", ParallelLayout(), has_head=True)
    attention = ("linear_qkv", "linear_proj")
    save_adapters(inputs / "attention", inputs / "model", ParallelLayout(), targets=attention)

    def dry_run(command: str, folder: str, **lora: object) -> tuple[int, str]:
        values = {"rank": 4, "alpha": 8.0, "load": str(inputs / folder), **lora}
        sets = [f"--set=train.lora.{name}={value}" for name, value in values.items()]
        code = msrl(command, "-c", str(inputs / "dpo.yaml"), *sets, "--dry-run")
        return code, capsys.readouterr().err

    rank = ("train.lora.rank=4", "train.lora.alpha=8")
    new, started = (
        bytes_per_device(resolve(check(inputs, "train-dpo", *rank, *more).config, "train-dpo"))
        for more in ((), (f"train.lora.load={inputs / 'adapters'}",))
    )
    assert started["weights"] - new["weights"] == new["gradients"]  # both are float32
    assert started["gradients"] == new["gradients"]
    assert dry_run("train-dpo", "adapters")[0] == 0
    assert dry_run("train-rm", "adapters")[0] == 0
    assert dry_run("train-rm", "scorer")[0] == 0
    code, message = dry_run("train-dpo", "adapters", rank=2, alpha=32.0, targets="[linear_qkv]")
    assert code == 2
    assert_mentions(message, "train.lora.rank=2", "train.lora.alpha=32.0", 8.0)
    assert_mentions(message, "train.lora.targets", "linear_qkv", "linear_proj", "linear_fc2")
    code, message = dry_run("train-dpo", "attention")
    assert code == 2
    assert_mentions(message, "train.lora.targets", "no adapter", "linear_fc1", "linear_fc2")
    code, message = dry_run("train-dpo", "scorer")
    assert code == 2
    assert_mentions(message, "train.lora.load", "scorer", "head")


def test_stored_log_probabilities_belong_to_the_data_the_weights_and_the_settings(
    inputs: Path,
) -> None:
    save_model(inputs / "other", tied=True, positions=128)

    def stored(*sets: str) -> StoredReference:
        precomputed = "algo.preference.reference=precomputed"
        config = check(inputs, "train-dpo", precomputed, *sets).config
        plan = resolve(config, "train-dpo")
        return StoredReference(plan, [checked_rows(plan, "pairs", reads_margins=True)[0]])

    first = stored()
    assert stored("train.steps=7").path == first.path
    changes = (
        "data.seq_length=100",
        "model.dtype=bfloat16",
        f"data.train={inputs / 'margins'}",
        f"cluster.roles.reference.load={inputs / 'other'}",
    )
    paths = {stored(change).path for change in changes}
    assert len(paths) == len(changes) and first.path not in paths
    values = np.arange(2.0 * len(PAIRS)).reshape(-1, 2)
    first.path.parent.mkdir(parents=True)
    np.savez(first.path.with_suffix(""), logprobs_0=values)
    first.load(get("cpu"), pytest.fail)
    plan = resolve(check(inputs, "train-dpo").config, "train-dpo")
    rows, _ = checked_rows(plan, "pairs", reads_margins=True)
    read = first.lookup(rows)(make_batch(rows, [3, 1], 2))
    assert read is not None and read.tolist() == [6.0, 7.0, 2.0, 3.0]
