"""msrl train-sft: outputs of a run, and bitwise-equal results after kills and interrupts."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml

from msrl.checkpoint.adapters.megatron import adapted_base
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.integrity import damages, mcore_checks
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.locate import find_checkpoint, latest_iteration
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from msrl.plan.run_plan import resolve
from msrl.trainer.checkpointing.resume import saved_steps
from support import assert_mentions, mentions
from tiny_qwen2 import save_model
from training_runs import (
    Command,
    children,
    files_in,
    make_tmp,
    metrics,
    rows,
    run_training,
    still_running,
    succeed,
    wait_for_end,
    write_config,
    write_rows,
)

pytestmark = pytest.mark.slow
STEPS = 12
TRAIN = {
    "steps": STEPS,
    "global_batch": 8,
    "micro_batch": 4,
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup": 2},
}
ONE_BATCH = {**TRAIN, "steps": 3, "global_batch": 24}


def run_in_process(settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run the workflow of the command in this process and return its metrics."""
    from msrl.workflows.sft import run as train_sft

    config = Config.model_validate(settings, strict=False)
    train_sft.run(resolve(config, "train-sft"))
    return metrics(Path(config.run.dir) / config.run.name)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all weights of a checkpoint by Hugging Face name."""
    source = open_weights(checkpoint)
    return {
        name: t.clone()
        for rule in all_rules(source.shape)
        for name, t in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def assert_same_weights(actual: Path, expected: Path) -> None:
    actual_weights, expected_weights = weights(actual), weights(expected)
    assert set(actual_weights) == set(expected_weights)
    for name, tensor in actual_weights.items():
        assert torch.equal(tensor, expected_weights[name]), name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Folder with a model and examples.

    The model is a Hugging Face folder and an mcore checkpoint of TP 2. There are 24 training
    examples, unpacked and packed, and 7 held-out ones.
    """
    from msrl.cli import app

    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "hf", tied=False, positions=256)
    write_mcore(open_weights(folder / "hf"), folder / "mcore", McoreTarget(ParallelLayout(2)))
    examples = [
        {"instruction": f"{i}+{i}=", "input": "", "output": f"{2 * i}" * (1 + i % 7)}
        for i in range(31)
    ]
    pack = ("--pack", "--seq-length", "200")
    for name, samples, flags in (
        ("data", examples[:24], ()),
        ("packed", examples[:24], pack),
        ("eval", examples[24:], ()),
    ):
        source = str(write_rows(folder / f"{name}.jsonl", samples))
        arguments = [
            "preprocess",
            "--input",
            source,
            "--tokenizer",
            str(folder / "hf"),
            "--handler",
            "alpaca",
            "--template",
            "qwen",
        ]
        app.app([*arguments, "--output-prefix", str(folder / name), *flags], standalone_mode=False)
    return folder


@pytest.fixture(scope="module")
def config(inputs) -> dict[str, Any]:
    """Configuration of a TP-2 run from the mcore checkpoint."""
    return {
        "run": {"name": "complete", "dir": str(inputs / "runs")},
        "model": {"path": str(inputs / "mcore"), "dtype": "float32"},
        "data": {"train": str(inputs / "data"), "eval": str(inputs / "eval")},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 120.0},
        "train": {**TRAIN, "parallel": {"tp": 2}},
        "checkpoint": {"every_steps": 5, "keep": 2, "export_hf": True},
        "eval": {"every_steps": 5},
    }


def named(config: dict[str, Any], name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    changed = {
        section: {**config.get(section, {}), **values} for section, values in sections.items()
    }
    return {**config, **changed, "run": {**config["run"], "name": name}}


@pytest.fixture(scope="module")
def complete_run(inputs, config) -> Path:
    """Folder of an uninterrupted run."""
    run_in_process(config)
    return inputs / "runs" / "complete"


def test_a_run_writes_metrics_events_configuration_report_and_curves(complete_run, config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [row["step"] for row in rows(complete_run)] == list(range(1, STEPS + 1))
    for row in metrics(complete_run):
        assert {"train/loss", "train/grad_norm", "train/lr", "train/loss_tokens"} <= set(row)
        assert all(np.isfinite(value) for value in row.values())
    evaluated = [step for step, row in enumerate(metrics(complete_run), 1) if "eval/loss" in row]
    assert evaluated == [5, 10, 12]
    assert [row["train/lr"] for row in metrics(complete_run)][:3] == pytest.approx(
        [5e-4, 1e-3, 1e-3]
    )
    losses = [row["train/loss"] for row in metrics(complete_run)]
    assert losses[-1] < losses[0] - 1
    events = EventAccumulator(str(complete_run / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        losses, rel=1e-6
    )
    assert Config.model_validate(
        yaml.safe_load((complete_run / "config.yaml").read_text())
    ) == Config.model_validate(config)
    assert f"step {STEPS}" in (complete_run / "report.md").read_text()
    assert (complete_run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_newest_checkpoints_are_kept(complete_run):
    names = [
        path.name
        for path in (complete_run / "checkpoints").iterdir()
        if path.name.startswith((".", "iter_"))
    ]
    assert sorted(names) == ["iter_0000010", "iter_0000012"]
    assert sorted(path.name for path in (complete_run / "checkpoints" / "training").iterdir()) == [
        "iter_0000010",
        "iter_0000012",
    ]
    assert latest_iteration(complete_run / "checkpoints") == STEPS


@torch.no_grad()
def test_the_converted_checkpoint_equals_the_export_and_transformers_agrees_with_megatron(
    complete_run, inputs
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from msrl.cli import app
    from msrl.trainer.probe import megatron_logits

    target = inputs / "converted"
    words = ["--load", str(complete_run / "checkpoints"), "--save", str(target), "--no-verify"]
    app.app(["convert-ckpt", "mcore2hf", *words], standalone_mode=False)
    assert_same_weights(complete_run / "checkpoints", target)
    assert_same_weights(target, complete_run / "hf")
    model = AutoModelForCausalLM.from_pretrained(complete_run / "hf", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(complete_run / "hf")("<|im_start|>user\n3+3=<|im_end|>")[
        "input_ids"
    ]
    (logits,) = megatron_logits(complete_run / "checkpoints", [ids], ParallelLayout(2))
    torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0], rtol=0, atol=1e-4)


def test_all_exports_have_the_chat_template_of_the_training_data(complete_run, inputs):
    from transformers import AutoTokenizer

    from msrl.types import Conversation, Message
    from msrl.workflows.engine import choose_renderer

    question = Conversation((Message("user", "1+1="),))
    expected = choose_renderer(inputs / "hf", "qwen").prompt(question).tolist()
    assert choose_renderer(inputs / "hf", None).prompt(question).tolist() != expected, (
        "the tokenizer's template has no system text"
    )
    for folder in (complete_run / "hf", complete_run / "checkpoints" / "hf"):
        assert choose_renderer(folder, None).prompt(question).tolist() == expected
        chat = [{"role": "user", "content": "1+1="}]
        assert (
            AutoTokenizer.from_pretrained(folder).apply_chat_template(
                chat, add_generation_prompt=True
            )["input_ids"]
            == expected
        )


def test_an_existing_run_and_its_checkpoints_are_not_overwritten(
    complete_run, config, inputs, tmp_path
):
    with pytest.raises(MsrlError, match=mentions("already exists", "--resume auto")):
        run_in_process(config)
    saved = {"save": str(complete_run / "checkpoints")}
    with pytest.raises(MsrlError, match=mentions("steps 10, 12", "step 0")):
        run_in_process(named(config, "again", checkpoint=saved))
    shutil.copytree(complete_run / "checkpoints", tmp_path / "old")
    old = {"save": str(tmp_path / "old"), "resume": str(tmp_path / "old" / "iter_0000010")}
    with pytest.raises(MsrlError, match=mentions("step 12", "step 10")):
        run_in_process(named(config, "again", checkpoint=old))
    resumed = {"save": str(tmp_path / "old"), "resume": "auto"}
    with pytest.raises(MsrlError, match=mentions("train.steps=10", f"step {STEPS}")):
        run_in_process(named(config, "again", checkpoint=resumed, train={"steps": 10}))
    assert not (inputs / "runs" / "again").exists()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_an_interrupt_saves_after_the_current_step_and_the_resumed_run_is_bitwise_equal(
    complete_run, config, inputs, number
):
    """A terminal signals the process group; timeout(1) signals the command, then the group."""
    name = f"interrupted by {number.name}"
    file = write_config(
        inputs / "interrupted.yaml", named(config, name, checkpoint={"every_steps": None})
    )
    run, tmp = inputs / "runs" / name, make_tmp()
    command = Command("train-sft", "-c", str(file), log=inputs / "interrupted.log", tmp=tmp)
    command.when(lambda: len(rows(run)) >= 2)
    if number == signal.SIGTERM:
        command.process.send_signal(number)
    command.signal_group(number)
    assert command.wait() == 130, command.output()
    assert files_in(tmp) == []
    done = len(rows(run))
    assert done < STEPS
    assert (
        re.search(rf"(?i)saved .*step {done}\b", command.output())
        and "Traceback" not in command.output()
    )
    assert metrics(run) == metrics(complete_run)[:done]
    resumed = run_in_process(named(config, name, checkpoint={"resume": "auto"}))
    assert resumed == metrics(complete_run)
    assert_same_weights(run / "checkpoints", complete_run / "checkpoints")


@pytest.mark.full
def test_an_interrupt_while_ranks_start_ends_the_run_immediately(config, inputs):
    file = write_config(inputs / "early.yaml", named(config, "interrupted early"))
    command = Command("train-sft", "-c", str(file), log=inputs / "interrupted early.log")
    command.when(lambda: bool(children(command.process.pid)))
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 130, command.output()
    assert command.output().endswith("interrupted\n") and "Traceback" not in command.output()
    assert (
        not rows(inputs / "runs" / "interrupted early")
        and not (inputs / "runs" / "interrupted early" / "checkpoints").exists()
    )


@pytest.mark.full
def test_a_kill_during_a_save_keeps_the_last_checkpoint_and_the_resumed_run_is_bitwise_equal(
    complete_run, config, inputs
):
    name = "killed"
    changes = {"resume": "auto", "every_steps": 1, "keep": None}
    file = write_config(inputs / "killed.yaml", named(config, name, checkpoint=changes))
    run = inputs / "runs" / name
    saves = run / "checkpoints"

    def is_saving() -> bool:
        return mcore.iteration_dir(saves, 2).exists() and any(saves.glob(".iter_*.partial"))

    incomplete, tmp = list[Path](), make_tmp()
    # A save may complete between its detection and the kill; then the next attempt resumes.
    while not incomplete:
        command = Command("train-sft", "-c", str(file), log=inputs / "killed.log", tmp=tmp)
        ranks = command.when_started(2)
        command.when(is_saving, every_s=0.0005)
        command.kill()
        assert all("msrl.trainer.launch" in line for line in ranks.values()) and any(
            tmp.glob("msrl-ranks-*")
        )
        wait_for_end(ranks)
        incomplete = list(saves.glob(".iter_*.partial"))
    # An attempt killed between the checkpoint's renaming and its tracker leaves the tracker behind.
    last = saved_steps(saves)[-1]
    assert incomplete[0].name == f".iter_{last + 1:07d}.partial"
    assert latest_iteration(saves) in {last - 1, last}
    assert weights(saves)  # the last checkpoint is complete
    assert metrics(run)[:last] == metrics(complete_run)[:last]
    succeed("train-sft", "-c", str(file), log=inputs / "resumed.log", tmp=tmp)
    assert files_in(tmp) == [], "the next run removes temporary files of the killed ones"
    assert metrics(run) == metrics(complete_run)
    assert_same_weights(saves, complete_run / "checkpoints")
    assert not list(saves.glob("**/.*partial"))


@pytest.mark.full
def test_a_rank_that_dies_ends_the_run_with_a_message_that_names_it(complete_run, config, inputs):
    changes = {
        "model": {"path": str(inputs / "hf"), "dtype": "bfloat16"},
        "train": {"steps": 10000},
        "data": {"eval": None},
        "cluster": {"max_restarts": 0},
    }
    settings = named(
        config, "dead", **changes, eval={"every_steps": None}, checkpoint={"every_steps": None}
    )
    command = Command(
        "train-sft",
        "-c",
        str(write_config(inputs / "dead.yaml", settings)),
        log=inputs / "dead.log",
    )
    run = inputs / "runs" / "dead"
    command.when(lambda: len(rows(run)) >= 6)
    processes = children(command.process.pid)
    (victim,) = [pid for pid in processes if psutil.Process(pid).name() == "msrl-rank-1"]
    psutil.Process(victim).kill()
    killed = time.monotonic()
    assert command.wait() == 1
    assert time.monotonic() - killed < 60  # half of rpc_timeout_s
    assert re.search(r"^rank 1 .*SIGKILL", command.output(), re.M)
    assert not still_running(processes)
    # Data, order and warm-up are the same, so the losses of bfloat16 are close to float32.
    losses = [row["train/loss"] for row in metrics(run)[:3]]
    expected = [row["train/loss"] for row in metrics(complete_run)[:3]]
    np.testing.assert_allclose(losses, expected, rtol=0.05)


@pytest.fixture(scope="module")
def unpacked(inputs, config) -> list[dict[str, float]]:
    """Metrics of a run on one rank with all examples in each step, from the Hugging Face folder."""
    settings = named(
        config,
        "unpacked",
        model={"path": str(inputs / "hf")},
        checkpoint={"every_steps": None, "export_hf": False},
    )
    return run_in_process({**settings, "train": ONE_BATCH})


def packed_like(
    inputs, config, name: str, batch: int, **sections: dict[str, Any]
) -> list[dict[str, float]]:
    single_rank = {
        "model": {"path": str(inputs / "hf")},
        "checkpoint": {"every_steps": None, "export_hf": False},
    }
    settings = named(config, name, **single_rank, **sections)
    return run_in_process(
        {**settings, "train": {**ONE_BATCH, "global_batch": batch, "micro_batch": 1}}
    )


def assert_same_metrics(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for row, expected_row in zip(actual, expected, strict=True):
        assert set(row) == set(expected_row)
        for name, value in expected_row.items():
            assert row[name] == pytest.approx(value, rel=2e-5), name


def test_rows_packed_while_training_have_the_losses_of_single_examples(inputs, config, unpacked):
    from msrl.data.dataset import SftDataset
    from msrl.workflows.sft.rows import open_rows

    data = {"pack": True, "seq_length": 160}
    count = len(
        open_rows(Config.model_validate(named(config, "x", data=data)), SftDataset(inputs / "data"))
    )
    assert count % 2 == 0 and count < 24
    row_metrics = packed_like(
        inputs, config, "packed now", count, data=data, cluster={"devices_per_node": 2}
    )
    assert_same_metrics(row_metrics, unpacked)
    assert "eval/loss" in row_metrics[-1]  # 7 held-out rows do not divide evenly over two ranks


@pytest.mark.full
def test_rows_packed_by_preprocess_have_the_losses_of_single_examples(inputs, config, unpacked):
    from msrl.data.dataset import SftDataset

    packed = SftDataset(inputs / "packed")
    assert sum(len(row) for row in packed) == 24 and len(packed) < 24
    assert_same_metrics(
        packed_like(
            inputs, config, "packed before", len(packed), data={"train": str(inputs / "packed")}
        ),
        unpacked,
    )


@pytest.mark.full
def test_a_blend_is_resumed_bit_by_bit_with_the_rows_of_the_uninterrupted_run(inputs, config):
    """Two ranks train on two datasets; the run ends after 5 of 8 steps and is resumed."""
    data = {"train": None, "blend": {str(inputs / "data"): 1.0, str(inputs / "eval"): 3.0}}
    train = {**TRAIN, "steps": 8, "epochs": None, "parallel": {"tp": 1}}
    cluster = {"platform": "cpu", "rpc_timeout_s": 120.0, "devices_per_node": 2}
    base = {**config, "data": data, "train": train, "cluster": cluster, "eval": {}}
    checkpoint = {"every_steps": 5, "keep": None, "export_hf": False}
    whole = {**base, "run": {**base["run"], "name": "blend"}, "checkpoint": checkpoint}
    run = run_training(inputs, whole, command="train-sft")
    shortened = inputs / "runs" / "blend-shortened"
    shutil.copytree(run, shortened)
    shutil.rmtree(shortened / "checkpoints" / "iter_0000008")
    (shortened / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    resumed = {**whole, "run": {**base["run"], "name": "blend-shortened"}}
    file = write_config(inputs / "blend-shortened.yaml", resumed)
    output = succeed(
        "train-sft", "-c", str(file), "--resume", "auto", log=inputs / "blend-shortened.log"
    )
    assert "step 6/8" in output and "step 5/8" not in output
    assert metrics(shortened) == metrics(run)
    assert_same_weights(shortened / "checkpoints", run / "checkpoints")
    blend = {str(inputs / "data"): 2.0, str(inputs / "eval"): 3.0}
    other = {**resumed, "data": {**data, "blend": blend}, "train": {**train, "steps": 9}}
    command = Command(
        "train-sft", "-c", str(write_config(inputs / "other.yaml", other)), "--resume", "auto",
        log=inputs / "other.log",
    )  # fmt: skip
    assert command.wait() == 2
    assert_mentions(command.output(), "checkpoint.resume", "data.blend")


def test_a_step_without_trained_tokens_changes_nothing_and_is_reported(inputs, config, capsys):
    """Data of other systems has such rows; here the labels of the first 8 are masked."""
    from msrl.data.dataset import SftDataset

    for file in inputs.glob("data_*"):
        shutil.copy(file, inputs / file.name.replace("data_", "untrained_", 1))
    count = sum(SftDataset(inputs / "data").lengths()[:8])
    labels = np.memmap(inputs / "untrained_packed_labels_document.bin", np.int32, "r+")
    labels[:count] = -100
    labels.flush()
    (inputs / "untrained_manifest.json").unlink()  # it has the checksum of the original labels
    settings = named(
        config,
        "untrained",
        data={"train": str(inputs / "untrained"), "shuffle": False},
        checkpoint={"every_steps": 1, "keep": None},
    )
    steps = run_in_process({**settings, "train": {**TRAIN, "steps": 2}})
    assert_mentions(capsys.readouterr().err, "no token")
    assert (
        steps[0]["train/loss_tokens"] == 0
        and "train/loss" not in steps[0]
        and steps[1]["train/loss_tokens"] > 0
    )
    source, before = (
        open_mcore(inputs / "runs" / "untrained" / "checkpoints", iteration=1),
        weights(inputs / "mcore"),
    )
    for rule in all_rules(source.shape):
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
            assert torch.equal(tensor, before[name]), name


@pytest.mark.full
def test_adapters_are_saved_alone_resumed_and_exported_merged(inputs, config):
    sections = {
        "model": {"path": str(inputs / "hf")},
        "checkpoint": {"every_steps": 2, "keep": 1, "export_hf": True, "resume": "auto"},
    }
    settings = named(config, "adapters", **sections)
    lora = {
        **ONE_BATCH,
        "optimizer": {"lr": 1e-2},
        "lora": {"rank": 4, "targets": ["q_proj", "linear_fc2"], "dropout": 0.1},
    }
    run_in_process({**settings, "train": {**lora, "steps": 2}})
    run_in_process({**settings, "train": lora})
    uninterrupted = run_in_process({**named(settings, "adapters at once"), "train": lora})
    resumed = metrics(inputs / "runs" / "adapters")
    losses = [row["train/loss"] for row in resumed]
    assert losses == [row["train/loss"] for row in uninterrupted]  # despite dropout
    saved = find_checkpoint(inputs / "runs" / "adapters" / "checkpoints").files
    assert all(
        ".lora_" in name for path in saved.values() for name in mcore.read_rank_file(path)["model"]
    )
    assert adapted_base(inputs / "runs" / "adapters" / "checkpoints") == (inputs / "hf").absolute()
    before, after = weights(inputs / "hf"), weights(inputs / "runs" / "adapters" / "hf")
    changed = {
        name.split(".")[-2]
        for name, tensor in after.items()
        if not torch.equal(tensor, before[name])
    }
    assert changed == {"q_proj", "down_proj"}
    assert_same_weights(
        inputs / "runs" / "adapters" / "hf", inputs / "runs" / "adapters at once" / "hf"
    )


@pytest.mark.full
def test_a_run_stops_early_and_keeps_the_best_checkpoint(inputs, config, capfd):
    sections = {
        "data": {
            "train": str(inputs / "data"),
            "eval": None,
            "eval_fraction": 0.2,
            "seq_length": 70,
            "too_long": "truncate",
        },
        "model": {"path": str(inputs / "hf")},
        "eval": {"every_steps": 2, "patience": 2},
        "checkpoint": {"every_steps": None, "keep": 1, "keep_best": True, "export_hf": True},
    }
    settings = named(config, "early", **sections)
    no_progress = {**ONE_BATCH, "steps": 20, "global_batch": 8, "optimizer": {"lr": 1e-30}}
    steps = run_in_process({**settings, "train": no_progress})
    assert [step for step, row in enumerate(steps, 1) if "eval/loss" in row] == [2, 4, 6]
    assert len(steps) == 6
    assert steps[1]["eval/perplexity"] == pytest.approx(np.exp(steps[1]["eval/loss"]))
    saves = inputs / "runs" / "early" / "checkpoints"
    assert sorted(path.name for path in saves.glob("iter_*")) == ["iter_0000002", "iter_0000006"]
    out, err = capfd.readouterr()
    assert re.search(r"Hugging Face model: .*early/hf.*step 2.*best", out)
    report = (inputs / "runs" / "early" / "report.md").read_text()
    assert re.search(r"- best evaluation: [\d.]+, after step 2", report) and re.search(
        r"- end: .*early.*2 evaluations", report
    )
    assert_mentions(err, "data.train: ", "70 tokens", "2 evaluations")


def test_a_run_that_ends_with_an_error_completes_its_background_save(inputs, config):
    """With a huge learning rate, the gradient of the second update is not finite."""
    train = {
        **TRAIN,
        "steps": 3,
        "max_skipped": 1,
        "optimizer": {"lr": 1e30, "schedule": "constant", "warmup": 0},
    }
    settings = named(config, "diverged", train=train, checkpoint={"every_steps": 1, "async": True})
    with pytest.raises(MsrlError, match=mentions("train.max_skipped=1", "gradient", "finite")):
        run_in_process(settings)
    saves = inputs / "runs" / "diverged" / "checkpoints"
    assert (
        latest_iteration(saves) == 1
        and damages(mcore_checks(saves, 1)) == []
        and not list(saves.glob(".*partial"))
    )


@pytest.mark.parametrize(
    ("sections", "fragments"),
    [
        ({"data": {"seq_length": 60}}, ("data.seq_length=60", "tokens")),
        (
            {"train": {"max_tokens_per_micro_batch": 60}},
            ("train.max_tokens_per_micro_batch=60", "tokens"),
        ),
        ({"data": {"eval": None, "eval_fraction": 0.99}}, ("data.eval_fraction=0.99", "24 rows")),
        ({"model": {"template": "llama3"}}, ("model.template=llama3", "template qwen")),
        ({"data": {"train": "nowhere"}}, ("nowhere_packed_input_ids_document.idx", "data prefix")),
        ({"checkpoint": {"resume": "nowhere"}}, ("checkpoint.resume=nowhere", "checkpoint")),
    ],
)
def test_invalid_settings_are_refused_before_any_rank_starts(config, inputs, sections, fragments):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        run_in_process(named(config, "refused", **sections))
    assert not (inputs / "runs" / "refused").exists()


def test_held_out_rows_longer_than_a_micro_batch_are_refused(config, inputs):
    from msrl.cli import app

    source = str(
        write_rows(inputs / "long.jsonl", [{"instruction": "1", "input": "", "output": "7" * 100}])
    )
    arguments = [
        "preprocess",
        "--input",
        source,
        "--tokenizer",
        str(inputs / "hf"),
        "--handler",
        "alpaca",
        "--template",
        "qwen",
    ]
    app.app([*arguments, "--output-prefix", str(inputs / "long")], standalone_mode=False)
    sections = {
        "data": {"eval": str(inputs / "long")},
        "train": {"max_tokens_per_micro_batch": 100},
    }
    with pytest.raises(
        MsrlError, match=mentions("train.max_tokens_per_micro_batch=100", "160 tokens")
    ):
        run_in_process(named(config, "refused", **sections))
    assert not (inputs / "runs" / "refused").exists()


def test_tokens_outside_the_vocabulary_are_refused(config, inputs, tmp_path):
    """Each tensor-parallel rank would treat such a token as another rank's and embed zeros."""
    for path in inputs.glob("data_packed_*"):
        shutil.copyfile(path, tmp_path / path.name)
    ids = np.memmap(tmp_path / "data_packed_input_ids_document.bin", np.int32, "r+")
    ids[100] = 288
    ids.flush()
    with pytest.raises(MsrlError, match=mentions("token 288", "288 tokens", "tokenizer")):
        run_in_process(named(config, "refused", data={"train": str(tmp_path / "data")}))
    assert not (inputs / "runs" / "refused").exists()


@pytest.mark.full
def test_a_truncated_weight_file_is_reported_with_exit_code_2(config, inputs):
    shutil.copytree(inputs / "hf", inputs / "truncated")
    file = inputs / "truncated" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    settings = named(config, "truncated", model={"path": str(inputs / "truncated")})
    command = Command(
        "train-sft",
        "-c",
        str(write_config(inputs / "truncated.yaml", settings)),
        log=inputs / "truncated.log",
    )
    assert command.wait() == 2
    assert str(file) in command.output() and "Traceback" not in command.output()
