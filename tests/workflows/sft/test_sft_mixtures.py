"""Weighted mixtures of SFT datasets: rows, order and messages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.data.order import BlendOrder
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.workflows.preprocess import run
from msrl.workflows.sft.rows import MixedRows
from msrl.workflows.sft.setup import training_rows
from msrl.workflows.training.supervised import row_order
from support import mentions, shared_data
from test_preprocess import jsonl


def write(folder: Path, name: str, count: int, **settings: Any) -> str:
    rows = [{"instruction": f"{name} {i}", "output": f"answer {name} {i}"} for i in range(count)]
    prefix = str(folder / name)
    values = {
        "input": jsonl(folder / f"{name}.jsonl", rows),
        "handler": "alpaca",
        "template": "qwen",
        "tokenizer": str(shared_data("tokenizers", "qwen2.5-0.5b-instruct")),
        "output_prefix": prefix,
        **settings,
    }
    run(Config.model_validate({"preprocess": values}))
    return prefix


def config(blend: dict[str, float]) -> Config:
    return Config.model_validate(
        {"data": {"blend": blend, "shuffle": True}, "train": {"steps": 9, "global_batch": 8}}
    )


@pytest.mark.slow
def test_a_step_reads_each_sft_dataset_in_proportion_to_its_weight(tmp_path: Path):
    prefixes = [write(tmp_path, "a", 5), write(tmp_path, "b", 40)]
    settings = config({prefixes[0]: 3.0, prefixes[1]: 1.0})
    rows, held_out = training_rows(resolve(settings, "train-sft"))
    assert isinstance(rows, MixedRows) and held_out is None
    assert (len(rows), rows.num_rows) == (45, (5, 40))
    order = row_order(settings, rows)
    assert isinstance(order, BlendOrder)
    datasets = [SftDataset(prefix) for prefix in prefixes]
    for step in range(4):
        numbers = order.of_step(step).tolist()
        assert Counter(number < 5 for number in numbers) == {True: 6, False: 2}
        for number, sequences in zip(numbers, rows.sequences(numbers), strict=True):
            [example] = datasets[0][number] if number < 5 else datasets[1][number - 5]
            assert sequences.token_ids[0].tolist() == example.token_ids.tolist()


@pytest.mark.slow
def test_a_mixture_of_different_templates_is_refused(tmp_path: Path):
    prefixes = [write(tmp_path, "a", 2), write(tmp_path, "b", 2, template="qwen_math_r1")]
    with pytest.raises(MsrlError, match=mentions("data.blend", "qwen", "qwen_math_r1")):
        training_rows(resolve(config(dict.fromkeys(prefixes, 1.0)), "train-sft"))
