"""A real vLLM engine compared with Hugging Face transformers, with tied and untied embeddings."""

from __future__ import annotations

import re
import shutil
import urllib.request
from collections import Counter

import numpy as np
import pytest
import torch

from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.platforms import get
from msrl.rollout.engine import EngineMetrics, EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.types import Prompt, SamplingParams
from support import ROOT, mentions
from tiny_qwen2 import VOCAB_SIZE, make_model, make_tokenizer, save_model
from transformers_logprobs import response_logprobs

pytestmark = pytest.mark.slow
RUN = "a run"
SPECIAL = (1, 50, 60, 2, 70, 1, 80)  # <|im_start|> and <|im_end|> among bytes


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="untied"),
        pytest.param(True, id="tied", marks=pytest.mark.full),
    ],
)
def running(request, tmp_path_factory):
    """Return (engine, a Hugging Face model with the engine's initial weights)."""
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder, tied=request.param)
    engine = VllmEngine(
        EngineSettings(
            folder,
            dtype="float32",
            engine=EngineConfig(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=600),
            metrics=EngineMetrics(0, RUN),
        ),
        get("cpu"),
    )
    yield engine, model
    engine.close()


@pytest.fixture
def engine(running):
    running[0].load_weights(running[1].named_parameters())
    return running[0]


@pytest.fixture
def model(running):
    return running[1]


def prompts(*lengths: int) -> list[Prompt]:
    numbers = np.random.default_rng(0)
    return [Prompt(10 + i, numbers.integers(0, 259, size=n)) for i, n in enumerate(lengths)]


def test_greedy_completions_equal_those_of_transformers(engine, model):
    batch = [*prompts(5, 40, 150), Prompt(0, np.asarray(SPECIAL))]
    groups = engine.generate(
        batch, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True), 7
    )
    for prompt, group in zip(batch, groups, strict=True):
        ids = torch.from_numpy(prompt.token_ids)[None]
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
        )
        assert group.prompt is prompt
        assert (
            group.completions[0].token_ids.tolist() == expected[0, len(prompt.token_ids) :].tolist()
        )
        assert group.completions[0].finish_reason == "length"
        assert group.completions[0].policy_version == 7


def test_the_engine_receives_the_prompts_token_ids_unchanged(engine, model, monkeypatch):
    seen = []
    generate = engine._llm.generate
    monkeypatch.setattr(
        engine._llm,
        "generate",
        lambda *args, **kwargs: seen.extend(out := generate(*args, **kwargs)) or out,
    )
    batch = [Prompt(0, np.asarray(SPECIAL)), *prompts(30)]
    engine.generate(batch, SamplingParams(max_tokens=1, num_samples=2), 0)
    assert [list(output.prompt_token_ids) for output in seen] == [
        p.token_ids.tolist() for p in batch for _ in range(2)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_sampling_distribution(engine, model, temperature):
    sampling = SamplingParams(max_tokens=40, num_samples=4, temperature=temperature, seed=1)
    for group in engine.generate(prompts(3, 20, 130), sampling, 0):
        for completion in group.completions:
            expected = response_logprobs(
                model, group.prompt.token_ids, completion.token_ids, temperature
            )
            assert completion.logprobs.dtype == np.float32
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_ranks_of_tokens_are_not_counted(engine):
    from vllm.v1.sample import sampler

    assert sampler.batched_count_greater_than.__module__ == "msrl.rollout.vllm_sampler"


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 6, "top_p": 0.8},
        {"min_p": 0.2},
        *(pytest.param(one, marks=pytest.mark.full) for one in ({"top_k": 6}, {"top_p": 0.8})),
    ],
)
def test_tokens_are_as_frequent_as_their_probabilities_say(engine, filters):
    count = 1500
    sampling = SamplingParams(max_tokens=1, num_samples=count, temperature=0.7, seed=5, **filters)
    completions = engine.generate(prompts(20), sampling, 0)[0].completions
    said = {int(c.token_ids[0]): float(np.exp(c.logprobs[0])) for c in completions}
    drawn = Counter(int(c.token_ids[0]) for c in completions)
    common = [token for token in drawn if count * said[token] >= 5]
    shares = np.array([said[token] for token in common])
    assert shares.sum() == pytest.approx(1, abs=1e-5 if filters else 0.3)
    expected = count * shares
    square = ((np.array([drawn[token] for token in common]) - expected) ** 2 / expected).sum()
    freedom = len(common) - 1
    assert abs(square - freedom) <= 5 * np.sqrt(2 * freedom)  # of the chi-square distribution


def test_scores_equal_the_logprobs_of_transformers(engine, model):
    sequences = [p.token_ids for p in prompts(2, 17, 140)]
    for ids, scored in zip(sequences, engine.score(sequences), strict=True):
        np.testing.assert_allclose(scored, response_logprobs(model, ids[:1], ids[1:]), atol=1e-4)


def test_new_weights_replace_all_old_ones_and_reset_the_prefix_cache(engine, model):
    batch = prompts(200)
    sampling = SamplingParams(max_tokens=24, num_samples=3, seed=3)
    engine.generate(batch, sampling, 0)  # fills the prefix cache with a block of the old weights
    other = make_model(tied=model.config.tie_word_embeddings, seed=1)
    engine.load_weights(other.named_parameters())
    for completion in engine.generate(batch, sampling, 1)[0].completions:
        expected = response_logprobs(other, batch[0].token_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert (
            abs(expected - response_logprobs(model, batch[0].token_ids, completion.token_ids)).max()
            > 0.1
        )


def test_incomplete_weights_are_refused(engine, model):
    with pytest.raises(ValueError, match=mentions("model.norm.weight")):
        engine.load_weights(
            (name, tensor)
            for name, tensor in model.named_parameters()
            if name != "model.norm.weight"
        )


def test_the_same_seed_gives_the_same_completions_in_any_batch(engine):
    batch = prompts(4, 9, 30, 60)
    sampling = SamplingParams(max_tokens=20, num_samples=2, seed=11)
    together = engine.generate(batch, sampling, 4)
    alone = engine.generate(batch[2:3], sampling, 4)[0]
    assert [c.token_ids.tolist() for c in alone.completions] == [
        c.token_ids.tolist() for c in together[2].completions
    ]
    assert len({tuple(c.token_ids.tolist()) for group in together for c in group.completions}) == 8
    later = engine.generate(batch[2:3], sampling, 5)[0]
    assert [c.token_ids.tolist() for c in later.completions] != [
        c.token_ids.tolist() for c in alone.completions
    ]


def test_finished_completions_are_reported_while_others_are_generated(engine):
    reports, are_left = [], []

    def report(count: int) -> None:
        reports.append(count)
        are_left.append(engine._llm.llm_engine.has_unfinished_requests())

    sampling = SamplingParams(max_tokens=4, num_samples=2, ignore_eos=True)
    groups = engine.generate(prompts(*[9] * 20), sampling, 0, on_finished=report)
    assert sum(reports) == sum(len(group.completions) for group in groups) == 40
    assert are_left[0] and not are_left[-1]


def test_seeded_prompts_that_do_not_fit_one_step_of_the_engine_are_all_completed(engine):
    batch = prompts(*[230] * 12)
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    together = engine.generate(batch, sampling, 0)
    assert [len(group.completions[0].token_ids) for group in together] == [6] * 12
    for group, prompt in ((together[0], batch[0]), (together[-1], batch[-1])):
        alone = engine.generate([prompt], sampling, 0)[0].completions[0]
        assert group.completions[0].token_ids.tolist() == alone.token_ids.tolist()


def series(engine: VllmEngine) -> dict[str, float]:
    """Return the values that Prometheus reads, by name and labels."""
    assert engine._metrics is not None
    address = f"http://127.0.0.1:{engine._metrics.port}/metrics"
    with urllib.request.urlopen(address, timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def test_prometheus_reads_the_metrics_of_vllm(engine):
    tokens = f'vllm:generation_tokens_total{{engine="0",model_name="{RUN}"}}'
    before = series(engine)[tokens]
    groups = engine.generate(prompts(7, 9), SamplingParams(max_tokens=8, ignore_eos=True), 0)
    after = series(engine)
    assert after[tokens] - before == sum(len(g.completions[0].token_ids) for g in groups) == 16
    dashboard = (ROOT / "docs" / "grafana.json").read_text()
    names = set(re.findall(r"vllm:\w+", dashboard))
    assert len(names) >= 3 and names <= {name.partition("{")[0] for name in after}


def test_text_is_decoded_without_special_tokens(engine):
    tokenizer = make_tokenizer()
    group = engine.generate(
        prompts(6),
        SamplingParams(max_tokens=60, num_samples=8, temperature=2.0, seed=2, ignore_eos=True),
        0,
    )[0]
    assert any({0, 1, 2} & set(c.token_ids.tolist()) for c in group.completions)
    for completion in group.completions:
        ordinary = [i for i in completion.token_ids.tolist() if i > 2]
        assert completion.text == tokenizer.decode(ordinary)


def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine, model):
    prompt = prompts(12)[0]
    greedy = (
        engine.generate(
            [prompt], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True), 0
        )[0]
        .completions[0]
        .token_ids
    )
    stop = int(greedy[5])
    first = greedy.tolist().index(stop)
    sampling = SamplingParams(
        max_tokens=16, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True
    )
    completion = engine.generate([prompt], sampling, 0)[0].completions[0]
    assert completion.token_ids.tolist() == greedy[: first + 1].tolist()
    assert completion.finish_reason == "stop"


def test_a_control_token_can_be_a_stop_text_but_not_a_part_of_one(engine):
    hot = {"max_tokens": 200, "num_samples": 16, "temperature": 2.0, "seed": 1}
    free, stopped = (
        engine.generate(prompts(12), SamplingParams(**hot, stop=stop), 0)[0].completions
        for stop in ((), ("<|endoftext|>",))
    )
    free_ids = [completion.token_ids.tolist() for completion in free]
    assert any(0 in ids for ids in free_ids)
    assert [c.token_ids.tolist() for c in stopped] == [
        ids[: ids.index(0) + 1] if 0 in ids else ids for ids in free_ids
    ]
    with pytest.raises(MsrlError, match=mentions("stop=", "<|endoftext|>", "control token")):
        engine.generate(prompts(12), SamplingParams(max_tokens=1, stop=("<|endoftext|>\n",)), 0)


def test_the_end_of_text_token_of_the_model_ends_a_completion(engine):
    group = engine.generate(
        prompts(12), SamplingParams(max_tokens=100, num_samples=8, temperature=2.0, seed=1), 0
    )[0]
    ended = [c for c in group.completions if c.finish_reason == "stop"]
    assert ended
    assert all(c.token_ids[-1] == 2 and 2 not in c.token_ids[:-1] for c in ended)


def test_a_completion_ends_at_the_models_maximum_length(engine):
    completion = engine.generate(prompts(250), SamplingParams(max_tokens=64, ignore_eos=True), 0)[
        0
    ].completions[0]
    assert len(completion.token_ids) == 6
    assert completion.finish_reason == "length"


def test_prompts_that_are_too_long_or_outside_of_the_vocabulary_are_refused(engine):
    with pytest.raises(MsrlError, match=mentions("prompt 10", "256")):
        engine.generate(prompts(256), SamplingParams(max_tokens=1), 0)
    with pytest.raises(MsrlError, match=f"token id {VOCAB_SIZE}"):
        engine.generate([Prompt(0, np.asarray([VOCAB_SIZE]))], SamplingParams(max_tokens=1), 0)


def test_no_prompts_give_no_groups(engine):
    assert engine.generate([], SamplingParams(max_tokens=1), 0) == ()


def test_a_stream_yields_the_text_of_the_same_completion_and_stops_when_closed(engine):
    prompt = prompts(8)[0]
    sampling = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    pieces = list(engine.stream(prompt, sampling))
    complete = engine.generate([prompt], sampling, 0)[0].completions[0].text
    # a stream waits for complete characters
    assert "".join(p.text for p in pieces) == complete.rstrip("\N{REPLACEMENT CHARACTER}")
    assert [p.finish_reason for p in pieces[-2:]] == [None, "length"]
    stream = engine.stream(prompt, sampling)
    next(stream)
    stream.close()
    assert not engine._llm.llm_engine.has_unfinished_requests()


@pytest.mark.full
@pytest.mark.skipif(
    shutil.disk_usage("/dev/shm").free < 1 << 28,
    reason="vLLM on several devices needs 160 MiB of shared memory",
)
def test_an_engine_on_two_devices_loads_new_weights_through_shared_memory(tmp_path):
    save_model(tmp_path, tied=True)
    other = make_model(tied=True, seed=1)
    engine = VllmEngine(
        EngineSettings(
            tmp_path, dtype="float32", engine=EngineConfig(max_model_len=256, max_num_seqs=16, tp=2)
        ),
        get("cpu"),
    )
    try:
        engine.load_weights(other.named_parameters())
        for group in engine.generate(
            prompts(3, 20), SamplingParams(max_tokens=20, num_samples=2, seed=1), 0
        ):
            for completion in group.completions:
                expected = response_logprobs(other, group.prompt.token_ids, completion.token_ids)
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    finally:
        engine.close()
