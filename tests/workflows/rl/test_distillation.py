"""Checks of `algo.distill` and of train-distill, dry runs, and a distillation on real ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from config_inputs import make_model
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.config.sections.algo import TeacherConfig
from msrl.errors import MsrlError
from msrl.memory.estimate import memory_rows
from msrl.models.paths import TRACKER
from msrl.plan.run_plan import resolve
from msrl.rewards.score import Scorer
from msrl.trainer.objective.losses import Distillation, teacher_weight
from msrl.types import Completion, Prompt, RolloutGroup
from msrl.workflows.rl.distillation import check_tags, teacher_fields
from msrl.workflows.rl.step import Clock, step_metrics
from msrl.workflows.rl.update.updater import Updater, policy_loss
from msrl.workflows.training.settings import loaded_models, rank_settings
from prepared_steps import scored_group
from support import assert_mentions, labelled, mentions
from test_cli import msrl
from tiny_qwen2 import make_tokenizer, save_model
from training_runs import metrics, succeed, write_rows

TAGS = ("math", "code")
QUESTIONS = [
    {"question": f"What is {i} + {i}?", "answer": str(2 * i), "kind": TAGS[i % 2]}
    for i in range(16)
]
COLUMNS = '{"prompt": "question", "response": "answer", "extra.tag": "kind"}'
STEPS = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a student, two teachers, a model with another tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("distillation")
    for seed, name in enumerate(("student", "teacher", "second", "stranger")):
        save_model(folder / name, tied=False, seed=seed)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(folder / "stranger")
    source = str(write_rows(folder / "rl.jsonl", QUESTIONS))
    arguments = ["--input", source, "--tokenizer", str(folder / "student"), "--template", "qwen"]
    arguments += ["--handler", "r1", "--map-keys", COLUMNS]
    assert msrl("preprocess", *arguments, "--output-prefix", str(folder / "rl")) == 0
    config = {
        "run": {"dir": str(folder / "runs"), "name": "distill"},
        "model": {"path": str(folder / "student"), "dtype": "float32"},
        "data": {"train": str(folder / "rl")},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 300.0},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 1,
            "max_prompt_tokens": 128,
            "max_response_tokens": 12,
            "engine": {"dp": 1},
        },
        "algo": {"distill": {"teachers": [{"model": str(folder / "teacher")}]}},
        "train": {"steps": STEPS, "micro_batch": 2, "optimizer": {"lr": 1e-3}},
        "log": {"trackers": []},
    }
    (folder / "distill.yaml").write_text(yaml.safe_dump(config))
    return folder


def check(inputs: Path, *sets: str, command: str = "train-distill") -> Any:
    return load([str(inputs / "distill.yaml")], sets, command=command)


def test_a_teacher_with_another_padding_of_the_embedding_is_refused_with_a_remedy(
    inputs: Path, tmp_path: Path
) -> None:
    teacher = make_model(tmp_path / "teacher", vocab_size=320)
    sets = f"algo.distill.teachers=[{{model: {teacher}}}]"
    fragments = ("algo.distill.teachers.0.model", "vocab_size", 320, 288, "padding", "url")
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        check(inputs, sets)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (("algo.distill.teachers=[]",), ("algo.distill.teachers", "missing")),
        (("algo.distill.divergence=kl",), ("algo.distill.divergence", "kl", "reverse_kl")),
        (("algo.distill.options.beta=0.5",), ("algo.distill.options.beta", "unknown")),
        (
            ("algo.distill.divergence=jensen_shannon", "algo.distill.options.beta=1.0"),
            ("algo.distill.options.beta", 1.0, "at most"),
        ),
        (("algo.distill.coef=0",), ("algo.distill.coef", "teachers")),
        (("algo.distill.top_k=20",), ("algo.distill.top_k", "advantage")),
        (
            ("algo.distill.teachers=[{model: nowhere}]",),
            ("algo.distill.teachers.0.model", "nowhere"),
        ),
        (
            ("algo.distill.teachers=[{model: a}, {model: a, tags: [math]}]",),
            ("algo.distill.teachers.1.model", "duplicate"),
        ),
        (
            ("algo.distill.teachers=[{model: self}]",),
            ("algo.distill.teachers.0.model", "self", "gradient"),
        ),
        (("algo.policy_loss=gspo_x",), ("algo.policy_loss",)),
        (("algo.kl.loss.coef=0.1",), ("algo.kl.loss.coef", 0.1, "train-distill")),
        (("algo.rl_coef=0.5",), ("algo.rl_coef", 0.5, "train-distill")),
        (("rollout.filter.kind=all_equal",), ("rollout.filter.kind", "train-distill")),
        (("rollout.sampling.temperature=0",), ("rollout.sampling.temperature", 0.0, "greedy")),
        (("train.global_batch=16",), ("train.global_batch", 16, "train-distill")),
        (("rollout.filter.low=0.1",), ("rollout.filter.low", 0.1, "train-distill")),
        (("rollout.filter.refill=true",), ("rollout.filter.refill", "true", "train-distill")),
        (("rollout.filter.max_refills=3",), ("rollout.filter.max_refills", 3, "train-distill")),
        (("algo.aggregate.constant=7",), ("algo.aggregate.constant", 7.0, "token-mean")),
        (("rollout.async.partial=true",), ("rollout.async.partial", "true", "train-distill")),
        (("environment.max_turns=3",), ("environment.max_turns", 3, "environment.name")),
        (("rollout.async.max_staleness=1",), ("rollout.async.max_staleness", "train-distill")),
        (("eval.every_steps=1", "data.eval=rl"), ("reward.sources", "missing")),
    ],
)
def test_invalid_settings_are_refused_by_name(
    inputs: Path, sets: tuple[str, ...], fragments: tuple[object, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        check(inputs, *sets)


def test_other_trainings_refuse_the_section(inputs: Path) -> None:
    for command in ("train-sft", "train-dpo", "train-rm"):
        with pytest.raises(MsrlError, match=mentions("algo.distill.teachers", "Remove")):
            check(inputs, command=command)


def test_values_that_train_distill_implies_may_be_written(inputs: Path) -> None:
    check(inputs, "algo.rl_coef=0.0", "algo.advantage.estimator=reinforce")


def test_a_distillation_needs_no_reward_and_has_no_policy_loss(inputs: Path) -> None:
    plan = resolve(check(inputs).config, "train-distill")
    loss = policy_loss(plan.config)
    assert loss.rl_coef == 0.0 and loss.distillation is not None
    assert loss.distillation.weights == {str(inputs / "teacher"): 1.0}
    assert [model.divergence for model in loss.compared] == ["reverse_kl"]


def test_train_grpo_adds_teachers_to_its_loss(inputs: Path) -> None:
    sets = ("reward.sources=[{verifier: acc}]", "rollout.samples_per_prompt=2")
    more = ("algo.distill.coef=0.3", "algo.distill.divergence=forward_kl")
    plan = resolve(check(inputs, *sets, *more, command="train-grpo").config, "train-grpo")
    loss = policy_loss(plan.config)
    assert loss.rl_coef == 1.0 and loss.distillation is not None
    assert (loss.distillation.coef, loss.distillation.divergence) == (0.3, "forward_kl")


def test_teachers_on_ranks_are_a_term_of_the_loss_of_train_grpo(inputs: Path) -> None:
    sets = ("reward.sources=[{verifier: acc}]", "rollout.samples_per_prompt=2", "algo.rl_coef=0")
    check(inputs, *sets, command="train-grpo")
    with pytest.raises(MsrlError, match=mentions("algo.rl_coef", 0.0, "term")):
        check(inputs, *sets, "algo.distill.teachers=[]", command="train-grpo")


def test_the_ranks_hold_the_teachers_and_the_memory_counts_them(inputs: Path) -> None:
    second = str(inputs / "second")
    teachers = f"[{{model: {inputs / 'teacher'}}}, {{model: {second}, weight: 0.5}}]"
    plan = resolve(
        check(inputs, f"algo.distill.teachers={teachers}", "train.chunk=8").config, "train-distill"
    )
    settings = rank_settings(plan, "cpu")
    assert list(settings.teachers) == [str(inputs / "teacher"), second]
    teacher = settings.teachers[second]
    assert (teacher.model, teacher.optimizer, teacher.logit_chunk) == (Path(second), None, 8)
    sizes = memory_rows(plan)
    assert labelled(sizes, "teachers") == 2 * sizes["weights"]


def test_a_dry_run_refuses_a_teacher_with_another_tokenizer(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(inputs / "distill.yaml")
    assert msrl("train-distill", "-c", file, "--dry-run") == 0
    assert_mentions(capsys.readouterr().out, "train-distill", "16 prompts", "teachers")
    other = f"algo.distill.teachers=[{{model: {inputs / 'stranger'}}}]"
    assert msrl("train-distill", "-c", file, "--set", other, "--dry-run") == 2
    assert_mentions(capsys.readouterr().err, "algo.distill.teachers.0.model", "tokenizer")


def test_a_dry_run_refuses_a_reference_with_another_tokenizer(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["reward.sources=[{verifier: acc}]", "rollout.samples_per_prompt=2"]
    sets += ["algo.distill.teachers=[]", "algo.kl.loss.coef=0.1"]
    options = [text for setting in sets for text in ("--set", setting)]
    arguments = ["train-grpo", "-c", str(inputs / "distill.yaml"), *options, "--dry-run"]
    for name, code in (("second", 0), ("stranger", 2)):
        load_key = f"cluster.roles.reference.load={inputs / name}"
        assert msrl(*arguments, "--set", load_key) == code
    assert_mentions(capsys.readouterr().err, "reference.load", "stranger", "tokenizer")


# --- tags ---


def prompt(index: int, tag: str | None) -> Prompt:
    return Prompt(index, np.array([1, 2]), extra={} if tag is None else {"tag": tag})


def test_a_teacher_has_no_weight_in_rows_without_its_tags() -> None:
    teachers = (
        TeacherConfig(model="a", weight=0.5, tags=("math",)),
        TeacherConfig(model="b", weight=2.0, tags=("code", "math")),
        TeacherConfig(model="c", weight=3.0),
    )
    groups = [
        scored_group(prompt(0, "math"), [0.0, 0.0], [1, 3]),
        scored_group(prompt(1, "code"), [0.0, 0.0], [2, 2]),
    ]
    arrays = rollout_arrays(groups)
    fields = teacher_fields(arrays, teachers)
    weights = [[set(row[2:].tolist()) for row in fields[teacher_weight(n)]] for n in range(3)]
    assert weights[0] == [{0.5}, {0.5}, {0.0}, {0.0}]
    assert weights[1] == [{2.0}] * 4 and weights[2] == [{3.0}] * 4
    assert [len(row) for row in fields[teacher_weight(0)]] == [3, 5, 4, 4]
    assert teacher_fields(arrays, teachers[2:]) == {}


def test_the_term_reads_the_weights_of_each_token() -> None:
    term = Distillation(1.0, {"a": 0.5, "b": 2.0}, "reverse_kl")
    divergences = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    assert term.per_token(divergences, {}).tolist() == [20.5, 41.0]
    fields = {
        teacher_weight(0): torch.tensor([0.5, 0.0]),
        teacher_weight(1): torch.tensor([0.0, 2.0]),
    }
    assert term.per_token(divergences, fields).tolist() == [0.5, 40.0]


def test_a_tag_without_rows_and_a_row_without_a_teacher_are_refused() -> None:
    rows = [prompt(0, "math"), prompt(1, "code"), prompt(2, None)]
    math, other = TeacherConfig(model="a", tags=("math",)), TeacherConfig(model="b")
    check_tags((math, other), rows, needs_teacher=True)
    check_tags((math,), rows, needs_teacher=False)
    with pytest.raises(MsrlError, match=mentions("row 1", "code", "teacher")):
        check_tags((math,), rows, needs_teacher=True)
    typo = TeacherConfig(model="c", tags=("math", "maths"))
    with pytest.raises(MsrlError, match=mentions("algo.distill.teachers.1.tags", "maths")):
        check_tags((other, typo), rows, needs_teacher=True)


def test_a_dry_run_compares_the_tags_of_teachers_with_the_data(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def teachers(*tags: str) -> str:
        names = zip(("teacher", "second"), tags, strict=True)
        return ", ".join(f"{{model: {inputs / name}, tags: [{tag}]}}" for name, tag in names)

    arguments = ["-c", str(inputs / "distill.yaml"), "--dry-run", "--set"]
    sets = f"algo.distill.teachers=[{teachers('math', 'code')}]"
    assert msrl("train-distill", *arguments, sets) == 0
    sets = f"algo.distill.teachers=[{teachers('math', 'math')}]"
    assert msrl("train-distill", *arguments, sets) == 2
    assert_mentions(capsys.readouterr().err, "algo.distill.teachers", "code", "row 1")


# --- self-distillation ---


def test_the_policy_as_its_teacher_needs_no_copy_where_the_ranks_have_its_start(
    inputs: Path,
) -> None:
    teachers = f"algo.distill.teachers=[{{model: {inputs / 'teacher'}}}, {{model: self}}]"
    start = inputs / "student"

    def rank_teachers(*sets: str) -> list[Path]:
        sets = (teachers, "reward.sources=[{verifier: acc}]", *sets)
        config = check(inputs, *sets, "rollout.samples_per_prompt=2", command="train-grpo").config
        plan = resolve(config, "train-grpo")
        assert plan.teachers["self"].weights == start and start in loaded_models(plan, None)
        return [settings.model for settings in rank_settings(plan, "cpu").teachers.values()]

    assert rank_teachers() == [inputs / "teacher", start]
    assert rank_teachers("train.lora.rank=4") == [inputs / "teacher"]
    base = f"algo.distill.teachers=[{{model: {start}}}, {{model: self}}]"
    assert rank_teachers("train.lora.rank=4", base) == []
    (inputs / "adapters").mkdir()
    (inputs / "adapters" / TRACKER).write_text("1")
    # The policy before the training has the adapters that it starts from.
    start_from = f"train.lora.load={inputs / 'adapters'}"
    assert rank_teachers("train.lora.rank=4", start_from) == [inputs / "teacher"]
    assert rank_teachers("train.lora.rank=4", start_from, base) == [start]
    reference = "algo.kl.loss.coef=0.1"
    assert rank_teachers(reference) == [inputs / "teacher"]
    other = f"cluster.roles.reference.load={inputs / 'second'}"
    assert rank_teachers(reference, other) == [inputs / "teacher", start]
    assert rank_teachers(reference, other, "train.lora.rank=4") == [inputs / "teacher"]


def test_a_step_without_reward_sources_keeps_all_samples_for_the_divergence(inputs: Path) -> None:
    plan = resolve(check(inputs).config, "train-distill")
    tokens, logprobs = np.array([5, 6]), np.array([-1.0, -2.0], np.float32)
    answer = Completion(tokens, logprobs, "stop", 0, "yes")
    groups = [RolloutGroup(Prompt(i, np.array([1, 2])), (answer,)) for i in range(2)]
    with Scorer([], num_workers=1, is_optional=True) as scorer:
        scores = scorer.score(groups)
    scores.require_scores("step 1")
    ranks: Any = SimpleNamespace(dp_size=1)
    prepared = Updater(plan.config, ranks, STEPS, {}).prepare(scores.groups, Clock())
    assert not np.concatenate(prepared.sequences.fields["advantages"]).any()
    assert sum(int(mask.sum()) for mask in prepared.sequences.loss_masks) == 4
    assert step_metrics(scores, {}, {})["reward/mean"] == 0.0


def test_the_defaults_have_no_teacher() -> None:
    assert policy_loss(Config()).distillation is None


@pytest.mark.slow
@pytest.mark.full
def test_a_distillation_lowers_the_divergence_and_resumes(inputs: Path) -> None:
    run = inputs / "runs" / "distill"
    # The divergence of one step varies with its 192 tokens by more than a step lowers it.
    sets = ("rollout.samples_per_prompt=4", "train.optimizer.lr=0.003")
    options = [option for value in sets for option in ("--set", value)]
    command = ("train-distill", "-c", str(inputs / "distill.yaml"), *options)
    succeed(*command, "--set", "train.steps=12", log=inputs / "first.log")
    divergences = [row["train/distill"] for row in metrics(run)]
    assert len(divergences) == 12 and min(divergences) > 0
    assert sum(divergences[-4:]) < 0.95 * sum(divergences[:4])
    assert "train/loss" in metrics(run)[0]
    succeed(*command, "--set", "train.steps=13", "--resume", "auto", log=inputs / "second.log")
    assert len(metrics(run)) == 13
