"""Files and folders have their final names only when they are complete.

Each writer is killed (SIGKILL) before every operation on the file system, and meets a full disk.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from msrl import temporary
from msrl.checkpoint.atomic_folder import staged_folder
from msrl.data.manifest import incomplete_path, read_manifest
from msrl.errors import MsrlError
from msrl.files import write_text
from msrl.tracking.metrics import MetricsWriter, read_metrics
from msrl.tracking.report import summarize, write_report
from msrl.tracking.rollouts import read_records, write_records
from msrl.tracking.run import RunFolder, read_attempts
from msrl.trainer.guard import GradientGuard
from msrl.types import StepReport
from msrl.workflows.evaluate.results import Result, ResultFolder
from msrl.workflows.preference import reference
from msrl.workflows.serve.answers import open_output
from msrl.workflows.training import export
from msrl.workflows.view import build
from test_preprocess import preprocess
from test_train_from_rows import CHAT, plan, prefix_of
from tiny_qwen2 import save_model
from view_runs import make_run, record

BAD_ROW = {"messages": "none"}
# Outside of the full tables: a folder that is renamed, a file that grows, and files of each kind.
USUAL = (
    "metrics of a resumed run",
    "configuration and attempts of a run",
    "rollouts",
    "exported model",
    "conversion",
)
SLOW = ("preprocessed data and its bad rows", "cache of rows", "folder of a view")
OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"}


@dataclass(frozen=True)
class Writer:
    """Writer of a result. `read` returns the result as a reader sees it, None if it has no name."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda folder: None


def contents(folder: Path, pattern: str = "*") -> dict[str, bytes] | None:
    """Return the contents of the files that a reader sees; None without any."""
    files = [path for path in sorted(folder.rglob(pattern)) if path.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name[0] != "."} or None


def _log(folder: Path) -> None:
    with MetricsWriter(folder) as metrics:
        for step in (1, 2, 3):
            metrics.log(StepReport(step, {"loss": 1.0}, {}))


def _run(folder: Path, changed: bool = True) -> None:
    config = {"run": {"name": "r"}, "changed": changed}
    run = RunFolder.create(folder, "r", config=config, resume=True, argv=["msrl"])
    run.record_end("completed", 3)
    run.close()


def _read_run(folder: Path) -> object:
    outcomes = [row.get("outcome") for row in read_attempts(folder / "r")]
    assert {*outcomes} <= {"completed", None} and len(outcomes) <= 3
    return yaml.safe_load((folder / "r" / "config.yaml").read_text())


def _rows(folder: Path) -> list[str]:
    rows = [*CHAT, BAD_ROW]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [str(folder / "rows.jsonl")]


def _preprocess(folder: Path, number: int = 2) -> None:
    options = {"on_bad_row": "drop", "overwrite": True, "seq_length": 32 * number}
    options |= {"tokenizer": str(folder.parent / "model"), "template": "native"}
    preprocess(folder / "out" / "d", input=_rows(folder), handler="auto", **options)


def _read_data(folder: Path) -> object:
    prefix = str(folder / "out" / "d")
    try:
        manifest = read_manifest(prefix)
    except MsrlError:
        assert incomplete_path(prefix).exists()
        return None
    files = sorted((folder / "out").glob("d_*"))
    return {path.name: path.read_bytes() for path in files} if manifest else None


def _cache_entry(folder: Path) -> object:
    os.environ["MSRL_DATA_CACHE"] = str(folder / "cache")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in CHAT))
    return prefix_of(plan(folder.parent / "model", folder / "rows.jsonl"))


def _read_cache(folder: Path) -> object:
    entries = [e for e in (folder / "cache").glob("*") if e.is_dir() and e.name[:5] != "msrl-"]
    assert len(entries) <= 1
    return len(contents(entries[0]) or ()) if entries else None


def _view(folder: Path) -> None:
    build.View([folder / "run"], folder / "view").update()


def _read_view(folder: Path) -> object:
    return contents(folder / "view") if (folder / "view" / "index.html").exists() else None


def _evaluate(folder: Path) -> None:
    results = ResultFolder(folder / "eval", {"n": 1}, overwrite=False)
    scores = {"pass@1": 1.0}
    result = Result("a", "s", ".", 1, "d", 1, 1, scores, {}, 0.0, "samples/a.jsonl")
    results.add(result, [{"response": "text"}])


def _read_results(folder: Path) -> object:
    results = ResultFolder(folder / "eval", {"n": 1}, overwrite=False).results
    return [(r.label, (folder / "eval" / r.samples).read_text()) for r in results]


def _answer(folder: Path) -> None:
    with open_output(folder / "answers.jsonl") as write:
        for number in range(3):
            write(f"{number}\n")


def _old_export(folder: Path) -> None:
    (folder / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "hf" / name).write_text("old")


def _export(folder: Path) -> None:
    with export._replacing(folder / "hf") as fresh:
        _convert(fresh)


def _convert(target: Path) -> None:
    with staged_folder(target) as staged:
        (staged / "sub").mkdir()
        for name in ("config.json", "model.safetensors", "sub/file"):
            (staged / name).write_text("new")


def _segments(folder: Path) -> None:
    temporary.list_segments(folder, [], set())


WRITERS = {
    "metrics of a resumed run": Writer(
        lambda folder: MetricsWriter(folder, resumed_step=2).close(),
        lambda folder: [report.step for report in read_metrics(folder)],
        _log,
    ),
    "configuration and attempts of a run": Writer(
        _run, _read_run, lambda folder: _run(folder, changed=False)
    ),
    "report": Writer(
        lambda folder: write_report(folder, summarize([StepReport(1, {"loss": 1.0}, {})])),
        lambda folder: contents(folder, "report.md"),
    ),
    "imported configuration": Writer(
        lambda folder: write_text(folder / "new.yaml", "a: 1\nb: 2\n"), contents
    ),
    "preprocessed data and its bad rows": Writer(
        _preprocess, _read_data, lambda folder: _preprocess(folder, 1)
    ),
    "cache of rows": Writer(_cache_entry, _read_cache),
    "folder of a view": Writer(
        _view, _read_view, lambda folder: (make_run(folder / "run", num_steps=1), _view(folder))
    ),
    "rollouts": Writer(
        lambda folder: write_records(folder / "s.parquet", [record(1, 0, 0, "text")]),
        lambda folder: [len(read_records(path)) for path in folder.glob("*.parquet")],
    ),
    "results of evaluations": Writer(_evaluate, _read_results),
    "answers": Writer(_answer, lambda folder: contents(folder, "answers.jsonl")),
    "exported model": Writer(_export, lambda folder: contents(folder / "hf"), _old_export),
    "conversion": Writer(
        lambda folder: _convert(folder / "new"), lambda folder: contents(folder / "new")
    ),
    "log-probabilities of a reference": Writer(
        lambda folder: reference._write(folder / "reference.npz", {"a": np.ones((2, 2))}),
        lambda folder: [np.load(path)["logprobs_0"].sum() for path in folder.glob("*.npz")],
    ),
    "batch without a finite gradient": Writer(
        lambda folder: GradientGuard(1, folder / "batch", 0)._write([]),
        lambda folder: [len(np.load(path)) for path in folder.rglob("*.npz")],
    ),
    "list of shared memory": Writer(
        _segments, lambda folder: [json.loads(p.read_text()) for p in folder.glob("s*.json")]
    ),
}


def in_child(write: Callable[[Path], object], folder: Path, prepare: Callable[[], None]) -> int:
    """Write in a forked process after `prepare`; return its exit code, 3 after an error."""
    pid = os.fork()
    if not pid:
        code = 4
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.dont_write_bytecode = True  # a limit on files would cut it
            prepare()
            write(folder)
            code = 0
        except (MsrlError, OSError):
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_before(number: int) -> None:
    """Kill this process before an operation on the file system that changes it."""
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        is_write = event in OPERATIONS and (event != "open" or _is_writing(arguments))
        left -= is_write
        if is_write and not left:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _is_writing(arguments: tuple[Any, ...]) -> bool:
    path, mode, flags = arguments
    if mode is None:
        return bool(flags & (os.O_WRONLY | os.O_RDWR))
    return path != os.devnull and any(letter in mode for letter in "wax+")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in WRITERS],
)
@pytest.mark.slow
def test_a_killed_writer_leaves_a_complete_result_or_none(name: str, tmp_path: Path):
    if name in SLOW[:2]:
        save_model(tmp_path / "model", tied=True, positions=128)
    writer, number, folder = WRITERS[name], 0, tmp_path / "case"
    folder.mkdir()
    writer.prepare(folder)
    before = writer.read(folder)
    writer.write(folder)
    complete = writer.read(folder)
    while True:
        number += 1
        shutil.rmtree(folder)
        folder.mkdir()
        writer.prepare(folder)
        code = in_child(writer.write, folder, lambda number=number: kill_before(number))
        assert writer.read(folder) in (before, complete, None), number
        if code == 0:
            break
        assert code == -signal.SIGKILL
        writer.write(folder)
        assert writer.read(folder) == complete, number
        assert not list((folder / "r").rglob("*.part")), "a run removes what killed ones left"
    assert number > 2


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [name for name in WRITERS if name not in SLOW])
@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_full_disk_leaves_the_earlier_result_or_none(name: str, num_bytes: int, tmp_path: Path):
    writer, folder = WRITERS[name], tmp_path / "case"
    folder.mkdir()
    writer.prepare(folder)
    before, names = writer.read(folder), {*folder.rglob("*")}
    limits = (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    code = in_child(writer.write, folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    assert code == 3
    assert writer.read(folder) in (before, None)
    new = {path.name for path in {*folder.rglob("*")} - names if path.is_file()}
    assert not [name for name in new if name[0] == "." and name not in (".lock", ".msrl-view")]


def test_a_link_in_place_of_an_unfinished_export_is_not_followed(tmp_path: Path):
    """A run folder of others may have one to any folder."""
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("hf.new", "hf.old"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "other")
    _export(tmp_path / "run")
    assert not list((tmp_path / "other").iterdir())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["hf"]
