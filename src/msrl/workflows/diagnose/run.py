"""`msrl diagnose mismatch`: compare sampling and training, and name the cause of a difference."""

from __future__ import annotations

from pathlib import Path

from msrl import platforms
from msrl.config.schema import Config
from msrl.diagnose.evidence import Evidence
from msrl.diagnose.verdict import Verdict, judge
from msrl.workflows.diagnose.collect import collect
from msrl.workflows.diagnose.target import open_target


def run(config: Config, run_dir: Path | None) -> tuple[Verdict, Evidence]:
    """Diagnose the model of a configuration, or a run with this configuration.

    Raises:
        MsrlError: The model cannot be read or does not fit this machine.
    """
    platform = platforms.resolve(config.cluster.platform)
    evidence = collect(open_target(config, platform.name, run_dir), platform)
    return judge(evidence), evidence
