"""Bytes of a vision tower's activations, computed from sizes as those of layers are.

The count follows the tensors that `trainer/model/vision/tower.py` saves. P patches, c channels, f
feed-forward channels of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.memory.activations import Pass, Spread
from msrl.models.shape import Shape
from msrl.models.vision.tower import TrainedParts, Vision

_FP32_BYTES = 4
# Feed-forward tensors that a block saves: inputs and outputs of the activation, and the product.
_SAVED_FFN = {"qwen2": 3, "qwen2_5": 4, "qwen3": 2, "internvl": 2}


@dataclass(frozen=True, slots=True)
class TowerBytes:
    """Bytes that a tower saves for the backward pass, and temporary ones.

    `saved` includes the features, which layers read. `working` is the block that a backward pass
    computes again, with its gradients, `forward` all of the forward pass alone.
    """

    saved: int = 0
    working: int = 0
    forward: int = 0


def tower_bytes(
    shape: Shape,
    batch: Pass,
    spread: Spread,
    trained: TrainedParts,
    *,
    recomputes: bool,
    max_patches: int | None = None,
) -> TowerBytes:
    """Return the bytes of a micro-batch whose tokens are all of different images.

    Their patches are at most `max_patches`.

    Every rank of the first stage computes all images, also with context parallelism.
    """
    vision = shape.vision
    assert vision is not None
    patches = batch.num_tokens * vision.merge_size**2
    if max_patches is not None:
        patches = min(patches, max_patches)
    features = patches // vision.merge_size**2
    element, hidden = batch.element_bytes, vision.hidden_size
    pixels = patches * vision.patch_elements * _FP32_BYTES
    # Embeddings that the features replace, then the features themselves
    rows = batch.num_tokens // spread.cp // (spread.tp if spread.sp else 1)
    merged = rows * shape.hidden_size * element
    outputs = features * shape.hidden_size * element * (1 + len(vision.deepstack))
    block = _block_bytes(vision, patches, batch)
    projector = 4 * patches * hidden * element * (1 + len(vision.deepstack))
    saved, working = outputs + merged, 0
    if trained.tower:
        stored = patches * hidden * element if recomputes else block
        saved += pixels + projector + vision.depth * stored
        gradients = 2 * patches * vision.ffn_hidden_size * element
        working = block + gradients if recomputes else 0
    elif trained.projector:
        saved += projector
    return TowerBytes(saved, working, pixels + outputs + merged + block)


def _block_bytes(vision: Vision, patches: int, batch: Pass) -> int:
    """Return the bytes that a block saves.

    These are the inputs and outputs of two norms, queries, keys and values before and after the
    rotation, the outputs of the attention twice, and the feed-forward block.
    """
    hidden, ffn = vision.hidden_size, _SAVED_FFN[vision.kind] * vision.ffn_hidden_size
    attention = 4 * patches * hidden * (batch.core_bytes - batch.element_bytes)
    return patches * (11 * hidden + ffn) * batch.element_bytes + attention
