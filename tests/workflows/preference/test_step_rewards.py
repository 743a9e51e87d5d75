"""Process reward models: rows with labeled steps, their files, batches and loss."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from checkouts import checkout
from msrl.algorithms.packing import micro_batch
from msrl.algorithms.step_rewards import step_losses
from msrl.config.schema import Config
from msrl.data.columns import DroppedRow
from msrl.data.dataset import IGNORE, SftDataset, StepDataset
from msrl.data.handlers import make_handler
from msrl.data.indexed import IndexedReader
from msrl.data.rows.steps import reward_token_ids
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.trainer.objective.steps import StepLoss
from msrl.types import StepRow
from msrl.workflows.preference.steps import StepTask, step_batch, step_sequences
from msrl.workflows.sft.rows import open_rows
from support import mentions
from test_preference_data import preprocess, tokenizer
from tiny_qwen2 import save_model

__all__ = ["tokenizer"]  # a fixture

OPTIONS = {"placeholder_token": "#"}
ROW = {"input": "1+1+1 Two. #\nFour. #", "value": ["+", "-"]}
TOKENS = (15, 13)  # of "-" and "+"


def convert(row: Mapping[str, Any], **options: Any) -> StepRow:
    chosen = {**OPTIONS, **options}
    return make_handler("steps", kind=None, map_keys={}, options=chosen).converter()(row)


def write(
    tokenizer: Path, rows: Sequence[Mapping[str, Any]], **settings: Any
) -> tuple[Any, StepDataset]:
    sections = {"template": None, "options": OPTIONS, **settings}
    manifest, prefix = preprocess(tokenizer, rows, "AlpacaStyleProcessRewardHandler", **sections)
    return manifest, StepDataset(prefix)


# --- rows ---


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (ROW, ROW["input"]),
        ({"input": "a # b #", "label": ["+", "-"]}, "a # b #"),
        ({"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, "q a #\nb #\n"),
        ({"steps": ["a", "b"], "labels": ["+", "-"]}, "a #\nb #\n"),
    ],
)
def test_labeled_steps_are_read_in_the_usual_formats(row: dict[str, Any], text: str) -> None:
    assert convert(row) == StepRow(text, ("+", "-"))


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"value": ["+", "good"]}, ("value", "good", "reward_tokens")),
        ({"value": ["+", 1.0]}, ("value", "1.0", "reward_tokens")),
        ({"value": "+-"}, ("value", "+-", "list")),
        ({"input": None}, ("input", "completions")),
        ({"input": None, "completions": ["a", 3]}, ("completions", "texts")),
        ({"completions": ["a", "b"]}, ("input", "completions", "--ignore")),
    ],
)
def test_an_unknown_label_and_another_type_are_refused(
    change: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        convert({**ROW, **change})


def test_missing_labels_are_refused_and_empty_ones_are_dropped_by_name() -> None:
    with pytest.raises(MsrlError, match=mentions("labels", "column")):
        convert({"input": "a #"})
    for change, reason in (({"value": []}, "no_labels"), ({"value": None}, "no_labels")):
        with pytest.raises(DroppedRow, match=reason):
            convert({**ROW, **change})
    with pytest.raises(DroppedRow, match="empty_text"):
        convert({**ROW, "input": " "})


# --- files ---


def test_steps_have_the_files_of_mindspeed(tokenizer: Path) -> None:
    manifest, data = write(tokenizer, [ROW, ROW])
    assert (manifest.kind, manifest.num_examples, manifest.num_loss_tokens) == ("steps", 2, 4)
    (example,) = data[0]
    decode = open_tokenizer(tokenizer).backend.decode
    assert decode(example.token_ids.tolist()) == ROW["input"]
    assert decode(example.token_ids[example.loss_mask].tolist()) == "##"
    assert example.labels is not None
    assert decode(example.labels[example.loss_mask].tolist()) == "+-"
    assert set(example.labels[~example.loss_mask].tolist()) == {IGNORE}
    names = ("input_ids", "attention_mask", "labels")
    readers = [IndexedReader(f"{data.prefix}_packed_{name}_document") for name in names]
    assert readers[1][0].tolist() == [1] * len(example.token_ids)
    assert [len(reader) for reader in readers] == [2, 2, 2]


def test_a_placeholder_that_merges_with_a_space_has_its_own_token(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    pieces = ByteLevel.alphabet()
    vocabulary = {piece: number for number, piece in enumerate([*sorted(pieces), "Ġ#"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("Ġ", "#")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    rows = [ROW, {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}]
    manifest, data = write(tmp_path / "tokenizer", rows)
    assert not manifest.dropped
    texts = [tokenizer.decode(row.token_ids.tolist()) for number in (0, 1) for row in data[number]]
    assert texts == [ROW["input"], "q a #\nb #\n"]
    for (example,) in (data[0], data[1]):
        assert set(example.token_ids[example.loss_mask].tolist()) == {vocabulary["#"]}


def test_rows_with_another_number_of_labels_are_counted_by_name(tokenizer: Path) -> None:
    rows = [ROW, {**ROW, "value": ["+"]}, {**ROW, "value": ["+"] * 3}, {**ROW, "value": []}]
    manifest, data = write(tokenizer, rows)
    assert dict(manifest.dropped) == {"no_labels": 1, "wrong_number_of_labels": 2}
    assert len(data) == 1


def test_long_texts_are_dropped_or_lose_their_last_steps(tokenizer: Path) -> None:
    rows = [ROW, {"input": f"{'a' * 30} #", "value": ["+"]}]
    manifest, _ = write(tokenizer, [*rows, {"input": "a #", "value": ["-"]}], seq_length=15)
    assert dict(manifest.dropped) == {"too_long": 2}
    manifest, data = write(tokenizer, rows, seq_length=15, too_long="truncate")
    assert dict(manifest.dropped) == {"nothing_to_learn": 1}
    assert (manifest.truncated, int(data[0][0].loss_mask.sum())) == (2, 1)


def test_an_unknown_label_is_refused_with_its_row(tokenizer: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("rows.jsonl", "good", "reward_tokens")):
        write(tokenizer, [ROW, {**ROW, "value": ["+", "good"]}])


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"placeholder_token": "##"}, ("placeholder_token=##", "2 tokens")),
        ({"reward_tokens": ["+", "no"]}, ("reward_tokens=no", "2 tokens")),
        ({"reward_tokens": ["+", "+"]}, ("reward_tokens", "different")),
        ({"reward_tokens": ["+"]}, ("reward_tokens", "two")),
        ({"tokens": ["+"]}, ("options.tokens", "reward_tokens")),
    ],
)
def test_tokens_must_be_single_and_different(
    tokenizer: Path, options: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        write(tokenizer, [ROW], options={**OPTIONS, **options})


def test_settings_without_effect_on_steps_are_refused(tokenizer: Path) -> None:
    for name, value in (("template", "qwen"), ("pack", True), ("enable_thinking", True)):
        with pytest.raises(MsrlError, match=mentions(name, "steps")):
            write(tokenizer, [ROW], seq_length=64, **{name: value})


def test_steps_are_no_data_of_train_sft(tokenizer: Path) -> None:
    _, data = write(tokenizer, [ROW])
    with pytest.raises(MsrlError, match=mentions("steps", "sft")):
        SftDataset(data.prefix)
    Path(f"{data.prefix}_manifest.json").unlink()  # as MindSpeed writes it
    assert StepDataset(data.prefix).stray_label(TOKENS) is None
    assert StepDataset(data.prefix).stray_label(TOKENS[:1]) == (0, TOKENS[1])


# --- batches and loss ---


def test_the_model_predicts_a_label_at_the_placeholder_itself(tokenizer: Path) -> None:
    _, data = write(tokenizer, [ROW])
    tokens = reward_token_ids(open_tokenizer(tokenizer), ("-", "+"), key="x")
    assert tokens == TOKENS
    sequences = step_sequences(data[0], tokens)
    batch = micro_batch(*sequences)
    (example,) = data[0]
    assert batch.token_ids[batch.loss_mask].tolist() == [example.token_ids[-1]] * 2
    assert np.flatnonzero(batch.loss_mask).tolist() == np.flatnonzero(example.loss_mask).tolist()
    assert batch.fields["step_labels"][batch.loss_mask].tolist() == [1.0, 0.0]


def test_packed_rows_hold_whole_texts_and_every_text_once(tokenizer: Path) -> None:
    rows = [{"input": f"{'a' * n} #", "value": ["+-"[n % 2]]} for n in range(1, 12)]
    _, data = write(tokenizer, rows)
    section = {"train": data.prefix, "pack": True, "seq_length": 24}
    opened = open_rows(Config.model_validate({"data": section}, strict=False), data)
    batch = step_batch([opened.examples(row) for row in range(len(opened))], TOKENS)
    assert batch.num_loss_tokens == 11 and len(batch.rows) == len(opened) < 11
    assert sorted(map(len, batch.sequences.token_ids)) == [n + 3 for n in range(1, 12)]


def test_rows_must_fit_the_reward_tokens_and_the_micro_batches_of_a_training(
    tokenizer: Path,
) -> None:
    save_model(tokenizer.parent / "model", tied=False, positions=128)
    _, data = write(tokenizer, [ROW] * 4)

    def rows(**reward_model: Any) -> Any:
        limit = reward_model.pop("limit", None)
        config = {
            "model": {"path": str(tokenizer.parent / "model")},
            "data": {"train": data.prefix, "eval_fraction": 0.25},
            "train": {"max_tokens_per_micro_batch": limit},
            "algo": {"reward_model": {"kind": "process", **reward_model}},
        }
        plan = resolve(Config.model_validate(config, strict=False), "train-rm")
        assert plan.shape.reward_head is False
        return StepTask().open_rows(plan)

    longest = len(ROW["input"])
    train, held_out = rows(limit=longest + 1)
    assert (len(train), len(held_out), train.longest) == (3, 1, longest)
    with pytest.raises(MsrlError, match=mentions("max_tokens_per_micro_batch", longest + 1)):
        rows(limit=longest)
    key = "algo.reward_model.reward_tokens"
    with pytest.raises(MsrlError, match=mentions(key, data.prefix, TOKENS[0])):
        rows(reward_tokens=["+", "o"])
    with pytest.raises(MsrlError, match=mentions(key, "good", "4 tokens")):
        rows(reward_tokens=["+", "good"])


def test_the_loss_is_the_cross_entropy_over_the_reward_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 5.0], [1.0, 0.5, 3.0, -2.0]], requires_grad=True)
    losses = step_losses(logits[:, [1, 2]], torch.tensor([0, 0]))
    first, second = (torch.log1p(torch.tensor(x).exp()) for x in (-3.0, 2.5))
    torch.testing.assert_close(losses.loss, torch.stack((first, second)))
    assert losses.is_right.tolist() == [1.0, 0.0]


def test_the_loss_does_not_depend_on_the_split_into_micro_batches() -> None:
    logits, labels = torch.randn(7, 3), torch.tensor([0, 1, 2, 1, 0, 2, 2])
    loss = StepLoss((5, 6, 7))
    total, sums = loss(logits, {"step_labels": labels.float()}, 7)
    micro_batches = [
        loss(logits[rows], {"step_labels": labels[rows].float()}, 7)
        for rows in (slice(0, 2), slice(2, 7))
    ]
    torch.testing.assert_close(sum(value for value, _ in micro_batches), total)
    torch.testing.assert_close(
        sum(values["accuracy"] for _, values in micro_batches), sums["accuracy"]
    )


# --- MindSpeed-LLM ---


def original_loss(ids: Tensor, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and accuracy of MindSpeed-LLM's trainer, which later releases do not have.

    Its sources are not part of this project.
    """
    name = "mindspeed_llm/tasks/posttrain/prm/prm_trainer.py"
    file = checkout("MindSpeed-LLM", name) / name
    trainer = load_trainer(file).__new__(load_trainer(file))
    tokens = {"placeholder_token_id": 9, "reward_token_ids": sorted(TOKENS)}
    vars(trainer).update(
        tokens,
        cross_entropy_loss=torch.nn.CrossEntropyLoss(),
        args=SimpleNamespace(context_parallel_size=1),
    )
    loss, metrics = trainer.loss_func(ids, labels, logits)
    return loss, metrics["acc"]


def load_trainer(file: Path) -> Any:
    """Return the class of the trainer; modules that its loss does not need are empty."""
    names = {
        "megatron.training": ("get_args", "get_tokenizer"),
        "megatron.training.utils": ("average_losses_across_data_parallel_group",),
        "mindspeed_llm.tasks.posttrain.base": ("BaseTrainer",),
        "mindspeed_llm.tasks.posttrain.utils": ("convert_token_to_id",),
        "mindspeed_llm.training.utils": (
            "get_tune_attention_mask",
            "get_finetune_data_on_this_tp_rank",
        ),
    }
    stubs = {}
    for name, members in names.items():
        stubs[name] = ModuleType(name)
        vars(stubs[name]).update(dict.fromkeys(members, lambda losses: losses))
    vars(stubs["mindspeed_llm.tasks.posttrain.base"])["BaseTrainer"] = object
    spec = importlib.util.spec_from_file_location("prm_trainer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec.loader.exec_module(module)
    gather = SimpleNamespace(gather_from_tensor_model_parallel_region=lambda values: values)
    vars(module)["tensor_parallel"] = SimpleNamespace(mappings=gather)
    return module.PRMTrainer


def test_loss_gradient_and_accuracy_are_those_of_mindspeed_llm() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[1, 2, 9, 3, 9, 4], [5, 9, 9, 6, 7, 8]])
    labels = torch.full_like(ids, IGNORE)
    at = ids == 9
    labels[at] = torch.tensor([TOKENS[0], TOKENS[1], TOKENS[1], TOKENS[0]])
    logits = torch.randn(2, 6, 60, dtype=torch.float32, requires_grad=True)
    expected, accuracy = original_loss(ids, labels, logits)
    gradient = torch.autograd.grad(expected, logits)[0]
    indices = (labels[at] == TOKENS[1]).float()
    selected = logits[at][:, list(TOKENS)]
    loss, sums = StepLoss(TOKENS)(selected, {"step_labels": indices}, 4)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(sums["accuracy"] / 4, accuracy)
    own = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(own, gradient, rtol=0, atol=1e-6)
