"""MindSpeed-LLM's converter as a program on a CPU without Megatron, MindSpeed and torch_npu.

The sources are not part of this project: `checkout` locates them. As a script, this file imports
the converter once and reads lines of arguments of MindSpeed-LLM's convert_ckpt_v2.py as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import checkouts
from support import python_path

TIME_LIMIT_S = 300


def checkout() -> Path:
    """Return the checkout of MindSpeed-LLM, or skip the test."""
    return checkouts.checkout("MindSpeed-LLM", "mindspeed_llm/tasks/checkpoint/convert_mg2hf.py")


def convert(root: Path, *arguments: str) -> None:
    """Run MindSpeed-LLM's converter in another process."""
    server = _server(root)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(arguments) + "\n")
    server.stdin.flush()
    reply = json.loads(server.stdout.readline())
    assert reply["code"] == 0, reply["output"][-3000:]


@cache
def _server(root: Path) -> subprocess.Popen[str]:
    """Start the process that imports the converter once. It ends when its input is closed."""
    command = [sys.executable, __file__, str(root)]
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env
    )


def _serve(root: Path) -> None:
    """Run the converter in a fork of this process for each line of arguments."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = _import_converter(root)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            pid = os.fork()
            if not pid:
                _run_and_exit(module, json.loads(line), output.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            print(json.dumps({"code": code, "output": output.read()}), file=replies, flush=True)


def _run_and_exit(module: Any, arguments: list[str], output: int) -> NoReturn:
    """Run the converter with its output in a file, and end this process."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(TIME_LIMIT_S)
    code = 0
    try:
        _run(module, arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _import_converter(root: Path) -> Any:
    """Import the converter with empty stand-ins for modules that it never calls here.

    `mindspeed_llm/__init__.py` patches Megatron only for the backend `mcore`, and
    `training/utils.py` imports the accelerator's libraries.
    """
    os.environ["TRAINING_BACKEND"] = "none"
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    for name in ("mindspeed_llm.training", "mindspeed_llm.training.utils"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["mindspeed_llm.training.utils"])["auto_coverage"] = lambda function: function

    import torch

    torch.Tensor.npu = lambda self: self  # type: ignore[attr-defined]
    return importlib.import_module("convert_ckpt_v2")


def _run(module: Any, arguments: list[str]) -> None:
    """Run the converter.

    The program offers fewer model types than its model_cfg.json describes: mixtral is missing.
    """
    model_type = arguments[arguments.index("--model-type-hf") + 1]
    offered = ["qwen3" if word == model_type else word for word in arguments]
    with mock.patch.object(sys, "argv", ["convert_ckpt_v2.py", *offered]):
        options = module.get_args()
    options.model_type_hf = model_type
    is_to_hf = options.load_model_type == "mg"
    (module.Mg2HfConvert if is_to_hf else module.Hf2MgConvert)(options).run()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
