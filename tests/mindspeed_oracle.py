"""MindSpeed-LLM's converter as a program on a CPU without Megatron, MindSpeed and torch_npu.

The sources are not part of this project: `checkout` locates them. Run as a script:
`mindspeed_oracle.py CHECKOUT ARGUMENTS`, with the arguments of MindSpeed-LLM's convert_ckpt_v2.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest

CONVERTER = Path("mindspeed_llm", "tasks", "checkpoint", "convert_mg2hf.py")


def checkout() -> Path:
    """Return the checkout of MindSpeed-LLM (MSRL_MINDSPEED_LLM, or ../MindSpeed-LLM), or skip the
    test.
    """
    root = Path(
        os.environ.get("MSRL_MINDSPEED_LLM", Path(__file__).resolve().parents[2] / "MindSpeed-LLM")
    )
    if not (root / CONVERTER).is_file():
        pytest.skip(f"no checkout of MindSpeed-LLM at {root} (set MSRL_MINDSPEED_LLM)")
    return root


def convert(root: Path, *arguments: str) -> None:
    """Run MindSpeed-LLM's converter in another process."""
    done = subprocess.run(
        [sys.executable, __file__, str(root), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _main(root: Path, arguments: list[str]) -> None:
    """Import the converter with empty stand-ins for modules that it never calls here, and run it.

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
    import convert_ckpt_v2  # type: ignore[import-not-found]

    # The program offers fewer model types than its model_cfg.json describes: mixtral is missing.
    model_type = arguments[arguments.index("--model-type-hf") + 1]
    with mock.patch.object(
        sys,
        "argv",
        ["convert_ckpt_v2.py", *("qwen3" if word == model_type else word for word in arguments)],
    ):
        options = convert_ckpt_v2.get_args()
    options.model_type_hf = model_type
    is_to_hf = options.load_model_type == "mg"
    (convert_ckpt_v2.Mg2HfConvert if is_to_hf else convert_ckpt_v2.Hf2MgConvert)(options).run()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
