"""Start and stop of Ray nodes on this machine, each under a recorded supervisor.

The supervisor is `ray start --block`. It ends its Ray processes on SIGTERM, and the kernel ends
them when the supervisor is killed. `ray stop` is never used, since it ends every Ray process on the
machine, including other users'.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msrl import temporary
from msrl.cluster import probe, state
from msrl.cluster.ports import Ports
from msrl.cluster.probe import Address
from msrl.cluster.startup import retry_timeouts
from msrl.cluster.state import NodeRecord, ProcessRecord, TlsFiles
from msrl.errors import MsrlError
from msrl.free_ports import free_port
from msrl.processes import trees
from msrl.processes.child import python_command

START_TIMEOUT_S = 90.0
_STARTED = "Ray runtime started"
_DRAIN_S = 5  # seconds that Ray waits for workers to finish before it ends them
_END_TIMEOUT_S = _DRAIN_S + 10.0
# References to the supervisors, so that ended ones are reaped without a warning.
_SUPERVISORS: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class EndedNode:
    """Result of `down` for one recorded node."""

    record: NodeRecord
    num_ended: int  # ended processes; 0 if the node was no longer running


@dataclass(frozen=True, slots=True)
class _Start:
    """Description of a node to start."""

    kind: str
    address: Address
    host: str
    num_devices: int
    resource: str
    dashboard: Address | None
    token: Path | str
    ports: Ports | None
    tls: TlsFiles | None


def up(
    *,
    host: str = probe.LOOPBACK,
    port: int = 6344,
    dashboard_host: str = probe.LOOPBACK,
    dashboard_port: int = 8260,
    devices: int,
    platform_resource: str,
    new_token: bool = False,
    ports: Ports | None = None,
    tls: TlsFiles | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> NodeRecord:
    """Start and record the head of a cluster on this machine, listening on `host`.

    It requires a token; `new_token` replaces the token of earlier clusters. With `tls`, all
    connections of Ray are encrypted and need a certificate of the same authority. The dashboard is
    started too if `ray[default]` is installed. `ports` are for Ray's other processes; by default
    free ones.

    Raises:
        MsrlError: A head started by `up` is running already, a port is in use, an address does not
            belong to this machine, or Ray does not start within `timeout_s` seconds.
    """
    with state.lock_state():
        address, dashboard = check_up(
            host=host,
            port=port,
            dashboard_host=dashboard_host,
            dashboard_port=dashboard_port,
            devices=devices,
            ports=ports,
        )
        start = _Start(
            "head",
            address,
            address.host,
            devices,
            platform_resource,
            dashboard,
            state.make_token(is_new=new_token),
            ports,
            tls,
        )
        return retry_timeouts(lambda: _start_node(start, timeout_s))


def check_up(
    *,
    host: str,
    port: int,
    dashboard_host: str,
    dashboard_port: int,
    devices: int,
    ports: Ports | None = None,
) -> tuple[Address, Address | None]:
    """Check that a head can start, and return its address and its dashboard's address, if any.

    Raises:
        MsrlError: As for `up`.
    """
    address = Address(probe.resolve(host), port)
    dashboard = (
        Address(probe.resolve(dashboard_host), dashboard_port) if dashboard_is_installed() else None
    )
    _check_not_up()
    _check_head_can_listen(address, dashboard)
    _check_services(address.host, ports)
    _check_devices(devices)
    return address, dashboard


def join(
    address: str,
    *,
    host: str | None = None,
    devices: int,
    platform_resource: str,
    ports: Ports | None = None,
    tls: TlsFiles | None = None,
    answer_timeout_s: float = 20.0,
    note: Callable[[float], None] | None = None,
) -> NodeRecord:
    """Start and record a node on this machine that joins the head at `address` (HOST:PORT).

    It uses this user's token. `host` is this machine's address as the head sees it; by default the
    source address of the route to the head. `ports` are for Ray's processes; by default free
    ones. `note` is called every few seconds of the wait for the head, with the remaining time.

    Raises:
        MsrlError: The head does not answer within `answer_timeout_s` seconds, refuses the token or
            listens on loopback, or a node recorded here is running at `host` already.
    """
    head, own = check_join(  # other commands may run while this one waits for the head
        address,
        host=host,
        devices=devices,
        ports=ports,
        tls=tls,
        answer_timeout_s=answer_timeout_s,
        note=note,
    )
    with state.lock_state():
        _check_not_joined(own)
        token = state.find_token()
        start = _Start("worker", head, own, devices, platform_resource, None, token, ports, tls)
        return retry_timeouts(lambda: _start_node(start, START_TIMEOUT_S))


def check_join(
    address: str,
    *,
    host: str | None,
    devices: int,
    ports: Ports | None = None,
    tls: TlsFiles | None = None,
    answer_timeout_s: float = 20.0,
    note: Callable[[float], None] | None = None,
) -> tuple[Address, str]:
    """Check that this machine can join, and return the address of the head and its own host.

    Raises:
        MsrlError: As for `join`.
    """
    head = probe.parse_address(address)
    if probe.is_own_loopback(head.host):
        raise MsrlError(
            f"{address}: a cluster on loopback cannot have other nodes. Start it with `msrl "
            "cluster up --host ADDRESS`,"
            " with an ADDRESS that this machine can reach."
        )
    _check_devices(devices)
    token = state.read_token(state.find_token())
    probe.check_answers(head, token, timeout_s=answer_timeout_s, tls=tls, note=note)
    own = probe.resolve(host) if host else probe.local_host_towards(head)
    _check_not_joined(own)
    _check_services(own, ports)
    return head, own


def down() -> tuple[EndedNode, ...]:
    """End the nodes that `up` and `join` recorded on this machine and delete their records.

    Workers end before the head. No other processes are touched.
    """
    with state.lock_state():
        records = [
            (path, record)
            for path, record in state.load_records()
            if record.machine == socket.gethostname()
        ]
        records.sort(key=lambda item: item[1].kind == "head")
        return tuple(_end_node(path, record) for path, record in records)


def recorded_nodes() -> tuple[NodeRecord, ...]:
    """Return the nodes that were recorded on this machine, including ended ones."""
    return tuple(
        record for _, record in state.load_records() if record.machine == socket.gethostname()
    )


def head_record() -> NodeRecord | None:
    """Return the running head that `up` started on this machine, or None."""
    return next(
        (record for record in recorded_nodes() if record.kind == "head" and record.alive), None
    )


def dashboard_is_installed() -> bool:
    """Return True if Ray's dashboard can be started.

    Its dependencies come with `ray[default]`, not with `ray`.
    """
    try:
        import ray.dashboard.optional_deps  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        return False
    return True


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise MsrlError(f"--devices {devices}: a node must offer at least 1 device.")


def _check_services(host: str, ports: Ports | None) -> None:
    for port in ports.services if ports is not None else ():
        probe.check_port_free(host, port, flag="cluster.ports")


def _check_not_up() -> None:
    running = head_record()
    if running:
        raise MsrlError(
            f"{running.address}: a cluster of {running.num_devices} device(s) is already "
            "running here. End it with `msrl cluster down`."
        )


def _check_not_joined(host: str) -> None:
    for record in recorded_nodes():
        if record.alive and record.host == host:
            raise MsrlError(
                f"{host}: this machine is already a node of the cluster at {record.address}. "
                "Leave it with `msrl cluster down`."
            )


def _check_head_can_listen(address: Address, dashboard: Address | None) -> None:
    if probe.is_wildcard(address.host):
        raise MsrlError(
            f"--host {address.host}: this is not the address of one interface. Pass the "
            "address at which other machines reach this one (`hostname -I` lists them)."
        )
    if dashboard and dashboard.port == address.port:
        raise MsrlError(
            f"--port {address.port}: --dashboard-port is the same. Choose two different ports."
        )
    probe.check_port_free(address.host, address.port, flag="--port")
    if not probe.is_own_loopback(address.host):  # Ray then listens on all interfaces
        probe.check_port_free("0.0.0.0", address.port, flag="--port")
    if dashboard:
        probe.check_port_free(dashboard.host, dashboard.port, flag="--dashboard-port")


def _start_node(start: _Start, timeout_s: float) -> NodeRecord:
    """Start a supervisor, record it immediately, and record its processes once Ray has started."""
    temp_dir = state.make_temp_dir()
    log = temp_dir / "start.log"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            _command(start, temp_dir),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(start) | temporary.environment(state.workers_dir(temp_dir)),
            # A node outlives this command and its terminal.
            start_new_session=True,
        )
    _SUPERVISORS.append(supervisor)
    record, path = _first_record(start, temp_dir, supervisor.pid)
    try:
        state.save_record(path, record)
        _wait_until_started(supervisor, log, timeout_s)
        record = state.with_processes(record, trees.family(record.processes))
        state.save_record(path, record)
    except BaseException:
        _end_node(path, record)
        raise
    return record


def _first_record(start: _Start, temp_dir: Path, pid: int) -> tuple[NodeRecord, Path]:
    supervisor = ProcessRecord(pid, temporary.start_ticks(pid) or 0, "ray start")
    record = NodeRecord(
        kind="head" if start.kind == "head" else "worker",
        address=str(start.address),
        host=start.host,
        resource=start.resource,
        num_devices=start.num_devices,
        dashboard=f"http://{start.dashboard}" if start.dashboard else None,
        temp_dir=str(temp_dir),
        machine=socket.gethostname(),
        boot_id=state.boot_id(),
        processes=(supervisor,),
        tls=start.tls,
    )
    return record, state.state_dir() / f"node-{record.machine}-{record.kind}-{pid}.json"


def _command(start: _Start, temp_dir: Path) -> list[str]:
    """Return the `ray start` command of a node.

    Ports that are fixed by default in Ray are replaced by free ones, so that two nodes can run on
    one machine.
    """
    command = [
        *python_command("-m", "ray.scripts.scripts"),
        "start",
        # The command stays: it supervises the node's processes, and they end with it.
        "--block",
        "--log-color=false",
        "--disable-usage-stats",
    ]
    command += [
        f"--node-ip-address={start.host}",
        f"--temp-dir={state.ray_dir(temp_dir)}",
        *resource_arguments(start.resource, start.num_devices),
    ]
    command += _port_arguments(start)
    if start.kind != "head":
        return [*command, f"--address={start.address}"]
    # The monitor is Ray's autoscaler, which has nothing to scale.
    command += ["--head", "--no-monitor", f"--port={start.address.port}"]
    if start.dashboard is None:
        return [*command, "--include-dashboard=false"]
    return [
        *command,
        "--include-dashboard=true",
        f"--dashboard-host={start.dashboard.host}",
        f"--dashboard-port={start.dashboard.port}",
    ]


def _port_arguments(start: _Start) -> list[str]:
    """Return the arguments of `ray start` for the ports besides the head's port."""
    is_head = start.kind == "head"
    if start.ports is not None:
        return start.ports.ray_arguments(is_head=is_head)
    arguments = [f"--dashboard-agent-listen-port={free_port()}"]
    if is_head:
        arguments.append(f"--ray-client-server-port={free_port()}")
    return arguments


def resource_arguments(resource: str, num_devices: int) -> list[str]:
    """Return the arguments of `ray start` for the devices.

    Ray predefines the resource `GPU`, which has its own option.
    """
    if resource == "GPU":
        return [f"--num-gpus={num_devices}"]
    return [f"--resources={json.dumps({resource: num_devices})}"]


def _environment(start: _Start) -> dict[str, str]:
    overridden = {
        "RAY_ADDRESS",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    }
    environment = {name: value for name, value in os.environ.items() if name not in overridden}
    environment |= {
        **state.startup_wait_environment(),
        **state.priority_environment(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(_DRAIN_S),
    }
    if start.kind == "head" and probe.is_own_loopback(start.host):
        # Otherwise Ray replaces loopback by the machine's external address and listens on all
        # interfaces.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return environment | state.token_environment(start.token) | state.tls_environment(start.tls)


def _wait_until_started(supervisor: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _STARTED not in (text := log.read_text(errors="replace")):
        if supervisor.poll() is not None:
            raise MsrlError(
                f"ray start: ended with exit status {supervisor.returncode}. Its last lines "
                f"of output:\n{_tail(text)}"
            )
        if time.monotonic() > deadline:
            raise MsrlError(
                f"ray start: Ray did not start within {timeout_s:g} s. Its last lines of "
                f"output:\n{_tail(text)}"
            )
        time.sleep(0.1)


def _tail(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-15:]) or "  (none)"


def _reap() -> None:
    for supervisor in _SUPERVISORS:
        supervisor.poll()


def _end_node(path: Path, record: NodeRecord) -> EndedNode:
    """End a node's processes and delete its record and temporary folder.

    The supervisor gets SIGTERM; processes that remain afterwards are killed.
    """
    family = trees.family(record.processes) if record.here else ()
    if family:
        supervised = family[0] == record.processes[0]
        trees.send(family[:1] if supervised else family, signal.SIGTERM)
        remaining = trees.wait_for_end(family, _END_TIMEOUT_S, _reap)
        trees.send(remaining, signal.SIGKILL)
        remaining = trees.wait_for_end(remaining, 5.0, _reap)
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise MsrlError(
                f"{path}: processes {pids} still run after SIGKILL. Their record is kept; "
                "run `msrl cluster down` again later."
            )
    shutil.rmtree(record.temp_dir, ignore_errors=True)
    path.unlink(missing_ok=True)
    return EndedNode(record, len(family))
