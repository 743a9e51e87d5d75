"""Host memory of routing replay: the experts of every token of a step, in the driver."""

from __future__ import annotations

from msrl.memory.estimate import bytes_text
from msrl.models.shape import Moe
from msrl.plan.run_plan import RunPlan


def route_bytes(plan: RunPlan, moe: Moe) -> int:
    """Return the bytes of the routes of a step whose sequences all have the maximum length."""
    per_token = sum(moe.layers) * moe.experts_per_token * moe.expert_number_bytes
    return plan.samples_per_step * plan.max_model_len * per_token


def route_rows(plan: RunPlan) -> dict[str, str]:
    """Return the row of the plan on routing replay; empty without it or for an unreadable model."""
    shape = plan.shape_or_none
    moe = shape.moe if shape is not None else None
    if not plan.has_rollouts or moe is None or plan.train.router.replay == "none":
        return {}
    size = bytes_text(route_bytes(plan, moe))
    return {"routing replay": f"at most {size} of routes per step, in the driver's host memory"}
