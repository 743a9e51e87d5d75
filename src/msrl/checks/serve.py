"""Checks of serve: model, adapters, address and API key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msrl.checks.inputs import check_folder, check_template, checkpoint_hint, path_hint
from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.http_requests import is_loopback
from msrl.models.paths import TRACKER, is_adapter_folder, is_hf, is_mcore
from msrl.rollout.server_access import KEY_VARIABLES, read_api_key


def check_serve(resolved: Resolved) -> Iterator[str]:
    serve = resolved.config.serve
    if serve.model is None:
        yield "serve.model: missing. Name a model: msrl serve MODEL."
    else:
        yield from _model(resolved, serve.model)
    yield from check_template(resolved, "serve.template")
    yield from _adapters(resolved)
    yield from _access(resolved)


def _model(resolved: Resolved, path: str) -> Iterator[str]:
    yield from check_folder(resolved, "serve.model")
    if Path(path).is_dir() and not (is_hf(path) or is_mcore(path) or is_adapter_folder(path)):
        yield resolved.mistake(
            "serve.model",
            f"contains neither config.json (Hugging Face) nor {TRACKER} (mcore) nor "
            f"adapter_config.json (LoRA){checkpoint_hint(path)}",
        )


def _adapters(resolved: Resolved) -> Iterator[str]:
    serve = resolved.config.serve
    names: set[str] = set()
    if serve.model is not None:
        names.add(serve.name or model_name(serve.model))
    for number, text in enumerate(serve.lora):
        key, (name, path) = f"serve.lora.{number}", split_adapter(text)
        if not Path(path).is_dir():
            yield resolved.mistake(key, f"folder not found{path_hint(path)}")
        elif not is_adapter_folder(path) and not is_mcore(path):
            yield resolved.mistake(
                key, f"is not an adapter: it contains neither adapter_config.json nor {TRACKER}"
            )
        if not name or name in names:
            problem = f"the name {name} occurs twice" if name else "the name is empty"
            yield resolved.mistake(key, f"{problem}. Write NAME=DIR.")
        names.add(name)


def split_adapter(text: str) -> tuple[str, str]:
    """Return name and folder of an entry of `serve.lora`.

    >>> split_adapter("math=runs/a"), split_adapter("runs/sft/checkpoints")
    (('math', 'runs/a'), ('sft', 'runs/sft/checkpoints'))
    """
    name, equals, path = text.partition("=")
    if equals and not Path(text).is_dir():
        return name, path
    return model_name(text), text


def model_name(path: str) -> str:
    """Return the name of a model in requests: of its folder, or of the run that it belongs to."""
    folder = Path(path).absolute()
    if folder.name in ("checkpoints", "hf") and folder.parent.name:
        return folder.parent.name
    return folder.name


def _access(resolved: Resolved) -> Iterator[str]:
    serve = resolved.config.serve
    try:
        key = read_api_key(serve.api_key_file)
    except MsrlError as error:
        yield (
            f"serve.api_key: {error}"
            if serve.api_key_file is None
            else resolved.mistake("serve.api_key_file", str(error))
        )
        return
    if key is None and not is_loopback(serve.host):
        yield resolved.mistake(
            "serve.host",
            "other machines may reach this address, which needs an API key. Set the environment "
            f"variable {KEY_VARIABLES[0]} or --api-key-file, or use 127.0.0.1.",
        )
