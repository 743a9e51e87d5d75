"""Host memory of routing replay: the experts of every token, in the driver and in the engines."""

from __future__ import annotations

from msrl.memory.estimate import bytes_text
from msrl.memory.states import element_bytes
from msrl.models.kv_cache import cache_blocks
from msrl.models.shape import Shape
from msrl.plan.run_plan import RunPlan
from msrl.rollout.engine import BLOCK_TOKENS


def route_bytes(plan: RunPlan, shape: Shape) -> int:
    """Return the bytes of the routes that the driver holds, for sequences of the maximum length.

    They cover a step. With routes of the engines and `rollout.async`, groups that wait for
    later steps have theirs, too.
    """
    num_steps = 1
    if plan.train.router.replay == "engine":
        num_steps += plan.rollout.asynchronous.max_staleness
    return num_steps * plan.samples_per_step * plan.max_model_len * _bytes_per_token(shape)


def engine_route_bytes(plan: RunPlan, shape: Shape) -> int:
    """Return the bytes of the routes that an engine holds for its KV cache and responses.

    All sequences have the maximum length. Routes of the cache are stored by block.
    """
    engine = plan.rollout.engine
    size = int(engine.options.get("block_size", BLOCK_TOKENS))
    cache = cache_blocks(shape, element_bytes(plan), engine.tp, size)
    blocks = cache.per_sequence(plan.max_model_len) * engine.max_num_seqs + 1
    if engine.kv_cache_bytes is not None:
        blocks = engine.kv_cache_bytes // cache.num_bytes
    responses = -(-plan.samples_per_step // plan.num_engines)
    tokens = blocks * cache.num_tokens + responses * plan.max_model_len
    return tokens * _bytes_per_token(shape)


def _bytes_per_token(shape: Shape) -> int:
    moe = shape.moe
    assert moe is not None
    return sum(shape.mixture_layers) * moe.experts_per_token * moe.expert_number_bytes


def route_rows(plan: RunPlan) -> dict[str, str]:
    """Return the rows of the plan on routing replay; empty without it or for an unreadable model.

    Memory for refills is not included: their number is known only in the run.
    """
    shape = plan.shape_or_none
    if shape is None or shape.moe is None or not plan.has_rollouts:
        return {}
    replay = plan.train.router.replay
    if replay == "none":
        return {}
    size = bytes_text(route_bytes(plan, shape))
    if replay == "trainer":
        return {"routing replay": f"at most {size} of routes per step, in the driver's host memory"}
    if plan.is_replay:
        return {"routing replay": f"at most {size} of routes in the driver's host memory"}
    more = ", and as much for every refill" if plan.rollout.filter.refill else ""
    own = bytes_text(engine_route_bytes(plan, shape))
    return {
        "routing replay": f"at most {size} of routes in the driver's host memory{more}",
        "routing replay, engine": f"at most {own} of routes in the host memory of each engine",
    }
