"""Small random models and cases of `test_training.py`; the ranks start once for all cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from msrl.algorithms.mismatch import Correction
from msrl.config.sections.train import LoraConfig, OffloadConfig, RecomputeConfig
from msrl.trainer.objective.losses import Distillation
from msrl.trainer.settings import Layout
from poisoned_ranks import Poisoned
from product_ranks import Product
from training_ranks import VOCAB, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FULL = RecomputeConfig(granularity="full")
FULL_BLOCK = RecomputeConfig(granularity="full", method="block", layers=3)
SELECTIVE = RecomputeConfig(granularity="selective", modules=("core_attn", "mlp"))
LAYOUTS = {
    "tp2": Case("", Path(), Layout(tp=2)),
    "tp2 sp": Case("", Path(), Layout(tp=2, sp=True)),
    "pp2": Case("", Path(), Layout(pp=2)),
    "tp2 pp2": Case("", Path(), Layout(tp=2, pp=2)),
    "cp2": Case("", Path(), Layout(cp=2)),
    "tp2 sp cp2": Case("", Path(), Layout(tp=2, sp=True, cp=2)),
    "uneven": Case("", Path(), Layout(pp=2, num_layer_list=(3, 1))),
    "tp2 empty": Case("", Path(), Layout(tp=2, pp=2, noop_layers=(0, 3))),
    "tp2 vpp": Case("", Path(), Layout(tp=2, pp=2, vpp=1)),
    "vpp with empty": Case("", Path(), Layout(pp=2, vpp=2, noop_layers=(2, 3, 6, 7))),
    "vpp dp2": Case("", Path(), Layout(pp=2, vpp=1), dp=2),
    "pp4 empty": Case("", Path(), Layout(pp=4, vpp=1, noop_layers=(0, 2, 5, 7))),
    "dp2": Case("", Path(), dp=2),
    "tp2 dp2": Case("", Path(), Layout(tp=2), dp=2),
    "full recompute": Case("", Path(), Layout(tp=2, sp=True), more={"recompute": FULL_BLOCK}),
    "selective recompute": Case("", Path(), Layout(pp=2), more={"recompute": SELECTIVE}),
    "chunked logits": Case("", Path(), Layout(tp=2), more={"logit_chunk": 7}),
    "chunked logits cp2": Case("", Path(), Layout(cp=2), more={"logit_chunk": 5}),
    "offload": Case(
        "", Path(), dp=2, more={"offload": OffloadConfig(optimizer=True, grads=True, params=True)}
    ),
    "micro-batches of 1": Case("", Path(), micro_batch=1),
    "micro-batches of 8": Case("", Path(), micro_batch=8),
    "micro-batches by tokens": Case("", Path(), max_tokens=64),
}
# Cases of the tables outside of the full tables: each parallel dimension and each option once.
SINGLE_FAMILIES = ("qwen2", "qwen2 tied", "gemma2")
SHARDED_FAMILIES = ("gemma2",)
CHANGING_BATCHES = ("pp2", "micro-batches by tokens")
POLICY_UPDATES = ("tp2 pp2", "vpp dp2")
TABLE_LAYOUTS = (
    "tp2 sp cp2",
    "vpp with empty",
    "full recompute",
    "chunked logits cp2",
    "offload",
    "cp2 ring",
    "cp4 hybrid",
)
SPLIT_POLICIES = ("cispo",)
FIRST_BFLOAT16 = ("qwen3 tp2 sp", "gemma2")
RESUMED = ("resumed tp2 pp2",)
SPLIT_LORAS = ("lora single", "lora pp2 cp2")
SPLIT_CRITICS = ("vpp dp2",)
NOT_POISONED_BY = ("poisoned single", "poisoned tp2 sp cp2 chunked")
TABLE = {
    **LAYOUTS,
    "pp2 vpp": Case("", Path(), Layout(pp=2, vpp=1)),
    "uniform recompute": Case("", Path(), Layout(tp=2), more={"recompute": FULL}),
    "cp2 ulysses": Case("", Path(), Layout(cp=2, cp_algo="ulysses", head_ranks=2)),
    # One key and value head on each rank, for two ranks that exchange heads.
    "tp2 sp cp2 ulysses": Case(
        "", Path(), Layout(tp=2, sp=True, cp=2, cp_algo="ulysses", head_ranks=2)
    ),
    "cp2 ring": Case("", Path(), Layout(cp=2, cp_algo="ring"), more={"recompute": SELECTIVE}),
    "pp2 cp2 ring": Case("", Path(), Layout(pp=2, cp=2, cp_algo="ring")),
    "cp4 hybrid": Case("", Path(), Layout(cp=4, cp_algo="hybrid", head_ranks=2)),
}

SAVING = {"recompute": FULL, "offload": OffloadConfig(optimizer=True, grads=True, params=True)}
LORA = {
    "lora": LoraConfig(
        rank=4, alpha=8.0, targets=("q_proj", "v_proj", "linear_proj", "linear_fc1", "down_proj")
    )
}
LORAS = {
    "lora single": (Layout(), 1),
    "lora tp2": (Layout(tp=2), 1),
    "lora tp2 sp": (Layout(tp=2, sp=True), 2),
    "lora pp2 cp2": (Layout(pp=2, cp=2), 1),
}
POISONED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "poisoned single": (Layout(), {}),
    "poisoned chunked": (Layout(), {"logit_chunk": 5}),
    "poisoned tp2 sp": (Layout(tp=2, sp=True), {}),
    "poisoned cp2": (Layout(cp=2), {}),
    "poisoned tp2 sp cp2 chunked": (Layout(tp=2, sp=True, cp=2), {"logit_chunk": 5}),
}
RESUMES = (
    "resumed tp2 pp2",
    "resumed pp2 cp2",
    "resumed uneven from vpp",
    "resumed vpp from vpp",
    "resumed dp2 from tp2 pp2",
)
TRANSFORMERS_STEPS = {"qwen2": 20, "qwen3": 20, "llama": 20}  # 8 for other families
# Outside of the full tables. Cases that are compared by step have equally many steps, or more than
# the other: `bf16` has 6 steps, and `resumed` compares the last four of 8.
FEWER_STEPS = {
    **dict.fromkeys(("single qwen3", "single llama", "single gemma2", "single glm"), 4),
    **dict.fromkeys(("tp2 sp gemma2", "tp2 sp glm"), 4),
    "single qwen2": 6,
    **{f"{layout} qwen2 tied": 3 for layout in CHANGING_BATCHES},
}
DROPOUT = LoraConfig(
    rank=4,
    alpha=8.0,
    targets=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    dropout=0.3,
)
DROPOUT_LAYOUTS = {
    "lora dropout": Layout(),
    "lora dropout tp2": Layout(tp=2),
    "lora dropout tp2 sp": Layout(tp=2, sp=True),
}
FROZEN = ("model.embed_tokens.*", "decoder.layers.[01].*", "*.mlp.*")
CRITICS = {
    "tp2 sp": Case("", Path(), Layout(tp=2, sp=True)),
    "tp2 pp2": Case("", Path(), Layout(tp=2, pp=2)),
    "tp2 cp2": Case("", Path(), Layout(tp=2, cp=2)),
    "vpp dp2": Case("", Path(), Layout(pp=2, vpp=1), dp=2, micro_batch=1),
    "offload": Case(
        "",
        Path(),
        dp=2,
        max_tokens=64,
        more={"offload": OffloadConfig(optimizer=True, grads=True, params=True)},
    ),
}
# Every policy loss with each ratio that it supports; the aggregations are spread over them.
POLICIES = [
    ("gspo", "seq-mean-token-mean", {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    ("dr_grpo", "seq-sum-over-constant", {}),
    ("gmpo", "seq-mean-token-mean", {"policy_loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4}),
    ("cpgd", "token-mean", {"policy_loss": "cpgd"}),
    ("topr", "seq-mean-token-sum", {"policy_loss": "topr"}),
    (
        "tis",
        "micro-batch-mean",
        {"policy_loss": "tis", "ratio": "sequence", "sft_coef": 0.1, "rl_coef": 0.5},
    ),
    (
        "cispo",
        "seq-mean-token-sum",
        {"policy_loss": "cispo", "correction": Correction("sequence", 1.5, "token", 0.5, 2.0)},
    ),
    ("vanilla", "token-mean", {"policy_loss": "vanilla"}),
    (
        "sapo",
        "seq-mean-token-mean",
        {"policy_loss": "sapo", "kl_coef": 0.1, "kl_bias_correction": True},
    ),
    (
        "dppo",
        "token-mean",
        {
            "policy_loss": "dppo",
            "options": {"divergence": "kl"},
            "off_policy_limit": 0.01,
            "kl_coef": 0.1,
            "kl_estimator": "k3+",
        },
    ),
]


def randomize(model):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.08 if parameter.dim() > 1 else 0.2)
        if "norm" in name:
            parameter.data += 1
    return model


MODELS = ("qwen2", "qwen2 tied", "qwen3", "llama", "gemma2", "glm")


def make_model(name: str) -> torch.nn.Module:
    """Return one of the models, with random weights; the others are not created."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(_configs()[name], dtype=torch.float32)


def _configs() -> dict[str, Any]:
    import transformers

    # A padding token would have no gradient in transformers' embedding.
    gemma2 = {
        "pad_token_id": None,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }
    glm = {"head_dim": 16, "pad_token_id": None, "tie_word_embeddings": False}
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 16
    return {
        "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
        "qwen2 tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=rope),
        "gemma2": transformers.Gemma2Config(**SIZES, head_dim=32, **gemma2),
        "glm": transformers.GlmConfig(**SIZES, **glm),
    }


# One step in bfloat16, for which token counts are padded on CPU.
BFLOAT16_CASES = {
    "qwen3": Case("", Path()),
    "qwen3 tp2 sp": Case("", Path(), Layout(tp=2, sp=True)),
    "qwen3 pp2": Case("", Path(), Layout(pp=2)),
    "qwen3 cp2": Case("", Path(), Layout(cp=2), more={"logit_chunk": 7}),
    "qwen3 chunked": Case("", Path(), more={"logit_chunk": 80}),
    "gemma2": Case("", Path()),
    "gemma2 recomputed": Case(
        "", Path(), more={"recompute": RecomputeConfig(granularity="selective")}
    ),
}


def _with(case: Case, **changes) -> Case:
    return Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, **changes})


def _table(folders: dict[str, Path]) -> list[Case]:
    """Return cases of several steps on one batch.

    The low learning rate leaves margin to the tolerance of 1e-5, since AdamW amplifies rounding
    errors of nearly zero gradients to steps of the learning rate.
    """
    single = Case("table single", folders["qwen3"], steps=10, lr=3e-4, is_same_batch=True)
    lora = _with(single, name="table lora", model=folders["qwen2 tied"], more=LORA)
    split = [
        _with(
            case,
            name=f"table {layout}",
            model=folders["qwen3"],
            steps=10,
            lr=3e-4,
            is_same_batch=True,
        )
        for layout, case in TABLE.items()
    ]
    return [single, *split, lora, _with(lora, name="table lora tp2", layout=Layout(tp=2))]


def _bfloat16_cases(folders: dict[str, Path]) -> list[Case]:
    first = {
        name: _with(case, model=folders[name.split()[0]], steps=1, is_same_batch=True)
        for name, case in BFLOAT16_CASES.items()
    }
    single = [_with(first[family], name=f"first {family}") for family in ("qwen3", "gemma2")]
    return [
        *single,
        *[_with(case, name=f"first bf16 {name}", dtype="bfloat16") for name, case in first.items()],
    ]


# Batch of all losses: in one micro-batch, and over two and four ranks in token-limited
# micro-batches with samples in other orders.
SPREAD: dict[str, dict[str, Any]] = {
    "product single": {},
    "product dp2 shuffled": {"dp": 2, "max_tokens": 40, "order": (5, 2, 7, 0, 3, 6, 1, 4)},
    "product dp4 split": {"dp": 4, "max_tokens": 30},
}


def _outside(names: Iterable[str], core: Collection[str], label: str = "{}") -> list[str]:
    """Return the names of the cases of a table that only the full tables need."""
    return [label.format(name) for name in names if name not in core]


FULL_CASES = frozenset(
    {
        *_outside(LAYOUTS, CHANGING_BATCHES, "{} qwen2 tied"),
        *_outside(LAYOUTS, POLICY_UPDATES, "policy {}"),
        *_outside([*TABLE, "lora tp2"], TABLE_LAYOUTS, "table {}"),
        "table lora",
        *_outside([name for name, _, _ in POLICIES], SPLIT_POLICIES, "{} single"),
        *_outside([name for name, _, _ in POLICIES], SPLIT_POLICIES, "{} split"),
        *("full tp2 dp2", "full tp2 pp2", "full tp2 cp2"),
        *_outside(BFLOAT16_CASES, FIRST_BFLOAT16, "first bf16 {}"),
        *_outside(MODELS, SINGLE_FAMILIES, "single {}"),
        *_outside(("gemma2", "glm"), SHARDED_FAMILIES, "tp2 sp {}"),
        *_outside(RESUMES, RESUMED),
        "saved vpp",
        "saved tp2 pp2",
        *("critic scored", "critic bf16", "critic bf16 resumed", "critic resumed tp2 pp2"),
        "bf16 tp2 dp2",
        *_outside(LORAS, SPLIT_LORAS),
        *_outside(DROPOUT_LAYOUTS, ()),
        *_outside(DROPOUT_LAYOUTS, (), "{} recomputed"),
        *_outside(CRITICS, SPLIT_CRITICS, "critic {}"),
        *_outside(POISONED, NOT_POISONED_BY),
        "product dp4 split",
    }
)


def _poisoned_cases(folders: dict[str, Path]) -> list[Poisoned]:
    return [
        Poisoned(name, folders["qwen3"], layout, more) for name, (layout, more) in POISONED.items()
    ]


def selected_cases(folders: dict[str, Path], saves: Path, *, is_full: bool) -> list[Any]:
    """Return all cases; unless `is_full`, without those that only the full tables need."""
    cases = all_cases(folders, saves)
    if is_full:
        return cases
    return [_shortened(case) for case in cases if case.name not in FULL_CASES]


def _shortened(case: Any) -> Any:
    """Return a case of the tables with fewer steps; each step has the same checks."""
    steps = FEWER_STEPS.get(case.name, 2 if case.name.startswith("table ") else None)
    return case if steps is None else _with(case, steps=steps)


def all_cases(folders: dict[str, Path], saves: Path) -> list[Any]:
    """Return all cases."""
    cases = [
        Case(f"single {family}", folder, steps=TRANSFORMERS_STEPS.get(family, 8))
        for family, folder in folders.items()
        if family != "scored"
    ]
    cases += [
        _with(case, name=f"{layout} qwen2 tied", model=folders["qwen2 tied"], steps=5)
        for layout, case in LAYOUTS.items()
    ]
    cases += _table(folders)
    cases += _bfloat16_cases(folders)
    cases += [
        _with(LAYOUTS["tp2 sp"], name=f"tp2 sp {family}", model=folders[family])
        for family in ("gemma2", "glm")
    ]
    policy = Case("policy single", folders["qwen2"], loss="policy", steps=3)
    cases += [
        policy,
        *[
            _with(case, name=f"policy {layout}", model=folders["qwen2"], loss="policy", steps=3)
            for layout, case in LAYOUTS.items()
        ],
    ]
    for number, (name, aggregate, options) in enumerate(POLICIES):
        losses = Case(
            f"{name} single",
            folders["qwen2"],
            loss="policy",
            policy=options,
            aggregate=aggregate,
            steps=2,
        )
        cases += [
            losses,
            _with(
                losses,
                name=f"{name} split",
                layout=Layout(tp=2) if number % 2 else Layout(cp=2),
                dp=2,
                micro_batch=1,
            ),
        ]
    full = Case(
        "full single",
        folders["qwen2"],
        reference=folders["qwen2 tied"],
        loss="policy",
        policy={
            "kl_estimator": "full",
            "distillation": Distillation(
                0.5, {"a": 1.0, "b": 0.5}, "jensen_shannon", {"beta": 0.3}
            ),
        },
        teachers={"b": folders["llama"]},  # a has the weights of the reference
        steps=2,
    )
    cases += [
        full,
        _with(full, name="full tp2 dp2", layout=Layout(tp=2), dp=2),
        _with(full, name="full tp2 pp2", layout=Layout(tp=2, pp=2)),
        _with(full, name="full tp2 cp2", layout=Layout(tp=2, cp=2)),
    ]
    cases += [
        Case("saved", folders["qwen2 tied"], steps=4, save_at=4, save_to=saves / "single"),
        Case("resumed", folders["qwen2 tied"], first_step=4, resume_from=saves / "single"),
        Case(
            "resumed tp2 pp2",
            folders["qwen2 tied"],
            Layout(tp=2, pp=2),
            first_step=4,
            resume_from=saves / "single",
        ),
        Case(
            "resumed pp2 cp2",
            folders["qwen2 tied"],
            Layout(pp=2, cp=2),
            first_step=4,
            resume_from=saves / "single",
        ),
        Case(
            "saved vpp",
            folders["qwen2 tied"],
            LAYOUTS["tp2 vpp"].layout,
            steps=4,
            save_at=4,
            save_to=saves / "vpp",
        ),
        Case(
            "resumed uneven from vpp",
            folders["qwen2 tied"],
            LAYOUTS["uneven"].layout,
            first_step=4,
            resume_from=saves / "vpp",
        ),
        Case(
            "resumed vpp from vpp",
            folders["qwen2 tied"],
            LAYOUTS["vpp with empty"].layout,
            first_step=4,
            resume_from=saves / "vpp",
        ),
        Case(
            "saved tp2 pp2",
            folders["qwen2 tied"],
            Layout(tp=2, pp=2),
            steps=4,
            save_at=4,
            save_to=saves / "split",
        ),
        Case(
            "resumed dp2 from tp2 pp2",
            folders["qwen2 tied"],
            dp=2,
            first_step=4,
            resume_from=saves / "split",
        ),
        Case(
            "frozen",
            folders["qwen2 tied"],
            freeze=FROZEN,
            steps=4,
            save_at=2,
            save_to=saves / "frozen",
        ),
        Case(
            "frozen tp2 pp2",
            folders["qwen2 tied"],
            Layout(tp=2, pp=2),
            freeze=FROZEN,
            steps=4,
            more={"recompute": FULL},
        ),
        Case(
            "frozen resumed dp2",
            folders["qwen2 tied"],
            dp=2,
            freeze=FROZEN,
            first_step=2,
            steps=4,
            resume_from=saves / "frozen",
        ),
        Case(
            "poisoned",
            folders["qwen2"],
            Layout(pp=2),
            loss="policy",
            steps=3,
            poison_at=0,
            save_at=1,
            save_to=saves / "unmoved",
        ),
        Case(
            "resumed unmoved",
            folders["qwen2"],
            dp=2,
            loss="policy",
            first_step=1,
            steps=3,
            resume_from=saves / "unmoved",
        ),
        *[
            Case(name, folders["qwen2 tied"], layout, dp=dp, steps=5, lr=1e-2, more=LORA)
            for name, (layout, dp) in LORAS.items()
        ],
        Case(
            "lora saved",
            folders["qwen2 tied"],
            Layout(tp=2),
            steps=3,
            lr=1e-2,
            more=LORA,
            save_at=3,
            save_to=saves / "lora",
        ),
        Case(
            "lora resumed",
            folders["qwen2 tied"],
            dp=2,
            first_step=3,
            steps=5,
            lr=1e-2,
            more=LORA,
            resume_from=saves / "lora",
        ),
        *_critics(folders, saves),
        *_dropout_cases(folders["qwen2 tied"]),
        Case(
            "not poisoned",
            folders["qwen2"],
            Layout(pp=2),
            loss="policy",
            first_step=1,
            steps=3,
        ),
        Case(
            "bf16", folders["qwen2"], dtype="bfloat16", steps=6, save_at=3, save_to=saves / "bf16"
        ),
        Case(
            "bf16 resumed",
            folders["qwen2"],
            dtype="bfloat16",
            steps=6,
            first_step=3,
            resume_from=saves / "bf16",
            more=SAVING,
        ),
        Case("bf16 tp2 dp2", folders["qwen2"], Layout(tp=2), dp=2, dtype="bfloat16", steps=6),
    ]
    products = [Product(name, folders["qwen2"], **spread) for name, spread in SPREAD.items()]
    return [*cases, *_poisoned_cases(folders), *products]


def _dropout_cases(model: Path) -> list[Case]:
    """Return cases of adapters with dropout, without and with recomputed layers."""
    cases = [
        Case(name, model, layout, steps=3, lr=1e-2, more={"lora": DROPOUT})
        for name, layout in DROPOUT_LAYOUTS.items()
    ]
    settings = {"lora": DROPOUT, "recompute": FULL}
    recomputed = [_with(case, name=f"{case.name} recomputed", more=settings) for case in cases]
    return [*cases, *recomputed]


def _critics(folders: dict[str, Path], saves: Path) -> list[Case]:
    """Return cases of policies with a critic, in every layout, saved and resumed.

    The critic starts from the policy's weights or from a reward model.
    """
    single = Case("critic single", folders["qwen2 tied"], steps=4, critic=folders["qwen2 tied"])
    scored = Case("critic scored", folders["qwen2 tied"], steps=3, critic=folders["scored"])
    bf16 = _with(single, name="critic bf16", dtype="bfloat16")
    return [
        single,
        scored,
        *[
            _with(
                case,
                name=f"critic {layout}",
                model=single.model,
                critic=single.critic if case.dp == 2 else scored.critic,
                steps=3,
            )
            for layout, case in CRITICS.items()
        ],
        _with(single, name="critic saved", save_at=2, save_to=saves / "critic"),
        _with(single, name="critic resumed", first_step=2, resume_from=saves / "critic"),
        _with(
            single,
            name="critic resumed tp2 pp2",
            layout=Layout(tp=2, pp=2),
            first_step=2,
            resume_from=saves / "critic",
        ),
        _with(bf16, save_at=2, save_to=saves / "critic bf16"),
        _with(bf16, name="critic bf16 resumed", first_step=2, resume_from=saves / "critic bf16"),
    ]
