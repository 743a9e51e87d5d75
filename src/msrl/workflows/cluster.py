"""`msrl cluster`: start a head, join it from other machines, show nodes, and end local ones."""

from __future__ import annotations

import json as json_format
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from msrl import platforms
from msrl.cluster import launch, probe, state
from msrl.cluster.launch import EndedNode
from msrl.cluster.ports import Ports
from msrl.cluster.session import NodeStatus, ray_session
from msrl.cluster.state import NodeRecord
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.types import JsonObject

_NOTE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """Status of a cluster.

    It consists of the address, the nodes that the cluster knows, and the nodes recorded on this
    machine.
    """

    address: str | None
    resource: str | None
    nodes: tuple[NodeStatus, ...]
    recorded: tuple[NodeRecord, ...]


def check(config: Config, action: str, **arguments: Any) -> None:
    """Make the checks of `up` and `join` without starting anything.

    Raises:
        MsrlError: The command would be refused.
    """
    if action == "up":
        num_devices, _ = _devices(config, None, None)
        for name in ("new_token", "wait"):
            arguments.pop(name, None)
        launch.check_up(devices=num_devices, ports=_ports(config), **arguments)
    elif action == "join":
        num_devices, _ = _devices(config, None, None)
        tls = state.tls_files(config.cluster.tls)
        launch.check_join(devices=num_devices, tls=tls, ports=_ports(config), **arguments)


def up(
    config: Config | None = None,
    *,
    host: str = probe.LOOPBACK,
    port: int = 6344,
    dashboard_host: str = probe.LOOPBACK,
    dashboard_port: int = 8260,
    new_token: bool = False,
    wait: int | None = None,
    devices: int | None = None,
    platform: str | None = None,
) -> NodeRecord:
    """Start the head on this machine and print the command that joins another machine.

    `devices` None means all devices that the platform finds here. `new_token` replaces the token.
    `wait` is the number of machines, this one included, to wait for.

    Raises:
        MsrlError: A check failed, or the machines have not joined within
            `cluster.wait_for_nodes_s` seconds. The cluster runs in the latter case.
    """
    config = config or Config()
    num_devices, resource = _devices(config, devices, platform)
    record = launch.up(
        host=host,
        port=port,
        dashboard_host=dashboard_host,
        dashboard_port=dashboard_port,
        devices=num_devices,
        platform_resource=resource,
        new_token=new_token,
        tls=state.tls_files(config.cluster.tls),
        ports=_ports(config),
    )
    print(_head_text(record), flush=True)
    if wait is not None:
        _wait_for_machines(record, wait, config.cluster.wait_for_nodes_s)
    return record


def _wait_for_machines(record: NodeRecord, count: int, timeout_s: float) -> None:
    """Wait until the cluster has `count` nodes."""
    deadline = time.monotonic() + timeout_s
    with ray_session(
        record.address, num_devices=0, resource_name=record.resource, tls=record.tls
    ) as session:
        while (joined := sum(node.alive for node in session.nodes())) < count:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise MsrlError(
                    f"--wait {count}: {_count(joined, 'machine')} joined within {timeout_s:g} s "
                    "(cluster.wait_for_nodes_s). The cluster is up; join the others, or end it "
                    "with msrl cluster down."
                )
            print_note(
                f"{joined} of {count} machines have joined, waiting for {remaining_s:.0f} s more"
            )
            time.sleep(min(_NOTE_EVERY_S, remaining_s))
    print(f"All {count} machines have joined")


def join(
    config: Config | None = None,
    *,
    address: str,
    host: str | None = None,
    devices: int | None = None,
    platform: str | None = None,
) -> NodeRecord:
    """Make this machine a node of the cluster at `address` (HOST:PORT) and print the result.

    The head may start at the same time: wait for it, at most `cluster.wait_for_nodes_s` seconds.
    """
    config = config or Config()
    num_devices, resource = _devices(config, devices, platform)
    record = launch.join(
        address,
        host=host,
        devices=num_devices,
        platform_resource=resource,
        tls=state.tls_files(config.cluster.tls),
        ports=_ports(config),
        answer_timeout_s=config.cluster.wait_for_nodes_s,
        note=partial(_print_no_head, address),
    )
    print(
        f"{record.host} joined the cluster at {record.address} with "
        f"{_count(num_devices, 'device')} ({resource}). Leave it with: msrl cluster down"
    )
    return record


def _print_no_head(address: str, remaining_s: float) -> None:
    print_note(
        f"Waiting for the head at {address}, for {remaining_s:.0f} s more "
        "(cluster.wait_for_nodes_s): it does not answer"
    )


def status(config: Config | None = None, *, json: bool = False) -> ClusterStatus:
    """Print the nodes of the cluster at `cluster.address`, else of the local node's cluster."""
    config = config or Config()
    records = launch.recorded_nodes()
    local = next((record for record in records if record.alive), None)
    address = config.cluster.address or (local.address if local else None)
    resource = local.resource if local else None
    if resource is None and address:
        resource = _devices(config, 1, None)[1]
    nodes: tuple[NodeStatus, ...] = ()
    if address and resource:
        tls = state.tls_files(config.cluster.tls) or (local.tls if local else None)
        with ray_session(
            address, num_devices=0, resource_name=resource, tls=tls, answer_timeout_s=5.0
        ) as session:
            nodes = session.nodes()
    cluster_status = ClusterStatus(address, resource, nodes, records)
    if json:
        print(json_format.dumps(_as_json(cluster_status), indent=2))
    else:
        print(_status_text(cluster_status))
    return cluster_status


def down(config: Config | None = None, *, force: bool = False) -> tuple[EndedNode, ...]:
    """End the nodes that were started on this machine and print them.

    If a run uses their devices, ask first on a terminal; `force` ends them without a question.

    Raises:
        MsrlError: A run uses their devices, and this is no terminal, or the answer is no.
    """
    if not force:
        _confirm(_devices_in_use())
    ended = launch.down()
    for node in ended:
        result = "was no longer running; deleted its record"
        if node.num_ended:
            result = f"ended {_count(node.num_ended, 'process', 'processes')}"
        print(f"{node.record.kind} {node.record.host} of {node.record.address}: {result}")
    if not ended:
        print("Nothing to end: no node was started on this machine by `msrl cluster up` or `join`.")
    return ended


def _devices_in_use() -> list[str]:
    """Return a description of each local node whose devices a run uses.

    The end of a head ends all nodes of its cluster. A cluster that does not answer has no runs.
    """
    in_use: list[str] = []
    for record in launch.recorded_nodes():
        if not record.alive:
            continue
        try:
            with ray_session(
                record.address,
                num_devices=0,
                resource_name=record.resource,
                tls=record.tls,
                answer_timeout_s=2.0,
            ) as session:
                nodes = session.nodes()
        except MsrlError:
            continue
        for node in nodes:
            num_used = node.num_devices - node.num_free
            if node.alive and num_used > 0 and record.kind in ("head", _kind(node, record)):
                in_use.append(f"{node.host}: {num_used:g} of {node.num_devices:g} devices")
    return in_use


def _kind(node: NodeStatus, record: NodeRecord) -> str:
    """Return the kind of the record if the node is its own, else an empty text."""
    return record.kind if node.host == record.host else ""


def _confirm(in_use: list[str]) -> None:
    """Ask on a terminal if nodes whose devices are in use are to be ended."""
    if not in_use:
        return
    problem = f"a run uses {', '.join(in_use)} and would end without a checkpoint"
    remedy = "Stop the run first (Ctrl-C saves a checkpoint), or pass --force."
    if not sys.stdin.isatty():
        raise MsrlError(f"cluster down: {problem}. {remedy}")
    print_note(f"cluster down: {problem}.")
    if input("End it anyway? [y/N] ").strip().lower() not in ("y", "yes"):
        raise MsrlError(f"cluster down: nothing was ended. {remedy}")


def _devices(config: Config, devices: int | None, platform: str | None) -> tuple[int, str]:
    """Return the number of devices to offer and the Ray resource that represents them."""
    selected = platforms.resolve(platform or config.cluster.platform)
    num_devices = devices if devices is not None else config.cluster.devices_per_node
    return selected.device_count() if num_devices is None else num_devices, selected.ray_resource


def _ports(config: Config) -> Ports | None:
    """Return the range of `cluster.ports`."""
    return None if config.cluster.ports is None else Ports.parse(config.cluster.ports)


def _head_text(record: NodeRecord) -> str:
    lines = [
        f"Cluster up at {record.address} with {_count(record.num_devices, 'device')} "
        f"({record.resource})"
    ]
    lines.append(f"Use it with: --set cluster.address={record.address}")
    if record.dashboard:
        lines.append(f"Dashboard: {record.dashboard} (requires the token in {state.token_path()})")
    else:
        lines.append("No dashboard: it is not installed (pip install 'ray[default]')")
    return "\n".join(lines + _joining_lines(record))


def _joining_lines(record: NodeRecord) -> list[str]:
    if probe.is_own_loopback(record.host):
        return [
            "Other machines cannot join, since it listens on loopback. To change that: msrl "
            "cluster down, then msrl cluster up --host ADDRESS"
        ]
    token = state.token_path()
    folder = shlex.quote(str(token.parent))
    return [
        "On every other machine, copy the token once:",
        f"  mkdir -p -m 700 {folder} && scp -p {record.host}:{shlex.quote(str(token))} {folder}/",
        "Then join:",
        f"  msrl cluster join {record.address}",
        *_protection(record),
    ]


def _protection(record: NodeRecord) -> list[str]:
    """Return what protects a cluster that listens on all interfaces."""
    token = state.token_path()
    if record.tls is not None:
        return [
            "Every machine needs cluster.tls with its own certificate. Ray now listens on all "
            f"interfaces of this machine, encrypted, and requires the token ({token}, mode 600)."
        ]
    return [
        "Ray now listens on all interfaces of this machine. Only the token protects it "
        f"({token}, mode 600), and it is sent unencrypted: use a trusted network or cluster.tls "
        "(docs/security.md)."
    ]


def _as_json(status: ClusterStatus) -> JsonObject:
    fields = ("kind", "host", "address", "num_devices", "dashboard", "alive")
    recorded: list[JsonObject] = []
    for record in status.recorded:
        recorded.append({field: getattr(record, field) for field in fields})
    return {**asdict(status), "recorded": recorded}


def _status_text(status: ClusterStatus) -> str:
    if not status.address:
        ended = len(status.recorded)
        note = f" ({ended} recorded node(s) no longer run)" if ended else ""
        return f"No cluster is running here{note}. Start one with: msrl cluster up"
    lines = [f"Cluster at {status.address}, devices are {status.resource}"]
    for node in status.nodes:
        devices = (
            f"{node.num_devices:g} device(s), {node.num_free:g} free" if node.alive else "dead"
        )
        lines.append(f"  {node.host}: {devices}")
    return "\n".join(lines)


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
