"""Keys that the five guides document, read from their files; tests are skipped if the files are
absent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support import SHARED

NOT_OURS = {"full", "install", "no-deps", "local-dir"}  # options of pip and of the hub client
# Listed like keys: values of a key, and what tracker_kwargs passes on.
VALUES = {
    "lightrft-parameters": {"cpgd", "group_norm", "reinforce"},
    "roll-parameters": {"None", "selective", "log_dir"},
}
GUIDES = {
    "mindspeed-rl-grpo-parameters": ("mindspeed_rl",),
    "mindspeed-rl-r1-zero": ("mindspeed_rl", "mindspeed_llm"),
    "mindspeed-llm-full-pipeline": ("mindspeed_llm", "mindspeed_rl"),
    "lightrft-parameters": ("lightrft",),
    "roll-parameters": ("roll",),
}


def guide(name: str) -> str:
    """Return the text of one guide."""
    beside = SHARED / "data"
    path = Path(os.environ.get("MSRL_TEST_DATA", beside)).parent / "reference" / f"guide-{name}.md"
    if not path.is_file():
        pytest.skip(f"the guide is not here: {path}")
    return path.read_text(encoding="utf-8")


def documented_keys(name: str) -> set[str]:
    """Return every key of a guide, from bullets, headings, commands and YAML."""
    text = guide(name)
    keys = set(
        re.findall(r"^\s*[*\-•#]+ +`?(?:--)?([A-Za-z_][\w.\-]*) *[：:]? *`", text, re.M | re.A)
    )
    keys |= (
        set(re.findall(r"^\s*[*\-•] +([A-Za-z_][\w.]*) *[：:]", text, re.M | re.A))
        if name.startswith("roll")
        else set()
    )
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M):
        keys |= set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", block))
        is_yaml = re.search(r"^\s*(defaults|actor_rollout_ref|actor_resource):", block, re.M)
        keys |= (
            set(re.findall(r"^\s*([a-z_]\w*) *:(?=\s|$)", block, re.M | re.A)) if is_yaml else set()
        )
    keys |= (
        set(re.findall(r"^\s*export ([A-Z][A-Z_]+)=", text, re.M | re.A))
        if name.startswith("lightrft")
        else set()
    )
    if name.startswith("roll"):
        keys |= set(re.findall(r"^([a-z_]\w*):(?=\s|$)", text, re.M | re.A))
    return {key.rpartition(".")[2] for key in keys} - NOT_OURS - VALUES.get(name, set())
