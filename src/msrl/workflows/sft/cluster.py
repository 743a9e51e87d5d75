"""The ranks of supervised fine-tuning on the machines of a cluster, in place of
`trainer/launch.py`'s processes of this one.

Every rank is a Ray actor that lives the life of `sft_rank.py`. What rank 0 reports goes to a
mailbox on the machine of the process that the user started, and the wish to stop comes from there.
The machines have the same files under the same paths.
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

_LOOK_S = 0.2  # between two looks into the mailbox


class MessageQueue:
    """What the ranks report, in order, and whether they are to stop. An actor."""

    def __init__(self) -> None:
        self._messages, self._is_stopped = list[Any](), False

    def put(self, message: object) -> None:
        self._messages.append(message)

    def take(self) -> list[Any]:
        """All that has come since."""
        taken, self._messages = self._messages, []
        return taken

    def stop(self) -> None:
        self._is_stopped = True

    def is_stopped(self) -> bool:
        return self._is_stopped


class _Line:
    """A rank's line to the mailbox. What was sent is there when `send` returns, so that nothing is
    lost when the rank ends.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def send(self, message: tuple[str, object]) -> None:
        ray.get(self._mailbox.put.remote(message[1]))

    def poll(self) -> bool:
        return ray.get(self._mailbox.is_stopped.remote())


class RankActor:
    """One rank."""

    def __init__(self, rank: int, world_size: int, mailbox: Any) -> None:
        self._rank, self._world_size, self._mailbox = rank, world_size, mailbox

    def rendezvous(self) -> str:
        """Where the ranks meet; asked of rank 0."""
        self._rendezvous = Rendezvous()
        return self._rendezvous.init_method

    def run(self, init_method: str, folder: str, platform: str, job: SftSetup) -> None:
        """Train until the end. Paths of the job are relative to `folder`."""
        try:
            os.chdir(folder)
        except OSError as error:
            host = ray.util.get_node_ip_address()
            raise MsrlError(
                f"{host}: cannot work in {folder} ({error.strerror}); every machine of the cluster needs the run's folders under the same"
                " paths, of a shared file system"
            ) from None
        get(platform).prepare()
        quiet_megatron()
        from msrl.workflows.sft import rank as sft_rank

        sft_rank.main(
            RankContext(self._rank, self._world_size, init_method, _Line(self._mailbox)), job
        )


class ClusterRanks:
    """A context manager around all ranks, as `LocalRanks` is. Raises MsrlError where the cluster
    does not answer, or lacks devices.
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
        self._mailbox = (
            ray.remote(MessageQueue).options(num_cpus=0, scheduling_strategy=here).remote()
        )
        session.keep([self._mailbox])
        own = self._platform.worker_environment(num_ranks // nodes, spans_machines=nodes > 1)
        actor = ray.remote(
            runtime_env={"env_vars": {**own, **worker_variables(self._config, self._platform)}}
        )(RankActor)
        self._actors = [
            session.start(actor, placed, "actor", rank, rank, num_ranks, self._mailbox)
            for rank in range(num_ranks)
        ]

    def ask_to_stop(self) -> None:
        """Have the run end after the step in hand. Notes it alone, so that a signal's handler may
        call it; `messages` passes it on.
        """
        self.was_asked_to_stop = True

    def messages(self) -> Iterator[Any]:
        """What the ranks report, until all have ended. Raises the first failure, as `wait_all`
        does.
        """
        labels = [f"training rank {rank}" for rank in range(len(self._actors))]
        (address,) = wait_all(
            [self._actors[0].rendezvous.remote()],
            timeout_s=self._config.cluster.rpc_timeout_s,
            labels=labels[:1],
        )
        job = ray.put(self._job)
        is_told = False
        for _ in until_done(
            [
                actor.run.remote(address, str(Path.cwd()), self._platform.name, job)
                for actor in self._actors
            ],
            labels,
            _LOOK_S,
        ):
            yield from ray.get(self._mailbox.take.remote())
            if self.was_asked_to_stop and not is_told:
                is_told = True
                ray.get(self._mailbox.stop.remote())
