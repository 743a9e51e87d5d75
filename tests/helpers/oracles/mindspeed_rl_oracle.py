"""Losses, advantages and micro-batches of MindSpeed-RL as oracles, from a separate checkout.

`MSRL_MINDSPEED_RL` names the checkout (commit 05a90d77), by default `../MindSpeed-RL`. Only single
functions of its files are executed: their modules need NPUs.
"""

from __future__ import annotations

import ast
import copy
import heapq
import math
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch

import checkouts

_FILES = {
    "utils/torch_functional.py": ("masked_sum", "masked_mean"),
    "utils/seqlen_balancing.py": (
        "karmarkar_karp",
        "heapq_partition_with_max",
        "rearrange_micro_batches",
    ),
    "utils/utils.py": ("get_current_dp_range_indexes",),
    "trainer/utils/compute_utils.py": ("compute_group_norm_advantage_return",),
}
_METHODS = {
    "models/loss/grpo_actor_loss_func.py": "_compute_grpo_policy_loss",
    "models/loss/dapo_actor_loss_func.py": "_compute_dapo_policy_loss",
    "models/loss/critic_loss_func.py": "_compute_value_loss",
    "models/base/base_training_engine.py": "_split_batches",
}


@cache
def checkout() -> Path:
    """Return the checkout, or skip the test."""
    return checkouts.checkout("MindSpeed-RL", "mindspeed_rl/utils/utils.py")


@cache
def functions() -> Any:
    """Return the functions by name, or skip the test."""
    root = checkout() / "mindspeed_rl"
    process = types.SimpleNamespace(is_initialized=lambda: False)
    names: dict[str, Any] = {
        "List": list,
        "Dict": dict,
        "Tuple": tuple,
        "Tensor": torch.Tensor,
        "copy": copy,
        "deepcopy": copy.deepcopy,
        "heapq": heapq,
        "math": math,
        "torch": torch,
        "dist": process,
        "is_multimodal": lambda: False,
        "compute_kl_penalty": lambda logprobs, reference, kind: logprobs - reference,
    }
    for file, members in _FILES.items():
        _execute(root / file, set(members), names)
    names["F"] = types.SimpleNamespace(**names)
    for file, method in _METHODS.items():
        _execute(root / file, {method}, names)
    return types.SimpleNamespace(**names)


def _execute(path: Path, members: set[str], names: dict[str, Any]) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in members
    ]
    for function in found:
        function.decorator_list = []
    exec(compile(ast.Module(list(found), []), str(path), "exec"), names)
