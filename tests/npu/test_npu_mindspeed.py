"""MindSpeed's patches under Megatron. The other tests of this folder use MindSpeed as well, if set.

`MINDSPEED_HOME` names a checkout of its branch core_r0.16.0.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import ROOT

DOCUMENT = ROOT / "docs" / "npu.md"
# Modules that msrl does not import, and the parts of Transformer Engine and torch that it replaces
IGNORED = (
    "megatron.core.dist_checkpointing.",
    "megatron.core.extensions.transformer_engine.TE",
    "megatron.core.fp8_utils.",
    "megatron.core.fusions.",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs.",
    "megatron.core.models.multimodal.",
    "megatron.core.transformer.experimental_attention_variant.",
    "torch._C._jit_set_nvfuser_enabled",
    "torch.cuda.",
    "torch.distributed._",
)
_PATCHES = """
from msrl.platforms import get
get("npu").prepare()
from mindspeed.patch_utils import MindSpeedPatchesManager
print("PATCHES", *MindSpeedPatchesManager.patches_info)
"""


@pytest.fixture(scope="module")
def patches() -> list[str]:
    """Return the names that MindSpeed's default arguments patch in Megatron and torch."""
    if not os.environ.get("MINDSPEED_HOME"):
        pytest.skip("MINDSPEED_HOME names no checkout of MindSpeed core_r0.16.0")
    command = [sys.executable, "-W", "ignore", "-c", _PATCHES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("PATCHES "))
    return [name for name in line.split()[1:] if name.startswith(("megatron.", "torch."))]


def test_every_patch_of_something_that_msrl_relies_on_is_documented(patches: list[str]):
    text = DOCUMENT.read_text()
    relevant = [name for name in patches if not name.startswith(IGNORED)]
    assert len(relevant) > 20
    missing = [name for name in relevant if not _is_mentioned(name, text)]
    assert not missing


def _is_mentioned(name: str, text: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    class_name = owner.rpartition(".")[2]
    return attribute.strip("_") in text and (class_name in text or not class_name[0].isupper())
