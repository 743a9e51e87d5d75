"""Small reward models in the real process, compared with a forward pass of transformers."""

import functools
import json
import os

import numpy as np
import psutil
import pytest

from msrl.errors import MsrlError
from msrl.rewards.score import Scorer, Source
from msrl.rewards.sources import mistakes
from msrl.types import Completion, Episode, Prompt, RolloutGroup
from reward_groups import group, totals
from support import assert_mentions, mentions, shared_data
from training_runs import children

pytestmark = pytest.mark.slow
TEXTS = ("a short one", "and this is a rather longer one, with many more words in it", "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a random Qwen2 reward model with a real tokenizer and without a padding token."""

    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward_model")
    AutoTokenizer.from_pretrained(
        shared_data("tokenizers", "qwen2.5-0.5b-instruct")
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=151665,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


@functools.cache
def load(folder):
    """Return model and tokenizer."""

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(folder)


def compute(folder, texts):
    """Return the score at the last token of each text, computed without padding."""
    import torch

    model, tokenizer = load(folder)
    with torch.inference_mode():
        return [
            model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item()
            for text in texts
        ]


@pytest.fixture(scope="module")
def batches(folder):
    """Scorer of two texts at once, for which a failed call has no score."""
    model = Source(model=str(folder), weight=2.0, options={"batch": 2}, on_failure="undecided")
    with Scorer([model, Source(verifier="step")], 1, prompt_text=lambda _: "Q: ") as scorer:
        yield scorer


def test_a_model_scores_in_batches_as_one_by_one(folder, batches):
    scores = batches.score([group(*TEXTS), group("x<|im_end|><|endoftext|>")])
    again = batches.score([group(*TEXTS)])
    reference = compute(folder, [*(f"Q: {text}" for text in TEXTS), "Q: x<|im_end|><|endoftext|>"])
    scored = [r.scores["reward_model"] for g in scores.groups for r in g.rewards]
    assert scored == pytest.approx(reference, abs=1e-5)
    assert max(reference) - min(reference) > 0.01
    assert totals(again)[0] == pytest.approx([2 * score for score in reference[:3]], abs=1e-5)


def newest_model_process() -> psutil.Process:
    commands = children(os.getpid()).items()
    found = [pid for pid, line in commands if "msrl.rewards.models.worker" in line]
    return max(map(psutil.Process, found), key=lambda process: process.create_time())


@pytest.mark.full
def test_the_batch_of_a_model_that_was_killed_is_scored_again(folder):
    with Scorer([Source(model=str(folder))], 1, prompt_text=lambda _: "Q: ") as scorer:
        first = scorer.score([group(*TEXTS)])
        newest_model_process().kill()
        assert totals(scorer.score([group(*TEXTS)])) == totals(first)


@pytest.fixture(scope="module")
def scorer(folder):
    """Scorer of texts that begin with the decoded prompt."""
    with Scorer([Source(model=str(folder))], 1, prompt_text=load(folder)[1].decode) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("response", "text", "finish_reason"),
    [
        ("4<|im_end|>", "4", "stop"),  # a token that ends responses
        ("4 STOP", "4 ", "stop"),  # a stop string
        ("4<|endoftext|>", "4", "stop"),
        ("4 + 4", "4 + 4", "length"),
        ("<|im_start|>4 + 4", "4 + 4", "length"),  # a special token within the response
        ("<|im_start|>4<|im_end|>", "4", "stop"),
        ("2<|im_end|>\ntool\n4<|im_end|>", "2\n4", "stop"),  # several turns
    ],
)
def test_a_model_scores_special_tokens_and_the_one_that_ended_the_response(
    folder, scorer, response, text, finish_reason
):
    """`train-rm` trains the score at the last token."""
    tokenizer = load(folder)[1]
    ids = np.array(tokenizer(response)["input_ids"])
    episode = Episode((), (), ()) if "tool" in response else None
    logprobs = np.zeros(len(ids), np.float32)
    completion = Completion(ids, logprobs, finish_reason, 0, text, episode=episode)
    rollout = RolloutGroup(Prompt(0, np.array(tokenizer("Q: ")["input_ids"])), (completion,))
    (scores,) = totals(scorer.score([rollout]))
    read = f"Q: {text}<|im_end|>" if "tool" in response else f"Q: {response}"
    assert scores == pytest.approx(compute(folder, [read]), abs=1e-5)


@pytest.mark.full
def test_a_model_reads_questions_by_its_own_template(folder):
    options = {"template": "chat", "prompt_column": "question"}
    with Scorer([Source(model=str(folder), options=options)], 1) as scorer:
        scores = scorer.score([group("4", question="2+2?")])
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    messages = (("system", system), ("user", "2+2?"), ("assistant", "4"))
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    assert totals(scores)[0] == pytest.approx(compute(folder, [text]), abs=1e-5)
    (mistake,) = mistakes([Source(model=str(folder), options={"template": "chat"})])
    assert_mentions(mistake[2], "options.prompt_column")


def test_texts_that_a_model_cannot_score_are_reported_and_never_truncated(batches, scorer):
    scores = batches.score([group("x", "word " * 100)])
    assert scores.failures == {"reward_model/error": 1}
    assert_mentions(scores.notes[0], "103 tokens", "reward model", "64")
    with pytest.raises(MsrlError, match=mentions("reward_model", "error", "prompt 0")):
        scorer.score([group("word " * 100)])


@pytest.mark.full
def test_a_model_that_does_not_answer_in_time_is_a_failed_call(folder):
    source = Source(model=str(folder), timeout_s=1.0, on_failure="wrong", wrong=-1.0)
    with Scorer([source], 1) as scorer:
        scores = scorer.score([group("x")])
        if not scores.failures:  # a busy machine may take longer than a second already
            newest_model_process().suspend()
            scores = scorer.score([group("x")])
    assert scores.failures == {"reward_model/timeout": 1}
    assert totals(scores) == [[-1.0]]


@pytest.mark.full
def test_a_head_that_was_never_trained_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with (
        Scorer([Source(model=str(tmp_path))], 1) as scorer,
        pytest.raises(MsrlError, match=mentions(tmp_path, "score.weight")),
    ):
        scorer.score([group("x")])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
