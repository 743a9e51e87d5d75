"""Results of a training whose steps are done: report, curves and exported models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msrl.models.reward_head import has_classifier
from msrl.plan.run_plan import RunPlan
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training.best import checkpoint_results
from msrl.workflows.training.export import export_critic, export_hf, final_checkpoint
from msrl.workflows.training.run_log import RunLog
from msrl.workflows.training.settings import adapted_base, separate_critic


def finish_completed(plan: RunPlan, saved: SavedTraining, curves: Sequence[str]) -> None:
    """Write the report, the curves and the exported models of a run that has done all its steps.

    A run that ended after its last checkpoint lacks them.
    """
    with RunLog(
        plan.config,
        num_steps=saved.step,
        start_step=saved.step,
        curves=curves,
        trackers=(),
        is_reward_model=plan.is_reward_model,
    ) as log:
        log.note(f"all {saved.step} steps are done; writing the report of {log.path}")
        log.finish(final_results(plan, saved, log.path))


def final_results(plan: RunPlan, saved: SavedTraining, run_dir: Path) -> dict[str, str]:
    """Export the final checkpoint of a completed run if configured; return the paths to report."""
    results = checkpoint_results(saved, is_done=True)
    if not plan.config.checkpoint.export_hf:
        return results
    checkpoint, note = final_checkpoint(saved, keep_best=plan.config.checkpoint.keep_best)
    hf_dir, base = plan.model.hf_dir, adapted_base(plan)
    folder = export_hf(checkpoint, run_dir / "hf", base=base, hf_dir=hf_dir)
    results[_model_name(plan)] = f"{folder}{note}"
    shape = None if plan.critic is None else plan.critic.require_shape()
    if plan.critic is not None and shape is not None and has_classifier(shape.architecture):
        source = separate_critic(plan, checkpoint)
        critic = export_critic(source, run_dir / "hf_critic", shape, plan.critic.hf_dir)
        results["Hugging Face critic"] = f"{critic}{note}"
    return results


def _model_name(plan: RunPlan) -> str:
    """Return the name of the exported model in the results."""
    if plan.trains_steps:
        return "Hugging Face process reward model"
    return "Hugging Face reward model" if plan.is_reward_model else "Hugging Face model"
