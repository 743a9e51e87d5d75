"""Process that reads images, started by `decoding.py`.

    python -m msrl.vision.decoding_process FD

FD is the number of a connection. The process receives a `DecodingLimits`, then requests: a task
and files. It answers with a `CheckedImage`, a thumbnail or an `ImageError` for each file. The
process ends with its input.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from msrl.processes.limits import limit_memory
from msrl.processes.parent import leave_signals_to_parent
from msrl.vision.decoding import CheckedImage, DecodingLimits, Task
from msrl.vision.errors import ImageError
from msrl.vision.pixels import check_image, image_form, image_size, load_decoders, thumbnail


def main() -> None:
    """Read images until the input ends."""
    leave_signals_to_parent()
    connection = Connection(int(sys.argv[1]))
    limits: DecodingLimits = connection.recv()
    load_decoders()  # before the limit of memory holds
    limit_memory(limits.memory_bytes)
    while True:
        try:
            task, files = connection.recv()
        except EOFError:
            return
        for data in files:
            signal.setitimer(signal.ITIMER_PROF, limits.time_s)
            answer = _answer(task, data, limits)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send(answer)


def _answer(task: Task, data: bytes, limits: DecodingLimits) -> CheckedImage | bytes | ImageError:
    try:
        if task == "thumbnail":
            return thumbnail(data)
        height, width = check_image(data) if task == "decode" else image_size(data)
        return CheckedImage(height, width, image_form(data) or "")
    except MemoryError:
        memory = f"{limits.memory_bytes >> 20:,} MiB"
        return ImageError("hostile image", f"needs more than {memory} of memory. Replace the file.")
    except ImageError as error:
        return error


if __name__ == "__main__":
    main()
