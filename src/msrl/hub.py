"""Models and datasets of a hub, by name: `ORG/NAME` or `ORG/NAME@REVISION`.

Files are downloaded to the hub's cache on this machine, and are used from there without a network.
The environment variable MSRL_HUB selects the hub: `hf` (the default, package huggingface_hub),
`modelscope` (package modelscope), or `none`. The variables of these packages apply, such as
HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msrl.errors import MsrlError

Content = Literal["metadata", "weights", "dataset"]

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")
_METADATA = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_SAFETENSORS = "*.safetensors"
_IGNORED = ("*/*", "consolidated*")  # weights in another format than transformers reads


@dataclass(frozen=True, slots=True)
class HubName:
    """Name of a model or dataset, with a branch, tag or commit if the user set one."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Downloaded files of one revision, which is a commit if the hub returns it."""

    folder: Path
    name: HubName


def parse_name(text: str) -> HubName | None:
    """Return the name that a text may be, or None for a path.

    A text without a revision is a path if its file or parent folder exists on this machine.
    """
    match = _NAME.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    if match[2] is None and Path(text).parent.exists():
        return None
    return HubName(match[1], match[2])


def selected_hub() -> str:
    """Return the hub of MSRL_HUB.

    Raises:
        MsrlError: The value is unknown.
    """
    hub = os.environ.get("MSRL_HUB") or "hf"
    if hub not in ("hf", "modelscope", "none"):
        raise MsrlError(f"MSRL_HUB={hub}: must be hf, modelscope or none")
    return hub


def download(name: HubName, content: Content, patterns: Sequence[str] = ()) -> Snapshot:
    """Return a snapshot with the required files; download those that the cache lacks.

    Args:
        name: model or dataset.
        content: `metadata` for the configuration and tokenizer of a model, `weights` for these and
            its weights, `dataset` for the files of a dataset that match `patterns`.
        patterns: patterns of the paths of a dataset's files.

    Raises:
        MsrlError: The hub does not have the files, refuses them or cannot be reached.
    """
    hub = selected_hub()
    if hub == "none":
        raise MsrlError(
            "folder not found, and MSRL_HUB=none allows no hub. Set the path of a folder."
        )
    fetch = _fetch_hf if hub == "hf" else _fetch_modelscope
    if content == "dataset":
        return fetch(name, "dataset", tuple(patterns), ())
    if content == "metadata":
        return fetch(name, "model", _METADATA, _IGNORED)
    snapshot = fetch(name, "model", (*_METADATA, _SAFETENSORS), _IGNORED)
    if any(snapshot.folder.glob(_SAFETENSORS)):
        return snapshot
    return fetch(name, "model", (*_METADATA, "*.bin"), _IGNORED)


def is_without_weights(folder: Path) -> bool:
    """Return True for a snapshot of a model whose weights have not been downloaded."""
    return folder.parent.name == "snapshots" and not any(
        path for pattern in (_SAFETENSORS, "*.bin") for path in folder.glob(pattern)
    )


def _fetch_hf(
    name: HubName, kind: str, allowed: tuple[str, ...], ignored: tuple[str, ...]
) -> Snapshot:
    package = _package("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        folder = package.snapshot_download(
            name.repository,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=list(allowed),
            ignore_patterns=list(ignored),
        )
    except errors.GatedRepoError as error:
        raise MsrlError(
            "the hub requires permission. Accept the terms on the page of the model, and log in "
            "with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise MsrlError(
            f"neither a folder nor a public {kind} of the hub. Check the name; for a private one, "
            "set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise MsrlError(f"the hub has no revision {name.revision} of it") from error
    except errors.LocalEntryNotFoundError as error:
        variables = "HF_ENDPOINT to a mirror, or MSRL_HUB to modelscope"
        raise _unreachable(name, variables, error) from error
    except Exception as error:
        raise _download_error(name, error) from error
    return Snapshot(Path(folder), HubName(name.repository, Path(folder).name))


def _fetch_modelscope(
    name: HubName, kind: str, allowed: tuple[str, ...], ignored: tuple[str, ...]
) -> Snapshot:
    package = _package("modelscope")
    fetch: Callable[..., str] = package.snapshot_download
    if kind == "dataset":
        fetch = package.dataset_snapshot_download
    revision = name.revision or "master"
    try:
        folder = fetch(
            name.repository,
            revision=revision,
            allow_patterns=list(allowed),
            ignore_patterns=list(ignored),
        )
    except OSError as error:
        raise _unreachable(name, "or MODELSCOPE_DOMAIN to a mirror", error) from error
    except Exception as error:
        raise _download_error(name, error) from error
    return Snapshot(Path(folder), HubName(name.repository, revision))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MsrlError(
            f"folder not found, and downloading it requires the package {name}. Install it with "
            f"`pip install {name}`, or set the path of a folder."
        ) from error


def _unreachable(name: HubName, variables: str, error: Exception) -> MsrlError:
    text = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
    return MsrlError(
        f"folder not found, and not all files of {name.repository} are in the cache of the hub, "
        f"which cannot be reached ({text}). Set the path of a folder, {variables}."
    )


def _download_error(name: HubName, error: Exception) -> MsrlError:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return MsrlError(f"{name.repository} cannot be downloaded: {type(error).__name__}: {text}")
