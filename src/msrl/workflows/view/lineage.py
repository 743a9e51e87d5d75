"""Lineage of a run: its checkpoints, the model and data they come from, and their digests.

The digests are those that manifests record. They are combined and compared, and not computed again:
`msrl convert-ckpt inspect` and the checks of a training verify the files themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.files import read_text_within
from msrl.models.paths import MANIFEST
from msrl.tracking.run import CONFIG, DATA
from msrl.workflows.view.recorded import is_folder, recorded_values

_MAX_DEPTH = 8
_MAX_NODES = 5000
_MAX_BYTES = 256 << 20  # of the manifests of a run, which may name thousands of them
_MAX_DIGITS = 12  # of an iteration
Node = dict[str, Any]


def lineage(run_dir: Path, config: Mapping[str, Any]) -> list[Node]:
    """Return the checkpoints, models and data of a run, the newest first.

    A node has the keys depth, kind, path, digest and note. A model that another run trained is
    followed by the lineage of that run. Iterations of a folder are listed once, because the files
    of runs may name each other.
    """
    nodes = list(islice(_Lineage().run(run_dir, config, 0), _MAX_NODES + 1))
    if len(nodes) > _MAX_NODES:
        nodes[-1] = _node(0, "more", None, "", f"only the first {_MAX_NODES:,} are shown")
    return nodes


class _Lineage:
    """Walk through the files of runs and checkpoints, which remembers the folders it has seen."""

    def __init__(self) -> None:
        self._seen: set[Path] = set()
        self._bytes_left = _MAX_BYTES

    def run(self, run_dir: Path, config: Mapping[str, Any], depth: int) -> Iterator[Node]:
        """Yield the nodes of a run."""
        if depth > _MAX_DEPTH:
            return
        base = _working_folder(run_dir, config)
        saved = _value(config, "checkpoint", "save")
        checkpoints = base / saved if saved else run_dir / "checkpoints"
        yield from self._model(checkpoints, depth, "checkpoint")
        rows = self._json(run_dir / DATA)
        for key, name in _data_names(config):
            if isinstance(rows.get(name), dict):
                yield from self._row_nodes(name, rows[name], depth + 1, key)
            else:
                yield from self._data_nodes(base / name, depth + 1, key)
        for section, key in (("model", "path"), ("checkpoint", "load")):
            path = _value(config, section, key)
            if path:
                yield from self._ancestor(base / path, depth + 1)

    def _ancestor(self, folder: Path, depth: int) -> Iterator[Node]:
        """Yield the nodes of an initial model, and the nodes of the run that trained it."""
        run_dir = folder.parent
        config = _yaml(run_dir / CONFIG)
        if config and folder.name in ("checkpoints", "hf"):
            is_new = self._is_new(run_dir)
            note = "trained the initial model" if is_new else "see above"
            yield _node(depth, "run", run_dir, "", note)
            if is_new:
                yield from self.run(run_dir, config, depth + 1)
        else:
            yield from self._model(folder, depth, "initial model")

    def _model(self, folder: Path, depth: int, title: str) -> Iterator[Node]:
        manifest = self._json(folder / MANIFEST)
        if "iterations" in manifest and not self._is_new(folder):
            yield _node(depth, title, folder, "", "see above")
        elif "iterations" in manifest:
            for step, record in _iterations(manifest):
                digest, note = _digest(record.get("files")), _layout(record)
                yield _node(depth, title, folder / f"iter_{step:07d}", digest, note)
                source = record.get("source")
                if isinstance(source, str) and depth < _MAX_DEPTH:
                    yield from self._model(Path(source), depth + 1, "converted from")
        elif is_folder(folder):
            note = "Hugging Face folder" if (folder / "config.json").is_file() else ""
            yield _node(depth, title, folder, _digest(manifest.get("files")), note)
        else:
            yield _node(depth, title, folder, "", "not on this machine")

    def _row_nodes(
        self, name: str, source: Mapping[str, Any], depth: int, key: str
    ) -> Iterator[Node]:
        """Yield the rows that a run preprocessed, and their data in the cache."""
        settings = source.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        template = source.get("template")
        template = template.get("name") if isinstance(template, dict) else None
        note = f"rows, handler {settings.get('handler')}, template {template or 'none'}"
        yield _node(depth, key, Path(name), _digest(source.get("files")), note)
        yield from self._data_nodes(Path(str(source.get("prefix"))), depth + 1, "preprocessed")

    def _data_nodes(self, prefix: Path, depth: int, kind: str) -> Iterator[Node]:
        manifest = self._json(Path(f"{prefix}_manifest.json"))
        rows = manifest.get("num_rows")
        note = f"{rows} rows, handler {manifest.get('handler')}" if rows else "no manifest"
        note += f", chat template of {manifest['date']}" if manifest.get("date") else ""
        yield _node(depth, kind, prefix, _digest(manifest.get("files")), note)
        if manifest.get("tokenizer_hash"):
            digest = str(manifest["tokenizer_hash"])[:16]
            yield _node(depth + 1, "tokenizer", None, digest, "its vocabulary")

    def _json(self, path: Path) -> dict[str, Any]:
        """Return the object in a file; an empty one for other files, and beyond the limit."""
        try:
            # A configuration of others may name a device or a pipe.
            if not path.is_file() or path.stat().st_size > self._bytes_left:
                return {}
            self._bytes_left -= path.stat().st_size
            value = json.loads(read_text_within(path))
        except (MsrlError, OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _is_new(self, folder: Path) -> bool:
        """Return True for the first call with a folder."""
        path = folder.absolute()
        is_new = path not in self._seen
        self._seen.add(path)
        return is_new


def _iterations(manifest: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the readable records of iterations, the newest first."""
    records = manifest["iterations"]
    readable: dict[int, dict[str, Any]] = {}
    for name, record in records.items() if isinstance(records, dict) else ():
        if str(name).isdecimal() and len(str(name)) <= _MAX_DIGITS and isinstance(record, dict):
            readable[int(name)] = record
    return sorted(readable.items(), reverse=True)


def _data_names(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and name of all data of a run."""
    for key in ("train", "eval"):
        name = _value(config, "data", key)
        if name:
            yield f"data.{key}", name
    data = config.get("data")
    blend = data.get("blend") if isinstance(data, dict) else None
    for name in blend if isinstance(blend, dict) else ():
        yield "data.blend", str(name)


def _node(depth: int, kind: str, path: Path | None, digest: str, note: str) -> Node:
    name = "" if path is None else str(path)
    return {"depth": depth, "kind": kind, "path": name, "digest": digest, "note": note}


def _digest(files: object) -> str:
    """Return one digest of the recorded checksums of all files, or an empty string."""
    if not files:
        return ""
    text = json.dumps(files, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _layout(record: Mapping[str, Any]) -> str:
    layout = record.get("layout")
    layout = layout if isinstance(layout, dict) else {}
    sizes = [f"{name}={layout[name]}" for name in ("tp", "pp", "ep") if layout.get(name)]
    return ", ".join([*sizes, str(record.get("dtype", ""))])


def _working_folder(run_dir: Path, config: Mapping[str, Any]) -> Path:
    """Return the folder that relative paths of the configuration start from."""
    parent = Path(_value(config, "run", "dir") or "runs")
    if parent.is_absolute():
        return Path.cwd()
    absolute = run_dir.absolute()
    depth = len(parent.parts) + 1
    return absolute.parents[depth - 1] if depth <= len(absolute.parents) else Path.cwd()


def _value(config: Mapping[str, Any], section: str, key: str) -> str | None:
    values = config.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return value if isinstance(value, str) else None


def _yaml(path: Path) -> dict[str, Any]:
    try:
        return recorded_values(path)
    except MsrlError:
        return {}
