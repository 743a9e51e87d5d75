"""`msrl cluster`: start a head, join it from other machines, show what is there, and end what was started here."""

from __future__ import annotations

import json as json_format
import shlex
from dataclasses import asdict, dataclass

from msrl import platforms
from msrl.cluster import launch, probe, state
from msrl.cluster.launch import EndedNode
from msrl.cluster.session import NodeStatus, ray_session
from msrl.cluster.state import NodeRecord
from msrl.config.schema import Config
from msrl.types import JsonObject


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What runs: the address that was asked, the nodes that the cluster knows, and the nodes recorded on this machine."""

    address: str | None
    resource: str | None
    nodes: tuple[NodeStatus, ...]
    recorded: tuple[NodeRecord, ...]


def up(
    config: Config | None = None,
    *,
    host: str = probe.LOOPBACK,
    port: int = 6344,
    dashboard_host: str = probe.LOOPBACK,
    dashboard_port: int = 8260,
    devices: int | None = None,
    platform: str | None = None,
) -> NodeRecord:
    """Start the head here and print the line that joins another machine. Unset devices: all that the platform counts here."""
    num_devices, resource = _devices(config or Config(), devices, platform)
    record = launch.up(
        host=host, port=port, dashboard_host=dashboard_host, dashboard_port=dashboard_port, devices=num_devices, platform_resource=resource
    )
    print(_said_of_head(record))
    return record


def join(
    config: Config | None = None, *, address: str, host: str | None = None, devices: int | None = None, platform: str | None = None
) -> NodeRecord:
    """Make this machine a node of the cluster at `address` (HOST:PORT) and say so."""
    num_devices, resource = _devices(config or Config(), devices, platform)
    record = launch.join(address, host=host, devices=num_devices, platform_resource=resource)
    print(f"{record.host}: a node of {record.address} now, with {_count(num_devices, 'device')} ({resource}); to leave: msrl cluster down")
    return record


def status(config: Config | None = None, *, json: bool = False) -> ClusterStatus:
    """Print the nodes of the cluster of `cluster.address`, else of the one that was started or joined here."""
    config = config or Config()
    recorded = launch.recorded_nodes()
    own = next((record for record in recorded if record.alive), None)
    address = config.cluster.address or (own.address if own else None)
    resource = own.resource if own else (_devices(config, 1, None)[1] if address else None)
    nodes: tuple[NodeStatus, ...] = ()
    if address and resource:
        with ray_session(address, num_devices=0, resource_name=resource, answer_timeout_s=5.0) as session:
            nodes = session.nodes()
    found = ClusterStatus(address, resource, nodes, recorded)
    print(json_format.dumps(_as_json(found), indent=2) if json else _said_of_status(found))
    return found


def down(config: Config | None = None) -> tuple[EndedNode, ...]:
    """End the nodes that were started on this machine and say which."""
    ended = launch.down()
    for one in ended:
        what = f"ended {_count(one.num_ended, 'process', 'processes')}" if one.num_ended else "was gone already, and is forgotten"
        print(f"{one.record.kind} {one.record.host} of {one.record.address}: {what}")
    if not ended:
        print("no node was started on this machine by `msrl cluster up` or `join`; nothing was ended")
    return ended


def _devices(config: Config, devices: int | None, platform: str | None) -> tuple[int, str]:
    """How many devices to offer, and the resource that stands for them."""
    chosen = platforms.resolve(platform or config.cluster.platform)
    wanted = devices if devices is not None else config.cluster.devices_per_node
    return chosen.device_count() if wanted is None else wanted, chosen.ray_resource


def _said_of_head(record: NodeRecord) -> str:
    lines = [f"cluster up at {record.address} with {_count(record.num_devices, 'device')} ({record.resource})"]
    lines.append(f"use it: --set cluster.address={record.address}")
    if record.dashboard:
        lines.append(f"dashboard: {record.dashboard} (it asks for the token, which stands in {state.token_path()})")
    else:
        lines.append("no dashboard: its parts are not installed (pip install 'ray[default]')")
    return "\n".join(lines + _said_of_joining(record))


def _said_of_joining(record: NodeRecord) -> list[str]:
    if probe.is_own_loopback(record.host):
        return ["it listens on loopback, so no other machine can join; for that: msrl cluster down, then msrl cluster up --host ADDRESS"]
    token = state.token_path()
    folder = shlex.quote(str(token.parent))
    return [
        "on every other machine, once, bring the token:",
        f"  mkdir -p -m 700 {folder} && scp -p {record.host}:{shlex.quote(str(token))} {folder}/",
        "then join:",
        f"  msrl cluster join {record.address}",
        f"Ray listens on all interfaces of this machine when it is not on loopback; only the token keeps others out ({token}, mode 600)",
    ]


def _as_json(found: ClusterStatus) -> JsonObject:
    recorded = [
        {"kind": r.kind, "host": r.host, "address": r.address, "num_devices": r.num_devices, "dashboard": r.dashboard, "alive": r.alive}
        for r in found.recorded
    ]
    return {**asdict(found), "recorded": recorded}


def _said_of_status(found: ClusterStatus) -> str:
    if not found.address:
        gone = len(found.recorded)
        return "no cluster runs here; start one: msrl cluster up" + (f" ({gone} recorded before are gone)" if gone else "")
    lines = [f"cluster at {found.address}, devices are {found.resource}"]
    for node in found.nodes:
        state_word = f"{node.num_devices:g} device(s), {node.num_free:g} free" if node.alive else "gone"
        lines.append(f"  {node.host}: {state_word}")
    return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
