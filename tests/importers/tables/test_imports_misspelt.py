"""Wrong keys and values of other systems' files: each is an error that names the key.

Every key of every table, alone in a small file of its system; the keys of the files that the
systems ship, from the checkouts of roll_oracle.py and mindspeed_oracle.py.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mindspeed_oracle
import roll_oracle
from import_changes import (
    AGENTIC,
    CASES,
    COMMANDS,
    GIGPO,
    MATH,
    ROOM,
    Changes,
    key_path,
    translation,
)
from msrl.config.sources import Node, plain, read
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.table import Row, load_table
from msrl.importers.translation import KeyStatus, Translation
from msrl.workflows.import_config import validate
from support import assert_mentions
from test_imports_changes import natives

SYSTEMS = ("roll", "lightrft", "mindspeed_llm", "mindspeed_rl", "verl")
# Sections of names that the user chooses, and of files that the base files do not name.
NAMES = (
    *("runtime_env", "resource", "torchrun", "ray_start", "preprocess", "supervised"),
    *("sft.data", "sft.top"),
)
WRONG: dict[bool, tuple[Any, ...]] = {  # of flags, and of YAML
    True: ("abc", "1.5.5", "[1]"),
    False: ([[1]], {"a": {"b": 1}}, "abc"),
}
ORIGINAL = (KeyStatus.DROPPED, KeyStatus.DEAD)  # of keys that the original passes on or ignores


def rows(system: str) -> Iterator[Row]:
    """Yield the rows of the keys that the base file of a system can have."""
    for row in load_table(system).rows.values():
        if row.section not in NAMES and (system, row.section) != ("mindspeed_llm", "ray"):
            yield row


def other_keys(system: str, row: Row) -> Changes:
    """Return the keys that a file must have besides the key of a row."""
    if row.key in ("dim_room", "num_boxes"):
        return ROOM
    if row.section in ("custom_env", "env_config", "env_manager", "reward_normalization"):
        return AGENTIC
    return CASES.get(system, {}).get(f"{row.section}.{row.key}", ({}, None))[0]


def takes_flags(system: str, row: Row) -> bool:
    return system == "lightrft" or row.section in COMMANDS


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_misspelt_keys_are_named(system: str, tmp_path: Path) -> None:
    """All keys of a section are in one file, which names each."""
    silent: list[str] = []
    for group in rows_of_group(system, rows(system)):
        besides, names = other_keys(system, group[0]), {}
        for row in group:
            where = key_path(system, row.section, row.key)
            names[where + where[-1]] = row.key + where[-1]
        changes = {**besides, **dict.fromkeys(names, 1)}
        try:
            translated = translation(system, group[0].section, changes, tmp_path)
        except MsrlError as error:
            silent += [f"{path}: {error}" for path, name in names.items() if name not in str(error)]
            continue
        reported = {r.entry.path for r in translated.key_results if r.status in ORIGINAL}
        for path, name in names.items():
            if path not in reported and not any(name in error for error in translated.errors):
                silent.append(f"{path}: {translated.errors}")
    assert not silent, "\n".join(silent)


def rows_of_group(system: str, group: Iterable[Row]) -> list[list[Row]]:
    """Return rows of the same section with the same keys besides them."""
    groups: dict[str, list[Row]] = {}
    for row in group:
        groups.setdefault(f"{row.section} {other_keys(system, row)}", []).append(row)
    return list(groups.values())


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_value_of_a_wrong_form_is_refused_or_takes_effect(system: str, tmp_path: Path) -> None:
    """Each key has one of the values, its neighbors the others."""
    silent: list[str] = []
    for number, row in enumerate(rows(system)):
        if "section" in (row.by, row.form) or row.key == "defaults":
            continue
        besides = other_keys(system, row)
        where = key_path(system, row.section, row.key)
        values = WRONG[takes_flags(system, row)]
        value = values[number % len(values)]
        try:
            after = translation(system, row.section, {**besides, where: value}, tmp_path)
        except MsrlError:
            continue
        if has_effect(row, value, after):
            before = translation(system, row.section, besides, tmp_path)
            if natives(before, row) == natives(after, row) and not validate(after).errors:
                silent.append(f"{row.section}.{row.key}={value}")
    assert not silent, "\n".join(silent)


ODD: dict[bool, tuple[Any, ...]] = {  # of flags, and of YAML
    True: ("0", "nan", "xxx", ""),
    False: (0, -1, math.nan, math.inf, "xxx", []),
}


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_odd_value_ends_in_a_traceback(system: str, tmp_path: Path) -> None:
    """Each key has half of the values, its neighbors the others."""
    for number, row in enumerate(rows(system)):
        where = key_path(system, row.section, row.key)
        for value in ODD[takes_flags(system, row)][number % 2 :: 2]:
            changes = {**other_keys(system, row), where: value}
            with contextlib.suppress(MsrlError):
                report(translation(system, row.section, changes, tmp_path))


def has_effect(row: Row, value: Any, after: Translation) -> bool:
    """Return True if a translation without errors reports that the key of a row took effect."""
    if after.errors or after.differences or row.is_off(value):
        return False
    assert native_yaml(after) and report(after)
    results = [
        result
        for result in after.key_results
        if (result.entry.section, result.entry.key) == (row.section, row.key)
    ]
    if not results or (results[0].status is KeyStatus.OFF and results[0].text):
        return False  # the text says which other key switches it off
    return results[0].status in (KeyStatus.APPLIED, KeyStatus.OFF)


FILTER = {"type": "mean_filter", "filter_argss": {"threshold_down": 0.1}}
PROFILER = "profiler_config.integrated"
STRATEGY = "actor_train.strategy_args.strategy_config"
MANAGER, LAKE = "train_env_manager", "custom_envs.Lake.env_config"


def tool(config: object = None, **keys: object) -> Changes:
    """Return an agentic file of ROLL with these keys of a tool, which is python_code by default."""
    config = {"tool_id": "python_code", "tool_args": {}} if config is None else config
    wrapper = {"wrapper_args": {}, "tool_configs": [config], **keys}
    return {**MATH, "custom_envs.Lake.tool_wrapper": wrapper}


JUDGE: Changes = {"worker_cls": "roll.LLMJudgeRewardWorker"}
INNER: list[tuple[str, Changes, str]] = [  # system, keys, and what the message names
    ("roll", {"query_filter_config": FILTER}, "filter_argss"),
    ("roll", {"actor_train.router_replay": {"modee": "R3"}}, "modee"),
    ("roll", {"checkpoint_config": {"output_dirr": "there"}}, "output_dirr"),
    ("roll", {"actor_infer.device_mapping": "list(range(0,8)"}, "device_mapping"),
    ("roll", {"actor_infer.device_mapping": "list(range(0,10**9))"}, "device_mapping"),
    ("roll", {"actor_train.device_mapping": "list(range(0,9999999999999))"}, "device_mapping"),
    ("roll", {"actor_infer.num_gpus_per_worker": 0}, "num_gpus_per_worker"),
    ("roll", {"actor_infer.num_gpus_per_worker": [1, 2]}, "num_gpus_per_worker"),
    ("roll", {"system_envs": ["NCCL_DEBUG=INFO"]}, "system_envs"),
    ("roll", {"system_envs": {"NCCL_DEBUG": ["INFO"]}}, "NCCL_DEBUG"),
    ("roll", {"rollout_mock": "on"}, "rollout_mock"),
    ("roll", {"rollout_mock": {"enablee": True}}, "'enable'"),
    ("roll", {"difficulty_mask": 1}, "difficulty_mask"),
    ("roll", {**AGENTIC, "custom_envs": {"Lakes": AGENTIC["custom_envs"]["Lake"]}}, "'Lakes'"),
    ("roll", {**AGENTIC, f"{MANAGER}.group_size": "8"}, "group_size"),
    ("roll", {**AGENTIC, f"{MANAGER}.group_size": 0}, "group_size"),
    ("roll", {**AGENTIC, f"{MANAGER}.tags": "Lake"}, "tags"),
    ("roll", {**AGENTIC, f"{MANAGER}.tags": []}, "tags"),
    ("roll", {**AGENTIC, f"{MANAGER}.num_groups_partition": [True]}, "num_groups_partition"),
    ("roll", {**AGENTIC, f"{MANAGER}.generating_args": "long"}, "generating_args"),
    ("roll", {**AGENTIC, f"{MANAGER}.generating_args.max_new_tokens": "1k"}, "max_new_tokens"),
    ("roll", {**ROOM, "custom_envs.Room.env_config.dim_room": 6}, "dim_room"),
    ("roll", {**ROOM, "custom_envs.Room.env_config.dim_room": ["6", "6"]}, "dim_room"),
    ("roll", {**ROOM, "custom_envs.Room.env_config.dim_room": "your room"}, "dim_room"),
    ("roll", {**GIGPO, "step_reward_weight": "0.5"}, "step_reward_weight"),
    ("roll", {**GIGPO, "episode_reward_weight": True}, "episode_reward_weight"),
    ("roll", {**GIGPO, "step_reward_gamma": "xxx"}, "step_reward_gamma"),
    ("roll", {**MATH, f"{LAKE}.extract_boxed": 1, "custom_envs.Lake.env_type": "roll_qa"}, "boxed"),
    ("roll", {"async_generation_ratio": math.nan}, "async_generation_ratio"),
    ("roll", {"async_generation_ratio": math.inf}, "async_generation_ratio"),
    ("roll", {"difficulty_mask": True, "difficulty_low_threshold": "xxx"}, "difficulty_low"),
    ("roll", {"system_envs": "your variables"}, "system_envs"),
    ("roll", {f"{STRATEGY}.virtual_pipeline_model_parallel_size": 0}, "virtual_pipeline"),
    ("roll", {**AGENTIC, f"{LAKE}.p": "xxx"}, "env_config.p"),
    ("roll", {**AGENTIC, f"{LAKE}.format_penalty": "xxx"}, "format_penalty"),
    ("roll", {**ROOM, "custom_envs.Room.env_config.format_penalty": "xxx"}, "format_penalty"),
    ("mindspeed_rl", {"generate_config.infer_tensor_parallel_size": 0}, "infer_tensor_parallel"),
    ("mindspeed_rl", {"megatron_training.noop_layers": [math.inf]}, "noop_layers"),
    ("mindspeed_rl", {"rl_config.verifier_weight": [math.nan]}, "verifier_weight"),
    ("roll", tool(wrapper_argss={}), "wrapper_argss"),
    ("roll", tool(wrapper_args={"max_tool_use": 3}), "max_tool_use:"),
    ("roll", tool(wrapper_args={"max_tool_uses": "3"}), "max_tool_uses"),
    ("roll", tool(wrapper_args={"max_tool_uses": True}), "max_tool_uses"),
    ("roll", tool(wrapper_args=[3]), "wrapper_args"),
    ("roll", tool(tool_configs={"tool_id": "python_code"}), "tool_wrapper"),
    ("roll", tool({"tool_id": "search", "tool_arg": {}}), "tool_arg:"),
    ("roll", tool({"tool_id": "search", "tool_args": {"top_k": 3}}), "top_k"),
    ("roll", tool({"tool_id": "mcp", "tool_args": "http://127.0.0.1:9"}), "tool_args"),
    ("roll", tool({"tool_id": "python_code", "tool_args": {"timeout": None}}), "timeout"),
    ("roll", tool({"tool_id": "python_code", "tool_args": {"timeout": "5s"}}), "timeout"),
    ("roll", {**AGENTIC, "reward_normalization.norm_std_type": "groups"}, "norm_std_type"),
    ("mindspeed_rl", {f"{PROFILER}.profilee": True}, "profilee"),
    ("mindspeed_rl", {"profiler_config.integratedd": {"profile": True}}, "integratedd"),
    ("mindspeed_rl", {"profiler_config": 3}, "profiler_config"),
    ("mindspeed_rl", {f"{PROFILER}.profile": True, f"{PROFILER}.profile_step_end": 10**12}, "end"),
    ("mindspeed_rl", {"msprobe_config.dump_pathh": "there"}, "dump_pathh"),
    ("mindspeed_rl", {"generate_config.max_model_len": "4k"}, "max_model_len"),
    ("mindspeed_rl", {"rl_config.use_dynamic_bsz": 4096}, "use_dynamic_bsz"),
    ("mindspeed_rl", {"megatron_training.bf16": [True]}, "bf16"),
    ("mindspeed_rl", {"megatron_training.data_path": None}, "data_path"),
    ("roll", {"student": [1]}, "student"),
    ("roll", {"rewards.math.judge_model_typee": "api"}, "judge_model_typee"),
    ("roll", {"rewards.judge": {**JUDGE, "model_args": {"dtypee": "bf16"}}}, "dtypee"),
    ("roll", {"reward_model": {"model_args": {"dtypee": "bf16"}}}, "dtypee"),
    ("roll", {**AGENTIC, "val_env_manager": {"num_env_groupss": 8}}, "num_env_groupss"),
    ("verl", {"sandbox_fusion": "http://localhost"}, "sandbox_fusion"),
    ("verl", {"actor_rollout_ref.actor.profiler.enablee": True}, "enablee"),
    ("verl", {"actor_rollout_ref.actor.qat": {"enable": False, "modee": "x"}}, "modee"),
    ("verl", {"actor_rollout_ref.actor.checkpoint.async_savee": True}, "async_savee"),
    ("verl", {"actor_rollout_ref.model.mtp": {"enable_trainn": True}}, "enable_trainn"),
    ("verl", {"global_profiler.global_tool_config.nsyss": {}}, "nsyss"),
    ("verl", {"actor_rollout_ref.actor.ppo_micro_batch_size": [1]}, "ppo_micro_batch_size"),
]


@pytest.mark.sample(24)
@pytest.mark.parametrize(("system", "changes", "name"), INNER)
def test_a_wrong_key_or_value_in_a_section_is_named(
    system: str, changes: Changes, name: str, tmp_path: Path
) -> None:
    errors = translation(system, "", changes, tmp_path).errors
    assert any(name in error for error in errors), errors


def test_workers_that_no_number_of_machines_has_are_refused(tmp_path: Path) -> None:
    flags = {"worker_num": 8, "local_worker_num": 3}
    errors = translation("mindspeed_llm", "msrun", flags, tmp_path).errors
    assert_mentions("\n".join(errors), "worker_num=8", "multiple", "3")


def test_the_profiler_of_mindspeed_rl_has_the_defaults_of_the_original(tmp_path: Path):
    translated = translation("mindspeed_rl", "", {f"{PROFILER}.profile": True}, tmp_path)
    assert not translated.errors
    assert plain(translated.tree)["log"]["profile"] == {"steps": [1], "ranks": []}


def test_a_profiler_without_steps_is_reported(tmp_path: Path):
    changes = {f"{PROFILER}.profile": True, f"{PROFILER}.profile_step_start": 2}
    translated = translation("mindspeed_rl", "", changes, tmp_path)
    (result,) = [row for row in translated.key_results if row.entry.key == "profile"]
    assert result.status is KeyStatus.DROPPED
    assert "profile_step_end" in result.text and "profile" not in plain(translated.tree)["log"]


TOOL = """tools:
  - class_name: mindspeed_rl.tools.retool.ReTool
    config: {memory_limit_mb: 512, CONFIG}
"""


@pytest.mark.parametrize("config", ["default_timeoutt: 5", "default_timeout: [5]"])
def test_a_wrong_key_or_value_of_a_tool_is_named(config: str, tmp_path: Path) -> None:
    (tmp_path / "tool.yaml").write_text(TOOL.replace("CONFIG", config), encoding="utf-8")
    keys = {"multi_turn_enable": True, "tool_config_path": "tool.yaml"}
    changes = {f"rl_config.{key}": value for key, value in keys.items()}
    errors = translation("mindspeed_rl", "", changes, tmp_path).errors
    assert any(config.partition(":")[0] in error for error in errors), errors


@pytest.mark.parametrize("text", ["env_varss: {NCCL_DEBUG: INFO}", "env_vars: {NCCL_DEBUG: [1]}"])
def test_a_wrong_key_or_value_of_the_runtime_environment_is_named(text: str, tmp_path: Path):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "runtime_env.yaml").write_text(text, encoding="utf-8")
    errors = translation("mindspeed_rl", "", {}, tmp_path).errors
    assert any("runtime_env.yaml:1: env_vars" in error for error in errors), errors


# --- files of the systems


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield (path of the section, key, line) for every key of a tree."""
    for key, child in (node.value if isinstance(node.value, dict) else {}).items():
        yield path, key, child.origin.line or 0
        yield from nodes(child, f"{path}.{key}" if path else key)


def copy_files(folder: Path, target: Path) -> Path:
    """Copy the scripts and YAML files of a folder; return the copy."""
    for file in folder.rglob("*"):
        if file.suffix in (".sh", ".yaml") and file.is_file():
            copy = target / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return target


def shipped_files(root: Path, pattern: str, system: str) -> Iterator[Path]:
    """Yield the files of a checkout that are imported as they are."""
    for file in sorted(root.glob(pattern)):
        try:
            translate_arguments(system, [str(file)], approximate=True)
        except MsrlError:
            continue
        yield file


# Sections whose keys users choose, or that the original passes on; msrl does not read them.
FREE = re.compile(
    r"system_envs|tracker_kwargs|hydra|custom_envs|domain_interleave_probs|wrap_policy"
    r"|strategy_config|^teacher$|tag_to_template|rewards$"
)


@pytest.mark.full
def test_a_misspelt_key_of_a_file_of_roll_is_named(tmp_path: Path) -> None:
    root = copy_files(roll_oracle.checkout() / "examples", tmp_path)
    seen: set[tuple[str, str]] = set()
    for file in shipped_files(root, "*/*.yaml", "roll"):
        lines = file.read_text(encoding="utf-8").splitlines()
        for section, key, number in nodes(read(file, is_old=True)):
            is_unread = "distill" in file.name and section.startswith("rewards")
            if (section, key) in seen or FREE.search(section) or is_unread:
                continue
            seen.add((section, key))
            line = lines[number - 1].replace(f"{key}:", f"{key}{key[-1]}:", 1)
            text = "\n".join([*lines[: number - 1], line, *lines[number:]])
            assert_named("roll", file, text, key + key[-1])
    assert len(seen) > 100


@pytest.mark.full
def test_a_misspelt_flag_of_a_script_of_mindspeed_llm_is_named(tmp_path: Path) -> None:
    root = copy_files(mindspeed_oracle.checkout() / "examples" / "mcore", tmp_path)
    seen: set[str] = set()
    for file in shipped_files(root, "qwen*/*.sh", "mindspeed-llm"):
        text = file.read_text(encoding="utf-8")
        commands = re.sub(r"(?m)(^|\s)#.*$", "", text)
        for flag in dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", commands)):
            if flag not in seen:
                seen.add(flag)
                wrong = re.sub(rf"(?<![\w-]){flag}(?![\w-])", flag + flag[-1], text)
                assert_named("mindspeed-llm", file, wrong, flag + flag[-1])
    assert len(seen) > 100


def assert_named(system: str, file: Path, text: str, key: str) -> None:
    """Assert that the import of a text in place of a file fails with a message that names a key."""
    other = file.with_stem(f"{file.stem}_misspelt")
    other.write_text(text + "\n", encoding="utf-8")
    try:
        with pytest.raises(MsrlError) as error:
            translate_arguments(system, [str(other)], approximate=True)
    finally:
        other.unlink()
    name = key.lstrip("-")
    assert name in str(error.value) or name.replace("-", "_") in str(error.value), (file, key)
