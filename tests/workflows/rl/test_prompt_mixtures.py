"""`data.blend` of train-grpo: mixtures of prompt datasets by weight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from config_inputs import GENERATING, make_working_folder
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.data.order import BlendOrder
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import ManyErrors, MsrlError
from msrl.workflows.preprocess import run
from msrl.workflows.rl.setup import Prompts, prepare
from support import assert_each_mentions, checked_plan, mentions
from tiny_qwen2 import make_tokenizer
from training_runs import write_rows

SETS = (
    "cluster.platform=cpu",
    "data.train=null",
    "rollout.prompts_per_step=8",
    "rollout.max_prompt_tokens=200",
    "train.steps=6",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_working_folder(tmp_path, **GENERATING)
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def write(folder: Path, name: str, count: int, template: str = "qwen") -> str:
    """Preprocess prompts; every fourth one is longer than 60 tokens."""
    rows = [
        {"question": f"{name}{i}=" + " " * (60 if i % 4 == 3 else 0), "answer": f"#### {i}"}
        for i in range(count)
    ]
    values = {
        "input": [str(write_rows(folder / f"{name}.jsonl", rows))],
        "handler": "gsm8k",
        "template": template,
        "tokenizer": str(folder / "model"),
        "output_prefix": str(folder / name),
    }
    run(Config.model_validate({"preprocess": values}, strict=False))
    return name


def prompts(*sets: str) -> Prompts:
    return prepare(checked_plan(load(["grpo.yaml"], [*SETS, *sets]), "train-grpo")).prompts


def texts(folder: Path, drawn: Prompts, position: int, count: int) -> list[str]:
    backend = open_tokenizer(folder / "model").backend
    return [backend.decode(p.token_ids.tolist()) for p in drawn.after(position, count)]


def test_prompts_are_drawn_by_weight_and_keep_answer_and_a_number_of_their_own(folder: Path):
    write(folder, "a", 8), write(folder, "b", 40)
    drawn = prompts("data.blend={a: 3.0, b: 1.0}")
    assert isinstance(drawn.order, BlendOrder) and len(drawn.rows) == 48
    for step in range(4):
        rows = drawn.after(8 * step, 8)
        assert Counter(prompt.index < 8 for prompt in rows) == {True: 6, False: 2}
        for prompt, text in zip(rows, texts(folder, drawn, 8 * step, 8), strict=True):
            name = f"a{prompt.index}=" if prompt.index < 8 else f"b{prompt.index - 8}="
            assert name in text and prompt.answer == name[1:-1]


def test_the_order_follows_from_the_seed_and_continues_at_any_position(folder: Path):
    write(folder, "a", 8), write(folder, "b", 40)
    blend = "data.blend={a: 1.0, b: 2.0}"
    whole = texts(folder, prompts(blend), 0, 40)
    assert whole[13:40] == texts(folder, prompts(blend), 13, 27)
    assert whole != texts(folder, prompts(blend, "run.seed=1"), 0, 40)


def test_too_long_prompts_are_left_out_of_each_dataset(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    write(folder, "a", 8), write(folder, "b", 40)
    longest = max(len(p.token_ids) for p in prompts("data.train=a").after(0, 8))
    drawn = prompts("data.blend={a: 1.0, b: 1.0}", f"rollout.max_prompt_tokens={longest - 30}")
    assert "a: dropped 2 of 8" in capsys.readouterr().err
    indices = {prompt.index for prompt in drawn.after(0, 200)}
    assert len(drawn.rows) == 36 == len(indices) and not any(i % 4 == 3 for i in indices)


def test_each_mistake_of_a_blend_names_its_prefix(folder: Path):
    write(folder, "a", 8), write(folder, "other", 8, template="qwen_math_r1")
    with pytest.raises(MsrlError, match=mentions("data.blend", "qwen", "qwen_math_r1")):
        prompts("data.blend={a: 1.0, other: 1.0}")
    with pytest.raises(ManyErrors) as caught:
        load(["grpo.yaml"], ["data.blend={a: 1.0}", "train.steps=null"], command="train-grpo")
    assert_each_mentions(
        caught.value.messages,
        ("train.steps", "train.epochs"),
        ("data.blend", "data.train", "null"),
        ("train.steps", "blend"),
    )
