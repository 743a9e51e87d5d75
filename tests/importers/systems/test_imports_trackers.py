"""Projects, folders and names of trackers in imported files become options of msrl's trackers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from msrl.importers.command import native_yaml, report
from support import assert_mentions
from test_imports_commands import RLVR
from test_imports_losses import FLAGS, convert, mindspeed, native
from test_imports_scripts import TUNE


def read_log(system: str, text: str, folder: Path) -> dict[str, Any]:
    suffix = "yaml" if system in ("roll", "mindspeed-rl") else "sh"
    return native(convert(system, text, folder, suffix, approximate=True)).get("log", {})


def test_flags_of_mindspeed_llm_set_folder_project_and_entity(tmp_path: Path) -> None:
    script = f"torchrun {TUNE} --tensorboard-dir boards/a --wandb-project math"
    log = read_log("mindspeed-llm", f"{script} --wandb-save-dir logs --wandb-entity lab", tmp_path)
    assert log["trackers"] == ["tensorboard", "wandb"]
    assert log["options"] == {
        "tensorboard": {"dir": "boards/a"},
        "wandb": {"project": "math", "entity": "lab", "dir": "logs"},
    }


def test_keys_of_wandb_have_no_effect_without_its_project_in_mindspeed_llm(tmp_path: Path) -> None:
    script = f"torchrun {TUNE} --wandb-save-dir logs"
    assert "options" not in read_log("mindspeed-llm", script, tmp_path)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_file_of_mindspeed_rl_names_project_and_folder(is_on: bool, tmp_path: Path) -> None:
    more = f"use_wandb: {str(is_on).lower()}, wandb_project: math, wandb_save_dir: logs,"
    log = read_log("mindspeed-rl", mindspeed(more=more), tmp_path)
    if is_on:
        assert log["options"] == {"wandb": {"project": "math", "dir": "logs"}}
    else:
        assert "options" not in log and log["trackers"] == []


def test_a_command_of_lightrft_names_entity_group_project_and_folder(tmp_path: Path) -> None:
    names = "--wandb_org lab --wandb_group all --wandb_project math --wandb_run_name first"
    text = f"{FLAGS} --use_wandb key --use_tensorboard boards {names}"
    translation = convert("lightrft", text, tmp_path, "sh")
    tree = native(translation)
    assert tree["log"]["options"] == {
        "wandb": {"entity": "lab", "group": "all", "project": "math"},
        "tensorboard": {"dir": "boards/first"},
    }
    assert tree["run"]["name"] == "first"


@pytest.mark.parametrize(
    ("track_with", "kwargs", "options"),
    [
        ("tensorboard", "{log_dir: boards}", {"tensorboard": {"dir": "boards/rlvr"}}),
        (
            "wandb",
            "{api_key: s3cret, project: math, name: first, tags: [a], notes: n, log_dir: logs}",
            {"wandb": {"project": "math", "name": "first", "tags": ["a"], "notes": "n",
                       "dir": "logs"}},
        ),
        ("wandb", "{api_key: s3cret}", None),
        (
            "swanlab",
            "{login_kwargs: {api_key: s3cret}, project: math, experiment_name: a, logdir: logs}",
            {"swanlab": {"project": "math", "name": "a", "dir": "logs"}},
        ),
    ],
)  # fmt: skip
def test_the_arguments_of_rolls_tracker_are_taken_over_without_its_secret(
    track_with: str, kwargs: str, options: dict[str, Any] | None, tmp_path: Path
) -> None:
    text = f"{RLVR}track_with: {track_with}\ntracker_kwargs: {kwargs}\n"
    translation = convert("roll", text, tmp_path, approximate=True)
    assert native(translation)["log"].get("options") == options
    assert "s3cret" not in native_yaml(translation) + report(translation)
    if options is None:
        assert_mentions(report(translation), "tracker_kwargs", "dropped")


def test_swanlab_of_mindspeed_rl_names_project_folder_and_mode(tmp_path: Path) -> None:
    more = "use_swanlab: true, swanlab_project: math, swanlab_save_dir: logs, swanlab_mode: cloud,"
    log = read_log("mindspeed-rl", mindspeed(more=more), tmp_path)
    assert log["trackers"] == ["swanlab"]
    assert log["options"] == {"swanlab": {"project": "math", "dir": "logs", "mode": "online"}}


def test_flags_of_megatrons_profiler_select_steps_and_ranks(tmp_path: Path) -> None:
    flags = "--profile --profile-step-start 4 --profile-step-end 6 --profile-ranks 0 1"
    log = read_log("mindspeed-llm", f"torchrun {TUNE} {flags}", tmp_path)
    assert log["profile"] == {"steps": [5, 6], "ranks": [0, 1]}
    flags = "--profile-step-start 4 --profile-ranks -1"
    assert "profile" not in read_log("mindspeed-llm", f"torchrun {TUNE} {flags}", tmp_path)


def test_the_profiler_of_mindspeed_rl_selects_steps_and_ranks(tmp_path: Path) -> None:
    settings = "{profile: true, profile_step_start: 2, profile_step_end: 4, profile_ranks: all}"
    text = mindspeed() + f"\nprofiler_config:\n  integrated: {settings}\n"
    assert read_log("mindspeed-rl", text, tmp_path)["profile"] == {"steps": [2, 3], "ranks": []}
    assert native(convert("mindspeed-rl", text, tmp_path))["log"]["profile"]
    off = text.replace("profile: true", "profile: false")
    assert "profile" not in read_log("mindspeed-rl", off, tmp_path)


@pytest.mark.parametrize(("max_steps", "steps"), [(10, [2, 3]), (2, [2]), (1, [1])])
def test_the_timeline_of_roll_selects_steps(max_steps: int, steps: list[int], tmp_path: Path):
    text = re.sub(r"(?m)^max_steps: .*$", f"max_steps: {max_steps}", RLVR)
    text += "profiler_timeline: true\nprofiler_memory: false\n"
    assert read_log("roll", text, tmp_path)["profile"]["steps"] == steps


def test_the_history_of_memory_of_roll_is_reported_as_dropped(tmp_path: Path) -> None:
    text = f"{RLVR}profiler_memory: true\n"
    translation = convert("roll", text, tmp_path, approximate=True)
    assert "profile" not in native(translation)["log"]
    assert_mentions(report(translation), "profiler_memory", "dropped")
