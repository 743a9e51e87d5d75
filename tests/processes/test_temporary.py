"""Removal of temporary folders and shared memory by the owner, or by the next run."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import guardian
from msrl import temporary
from msrl.files import write_text
from support import HANG_S
from training_runs import wait_for_end

KILLED = """
import mmap, os, signal, sys
from pathlib import Path
from msrl import temporary
from msrl.files import write_text
folder = temporary.claim(Path(sys.argv[1], "msrl-killed"))
before = temporary.segments()
file = open(sys.argv[2], "w+b")
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 4096)
temporary.list_segments(folder, [os.getpid()], before)
os.kill(os.getpid(), signal.SIGKILL)
"""

SEMAPHORE = """
import multiprocessing, os, sys
from pathlib import Path
from msrl import temporary
before = temporary.segments()
semaphore = multiprocessing.get_context("spawn").Semaphore(1)
temporary.list_segments(Path(sys.argv[1]), [os.getpid()], before)
"""


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a new folder as the default folder of temporary files."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def segment() -> Iterator[Path]:
    """Return an unused path in shared memory."""
    path = temporary.SHARED_MEMORY / f"msrl_test_{uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def kill_owner(base: Path, segment: Path) -> Path:
    folder = base / "msrl-killed"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(base), str(segment)], check=False)
    assert segment.name in (folder / "shared_memory.json").read_text()
    return folder


def test_creating_a_folder_removes_folders_and_shared_memory_of_killed_processes(
    base: Path, segment: Path
):
    folder = kill_owner(base, segment)
    with temporary.owned_folder("msrl-next-") as folder_of_this_process:
        assert not folder.exists() and not segment.exists()
        assert folder_of_this_process.parent == base
        with temporary.owned_folder("msrl-other-"):
            assert folder_of_this_process.exists()
    assert list(base.iterdir()) == []


def test_a_folder_of_another_machine_is_not_removed(base: Path, segment: Path):
    folder = kill_owner(base, segment)
    owner = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps({**owner, "place": "another machine"}))
    temporary.remove_abandoned([base])
    assert folder.exists() and segment.exists()


def test_shared_memory_of_a_killed_process_is_removed_when_it_is_listed_again(
    base: Path, segment: Path
):
    segment.write_bytes(b"1" * 4096)
    folder = base / "msrl-mine"
    folder.mkdir()
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        temporary.list_segments(folder, [os.getpid()], set())
    temporary.list_segments(folder, [], set())
    assert segment.exists()
    temporary.remove(folder)
    assert not segment.exists()


def test_a_semaphore_is_listed_under_the_name_that_it_leaves(base: Path):
    """The C library renames a semaphore after it has mapped it."""
    folder = base / "msrl-mine"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", SEMAPHORE, str(folder)], check=True, timeout=HANG_S)
    ((name, _),) = json.loads((folder / "shared_memory.json").read_text())
    assert name.startswith("sem.")


def test_shared_memory_of_other_owners_is_not_removed(base: Path, segment: Path):
    segment.write_bytes(b"1" * 4096)
    folder = base / "msrl-mine"
    folder.mkdir()
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        temporary.list_segments(folder, [os.getpid()], temporary.segments())
        assert json.loads((folder / "shared_memory.json").read_text()) == []
        temporary.list_segments(folder, [os.getpid()], set())
    assert segment.name in (folder / "shared_memory.json").read_text()
    listed = json.loads((folder / "shared_memory.json").read_text())
    (folder / "shared_memory.json").write_text(
        json.dumps([[name, inode + 1] for name, inode in listed])
    )
    temporary.remove(folder)
    assert segment.exists() and not folder.exists()


def test_redirected_processes_still_use_torchs_compile_cache(
    base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    with temporary.redirect(base / "tmp"):
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(base / "tmp")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(
            base / "cache" / "msrl" / "torchinductor"
        )
    assert dict(os.environ) == before and tempfile.gettempdir() == str(base)


def test_a_device_is_written_to_and_not_replaced():
    reader, writer = os.openpty()
    device = Path(os.ttyname(writer))
    write_text(device, "a\n")
    assert device.is_char_device() and os.read(reader, 10).strip() == b"a"
    os.close(reader)
    os.close(writer)


def test_a_test_run_that_is_killed_leaves_no_process():
    code = (
        "import os, signal, subprocess, guardian\n"
        "guardian.begin()\n"
        "started = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(started.pid, guardian._STARTED[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{os.pathsep.join(sys.path)}"}
    environment.pop(guardian.VARIABLE)
    command = [sys.executable, "-c", code]
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    wait_for_end([int(pid) for pid in killed.stdout.split()], limit_s=HANG_S)
