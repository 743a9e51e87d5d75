"""Nodes, tokens, placement and failures of workers with a real Ray."""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster_folders import cluster_folders
from msrl.cluster import launch, state
from msrl.cluster.placement import Role, plan
from msrl.errors import MsrlError
from msrl.free_ports import free_port
from support import HANG_S, assert_each_mentions, assert_mentions, mentions, wait_until
from training_runs import children, wait_for_end

pytestmark = pytest.mark.slow
RESOURCE = "msrl_device"


@pytest.fixture(scope="module", autouse=True)
def separate_state(tmp_path_factory):
    """Use separate folders for this file."""
    with cluster_folders(tmp_path_factory.mktemp("state")):
        yield


@pytest.fixture(scope="module")
def head():
    """Start a head on loopback as `msrl cluster up` does."""
    record = launch.up(
        port=free_port(),
        dashboard_port=free_port(),
        devices=2,
        platform_resource=RESOURCE,
    )
    yield record
    launch.down()


def listening_hosts(pids):
    """Return the addresses on which these processes listen."""
    return {
        c.laddr.ip
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.pid in pids
    }


def test_a_head_on_loopback_listens_on_loopback_only(head):
    hosts = listening_hosts({process.pid for process in head.processes})
    assert hosts
    assert {host.removeprefix("::ffff:") for host in hosts} == {"127.0.0.1"}


def test_other_users_cannot_access_a_node_or_its_token(head):
    assert stat.S_IMODE(Path(head.temp_dir).stat().st_mode) == 0o700
    assert list(Path(head.temp_dir).glob("ray/session_latest/sockets/raylet"))
    assert stat.S_IMODE(state.token_path().stat().st_mode) == 0o600


def test_status_prints_nodes_and_free_devices_as_text_and_json(head, capsys):
    from msrl.workflows import cluster

    cluster.status()
    assert_each_mentions(
        capsys.readouterr().out.splitlines(),
        (head.address, RESOURCE),
        ("127.0.0.1", "2 device", "2 free"),
    )
    cluster.status(json=True)
    status = json.loads(capsys.readouterr().out)
    assert status["nodes"] == [
        {"host": "127.0.0.1", "alive": True, "num_devices": 2.0, "num_free": 2.0}
    ]
    assert [(r["kind"], r["alive"]) for r in status["recorded"]] == [("head", True)]


def test_a_second_head_is_refused_while_the_first_is_running(head):
    with pytest.raises(MsrlError, match=mentions("2 device", head.address)):
        launch.up(port=free_port(), devices=2, platform_resource=RESOURCE)


def test_a_cluster_in_use_is_not_ended_without_a_question(head, monkeypatch, capfd):
    from msrl.cluster import session as sessions

    monkeypatch.setattr(sessions, "_NOTE_EVERY_S", 1.0)
    command = [sys.executable, "-m", "msrl", "cluster", "down"]
    with sessions.ray_session(head.address, num_devices=0, resource_name=RESOURCE) as session:
        session.create_placement(plan([Role("actor", 1)], 1, resource=RESOURCE))
        wait_until(lambda: session.nodes()[0].num_free == 1)
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert_mentions(done.stderr, "127.0.0.1: 1 of 2 devices", "--force")
        clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=time.sleep)
        monkeypatch.setattr(sessions, "time", clock)  # a look at the clock takes a second
        with pytest.raises(MsrlError, match=mentions("wait_for_nodes_s=3")):
            session.create_placement(plan([Role("actor", 2)], 2, resource=RESOURCE), timeout_s=3)
    notes = [line for line in capfd.readouterr().err.splitlines() if "Waiting" in line]
    assert notes
    assert_mentions(notes[0], RESOURCE, "1 free")
    assert launch.head_record() is not None


def test_a_run_leaves_its_cluster_running(head):
    import ray

    from msrl.cluster.session import ray_session
    from msrl.cluster.waiting import wait_all

    with ray_session(
        head.address, num_devices=2, resource_name=RESOURCE, env={"COLOR": "green"}
    ) as session:
        placed = session.create_placement(
            plan([Role("actor", 2), Role("rollout", 1, 2)], 2, resource=RESOURCE)
        )
        probe_class = make_probe_class()
        actors = [
            session.start(probe_class, placed, role, worker)
            for role, worker in (("actor", 0), ("actor", 1), ("rollout", 0))
        ]
        assert (
            wait_all([actor.environment.remote("COLOR") for actor in actors], timeout_s=HANG_S)
            == ["green"] * 3
        )
        assert session.nodes()[0].num_free == 0
    assert not ray.is_initialized()
    with ray_session(head.address, num_devices=2, resource_name=RESOURCE) as session:
        wait_until(lambda: session.nodes()[0].num_free == 2)


def test_a_client_with_another_token_is_refused_immediately(head, monkeypatch):
    from msrl.cluster.session import ray_session

    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    began = time.monotonic()
    with (
        pytest.raises(MsrlError, match=mentions(head.address, "token")),
        ray_session(head.address, num_devices=2, resource_name=RESOURCE),
    ):
        pass
    assert time.monotonic() - began < 20


@pytest.mark.full
def test_ray_itself_refuses_a_client_without_the_token(head, tmp_path):
    code = f"import ray; ray.init(address={head.address!r}); print('let in')"
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_NUM_REDIS_GET_RETRIES": "3",
    }
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode != 0
    assert "let in" not in run.stdout
    assert "Authentication token" in run.stderr


@pytest.mark.full
def test_down_ends_the_two_nodes_that_it_recorded_and_nothing_else(head, capsys):
    """`ray stop` would also end the other Ray; `down` ends the recorded nodes, even if a supervisor
    was killed.
    """
    from msrl.workflows import cluster

    launch.down()
    bystander = subprocess.Popen(["sleep", "300"])
    with other_ray() as other:
        port = free_port()
        cluster.up(
            host="127.0.0.2", port=port, dashboard_port=free_port(), devices=2, platform="cpu"
        )
        printed = capsys.readouterr().out
        assert f"msrl cluster join 127.0.0.2:{port}" in printed
        assert f"scp -p 127.0.0.2:{state.token_path()}" in printed
        cluster.join(address=f"127.0.0.2:{port}", host="127.0.0.3", devices=3, platform="cpu")
        with pytest.raises(MsrlError, match=mentions("node", f"127.0.0.2:{port}")):
            launch.join(
                f"127.0.0.2:{port}", host="127.0.0.3", devices=3, platform_resource=RESOURCE
            )
        check_two_nodes(f"127.0.0.2:{port}")
        records = launch.recorded_nodes()
        pids = [process for record in records for process in record.processes]
        assert len(pids) >= 10
        worker = next(record for record in records if record.kind == "worker")
        psutil.Process(worker.processes[0].pid).kill()
        ended = launch.down()
        assert [node.record.kind for node in ended] == ["worker", "head"]
        assert not [process for process in pids if state.is_running(process)]
        assert not [record for record in records if Path(record.temp_dir).exists()]
        assert bystander.poll() is None
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "alive\n"
    bystander.kill()
    bystander.wait()
    assert launch.down() == ()


def check_two_nodes(address):
    """Check that a plan over both nodes gets devices on each, and that a plan too large for them is
    refused.
    """
    from msrl.cluster.session import ray_session
    from msrl.cluster.waiting import wait_all

    with ray_session(address, num_devices=0, resource_name=RESOURCE) as session:
        assert sorted((node.host, node.num_devices) for node in session.nodes()) == [
            ("127.0.0.2", 2.0),
            ("127.0.0.3", 3.0),
        ]
        placed = session.create_placement(plan([Role("actor", 4)], 2, 2, resource=RESOURCE))
        probe_class = make_probe_class()
        hosts = wait_all(
            [session.start(probe_class, placed, "actor", rank).host.remote() for rank in range(4)],
            timeout_s=HANG_S,
        )
        assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
        with pytest.raises(MsrlError, match=mentions("4, 1", "msrl_device", "127.0.0.2")):
            session.create_placement(
                plan([Role("actor", 5)], 4, 2, resource=RESOURCE), timeout_s=0.0
            )


@pytest.mark.full
def test_a_failed_start_of_ray_is_reported_with_its_output_and_leaves_nothing():
    launch.down()
    with pytest.raises(MsrlError, match=mentions("Ray", "exit status 1", "CPU")):
        launch.up(
            port=free_port(),
            dashboard_port=free_port(),
            devices=1,
            platform_resource="CPU",
        )
    assert launch.recorded_nodes() == ()
    assert list(Path(os.environ["RAY_TMPDIR"]).iterdir()) == []


def test_a_start_of_ray_that_times_out_is_retried(monkeypatch, caplog, tmp_path):
    from msrl.cluster import ray_process

    starts, ends, late = [], [], []
    raylet = tmp_path / "raylet"
    raylet.write_text("#!/bin/sh\nsleep 600 &\necho $! > $1.new && mv $1.new $1\nwait\n")
    raylet.chmod(0o755)

    def init(num_late, **arguments):
        starts.append(arguments)
        if len(starts) <= num_late:
            agent = tmp_path / f"agent{len(starts)}"
            late.append(subprocess.Popen([raylet, agent]))
            wait_until(agent.exists)
            raise Exception(
                "The current node timed out during startup. This could happen because some of "
                "the raylet failed to startup"
            )

    monkeypatch.setattr(ray_process.ray, "shutdown", lambda: ends.append(len(starts)))
    monkeypatch.setattr(ray_process.ray, "init", lambda **arguments: init(1, **arguments))
    ray_process.start_ray(address="local")
    assert (starts, ends) == ([{"address": "local"}] * 2, [1])
    assert late[0].wait(30) == -signal.SIGKILL
    assert_mentions(caplog.text, "Ray", "again")
    monkeypatch.setattr(ray_process.ray, "init", lambda **arguments: init(9, **arguments))
    with pytest.raises(MsrlError, match=mentions("Ray", "3 times")):
        ray_process.start_ray(address="local")
    assert len(starts) == 5
    assert [process.wait(30) for process in late] == [-signal.SIGKILL] * 4
    wait_for_end([int(file.read_text()) for file in tmp_path.glob("agent*")])


def test_processes_of_ray_are_killed_as_soon_as_ray_ends_them(monkeypatch):
    from msrl.cluster import ray_process

    script = (
        "import signal, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    first, second, earlier = (
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(3)
    )
    for process in (first, second, earlier):
        assert process.stdout.readline() == b"ready\n"
    earlier.terminate()  # as Slurm does, before Ray ends it

    def shutdown():
        for process in (first, second):
            process.terminate()
            assert process.wait(60) == -signal.SIGKILL
        assert earlier.poll() is None

    monkeypatch.setattr(ray_process.ray, "shutdown", shutdown)
    try:
        ray_process.shut_down_ray()
    finally:
        for process in (first, second, earlier):
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_node_whose_start_times_out_is_started_again(monkeypatch, tmp_path, caplog):
    launch.down()
    num_starts = tmp_path / "starts"
    script = (
        "import pathlib, sys, time\n"
        f"starts = pathlib.Path({str(num_starts)!r})\n"
        "starts.write_text((starts.read_text() if starts.exists() else '') + '.')\n"
        "if len(starts.read_text()) <= LATE:\n"
        "    sys.exit('Exception: The current node timed out during startup.')\n"
        "print('Ray runtime started', flush=True)\n"
        "time.sleep(600)\n"
    )

    def start(num_late):
        code = script.replace("LATE", str(num_late))
        monkeypatch.setattr(launch, "_command", lambda *_: [sys.executable, "-c", code])
        return launch.up(port=free_port(), devices=1, platform_resource=RESOURCE)

    record = start(1)
    assert record.alive and len(num_starts.read_text()) == 2
    assert launch.recorded_nodes() == (record,)
    assert_mentions(caplog.text, "Ray", "again")
    launch.down()
    with pytest.raises(MsrlError, match=mentions("3 times", "overloaded")):
        start(9)
    assert launch.recorded_nodes() == () and len(num_starts.read_text()) == 5


def make_probe_class():
    """Return an actor class that reports its environment and fails in several ways.

    It is local, so that Ray pickles its code.
    """
    import ray

    class ProbeActor:
        def environment(self, name):
            return os.environ.get(name)

        def host(self):
            return ray.util.get_node_ip_address()

        def pid(self):
            return os.getpid()

        def wait(self, seconds):
            time.sleep(seconds)
            return seconds

        def fail(self, kind, text, after_s=0.0):
            time.sleep(after_s)
            raise {"value": ValueError, "user": MsrlError, "peer": ConnectionError}[kind](text)

        def die(self, after_s):
            time.sleep(after_s)
            os._exit(7)

    return ray.remote(ProbeActor)


@pytest.fixture(scope="module")
def run():
    """Start a local Ray with two devices of the resource that Ray numbers."""
    from msrl.cluster.session import ray_session

    launch.down()
    with ray_session(None, num_devices=2, resource_name="GPU") as session:
        placed = session.create_placement(
            plan([Role("actor", 2), Role("rollout", 1, 2)], 2, resource="GPU")
        )
        yield session, placed, make_probe_class()


def test_a_local_ray_listens_on_loopback_only(run):
    hosts = listening_hosts(set(children(os.getpid())))
    assert hosts
    assert {host.removeprefix("::ffff:") for host in hosts} <= {"127.0.0.1", "::1"}


def test_device_ids_lists_all_devices_of_a_worker(run):
    _, placed, _ = run
    assert sorted(placed.device_ids("rollout", 0)) == ["0", "1"]
    assert placed.device_ids("actor", 0) + placed.device_ids("actor", 1) in [("0", "1"), ("1", "0")]


@pytest.mark.full
def test_workers_have_the_priority_of_the_command(run):
    from msrl.cluster.waiting import wait_all

    session, placed, probe_class = run
    worker = session.start(probe_class, placed, "actor", 0)
    (pid,) = wait_all([worker.pid.remote()], timeout_s=HANG_S)
    assert psutil.Process(pid).nice() == psutil.Process().nice()
    end(worker)


def test_a_local_ray_keeps_no_idle_workers(run):
    from msrl.cluster.waiting import wait_all

    session, placed, probe_class = run
    worker = session.start(probe_class, placed, "actor", 0)
    wait_all([worker.pid.remote()], timeout_s=HANG_S)

    def named(start: str) -> bool:
        return any(name.startswith(start) for name in children(os.getpid()).values())

    assert named("ray::ProbeActor")
    wait_until(lambda: not named("ray::IDLE"))
    end(worker)


def test_a_failure_ends_the_wait_immediately_with_the_workers_traceback(run):
    from msrl.cluster.waiting import WorkerError, wait_all

    session, placed, probe_class = run
    slow, bad = (session.start(probe_class, placed, "actor", rank) for rank in range(2))
    wait_all([slow.pid.remote(), bad.pid.remote()], timeout_s=HANG_S)
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        wait_all(
            [slow.wait.remote(120), bad.fail.remote("value", "the ninth token")],
            timeout_s=HANG_S,
            labels=("actor 0", "actor 1"),
        )
    assert time.monotonic() - began < 40
    assert str(caught.value).startswith("actor 1 failed:")
    assert "in fail\n" in str(caught.value)
    assert "ValueError: the ninth token" in str(caught.value)
    end(slow, bad)


def test_an_msrl_error_of_a_worker_is_raised_unchanged(run):
    from msrl.cluster.waiting import wait_all

    session, placed, probe_class = run
    actor = session.start(probe_class, placed, "actor", 0)
    with pytest.raises(MsrlError, match=r"^model\.path: nothing there$"):
        wait_all([actor.fail.remote("user", "model.path: nothing there")], timeout_s=HANG_S)
    end(actor)


@pytest.mark.full
def test_a_dead_worker_is_reported_before_its_failed_peers(run, monkeypatch):
    from msrl.cluster.waiting import WorkerError, wait_all

    monkeypatch.setattr("msrl.cluster.waiting._AFTERMATH_S", 60.0)
    session, placed, probe_class = run
    peer, dying = (session.start(probe_class, placed, "actor", rank) for rank in range(2))
    wait_all([peer.pid.remote(), dying.pid.remote()], timeout_s=HANG_S)
    with pytest.raises(WorkerError) as caught:
        wait_all(
            [peer.fail.remote("peer", "peer gone", 0.2), dying.die.remote(0.5)],
            timeout_s=HANG_S,
            labels=("actor 0", "actor 1"),
        )
    assert str(caught.value).startswith("actor 1 ")
    assert_mentions(caught.value, "died", "actor 0: ConnectionError: peer gone")
    assert caught.value.workers == {"actor 1"}
    end(peer)


def test_the_death_of_an_idle_worker_ends_the_wait(run):
    from msrl.cluster.waiting import WorkerError, WorkerTimeoutError, wait_all

    session, placed, probe_class = run
    busy, idle = (session.start(probe_class, placed, "actor", rank) for rank in range(2))
    _, victim = wait_all([busy.pid.remote(), idle.pid.remote()], timeout_s=HANG_S)
    refs, watch = [busy.wait.remote(100)], session.watch({"actor": "training rank"})
    with pytest.raises(WorkerTimeoutError, match=mentions("rpc_timeout_s", "rollout engine 0")):
        wait_all(refs, timeout_s=2.5, labels=("rollout engine 0",), watch=watch)
    psutil.Process(victim).kill()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"^training rank 1 .*died"):
        wait_all(refs, timeout_s=HANG_S, labels=("rollout engine 0",), watch=watch)
    assert time.monotonic() - began < 40
    end(busy)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.full
def test_a_worker_without_heartbeats_counts_as_dead_and_can_be_replaced(run):
    from msrl.cluster.heartbeats import ActorHeartbeats
    from msrl.cluster.waiting import WorkerError, wait_all

    session, placed, probe_class = run
    busy, stopped = (session.start(probe_class, placed, "actor", rank) for rank in range(2))
    heartbeats = ActorHeartbeats(8.0)
    for actor in (busy, stopped):
        heartbeats.begin(actor)
    _, victim = wait_all([busy.pid.remote(), stopped.pid.remote()], timeout_s=HANG_S)
    watch = session.watch({"actor": "training rank"}, heartbeats)
    wait_all([busy.wait.remote(10)], timeout_s=HANG_S, labels=("training rank 0",), watch=watch)
    psutil.Process(victim).suspend()
    with pytest.raises(WorkerError, match=r"^training rank 1 .*no heartbeat for 8 s") as caught:
        wait_all([busy.wait.remote(60)], timeout_s=HANG_S, labels=("training rank 0",), watch=watch)
    assert caught.value.workers == {"training rank 1"}
    for actor in (busy, stopped):
        heartbeats.end(actor)
    session.end("actor", [0, 1])
    wait_until(lambda: not is_running(victim))
    session.wait_for_devices(placed, "actor", [0, 1], timeout_s=HANG_S)
    again = session.start(probe_class, placed, "actor", 1)
    assert wait_all([again.pid.remote()], timeout_s=HANG_S) != [victim]
    session.end("actor", [1])


@pytest.mark.full
def test_workers_that_do_not_answer_in_time_are_reported(run):
    from msrl.cluster.waiting import WorkerTimeoutError, wait_all

    session, placed, probe_class = run
    quick, slow = (session.start(probe_class, placed, "actor", rank) for rank in range(2))
    wait_all([quick.pid.remote(), slow.pid.remote()], timeout_s=HANG_S)
    with pytest.raises(WorkerTimeoutError, match=mentions("rpc_timeout_s=1", "actor 1")):
        wait_all(
            [quick.wait.remote(0), slow.wait.remote(20)],
            timeout_s=1.0,
            labels=("actor 0", "actor 1"),
        )
    end(quick, slow)


def test_devices_that_another_run_holds_are_waited_for_and_then_reported(run):
    session, _, _ = run
    with pytest.raises(
        MsrlError, match=mentions("GPU", "127.0.0.1: 2", "0 free", "wait_for_nodes_s=1")
    ):
        session.create_placement(plan([Role("actor", 2)], 2, resource="GPU"), timeout_s=1.0)


@pytest.mark.full
def test_a_failed_run_keeps_its_logs_and_leaves_no_temporary_files(tmp_path):
    """Use subprocesses, since this process may have a session."""
    code = (
        "import sys, logging; logging.basicConfig()\n"
        "from pathlib import Path\n"
        "from msrl.cluster.session import ray_session\n"
        "from msrl.errors import MsrlError\n"
        "with ray_session(\n"
        "    None, num_devices=1, resource_name='device', logs=Path(sys.argv[2])\n"
        "):\n"
        "    raise {'MsrlError': MsrlError, 'KeyError': KeyError}[sys.argv[1]]('x')\n"
    )
    base, logs = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")), tmp_path / "ray_logs"
    environment = {**os.environ, "RAY_TMPDIR": str(base)}

    def run(error):
        command = [sys.executable, "-c", code, error, str(logs)]
        return subprocess.run(command, env=environment, capture_output=True, text=True).stderr

    assert run("MsrlError").rstrip().endswith("msrl.errors.MsrlError: x")
    assert not logs.exists()
    for _ in range(2):  # the logs of the newest failure replace those of an earlier one
        assert_mentions(run("KeyError"), logs, "logs")
        assert list(logs.glob("raylet.*"))
        assert len(list(logs.glob("gcs_server.out"))) == 1
        assert logs.stat().st_mode & 0o077 == 0
    assert list(base.iterdir()) == []
    base.rmdir()


def end(*actors):
    """End actors to release their devices for the next test."""
    import ray

    for actor in actors:
        ray.kill(actor)


class other_ray:  # noqa: N801
    """A Ray of another user; after a line of input it prints that it still works."""

    def __enter__(self):
        code = (
            "from msrl.cluster.session import ray_session\n"
            "import ray\n"
            "with ray_session(None, num_devices=1, resource_name='other'):\n"
            "    print('up', flush=True)\n"
            "    input()\n"
            "    print(ray.get(ray.remote(lambda: 'alive').options(num_cpus=0).remote()), "
            "flush=True)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "up\n"
        return self.process

    def __exit__(self, *_):
        self.process.communicate(timeout=60)
