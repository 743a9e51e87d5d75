"""Program that sends the images of steps as the driver of train-grpo does, and prints its memory.

    python image_steps.py PREFIX STEPS

Every step generates 8 samples for each prompt of the dataset, computes log-probabilities and
updates the policy four times. Engines and ranks are counted bytes.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fake_workers import FakeWorkers
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.data.dataset import PromptDataset
from msrl.trainer.objective.batches import BatchLimits, select
from msrl.trainer.objective.losses import SftLoss
from msrl.trainer.objective.requests import RankValues, TokenRequest, UpdateRequest
from msrl.types import Completion, Prompt, Reward, RolloutGroup, SamplingParams, ScoredGroup
from msrl.workflows.rl.engine_group import EngineGroup
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.train_worker import WorkerPosition
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.base import Calls

SAMPLES, UPDATES, RESPONSE = 8, 4, 64


class CountedWorkers(FakeWorkers):
    """Workers of two data-parallel ranks or engines, to which nothing but counts is sent."""

    keeps_shared = True

    def __init__(self) -> None:
        super().__init__(2)
        self.num_files = 0  # files of images that were sent
        self.num_bytes = 0

    def share(self, value: Any) -> Any:
        self._send(value)
        self.num_files += len(value) if isinstance(value, dict) else 0
        return "a reference"

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        for own in arguments.values():
            self._send(own)
        return Calls({n: self._answer(method, n, own) for n, own in arguments.items()})

    def _send(self, value: object) -> None:
        """Count the bytes of a value as Ray sends it: arrays are not copied into the message."""
        buffers = list[pickle.PickleBuffer]()
        message = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self.num_bytes += len(message) + sum(buffer.raw().nbytes for buffer in buffers)

    def _answer(self, method: str, worker: int, arguments: Sequence[Any]) -> Any:
        if method == "start":
            return WorkerPosition(worker, True, 1), {}
        if method == "generate":
            return [RolloutGroup(prompt, (sample(),) * SAMPLES) for prompt in arguments[0]]
        return {}


class CountedRanks(CountedWorkers):
    """Ranks, whose log-probabilities are 0."""

    def share(self, value: Any) -> Any:
        reference = super().share(value)
        return reference if isinstance(value, dict) else value

    def _send(self, value: object) -> None:
        if not isinstance(value, tuple):  # arguments are shared before
            super()._send(value)

    def _answer(self, method: str, worker: int, arguments: Sequence[Any]) -> Any:
        if method != "forward":
            return super()._answer(method, worker, arguments)
        lengths = [int(batch.cu_seqlens[-1]) for batch in arguments[0]]
        return RankValues({"logprobs": [np.zeros(length, np.float32) for length in lengths]})


def sample() -> Completion:
    """Return a response."""
    tokens = np.full(RESPONSE, 9, np.int64)
    return Completion(tokens, np.zeros(RESPONSE, np.float32), "length", 0, "x" * RESPONSE)


def run_step(prompts: Sequence[Prompt], engines: EngineGroup, ranks: TrainerGroup) -> None:
    """Generate, compute log-probabilities, and update."""
    limits, rewards = BatchLimits(8), (Reward(0.0, {}),) * SAMPLES
    groups = engines.generate(prompts, SamplingParams(RESPONSE, SAMPLES), 0)
    sequences = rollout_arrays([ScoredGroup(group, rewards) for group in groups]).sequences
    ranks.forward(TokenRequest(("logprobs",)), sequences, limits)
    for update in range(UPDATES):
        indices = range(update, len(sequences.token_ids), UPDATES)
        ranks.update(UpdateRequest(SftLoss(), 0.1), select(sequences, indices), limits)


def memory(name: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(prefix: str, num_steps: int) -> None:
    """Run the steps and print what they sent and took."""
    dataset = PromptDataset(prefix)
    saves: Any = None  # nothing is saved
    engine_workers: Any = CountedWorkers()
    rank_workers = CountedRanks()
    engines, ranks = EngineGroup(engine_workers, Restarts(0, print, 0)), TrainerGroup(rank_workers)
    ranks.start(None, saves)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
    before = memory("VmRSS")
    for _ in range(num_steps):
        run_step([dataset[row] for row in range(len(dataset))], engines, ranks)
        engines.load_with(lambda: None)
    counts = {"engines": engine_workers.num_files, "ranks": rank_workers.num_files}
    num_bytes = engine_workers.num_bytes + rank_workers.num_bytes
    print(json.dumps({**counts, "bytes": num_bytes, "grown": memory("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
