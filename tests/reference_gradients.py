"""The gradient of every tensor after one training step, as ranks saved it and as transformers computes it, under the files' names.

AdamW's first moment holds a tenth of the gradient after one step, clipped to a norm of 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from msrl.checkpoint.rank_shapes import rank_plan
from msrl.checkpoint.source import ShardedSource
from msrl.models.families import load_shape
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.serve.engine import hf_weights
from training_ranks import sequences

_STACKED = ("Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_NO_GRADIENT = ".expert_bias"  # of Megatron's router, by our names


def gradients_of_first_step(save: Path) -> dict[str, Tensor]:
    """What the ranks of a training saved after one step."""
    saved, shape = SavedTraining(save, 1), load_shape(save / "hf")
    cut, shards = ParallelLayout.from_json(saved.state()["cut"]), dict[Coords, dict[str, Tensor]]()
    padded = shape.padded_vocab_size(cut.tp)
    for at in cut.ranks():
        file = load_file(
            saved.training_dir / f"optimizer_{at.tp:02d}_{at.pp:03d}_{at.ep:03d}.safetensors"
        )
        shards[at] = {
            name.removeprefix("exp_avg."): state
            for name, state in file.items()
            if name.startswith("exp_avg.")
        }
        without = {
            name: size
            for name, size in rank_plan(shape, cut, at, padded).tensors.items()
            if name.endswith(_NO_GRADIENT)
        }
        shards[at] |= {name: torch.zeros(size) for name, size in without.items()}
    source = ShardedSource(shape, cut, shards, save / "hf", str(save))
    return {
        name: tensor * 10
        for name, tensor in hf_weights(source)
        if not name.endswith("e_score_correction_bias")
    }


def backward(model: Any, step: int) -> float:
    """The loss of a step's batch, one sequence at a time; gradients are in the parameters afterwards."""
    batch, total, count = sequences(step), torch.zeros(()), 0
    for ids, mask in zip(batch.token_ids, batch.loss_masks, strict=True):
        logprobs = model(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
        total = (
            total
            - logprobs.gather(-1, torch.from_numpy(ids[1:])[:, None])[:, 0][
                torch.from_numpy(mask[1:])
            ].sum()
        )
        count += int(mask[1:].sum())
    (total / count).backward()
    return (total / count).item()


@functools.cache
def transformers_gradients(folder: Path) -> dict[str, Tensor]:
    """transformers' gradients of the first step, clipped to a norm of 1; experts one by one or stacked, as the files have them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    backward(model, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    is_stacked = load_shape(folder).architecture in _STACKED
    return {
        key: value
        for parameter in model.named_parameters()
        for key, value in _as_in_files(*parameter, is_stacked=is_stacked)
    }


def _as_in_files(
    name: str, parameter: torch.nn.Parameter, *, is_stacked: bool
) -> Iterator[tuple[str, Tensor]]:
    """transformers keeps most experts in two tensors, [experts, gate above up, inputs] and [experts, outputs, inputs]."""
    assert parameter.grad is not None, name
    prefix, _, last = name.rpartition(".")
    if not is_stacked or last not in ("gate_up_proj", "down_proj"):
        yield name, parameter.grad
        return
    for number, grad in enumerate(parameter.grad):
        parts = (
            zip(("gate_proj", "up_proj"), grad.chunk(2), strict=True)
            if last == "gate_up_proj"
            else (("down_proj", grad),)
        )
        yield from ((f"{prefix}.{number}.{part}.weight", value) for part, value in parts)


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-4
) -> None:
    """Tensor by tensor: the distance is at most `tolerance` of the tensor's own norm. Experts that no token went to have none."""
    assert found.keys() == expected.keys()
    assert all(gradient.norm() > 0 for key, gradient in expected.items() if ".experts." not in key)
    assert sum(float(gradient.norm()) > 0 for gradient in expected.values()) > 0.9 * len(expected)
    for key, gradient in expected.items():
        assert (found[key] - gradient).norm() <= tolerance * gradient.norm(), key
