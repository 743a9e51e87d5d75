"""Another value of a key changes what it becomes: for every key of every table that has a native
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from import_changes import CASES, place, translation
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.config.sources import plain
from msrl.errors import ManyErrors
from msrl.importers.command import native_yaml
from msrl.importers.native_keys import refusal
from msrl.importers.table import Row, load_table
from msrl.importers.translation import KeyStatus, Translation

ELSEWHERE = {
    ("mindspeed_rl", section)
    for section in ("megatron", "rl_config", "generate_config", "sampling_config")
}
# What they ask for is told or refused, whatever their value: they have no native key of their own in that system.
REPORTED = {
    "mindspeed_llm": {
        "train.fp16",
        "train.no_load_rng",
        "kl_ctrl.type",
        "kl_ctrl.target_kl",
        "kl_ctrl.horizon",
        "resource_pool.actor_rollout",
    },
    "roll": {"data_args.file_name", "strategy_config.virtual_pipeline_model_parallel_size"},
    "lightrft": {"flags.prompt_data", "flags.engine_type"},
    "mindspeed_rl": {"reward_config.load"},
}  # fmt: skip


def rows() -> list[Any]:
    """Each row with a native key, as a parameter of its own."""
    found = [
        (system, row) for system in CASES for row in load_table(system).rows.values() if row.to
    ]
    return [
        pytest.param(system, row, id=f"{system} {row.section}.{row.key}")
        for system, row in found
        if (system, row.section) not in ELSEWHERE
        and f"{row.section}.{row.key}" not in REPORTED[system]
    ]


def another(key: str) -> Any:
    """A value of a native key's type that is not its default."""
    value: Any = Config()
    for part in key.split("."):
        value = getattr(value, part, None) if isinstance(value, BaseModel) else None
    if isinstance(value, bool):
        return not value
    return {"int": 7, "float": 0.37, "NoneType": 7}.get(type(value).__name__, "other")


def value_at(tree: Any, key: str) -> object:
    for part in key.split("."):
        if not isinstance(tree, list):  # of the items of a list: the whole list
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def assert_it_loads_or_is_refused(found: Translation, folder: Path) -> None:
    """What is said to take effect is a right configuration; only what the translation names is
    refused.
    """
    (folder / "native.yaml").write_text(native_yaml(found), encoding="utf-8")
    try:
        load([str(folder / "native.yaml")])
    except ManyErrors as error:
        assert found.refused() and all("version" in line for line in error.messages), error


def natives(found: Translation, row: Row) -> list[object]:
    tree = plain(found.complete_tree())
    return [value_at(tree, key) for key in (*row.to, "checkpoint.load")]


@pytest.mark.parametrize(("system", "row"), rows())
def test_another_value_of_a_key_changes_what_it_becomes(system: str, row: Row, tmp_path: Path):
    name = f"{row.section}.{row.key}"
    besides, value = CASES[system].get(name, ({}, another(row.to[0])))
    where = place(system, row.section, row.key)
    before = translation(system, row.section, besides, tmp_path)
    after = translation(system, row.section, {**besides, where: value}, tmp_path)
    assert not before.errors and not after.errors, (before.errors, after.errors)
    fates = [
        one.status
        for one in after.outcomes
        if (one.entry.section, one.entry.key) == (row.section, row.key)
        and one.entry.path.endswith(where)
    ]
    assert value is ... or fates, "the key is told"
    for found in (before, after):
        assert_it_loads_or_is_refused(found, tmp_path)
    if row.same and refusal(row.to[0], value):
        return  # changes no results, and is not built yet: told as such
    assert natives(before, row) != natives(after, row) or fates == [KeyStatus.UNSUPPORTED]
    assert not set(fates) & {KeyStatus.DEAD, KeyStatus.SAME, KeyStatus.OFF}
