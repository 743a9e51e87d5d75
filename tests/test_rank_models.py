"""Reward models on the training ranks, before any rank starts: which engine a folder gets, what is refused, how texts become scores.

What real ranks score is held to transformers' in test_train_grpo.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from config_inputs import GRPO, make_data, make_model
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.checks.validate import check
from msrl.cli.configuration import load_configuration as load
from msrl.errors import ManyErrors
from msrl.memory.states import reward_model_bytes
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.models.server import RewardModel
from msrl.rewards.remote import Item
from msrl.rewards.sources import Source, mistakes
from support import assert_each_mentions, assert_mentions
from test_reward_models import save
from tiny_qwen2 import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as Hugging Face folder and as mcore checkpoint, with its tokenizer; and one without."""
    folder = tmp_path_factory.mktemp("rank_models")
    save(folder / "bare", "qwen2")
    save(folder / "hf", "qwen2", max_position_embeddings=24)
    make_tokenizer().save_pretrained(folder / "hf")
    write_mcore(open_weights(folder / "hf"), folder / "mcore", McoreTarget(ParallelLayout(2)))
    make_model(folder / "policy")
    return folder


def test_a_folder_of_transformers_and_a_checkpoint_of_megatron_get_engines_of_their_own(folder: Path):
    cases = {("hf", None): False, ("mcore", None): True, ("hf", "megatron"): True, ("mcore", "hf"): False}
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
        ({"model": "mcore", "options": {"max_tokens": 25}}, "model", ("options.max_tokens=25", "24 tokens")),
        ({"model": "mcore", "options": {"device": "cpu"}}, "options.device", ("option",)),
        ({"model": "mcore", "timeout_s": 3.0}, "timeout_s", ("cluster.rpc_timeout_s",)),
        ({"model": "mcore", "engine": "hf"}, "model", ("config.json",)),
        ({"verifier": "acc", "engine": "megatron"}, "engine", ("model",)),
    ],
)
def test_what_is_wrong_with_a_model_is_said_before_a_rank_starts(folder: Path, changes: dict, key: str, fragments: tuple[str, ...]):
    if "model" in changes:
        changes = {**changes, "model": str(folder / changes["model"])}
    found = list(mistakes([Source(**changes)]))
    assert [k for _, k, _ in found] == ([key] if key else []), found
    assert_each_mentions([text for *_, text in found], *([fragments] if key else []))


def test_texts_become_the_tokens_of_the_models_own_tokenizer_and_scores_go_back_to_their_places(folder: Path):
    asked = []

    def score(ids, batch):
        asked.append(([one.tolist() for one in ids], batch))
        return [float(len(one)) for one in ids]

    model = RankModel(str(folder / "mcore"), batch=3)
    model.connect(score)
    outcomes = model.score([Item("Q: ", "abc"), Item("", "x" * 25), Item("", ""), Item("", "<|im_start|>é")])
    ids = make_tokenizer()("Q: abc")["input_ids"]
    assert asked == [([ids, make_tokenizer()("<|im_start|>é")["input_ids"]], 3)] and len(ids) == 6
    assert [outcome.score for outcome in outcomes] == [6.0, None, None, 3.0]
    assert_mentions(outcomes[1].detail, "25 tokens", "reward model", 24)
    model.connect(lambda ids, batch: [float("nan")] * len(ids))
    assert model.score([Item("", "a")])[0].failure == "error"


def test_a_model_that_cannot_be_cut_as_the_policy_is_refused_and_its_weights_are_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", num_key_value_heads=8)
    make_data(tmp_path / "data")
    (tmp_path / "grpo.yaml").write_text(GRPO.replace("{verifier: acc}", f"{{model: {folder / 'mcore'}}}"))
    with pytest.raises(ManyErrors) as caught:
        check(load(["grpo.yaml"], ["train.parallel.tp=8"]), "train-grpo")
    told = [line for line in caught.value.messages if "reward.sources.0.model=" in line]
    assert told and all("train.parallel.tp" in line for line in told)
    held = dict(open_weights(folder / "hf").local_tensors(ParallelLayout(), Coords()))
    whole = sum(tensor.numel() for name, tensor in held.items() if not name.endswith("rm_head.bias"))  # one number, which is no weight
    assert reward_model_bytes(load(["grpo.yaml"], ["model.dtype=float32"]).config, 0) == 4 * whole
    assert reward_model_bytes(load(["grpo.yaml"], ["model.dtype=bfloat16"]).config, 0) == 2 * whole
