"""Process that generates the rows of a task, started as `python -m msrl.data.tasks._worker`.

Its message is (package, task, parameters). Frames: ROW with JSON or RAISED for each row in order,
then READY.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib import import_module

from msrl import registry
from msrl.processes.messages import READY, error_frame, frame, read
from msrl.processes.parent import leave_signals_to_parent

ROW = 1  # kind of frames with a row


def main() -> None:
    """Write the rows of one task."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    leave_signals_to_parent()
    package, task, parameters = read(source)
    generate = import_module(f"{registry.TASKS}.{package}").open_task(task, parameters)
    for number in range(parameters["size"]):
        try:
            sink.write(frame(ROW, detail=json.dumps(generate(number)).encode("ascii")))
        except BrokenPipeError:
            raise
        except Exception as error:  # of a task; the other rows may be used
            sink.write(error_frame(f"cannot be generated: {error or type(error).__name__}"))
    sink.write(frame(READY))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
