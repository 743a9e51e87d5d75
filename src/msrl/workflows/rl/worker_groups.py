"""Worker groups: all training ranks as one trainer, all rollout engines as one engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from msrl.algorithms.packing import Sequences, balanced, per_token
from msrl.cluster.session import PlacedWorkers, Session
from msrl.cluster.waiting import wait_all
from msrl.config.schema import EngineConfig
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.objective.batches import BatchLimits, micro_batches, num_loss_tokens
from msrl.trainer.settings import RankSettings
from msrl.types import Floats, Ints, MicroBatch, Prompt, RolloutGroup, SamplingParams
from msrl.workflows.rl.actors import RolloutActor, SavePlan, TrainActor

if TYPE_CHECKING:
    from msrl.rollout.engine import EngineSettings
    from msrl.trainer.objective.losses import Loss, ValueLoss

_RELEASE_S = 30.0
WORKERS = {"actor": "training rank", "rollout": "rollout engine"}  # role: its name in messages


class TrainerGroup:
    """All training ranks.

    The group packs sequences and distributes them over the data-parallel ranks.
    """

    def __init__(
        self,
        session: Session,
        placed: PlacedWorkers,
        settings: RankSettings,
        num_ranks: int,
        env: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        actor = ray.remote(runtime_env={"env_vars": dict(env)})(TrainActor)
        self._actors = [
            session.start(actor, placed, "actor", rank, settings, rank, num_ranks)
            for rank in range(num_ranks)
        ]
        self._timeout_s, self._watch = timeout_s, session.watch(WORKERS)

    def start(self, resume: SavedTraining | None, saves: SavePlan) -> dict[str, Any]:
        """Load the models on all ranks and return the workflow's state in the checkpoint."""
        (address,) = self._wait([self._actors[0].rendezvous.remote()])
        started = self._wait([actor.start.remote(address, resume, saves) for actor in self._actors])
        self._positions = [position for position, _ in started]
        self._dp_size = 1 + max(position.dp_rank for position in self._positions)
        return started[0][1]

    def update(
        self, sequences: Sequences, limits: BatchLimits, loss: Loss, lr: float
    ) -> dict[str, float]:
        """Update the policy once on these sequences; return the mean metrics."""
        return self._update("update", sequences, limits, loss, lr)

    def update_critic(
        self, sequences: Sequences, limits: BatchLimits, loss: ValueLoss, lr: float
    ) -> dict[str, float]:
        """Update the critic once on these sequences; return the mean metrics."""
        return self._update("update_critic", sequences, limits, loss, lr)

    def _update(
        self,
        method: str,
        sequences: Sequences,
        limits: BatchLimits,
        loss: Loss | ValueLoss,
        lr: float,
    ) -> dict[str, float]:
        num_tokens = num_loss_tokens(sequences)
        shares = balanced(_lengths(sequences), self._dp_size)
        batches = [ray.put(self._pack(sequences, indices, limits)[0]) for indices in shares]
        calls = [
            getattr(actor, method).remote(batches[position.dp_rank], loss, num_tokens, lr)
            for actor, position in zip(self._actors, self._positions, strict=True)
        ]
        return self._wait(calls)[0]

    def logprobs(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        temperature: float,
        *,
        of_reference: bool = False,
    ) -> tuple[Floats, ...]:
        """Return log-probabilities of the tokens of every sequence, [T] each; 0 if masked."""
        return self._per_token("logprobs", sequences, limits, temperature, of_reference)

    def values(self, sequences: Sequences, limits: BatchLimits) -> tuple[Floats, ...]:
        """Return the critic's values before each token of every sequence, [T] each; 0 if masked."""
        return self._per_token("values", sequences, limits)

    def scores(self, name: str, token_ids: Sequence[Ints], batch: int) -> list[float]:
        """Return the score of a reward model at the last token of each sequence.

        A micro-batch holds at most `batch` sequences. A rank returns the value at the position
        before each label, so every sequence gets one more token as the label, which is not read.
        The first sequence is repeated until their number is divisible by the number of
        data-parallel ranks.
        """
        padded = [*token_ids, *[token_ids[0]] * (-len(token_ids) % self._dp_size)]
        with_label = tuple(np.append(ids, ids[-1]) for ids in padded)
        last_token = tuple(np.arange(len(ids)) == len(ids) - 1 for ids in with_label)
        scores = self._per_token(
            "scores", Sequences(with_label, last_token, {}), BatchLimits(batch), name
        )
        return [float(values[-1]) for values in scores[: len(token_ids)]]

    def _per_token(
        self, method: str, sequences: Sequences, limits: BatchLimits, *arguments: Any
    ) -> tuple[Floats, ...]:
        """Call a method of all ranks and return its values of every token, by sequence."""
        shares = balanced(_lengths(sequences), self._dp_size)
        packed = [self._pack(sequences, indices, limits) for indices in shares]
        batches = [ray.put(batches) for batches, _ in packed]
        calls = [
            getattr(actor, method).remote(batches[position.dp_rank], *arguments)
            for actor, position in zip(self._actors, self._positions, strict=True)
        ]
        by_sequence = dict[int, Floats]()
        for position, rows in zip(self._positions, self._wait(calls), strict=True):
            if position.is_reporter:
                own_batches, groups = packed[position.dp_rank]
                for batch, group, values in zip(own_batches, groups, rows, strict=True):
                    # The last values may be of padding, which belongs to no sequence.
                    by_sequence |= dict(
                        zip(group, per_token(values, batch.cu_seqlens), strict=False)
                    )
        return tuple(by_sequence[index] for index in range(len(sequences.token_ids)))

    def _pack(
        self, sequences: Sequences, indices: Sequence[int], limits: BatchLimits
    ) -> tuple[list[MicroBatch], list[list[int]]]:
        """Return the micro-batches of a rank, and the indices of the sequences in each."""
        limits = replace(limits, pad_to_multiple=self._positions[0].sequence_multiple)
        lengths = [len(sequences.token_ids[i]) for i in indices]
        groups = [[indices[i] for i in group] for group in limits.group(lengths)]
        return micro_batches(sequences, groups, limits), groups

    def weights(self) -> list[Any]:
        """Return references to the new weights: a tuple of buckets per rank, mostly empty."""
        return [actor.weights.remote() for actor in self._actors]

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save a checkpoint, or begin to; return the checkpoints completed since the last call."""
        return self._wait([actor.save.remote(step, extra, retention) for actor in self._actors])[0]

    def finish_saves(self) -> list[SavedTraining]:
        """Wait for a pending save; return the checkpoints completed since the last call."""
        return self._wait([actor.finish_saves.remote() for actor in self._actors])[0]

    def _wait(self, refs: Sequence[Any]) -> list[Any]:
        labels = [f"{WORKERS['actor']} {rank}" for rank in range(len(refs))]
        return wait_all(refs, timeout_s=self._timeout_s, labels=labels, watch=self._watch)


class EngineGroup:
    """All rollout engines. The group distributes prompts over them."""

    def __init__(
        self,
        session: Session,
        placed: PlacedWorkers,
        settings: EngineSettings,
        platform: Platform,
        env: Sequence[Mapping[str, str]],
        timeout_s: float,
    ) -> None:
        """Create an engine per environment in `env`."""
        classes = [
            ray.remote(runtime_env={"env_vars": dict(variables)})(RolloutActor) for variables in env
        ]
        self._actors = [
            session.start(actor, placed, "rollout", i, settings, platform.name)
            for i, actor in enumerate(classes)
        ]
        self._timeout_s, self._watch = timeout_s, session.watch(WORKERS)

    def begin_start(self) -> list[Any]:
        """Begin to start all engines, which takes seconds; return references for `finish_start`."""
        return [actor.start.remote() for actor in self._actors]

    def finish_start(self, pending: Sequence[Any]) -> None:
        """Wait until all engines have started."""
        self._wait(pending)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of completions per prompt, in order."""
        shares = {
            engine: indices
            for engine, indices in enumerate(engine_shares(prompts, len(self._actors)))
            if indices
        }
        calls = [
            self._actors[engine].generate.remote(
                tuple(prompts[i] for i in indices), sampling, policy_version
            )
            for engine, indices in shares.items()
        ]
        groups = itertools.chain.from_iterable(self._wait(calls, tuple(shares)))
        by_index = dict(zip(itertools.chain.from_iterable(shares.values()), groups, strict=True))
        return tuple(by_index[i] for i in range(len(prompts)))

    def forget_prompts(self) -> None:
        """Clear the engines' records of past prompts, which would influence later completions."""
        self._wait([actor.forget_prompts.remote() for actor in self._actors])

    def release(self) -> None:
        """End the processes of all engines and remove their files and shared memory.

        An engine that hangs is killed at the end of the session.
        """
        ray.wait(
            [actor.release.remote() for actor in self._actors],
            num_returns=len(self._actors),
            timeout=_RELEASE_S,
        )

    def load_weights(self, weights: Sequence[Any]) -> None:
        """Load new weights into every engine."""
        self._wait([actor.load_weights.remote(*weights) for actor in self._actors])

    def _wait(self, refs: Sequence[Any], engines: Sequence[int] | None = None) -> list[Any]:
        """Return the results of calls to these engines, by default to all."""
        labels = [
            f"{WORKERS['rollout']} {i}" for i in (range(len(refs)) if engines is None else engines)
        ]
        return wait_all(refs, timeout_s=self._timeout_s, labels=labels, watch=self._watch)


def engine_shares(prompts: Sequence[Prompt], num_engines: int) -> list[list[int]]:
    """Return the indices of the prompts of each engine; neighbors share an engine.

    All copies of a prompt go to the engine of the first one: an engine draws new completions for a
    prompt that it has seen before, but does not know the prompts of other engines.
    """
    bounds = np.linspace(0, len(prompts), num_engines + 1).astype(int)
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    engine_by_prompt: dict[int, int] = {}
    for engine, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        for i in range(start, end):
            shares[engine_by_prompt.setdefault(prompts[i].index, engine)].append(i)
    return shares


def engine_environments(
    placed: PlacedWorkers, platform: Platform, engine: EngineConfig, env: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environment variables of each engine. Must be called before any actor is started.

    Ray makes only the device of an actor's first bundle visible; for an engine of several devices,
    the variables make all of them visible.
    """
    variable, common = (
        platform.visible_devices_variable,
        {**platform.engine_environment(engine.dp * engine.tp), **env},
    )
    if engine.tp == 1 or not variable:
        return [common] * engine.dp
    devices = [",".join(placed.device_ids("rollout", i)) for i in range(engine.dp)]
    return [
        {**common, variable: seen, f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"} for seen in devices
    ]


def _lengths(sequences: Sequences) -> list[int]:
    return [len(ids) for ids in sequences.token_ids]
