"""The folders of MindSpeed-LLM's examples with Megatron: each is imported or refused by name.

Source: MindSpeed-LLM c77308a1, examples/mcore.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mindspeed_oracle
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from support import mentions
from test_imports_scripts import TUNE, convert, native_tree

SPEC = "--spec mindspeed_llm.tasks.models.spec"
LATENT = (
    f"{SPEC}.deepseek_spec layer_spec --multi-latent-attention --kv-lora-rank 512 "
    "--qk-pos-emb-head-dim 64 --rope-scaling-type yarn --beta-slow 1 --seq-aux"
)
DELTA = (
    f"{SPEC}.qwen3_next_spec layer_spec --model-type-hf qwen3-next --mamba-d-conv 4 "
    "--mamba-expand 1 --mamba-chunk-size 64 --no-enable-linear-qkv --add-rmsnorm-offset "
    "--use-triton-gdn --partial-rotary-factor 0.25"
)
NEXT = f"{DELTA} --full-attention-interval 4 --linear-num-value-heads 32 --shared-expert-gate"
PREDICTION = "--mtp-num-layers 1"
# What distinguishes the model in the scripts of the folder, and a word of the reason why a training
# with these flags is refused; "": it is imported, with the same settings as without them.
FOLDERS = {
    "deepseek2_lite": (f"{LATENT} --beta-fast 32 --n-shared-experts 2", ""),
    "deepseek3": (f"{LATENT} --beta-fast 32 --q-lora-rank 1536 --mla-mm-split", "joined"),
    "deepseek32": (f"{LATENT} --q-lora-rank 1536 --enable-dsa-indexer", "neighboring channels"),
    "deepseek4_flash": (f"{SPEC}.deepseek4_spec layer_spec --enable-mhc", "hyper-connections"),
    "gated_deltanet": (f"{DELTA} --full-attention-interval 3 --linear-num-value-heads 8", ""),
    "gemma2": (
        "--post-norm --gelu-tanh --query-pre-attn-scalar 144 --output-logit-softcapping 30.0 "
        "--interleave-sliding-window 4096 --add-rmsnorm-offset --input-embeds-norm",
        "",
    ),
    "glm45": ("--add-qkv-bias --rotary-percent 0.5 --n-shared-experts 1 --no-rope-fusion", ""),
    "glm45-air": (f"--add-qkv-bias --rotary-percent 0.5 {PREDICTION}", "multi-token prediction"),
    "glm5": (f"{LATENT} --q-lora-rank 2048 {PREDICTION}", "multi-token prediction"),
    "glm52": (f"{LATENT} --index-topk-freq 4 {PREDICTION}", "multi-token prediction"),
    "hunyuan3": ("--model-type-hf HYV3 --n-shared-experts 1 --router-gating-in-fp32", ""),
    "kimi2": (f"{LATENT} --beta-fast 1 --q-lora-rank 1536 --n-shared-experts 1", ""),
    "ling_v2": (f"{SPEC}.bailing_spec layer_spec --rotary-percent 0.5 --n-shared-experts 1", ""),
    "llama2": ("--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights", ""),
    "longcat": (f"{SPEC}.longcat_spec layer_spec --num-zero-experts 256", "longcat"),
    "magistral": ("--kv-channels 128 --group-query-attention --num-query-groups 8", ""),
    "minimax27": (f"{SPEC}.minimax_spec layer_spec --model-type-hf minimax_m2", ""),
    "phi35": (
        "--rope-scaling-type longrope --longrope-freqs-type outer --long-factor 1.1,1.2 "
        "--short-factor 1.0,1.1",
        "length of each sequence",
    ),
    "plm": (f"{SPEC}.plm_spec layer_spec --squared-relu --rope-scaling-type plm", "squared ReLU"),
    "qwen25": ("--add-qkv-bias --group-query-attention --num-query-groups 8", ""),
    "qwen3": (f"{SPEC}.qwen3_spec layer_spec --qk-layernorm --kv-channels 128", ""),
    "qwen3_coder_next": (NEXT, ""),
    "qwen3_moe": (f"{SPEC}.qwen3_spec layer_spec --qk-layernorm --norm-topk-prob", ""),
    "qwen3_next": (NEXT, ""),
    "seed_oss": ("--add-qkv-bias --kv-channels 128 --group-query-attention", ""),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_model_of_the_examples_is_imported_or_refused_with_the_reason(folder: str) -> None:
    flags, reason = FOLDERS[folder]
    if reason:
        with pytest.raises(MsrlError, match=mentions("command line", reason)):
            convert(f"{TUNE} {flags}")
    else:
        assert native_tree(f"{TUNE} {flags}") == native_tree(TUNE)


@pytest.mark.full
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_script_of_the_examples_is_imported_or_names_what_is_refused(folder: str) -> None:
    root = mindspeed_oracle.checkout() / "examples" / "mcore"
    assert {path.name for path in root.iterdir()} == FOLDERS.keys()
    for script in (root / folder).glob("*.sh"):
        try:
            assert native_yaml(translate_arguments("mindspeed-llm", [str(script)])), script
        except MsrlError as error:
            _check_refusal(script, str(error).splitlines())


def _check_refusal(script: Path, lines: list[str]) -> None:
    """Check that a refusal has the reason of every line of the script that causes it."""
    for line in lines:
        assert line.startswith(str(script)), line
        reasons = ("not supported", "not imported", "--approximate", "nothing to import")
        assert any(reason in line for reason in reasons), line


@pytest.mark.parametrize("flags", ["--load None", ""])
def test_a_pretraining_that_loads_nothing_starts_from_random_weights(flags: str) -> None:
    line = f"pretrain_gpt.py --data-path d --lr 1e-4 --train-iters 9 --global-batch-size 8 {flags}"
    tree = native_tree(f"{line} --tokenizer-name-or-path t")
    assert tree["model"]["init"] == "random" and "load" not in tree.get("checkpoint", {})


def test_a_fine_tuning_that_loads_nothing_is_refused() -> None:
    with pytest.raises(MsrlError, match=mentions("load: missing", "random weights")):
        convert(TUNE.replace("--load ckpt", "--load None"))
