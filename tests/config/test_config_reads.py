"""Every configuration key is read where it takes effect, not only checked and printed."""

from __future__ import annotations

import ast

import pytest

from config_reads import CLASSES, Reads, leaves, reads

MERGED = {"algo.preset"}  # read where files are merged


@pytest.mark.slow
def test_every_key_is_read_where_the_work_is_done():
    read, keys = reads(), list(leaves())
    dead = [key for key, model, name in keys if (model, name) not in read]
    assert set(dead) == MERGED and len(keys) > 200


def test_a_key_that_is_not_read_is_reported():
    walker = Reads()
    walker.visit(
        ast.parse(
            "def f(config: Config):\n    train, clip = config.train, config.algo.clip\n"
            "    return clip.low + train.steps\n"
        )
    )
    read = {(model.__name__, name) for model, name in walker.keys}
    assert {("ClipConfig", "low"), ("TrainConfig", "steps")} <= read and (
        "ClipConfig",
        "high",
    ) not in read
    assert set(CLASSES) > {"ClipConfig", "TrainConfig"}
