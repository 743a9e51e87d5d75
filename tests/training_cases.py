"""The trainings that `test_training.py` compares: small random models, and every case that one start of the ranks goes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from msrl.algorithms.mismatch import Correction
from msrl.config.sections.train import LoraConfig, OffloadConfig, RecomputeConfig
from msrl.trainer.settings import Layout
from poisoned_ranks import Poisoned
from product_ranks import Product
from training_ranks import VOCAB, Case

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
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
TABLE = {
    **LAYOUTS,
    "pp2 vpp": Case("", Path(), Layout(pp=2, vpp=1)),
    "uniform recompute": Case("", Path(), Layout(tp=2), more={"recompute": FULL}),
}

SAVING = {"recompute": FULL, "offload": OffloadConfig(optimizer=True, grads=True, params=True)}
LORA = {
    "lora": LoraConfig(
        rank=4, alpha=8.0, targets=("q_proj", "v_proj", "linear_proj", "linear_fc1", "down_proj")
    )
}
LORAS = {
    "lora whole": (Layout(), 1), "lora tp2": (Layout(tp=2), 1), "lora tp2 sp": (Layout(tp=2, sp=True), 2),
    "lora pp2 cp2": (Layout(pp=2, cp=2), 1),
}  # fmt: skip
POISONED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "poisoned whole": (Layout(), {}), "poisoned chunked": (Layout(), {"logit_chunk": 5}), "poisoned tp2 sp": (Layout(tp=2, sp=True), {}),
    "poisoned cp2": (Layout(cp=2), {}), "poisoned tp2 sp cp2 chunked": (Layout(tp=2, sp=True, cp=2), {"logit_chunk": 5}),
}  # fmt: skip
STEPS_BESIDE_TRANSFORMERS = {"qwen2": 20, "qwen3": 20, "llama": 20}  # 8 of the others
DROPOUT = LoraConfig(
    rank=4,
    alpha=8.0,
    targets=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    dropout=0.3,
)
DROPPED = {
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
# Every policy loss with each ratio that it takes, the aggregations spread over them.
POLICIES = [
    ("gspo", "seq-mean-token-mean", {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    ("dr_grpo", "seq-sum-over-constant", {}),
    ("gmpo", "seq-mean-token-mean", {"policy_loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4}),
    ("cpgd", "token-mean", {"policy_loss": "cpgd"}),
    ("topr", "seq-mean-token-sum", {"policy_loss": "topr"}),
    (
        "tis",
        "token-mean",
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


def randomised(model):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.08 if parameter.dim() > 1 else 0.2)
        if "norm" in name:
            parameter.data += 1
    return model


def models() -> dict[str, torch.nn.Module]:
    import transformers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

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
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
        "qwen2 tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(
            LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=rope)
        ),
        "gemma2": transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**SIZES, head_dim=32, **gemma2)
        ),
        "glm": transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES, **glm)),
    }


# One step of a family in bfloat16, whose counts of tokens are padded on CPU.
HALVES = {
    "qwen3": Case("", Path()), "qwen3 tp2 sp": Case("", Path(), Layout(tp=2, sp=True)), "qwen3 pp2": Case("", Path(), Layout(pp=2)),
    "qwen3 cp2": Case("", Path(), Layout(cp=2), more={"logit_chunk": 7}), "qwen3 chunked": Case("", Path(), more={"logit_chunk": 80}),
    "gemma2": Case("", Path()), "gemma2 recomputed": Case("", Path(), more={"recompute": RecomputeConfig(granularity="selective")}),
}  # fmt: skip


def _with(case: Case, **changes) -> Case:
    return Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, **changes})


def _table(folders: dict[str, Path]) -> list[Case]:
    """Ten steps on one batch, at a rate that leaves margin to 1e-5: AdamW makes a step of the rate out of rounding errors."""
    whole = Case("table whole", folders["qwen3"], steps=10, lr=3e-4, is_same_batch=True)
    lora = _with(whole, name="table lora", model=folders["qwen2 tied"], more=LORA)
    cut = [
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
    return [whole, *cut, lora, _with(lora, name="table lora tp2", layout=Layout(tp=2))]


def _halves(folders: dict[str, Path]) -> list[Case]:
    first = {
        name: _with(case, model=folders[name.split()[0]], steps=1, is_same_batch=True)
        for name, case in HALVES.items()
    }
    whole = [_with(first[family], name=f"first {family}") for family in ("qwen3", "gemma2")]
    return [
        *whole,
        *[_with(case, name=f"first bf16 {name}", dtype="bfloat16") for name, case in first.items()],
    ]


# The batch of the product of all losses in one pack; over two and over four ranks, cut by tokens, its samples in other orders.
SPREAD: dict[str, dict[str, Any]] = {
    "product whole": {}, "product dp2 cut": {"dp": 2, "max_tokens": 40},
    "product dp4 shuffled": {"dp": 4, "max_tokens": 30, "order": (5, 2, 7, 0, 3, 6, 1, 4)},
}  # fmt: skip


def _poisoned(folders: dict[str, Path]) -> list[Poisoned]:
    return [
        Poisoned(name, folders["qwen3"], layout, more) for name, (layout, more) in POISONED.items()
    ]


def all_cases(folders: dict[str, Path], saves: Path) -> list[Any]:
    """Everything that this file looks at, in one start of the ranks."""
    cases = [
        Case(f"whole {family}", folder, steps=STEPS_BESIDE_TRANSFORMERS.get(family, 8))
        for family, folder in folders.items()
    ]
    cases += [
        _with(case, name=f"{layout} qwen2 tied", model=folders["qwen2 tied"], steps=5)
        for layout, case in LAYOUTS.items()
    ]
    cases += _table(folders)
    cases += _halves(folders)
    cases += [
        _with(LAYOUTS["tp2 sp"], name=f"tp2 sp {family}", model=folders[family])
        for family in ("gemma2", "glm")
    ]
    policy = Case("policy whole", folders["qwen2"], loss="policy", steps=3)
    cases += [
        policy,
        *[
            _with(case, name=f"policy {layout}", model=folders["qwen2"], loss="policy", steps=3)
            for layout, case in LAYOUTS.items()
        ],
    ]
    for number, (name, aggregate, options) in enumerate(POLICIES):
        losses = Case(
            f"{name} whole",
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
                name=f"{name} cut",
                layout=Layout(tp=2) if number % 2 else Layout(cp=2),
                dp=2,
                micro_batch=1,
            ),
        ]
    full = Case(
        "full whole",
        folders["qwen2"],
        reference=folders["qwen2 tied"],
        loss="policy",
        policy={"kl_estimator": "full"},
        steps=2,
    )
    cases += [
        full,
        _with(full, name="full tp2 dp2", layout=Layout(tp=2), dp=2),
        _with(full, name="full tp2 pp2", layout=Layout(tp=2, pp=2)),
        _with(full, name="full tp2 cp2", layout=Layout(tp=2, cp=2)),
    ]
    cases += [
        Case("saved", folders["qwen2 tied"], steps=4, save_at=4, save_to=saves / "whole"),
        Case("resumed", folders["qwen2 tied"], first_step=4, resume_from=saves / "whole"),
        Case(
            "resumed tp2 pp2",
            folders["qwen2 tied"],
            Layout(tp=2, pp=2),
            first_step=4,
            resume_from=saves / "whole",
        ),
        Case(
            "resumed pp2 cp2",
            folders["qwen2 tied"],
            Layout(pp=2, cp=2),
            first_step=4,
            resume_from=saves / "whole",
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
            save_to=saves / "cut",
        ),
        Case(
            "resumed dp2 from tp2 pp2",
            folders["qwen2 tied"],
            dp=2,
            first_step=4,
            resume_from=saves / "cut",
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
            Layout(tp=2, pp=2),
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
            Layout(tp=2, pp=2),
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
        *_dropped(folders["qwen2 tied"]),
        Case(
            "not poisoned",
            folders["qwen2"],
            Layout(tp=2, pp=2),
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
    return [*cases, *_poisoned(folders), *products]


def _dropped(model: Path) -> list[Case]:
    """Adapters with dropout, and the same with layers computed again."""
    cases = [
        Case(name, model, layout, steps=3, lr=1e-2, more={"lora": DROPOUT})
        for name, layout in DROPPED.items()
    ]
    again = {"lora": DROPOUT, "recompute": FULL}
    return [*cases, *[_with(case, name=f"{case.name} recomputed", more=again) for case in cases]]


def _critics(folders: dict[str, Path], saves: Path) -> list[Case]:
    """Policies with a critic beside them: from the policy's own weights, from a reward model, in every layout, saved and resumed."""
    whole = Case("critic whole", folders["qwen2 tied"], steps=4, critic=folders["qwen2 tied"])
    scored = Case("critic scored", folders["qwen2 tied"], steps=3, critic=folders["scored"])
    bf16 = _with(whole, name="critic bf16", dtype="bfloat16")
    return [
        whole,
        scored,
        *[
            _with(
                case,
                name=f"critic {layout}",
                model=whole.model,
                critic=whole.critic if case.dp == 2 else scored.critic,
                steps=3,
            )
            for layout, case in CRITICS.items()
        ],
        _with(whole, name="critic saved", save_at=2, save_to=saves / "critic"),
        _with(whole, name="critic resumed", first_step=2, resume_from=saves / "critic"),
        _with(
            whole,
            name="critic resumed tp2 pp2",
            layout=Layout(tp=2, pp=2),
            first_step=2,
            resume_from=saves / "critic",
        ),
        _with(bf16, save_at=2, save_to=saves / "critic bf16"),
        _with(bf16, name="critic bf16 resumed", first_step=2, resume_from=saves / "critic bf16"),
    ]
