"""Inputs of the vision example: scenes, demonstrations, images and the page of answers."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from typing import Any

import numpy as np
import pytest

from support import ROOT

VISION = ROOT / "examples" / "vision"
SPEC = importlib.util.spec_from_file_location("vision_shapes", VISION / "shapes.py")
assert SPEC is not None and SPEC.loader is not None
shapes: Any = importlib.util.module_from_spec(SPEC)
sys.modules["vision_shapes"] = shapes
SPEC.loader.exec_module(shapes)


@pytest.fixture(scope="module")
def scenes() -> list[Any]:
    source = random.Random(5)
    return [shapes.random_scene(source) for _ in range(400)]


def test_answers_count_the_shapes_of_each_color(scenes: list[Any]) -> None:
    for scene in scenes:
        counted = {color: int(count) for count, color in re.findall(r"(\d) (\w+)", scene.answer)}
        colors = [shape.color for shape in scene.shapes]
        assert counted == {color: colors.count(color) for color in colors}
        assert list(counted) == [color for color in shapes.COLORS if color in colors]


def test_sloppy_answers_leave_out_the_last_of_several_colors(scenes: list[Any]) -> None:
    for scene in scenes:
        counts = scene.answer.split(", ")
        assert scene.sloppy_answer == (", ".join(counts[:-1]) if len(counts) > 1 else counts[0])
    share = np.mean([scene.answer == scene.sloppy_answer for scene in scenes])
    assert 0.5 < share < 0.7


def test_images_show_the_colors_of_the_answer(scenes: list[Any]) -> None:
    source = random.Random(6)
    for scene in scenes[:50]:
        pixels = np.asarray(shapes.draw(scene, source)).reshape(-1, 3)
        shown = {name for name, color in shapes.COLORS.items() if (pixels == color).all(1).any()}
        assert shown == {shape.color for shape in scene.shapes}
