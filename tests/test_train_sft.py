"""msrl train-sft as a command: what a run leaves behind, and that it survives kills, interrupts and dead ranks to the bit."""

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
from support import assert_mentions, mentions
from tiny_qwen2 import save_model
from training_runs import (
    Command,
    children,
    files_in,
    make_tmp,
    metrics,
    rows,
    still_running,
    succeed,
    wait_for_end,
    write_config,
    write_rows,
)

pytestmark = pytest.mark.slow
STEPS = 24
TRAIN = {
    "steps": STEPS,
    "global_batch": 8,
    "micro_batch": 4,
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup": 2},
}
ONE_BATCH = {**TRAIN, "steps": 3, "global_batch": 24}


def run_in_process(settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run the workflow of the command; its metrics."""
    from msrl.workflows.sft import run as train_sft

    config = Config.model_validate(settings, strict=False)
    train_sft.run(resolve(config, "train-sft"))
    return metrics(Path(config.run.dir) / config.run.name)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint under their Hugging Face names."""
    source = open_weights(checkpoint)
    return {
        name: t.clone()
        for rule in all_rules(source.shape)
        for name, t in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A model as Hugging Face folder and as mcore checkpoint of TP 2; 24 examples as they are and packed, 7 held out."""
    from msrl.cli import app

    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "hf", tied=False, positions=256)
    write_mcore(open_weights(folder / "hf"), folder / "mcore", McoreTarget(ParallelLayout(2)))
    examples = [
        {"instruction": f"{i}+{i}=", "input": "", "output": f"{2 * i}" * (1 + i % 7)}
        for i in range(31)
    ]
    for name, part, flags in (("data", examples[:24], ()), ("packed", examples[:24], ("--pack", "--seq-length", "200")),
                              ("eval", examples[24:], ())):  # fmt: skip
        source = str(write_rows(folder / f"{name}.jsonl", part))
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
    """A run at TP 2 from the mcore checkpoint."""
    return {
        "run": {"name": "whole", "dir": str(inputs / "runs")},
        "model": {"path": str(inputs / "mcore"), "dtype": "float32"},
        "data": {"train": str(inputs / "data"), "eval": str(inputs / "eval")},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 120.0},
        "train": {**TRAIN, "parallel": {"tp": 2}},
        "checkpoint": {"every_steps": 10, "keep": 2, "export_hf": True},
        "eval": {"every_steps": 10},
    }


def named(config: dict[str, Any], name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    changed = {
        section: {**config.get(section, {}), **values} for section, values in sections.items()
    }
    return {**config, **changed, "run": {**config["run"], "name": name}}


@pytest.fixture(scope="module")
def whole(inputs, config) -> Path:
    """The folder of an uninterrupted run, which leaves nothing in its temporary folder."""
    file, tmp = write_config(inputs / "whole.yaml", config), make_tmp()
    succeed("train-sft", "-c", str(file), log=inputs / "whole.log", tmp=tmp)
    (inputs / "whole.left").write_text("\n".join(files_in(tmp)))
    return inputs / "runs" / "whole"


def test_a_run_leaves_metrics_events_configuration_report_and_curves(whole, config):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [row["step"] for row in rows(whole)] == list(range(1, STEPS + 1))
    for found in metrics(whole):
        assert {"train/loss", "train/grad_norm", "train/lr", "train/loss_tokens"} <= set(found)
        assert all(np.isfinite(value) for value in found.values())
    assert [step for step, found in enumerate(metrics(whole), 1) if "eval/loss" in found] == [
        10,
        20,
        24,
    ]
    assert [found["train/lr"] for found in metrics(whole)][:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    losses = [found["train/loss"] for found in metrics(whole)]
    assert losses[-1] < losses[0] - 1
    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        losses, rel=1e-6
    )
    assert Config.model_validate(
        yaml.safe_load((whole / "config.yaml").read_text())
    ) == Config.model_validate(config)
    assert f"step {STEPS}" in (whole / "report.md").read_text()
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_newest_checkpoints_stay(whole):
    names = [
        path.name
        for path in (whole / "checkpoints").iterdir()
        if path.name.startswith((".", "iter_"))
    ]
    assert sorted(names) == ["iter_0000020", "iter_0000024"]
    assert sorted(path.name for path in (whole / "checkpoints" / "training").iterdir()) == [
        "iter_0000020",
        "iter_0000024",
    ]
    assert latest_iteration(whole / "checkpoints") == STEPS


@torch.no_grad()
def test_the_checkpoint_converts_to_what_was_exported_and_transformers_computes_as_megatron_does(
    whole, inputs
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from msrl.trainer.probe import megatron_logits

    target = inputs / "converted"
    succeed(
        "convert-ckpt",
        "mcore2hf",
        "--load",
        str(whole / "checkpoints"),
        "--save",
        str(target),
        "--no-verify",
        log=inputs / "c.log",
    )
    assert_same_weights(whole / "checkpoints", target)
    assert_same_weights(target, whole / "hf")
    model = AutoModelForCausalLM.from_pretrained(whole / "hf", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(whole / "hf")("<|im_start|>user\n3+3=<|im_end|>")[
        "input_ids"
    ]
    (found,) = megatron_logits(whole / "checkpoints", [ids], ParallelLayout(2))
    torch.testing.assert_close(found, model(torch.tensor([ids])).logits[0], rtol=0, atol=1e-4)


def test_the_model_is_asked_as_it_was_taught_wherever_it_is_opened(whole, inputs):
    from transformers import AutoTokenizer

    from msrl.types import Conversation, Message
    from msrl.workflows.serve.engine import choose_renderer

    question = Conversation((Message("user", "1+1="),))
    taught = choose_renderer(inputs / "hf", "qwen").prompt(question).tolist()
    assert choose_renderer(inputs / "hf", None).prompt(question).tolist() != taught, (
        "the tokenizer's own template has no system text"
    )
    for folder in (whole / "hf", whole / "checkpoints" / "hf"):
        assert choose_renderer(folder, None).prompt(question).tolist() == taught
        chat = [{"role": "user", "content": "1+1="}]
        assert (
            AutoTokenizer.from_pretrained(folder).apply_chat_template(
                chat, add_generation_prompt=True
            )["input_ids"]
            == taught
        )


def test_an_existing_run_and_its_checkpoints_are_not_written_over(whole, config, inputs, tmp_path):
    with pytest.raises(MsrlError, match=mentions("steps 20, 24", "step 0")):
        run_in_process(config)
    shutil.copytree(whole / "checkpoints", tmp_path / "old")
    old = {"save": str(tmp_path / "old"), "resume": str(tmp_path / "old" / "iter_0000020")}
    with pytest.raises(MsrlError, match=mentions("step 24", "step 20")):
        run_in_process(named(config, "again", checkpoint=old))
    with pytest.raises(MsrlError, match=mentions(f"train.steps={STEPS}", f"step {STEPS}")):
        run_in_process(
            named(config, "again", checkpoint={"save": str(tmp_path / "old"), "resume": "auto"})
        )
    assert not (inputs / "runs" / "again").exists()


def test_nothing_stays_in_the_temporary_folder(whole, inputs):
    assert (inputs / "whole.left").read_text() == ""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM, signal.SIGHUP]
)
def test_an_interrupt_saves_after_the_step_in_hand_and_the_resumed_run_ends_to_the_bit_where_the_other_did(
    whole, config, inputs, number
):
    """As a terminal does it, to every process of the group; and as timeout(1) does it, to the command and then to every process."""
    name = f"interrupted by {number.name}"
    file = write_config(
        inputs / "interrupted.yaml", named(config, name, checkpoint={"every_steps": None})
    )
    run = inputs / "runs" / name
    command = Command("train-sft", "-c", str(file), log=inputs / "interrupted.log")
    command.when(lambda: len(rows(run)) >= 2)
    if number == signal.SIGTERM:
        command.process.send_signal(number)
    command.signal_group(number)
    assert command.wait() == 130, command.output()
    done = len(rows(run))
    assert done < STEPS
    assert (
        re.search(rf"(?i)saved .*step {done}\b", command.output())
        and "Traceback" not in command.output()
    )
    assert metrics(run) == metrics(whole)[:done]
    resumed = run_in_process(named(config, name, checkpoint={"resume": "auto"}))
    assert resumed == metrics(whole)
    assert_same_weights(run / "checkpoints", whole / "checkpoints")


def test_an_interrupt_while_ranks_start_ends_the_run_at_once(config, inputs):
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


def test_a_kill_in_mid_save_leaves_the_checkpoint_before_and_the_resumed_run_goes_on_to_the_bit(
    whole, config, inputs
):
    name = "killed"
    changes = {"resume": "auto", "every_steps": 1, "keep": None}
    file = write_config(inputs / "killed.yaml", named(config, name, checkpoint=changes))
    run = inputs / "runs" / name
    saves = run / "checkpoints"

    def is_saving() -> bool:
        return mcore.iteration_dir(saves, 2).exists() and any(saves.glob(".iter_*.partial"))

    half, tmp = list[Path](), make_tmp()
    while (
        not half
    ):  # a save may be done between its being seen and the kill; the next start then goes on
        command = Command("train-sft", "-c", str(file), log=inputs / "killed.log", tmp=tmp)
        ranks = command.when_started(2)
        command.when(is_saving, every_s=0.0005)
        command.kill()
        assert all("msrl.trainer.launch" in line for line in ranks.values()) and any(
            tmp.glob("msrl-ranks-*")
        )
        wait_for_end(ranks)
        half = list(saves.glob(".iter_*.partial"))
    last = latest_iteration(saves)
    assert isinstance(last, int) and half[0].name == f".iter_{last + 1:07d}.partial"
    assert weights(saves)  # of the checkpoint before, whole
    assert metrics(run)[:last] == metrics(whole)[:last]
    succeed("train-sft", "-c", str(file), log=inputs / "resumed.log", tmp=tmp)
    assert files_in(tmp) == [], "the next run removes what the killed ones left"
    assert metrics(run) == metrics(whole)
    assert_same_weights(saves, whole / "checkpoints")
    assert not list(saves.glob("**/.*partial"))


def test_a_rank_that_dies_ends_the_run_at_once_and_is_named_in_bf16_from_a_hugging_face_folder(
    whole, config, inputs
):
    changes = {
        "model": {"path": str(inputs / "hf"), "dtype": "bfloat16"},
        "train": {"steps": 10000},
        "data": {"eval": None},
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
    everyone = children(command.process.pid)
    (victim,) = [
        pid for pid, line in everyone.items() if re.search(r"msrl\.trainer\.launch 1 2 ", line)
    ]
    psutil.Process(victim).kill()
    killed = time.monotonic()
    assert command.wait() == 1
    assert time.monotonic() - killed < 60  # half of rpc_timeout_s
    assert re.search(r"RankError: rank 1 .*SIGKILL", command.output())
    assert not still_running(everyone)
    # The same data, order and learning rates in the warm-up: bfloat16 is near the other run.
    losses = [[found["train/loss"] for found in metrics(folder)[:3]] for folder in (run, whole)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.05)


@pytest.fixture(scope="module")
def unpacked(inputs, config) -> list[dict[str, float]]:
    """All examples in every step, from the Hugging Face folder, on one rank."""
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
    one = {
        "model": {"path": str(inputs / "hf")},
        "checkpoint": {"every_steps": None, "export_hf": False},
    }
    settings = named(config, name, **one, **sections)
    return run_in_process(
        {**settings, "train": {**ONE_BATCH, "global_batch": batch, "micro_batch": 1}}
    )


def assert_same_path(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=2e-5), name


def test_rows_packed_while_training_on_two_data_parallel_ranks_give_the_losses_of_single_examples(
    inputs, config, unpacked
):
    from msrl.data.dataset import SftDataset
    from msrl.workflows.sft.rows import open_rows

    data = {"pack": True, "seq_length": 160}
    count = len(
        open_rows(Config.model_validate(named(config, "x", data=data)), SftDataset(inputs / "data"))
    )
    assert count % 2 == 0 and count < 24
    found = packed_like(
        inputs, config, "packed now", count, data=data, cluster={"devices_per_node": 2}
    )
    assert_same_path(found, unpacked)
    assert "eval/loss" in found[-1]  # 7 held-out rows, which do not divide over two ranks


def test_rows_packed_by_preprocess_give_the_losses_of_single_examples(inputs, config, unpacked):
    from msrl.data.dataset import SftDataset

    packed = SftDataset(inputs / "packed")
    assert sum(len(row) for row in packed) == 24 and len(packed) < 24
    assert_same_path(
        packed_like(
            inputs, config, "packed before", len(packed), data={"train": str(inputs / "packed")}
        ),
        unpacked,
    )


def test_a_step_of_which_no_token_is_learnt_changes_nothing_and_says_so(inputs, config, capsys):
    """Data of other systems has such rows; here the labels of the first 8 are taken away."""
    from msrl.data.dataset import SftDataset

    for file in inputs.glob("data_*"):
        shutil.copy(file, inputs / file.name.replace("data_", "unlearnt_", 1))
    count = sum(SftDataset(inputs / "data").lengths()[:8])
    labels = np.memmap(inputs / "unlearnt_packed_labels_document.bin", np.int32, "r+")
    labels[:count] = -100
    labels.flush()
    (inputs / "unlearnt_manifest.json").unlink()  # it has the checksum of the other labels
    settings = named(
        config,
        "unlearnt",
        data={"train": str(inputs / "unlearnt"), "shuffle": False},
        checkpoint={"every_steps": 1, "keep": None},
    )
    found = run_in_process({**settings, "train": {**TRAIN, "steps": 2}})
    assert_mentions(capsys.readouterr().err, "no token")
    assert (
        found[0]["train/loss_tokens"] == 0
        and "train/loss" not in found[0]
        and found[1]["train/loss_tokens"] > 0
    )
    source, before = (
        open_mcore(inputs / "runs" / "unlearnt" / "checkpoints", iteration=1),
        weights(inputs / "mcore"),
    )
    for rule in all_rules(source.shape):
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
            assert torch.equal(tensor, before[name]), name


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
    whole = run_in_process({**named(settings, "adapters at once"), "train": lora})
    resumed = metrics(inputs / "runs" / "adapters")
    assert [row["train/loss"] for row in resumed] == [
        row["train/loss"] for row in whole
    ]  # dropout included
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


def test_a_run_ends_when_held_out_rows_get_no_better_and_keeps_the_best_checkpoint(
    inputs, config, capfd
):
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
    nothing_learnt = {**ONE_BATCH, "steps": 20, "global_batch": 8, "optimizer": {"lr": 1e-30}}
    found = run_in_process({**settings, "train": nothing_learnt})
    assert [step for step, row in enumerate(found, 1) if "eval/loss" in row] == [2, 4, 6] and len(
        found
    ) == 6
    assert found[1]["eval/perplexity"] == pytest.approx(np.exp(found[1]["eval/loss"]))
    saves = inputs / "runs" / "early" / "checkpoints"
    assert sorted(path.name for path in saves.glob("iter_*")) == ["iter_0000002", "iter_0000006"]
    out, said = capfd.readouterr()
    assert re.search(r"Hugging Face model: .*early/hf.*step 2.*best", out)
    report = (inputs / "runs" / "early" / "report.md").read_text()
    assert re.search(r"- best evaluation: [\d.]+, after step 2", report) and re.search(
        r"- end: .*early.*2 evaluations", report
    )
    assert_mentions(said, "data.train: ", "70 tokens", "2 evaluations")


def test_an_update_that_ends_the_run_lets_the_save_in_the_background_come_to_its_end(
    inputs, config
):
    """A rate that is out of all proportion: the second update has nothing finite to go by."""
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
def test_what_does_not_fit_is_refused_before_any_rank_starts(config, inputs, sections, fragments):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        run_in_process(named(config, "refused", **sections))
    assert not (inputs / "runs" / "refused").exists()


def test_held_out_rows_that_no_pass_can_take_are_refused_before_any_rank_starts(config, inputs):
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


def test_tokens_of_other_systems_data_that_the_model_has_not_are_refused(config, inputs, tmp_path):
    """Two tensor-parallel ranks would each take such a token for one of the other's, and embed it as zeros."""
    for path in inputs.glob("data_packed_*"):
        shutil.copyfile(path, tmp_path / path.name)
    ids = np.memmap(tmp_path / "data_packed_input_ids_document.bin", np.int32, "r+")
    ids[100] = 288
    ids.flush()
    with pytest.raises(MsrlError, match=mentions("token 288", "288 tokens", "tokenizer")):
        run_in_process(named(config, "refused", data={"train": str(tmp_path / "data")}))
    assert not (inputs / "runs" / "refused").exists()


def test_weights_that_are_cut_short_are_named_with_exit_code_2(config, inputs):
    shutil.copytree(inputs / "hf", inputs / "cut")
    file = inputs / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    settings = named(config, "cut", model={"path": str(inputs / "cut")})
    command = Command(
        "train-sft", "-c", str(write_config(inputs / "cut.yaml", settings)), log=inputs / "cut.log"
    )
    assert command.wait() == 2
    assert str(file) in command.output() and "Traceback" not in command.output()
