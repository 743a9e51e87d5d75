"""Detection: mean overlap (intersection over union) of the boxes in a JSON answer with true boxes.

Response and ground truth have JSON: a list of `{"bbox_2d": [left, top, right, bottom], "label":
"cat"}`, as Qwen2.5-VL writes it (also `bbox` or `box`), or of lists of four numbers, also inside
other objects. A ground truth without objects is `[]`. Boxes are paired by `_boxes.py`.

The score is the sum of the overlaps of all pairs, divided by the larger number of boxes: a missing
box and one too many cost the same. It is 0.0 without JSON. Inverted and empty boxes overlap with
nothing.
"""

from __future__ import annotations

from typing import Literal

from msrl.rewards.math.extract import shorten
from msrl.rewards.verifiers._boxes import MAX_BOXES, matched_overlaps, read_boxes

WRONG = 0.0
NEEDS_ANSWER = True


def score(
    response: str,
    answer: str,
    *,
    threshold: float = 0.0,
    counts: Literal["overlaps", "hits"] = "overlaps",
    labels: bool = True,
    extra_boxes: Literal["wrong", "ignored"] = "wrong",
) -> float:
    """Return a score from 0.0 to 1.0.

    Overlaps below `threshold` count as 0, and with `counts: hits`, the others as 1. With `labels`,
    only boxes with equal labels are paired. With `extra_boxes: ignored`, the sum is divided by the
    number of true boxes.
    """
    claimed, true = read_boxes(response), read_boxes(answer)
    if claimed is None or true is None:
        return WRONG
    overlaps = matched_overlaps(claimed, true, labels=labels)
    hits = [overlap for overlap in overlaps if overlap >= threshold]
    total = float(len(hits)) if counts == "hits" else sum(hits)
    count = len(true) if extra_boxes == "ignored" else max(len(true), len(claimed))
    return total / count if count else 1.0


def answer_refusal(answer: str, **_: object) -> str | None:
    """Return the reason why a ground truth has no usable boxes, or None."""
    boxes = read_boxes(answer)
    if boxes is None:
        return f"is not JSON with at most {MAX_BOXES} boxes: {shorten(answer)!r}"
    if any(box.corners is None for box in boxes):
        return f"has a box that is not [left, top, right, bottom]: {shorten(answer)!r}"
    return None


def refusal(*, threshold: float = 0.0, **_: object) -> str | None:
    """Return the reason why the options cannot be used, or None."""
    if 0.0 <= threshold <= 1.0:
        return None
    return f"options.threshold={threshold}: must be from 0 to 1"


def explain(response: str, answer: str, *, labels: bool = True, **_: object) -> str:
    """Return the boxes and overlaps that the score is based on."""
    claimed, true = read_boxes(response), read_boxes(answer)
    if claimed is None or true is None:
        return f"The {'response' if claimed is None else 'ground truth'} has no JSON with boxes."
    overlaps = matched_overlaps(claimed, true, labels=labels)
    shown = ", ".join(f"{overlap:.2f}" for overlap in overlaps[:8])
    pairs = f"overlap by {shown}" if overlaps else "do not overlap"
    return f"{len(claimed)} boxes of the response and {len(true)} true ones {pairs}."
