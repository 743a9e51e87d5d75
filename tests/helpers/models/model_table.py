"""Table of model families in docs/models.md, derived from the code and the rows of the tests.

`docs/generate.py` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType

import families
from families import FAMILIES, Family
from mixture_families import MIXTURES
from msrl.config.sections.train import ParallelConfig
from msrl.models.families import families as modules_by_architecture
from msrl.models.shape import Shape
from msrl.plan.context import layout_problems

HEADER = (
    *("family", "classes", "conversion", "training", "packed rows", "context parallelism"),
    *("engine on CPU", "exchange with MindSpeed-LLM's converter"),
)
# Model types of MindSpeed-LLM's converter by the row that `test_mindspeed_exchange.py` exchanges.
MODEL_TYPES = {
    "qwen2.5": "qwen25", "qwen3": "qwen3", "llama 2": "llama2", "llama 3.2": "llama2",
    "gemma 2": "gemma2", "qwen3 moe": "qwen3-moe",
    "mixtral": "mixtral", "deepseek v2 lite": "deepseek2-lite", "deepseek v2": "deepseek2",
    "deepseek v3": "deepseek3", "qwen2 moe": "qwen2-moe", "glm 4.5": "glm45",
    "glm 4.5 air": "glm45-air", "seed-oss": "seed-oss", "deepseek v3.2": "deepseek32",
    "glm 5": "glm5", "glm 5.2": "glm5", "ling 2": "bailing_mini", "hunyuan 3": "HYV3",
    "minimax m2": "minimax_m2", "qwen3-next": "qwen3-next",
}  # fmt: skip
# Of these, the converter does not shard the mixers or their norms.
UNSHARDED = ("minimax_m2", "qwen3-next")
# Families whose rollouts ran with vLLM on CPU.
GENERATED = {"qwen2", "qwen3", "llama", "mistral", "glm", "chatglm", "gemma2", "gemma3"} | {
    *("qwen3_moe", "qwen2_moe", "glm4", "glm4_moe", "mixtral", "seed_oss"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"),
    *("gpt_oss", "hy_v3", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"),
    *("smollm3", "olmo3", "phi3", "granite", "ernie4_5", "exaone4", "cohere"),
    *("minicpm3", "hunyuan_v1"),
}
# Limits of rollouts of these families.
LIMITS = {
    "phi3": "yes, in sequences up to the window, and up to the first length of LongRoPE",
    "cohere": "yes, Cohere 2 in sequences up to the window; Command R not tried",
    "hunyuan_v1": "yes, dense; mixtures not tried",
    "minicpm3": "yes",
}


def rows() -> list[tuple[str, ...]]:
    """Return the cells of each family, in the order of their names."""
    modules = {module.__name__: module for module in modules_by_architecture().values()}
    tables = FAMILIES | MIXTURES
    result: list[tuple[str, ...]] = []
    for module in modules.values():
        own = {n: row for n, row in tables.items() if row.architecture in module.ARCHITECTURES}
        assert own, f"{module.__name__}: no row in FAMILIES or MIXTURES"
        result.append(_row(module, own))
    return sorted(result, key=lambda row: row[0].casefold())


def _row(module: ModuleType, own: dict[str, Family]) -> tuple[str, ...]:
    shapes = [families.shape(row.config) for row in own.values()]
    types = sorted({MODEL_TYPES[name] for name in own if name in MODEL_TYPES})
    has_delta = any(shape.delta for shape in shapes)
    return (
        _label(module),
        ", ".join(f"`{name}`" for name in module.ARCHITECTURES),
        "both ways",
        ", ".join(["TP", "PP", *(["EP"] if any(shape.moe for shape in shapes) else [])]),
        "yes; states restart at borders" if has_delta else "yes",
        ", ".join(_context_algorithms(shapes)),
        _engine(module, list(own.values()), shapes),
        ", ".join(f"`{x}`{' with TP 1' if x in UNSHARDED else ''}" for x in types) or "no",
    )


def _label(module: ModuleType) -> str:
    """Return the models of a family: the first line of its module without remarks."""
    line = (module.__doc__ or "").partition("\n")[0]
    return re.sub(r" \([^)]*\)", "", line).partition(":")[0].rstrip(".")


def _context_algorithms(shapes: Sequence[Shape]) -> list[str]:
    """Return the values of `train.parallel.cp_algo` that all shapes accept on two ranks."""
    layouts = {
        "allgather": ParallelConfig(cp=2, cp_algo="allgather"),
        "ulysses": ParallelConfig(cp=2, cp_algo="ulysses"),
        "ring": ParallelConfig(cp=2, cp_algo="ring"),
        "hybrid": ParallelConfig(cp=4, cp_algo="hybrid", cp_head_ranks=2),
    }
    return [
        name
        for name, layout in layouts.items()
        if not any(list(layout_problems(layout, shape)) for shape in shapes)
    ]


def _engine(module: ModuleType, own: Sequence[Family], shapes: Sequence[Shape]) -> str:
    name = module.__name__.rpartition(".")[2]
    answers = [
        (name in GENERATED and name in LIMITS, LIMITS.get(name, "")),
        (
            any(rotary.query_growth for shape in shapes for rotary in shape.rotaries),
            "refused if queries grow with the position",
        ),
        (
            any(shape.delta for shape in shapes),
            "yes, in bfloat16 only, with heads of 64 or 128 channels",
        ),
        (
            name in GENERATED and any(shape.mla for shape in shapes),
            "yes, with a latent of 576 channels",
        ),
        (name in GENERATED, "yes"),
        (
            any(row.reference != "transformers" for row in own),
            "no: the code comes with the checkpoint",
        ),
        (
            any(shape.indexer for shape in shapes),
            "no: vLLM's CPU backend lacks sparse attention",
        ),
        (
            name == "ernie4_5_moe",
            "no: on CPU, vLLM ignores the biases of softmax scores",
        ),
        (
            name == "minimax_m2",
            "no: on CPU, vLLM lacks sigmoid routers without groups",
        ),
    ]
    return next((answer for holds, answer in answers if holds), "not tried")
