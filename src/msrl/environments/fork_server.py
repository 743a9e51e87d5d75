"""Process that forks one process per episode, started as `python -m msrl.environments.fork_server`.

It loads all environments once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from msrl import registry
from msrl.environments.base import EnvironmentSource
from msrl.environments.episode_process import EpisodeSetup, Factory, serve_episode
from msrl.environments.tools import prepare_tools, tool_format
from msrl.errors import MsrlError
from msrl.http_requests import without_loopback_proxy
from msrl.processes.fork_server import ForkServer
from msrl.processes.messages import MAX_DETAIL_BYTES, READY, error_frame, frame, read
from msrl.processes.parent import leave_signals_to_parent
from msrl.user_files import NotLoadedError, load_function


def main() -> None:
    """Load the environments, then fork and reap the processes of episodes."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    leave_signals_to_parent()
    setup: EpisodeSetup = read(source)
    sys.path[:] = setup.path
    os.environ.update(without_loopback_proxy(os.environ))
    try:
        factories = {name: _load(name, source) for name, source in setup.sources.items()}
        if setup.tool_format:
            tool_format(setup.tool_format)
    except (NotLoadedError, MsrlError) as error:
        sink.write(error_frame(str(error)))
        return
    sink.write(frame(READY))
    gc.freeze()  # pages that collections do not write stay shared with the forks
    with socket.socket(fileno=setup.control_fd) as control:
        run = partial(serve_episode, factories=factories, setup=setup)
        ForkServer(control, run, sink.fileno()).serve()


def _load(name: str, source: EnvironmentSource) -> Factory:
    """Return the constructor of an environment with its options, after `prepare` of its module.

    Raises:
        NotLoadedError: A user's file cannot be executed, or the options do not fit.
    """
    target, module = _target(name, source)
    try:
        constructor = target.__init__ if isinstance(target, type) else target
        key = f"environment.{name}.options"
        registry.check_options(constructor, source.options, key=key, with_required=True)
        prepare: Callable[..., None] | None = getattr(module, "prepare", None)
        if prepare is not None:
            prepare(**source.options)
        if not source.path:  # the constructors of built-in environments check their options
            prepare_tools(type(target(**source.options)))
        elif isinstance(target, type):
            prepare_tools(target)
    except Exception as error:
        if isinstance(error, MsrlError):
            raise NotLoadedError(str(error)) from error
        detail = traceback.format_exc(limit=-2)[-MAX_DETAIL_BYTES:]
        raise NotLoadedError(f"environment {name}: cannot be prepared: {detail}") from error
    return partial(target, **source.options)


def _target(name: str, source: EnvironmentSource) -> tuple[Callable[..., Any], object]:
    """Return the callable that creates an environment, and its module."""
    if not source.path:
        module = importlib.import_module(f"{registry.ENVIRONMENTS}.{source.name}")
        return module.environment, module
    file, _, attribute = source.path.rpartition(":")
    module_name = f"msrl_environment_{name}"
    target = load_function(file, module_name, attribute)
    return target, sys.modules[module_name]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
