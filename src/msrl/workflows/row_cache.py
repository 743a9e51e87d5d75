"""Cache of the rows that trainings preprocess: `data.train: rows.jsonl` instead of a prefix.

An entry is a folder with the files of `msrl preprocess` and `source.json`, which lists all that the
tokens depend on: the data files, the tokenizer, the template, a handler of the user, the
settings, and the code that reads and renders rows. The name of the folder is the digest of this
list. Entries appear atomically and are verified before use. The environment variable
MSRL_DATA_CACHE selects the folder of the cache; by default it is `msrl/data` in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msrl.data
import msrl.reasoning_tasks
import msrl.thoughts
import msrl.vision
from msrl.checksums import file_crc32
from msrl.config.schema import PreprocessConfig
from msrl.data.files.location import names_rows
from msrl.data.files.readers import DataFile, find_files
from msrl.data.images.load import FileState, changed_file
from msrl.data.integrity import refuse_damaged
from msrl.data.manifest import TEXTS, manifest_path, read_manifest
from msrl.data.rows.own_handler import imported_names
from msrl.data.templates.files import load_template
from msrl.errors import ManyErrors, MsrlError
from msrl.files import take_lock, why_not_writable, write_text
from msrl.limits import print_note
from msrl.models.paths import config_dir
from msrl.plan.derived import data_kind
from msrl.plan.run_plan import DatasetPlan, RunPlan
from msrl.registry import task_package
from msrl.registry.own import is_own
from msrl.temporary import owned_folder
from msrl.tracking.progress import Progress, progress
from msrl.tracking.run import stack_versions
from msrl.workflows import preprocess
from msrl.workflows.row_images import is_vision_folder
from msrl.workflows.training.integrity import SHOWN_BYTES

_SOURCE = "source.json"
_NOTES = "notes.json"  # lines on rows and columns that were not read; checksum of the manifest
_DATA = "rows"  # name of the data in an entry
_ENTRY = "{entry}"  # the folder of the entry in its notes
_PACKAGES = ("msrl", "tokenizers", "transformers")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*_templates/*.jinja")
# Settings that change no token. All others are part of the digest.
_IRRELEVANT = {"input", "tokenizer", "template", "output_prefix", "workers", "overwrite", "show"}
_BLOCK_BYTES = 1 << 20
_VARIABLE = "MSRL_DATA_CACHE"
_POLL_S = 0.2


@contextlib.contextmanager
def prepare_rows(plan: RunPlan, *, keep: bool) -> Generator[RunPlan]:
    """Provide the plan with preprocessed data in place of rows.

    The data is in the cache. Without `keep`, data that the cache lacks is temporary instead, and
    nothing is written to the cache. Errors in the block name the rows, not the files of the cache.

    Raises:
        MsrlError: Rows or settings are not valid.
    """
    used = [plan.data.eval] if plan.command == "eval" else [*plan.datasets]
    names = [name for name in used if name is not None and names_rows(name)]
    if not names:
        yield plan
        return
    with contextlib.ExitStack() as stack:
        temporary = None if keep else stack.enter_context(owned_folder("msrl-rows-"))
        datasets: dict[str, DatasetPlan] = {}
        stack.enter_context(_user_names(plan, datasets))
        for number, name in enumerate(names):
            folder = None if temporary is None else temporary / str(number)
            datasets[name] = _dataset(plan, name, folder)
        ready = plan.with_datasets(datasets)
        yield _with_prefix(ready) if plan.command == "eval" else ready


def _with_prefix(plan: RunPlan) -> RunPlan:
    """Return the plan of an evaluation whose data.eval is the prefix of the preprocessed rows."""
    config, name = plan.config, str(plan.data.eval)
    data = config.data.model_copy(update={"eval": plan.prefix(name)})
    references = {**config.references, "data.eval": plan.shown_name(name)}
    changed = config.model_copy(update={"data": data}).with_references(references)
    return replace(plan, config=changed)


def row_settings(plan: RunPlan, name: str) -> PreprocessConfig:
    """Return the settings of the section `preprocess` with the defaults for rows of this run."""
    section, kind = plan.config.preprocess, data_kind(plan.config, plan.command)
    template = None if kind in TEXTS else (plan.config.model.template or "native")
    default = "auto" if kind in ("sft", "prompts") else kind
    options = dict(section.options)
    if kind == "steps":
        options.setdefault("reward_tokens", list(plan.config.algo.reward_model.reward_tokens))
    defaults = {
        "input": (name,),
        "split": section.split if Path(name).is_dir() else None,
        "kind": kind,
        "handler": section.handler or task_package(name) or default,
        "template": section.template or template,
        "tokenizer": section.tokenizer or str(_tokenizer_folder(plan)),
        "options": options,
    }
    return section.model_copy(update=defaults)


def _tokenizer_folder(plan: RunPlan) -> Path:
    """Return the folder of the tokenizer. An evaluation may have no model but its checkpoints."""
    config = plan.config
    if plan.policy is None and config.model.tokenizer is None and config.evaluate.models:
        from msrl.workflows.evaluate.checkpoints import find_checkpoints, model_folder

        return config_dir(str(model_folder(find_checkpoints(config.evaluate.models)[0])))
    return plan.tokenizer_dir


def _dataset(plan: RunPlan, name: str, temporary: Path | None) -> DatasetPlan:
    """Return the preprocessed rows: cached rows, or new ones.

    New ones are in the folder `temporary`, or else in the cache.
    """
    start, settings = time.perf_counter(), row_settings(plan, name)
    files = find_files(settings.input, settings.split)
    states = [_state(file) for file in files]
    source = _source(settings, files)
    digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:32]
    root = _cache_folder()
    entry = root / digest
    with contextlib.nullcontext() if temporary else _lock_entry(root, digest):
        problem = _damage(entry)
        if problem is not None:
            if entry.is_dir():
                print_note(f"{name}: preprocessed again: {problem}")
            entry = temporary or entry
            with owned_folder("msrl-rows-", None if temporary else str(root)) as folder:
                _write(folder / digest, settings, source)
                if [_state(file) for file in files] != states:
                    problem = "has changed while it was read. Start again."
                    raise MsrlError(f"preprocess.input={name}: {problem}")
                _publish(folder / digest, entry, folder / "damaged")
    prefix = str(entry / _DATA)
    manifest = read_manifest(prefix)
    assert manifest is not None
    for line in _notes(entry, is_kept=entry != temporary):
        print_note(line)
    ending = "; from the cache" if problem is None else ""
    line = preprocess.summary(plan.shown_name(name), manifest, time.perf_counter() - start)
    print_note(f"{line}{ending}")
    paths = {
        "prefix": prefix,
        "inputs": [str(file.absolute()) if isinstance(file, Path) else file.name for file in files],
        "tokenizer_dir": str(Path(str(settings.tokenizer)).absolute()),
    }
    return DatasetPlan(prefix, manifest, source={**paths, **source})


def _source(settings: PreprocessConfig, files: tuple[DataFile, ...]) -> dict[str, Any]:
    """Return all that the tokens of rows depend on."""
    own = str(settings.handler).rpartition(":")[0] if is_own(str(settings.handler)) else None
    template = None if settings.template is None else asdict(load_template(settings.template))
    values = settings.model_dump(mode="json", exclude=_IRRELEVANT)
    versions = stack_versions()
    return {
        "files": [_identity(file) for file in files],
        "tokenizer": _tokenizer_files(Path(str(settings.tokenizer))),
        "template": template,
        "handler_files": [] if own is None else [_sha256(file) for file in _own_files(Path(own))],
        "settings": values,
        "code": _code_digest(),
        "packages": {name: versions[name] for name in _PACKAGES if name in versions},
        **_image_source(settings, files),
    }


def _identity(file: DataFile) -> Any:
    """Return what the rows of a file or a task depend on."""
    if not isinstance(file, Path):
        return file.identity
    return ["".join(file.suffixes[-2:]), _sha256(file)]  # readers recognize formats by suffixes


def _image_source(settings: PreprocessConfig, files: tuple[DataFile, ...]) -> dict[str, Any]:
    """Return what the images of rows depend on, if the model may read images.

    Relative paths of images begin in the folder of their data file. An entry names the files of its
    images itself.
    """
    if not is_vision_folder(str(settings.tokenizer)):
        return {}
    folders = [str(file.parent.absolute()) for file in files if isinstance(file, Path)]
    return {"image_folders": folders, "pillow": version("pillow"), "vision": _vision_digest()}


def _own_files(handler: Path) -> list[Path]:
    """Return the file of a handler and its folder's files that it imports, in a fixed order."""
    files, pending = list[Path](), [handler]
    while pending:
        file = pending.pop()
        if file in files or not file.is_file():
            continue
        files.append(file)
        names = imported_names(file)
        paths = [handler.parent.joinpath(*name.split(".")) for name in sorted(names)]
        pending += [path.with_suffix(".py") for path in paths]
        pending += [path / "__init__.py" for path in paths]
    return files


def _tokenizer_files(folder: Path) -> dict[str, str]:
    """Return the digests of the files that define a tokenizer and its chat template."""
    paths = {path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}
    names = {str(path.relative_to(folder)): path for path in paths if path.is_file()}
    return {name: _sha256(names[name]) for name in sorted(names) if ".index." not in name}


@cache
def _code_digest() -> str:
    """Return the digest of the code that reads, renders and writes data."""
    folder = Path(str(msrl.data.__file__)).parent
    others = (msrl.reasoning_tasks, msrl.thoughts)
    return _digest([*folder.rglob("*.py"), *(Path(str(module.__file__)) for module in others)])


@cache
def _vision_digest() -> str:
    """Return the digest of the code that computes sizes of images."""
    return _digest([*Path(str(msrl.vision.__file__)).parent.glob("*.py")])


def _digest(files: Iterable[Path]) -> str:
    """Return the digest of files of code."""
    digests = [f"{path.name} {_sha256(path)}" for path in files]
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def _sha256(path: Path) -> str:
    """Return the digest of a file."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_reading(path, size)) if size >= SHOWN_BYTES else None
        file = stack.enter_context(path.open("rb"))
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            if bar is not None:
                bar.advance(len(block))
    return digest.hexdigest()


def _reading(path: Path, size: int) -> contextlib.AbstractContextManager[Progress]:
    return progress(f"reading {path}", total=size, unit="B")


def _state(path: DataFile) -> tuple[int, ...]:
    """Return numbers of which one differs after a change; `utime` cannot set the last one."""
    if not isinstance(path, Path):
        return ()
    status = path.stat()
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _cache_folder() -> Path:
    """Return the folder of the cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(_VARIABLE) or Path(home, "msrl", "data")).absolute()


@contextlib.contextmanager
def _lock_entry(root: Path, digest: str) -> Generator[None]:
    """Hold the lock of an entry: of two runs, one preprocesses and the other one waits for it.

    Raises:
        MsrlError: The cache is not writable.
    """
    reason = why_not_writable(root)
    if reason is not None:
        raise MsrlError(
            f"{_VARIABLE}={root}: the cache of preprocessed rows cannot be written ({reason}). Set "
            f"{_VARIABLE} to another folder."
        )
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{digest}.lock").open("w") as lock:
        is_waiting = False
        while not take_lock(lock):
            if not is_waiting:
                print_note("waiting for another run that preprocesses the same rows")
            is_waiting = True
            time.sleep(_POLL_S)
        yield


def _damage(entry: Path) -> str | None:
    """Return why an entry cannot be used, or None if it is complete and intact."""
    try:
        manifest = read_manifest(str(entry / _DATA))
        if manifest is None or not manifest.files:
            return f"{entry} is incomplete"
        if _read_notes(entry)["manifest"] != file_crc32(manifest_path(str(entry / _DATA))):
            return f"{entry} is damaged: its manifest differs from its checksum"
        refuse_damaged(str(entry / _DATA), manifest)
        files = _read_notes(entry).get("image_files", {})
        if path := changed_file({path: FileState(*state) for path, state in files.items()}):
            return f"{path} has changed"
    except (MsrlError, OSError, ValueError, TypeError, KeyError) as error:
        return f"{entry} is damaged: {str(error).splitlines()[0]}"
    return None


def _write(folder: Path, settings: PreprocessConfig, source: Mapping[str, Any]) -> None:
    """Write an entry to a new folder."""
    folder.mkdir()
    written = preprocess.write(settings, str(folder / _DATA))
    notes = {
        "lines": [line.replace(str(folder), _ENTRY) for line in written.notes],
        "image_files": written.image_files,
        "manifest": file_crc32(manifest_path(str(folder / _DATA))),
    }
    for name, value in ((_SOURCE, source), (_NOTES, notes)):
        text = json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True)
        write_text(folder / name, f"{text}\n")


def _notes(entry: Path, *, is_kept: bool) -> list[str]:
    """Return the lines on what was not read, without those on files if these are not kept."""
    lines: list[str] = _read_notes(entry)["lines"]
    return [line.replace(_ENTRY, str(entry)) for line in lines if is_kept or _ENTRY not in line]


def _read_notes(entry: Path) -> dict[str, Any]:
    return json.loads((entry / _NOTES).read_text(encoding="utf-8"))


def _publish(new: Path, entry: Path, old: Path) -> None:
    """Move a written entry to its place, and the damaged one that is there to `old`."""
    if entry.is_dir():
        entry.rename(old)
    new.rename(entry)


@contextlib.contextmanager
def _user_names(plan: RunPlan, datasets: Mapping[str, DatasetPlan]) -> Generator[None]:
    """Name rows as the user does in errors of the block: by key and name, not by files."""
    try:
        yield
    except MsrlError as error:
        names = _texts(plan, datasets)
        if isinstance(error, ManyErrors):
            raise ManyErrors([_replace_names(line, names) for line in error.messages]) from error
        error.args = (_replace_names(str(error), names), *error.args[1:])
        raise


def _texts(plan: RunPlan, datasets: Mapping[str, DatasetPlan]) -> dict[str, str]:
    """Return texts in messages and those that users understand instead."""
    data, texts = plan.data, dict[str, str]()
    for name in plan.datasets:
        key = "data.train" if name == data.train else "data.eval"
        shown = plan.shown_name(name)
        key = f"data.blend.{name}" if name in data.blend else f"{key}={shown}"
        texts[f"preprocess.input={name}"] = key
    for name, dataset in datasets.items():
        shown = plan.shown_name(name)
        texts |= {f"data prefix {dataset.prefix}": shown, dataset.prefix: shown}
    return texts


def _replace_names(text: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        text = text.replace(old, new)
    return text
