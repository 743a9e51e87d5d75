"""Every configuration key is read where it takes effect, not only checked and printed."""

from __future__ import annotations

import ast
from dataclasses import fields

from config_reads import CLASSES, Reads, leaves, reads
from msrl.config.sections.reward import RewardSource
from msrl.rewards.sources import Source

MERGED = {"algo.preset"}  # read where files are merged


def test_every_key_is_read_where_the_work_is_done():
    read, keys = reads(), list(leaves())
    dead = [
        key for key, model, name in keys if (model, name) not in read and model is not RewardSource
    ]
    assert set(dead) == MERGED and len(keys) > 200


def test_every_key_of_a_reward_source_has_its_field():
    """`Source.of` reads the keys by the names of its fields."""
    assert {name for _, model, name in leaves() if model is RewardSource} == {
        field.name for field in fields(Source)
    }


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
