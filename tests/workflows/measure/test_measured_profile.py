"""`msrl doctor --measure`: a profile of this machine that `msrl plan` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrl.layouts.profile import read_profile
from support import assert_mentions
from test_cli import msrl


@pytest.mark.slow
@pytest.mark.full
def test_this_machine_is_measured_and_its_profile_can_be_read(tmp_path: Path):
    file = tmp_path / "machine.yaml"
    assert msrl("doctor", "--measure", "--platform", "cpu", "--write", str(file)) == 0
    profile = read_profile(str(file))
    assert profile.is_measured and profile.platform == "cpu"
    assert profile.pass_s is not None and profile.update_s is not None
    assert profile.speeds is not None and profile.speeds.engine is not None
    assert {row[0] for row in profile.speeds.products["float32"]} == {64, 512, 4096}
    assert msrl("doctor", "--measure", "--platform", "cpu", "--write", str(file)) == 2


def test_a_profile_is_only_written_where_it_is_measured(capsys: pytest.CaptureFixture[str]):
    assert msrl("doctor", "--write", "machine.yaml") == 2
    assert_mentions(capsys.readouterr().err, "--write", "--measure")
