"""Gradients of one training step, from the ranks' checkpoint and from transformers.

Tensors have the names of the Hugging Face files. After one step, AdamW's first moment is a tenth of
the gradient, which is clipped to a norm of 1.
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
from msrl.workflows.engine import hf_weights
from training_ranks import sequences

_STACKED = (
    *("Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
)
# By our names, and by those of the files
_NO_GRADIENT, _NO_FILE_GRADIENT = (".expert_bias", ".dsa_indexer."), ("e_score_", ".indexer.")


def gradients_of_first_step(save: Path) -> dict[str, Tensor]:
    """Return the gradients of the first step from the optimizer state that the ranks saved."""
    saved, shape = SavedTraining(save, 1), load_shape(save / "hf")
    layout = ParallelLayout.from_json(saved.state()["cut"])
    shards = dict[Coords, dict[str, Tensor]]()
    padded = shape.padded_vocab_size(layout.tp)
    for at in layout.ranks():
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
            for name, size in rank_plan(shape, layout, at, padded).tensors.items()
            if any(part in name for part in _NO_GRADIENT)
        }
        shards[at] |= {name: torch.zeros(size) for name, size in without.items()}
    source = ShardedSource(shape, layout, shards, save / "hf", str(save))
    return {
        name: tensor * 10
        for name, tensor in hf_weights(source)
        if not any(part in name for part in _NO_FILE_GRADIENT)
    }


def backward(model: Any, step: int) -> float:
    """Return the loss of a step's batch, computed per sequence, and accumulate the gradients."""
    batch, total, count = sequences(step), torch.zeros(()), 0
    for ids, mask in zip(batch.token_ids, batch.loss_masks, strict=True):
        logprobs = model(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
        labels, trained = torch.from_numpy(ids[1:]), torch.from_numpy(mask[1:])
        total = total - logprobs.gather(-1, labels[:, None])[:, 0][trained].sum()
        count += int(mask[1:].sum())
    (total / count).backward()
    return (total / count).item()


@functools.cache
def transformers_gradients(folder: Path) -> dict[str, Tensor]:
    """Return transformers' gradients of the first step, clipped to a norm of 1.

    Experts are separate or stacked as in the Hugging Face files.
    """
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
        if ".indexer." not in parameter[0]
        for key, value in _file_gradients(*parameter, is_stacked=is_stacked)
    }


def _file_gradients(
    name: str, parameter: torch.nn.Parameter, *, is_stacked: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield a gradient under the names of the Hugging Face files.

    transformers stores most experts in two tensors: [experts, gate and up, inputs] and
    [experts, outputs, inputs].
    """
    assert parameter.grad is not None, name
    prefix, _, last = name.rpartition(".")
    if not is_stacked or last not in ("gate_up_proj", "down_proj"):
        yield name, parameter.grad
        return
    for number, grad in enumerate(parameter.grad):
        if last == "down_proj":
            yield f"{prefix}.{number}.down_proj.weight", grad
            continue
        gate, up = grad.chunk(2)
        yield f"{prefix}.{number}.gate_proj.weight", gate
        yield f"{prefix}.{number}.up_proj.weight", up


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 1e-4
) -> None:
    """Assert that the difference of each tensor is at most `tolerance` times its norm.

    Gradients of experts without tokens are zero.
    """
    assert actual.keys() == expected.keys()
    assert all(gradient.norm() > 0 for key, gradient in expected.items() if ".experts." not in key)
    assert sum(float(gradient.norm()) > 0 for gradient in expected.values()) > 0.9 * len(expected)
    for key, gradient in expected.items():
        assert (actual[key] - gradient).norm() <= tolerance * gradient.norm(), key
