"""Every config.json of the real inputs is read, or refused with a reason of its own."""

from __future__ import annotations

import pytest

from msrl.errors import MsrlError
from msrl.models.families import load_shape
from support import mentions, shared_data

# Words of the reason why msrl refuses a file.
REFUSED = {
    "InternVL2-2B": ("*-hf",),
    "Qwen-72B-Chat": ("first Qwen",),
    "Qwen-7B-Chat": ("first Qwen",),
    "openPangu-Embedded": ("bias", "output projection"),
    "MiniMaxAI--MiniMax-M3": ("blocks of keys",),
    "XiaomiMiMo--MiMo-V2-Flash": ("query groups", "values"),
    "deepseek-ai--DeepSeek-V4-Flash": ("compresses",),
    "deepseek-ai--DeepSeek-V4-Pro": ("compresses",),
    "google--gemma-4-26B-A4B": ("Gemma 2 and 3",),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": ("chunks",),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": ("chunks",),
    "moonshotai--Kimi-K2.5": ("vision tower",),
    "moonshotai--Kimi-K3": ("linear attention",),
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": ("different numbers",),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("state-space",),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("state-space",),
    "nvidia--Nemotron-H-56B-Base-8K": ("state-space",),
    "stepfun-ai--Step-3.7-Flash": ("gates",),
}


def test_a_published_config_is_read_or_refused_with_its_reason() -> None:
    files = sorted(shared_data("configs").rglob("*config.json"))
    names = {file: file.name[: -len(".config.json")] for file in files}
    assert REFUSED.keys() <= set(names.values())
    for file, name in names.items():
        if name not in REFUSED:
            assert load_shape(file).num_layers > 1
            continue
        with pytest.raises(MsrlError, match=mentions("not supported", *REFUSED[name])):
            load_shape(file)
