"""Weights from training ranks to engines: buckets, assembly, shared memory and digests."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import families
import llama_like
import mixture_families
from families import FAMILIES
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError, VerificationError
from msrl.models.entries import stack_sizes
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.stages import StageTensor, distinct_tensors
from msrl.rollout.engine import expected_weights
from msrl.rollout.weights.assembly import Assembler
from msrl.rollout.weights.buckets import Shard, merge, pack
from msrl.rollout.weights.channel import ChannelError, WeightChannel, hang_up, receive
from msrl.rollout.weights.digest import add_digests, differences, file_digests
from msrl.rollout.weights.sender import WeightSender, restore
from msrl.rollout.weights.verification import check_digests
from support import mentions, wait_until

Weights = list[tuple[StageTensor, Tensor]]
BUCKET_BYTES = 1 << 13  # smaller than the embeddings


def senders(source: WeightSource, layout: ParallelLayout, num_ranks: int) -> list[list[Weights]]:
    """Return the weights that each rank sends, by pipeline stage."""
    per_stage = num_ranks // layout.pp
    return [
        [rank_weights(source, layout, stage, rank) for rank in range(per_stage)]
        for stage in range(layout.pp)
    ]


def rank_weights(source: WeightSource, layout: ParallelLayout, stage: int, rank: int) -> Weights:
    local = dict(source.local_tensors(layout, layout.coords(stage, rank)))
    return [
        (placed, local[placed.name])
        for placed in distinct_tensors(source.shape, layout, stage, rank)
    ]


def send(
    stages: Sequence[Sequence[Weights]], version: int, bucket_bytes: int = BUCKET_BYTES
) -> tuple[list[list[list[Any]]], list[Any]]:
    """Return copies of the buckets of all ranks by stage, and the parts of the digests."""
    digests: list[Any] = []

    def store(weights: Weights) -> list[Any]:
        sender = WeightSender(bucket_bytes, 10)
        stored, digest = sender.store(weights, version, copy_tensor, verify=True)
        sender.close()
        digests.append(digest)
        return stored

    return [[store(weights) for weights in ranks] for ranks in stages], digests


def copy_tensor(stored: Any) -> Any:
    version, chunks, content = stored
    return version, chunks, content.copy()


def assemble(source: WeightSource, stages: Any, version: int) -> dict[str, Tensor]:
    buckets = ([map(restore, sender) for sender in senders] for senders in stages)
    tensors = list(Assembler(source.shape).assemble(merge(buckets), version))
    assert len(dict(tensors)) == len(tensors)
    return dict(tensors)


def digests_of_files(source: WeightSource, tensors: dict[str, Tensor]) -> dict[str, Any]:
    stacks = stack_sizes(source.shape)
    return {
        entry: digest
        for name, tensor in tensors.items()
        for entry, digest in file_digests(name, tensor, stacks.get(name, 0))
    }


LAYOUTS = {
    "qwen3, tp 2, pp 2": (FAMILIES["qwen3"].config, ParallelLayout(2, 2), 1),
    "tied gemma 2, pp 2, dp 2": (FAMILIES["gemma 2"].config, ParallelLayout(1, 2), 2),
    "packed glm, tp 2": (FAMILIES["glm 4"].config, ParallelLayout(2), 1),
    "packed chatglm, tp 2, dp 2": (FAMILIES["chatglm 2"].config, ParallelLayout(2), 2),
    "qwen3 mixture, tp 2, ep 2": (mixture_families.QWEN3_MOE, ParallelLayout(2, ep=2), 1),
    "qwen3 mixture, tp 2, ep 4, etp 1": (
        mixture_families.QWEN3_MOE,
        ParallelLayout(2, ep=4, etp=1),
        1,
    ),
    "deepseek v3, pp 2, ep 2": (mixture_families.DEEPSEEK_V3, ParallelLayout(1, 2, ep=2), 2),
    "a stack of one, tp 2, ep 2": (llama_like.ERNIE_MOE, ParallelLayout(2, ep=2), 1),
    "stacked gpt-oss, tp 2, ep 2": (mixture_families.GPT_OSS, ParallelLayout(2, ep=2), 1),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("config", "layout", "dp"), LAYOUTS.values(), ids=LAYOUTS)
def test_shards_of_all_ranks_assemble_to_the_weights_and_their_digests(
    tmp_path: Path, config: dict[str, Any], layout: ParallelLayout, dp: int
) -> None:
    source = open_weights(families.save_model(tmp_path, config))
    stages, partial_digests = send(senders(source, layout, layout.ranks_per_model * dp), version=3)
    tensors = assemble(source, stages, version=3)
    files = {name: tensor for name, tensor in file_tensors(source) if name in tensors}
    assert tensors.keys() == expected_weights(source.shape) == files.keys()
    for name, tensor in files.items():
        assert torch.equal(tensors[name], tensor), name
    digests = digests_of_files(source, files)
    assert add_digests(partial_digests) == digests
    check_digests(partial_digests, {0: [digests_of_files(source, tensors)]})
    content_sizes = {len(bucket[2]) for ranks in stages for rank in ranks for bucket in rank}
    assert max(content_sizes) <= BUCKET_BYTES


def file_tensors(source: WeightSource) -> Iterator[tuple[str, Tensor]]:
    from msrl.workflows.engine import hf_weights

    return hf_weights(source)


@pytest.fixture
def source(tmp_path: Path) -> WeightSource:
    return open_weights(families.save_model(tmp_path, FAMILIES["qwen2.5"].config))


def test_the_digest_of_a_version_does_not_depend_on_the_layout(source: WeightSource) -> None:
    expected, *others = (
        add_digests(send(senders(source, layout, layout.ranks_per_model), 0)[1])
        for layout in (ParallelLayout(), ParallelLayout(2), ParallelLayout(2, 2))
    )
    assert all(not differences(expected, digests) for digests in others)


@pytest.mark.parametrize("change", ["bit", "rows", "columns", "negated zeros", "dtype"])
def test_a_digest_changes_with_bits_positions_and_dtype(change: str) -> None:
    weight = torch.randn(6, 4)
    weight[2] = 0
    other = weight.clone()
    if change == "bit":
        other.view(torch.int32)[3, 1] ^= 1
    elif change == "rows":
        other = other[[1, 0, 2, 3, 4, 5]]
    elif change == "columns":
        other = other[:, [1, 0, 2, 3]]
    elif change == "negated zeros":
        other[2] *= -1
    else:
        other = other.view(torch.int32)
    expected, actual = (dict(file_digests("w", tensor, 0)) for tensor in (weight, other))
    assert differences(expected, actual) == ["w"]
    assert not differences(expected, dict(file_digests("w", weight.clone(), 0)))


def test_a_missing_tensor_is_named(source: WeightSource) -> None:
    stages = senders(source, ParallelLayout(2), 2)
    missing = "decoder.layers.1.mlp.linear_fc2.weight"
    stages[0][1] = [each for each in stages[0][1] if each[0].rule.mcore != missing]
    buckets, _ = send(stages, 0)
    with pytest.raises(VerificationError, match=mentions(missing, "incomplete")):
        assemble(source, buckets, 0)


def test_a_stale_tensor_is_named(source: WeightSource) -> None:
    (old,), _ = send(senders(source, ParallelLayout(), 1), 4)
    (new,), _ = send(senders(source, ParallelLayout(), 1), 5)
    new[0][3] = old[0][3]
    name = old[0][3][1][0].name
    with pytest.raises(VerificationError, match=mentions(name, "version 4", "version 5")):
        assemble(source, [new], 5)


def test_a_corrupted_tensor_is_named(source: WeightSource) -> None:
    stages, partial_digests = send(senders(source, ParallelLayout(2), 2), 0)
    chunk = stages[0][1][2][1][-1]
    stages[0][1][2][2][chunk.offset] ^= 1
    received = digests_of_files(source, assemble(source, stages, 0))
    names = differences(add_digests(partial_digests), received)
    assert len(names) == 1
    with pytest.raises(VerificationError, match=mentions(names[0], "engine 1", "differs")):
        check_digests(partial_digests, {0: [], 1: [received]})


def test_a_row_that_is_larger_than_a_bucket_is_refused() -> None:
    shards = [Shard("w", 0, 1, torch.zeros(2, 100))]
    buffers = itertools.repeat(torch.empty(256, dtype=torch.uint8))
    with pytest.raises(MsrlError, match=mentions("rollout.weights.bucket_bytes=256", "w", 400)):
        list(pack(shards, 0, buffers))


# Shared memory


def run_in_thread(function: Callable[[], object]) -> Callable[[], None]:
    """Call a function in a thread; return a function that waits for it and raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(20)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


@pytest.fixture
def channel() -> Iterator[WeightChannel]:
    channel = WeightChannel(BUCKET_BYTES, timeout_s=10)
    yield channel
    channel.close()


def shards(seed: int = 0) -> list[Shard]:
    """Return tensors of several dtypes, the first larger than two buckets."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Shard("large", 0, 1, torch.randn(300, 20, generator=generator)),
        Shard("half", 0, 1, torch.randn(50, 30, generator=generator).bfloat16()),
        Shard("bias", 0, 1, torch.randn(7, generator=generator)),
    ]


def read(channel: WeightChannel, version: int, source: WeightSource) -> dict[str, Tensor]:
    buckets = receive(channel.address, version, timeout_s=10)
    return dict(Assembler(source.shape).assemble(buckets, version))


def test_two_receivers_get_the_tensors_of_every_version(
    channel: WeightChannel, source: WeightSource
) -> None:
    for version in (1, 2):
        expected = shards(version)
        wait = run_in_thread(lambda v=version, e=expected: channel.send(e, v, 2))
        results: list[dict[str, Tensor]] = []
        wait_for_reader = run_in_thread(
            lambda v=version, r=results: r.append(read(channel, v, source))
        )
        results.append(read(channel, version, source))
        wait_for_reader()
        wait()
        for tensors in results:
            assert [*tensors] == ["large", "half", "bias"]
            for shard in expected:
                assert torch.equal(tensors[shard.name], shard.tensor)


@pytest.mark.slow
def test_shared_memory_is_in_no_file_system(channel: WeightChannel) -> None:
    assert set(weight_memory()) == {"/memfd:msrl-weights (deleted)"}
    channel.close()
    gc.collect()
    assert weight_memory() == []


def weight_memory() -> list[str]:
    """Return the memory of buckets among the open files of this process."""
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return [name for link in links if "msrl-weights" in (name := str(link.readlink()))]


def test_a_sender_that_fails_ends_the_call_of_its_receiver(
    channel: WeightChannel, source: WeightSource
) -> None:
    def failing() -> Iterator[Shard]:
        yield shards()[0]
        raise ZeroDivisionError

    wait = run_in_thread(lambda: channel.send(failing(), 0, 1))
    with pytest.raises(ChannelError, match=mentions("ended")):
        read(channel, 0, source)
    with pytest.raises(ZeroDivisionError):
        wait()


def test_a_receiver_that_ends_ends_the_call_of_its_sender(channel: WeightChannel) -> None:
    wait = run_in_thread(lambda: channel.send(shards(), 0, 1))
    buckets = receive(channel.address, 0, timeout_s=10)
    next(buckets)
    buckets.close()  # type: ignore[attr-defined]
    with pytest.raises(ChannelError, match=mentions("ended")):
        wait()


def test_a_receiver_that_waited_for_an_earlier_version_is_skipped(
    channel: WeightChannel, source: WeightSource
) -> None:
    stale = run_in_thread(lambda: list(receive(channel.address, 0, timeout_s=10)))
    wait_until_listed(channel)
    wait = run_in_thread(lambda: channel.send(shards(), 1, 1))
    assert [*read(channel, 1, source)] == ["large", "half", "bias"]
    wait()
    with pytest.raises(ChannelError, match=mentions("ended")):
        stale()


def wait_until_listed(channel: WeightChannel) -> None:
    """Wait until a receiver has connected to the socket."""
    sockets = Path("/proc/net/unix")
    wait_until(lambda: sockets.read_text().count(channel.address.name) > 1)


def test_a_sender_that_waits_for_a_lost_receiver_can_be_released_and_sends_again(
    channel: WeightChannel, source: WeightSource
) -> None:
    wait = run_in_thread(lambda: channel.send(shards(), 3, 2))
    survivor = run_in_thread(lambda: read(channel, 3, source))
    hang_up(channel.address, 3, timeout_s=10)
    for end in (wait, survivor):
        with pytest.raises(ChannelError, match=mentions("ended")):
            end()
    with pytest.raises(ChannelError):  # nothing is sent: the connection stays unanswered
        hang_up(channel.address, 3, timeout_s=0.1)
    again = run_in_thread(lambda: channel.send(shards(), 3, 1))
    assert [*read(channel, 3, source)] == ["large", "half", "bias"]
    again()


def test_a_process_of_another_user_is_refused_and_does_not_end_the_transfer(
    channel: WeightChannel, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrl.rollout.weights.channel.os.geteuid", lambda: os.getuid() + 1)
    wait = run_in_thread(lambda: channel.send(shards(), 0, 1))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(10)
        stranger.connect(f"\0{channel.address.name}")
        assert stranger.recv(1) == b"", "the connection was not closed"
    with pytest.raises(ChannelError, match=mentions("another user")):
        read(channel, 0, source)  # it refuses a sender of another user too
    monkeypatch.undo()
    assert [*read(channel, 0, source)] == ["large", "half", "bias"]
    wait()


def test_a_sender_without_receivers_gives_up(channel: WeightChannel) -> None:
    impatient = WeightChannel(BUCKET_BYTES, timeout_s=0.1)
    with pytest.raises(ChannelError, match=mentions("version 7", "0.1 s")):
        impatient.send(shards(), 7, 1)
    impatient.close()
    with pytest.raises(ChannelError, match=mentions("gone")):
        next(receive(impatient.address, 7, timeout_s=1))
