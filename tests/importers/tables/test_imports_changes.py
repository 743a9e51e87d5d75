"""Every key with a native key: another value changes the translation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from import_changes import CASES, key_path, translation
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
# Keys of ROLL's files of SFT, DPO and distillation, and two that only change together, have their
# tests in `test_imports_roll_supervised.py` and `test_imports_roll_versions.py`.
TESTED_ELSEWHERE = {
    "sft", "dpo", "distill", "worker.tag_included", "worker.opd_kl_coef",
    "env_config.dim_x", "env_config.dim_y",
}  # fmt: skip
# These keys are reported or refused for any value, because they have no native key in that system.
REPORTED = {
    "mindspeed_llm": {
        "train.fp16",
        "train.no_load_rng",
        "train.lr_decay_iters",
        "train.loss_compute_mode",
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
    """Return one parameter per row with a native key."""
    pairs = [
        (system, row) for system in CASES for row in load_table(system).rows.values() if row.to
    ]
    return [
        pytest.param(system, row, id=f"{system} {row.section}.{row.key}")
        for system, row in pairs
        if (system, row.section) not in ELSEWHERE
        and f"{row.section}.{row.key}" not in REPORTED[system]
        and not (system == "roll" and {row.section, f"{row.section}.{row.key}"} & TESTED_ELSEWHERE)
    ]


def other_value(key: str) -> Any:
    """Return a value of the native key's type other than its default."""
    value: Any = Config()
    for name in key.split("."):
        value = getattr(value, name, None) if isinstance(value, BaseModel) else None
    if isinstance(value, bool):
        return not value
    return {"int": 7, "float": 0.37, "NoneType": 7}.get(type(value).__name__, "other")


def value_at(tree: Any, key: str) -> object:
    for name in key.split("."):
        if not isinstance(tree, list):  # a list is compared as one value
            tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def assert_loads_or_is_refused(translated: Translation, folder: Path) -> None:
    """Assert that the native configuration is valid, or that only unsupported keys are refused."""
    (folder / "native.yaml").write_text(native_yaml(translated), encoding="utf-8")
    try:
        load([str(folder / "native.yaml")])
    except ManyErrors as error:
        reasons = ("version", "not supported")
        is_known = [any(reason in line for reason in reasons) for line in error.messages]
        assert translated.refusals() and all(is_known), error


def natives(translated: Translation, row: Row) -> list[object]:
    tree = plain(translated.complete_tree())
    return [value_at(tree, key) for key in (*row.to, "checkpoint.load")]


@pytest.fixture(autouse=True)
def exported_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables to which imports refer in place of secrets."""
    monkeypatch.setenv("JUDGE_API_KEY", "key-of-a-judge")


@pytest.mark.sample(40)
@pytest.mark.parametrize(("system", "row"), rows())
def test_another_value_of_a_key_changes_its_translation(system: str, row: Row, tmp_path: Path):
    name = f"{row.section}.{row.key}"
    besides, value = CASES[system].get(name, ({}, other_value(row.to[0])))
    where = key_path(system, row.section, row.key)
    before = translation(system, row.section, besides, tmp_path)
    after = translation(system, row.section, {**besides, where: value}, tmp_path)
    assert not before.errors and not after.errors, (before.errors, after.errors)
    statuses = [
        key_result.status
        for key_result in after.key_results
        if (key_result.entry.section, key_result.entry.key) == (row.section, row.key)
        and key_result.entry.path.endswith(where)
    ]
    assert value is ... or statuses, "the key has no status"
    for translated in (before, after):
        assert_loads_or_is_refused(translated, tmp_path)
    if row.neutral[1] and refusal(row.to[0], value):
        return  # unsupported, but reported as not changing results
    assert natives(before, row) != natives(after, row) or statuses == [KeyStatus.UNSUPPORTED]
    assert not set(statuses) & {KeyStatus.DEAD, KeyStatus.SAME, KeyStatus.OFF}
