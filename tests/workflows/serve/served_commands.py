"""`msrl serve` as a process of the tests."""

from __future__ import annotations

import re
from pathlib import Path

from training_runs import Command, children, make_tmp


class Server:
    """`msrl serve` as a process, with its address."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.tmp = make_tmp()
        self.command = Command("serve", *arguments, "--port", "0", log=log, tmp=self.tmp)
        try:
            self.command.when(lambda: "Serving" in self.command.output(), every_s=0.2)
        except AssertionError:
            if self.command.process.poll() is None:
                self.command.kill()
            raise
        match = re.search(r"at (http://\S+)", self.command.output())
        assert match is not None
        self.url = match[1]

    @property
    def pids(self) -> list[int]:
        return [self.command.process.pid, *children(self.command.process.pid)]
