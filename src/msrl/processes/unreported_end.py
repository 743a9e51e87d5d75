"""Message about the end of a process whose own code cannot report it.

The kernel (SIGKILL, for example for lack of memory) and native code end a process at once. A small
shell process then prints the message: it reads a pipe that ends with the process.
"""

from __future__ import annotations

import subprocess

_SCRIPT = "trap '' INT TERM HUP; read -r line || printf '%s\\n' \"$1\" >&2"


class UnreportedEnd:
    """Context in which a text is printed on standard error if this process ends at once."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> UnreportedEnd:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", self._text],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # signals to the group of this process do not reach it
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Print nothing from now on, because this process reports its end itself."""
        self._shell.kill()
        self._shell.wait()
