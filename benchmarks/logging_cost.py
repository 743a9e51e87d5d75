"""CPU time of the driver for logging: `python -m benchmarks logging [--steps N]`.

The quickstart's model trains with GRPO and `log: {rollouts: parquet, tokens: sampled}`. The driver
measures the CPU time of the calls that write rollouts, values of tokens and metrics. They must add
at most 2% to its other CPU time. Ray's threads, which work while such a call runs, do not count.
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import yaml

from benchmarks.asynchronous import ROOT, make_inputs, run_python

MAX_SHARE = 0.02
LOG = {"rollouts": "parquet", "tokens": "sampled"}


def main(argv: Sequence[str]) -> int:
    """Print the table; return 1 if the goal is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks logging", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="Steps (default: 200).")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="msrl-bench-logging-") as name:
        folder = Path(name)
        make_inputs(folder)
        (folder / "grpo.yaml").write_text(yaml.safe_dump(configuration(args.steps)))
        drive = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        drive += "from benchmarks.logging_cost import drive; drive()"
        run_python(
            folder, "-c", drive, "seconds.json", "train-grpo", "-c", "grpo.yaml", log="train"
        )
        seconds = json.loads((folder / "seconds.json").read_text())
    print("\n".join(table(seconds, args.steps)))
    return int(share(seconds) > MAX_SHARE)


def configuration(steps: int) -> dict[str, Any]:
    """Return the quickstart's training from its random model, on one rank, with logging."""
    file = ROOT / "examples" / "quickstart" / "grpo.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    config["model"]["path"] = "inputs/model"
    config["data"]["train"] = "rl"
    config["train"]["steps"] = steps
    config["train"]["parallel"] = {"tp": 1}
    config["log"] = LOG
    return config


def drive() -> None:
    """Run `msrl` in this process. The first argument is the file for its CPU seconds."""
    from msrl.cli.app import main as run_msrl

    output = Path(sys.argv[1]).absolute()
    clock = CpuClock()
    for owner, method, name in calls_of_logging():
        setattr(owner, method, clock.measured(getattr(owner, method), name))

    def write() -> None:
        output.write_text(json.dumps({**clock.seconds, "all": time.process_time()}))

    atexit.register(write)
    del sys.argv[1]
    run_msrl()


def calls_of_logging() -> tuple[tuple[type, str, str], ...]:
    """Return the measured methods of the driver with their names in the table."""
    from msrl.workflows.rl.logprob_gap import GapMonitor
    from msrl.workflows.rl.rollout_log.log import RolloutLog
    from msrl.workflows.rl.token_values import TokenValues, ValueRequest
    from msrl.workflows.training.run_log import RunLog

    return (
        (RolloutLog, "collect", "rollouts before the update"),
        (RolloutLog, "write", "rollouts after the update"),
        (RolloutLog, "wait", "rollouts of the step before"),
        (TokenValues, "request", "request of token values"),
        (ValueRequest, "values", "token values"),
        (GapMonitor, "metrics", "gap of log-probabilities"),
        (RunLog, "log", "metrics"),
    )


class CpuClock:
    """CPU seconds of calls by name. Calls within measured calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._is_within = False

    def measured(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that adds the CPU time of its calls."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_within:
                return function(*args, **kwargs)
            began, self._is_within = time.thread_time(), True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_within = False
                self.seconds[name] += time.thread_time() - began

        return call


def share(seconds: Mapping[str, float]) -> float:
    """Return the CPU time of logging relative to the other CPU time of the driver."""
    logging = sum(value for name, value in seconds.items() if name != "all")
    return logging / (seconds["all"] - logging)


def table(seconds: Mapping[str, float], steps: int) -> list[str]:
    """Return the results as lines of Markdown."""
    rows = [f"| {name} | {value / steps * 1e3:.2f} ms |" for name, value in seconds.items()]
    reached = "yes" if share(seconds) <= MAX_SHARE else "no"
    return [
        f"CPU time of the driver per step, over {steps} steps",
        "",
        "| call | CPU time |",
        "|---|---|",
        *rows,
        "",
        f"Logging adds {share(seconds):.1%}. Goal: at most {MAX_SHARE:.0%}. Reached: {reached}",
    ]
