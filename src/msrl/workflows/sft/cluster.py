"""Ranks of supervised fine-tuning as Ray actors on the machines of a cluster.

They replace the local processes of `trainer/launch.py`. Every actor runs `sft/rank.py`. Rank 0
reports to a message queue on the machine of the driver, which also holds the request to stop. All
machines must have the same files under the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from msrl.cluster.placement import Role, plan
from msrl.cluster.rendezvous import Rendezvous
from msrl.cluster.session import Session, ray_session
from msrl.cluster.waiting import until_done, wait_all
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.plan.derived import world_size
from msrl.platforms import get
from msrl.platforms.base import Platform
from msrl.trainer.launch import RankContext, quiet_megatron
from msrl.workflows.sft.setup import SftSetup
from msrl.workflows.training.settings import worker_variables

_POLL_INTERVAL_S = 0.2  # of the message queue


class MessageQueue:
    """Actor that holds the ranks' messages in order, and the request to stop."""

    def __init__(self) -> None:
        self._messages, self._is_stopped = list[Any](), False

    def put(self, message: object) -> None:
        self._messages.append(message)

    def take(self) -> list[Any]:
        """Remove and return all messages."""
        messages, self._messages = self._messages, []
        return messages

    def stop(self) -> None:
        self._is_stopped = True

    def is_stopped(self) -> bool:
        return self._is_stopped


class _QueueConnection:
    """Connection of a rank to the message queue.

    `send` waits until the message has arrived, so that no message is lost when the rank ends.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def send(self, message: tuple[str, object]) -> None:
        ray.get(self._queue.put.remote(message[1]))

    def poll(self) -> bool:
        return ray.get(self._queue.is_stopped.remote())


class RankActor:
    """Actor of one training rank."""

    def __init__(self, rank: int, world_size: int, queue: Any) -> None:
        self._rank, self._world_size, self._queue = rank, world_size, queue

    def rendezvous(self) -> str:
        """Reserve and return the rendezvous address of the ranks. Only rank 0 is called."""
        self._rendezvous = Rendezvous()
        return self._rendezvous.init_method

    def run(self, init_method: str, folder: str, platform: str, job: SftSetup) -> None:
        """Run the training. Paths of the job are relative to `folder`.

        Raises:
            MsrlError: The machine has no such folder.
        """
        try:
            os.chdir(folder)
        except OSError as error:
            host = ray.util.get_node_ip_address()
            raise MsrlError(
                f"{host}: cannot work in {folder} ({error.strerror}). Use a shared file system, so "
                "that every machine of the cluster has"
                " the run's folders under the same paths."
            ) from None
        get(platform).prepare()
        quiet_megatron()
        from msrl.workflows.sft import rank as sft_rank

        context = RankContext(
            self._rank, self._world_size, init_method, _QueueConnection(self._queue)
        )
        sft_rank.main(context, job)


class ClusterRanks:
    """Context manager of all ranks in a cluster, with the interface of `LocalRanks`.

    Raises:
        MsrlError: The cluster does not answer or has too few devices.
    """

    def __init__(self, config: Config, job: SftSetup, platform: Platform) -> None:
        self._config, self._job, self._platform = config, job, platform
        self._stack = ExitStack()
        self.was_asked_to_stop = False

    def __enter__(self) -> ClusterRanks:
        cluster, resource = self._config.cluster, self._platform.ray_resource
        session = self._stack.enter_context(
            ray_session(cluster.address, num_devices=0, resource_name=resource, env=cluster.env)
        )
        try:
            self._start(session)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _start(self, session: Session) -> None:
        nodes, num_ranks, resource = (
            self._config.cluster.nodes,
            world_size(self._config),
            self._platform.ray_resource,
        )
        placed = session.create_placement(
            plan([Role("actor", num_ranks)], num_ranks // nodes, nodes, resource=resource)
        )
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._queue = (
            ray.remote(MessageQueue).options(num_cpus=0, scheduling_strategy=here).remote()
        )
        session.keep([self._queue])
        env = {
            **self._platform.worker_environment(num_ranks // nodes, spans_machines=nodes > 1),
            **worker_variables(self._config, self._platform),
        }
        actor = ray.remote(runtime_env={"env_vars": env})(RankActor)
        self._actors = [
            session.start(actor, placed, "actor", rank, rank, num_ranks, self._queue)
            for rank in range(num_ranks)
        ]

    def ask_to_stop(self) -> None:
        """Request the end of the run after the current step.

        Signal handlers may call this, because it only sets a flag; `messages` forwards the request
        to the ranks.
        """
        self.was_asked_to_stop = True

    def messages(self) -> Iterator[Any]:
        """Yield the ranks' messages until all ranks have ended.

        Raises the first failure, as `wait_all` does.
        """
        labels = [f"training rank {rank}" for rank in range(len(self._actors))]
        timeout_s = self._config.cluster.rpc_timeout_s
        (address,) = wait_all(
            [self._actors[0].rendezvous.remote()], timeout_s=timeout_s, labels=labels[:1]
        )
        job, folder = ray.put(self._job), str(Path.cwd())
        runs = [
            actor.run.remote(address, folder, self._platform.name, job) for actor in self._actors
        ]
        has_forwarded_stop = False
        for _ in until_done(runs, labels, _POLL_INTERVAL_S):
            yield from ray.get(self._queue.take.remote())
            if self.was_asked_to_stop and not has_forwarded_stop:
                has_forwarded_stop = True
                ray.get(self._queue.stop.remote())
