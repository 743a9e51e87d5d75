"""Keys of ROLL's files are judged by the version for which a file was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrl.errors import MsrlError
from msrl.importers.command import report
from msrl.importers.status import KeyStatus
from support import assert_mentions, mentions
from test_imports_commands import RLVR, changed
from test_imports_environments import AGENTIC, imported, tree
from test_imports_losses import imported as imported_file
from test_imports_losses import statuses

TEMPLATE = '    agent_template: "{state}"\n'


def early(text: str) -> str:
    """Return a file of v0.1.0: its templates show a state."""
    return changed(text, ("    use_thread_lock: true\n", f"    use_thread_lock: true\n{TEMPLATE}"))


def with_manager(line: str) -> str:
    return changed(AGENTIC, ("train_env_manager: {", f"train_env_manager: {{{line}, "))


def native(text: str, folder: Path) -> Any:
    return tree(imported(text, folder))


def test_the_penalty_of_the_manager_is_subtracted_in_the_first_version_only(tmp_path: Path) -> None:
    text = with_manager("format_penalty: -0.15")
    assert native(early(text), tmp_path)["environment"]["format_penalty"] == 0.15
    assert "format_penalty" not in native(text, tmp_path)["environment"]
    with pytest.raises(MsrlError, match=mentions("format_penalty=0.2", "bonus")):
        imported(early(with_manager("format_penalty: 0.2")), tmp_path)


def test_asym_clip_bounds_normalized_rewards_in_the_first_version_only(tmp_path: Path) -> None:
    norm = ("{grouping: traj_group_id, method: mean}", "{grouping: batch, method: asym_clip}")
    text = changed(AGENTIC, norm)
    clipped = native(early(text), tmp_path)["reward"]["norm"]
    assert clipped == {"center": "batch", "scale": "batch", "clip": [-1.0, 3.0]}
    translation = imported(text, tmp_path)
    assert "clip" not in tree(translation)["reward"]["norm"]
    assert_mentions(report(translation), "asym_clip", "v0.1.3")


def test_unknown_workers_of_environments_are_refused(tmp_path: Path) -> None:
    worker = "worker_cls: roll.pipeline.agentic.environment_worker.EnvironmentWorker"
    keys = statuses(imported(with_manager(worker), tmp_path))
    assert keys["train_env_manager.worker_cls"] is KeyStatus.SAME
    with pytest.raises(MsrlError, match=mentions("worker_cls=my.Worker", "environment.path")):
        imported(with_manager("worker_cls: my.Worker"), tmp_path)


def test_the_horizon_without_a_target_has_its_own_reason(tmp_path: Path) -> None:
    text = f"{RLVR}add_token_level_kl: true\nkl_horizon: 10000\n"
    translation = imported_file("roll", text, tmp_path)
    assert_mentions(report(translation), "kl_horizon=10000", "target_kl")
