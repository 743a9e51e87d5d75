"""Every documented key of the five guides has a row, and every row names existing or planned native
keys.
"""

from __future__ import annotations

from typing import get_args

import pytest

from guides import GUIDES, documented_keys
from msrl.importers.conversions import CONVERSIONS
from msrl.importers.megatron import PROPERTIES
from msrl.importers.native_keys import is_designed, refusal
from msrl.importers.table import canonical, load_table
from msrl.models.shape import Attention, DeltaNet, Indexer, Mla, Moe, RopeScaling, Rotary, Shape
from support import assert_mentions

SYSTEMS = ("mindspeed_rl", "mindspeed_llm", "roll", "lightrft")
# Number of keys in each guide, to detect changes of the guides or their reader.
NUM_DOCUMENTED = {
    "mindspeed-rl-grpo-parameters": 85,
    "mindspeed-rl-r1-zero": 87,
    "mindspeed-llm-full-pipeline": 52,
    "lightrft-parameters": 66,
    "roll-parameters": 115,
}


def has_property(name: str) -> bool:
    """Return True if a shape has a property, such as `moe.num_experts`."""
    if name in ("rope_scaling.kind", "rotary_share"):
        return True
    name = PROPERTIES.get(name, name.replace("rope_scaling", "rotary.scaling"))
    section, _, key = name.rpartition(".")
    classes: dict[str, tuple[type, ...]] = {"": (Shape,), "moe": (Moe,), "mla": (Mla,)}
    classes |= {"attention": (Attention,), "rotary": (Rotary,), "delta": (DeltaNet,)}
    classes["indexer"] = (Indexer,)
    classes["rotary.scaling"] = get_args(RopeScaling)
    names = {slot for kind in classes[section] for slot in dir(kind)}
    return key in names


@pytest.mark.parametrize("name", GUIDES)
def test_every_documented_key_is_in_a_table(name: str):
    keys = documented_keys(name)
    known = {key for system in GUIDES[name] for _, key in load_table(system).rows}
    missing = {key for key in keys if canonical(key) not in known}
    assert not missing, sorted(missing)
    assert len(keys) >= NUM_DOCUMENTED[name], (len(keys), sorted(keys))


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_describes_the_translation_of_its_key(system: str):
    for row in load_table(system).rows.values():
        reasons = (row.by, row.neutral[1], row.dead, row.shape, row.refuse, row.differs)
        assert row.to or any(reasons), row
        assert row.via in CONVERSIONS, row
        assert not row.shape or has_property(row.shape), row
        for key in row.to:
            assert is_designed(key), (
                f"{system} {row.section}.{row.key}: {key} is neither a native nor a planned key"
            )


@pytest.mark.parametrize("system", SYSTEMS)
def test_defaults_of_the_originals_are_valid_for_their_native_keys(system: str):
    for row in load_table(system).rows.values():
        if row.has_default and row.to and not row.by and row.default is not None:
            CONVERSIONS[row.via](row.default)


def test_planned_keys_are_refused_and_existing_keys_are_not():
    assert_mentions(refusal("rollout.engine.pp", 2), "version")
    assert_mentions(refusal("env.max_turns", 4), "version")
    assert refusal("cluster.env.NCCL_DEBUG", "INFO") == ""
    assert refusal("log.trackers", ["tensorboard"]) == ""
