"""Optional packages, and the extras of msrl that install them. Light to import."""

from __future__ import annotations

# Modules of optional packages, by the extra that installs them; all others come with the platform.
EXTRAS = {
    name: name
    for name in (
        "clearml",
        "gymnasium",
        "mcp",
        "mlflow",
        "swanlab",
        "textarena",
        "trackio",
        "wandb",
    )
} | {
    "reasoning_gym": "reasoning",
    **dict.fromkeys(("evaluate", "immutabledict", "langdetect", "lm_eval", "nltk"), "benchmarks"),
}
PLATFORM_MODULES = frozenset(
    {
        "datasets", "gguf", "google_crc32c", "huggingface_hub", "isal", "jinja2", "megatron",
        "msgspec", "psutil", "ray", "safetensors", "tensorboard", "tokenizers", "torch",
        "torch_npu", "transformers", "vllm",
    }
)  # fmt: skip


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return which extra installs the package that a command lacks; None for another module."""
    name = error.name or ""
    if name in EXTRAS:
        return f"{name}: not installed. Install it with: pip install 'msrl[{EXTRAS[name]}]'"
    if name not in PLATFORM_MODULES:
        return None
    return (
        f"{name}: not installed. Install the packages of a platform: pip install 'msrl[cpu]', or "
        "cuda or npu in place of cpu"
    )
