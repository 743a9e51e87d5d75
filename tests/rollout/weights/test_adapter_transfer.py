"""LoRA adapters that ranks send alone: sums in the engine, and digests.

`test_train_grpo.py` compares runs with and without them, with real ranks and engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import families
import mixture_families
from families import FAMILIES
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.weights import WeightSource
from msrl.errors import VerificationError
from msrl.models.entries import stack_sizes
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.stages import StageTensor, distinct_tensors
from msrl.rollout.weights.adapters import AdaptedWeights
from msrl.rollout.weights.assembly import Assembler
from msrl.rollout.weights.buckets import merge
from msrl.rollout.weights.digest import record_digests
from msrl.rollout.weights.sender import WeightSender, restore
from msrl.rollout.weights.verification import check_digests
from msrl.workflows.rl.rollout_actor import RolloutActor
from msrl.workflows.rl.weight_offer import WeightOffer
from support import mentions

BUCKET_BYTES = 1 << 13  # smaller than the embeddings
SCALE = 0.75
Weights = list[tuple[StageTensor, Tensor]]
Factors = list[tuple[StageTensor, str, Tensor]]


class Sent:
    """Weights and adapters of all ranks of a layout."""

    def __init__(self, source: WeightSource, layout: ParallelLayout) -> None:
        self.source = source
        ranks = range(layout.ranks_per_model // layout.pp)
        self.stages = [
            [self.rank_weights(layout, stage, rank) for rank in ranks] for stage in range(layout.pp)
        ]

    def rank_weights(self, layout: ParallelLayout, stage: int, rank: int) -> Weights:
        local = dict(self.source.local_tensors(layout, layout.coords(stage, rank)))
        placed = distinct_tensors(self.source.shape, layout, stage, rank)
        return [(each, local[each.name]) for each in placed]

    def factors(self, weights: Weights, version: int) -> Factors:
        """Return random adapters of every weight that can have one."""
        factors: Factors = []
        for number, (placed, weight) in enumerate(weights):
            if weight.ndim == 2 and "linear" in placed.rule.mcore:
                random = torch.Generator().manual_seed(1000 * version + number)
                a = torch.randn(3, weight.shape[1], generator=random).to(weight.dtype)
                b = torch.randn(weight.shape[0], 3, generator=random).to(weight.dtype)
                factors += [(placed, "A", a), (placed, "B", b)]
        return factors

    def merged(self, version: int) -> dict[str, Tensor]:
        """Return the sums that the ranks compute, under their Hugging Face names."""
        stages = [[self.rank_sums(rank, version) for rank in ranks] for ranks in self.stages]
        stored = [[store(weights, [], version)[0] for weights in ranks] for ranks in stages]
        return dict(Assembler(self.source.shape).assemble(buckets(stored), version))

    def rank_sums(self, weights: Weights, version: int) -> Weights:
        factors = {
            (placed.name, factor): value for placed, factor, value in self.factors(weights, version)
        }
        sums: Weights = []
        for placed, weight in weights:
            if (placed.name, "A") in factors:
                a, b = factors[placed.name, "A"], factors[placed.name, "B"]
                product = b.float() @ a.float()
                sum_ = torch.add(weight.float(), product, alpha=SCALE).to(weight.dtype)
                sums.append((placed, sum_))
            else:
                sums.append((placed, weight))
        return sums

    def send(self, version: int, *, with_base: bool) -> tuple[list[list[list[Any]]], list[Any]]:
        """Return the buckets of all ranks by stage, and the digests of the digests."""
        results = [
            [
                store(weights if with_base else [], self.factors(weights, version), version)
                for weights in ranks
            ]
            for ranks in self.stages
        ]
        stored = [[stored for stored, _ in ranks] for ranks in results]
        return stored, [digests for ranks in results for _, digests in ranks]


def store(weights: Weights, factors: Factors, version: int) -> tuple[list[Any], Any]:
    sender = WeightSender(BUCKET_BYTES, 10)

    def copied(stored: Any) -> Any:
        return (*stored[:2], stored[2].copy())

    stored, digests = sender.store(weights, version, copied, verify=True, factors=factors)
    sender.close()
    return stored, digests


def buckets(stages: Sequence[Sequence[Any]]) -> Any:
    return merge([map(restore, sender) for sender in senders] for senders in stages)


LAYOUTS = {
    "qwen2.5, tp 2, pp 2": (FAMILIES["qwen2.5"].config, ParallelLayout(2, 2)),
    "qwen3 mixture, tp 2, ep 2": (mixture_families.QWEN3_MOE, ParallelLayout(2, ep=2)),
}


@pytest.mark.parametrize(("config", "layout"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.slow
def test_adapters_alone_give_the_bits_of_the_sums_of_the_ranks(
    tmp_path: Path, config: dict[str, Any], layout: ParallelLayout
) -> None:
    sent = Sent(open_weights(families.save_model(tmp_path, config)), layout)
    engine = AdaptedWeights(sent.source.shape)
    assert not engine.has_base
    sizes = list[int]()
    for version, with_base in ((1, True), (2, False), (3, False)):
        stored, digests = sent.send(version, with_base=with_base)
        engine.receive(buckets(stored), version)
        assert engine.has_base
        check_digests(digests, {0: [engine.digests()]})
        expected, tensors = sent.merged(version), dict(engine.merge(version, SCALE))
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name
        sizes.append(sum(len(each[2]) for ranks in stored for rank in ranks for each in rank))
    assert sizes[1] == sizes[2] < sizes[0] / 2


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    source = open_weights(families.save_model(tmp_path, FAMILIES["qwen2.5"].config))
    return Sent(source, ParallelLayout(2))


def test_a_missing_factor_of_a_later_version_is_named(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AdaptedWeights(sent.source.shape)
    engine.receive(buckets(sent.send(1, with_base=True)[0]), 1)
    factors = Sent.factors
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def incomplete(self: Sent, weights: Weights, version: int) -> Factors:
        return [each for each in factors(self, weights, version) if each[0].rule.mcore != name]

    monkeypatch.setattr(Sent, "factors", incomplete)
    with pytest.raises(VerificationError, match=mentions(name, "version 2", "missing")):
        engine.receive(buckets(sent.send(2, with_base=False)[0]), 2)


def test_adapters_without_base_weights_or_of_another_version_are_refused(sent: Sent) -> None:
    engine = AdaptedWeights(sent.source.shape)
    alone, _ = sent.send(2, with_base=False)
    with pytest.raises(VerificationError, match=mentions("base weights", "version 2")):
        engine.receive(buckets(alone), 2)
    with pytest.raises(VerificationError, match=mentions("version 2", "version 3")):
        engine.receive(buckets(alone), 3)


def test_a_corrupted_factor_is_named(sent: Sent) -> None:
    engine = AdaptedWeights(sent.source.shape)
    engine.receive(buckets(sent.send(1, with_base=True)[0]), 1)
    stored, digests = sent.send(2, with_base=False)
    chunk = stored[0][1][0][1][0]
    stored[0][1][0][2][chunk.offset] ^= 1
    engine.receive(buckets(stored), 2)
    with pytest.raises(VerificationError, match=mentions(f"{chunk.name}[{chunk.index}]")):
        check_digests(digests, {0: [engine.digests()]})


class RecordingEngine:
    """Engine that keeps copies of what it loads."""

    def __init__(self, sent: Sent) -> None:
        self.stacks, self.loaded = stack_sizes(sent.source.shape), dict[str, Tensor]()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, verify: bool) -> Any:
        digests: dict[str, Any] = {}
        recorded = record_digests(tensors, self.stacks, digests)
        self.loaded = {name: tensor.clone() for name, tensor in recorded}
        return (digests,) if verify else ()


def make_actor(sent: Sent, engine: RecordingEngine) -> RolloutActor:
    """Return an actor as it is after its start, with another engine than vLLM."""
    unused: Any = None
    actor = RolloutActor(unused, "cpu")
    attributes = {"_shape": sent.source.shape, "_adapted": AdaptedWeights(sent.source.shape)}
    loop = SimpleNamespace(update=lambda _, apply: apply())
    vars(actor).update(attributes, _engine=engine, _loop=loop)
    return actor


def send_to(actor: RolloutActor, sent: Sent, version: int, method: str) -> tuple[Any, list[Any]]:
    """Let an actor receive a version through shared memory.

    Returns:
        The result of its method, and the digests of the ranks.
    """
    (ranks,) = sent.stages
    senders = [WeightSender(BUCKET_BYTES, 20) for _ in ranks]
    has_base = actor.has_base()
    addresses = tuple(sender.address for sender in senders)
    offer = WeightOffer(version, (addresses,), verify=True, timeout_s=20, adapter_scale=SCALE)
    with ThreadPoolExecutor(len(senders)) as threads:
        sending = [
            threads.submit(
                sender.send,
                [] if has_base else weights,
                version,
                1,
                verify=True,
                factors=sent.factors(weights, version),
            )
            for sender, weights in zip(senders, ranks, strict=True)
        ]
        result = getattr(actor, method)(offer)
        digests = [each.result() for each in sending]
    for sender in senders:
        sender.close()
    return result, digests


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["load", "hold", "generate"])
def test_an_actor_loads_sums_through_shared_memory_in_all_ways(sent: Sent, way: str) -> None:
    engine = RecordingEngine(sent)
    actor = make_actor(sent, engine)
    for version in (1, 2):
        if way == "load":
            received, digests = send_to(actor, sent, version, "load_weights")
        elif way == "hold":
            _, digests = send_to(actor, sent, version, "receive_weights")
            received = actor.apply_weights()
        else:
            _, digests = send_to(actor, sent, version, "update_weights")
            received = actor.loaded_digests()[version]
        check_digests(digests, {0: received})
        expected = sent.merged(version)
        assert engine.loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(engine.loaded[name], tensor), name
    assert actor.has_base()


def test_the_digests_of_a_version_do_not_change_when_the_next_one_arrives(sent: Sent) -> None:
    actor = make_actor(sent, RecordingEngine(sent))
    updates: list[Callable[[], None]] = []
    vars(actor)["_loop"] = SimpleNamespace(update=lambda _, apply: updates.append(apply))
    digests = {version: send_to(actor, sent, version, "update_weights")[1] for version in (1, 2, 3)}
    for apply in updates:  # the loop still loads a version while the next one is received
        apply()
    loaded = actor.loaded_digests()
    assert list(loaded) == [1, 2, 3]
    for version, received in loaded.items():
        check_digests(digests[version], {0: received})


def test_a_version_that_is_sent_again_has_the_digests_of_the_last_time(sent: Sent) -> None:
    """It is sent again, with other content, if another engine was lost in the first transfer."""
    actor = make_actor(sent, RecordingEngine(sent))
    updates: list[Callable[[], None]] = []
    vars(actor)["_loop"] = SimpleNamespace(update=lambda _, apply: updates.append(apply))
    send_to(actor, sent, 1, "update_weights")  # base weights and adapters
    _, digests = send_to(actor, sent, 1, "update_weights")  # adapters alone
    updates[0]()
    assert not actor.loaded_digests()
    updates[1]()
    check_digests(digests, {0: actor.loaded_digests()[1]})
