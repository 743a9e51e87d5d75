"""Jobs of the device benchmark and their results: ways to train small models, and real shapes.

Light to import: the driver creates the jobs and sends them to rank processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.checkpoints import HALF_BILLION
from benchmarks.device_commands import JOBS

STEPS = 10
# Largest relative differences of all losses and of the first gradient norm. Later gradients are of
# weights with different rounding, so their norms are only printed.
LOSS_BARS = {"bfloat16": 2e-2, "float32": 1e-4}
NORM_BARS = {"bfloat16": 2e-2, "float32": 1e-4}
ONE_AND_A_HALF_BILLION = {
    **HALF_BILLION,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}


@dataclass(frozen=True)
class Training:
    """Training on one batch from the weights in the folder `model`.

    `settings` are options of the policy's `ReplicaSettings`. With `resumes_at`, the training is
    saved after that many steps, and a new worker resumes it. A deterministic job runs twice.
    """

    name: str
    model: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_packed: bool = True
    is_deterministic: bool = False
    fused: bool = True  # uses the platform's fused attention if it supports the heads
    resumes_at: int | None = None
    lr: float = 1e-4

    @property
    def reference(self) -> str:
        """Name of the plain training that the results are compared with."""
        return f"{self.model} with adapters" if "lora" in self.settings else self.model


@dataclass(frozen=True)
class Speed:
    """Steps of a shape in bfloat16 on `num_rows` packed rows, `rows_at_once` per micro-batch.

    The last step runs under the profiler.
    """

    name: str
    model: str
    num_rows: int
    rows_at_once: int
    row: tuple[int, ...]  # lengths of the sequences in each row
    steps: int

    def smaller(self) -> Speed | None:
        """Return the job with half as large micro-batches, or None if they have one row."""
        return replace(self, rows_at_once=self.rows_at_once // 2) if self.rows_at_once > 1 else None


Job = Training | Speed


@dataclass(frozen=True)
class Work:
    """Jobs of one process, the folder of the models, and the lengths of the training sequences."""

    platform: str
    folder: Path
    lengths: tuple[int, ...]
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Facts:
    """First message of a rank: device and software versions."""

    device: str
    software: Mapping[str, str]


@dataclass(frozen=True)
class Trained:
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    attention: str  # "fused" or "torch"

    def __str__(self) -> str:
        return f"loss {self.losses[0]:.4f} to {self.losses[-1]:.4f}, {self.attention} attention"


@dataclass(frozen=True)
class Measured:
    step_s: float  # median
    num_tokens: int
    peak_bytes: int
    flops: int
    peak_flops: float | None
    # Shares of the device's time by kernel, largest first; empty without a profiler of the device.
    costs: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.step_s:.3f} s per step, {self.peak_bytes / 2**30:.1f} GiB"


@dataclass(frozen=True)
class Scale:
    """Sizes of all jobs: `models` are configurations by folder, `speeds` folders by title."""

    models: Mapping[str, Mapping[str, Any]]
    lengths: tuple[int, ...]  # of the sequences of the training batch
    chunk: int
    speeds: Mapping[str, str]
    row: tuple[int, ...]
    steps: int
    lr: float  # low enough that ten steps do not amplify rounding errors much
    commands: tuple[str, ...]  # names of jobs of `device_commands.py`

    def trainings(self, *, has_fused: bool) -> list[Training]:
        """Return all variants of training on one device, in both dtypes.

        Deterministic ones are last, since they need a separate process.
        """
        ways = [job for job in self._ways() if job.fused or has_fused]
        jobs = [
            replace(job, dtype=dtype)
            for dtype in LOSS_BARS
            for job in ways
            if dtype == "bfloat16" or _has_float32(job)
        ]
        return sorted(jobs, key=lambda job: job.is_deterministic)

    def references(self) -> list[Training]:
        """Return the plain trainings that the results are compared with."""
        plain = [
            Training(name, name, "float32", lr=self.lr)
            for name in ("dense", "window", "latent", "mixture")
        ]
        return [
            *plain,
            replace(
                plain[0], name="dense with adapters", settings=_settings(lora=True), lr=3 * self.lr
            ),
        ]

    def speed_jobs(self) -> list[Speed]:
        return [
            Speed(name, model, 4, 4, self.row, self.steps) for name, model in self.speeds.items()
        ]

    def _ways(self) -> list[Training]:
        plain, chunk = Training("plain", "dense", "", lr=self.lr), self.chunk
        families = [replace(plain, name=name, model=model) for model, name in _FAMILIES.items()]
        return [
            plain,
            replace(plain, name="not packed", is_packed=False),
            replace(
                plain,
                name="full recompute, uniform",
                settings=_settings(recompute=("full", "uniform", 1)),
            ),
            replace(
                plain,
                name="full recompute, block",
                settings=_settings(recompute=("full", "block", 1)),
            ),
            replace(
                plain,
                name="selective recompute",
                settings=_settings(recompute=("selective", "uniform", 1)),
            ),
            replace(plain, name="chunked cross-entropy", settings=_settings(chunk=chunk)),
            replace(plain, name="offload", settings=_settings(offload=True)),
            replace(plain, name="saved and resumed", resumes_at=STEPS // 2),
            replace(plain, name="LoRA", settings=_settings(lora=True), lr=3 * self.lr),
            *families,
            *(
                replace(job, name=f"{job.name}, deterministic, twice", is_deterministic=True)
                for job in (plain, families[1])
            ),
            *(
                replace(job, name=f"{job.name}, torch's attention", fused=False)
                for job in (plain, *families)
            ),
        ]


_FAMILIES = {
    "window": "sliding window",
    "latent": "latent attention, experts",
    "mixture": "mixture of experts",
}


def _has_float32(job: Training) -> bool:
    """Return True if the job also runs in float32, for which there are no fused kernels."""
    return job.fused and not job.is_deterministic


def _settings(
    *,
    lora: bool = False,
    recompute: tuple[Literal["full", "selective"], Literal["uniform", "block"], int] | None = None,
    chunk: int | None = None,
    offload: bool = False,
) -> Mapping[str, Any]:
    """Return the options of `ReplicaSettings` that differ from its defaults."""
    from msrl.config.sections.train import LoraConfig, OffloadConfig, RecomputeConfig

    chosen = {
        "lora": LoraConfig(
            rank=8, alpha=16.0, targets=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
        )
        if lora
        else None,
        "recompute": RecomputeConfig(
            granularity=recompute[0], method=recompute[1], layers=recompute[2]
        )
        if recompute
        else None,
        "logit_chunk": chunk,
        "offload": OffloadConfig(optimizer=True, grads=True, params=True) if offload else None,
    }
    return {name: value for name, value in chosen.items() if value}


def _latent_attention(head_dim: int) -> dict[str, int]:
    return {
        "kv_lora_rank": 2 * head_dim,
        "q_lora_rank": 3 * head_dim,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "v_head_dim": head_dim,
    }


def _grouped_routing() -> dict[str, Any]:
    return {
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


def _models(
    sizes: Mapping[str, int], *, head_dim: int, window: int, expert_size: int
) -> dict[str, Mapping[str, Any]]:
    """Return small configurations of real architectures, one per kind of attention and MLP."""
    common = {
        **sizes,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    experts = {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": True,
    }
    return {
        "dense": {
            **common,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 0,
            "tie_word_embeddings": True,
        },
        "window": {
            **common,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
            "tie_word_embeddings": False,
        },
        "latent": {
            **common,
            **experts,
            **_latent_attention(head_dim),
            **_grouped_routing(),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": sizes["num_attention_heads"],
            "tie_word_embeddings": False,
        },
        "mixture": {
            **common,
            **experts,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": head_dim,
            "num_experts": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    }


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 512,
}
_REAL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}
SCALES = {
    "real": Scale(
        models={
            **_models(_REAL, head_dim=64, window=100, expert_size=256),
            "qwen25_05b": HALF_BILLION,
            "qwen25_15b": ONE_AND_A_HALF_BILLION,
        },
        lengths=(512, 300, 129, 83),
        chunk=200,
        speeds={"Qwen2.5 0.5B": "qwen25_05b", "Qwen2.5 1.5B": "qwen25_15b"},
        row=(2048, 1024, 512, 512),
        steps=10,
        lr=1e-4,
        commands=tuple(job.name for job in JOBS),
    ),
    "tiny": Scale(
        models=_models(_TINY, head_dim=16, window=8, expert_size=48),
        lengths=(30, 17, 9, 24),
        chunk=20,
        speeds={"tiny": "dense"},
        row=(16, 8, 8),
        steps=3,
        lr=1e-3,
        commands=("train-sft, float32", "train-sft, resumed"),
    ),
}

_KINDS = {
    "attention": r"flash|fmha|attention|attn",
    "matrix products": r"gemm|nvjet|xmma|cutlass|matmul|aten::(mm|addmm|bmm|mv|addmv_?)\b",
    "AdamW": r"adam",
    "copies": r"memcpy|memset",
}


def classify_kernel(kernel: str) -> str:
    """Return the kind of a kernel, or its name without template arguments if it is unknown.

    >>> classify_kernel("nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT")
    'matrix products'
    >>> classify_kernel("void at::native::elementwise_kernel<128, 4, at::native::...>")
    'at::native::elementwise_kernel'
    """
    for kind, pattern in _KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].strip()
