"""Life of the server's process: start, readiness, output and end of all its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

from msrl import temporary
from msrl.errors import MsrlError, RunFailedError
from msrl.http_requests import is_healthy
from msrl.limits import print_note
from msrl.processes import trees
from msrl.temporary import ProcessRecord

_POLL_S, _LOOK_EVERY_S = 0.2, 1.0
_HEALTH_S = 5.0
_END_S = 30.0  # until the server's processes are killed
_TAIL_LINES = 15
# Errors of vLLM about its settings (ValueError, also of pydantic, and of argparse).
_REFUSAL = re.compile(r"^(?:ValueError|pydantic\S*ValidationError|\S+\.py: error|\S+: error): (.+)")
_ENGINE = "VLLM::"  # with which the names of its processes begin
_ENGINE_ERROR = re.compile(r"^(\((?:EngineCore|Worker)\w* pid=\d+\)) ERROR ")
# With one of these, the last error of a process is about the loss of another one.
_LOSSES = ("died unexpectedly", "BrokenPipeError:", "ConnectionResetError:", "EOFError")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ?")


def run_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    url: str,
    on_ready: Callable[[], None],
    *,
    is_verbose: bool = False,
) -> None:
    """Run the server until a signal raises KeyboardInterrupt here.

    Args:
        command: Words of its command.
        environment: Its environment.
        folder: Temporary folder of this process, which gets the server's temporary files.
        url: Address of the server.
        on_ready: Function to call once the server answers.
        is_verbose: Print what the server prints while it loads.

    Raises:
        MsrlError: vLLM refuses the settings.
        RunFailedError: The server ended by itself.
    """
    before = temporary.segments()
    with _running(command, {**environment, **temporary.environment(folder)}) as process:
        engine = _Engine()
        output = _Output(process, engine, is_shown=is_verbose)

        def look() -> None:
            """Note what the server has started; nothing is known of it once it has ended."""
            family = trees.descendants(process.pid)
            engine.note(family)
            pids = [process.pid, *(each.pid for each in family)]
            temporary.list_segments(folder, pids, before)

        try:
            if _is_ready(process, url, look):
                look()
                output.show(True)
                on_ready()
            process.wait()
        finally:
            look()
            output.show(is_verbose)  # libraries print warnings at their end
        raise _failure(process, output, engine)


def _is_ready(process: subprocess.Popen[str], url: str, look: Callable[[], None]) -> bool:
    """Wait until the server answers, and return False if its process ends before."""
    looked = time.monotonic()
    while process.poll() is None:
        if is_healthy(url, _HEALTH_S):
            return True
        if time.monotonic() - looked > _LOOK_EVERY_S:
            look()
            looked = time.monotonic()
        time.sleep(_POLL_S)
    return False


class _Engine:
    """Processes of the server's engine."""

    def __init__(self) -> None:
        self._seen: tuple[ProcessRecord, ...] = ()

    def note(self, family: Sequence[ProcessRecord]) -> None:
        """Add the engine's processes among the processes of the server."""
        new = (each for each in family if each.name.startswith(_ENGINE) and each not in self._seen)
        self._seen += tuple(new)

    @property
    def ended(self) -> list[int]:
        """The pids of those that have ended."""
        return [each.pid for each in self._seen if not temporary.is_running(each)]


class _Output:
    """Lines of the server, which are kept for messages and shown on standard error.

    Those about the loss of its engine are only kept.
    """

    def __init__(self, process: subprocess.Popen[str], engine: _Engine, *, is_shown: bool) -> None:
        self.lines = deque[str](maxlen=200)
        self._engine, self._is_shown = engine, is_shown
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def show(self, is_shown: bool) -> None:
        """Show or hide the lines from now on."""
        self._is_shown = is_shown

    def finish(self) -> None:
        """Read the last lines of a process that has ended."""
        self._thread.join(timeout=2.0)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.rstrip("\n")
            self.lines.append(text)
            if self._is_shown and not self._engine.ended:
                print_note(text)


@contextlib.contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str]
) -> Generator[subprocess.Popen[str], None, None]:
    """Start the server, and end all its processes after the block."""
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            process.terminate()
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            print_note(f"The server did not end within {_END_S:g} s and is killed")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(
    process: subprocess.Popen[str], output: _Output, engine: _Engine
) -> MsrlError | RunFailedError:
    """Return the error about a server that ended by itself."""
    output.finish()
    lines = [_PREFIX.sub("", line) for line in output.lines]
    refusals = [match[1] for line in lines if (match := _REFUSAL.match(line.strip()))]
    if refusals:
        return MsrlError(f"serve: vLLM refuses these settings: {refusals[-1]}")
    ended = engine.ended if process.returncode >= 0 else []
    if ended and not _has_own_error(output.lines):
        pids = ", ".join(map(str, ended))
        return RunFailedError(
            f"The engine of the server (pid {pids}) crashed or was killed, for example by the "
            "out-of-memory killer (see dmesg). Start the same command again."
        )
    tail = "\n".join(lines[-_TAIL_LINES:])
    return RunFailedError(
        f"The server ended by itself with exit code {process.returncode}. Its last lines "
        f"(--verbose prints all):\n{tail}"
    )


def _has_own_error(lines: Iterable[str]) -> bool:
    """Return True if a process of the engine failed, but not because another one was lost."""
    matches = ((_ENGINE_ERROR.match(line), line) for line in lines)
    last_errors = {match[1]: line for match, line in matches if match}
    return any(not any(loss in line for loss in _LOSSES) for line in last_errors.values())
