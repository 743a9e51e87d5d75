"""Soak: random processes of every kind of command are killed at random moments, from a seed.

Each case runs a command whose result is known from a run without kills. It kills (SIGKILL) the
command or one of its processes up to three times, repeats the command as docs/failures.md says
whenever it has ended, and compares the result. Rows are appended to a table, which the end prints:

    python tests/soak.py [--minutes N] [--seed S] [--folder FOLDER] [KIND...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import folders

sys.path.extend(folders())

from msrl.rollout.server_access import free_port
from test_train_grpo import make_inputs, settings
from training_runs import (
    Command,
    children,
    make_tmp,
    metrics,
    rows,
    shared_memory,
    still_running,
    wait_for_end,
    write_config,
    write_rows,
)

MAX_KILLS = 3
BUSY_S = 900.0  # without an answer of a process, on a busy machine
LIMIT_S = 3600.0  # of a command that is not killed, also on a busy machine
END_S = 90.0  # Ray's agents look for their head for a minute
HIDDEN = (".part", ".partial", ".new", ".old", ".unverified")
TWO_RANKS = {"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": BUSY_S}
QWEN = ("--handler", "alpaca", "--template", "qwen")
ONE_RANK = {"platform": "cpu", "rpc_timeout_s": BUSY_S}


@dataclass
class Row:
    """Result of one case; `problems` describes what is lost, repeated, unequal or left."""

    kind: str
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    is_equal: bool = True
    lost: int = 0
    repeated: int = 0
    leftovers: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """Kind of command: `arguments` starts it in a folder, and `result` reads what it made."""

    arguments: Callable[[Path], list[str]]
    result: Callable[[Path], Any]
    again: tuple[str, ...] = ()  # further arguments after a kill
    prepare: Callable[[Path], object] = lambda folder: None  # before it is repeated


# --- Trainings --------------------------------------------------------------------------------


def training(command: str, model: str = "tied", **sections: Any) -> Kind:
    """Return a training whose metrics, rollouts and exported weights are compared."""

    def arguments(folder: Path) -> list[str]:
        config = settings(folder.parent, "run", model, **sections)
        config["run"]["dir"] = str(folder)
        if command not in ("train-grpo", "train-distill"):
            for name in ("rollout", "reward"):
                config.pop(name)
        if "environment" in sections:  # whose own rewards are all equal, so that nothing is learned
            config["reward"] = {"sources": [{"function": f"{folder.parent / REWARDS}:spread"}]}
        config["data"] = {"train": str(folder.parent / config["data"]["train"])}
        if command == "train-distill":
            del config["reward"]
            teachers = [{"model": str(folder.parent / "untied")}]
            config["algo"] = {"distill": {"teachers": teachers}}
        return [command, "-c", str(write_config(folder / "run.yaml", config))]

    is_async = "async" in sections.get("rollout", {})
    return Kind(arguments, prompts if is_async else training_result, ("--resume", "auto"))


def training_result(folder: Path) -> Any:
    run = folder / "run"
    weights = (run / "hf" / "model.safetensors").read_bytes()
    return metrics(run), rollouts(run), hashlib.sha256(weights).hexdigest()


def prompts(folder: Path) -> list[int]:
    """Return how often each prompt of the data is trained, which an asynchronous run fixes."""
    counts = Counter(row[0] for step in rollouts(folder / "run") for row in set(step))
    return [len(rows(folder / "run")), *sorted(counts.values())]


def rollouts(run: Path) -> list[list[tuple[int, str]]]:
    """Return prompt and response of each row of each step."""
    steps = [path.read_text().splitlines() for path in sorted((run / "rollouts").glob("*.jsonl"))]
    decoded = [[json.loads(line) for line in step] for step in steps]
    return [[(row["prompt_index"], row["response"]) for row in step] for step in decoded]


def steps(count: int, **train: Any) -> dict[str, Any]:
    return {"steps": count, "micro_batch": 2, "optimizer": {"lr": 1e-4}, **train}


def rollout_section(**changes: Any) -> dict[str, Any]:
    section = settings(Path(), "run", "tied")["rollout"]
    return {**section, "max_response_tokens": 12, **changes}


RETRY = {
    "name": "retry",
    "options": {"verifier": "acc", "feedback": "no", "max_attempts": 2},
    "max_turn_tokens": 8,
    "lockstep": True,
}
REWARDS = "rewards.py"
SPREAD = "def spread(response: str) -> float:\n    return len(response) % 5 / 4\n"
KEEP = {"every_steps": 1, "keep": 2, "export_hf": True}


# --- Other commands ---------------------------------------------------------------------------


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the visible files of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith(".")
    }


def convert(folder: Path) -> list[str]:
    source = ("--load", str(folder.parent / "large"), "--save", str(folder / "mcore"))
    return ["convert-ckpt", "hf2mcore", *source, "--tp", "2"]


def remove_unverified(folder: Path) -> None:
    shutil.rmtree(folder / "mcore.unverified", ignore_errors=True)


def preprocess(folder: Path) -> list[str]:
    model = str(folder.parent / "tied")
    arguments = ["--input", str(folder.parent / "many.jsonl"), "--tokenizer", model, *QWEN]
    return ["preprocess", *arguments, "--output-prefix", str(folder / "out" / "data")]


def evaluate(folder: Path) -> list[str]:
    config = {
        "data": {"eval": str(folder.parent / "eval")},
        "rollout": rollout_section(),
        "reward": {"sources": [{"verifier": "acc"}]},
        "eval": {"samples_per_prompt": 2, "sampling": {"temperature": 1.0, "seed": 5}},
        "evaluate": {
            "models": [str(folder.parent / name) for name in ("tied", "untied")],
            "output": str(folder / "results"),
        },
        "cluster": ONE_RANK,
    }
    return ["eval", "-c", str(write_config(folder / "eval.yaml", config))]


def evaluations(folder: Path) -> Any:
    results = json.loads((folder / "results" / "results.json").read_text())["checkpoints"]
    samples = digests(folder / "results" / "samples")
    return [[entry["label"], entry["metrics"]] for entry in results], samples


def serve(folder: Path) -> list[str]:
    (folder / "port").write_text(str(free_port("127.0.0.1", 0)))
    port = (folder / "port").read_text()
    return ["serve", "--model", str(folder.parent / "tied"), "--port", port]


def answer(folder: Path) -> str | None:
    """Return a greedy answer of the server, None while it does not listen."""
    body = {"model": "tied", "prompt": "1%3=", "max_tokens": 8, "temperature": 0}
    address = f"http://127.0.0.1:{(folder / 'port').read_text()}/v1/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)["choices"][0]["text"]
    except OSError:
        return None


KINDS: dict[str, Kind] = {
    "sft": training(
        "train-sft",
        data={"train": "sft"},
        cluster=TWO_RANKS,
        train=steps(12, global_batch=4),
        checkpoint=KEEP,
    ),
    "dpo": training(
        "train-dpo",
        data={"train": "pairs.jsonl"},
        cluster=ONE_RANK,
        train=steps(8, global_batch=4),
        checkpoint=KEEP,
    ),
    "grpo": training("train-grpo", cluster=TWO_RANKS, train=steps(6), checkpoint=KEEP),
    "grpo-async": training(
        "train-grpo",
        cluster=TWO_RANKS,
        train=steps(10),
        checkpoint=KEEP,
        algo={"mismatch": {"weight": "token"}},
        rollout=rollout_section(**{"async": {"max_staleness": 2}}),
    ),
    "episodes": training(
        "train-grpo",
        cluster=ONE_RANK,
        train=steps(5),
        checkpoint=KEEP,
        environment=RETRY,
        rollout=rollout_section(max_response_tokens=60),
    ),
    "distillation": training(
        "train-distill",
        cluster=ONE_RANK,
        train=steps(5),
        checkpoint=KEEP,
        rollout=rollout_section(samples_per_prompt=1),
    ),
    "conversion": Kind(convert, lambda folder: digests(folder / "mcore"), (), remove_unverified),
    "preprocess": Kind(preprocess, lambda folder: digests(folder / "out"), ("--overwrite",)),
    "evaluation": Kind(evaluate, evaluations),
    "serve": Kind(serve, answer),
}


def write_inputs(folder: Path) -> None:
    """Write models and data once."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder)
    folder.mkdir()
    from msrl.cli import app
    from tiny_qwen2 import save_model

    make_inputs(folder)
    save_model(folder / "large", tied=True, positions=1 << 16)
    (folder / REWARDS).write_text(SPREAD)
    data = [{"instruction": f"{i}+{i}=", "output": f"{2 * i}"} for i in range(40)]
    write_rows(folder / "sft.jsonl", data)
    write_rows(folder / "many.jsonl", data * 400)
    pairs = [{"prompt": f"{i}=", "chosen": f"{i}", "rejected": "no"} for i in range(20)]
    write_rows(folder / "pairs.jsonl", pairs)
    arguments = ["--input", str(folder / "sft.jsonl"), "--tokenizer", str(folder / "tied")]
    arguments += [*QWEN, "--output-prefix", str(folder / "sft")]
    app.app(["preprocess", *arguments], standalone_mode=False)
    (folder / "done").touch()


# --- Cases ------------------------------------------------------------------------------------


@dataclass
class Case:
    """A command in its own folder, which is killed and repeated until it is complete."""

    kind: Kind
    name: str
    folder: Path
    tmp: Path = field(default_factory=make_tmp)
    seen: dict[int, str] = field(default_factory=dict)
    segments: set[Path] = field(default_factory=set)  # of shared memory
    attempts: int = 0

    def start(self, *further: str) -> Command:
        self.attempts += 1
        log = self.folder / f"{self.attempts}.log"
        arguments = [*self.kind.arguments(self.folder), *further]
        return Command(*arguments, log=log, tmp=self.tmp)

    def is_done(self, command: Command) -> bool:
        """Return True after the end of a command, or once a server answers."""
        if self.name == "serve" and self.kind.result(self.folder) is not None:
            return True
        return command.process.poll() is not None

    def wait(self, command: Command, seconds: float) -> None:
        """Wait, at most until the command is done, and note its processes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.is_done(command):
            time.sleep(0.05)
        self.note(command)

    def note(self, command: Command) -> dict[int, str]:
        """Note the processes of a command and the shared memory that they have mapped."""
        processes: dict[int, str] = {}
        if command.process.poll() is None:
            processes = {command.process.pid: "msrl", **children(command.process.pid)}
        self.seen |= processes
        self.segments |= shared_memory(processes)
        return processes

    def kill(self, command: Command, choose: random.Random) -> str | None:
        """Kill the command or one of its processes; return the name of what was killed."""
        processes = self.note(command)
        if not processes:
            return None
        names = sorted({title(line) for line in processes.values()})
        name = choose.choice(names)  # a kind first, since some have many processes
        victim = choose.choice([pid for pid, line in processes.items() if title(line) == name])
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return None
        if victim == command.process.pid:
            command.process.wait()  # until then, processes of a killed server may answer
        return name

    def stop(self, command: Command) -> None:
        if command.process.poll() is None:
            command.process.send_signal(signal.SIGTERM)
        command.wait()

    def leftovers(self) -> list[str]:
        """Return what the case left: processes, temporary files, shared memory, hidden files."""
        try:
            wait_for_end(self.seen, END_S)
        except AssertionError:
            names = [f"process {self.seen[pid][:60]}" for pid in still_running(self.seen)]
        else:
            names = []
        files = [path.relative_to(self.tmp) for path in self.tmp.rglob("*")]
        # torch keeps compiled code there, for later processes.
        names += [f"tmp/{path}" for path in files if not path.parts[0].startswith("torchinductor")]
        names += [str(path) for path in self.segments if path.exists()]
        names += [p.name for p in self.folder.rglob("*") if p.name.endswith(HIDDEN)]
        names += [str(path) for path in self.folder.rglob("msrl-*")]
        shutil.rmtree(self.tmp)
        return names


def title(line: str) -> str:
    """Return the kind of a process from its command line."""
    words = line.split()
    for word in words[1:]:
        if word.startswith("msrl.") or word.endswith(".py"):
            return Path(word).stem if "/" in word else word
    return Path(words[0]).name.partition(":")[0] + line.partition("::")[2].partition(".")[0][:16]


def reference_folder(name: str, root: Path) -> Path:
    """Return the folder of the run without kills; a name of its own, unlike the data's."""
    return root / f"{name}-reference"


def reference(kind: Kind, name: str, root: Path) -> tuple[Any, float]:
    """Return the result of a run without kills, and its seconds; they are kept for later parts."""
    file = root / f"{name}.json"
    if not file.exists():
        folder, start = reference_folder(name, root), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        case = Case(kind, name, folder)
        command = case.start()
        case.wait(command, LIMIT_S)
        result = kind.result(folder) if name == "serve" else None
        seconds = time.monotonic() - start
        case.stop(command)
        if name != "serve":
            assert command.process.returncode == 0, command.output()
            result = kind.result(folder)
        problems = case.leftovers()
        assert not problems, problems
        file.write_text(json.dumps([result, seconds]))
    result, seconds = json.loads(file.read_text())
    return result, seconds


def run_case(name: str, root: Path, seed: int, limit: float) -> Row:
    """Kill a command at random moments until it is complete; compare its result."""
    kind, choose, row = KINDS[name], random.Random(f"{name} {seed}"), Row(name, seed)
    expected, seconds = reference(kind, name, root)
    folder = root / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    case = Case(kind, name, folder)
    command = case.start()
    while True:
        if row.kills.total() < MAX_KILLS and time.monotonic() < limit:
            case.wait(command, choose.uniform(0.0, seconds))
            if killed := case.kill(command, choose):
                row.kills[killed] += 1
                print(f"  {name}: killed {killed}", flush=True)
        else:
            case.wait(command, LIMIT_S)
        if not case.is_done(command):
            continue
        if command.process.poll() in (None, 0):
            break
        if "Traceback (most recent" in command.output():
            row.problems.append(f"a traceback in {command.log}")
        command.wait()
        assert case.attempts < 12, command.output()
        row.resumed += 1
        kind.prepare(folder)
        command = case.start(*kind.again)
    found = json.loads(json.dumps(kind.result(folder)))
    case.stop(command)
    row.is_equal = found == expected
    if not row.is_equal:
        row.problems.append(f"{folder}: the result differs")
    if name not in ("conversion", "preprocess", "evaluation", "serve"):
        numbers = Counter(line["step"] for line in rows(folder / "run"))
        row.lost = len(rows(reference_folder(name, root) / "run")) - len(numbers)
        row.repeated = sum(numbers.values()) - len(numbers)
    left = case.leftovers()
    row.leftovers = len(left)
    row.problems += left
    if not row.problems:
        shutil.rmtree(folder)
    return row


def table(entries: Iterable[Row]) -> str:
    """Return the sums of all cases by kind, with a line for each kind of killed process."""
    lines = ["kind          cases kills resumed equal lost repeated leftovers"]
    all_rows, kills = list(entries), Counter[str]()
    for name in (*KINDS, "all"):
        own = [row for row in all_rows if name in (row.kind, "all")]
        numbers = [len(own), sum(row.kills.total() for row in own), sum(r.resumed for r in own)]
        numbers += [sum(row.is_equal for row in own), sum(row.lost for row in own)]
        numbers += [sum(row.repeated for row in own), sum(row.leftovers for row in own)]
        widths = (5, 5, 7, 5, 4, 8, 9)
        cells = [f"{n:>{width}}" for n, width in zip(numbers, widths, strict=True)]
        lines.append(f"{name:<13} {' '.join(cells)}")
    for row in all_rows:
        kills.update(row.kills)
    lines += ["killed: " + ", ".join(f"{name} {count}" for name, count in kills.most_common())]
    lines += [f"{row.kind} (seed {row.seed}): {text}" for row in all_rows for text in row.problems]
    return "\n".join(lines)


def main() -> int:
    """Run cases until the time is over; return 1 if any case has a problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build") / "soak")
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS])
    options = parser.parse_args()
    limit, root = time.monotonic() + 60.0 * options.minutes, options.folder.absolute()
    root.mkdir(parents=True, exist_ok=True)
    write_inputs(root)
    file, seed = root / "table.jsonl", options.seed
    while time.monotonic() < limit:
        kinds = options.kinds or list(KINDS)
        random.Random(seed).shuffle(kinds)
        for name in kinds:
            if time.monotonic() >= limit:
                break
            print(f"{name} (seed {seed})", flush=True)
            row = run_case(name, root, seed, limit)
            with file.open("a") as stream:
                stream.write(json.dumps(vars(row)) + "\n")
        seed += 1
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    all_rows = [Row(**{**entry, "kills": Counter(entry["kills"])}) for entry in entries]
    print(table(all_rows))
    return int(any(row.problems for row in all_rows))


if __name__ == "__main__":
    sys.exit(main())
