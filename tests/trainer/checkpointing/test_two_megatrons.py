"""Two versions of megatron-core: equal losses, and checkpoints of each are read by the other.

`nox -s megatron-next` runs it: MSRL_OTHER_MEGATRON names a folder with another megatron-core than
the installed one.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import dist_ranks
import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path
from training_ranks import Case, Result

OTHER = os.environ.get("MSRL_OTHER_MEGATRON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OTHER, reason="MSRL_OTHER_MEGATRON names no other megatron-core"),
]
STEPS = 4
MODELS = FAMILIES | MIXTURES
TRAININGS = {
    "qwen3": Layout(tp=2, pp=2),
    "gemma 2": Layout(tp=2, sp=True),
    "deepseek v3": Layout(tp=2, ep=2, etp=1),
    "gpt-oss": Layout(pp=2, ep=2),
    "qwen3-next": Layout(ep=2),
    "minimax m2": Layout(tp=2),
}
DISTRIBUTED = {"qwen3": Layout(tp=2, pp=2), "deepseek v3": Layout(tp=2, ep=2, etp=1, pp=2)}


class Trainings(NamedTuple):
    """Results by case. `NAME, resumed` continues the case NAME of the other version."""

    installed: dict[str, Result]
    other: dict[str, Result]
    resumed: dict[str, Result]  # under the installed version


def _run(function: str, cases: Sequence[Any], megatron: str = "") -> list[Any]:
    """Run cases on ranks that import megatron-core from a folder; "" is the installed version."""
    from msrl.platforms import get

    path = os.pathsep.join(filter(None, (megatron, python_path())))
    env = {"PYTHONPATH": path, "MSRL_MEGATRON": megatron}
    return run_ranks(function, cases, num_ranks=4, platform=get("cpu"), env=env)


def _train(cases: Sequence[Case], megatron: str = "") -> dict[str, Result]:
    return {result.name: result for result in _run("training_ranks:main", cases, megatron)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = {*TRAININGS, *DISTRIBUTED}
    root = tmp_path_factory.mktemp("models")
    return families.save_models(root, {name: MODELS[name] for name in names})


@pytest.fixture(scope="module")
def trainings(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    root = tmp_path_factory.mktemp("saves")

    def saving(version: str) -> list[Case]:
        return [
            Case(name, folders[name], layout, steps=STEPS, save_at=2, save_to=root / version / name)
            for name, layout in TRAININGS.items()
        ]

    def resuming(version: str) -> list[Case]:
        return [
            dataclasses.replace(
                case,
                name=f"{case.name}, resumed",
                save_at=None,
                save_to=None,
                resume_from=case.save_to,
                first_step=2,
            )
            for case in saving(version)
        ]

    installed = _train(saving("installed"))
    other = _train([*saving("other"), *resuming("installed")], OTHER)
    return Trainings(installed, other, _train(resuming("other")))


def _minor(megatron: str) -> int:
    """Return the second number of a version; "" is the installed one."""
    import megatron.core as installed

    root = Path(megatron, "megatron", "core") if megatron else Path(installed.__path__[0])
    found = re.search(r"^MINOR = (\d+)$", (root / "package_info.py").read_text(), re.M)
    assert found is not None
    return int(found[1])


def test_the_other_version_is_another_one() -> None:
    assert _minor(OTHER) != _minor("")


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_and_weights_of_both_versions_are_equal_to_the_bit(
    trainings: Trainings, name: str
) -> None:
    installed, other = trainings.installed[name], trainings.other[name]
    assert other.reports == installed.reports
    _assert_equal_weights(other, installed)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_resumes_with_the_other_version(trainings: Trainings, name: str) -> None:
    uninterrupted = trainings.installed[name]
    for version in (trainings.other, trainings.resumed):
        resumed = version[f"{name}, resumed"]
        assert resumed.reports == uninterrupted.reports[2:]
        _assert_equal_weights(resumed, uninterrupted)


def test_distributed_checkpoints_of_both_versions_are_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Megatron 0.16.1 itself cannot load those of 0.19, which have no common.pt."""
    from msrl.checkpoint.convert import McoreTarget, write_mcore
    from msrl.checkpoint.source import open_mcore, open_weights
    from msrl.verification.bits import compare

    versions = sorted(("", OTHER), key=_minor)
    written = {name: tmp_path / "msrl" / name / "iter_0000001" for name in DISTRIBUTED}
    for name, folder in written.items():
        target = McoreTarget(vocab_multiple=64, distributed=True)
        write_mcore(open_weights(folders[name]), folder.parent, target)
    for number, megatron in enumerate(versions):
        cases = [
            dist_ranks.Case(
                name,
                folders[name],
                written[name],
                layout,
                tmp_path / str(number) / name / "iter_0000007",
            )
            for name, layout in DISTRIBUTED.items()
        ]
        reports = _run("dist_ranks:main", cases, megatron)
        assert len(reports) == 4 * len(cases)
        assert [(name, at, wrong) for name, at, _, wrong in reports if wrong] == []
        written = {case.name: case.save for case in cases}
        for name, saved in written.items():
            (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
            hf, loaded = folders[name], open_mcore(saved.parent, folders[name])
            assert compare(open_weights(hf), loaded, None).different == ()


def _assert_equal_weights(actual: Result, expected: Result) -> None:
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_array_equal(actual.weights[name], weight, err_msg=name)
