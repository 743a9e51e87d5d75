"""Transfer of weights in the shape of Qwen2.5 0.5B from a training rank to an engine's memory.

A second process holds tensors in Megatron's shapes and sends them through shared memory, as a
training rank does. This process assembles the Hugging Face tensors in memory that an earlier
version has filled, as an engine does that receives weights while it generates. Both use one thread.

The last line of the output is JSON with the figures. With the argument `memcpy`, this process
copies the same bytes to memory that was used before. With `engine`, a vLLM engine loads the
assembled tensors.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import HALF_BILLION

ROUNDS = 5
BUCKET_BYTES = 1 << 26
_POLL_S = 0.002
_PAUSE_S = 0.05  # after each bucket while memory is measured: a measurement takes up to 20 ms


def main() -> None:
    import torch

    torch.set_num_threads(1)
    mode = sys.argv[1] if len(sys.argv) > 1 else "transfer"
    figures = {"transfer": transfer, "memcpy": memcpy, "engine": engine_loading}[mode]()
    print(json.dumps(figures))


def transfer() -> dict[str, float]:
    """Return the rate of the transfer in GB/s, and the peak memory besides both sides' tensors."""
    from msrl.rollout.weights import assembly, channel  # noqa: F401 - their memory does not count

    _shape()
    with _Sender() as sender:
        peak = _PeakMemory(sender.pid)
        memory = sender.receive(0, {}, pause_s=_PAUSE_S)
        extra = peak.stop()
        num_bytes = sum(tensor.nbytes for tensor in memory.values())
        seconds: list[float] = []
        for version in range(1, ROUNDS + 1):
            start = time.perf_counter()
            memory = sender.receive(version, memory)
            seconds.append(time.perf_counter() - start)
    return {
        "GB/s": num_bytes / statistics.median(seconds) / 1e9,
        "extra memory in buckets": (extra - num_bytes) / BUCKET_BYTES,
    }


def memcpy() -> dict[str, float]:
    """Return the rate of copying the same bytes in GB/s."""
    import torch

    source = [tensor for _, tensor in _rank_weights()]
    target = [tensor.clone() for tensor in source]
    num_bytes = sum(tensor.nbytes for tensor in source)

    def copy() -> None:
        for to, tensor in zip(target, source, strict=True):
            to.copy_(tensor)

    assert torch.get_num_threads() == 1
    return {"GB/s": num_bytes / _median_seconds(copy) / 1e9}


def engine_loading() -> dict[str, float]:
    """Return the seconds in which a vLLM engine loads tensors that it has received."""
    from msrl.config.sections.rollout import EngineConfig
    from msrl.platforms import get
    from msrl.rollout.engine import EngineSettings
    from msrl.rollout.vllm import VllmEngine

    with _Sender() as sender, tempfile.TemporaryDirectory() as folder:
        tensors = sender.receive(0, {})
        _write_model(Path(folder))
        engine = VllmEngine(
            EngineSettings(
                Path(folder),
                engine=EngineConfig(max_model_len=256, max_num_seqs=4),
                random_weights=True,
            ),
            get("cpu"),
        )
        seconds = _median_seconds(lambda: engine.load_weights(tensors.items()))
        digest_s = _median_seconds(lambda: _digest(tensors), rounds=1)
        engine.close()
    return {"engine loading s": seconds, "digest s": digest_s}


def _median_seconds(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _digest(tensors: Mapping[str, Any]) -> None:
    from msrl.rollout.weights.digest import file_digests

    for name, tensor in tensors.items():
        list(file_digests(name, tensor, 0))


def _write_model(folder: Path) -> None:
    """Write the config and a tokenizer, which the engine requires."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    (folder / "config.json").write_text(json.dumps(HALF_BILLION))
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(folder)


def _shape() -> Any:
    from msrl.models.families import shape_from_config
    from msrl.models.hf_config import HfConfig

    return shape_from_config(HfConfig(HALF_BILLION, "benchmark"))


class _Sender:
    """Process of a training rank, which sends a version for each number that it receives."""

    def __enter__(self) -> _Sender:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_send, args=(other,), daemon=True)
        self._process.start()
        self._address = self._connection.recv()
        self.pid = self._process.pid or 0
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.send(None)
        self._process.join(10)

    def receive(
        self, version: int, memory: Mapping[str, Any], pause_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the tensors of a version, in the memory of an earlier one.

        Waits for `pause_s` seconds after each bucket.
        """
        from msrl.rollout.weights.assembly import Assembler
        from msrl.rollout.weights.channel import receive

        self._connection.send(version)
        buckets = _with_pauses(receive(self._address, version, 60), pause_s)
        tensors = dict(Assembler(_shape(), memory).assemble(buckets, version))
        assert self._connection.recv() == version
        return tensors


def _with_pauses(buckets: Iterable[Any], pause_s: float) -> Iterator[Any]:
    for bucket in buckets:
        yield bucket
        time.sleep(pause_s)


def _send(connection: Connection) -> None:
    import torch

    from msrl.rollout.weights.sender import WeightSender

    torch.set_num_threads(1)
    weights = _rank_weights()
    sender = WeightSender(BUCKET_BYTES, 60)
    connection.send(sender.address)
    while (version := connection.recv()) is not None:
        sender.send(weights, version, 1, verify=False)
        connection.send(version)


def _rank_weights() -> list[tuple[Any, Any]]:
    """Return tensors of one rank with random bits, in Megatron's shapes."""
    import torch

    from msrl.checkpoint.tensor_layouts import shard_shape
    from msrl.models.parallel_layout import ParallelLayout
    from msrl.models.stages import distinct_tensors

    torch.manual_seed(0)
    weights: list[tuple[Any, Any]] = []
    for placed in distinct_tensors(_shape(), ParallelLayout(), 0, 0):
        size = shard_shape(placed.layout, placed.rule.shapes, 1)
        bits = torch.randint(0, 1 << 14, size, dtype=torch.int16)
        weights.append((placed, bits.view(torch.bfloat16)))
    return weights


class _PeakMemory:
    """Growth of the memory of this process and another one, each shared page counted once."""

    def __init__(self, pid: int) -> None:
        self._pid = str(pid)
        self._start = self._peak = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Return the largest growth in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak - self._start

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        """Return the bytes of both processes.

        A process has half of a page that both map. If one of them maps or unmaps pages between two
        readings, one reading of the other process is too large.
        """
        before, own = _proportional_bytes(self._pid), _proportional_bytes("self")
        return own + min(before, _proportional_bytes(self._pid))


def _proportional_bytes(pid: str) -> int:
    """Return anonymous and shared memory of /proc/PID/smaps_rollup (proc(5)) in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


if __name__ == "__main__":
    main()
