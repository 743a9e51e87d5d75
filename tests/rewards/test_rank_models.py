"""Reward models on training ranks, before ranks start: engine selection, checks and tokenization.

test_train_grpo.py compares the scores of real ranks with transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from config_inputs import GRPO, make_data, make_model
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.cli.configuration import load_configuration as load
from msrl.errors import ManyErrors
from msrl.memory.states import reward_model_bytes
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.plan.run_plan import resolve
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.models.server import RewardModel
from msrl.rewards.remote import Item
from msrl.rewards.sources import Source, mistakes
from support import assert_each_mentions, assert_mentions, checked_plan
from test_reward_models import save
from tiny_qwen2 import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a reward model in both formats, and with one that has no tokenizer."""
    folder = tmp_path_factory.mktemp("rank_models")
    save(folder / "bare", "qwen2")
    save(folder / "hf", "qwen2", max_position_embeddings=24)
    make_tokenizer().save_pretrained(folder / "hf")
    write_mcore(open_weights(folder / "hf"), folder / "mcore", McoreTarget(ParallelLayout(2)))
    make_model(folder / "policy")
    return folder


def test_the_checkpoint_format_selects_the_engine_of_a_reward_model(
    folder: Path,
):
    cases = {
        ("hf", None): False,
        ("mcore", None): True,
        ("hf", "megatron"): True,
        ("mcore", "hf"): False,
    }
    for (name, engine), on_ranks in cases.items():
        source = Source(model=str(folder / name), engine=engine)
        assert source.on_ranks is on_ranks
        assert isinstance(source.client(), RankModel if on_ranks else RewardModel)
        assert source.policy == "fail" and not source.in_pool


@pytest.mark.parametrize(
    ("changes", "key", "fragments"),
    [
        ({"model": "mcore"}, "", ()),
        ({"model": "hf", "engine": "megatron", "options": {"batch": 4, "max_tokens": 24}}, "", ()),
        ({"model": "policy", "engine": "megatron"}, "model", ("scalar head",)),
        ({"model": "bare", "engine": "megatron"}, "model", ("tokenizer",)),
        (
            {"model": "mcore", "options": {"max_tokens": 25}},
            "model",
            ("options.max_tokens=25", "24 tokens"),
        ),
        ({"model": "mcore", "options": {"device": "cpu"}}, "options.device", ("option",)),
        ({"model": "mcore", "timeout_s": 3.0}, "timeout_s", ("cluster.rpc_timeout_s",)),
        ({"model": "mcore", "engine": "hf"}, "model", ("config.json",)),
        ({"verifier": "acc", "engine": "megatron"}, "engine", ("model",)),
    ],
)
def test_problems_with_a_reward_model_are_reported_before_ranks_start(
    folder: Path, changes: dict, key: str, fragments: tuple[str, ...]
):
    if "model" in changes:
        changes = {**changes, "model": str(folder / changes["model"])}
    problems = list(mistakes([Source(**changes)]))
    assert [k for _, k, _ in problems] == ([key] if key else []), problems
    assert_each_mentions([text for *_, text in problems], *([fragments] if key else []))


def test_texts_are_tokenized_with_the_reward_models_tokenizer_and_scores_keep_their_order(
    folder: Path,
):
    requests = []

    def score(ids, batch):
        requests.append(([row.tolist() for row in ids], batch))
        return [float(len(row)) for row in ids]

    model = RankModel(str(folder / "mcore"), 24, batch=3)
    model.connect(score)
    outcomes = model.score(
        [Item("Q: ", "abc"), Item("", "x" * 25), Item("", ""), Item("", "<|im_start|>é")]
    )
    ids = make_tokenizer()("Q: abc")["input_ids"]
    assert (
        requests == [([ids, make_tokenizer()("<|im_start|>é")["input_ids"]], 3)] and len(ids) == 6
    )
    assert [result.score for result in outcomes] == [6.0, None, None, 3.0]
    assert_mentions(outcomes[1].detail, "25 tokens", "reward model", 24)
    model.connect(lambda ids, batch: [float("nan")] * len(ids))
    assert model.score([Item("", "a")])[0].failure == "error"


def test_a_reward_model_must_support_the_policys_layout_and_its_weights_count(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", num_key_value_heads=8)
    make_data(tmp_path / "data")
    (tmp_path / "grpo.yaml").write_text(
        GRPO.replace("{verifier: acc}", f"{{model: {folder / 'mcore'}}}")
    )
    with pytest.raises(ManyErrors) as error_info:
        checked_plan(load(["grpo.yaml"], ["train.parallel.tp=8"]), "train-grpo")
    tp_errors = [line for line in error_info.value.messages if "reward.sources.0.model=" in line]
    assert tp_errors and all("train.parallel.tp" in line for line in tp_errors)
    tensors = dict(open_weights(folder / "hf").local_tensors(ParallelLayout(), Coords()))
    num_parameters = sum(
        tensor.numel() for name, tensor in tensors.items() if not name.endswith("rm_head.bias")
    )  # one number, which is no weight
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2)):
        config = load(["grpo.yaml"], [f"model.dtype={dtype}"]).config
        plan = resolve(config, "train-grpo")
        assert reward_model_bytes(plan, 0) == num_bytes * num_parameters
