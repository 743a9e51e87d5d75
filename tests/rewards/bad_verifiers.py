"""Misbehaving verifiers that the tests of the pool run in its processes."""

import os
import signal
import sys
import time
from pathlib import Path


def length(response, answer):
    return float(len(response))


def sleep_forever(response, answer):
    if response == "stuck":
        while True:
            time.sleep(3600)
    return 1.0


def spin_in_c(response, answer):
    return float(9**9**9 > 0) if response == "stuck" else 1.0


def crash(response, answer):
    if response == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def killed_once(response, answer, *, file=""):
    """End as the out-of-memory killer does, in the first call only; always for `always`."""
    if response == "always" or (response == "once" and not Path(file).exists()):
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def hog(response, answer):
    return float(len(bytearray(1 << 40))) if response == "hog" else 1.0


def misbehave(response, answer, *, value=1.0):
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        sys.exit(3)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    print("a verifier that prints")
    return value


def own_process(response, answer):
    return float(os.getpid())
