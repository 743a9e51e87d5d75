"""Continued pretraining: rows of documents, order of several datasets, and a training run."""

from __future__ import annotations

import shutil
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.data.indexed import IndexedWriter
from msrl.data.manifest import dataset_name
from msrl.data.order import BlendOrder, RowOrder
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.sft.text_rows import TextRows
from support import mentions
from tiny_qwen2 import VOCAB_SIZE, save_model
from training_runs import metrics

BLEND = BlendOrder((10, 3), (0.7, 0.3), 5, 3, True)


def write_text(prefix: Path, documents: list[list[int]]) -> str:
    name = dataset_name(str(prefix), "pretrain", "text")
    writer = IndexedWriter(Path(f"{name}.bin"), Path(f"{name}.idx"))
    writer.add(
        np.array([t for d in documents for t in d], np.int32),
        np.array([len(d) for d in documents], np.int32),
    )
    writer.close()
    return str(prefix)


def as_lists(rows: TextRows) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in row.token_ids] for row in rows.sequences(range(len(rows)))]


def test_rows_share_a_token_and_keep_documents_apart(tmp_path):
    rows = TextRows([write_text(tmp_path / "a", [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]])], 4)
    assert as_lists(rows) == [[[1, 2, 3, 4]], [[4, 5, 6, 7]], [[9, 10]], [[10, 11]]]


@pytest.mark.parametrize("row_tokens", [2, 3, 5, 16, 400])
def test_every_token_except_the_first_of_a_document_is_trained_once(tmp_path, row_tokens):
    random = np.random.default_rng(1)
    documents = [random.integers(0, 1000, random.integers(1, 30)).tolist() for _ in range(12)]
    rows = TextRows([write_text(tmp_path / "a", documents)], row_tokens)
    trained = Counter(pair for row in as_lists(rows) for ids in row for pair in pairwise(ids))
    assert trained == Counter(pair for d in documents for pair in pairwise(d))
    assert (
        rows.longest >= max(sum(map(len, row)) for row in as_lists(rows))
        and rows.longest <= row_tokens
    )


def test_rows_of_several_datasets_are_numbered_consecutively(tmp_path):
    rows = TextRows(
        [write_text(tmp_path / "a", [[1, 2, 3]]), write_text(tmp_path / "b", [[7, 8], [9, 9]])], 3
    )
    assert rows.num_rows == (1, 2) and as_lists(rows) == [[[1, 2, 3]], [[7, 8]], [[9, 9]]]


def test_a_row_of_a_huge_document_needs_only_the_memory_of_a_row(tmp_path):
    rows = TextRows([write_text(tmp_path / "a", [list(range(400_000))])], 5)
    tracemalloc.start()
    (row,) = rows.sequences([50_000])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (
        row.token_ids[0].tolist() == [200_000, 200_001, 200_002, 200_003, 200_004]
        and peak < 100_000
    )


def test_a_blend_follows_its_weights_as_computed_by_hand():
    first = [int(row) for step in range(4) for row in replace(BLEND, shuffle=False).of_step(step)]
    # Due at (j + 0.5) / 0.7 = 0.71, 2.14, 3.57, 5, 6.43, ... and (j + 0.5) / 0.3 = 1.67, 5, 8.33,
    # ...; the first dataset wins ties.
    assert first[:10] == [0, 10, 1, 2, 3, 11, 4, 5, 12, 6]
    datasets = np.array(first) >= 10
    assert all(abs(datasets[:n].sum() - 0.3 * n) <= 1 for n in range(1, 21))


def test_a_blend_is_independent_of_the_step_size_and_reads_each_row_once_per_epoch():
    whole = replace(BLEND, rows_per_step=200).of_step(0).tolist()
    assert [row for step in range(40) for row in BLEND.of_step(step).tolist()] == whole
    first = [row for row in whole if row < 10]
    assert (
        sorted(first[:10]) == sorted(first[10:20]) == list(range(10)) and first[:10] != first[10:20]
    )


def test_a_blend_continues_at_any_position():
    whole = BLEND.after(0, 120).tolist()
    rows, position = list[int](), 0
    for count in (1, 7, 2, 40, 70):
        rows += BLEND.after(position, count).tolist()
        position += count
    assert rows == whole and BLEND.of_step(3).tolist() == whole[3 * BLEND.rows_per_step :][:5]


def test_a_blend_of_one_dataset_has_the_order_of_that_dataset():
    alone, blend = RowOrder(10, 4, 3, True), BlendOrder((10,), (1.0,), 4, 3, True)
    assert all(alone.of_step(step).tolist() == blend.of_step(step).tolist() for step in range(9))


@pytest.mark.parametrize(
    ("command", "sets", "fragments"),
    [
        (
            "train-sft",
            ["data.blend={a: 0.5, b: 0.5}", "data.eval_fraction=0.5"],
            ("data.eval_fraction", "data.eval", "blend"),
        ),
        (
            "train-sft",
            ["data.handler=pretrain", "data.train=a"],
            ("data.seq_length", "missing", "rows"),
        ),
        (
            "train-sft",
            ["data.handler=pretrain", "data.seq_length=8", "data.train=a", "data.blend={a: 1.0}"],
            ("data.train", "data.blend"),
        ),
        (
            "train-sft",
            ["data.handler=pretrain", "data.seq_length=8", "data.blend={a: 1.0}", "train.epochs=2"],
            ("blend", "epochs"),
        ),
        (
            "train-sft",
            ["data.handler=pretrain", "data.seq_length=8", "data.train=a", "data.pack=true"],
            ("data.pack=", "pretrain"),
        ),
        ("train-sft", ["data.handler=alpaca"], ("data.handler",)),
        ("train-grpo", ["data.handler=pretrain"], ("train-sft", "pretrain")),
    ],
)
def test_contradicting_keys_are_refused_with_their_names(command, sets, fragments):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        load([], sets, command=command)


@pytest.mark.full
@pytest.mark.slow
def test_training_on_two_blended_texts_learns_and_resumes_and_repeats_bit_for_bit(tmp_path):
    from msrl.workflows.sft import run as train_sft

    save_model(tmp_path / "hf", tied=True, positions=64)
    random = np.random.default_rng(2)
    texts = [
        [[i % 5 + 10 * number + 3 for i in range(random.integers(2, 60))] for _ in range(9)]
        for number in (1, 2)
    ]
    prefixes = [
        write_text(tmp_path / f"text{number}", documents) for number, documents in enumerate(texts)
    ]
    settings = {
        "run": {"name": "whole", "dir": str(tmp_path)},
        "model": {"path": str(tmp_path / "hf"), "dtype": "float32"},
        "data": {
            "handler": "pretrain",
            "blend": dict(zip(prefixes, (2.0, 1.0), strict=True)),
            "eval": prefixes[1],
            "seq_length": 16,
        },
        "cluster": {"platform": "cpu", "rpc_timeout_s": 120.0},
        "train": {"steps": 8, "global_batch": 6, "micro_batch": 2, "optimizer": {"lr": 3e-3}},
        "eval": {"every_steps": 8},
        "checkpoint": {"every_steps": 4, "async": True},
    }
    train_sft.run(resolve(Config.model_validate(settings, strict=False), "train-sft"))
    whole = metrics(tmp_path / "whole")
    assert (
        whole[-1]["train/loss"] < whole[0]["train/loss"] - 2
        and whole[-1]["eval/loss"] < whole[0]["train/loss"] - 2
    )
    assert max(t for text in texts for document in text for t in document) < VOCAB_SIZE
    saves = tmp_path / "saves"
    shutil.copytree(tmp_path / "whole" / "checkpoints", saves)
    shutil.rmtree(saves / "iter_0000008")
    resumed = {
        **settings,
        "run": {"name": "again", "dir": str(tmp_path)},
        "checkpoint": {"save": str(saves), "resume": "auto"},
    }
    train_sft.run(resolve(Config.model_validate(resumed, strict=False), "train-sft"))
    assert metrics(tmp_path / "again") == whole[4:]
    repeat = {**settings, "run": {"name": "repeat", "dir": str(tmp_path), "deterministic": True}}
    train_sft.run(resolve(Config.model_validate(repeat, strict=False), "train-sft"))
    assert metrics(tmp_path / "repeat") == whole
    ends = (
        SavedTraining(folder, 8).state()["files"]
        for folder in (saves, tmp_path / "repeat" / "checkpoints")
    )
    assert (
        len({repr(files) for files in ends}) == 1
    )  # checksums of weights, optimizer and random numbers
    with pytest.raises(MsrlError, match=mentions("data.blend", "was [2.0, 1.0], is [2.0, 3.0]")):
        changed = {
            **resumed,
            "data": {**settings["data"], "blend": dict(zip(prefixes, (2.0, 3.0), strict=True))},
        }
        longer = {**changed, "train": {**settings["train"], "steps": 12}}
        train_sft.run(resolve(Config.model_validate(longer, strict=False), "train-sft"))
