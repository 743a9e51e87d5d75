"""Results of a training whose steps are done: report, curves and exported models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msrl.config.schema import Config
from msrl.models.paths import config_dir
from msrl.models.reward_head import has_classifier
from msrl.plan.derived import critic_shape, needs_critic
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training.best import checkpoint_results
from msrl.workflows.training.export import export_critic, export_hf, final_checkpoint
from msrl.workflows.training.run_log import RunLog
from msrl.workflows.training.settings import adapted_base, hf_files


def finish_completed(config: Config, saved: SavedTraining, curves: Sequence[str]) -> None:
    """Write the report, the curves and the exported models of a run that has done all its steps.

    A run that ended after its last checkpoint lacks them.
    """
    with RunLog(
        config, num_steps=saved.step, start_step=saved.step, curves=curves, trackers=()
    ) as log:
        log.note(f"all {saved.step} steps are done; writing the report of {log.path}")
        log.finish(final_results(config, saved, log.path))


def final_results(config: Config, saved: SavedTraining, run_dir: Path) -> dict[str, str]:
    """Export the final checkpoint of a completed run if configured; return the paths to report."""
    results = checkpoint_results(saved, is_done=True)
    if not config.checkpoint.export_hf:
        return results
    checkpoint, note = final_checkpoint(saved, keep_best=config.checkpoint.keep_best)
    folder = export_hf(
        checkpoint, run_dir / "hf", base=adapted_base(config), hf_dir=hf_files(config)
    )
    results["Hugging Face model"] = f"{folder}{note}"
    shape = critic_shape(config) if needs_critic(config) else None
    if shape is not None and has_classifier(shape.architecture):
        load = config.cluster.roles.critic.load
        config_folder = hf_files(config) if load is None else config_dir(load)
        critic = export_critic(checkpoint, run_dir / "hf_critic", shape, config_folder)
        results["Hugging Face critic"] = f"{critic}{note}"
    return results
