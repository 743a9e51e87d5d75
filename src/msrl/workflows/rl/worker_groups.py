"""The driver's side of the actors: all training ranks as one trainer, all engines as one engine."""

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
from msrl.types import Floats, Ints, Prompt, RolloutGroup, SamplingParams
from msrl.workflows.rl.actors import RolloutActor, SavePlan, TrainActor

if TYPE_CHECKING:
    from msrl.rollout.engine import EngineSettings
    from msrl.trainer.objective.losses import Loss, ValueLoss

_RELEASE_S = 30.0
WORKERS = {"actor": "training rank", "rollout": "rollout engine"}  # roles, in words


class TrainerGroup:
    """All ranks. Sequences are given whole; they are spread over the data-parallel ranks and packed
    here.
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
        """Load everywhere. Returns the workflow's own state of the checkpoint."""
        (address,) = self._wait([self._actors[0].rendezvous.remote()])
        started = self._wait([actor.start.remote(address, resume, saves) for actor in self._actors])
        self._places = [place for place, _ in started]
        self._dp_size = 1 + max(place.dp_rank for place in self._places)
        return started[0][1]

    def update(
        self, sequences: Sequences, limits: BatchLimits, loss: Loss, lr: float
    ) -> dict[str, float]:
        """One optimizer update of the policy on these sequences. Returns the report's means."""
        return self._update("update", sequences, limits, loss, lr)

    def update_critic(
        self, sequences: Sequences, limits: BatchLimits, loss: ValueLoss, lr: float
    ) -> dict[str, float]:
        """One optimizer update of the critic on these sequences. Returns the report's means."""
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
        batches = [
            ray.put(self._pack(sequences, part, limits)[0])
            for part in balanced(_lengths(sequences), self._dp_size)
        ]
        calls = [
            getattr(actor, method).remote(batches[place.dp_rank], loss, num_tokens, lr)
            for actor, place in zip(self._actors, self._places, strict=True)
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
        """Log-probability of every token of every sequence, [T] each, 0 where nothing is learnt."""
        return self._per_token("logprobs", sequences, limits, temperature, of_reference)

    def values(self, sequences: Sequences, limits: BatchLimits) -> tuple[Floats, ...]:
        """The critic's value of what precedes every token of every sequence, [T] each, 0 where
        nothing is learnt.
        """
        return self._per_token("values", sequences, limits)

    def scores(self, name: str, token_ids: Sequence[Ints], batch: int) -> list[float]:
        """What a reward model gives at the last token of each sequence; at most `batch` of them
        share a pass of a rank.

        A value stands at the position before a label, so each sequence gets one token more, to be
        that label; nothing reads it. Sequences are filled up with the first to as many as divide
        over the data-parallel ranks.
        """
        filled = [*token_ids, *[token_ids[0]] * (-len(token_ids) % self._dp_size)]
        longer = tuple(np.append(ids, ids[-1]) for ids in filled)
        ends = tuple(np.arange(len(ids)) == len(ids) - 1 for ids in longer)
        found = self._per_token("scores", Sequences(longer, ends, {}), BatchLimits(batch), name)
        return [float(values[-1]) for values in found[: len(token_ids)]]

    def _per_token(
        self, method: str, sequences: Sequences, limits: BatchLimits, *arguments: Any
    ) -> tuple[Floats, ...]:
        """What a method of the ranks says of every token, by sequence."""
        parts = balanced(_lengths(sequences), self._dp_size)
        packed = [self._pack(sequences, part, limits) for part in parts]
        batches = [ray.put(batches) for batches, _ in packed]
        calls = [
            getattr(actor, method).remote(batches[place.dp_rank], *arguments)
            for actor, place in zip(self._actors, self._places, strict=True)
        ]
        found, result = self._wait(calls), dict[int, Floats]()
        for place, rows in zip(self._places, found, strict=True):
            if place.is_reporter:
                own_batches, groups = packed[place.dp_rank]
                for batch, group, values in zip(own_batches, groups, rows, strict=True):
                    result |= dict(zip(group, per_token(values, batch.cu_seqlens), strict=False))
        return tuple(result[index] for index in range(len(sequences.token_ids)))

    def _pack(
        self, sequences: Sequences, part: Sequence[int], limits: BatchLimits
    ) -> tuple[list, list[list[int]]]:
        """A rank's micro-batches, and the numbers of the sequences in each."""
        limits = replace(limits, pad_to_multiple=self._places[0].sequence_multiple)
        groups = [
            [part[i] for i in group]
            for group in limits.group([len(sequences.token_ids[i]) for i in part])
        ]
        return micro_batches(sequences, groups, limits), groups

    def weights(self) -> list[Any]:
        """References to the new weights, a tuple of parcels per rank; most are empty."""
        return [actor.weights.remote() for actor in self._actors]

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save, or begin to. Returns the checkpoints that became whole since this was asked last."""
        return self._wait([actor.save.remote(step, extra, retention) for actor in self._actors])[0]

    def finish_saves(self) -> list[SavedTraining]:
        """The checkpoints that became whole since the last save, once none is under way."""
        return self._wait([actor.finish_saves.remote() for actor in self._actors])[0]

    def _wait(self, refs: Sequence[Any]) -> list[Any]:
        labels = [f"{WORKERS['actor']} {rank}" for rank in range(len(refs))]
        return wait_all(refs, timeout_s=self._timeout_s, labels=labels, watch=self._watch)


class EngineGroup:
    """All engines; each takes its share of the prompts."""

    def __init__(
        self, session: Session, placed: PlacedWorkers, settings: EngineSettings, platform: Platform, env: Sequence[Mapping[str, str]],
        timeout_s: float,
    ) -> None:  # fmt: skip
        """`env` has the environment of each engine, of which there are as many."""
        classes = [
            ray.remote(runtime_env={"env_vars": dict(variables)})(RolloutActor) for variables in env
        ]
        self._actors = [
            session.start(actor, placed, "rollout", i, settings, platform.name)
            for i, actor in enumerate(classes)
        ]
        self._timeout_s, self._watch = timeout_s, session.watch(WORKERS)

    def begin_start(self) -> list[Any]:
        """Have all engines start, which takes them seconds."""
        return [actor.start.remote() for actor in self._actors]

    def finish_start(self, begun: Sequence[Any]) -> None:
        """Wait until they are there."""
        self._wait(begun)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """A group of completions per prompt, in order."""
        places = {
            engine: mine for engine, mine in enumerate(shares(prompts, len(self._actors))) if mine
        }
        calls = [
            self._actors[engine].generate.remote(
                tuple(prompts[place] for place in mine), sampling, policy_version
            )
            for engine, mine in places.items()
        ]
        found = dict(
            zip(
                itertools.chain(*places.values()),
                itertools.chain(*self._wait(calls, tuple(places))),
                strict=True,
            )
        )
        return tuple(found[place] for place in range(len(prompts)))

    def forget_prompts(self) -> None:
        """Drop what the engines keep of the prompts that they have seen, so that it does not enter
        into what they say next.
        """
        self._wait([actor.forget_prompts.remote() for actor in self._actors])

    def release(self) -> None:
        """End what all engines have started, and remove their files and shared memory. An engine
        that hangs is left to the session.
        """
        ray.wait(
            [actor.release.remote() for actor in self._actors],
            num_returns=len(self._actors),
            timeout=_RELEASE_S,
        )

    def load_weights(self, weights: Sequence[Any]) -> None:
        """Hand new weights to every engine."""
        self._wait([actor.load_weights.remote(*weights) for actor in self._actors])

    def _wait(self, refs: Sequence[Any], engines: Sequence[int] | None = None) -> list[Any]:
        """What these engines say, all where they are not told."""
        labels = [
            f"{WORKERS['rollout']} {i}" for i in (range(len(refs)) if engines is None else engines)
        ]
        return wait_all(refs, timeout_s=self._timeout_s, labels=labels, watch=self._watch)


def shares(prompts: Sequence[Prompt], num_engines: int) -> list[list[int]]:
    """The places of the prompts that each engine takes, neighbours together. What is asked twice
    goes where it was asked first: an engine draws other answers to a prompt that it has seen, and
    knows of no other engine's.
    """
    bounds = np.linspace(0, len(prompts), num_engines + 1).astype(int)
    found: list[list[int]] = [[] for _ in range(num_engines)]
    homes: dict[int, int] = {}
    for engine, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        for place in range(start, end):
            found[homes.setdefault(prompts[place].index, engine)].append(place)
    return found


def engine_environments(
    placed: PlacedWorkers, platform: Platform, engine: EngineConfig, env: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each engine. Ask before any actor is started.

    Ray lets an actor see the device of its first bundle; an engine of several devices is shown all
    of them.
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
