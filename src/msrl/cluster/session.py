"""Connection of a run to Ray: a cluster or a local Ray, placement groups, and actors.

A local Ray listens on loopback, requires a new token, and ends with the run. A cluster keeps
running when the run disconnects.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from msrl import temporary
from msrl.cluster import probe, ray_loss, state
from msrl.cluster.heartbeats import ActorHeartbeats
from msrl.cluster.placement import Assignment, NodePlan, Placement
from msrl.cluster.ray_process import (
    adopted_orphans,
    preserved_signal_handlers,
    ray_processes,
    ray_settings,
    separate_sessions,
    shut_down_ray,
    start_ray,
)
from msrl.cluster.waiting import Watch, WorkerTimeoutError
from msrl.errors import MsrlError, VerificationError
from msrl.limits import print_note
from msrl.processes import trees
from msrl.temporary import ProcessRecord

_PROBE_SHARE = 0.0001  # of a device; fits besides the shares of the actors
_LOG = logging.getLogger("msrl.cluster")
_NOTE_EVERY_S = 5.0
_END_S = 30.0  # for Ray to end the process of a killed actor


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of a cluster as Ray reports it: its devices, and those that are not reserved."""

    host: str
    alive: bool
    num_devices: float
    num_free: float


@dataclass(frozen=True, slots=True)
class PlacedWorkers:
    """A placement that Ray has reserved: one placement group per node of the plan."""

    placement: Placement
    groups: tuple[PlacementGroup, ...]

    def options(self, role: str, worker: int, share: float | None = None) -> dict[str, Any]:
        """Return the options of a worker's actor: no CPUs, its share of a device, its bundle.

        `share` replaces that share, for a small task on the device of a worker that has ended.
        """
        assignment = self.placement.worker(role, worker)
        share = assignment.share if share is None else share
        return self._options(assignment, assignment.bundle_indices[0], share)

    def device_ids(self, role: str, worker: int) -> tuple[str, ...]:
        """Return the device ids of every bundle of a worker.

        They come from the platform's visible-devices variable on the node. Empty for a resource
        that is only a number to Ray, such as the resource of the CPU platform. Call this before the
        actors are started.
        """
        assignment = self.placement.worker(role, worker)
        tasks = [
            _device_ids.options(**self._options(assignment, bundle, _PROBE_SHARE)).remote(
                self.placement.resource
            )
            for bundle in assignment.bundle_indices
        ]
        return tuple(number for numbers in ray.get(tasks) for number in numbers)

    def _options(self, assignment: Assignment, bundle: int, share: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.groups[assignment.node], bundle, True)
        return {
            # A bundle has devices only: an actor that requests a CPU would not fit.
            "num_cpus": 0,
            **_resource_options(self.placement.resource, share),
            "scheduling_strategy": strategy,
        }


@dataclass(slots=True)
class Session:
    """An open connection to Ray. Everything that is started through it ends with it."""

    resource: str
    local: bool
    _actors: list[Any] = field(default_factory=list[Any])
    _workers: dict[tuple[str, int], Any] = field(default_factory=dict[tuple[str, int], Any])
    _groups: list[PlacementGroup] = field(default_factory=list[PlacementGroup])

    def create_placement(self, placement: Placement, *, timeout_s: float = 60.0) -> PlacedWorkers:
        """Reserve the devices of a plan.

        Raises:
            MsrlError: The cluster lacks the devices, or they stay reserved by other runs for
                `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        # Nodes may still join a cluster, but not a local Ray.
        self._wait_for_capacity(placement, time.monotonic() if self.local else deadline)
        groups = tuple(
            # STRICT_PACK: all bundles of a planned node are on one machine.
            placement_group([{placement.resource: 1.0}] * node.num_bundles, strategy="STRICT_PACK")
            for node in placement.bundles
        )
        self._groups.extend(groups)
        self._wait_for(groups, placement, deadline, timeout_s)
        return PlacedWorkers(placement, groups)

    def wait_for_devices(
        self, placed: PlacedWorkers, role: str, workers: Iterable[int], *, timeout_s: float
    ) -> None:
        """Wait until the devices of workers that have ended can be used again.

        Ray reserves the devices of a lost node on another one as soon as a node has them.

        Raises:
            MsrlError: They cannot be used within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        answers = [
            _answer.options(**placed.options(role, worker, _PROBE_SHARE)).remote()
            for worker in workers
        ]
        while answers:
            ray_loss.check()
            remaining_s = deadline - time.monotonic()
            _, answers = ray.wait(
                answers,
                num_returns=len(answers),
                timeout=max(0.0, min(_NOTE_EVERY_S, remaining_s)),
            )
            if answers:
                self._note_shortage(placed.placement, remaining_s, timeout_s)

    def _wait_for_capacity(self, placement: Placement, deadline: float) -> None:
        """Wait until the cluster has nodes with enough devices, whether or not they are free."""
        while not _fits(placement.bundles, self._devices_per_node()):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise MsrlError(
                    f"cluster: {self._shortage(placement)}. Add nodes (msrl cluster join), "
                    "reduce the parallelism, or raise cluster.wait_for_nodes_s."
                )
            self._print_waiting(placement, remaining_s)
            time.sleep(min(_NOTE_EVERY_S, remaining_s))

    def _wait_for(
        self,
        groups: Sequence[PlacementGroup],
        placement: Placement,
        deadline: float,
        timeout_s: float,
    ) -> None:
        """Wait until the groups are reserved, and print what is missing every few seconds."""
        for group in groups:
            # Ray truncates the timeout to integral seconds.
            while not group.wait(
                math.ceil(max(1.0, min(_NOTE_EVERY_S, deadline - time.monotonic())))
            ):
                self._note_shortage(placement, deadline - time.monotonic(), timeout_s)

    def _note_shortage(self, placement: Placement, remaining_s: float, timeout_s: float) -> None:
        """Print what is missing. Raise MsrlError if no time remains."""
        if remaining_s <= 0:
            raise MsrlError(
                f"cluster.wait_for_nodes_s={timeout_s:g}: {self._shortage(placement)} after that "
                "time. Raise it, add nodes (msrl cluster join), or end the run that holds the "
                "devices."
            )
        self._print_waiting(placement, remaining_s)

    def _print_waiting(self, placement: Placement, remaining_s: float) -> None:
        print_note(
            f"Waiting for devices, for {remaining_s:.0f} s more: {self._shortage(placement)}"
        )

    def start(
        self,
        actor_class: Any,
        placed: PlacedWorkers,
        role: str,
        worker: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Start worker `worker` of `role` as an actor (a `ray.remote(...)` class) on its devices.

        The session ends the actor. Raise an MsrlError of an actor in a method and not in
        `__init__`: of the latter's exception, Ray passes on only the text.
        """
        actor = actor_class.options(**placed.options(role, worker)).remote(*args, **kwargs)
        self._actors.append(actor)
        self._workers[role, worker] = actor
        return actor

    def end(self, role: str, workers: Iterable[int]) -> None:
        """End some workers of a role, also ones that hang, and wait until they have ended."""
        keys = [(role, worker) for worker in workers]
        actors = [self._workers.pop(key) for key in keys if key in self._workers]
        for actor in actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
            self._actors.remove(actor)
        pings = [actor.__ray_ready__.remote() for actor in actors]
        ray.wait(pings, num_returns=len(pings), timeout=_END_S)

    def watch(self, names: Mapping[str, str], heartbeats: ActorHeartbeats | None = None) -> Watch:
        """Return a watch for the death of workers, including those that are started later.

        `names` maps each role to watch to its name in messages. `heartbeats` come from workers.
        """
        return Watch(self._workers, names, heartbeats)

    def nodes(self) -> tuple[NodeStatus, ...]:
        """Return every node that the cluster knows, including dead ones."""
        from ray._private.state import available_resources_per_node

        free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
        return tuple(
            NodeStatus(
                host=node["NodeManagerAddress"],
                alive=node["Alive"],
                num_devices=node["Resources"].get(self.resource, 0.0),
                num_free=free.get(node["NodeID"], {}).get(self.resource, 0.0),
            )
            for node in ray.nodes()
        )

    def close(self) -> None:
        """End the actors that were started through the session and release their devices."""
        for actor in self._actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        for group in self._groups:
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(group)
        self._actors.clear()
        self._workers.clear()
        self._groups.clear()

    def _devices_per_node(self) -> list[float]:
        return sorted((node.num_devices for node in self.nodes() if node.alive), reverse=True)

    def _shortage(self, placement: Placement) -> str:
        needs = ", ".join(str(node.num_bundles) for node in placement.bundles)
        has = ", ".join(
            f"{n.host}: {n.num_devices:g} ({n.num_free:g} free)" for n in self.nodes() if n.alive
        )
        return (
            f"the run needs nodes with {needs} of {placement.resource}, but the cluster has "
            f"{has or 'no node'}"
        )


def _fits(needed: Sequence[NodePlan], devices: Sequence[float]) -> bool:
    """Return True if nodes with these numbers of devices can hold the planned nodes.

    One node may hold several planned nodes.
    """
    free = list(devices)
    for node in sorted(needed, key=lambda n: -n.num_bundles):
        index = next((i for i, number in enumerate(free) if number >= node.num_bundles), None)
        if index is None:
            return False
        free[index] -= node.num_bundles
    return True


def _resource_options(resource: str, amount: float) -> dict[str, Any]:
    """Return a share of a device as options of an actor; Ray predefines the resource `GPU`."""
    return {"num_gpus": amount} if resource == "GPU" else {"resources": {resource: amount}}


@ray.remote
def _device_ids(resource: str) -> list[str]:
    return [
        str(number) for number in ray.get_runtime_context().get_accelerator_ids().get(resource, [])
    ]


@ray.remote
def _answer() -> None:
    """Show that the node of this task responds."""


@contextlib.contextmanager
def ray_session(
    address: str | None,
    *,
    num_devices: int,
    resource_name: str,
    env: Mapping[str, str] | None = None,
    tls: state.TlsFiles | None = None,
    answer_timeout_s: float = 20.0,
    logs: Path | None = None,
) -> Iterator[Session]:
    """Connect to the cluster at `address`, or start a local Ray if it is None.

    `num_devices` is the number of the local Ray. `env` are environment variables of every worker.
    If the body fails for a reason that its message may not explain, the logs of a local Ray are
    copied to the folder `logs`.

    Raises:
        MsrlError: The cluster does not answer or refuses the token, or this machine is not one of
            its nodes.
    """
    if ray.is_initialized():
        raise RuntimeError("this process already has a Ray session")
    init = {
        "namespace": "msrl",
        "runtime_env": {"env_vars": dict(env)} if env else None,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
    }
    opened = (
        _local(num_devices, resource_name, init, logs)
        if address is None
        else _connection(address, init, answer_timeout_s, tls)
    )
    before = temporary.segments()
    with opened as (folder, find_loss):
        clean = partial(_remove_traces, folder)
        with ray_loss.ended_if_stuck(find_loss, clean):
            session, is_lost = Session(resource_name, local=address is None), False
            try:
                with ray_loss.watch(find_loss):
                    yield session
            except ray_loss.RayLostError:
                is_lost = True  # calls would wait for it
                raise
            finally:
                if folder is not None:
                    _list_segments(folder, before)
                if not is_lost:
                    session.close()


def _list_segments(folder: Path, before: Set[tuple[str, int]]) -> None:
    """List shared memory of workers: an engine killed during its startup has not listed its own."""
    pids = [process.pid for process in trees.descendants(os.getpid())]
    temporary.list_segments(folder, pids, before)


def _remove_traces(folder: Path | None) -> None:
    """Kill all processes that this one has started, and remove the folder of a local Ray."""
    _kill_workers([])
    if folder is not None:
        temporary.remove(folder.parent)


@contextlib.contextmanager
def _local(
    num_devices: int, resource: str, init: Mapping[str, Any], logs: Path | None
) -> Iterator[tuple[Path, ray_loss.Finder]]:
    """Run a local Ray and remove it with its folder at the end.

    If the body fails for a reason that its message may not explain, the logs are copied to `logs`.

    Yields the folder inside it for the temporary files of Ray's processes, and the finder of its
    loss.
    """
    temp_dir = state.make_owned_temp_dir()
    token = temp_dir / "token"
    state.write_private(token, secrets.token_hex(32))
    devices = (
        {"num_gpus": num_devices} if resource == "GPU" else {"resources": {resource: num_devices}}
    )
    before = trees.descendants(os.getpid())
    try:
        with ray_settings(token, loopback=True):
            with (
                preserved_signal_handlers(),
                separate_sessions(),
                temporary.redirect(state.workers_dir(temp_dir)),
            ):
                start_ray(
                    address="local",
                    include_dashboard=False,
                    _node_ip_address=probe.LOOPBACK,
                    _temp_dir=str(state.ray_dir(temp_dir)),
                    **devices,
                    **init,
                )
            try:
                with adopted_orphans():
                    yield state.workers_dir(temp_dir), ray_loss.find_in_local_ray
            except ray_loss.RayLostError:
                _kill_workers(before)
                raise
            finally:
                _shut_down()
    except BaseException as error:
        if logs is not None and _logs_may_help(error):
            _keep_logs(temp_dir, logs)
        raise
    finally:
        temporary.remove(temp_dir)


def _kill_workers(before: Sequence[ProcessRecord]) -> None:
    """Kill the processes of a lost Ray, which can no longer end them, and those they started."""
    started = [each for each in trees.descendants(os.getpid()) if each not in before]
    trees.send(started, signal.SIGKILL)
    trees.wait_for_end(started, _END_S, lambda: None)


def _shut_down() -> None:
    """End the local Ray, and kill its processes that do not end by themselves."""
    daemons = ray_processes()
    shut_down_ray()
    remaining = trees.wait_for_end(daemons, _END_S, lambda: None)
    trees.send(remaining, signal.SIGKILL)


def _logs_may_help(error: BaseException) -> bool:
    """Return True if the error's message alone may not explain the failure."""
    if isinstance(error, ray_loss.RayLostError):
        return error.is_crash
    return isinstance(error, WorkerTimeoutError) or not isinstance(
        error, (MsrlError, VerificationError, KeyboardInterrupt, GeneratorExit)
    )


def _keep_logs(temp_dir: Path, logs: Path) -> None:
    """Copy the logs, which only this user may read, because Ray also logs environments."""
    try:
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(mode=0o700)
        source = state.ray_dir(temp_dir) / "session_latest" / "logs"
        shutil.copytree(source, logs, dirs_exist_ok=True, copy_function=shutil.copyfile)
        logs.chmod(0o700)  # copytree sets the permissions of the source
    except (OSError, shutil.Error) as error:
        _LOG.warning("Cannot keep the logs of Ray and of the workers in %s: %s", logs, error)
    else:
        _LOG.error("Kept the logs of Ray and of the workers in %s", logs)


@contextlib.contextmanager
def _connection(
    address: str, init: Mapping[str, Any], answer_timeout_s: float, tls: state.TlsFiles | None
) -> Iterator[tuple[Path | None, ray_loss.Finder]]:
    """Connect to a running cluster, and disconnect at the end."""
    head = probe.parse_address(address)
    token = state.find_token()
    probe.check_answers(head, state.read_token(token), timeout_s=answer_timeout_s, tls=tls)
    with ray_settings(token, loopback=probe.is_own_loopback(head.host), tls=tls):
        try:
            with preserved_signal_handlers():
                ray.init(address=str(head), **init)
        except (ConnectionError, RuntimeError) as error:
            raise MsrlError(
                f"{address}: this machine cannot connect to the cluster ({error}). Run the "
                "command on one of its nodes,"
                f" or add this machine with `msrl cluster join {address}`."
            ) from error
        try:
            yield None, ray_loss.ClusterWatch(head, ray.util.get_node_ip_address())
        except ray_loss.RayLostError:
            raise  # disconnecting takes long, and happens at the end of this process
        except BaseException:
            ray.shutdown()
            raise
        ray.shutdown()
