"""Boxes of detected objects in JSON answers, and the overlap of two sets of boxes.

A box is [left, top, right, bottom]. Texts are of models and may be hostile: work and memory are
bounded, and nothing raises.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msrl.rewards.math.extract import extract_part
from msrl.thoughts import THOUGHT

MAX_BOXES = 300
_MAX_CHARACTERS = 1 << 18
_MAX_FAILURES = 64  # places where a value begins that is no JSON
_BOX_KEYS = ("bbox_2d", "bbox", "box")
_LABEL_KEYS = ("label", "category", "class", "name")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_VALUE = re.compile(r"[\[{]")

Corners = tuple[float, float, float, float]


class Box(NamedTuple):
    """A box with its label in lower case.

    `corners` is None if they are not four numbers, left before right and top before bottom.
    """

    corners: Corners | None
    label: str | None


def read_boxes(text: str) -> list[Box] | None:
    """Return the boxes of the last JSON value in a text, in which an empty list has none.

    None if there is no such value, or it has more than `MAX_BOXES` boxes. Thoughts are skipped. The
    value is looked for in answer tags and code fences first.
    """
    if len(text) > _MAX_CHARACTERS:
        return None
    _, end, answer = text.rpartition(THOUGHT[1])
    if not end and text.lstrip().startswith(THOUGHT[0]):
        return None  # an unterminated thought
    answer = extract_part(answer, "answer") or answer
    fenced = _FENCE.findall(answer)
    for part in ([fenced[-1]] if fenced else []) + [answer]:
        found: list[Box] | None = None
        for value in _values(part):
            boxes = _boxes(value)
            found = found if boxes is None else boxes
        if found is not None:
            return found if len(found) <= MAX_BOXES else None
    return None


def matched_overlaps(
    claimed: Sequence[Box], true: Sequence[Box], *, labels: bool = True
) -> list[float]:
    """Return the overlaps of claimed and true boxes that are paired, the largest one first.

    The overlap is the area of the intersection divided by that of the union. Pairs are formed in
    the order of their overlaps, and each box is in at most one pair. With `labels`, both boxes of a
    pair have the same label if the true one has any.
    """
    pairs = [
        (overlap, i, j)
        for i, one in enumerate(claimed)
        for j, other in enumerate(true)
        if not labels or other.label is None or one.label == other.label
        if (overlap := _overlap(one.corners, other.corners)) > 0
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    used_claims, used_truths, overlaps = set[int](), set[int](), list[float]()
    for overlap, i, j in pairs:
        if i not in used_claims and j not in used_truths:
            used_claims.add(i)
            used_truths.add(j)
            overlaps.append(overlap)
    return overlaps


def _overlap(one: Corners | None, other: Corners | None) -> float:
    if one is None or other is None:
        return 0.0
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return min(1.0, shared / (_area(one) + _area(other) - shared))


def _area(box: Corners) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _values(text: str) -> Iterator[Any]:
    """Yield the lists and objects of a text that are JSON, from the first to the last one."""
    position, failures = 0, 0
    while failures < _MAX_FAILURES and (match := _VALUE.search(text, position)):
        try:
            value, position = _DECODER.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            position, failures = match.start() + 1, failures + 1
            continue
        yield value


def _boxes(value: Any) -> list[Box] | None:
    """Return the boxes in a value at any depth; None if it has neither boxes nor an empty list."""
    boxes, waiting, has_empty_list = list[Box](), [value], False
    while waiting and len(boxes) <= MAX_BOXES:
        item = waiting.pop()
        if isinstance(item, dict):
            key = next((key for key in _BOX_KEYS if key in item), None)
            if key is None:
                waiting += reversed(item.values())
            else:
                boxes.append(Box(_corners(item[key]), _label(item)))
        elif isinstance(item, list):
            if _is_plain(item):
                boxes.append(Box(_corners(item), None))
            else:
                waiting += reversed(item)
                has_empty_list = has_empty_list or not item
    return boxes if boxes or has_empty_list else None


def _is_plain(item: list[Any]) -> bool:
    """Return True for a list of four numbers."""
    return len(item) == 4 and all(map(_is_number, item))


def _corners(value: Any) -> Corners | None:
    if not isinstance(value, list) or not _is_plain(value):
        return None
    try:
        left, top, right, bottom = (float(number) for number in value)
    except OverflowError:
        return None
    area = (right - left) * (bottom - top)
    is_box = right > left and bottom > top and 0 < area < math.inf
    return (left, top, right, bottom) if is_box else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(item: dict[str, Any]) -> str | None:
    label = next((item[key] for key in _LABEL_KEYS if key in item), None)
    return " ".join(label.casefold().split()) if isinstance(label, str) else None


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
