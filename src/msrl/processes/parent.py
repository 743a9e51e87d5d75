"""What a child process does at signals and at the end of its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends.

    `parent` is the pid of the process that started it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Let the parent decide when this process ends: a job manager may signal every process.

    SIGTERM and SIGHUP get handlers, since programs that this process starts would inherit that they
    are ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
