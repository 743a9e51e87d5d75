"""Checkpoints exchanged bit for bit with MindSpeed-LLM's converter, in both directions."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
import mindspeed_oracle as oracle
from families import FAMILIES
from mixture_families import MIXTURES
from model_table import MODEL_TYPES, UNSHARDED
from msrl.checkpoint.mcore.argument_table import READ_ARGUMENTS
from msrl.checkpoint.mcore.files import namespace
from msrl.models.families import all_rules, load_shape
from msrl.models.parallel_layout import ParallelLayout
from msrl.verification.bits import same_bits
from support import assert_mentions
from test_cli import msrl

DENSE = ("qwen2.5", "qwen3", "llama 2", "llama 3.2", "gemma 2", "seed-oss")
# The options of msrl; MindSpeed-LLM's names are made from them.
LAYOUTS = {
    "one rank": "", "tp2": "--tp 2", "pp2": "--pp 2", "tp2 pp2": "--tp 2 --pp 2",
    "pp2 vpp1": "--pp 2 --vpp 1",
    "tp2 pp2 vpp1": "--tp 2 --pp 2 --vpp 1", "pp2 uneven": "--pp 2 --num-layer-list 1,3",
    "pp2 empty": "--pp 2 --noop-layers 0,5",
}  # fmt: skip
EXPERTS = {
    "ep2": "--ep 2", "tp2 ep2": "--tp 2 --ep 2", "tp2 pp2 ep2": "--tp 2 --pp 2 --ep 2",
    "pp2 ep2": "--pp 2 --ep 2", "pp2 vpp1 ep2": "--pp 2 --vpp 1 --ep 2",
    "tp2 grouped": "--tp 2 --moe-grouped-gemm", "ep2 grouped": "--ep 2 --moe-grouped-gemm",
    "tp2 pp2 ep2 grouped": "--tp 2 --pp 2 --ep 2 --moe-grouped-gemm",
    "tp2 ep2 etp1": "--tp 2 --ep 2 --etp 1",
    "tp2 ep2 etp1 grouped": "--tp 2 --ep 2 --etp 1 --moe-grouped-gemm",
    "tp2 ep2 extended grouped": "--tp 2 --ep 2 --moe-tp-extend-ep --moe-grouped-gemm",
}  # fmt: skip
TABLE = [
    (name, layout)
    for name in MODEL_TYPES
    for layout in (LAYOUTS if name in DENSE else LAYOUTS | EXPERTS)
    if MODEL_TYPES[name] not in UNSHARDED or "tp2" not in layout
]
NORMAL = {
    ("qwen2.5", "tp2 pp2"), ("deepseek v3", "tp2 ep2 extended grouped"), ("glm 5.2", "pp2 ep2"),
    ("ling 2", "tp2 ep2"), ("minimax m2", "ep2"), ("qwen3-next", "pp2 ep2"),
}  # fmt: skip
THEIRS = {
    "--tp": "--target-tensor-parallel-size", "--pp": "--target-pipeline-parallel-size",
    "--ep": "--target-expert-parallel-size",
    "--etp": "--expert-tensor-parallel-size", "--vpp": "--num-layers-per-virtual-pipeline-stage",
}  # fmt: skip
PARAMETERS = [
    pytest.param(
        *row, marks=[] if row in NORMAL else [pytest.mark.slow, pytest.mark.full], id=", ".join(row)
    )
    for row in TABLE
]


def words(text: str) -> list[str]:
    return text.split()


# Arguments that the other systems read from a checkpoint: load_args_from_checkpoint and
# check_checkpoint_args of Megatron-LM core_v0.12.1,
# load_args_from_checkpoint_wrapper of MindSpeed-LLM c77308a1, and Mg2HfConvert of the same.
LOADED_BY_MEGATRON = words("""
    num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups
    group_query_attention kv_channels max_position_embeddings position_embedding_type
    add_position_embedding use_rotary_position_embeddings rotary_base rotary_percent
    rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu
    untie_embeddings_and_output_weights apply_layernorm_1p normalization
    apply_query_key_layer_scaling attention_dropout hidden_dropout hybrid_override_pattern spec
    hybrid_attention_ratio hybrid_mlp_ratio num_experts moe_layer_freq moe_ffn_hidden_size
    moe_router_topk moe_token_dispatcher_type moe_router_pre_softmax moe_grouped_gemm
    moe_shared_expert_intermediate_size mamba_state_dim mamba_head_dim mamba_num_groups
    is_hybrid_model heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    tokenizer_type tokenizer_model tiktoken_pattern padded_vocab_size ckpt_format
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    num_layers_per_virtual_pipeline_stage
    expert_model_parallel_size
""")
CHECKED_BY_MEGATRON = words("""
    num_layers hidden_size num_attention_heads add_position_embedding max_position_embeddings
    make_vocab_size_divisible_by padded_vocab_size tokenizer_type data_parallel_random_init
    tensor_model_parallel_size pipeline_model_parallel_size no_save_optim no_save_rng
    consumed_train_samples skipped_train_samples consumed_valid_samples
""")
LOADED_BY_MINDSPEED = words("""
    num_layer_list post_norm num_experts sequence_parallel n_shared_experts qk_layernorm
    moe_intermediate_size first_k_dense_replace moe_layer_freq multi_latent_attention
    qk_pos_emb_head_dim qk_head_dim q_lora_rank kv_lora_rank v_head_dim shared_expert_gate
    expert_model_parallel_size
""")
READ_BY_MG2HF = words("""
    tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
    first_k_dense_replace n_shared_experts expert_tensor_parallel_size num_layers num_layer_list
    num_layers_per_virtual_pipeline_stage num_experts hidden_size num_attention_heads
    num_key_value_heads kv_channels add_qkv_bias qk_layernorm q_lora_rank qk_head_dim
    qk_pos_emb_head_dim v_head_dim post_norm shared_expert_gate
    untie_embeddings_and_output_weights full_attention_interval
""")
NOT_WRITTEN = {
    # Settings of a training or a machine, which a converted model does not fix
    "sequence_parallel", "moe_token_dispatcher_type", "tokenizer_model", "tiktoken_pattern", "spec",
    # Architectures that msrl does not have
    "hybrid_override_pattern", "hybrid_attention_ratio", "hybrid_mlp_ratio", "is_hybrid_model",
    "mamba_state_dim", "mamba_head_dim",
    "mamba_num_groups", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    # mg2hf has an indexer by the model type, and writes those of the checkpoint without these
    "enable_dsa_indexer", "indexer_types", "index_topk_freq", "index_skip_topk_offset",
    "apply_layernorm_1p",  # MindSpeed-LLM's RMSNorm has --add-rmsnorm-offset in its place
    "qkv_type", "fc_type", "router_bias",
    # mg2hf has them from its own model_cfg.json, by the model type
}  # fmt: skip


def row_config(name: str) -> dict[str, Any]:
    """Return the config of a row with bf16 weights and a vocabulary that two ranks divide.

    MindSpeed-LLM does not pad the vocabulary.
    """
    config = {**(FAMILIES | MIXTURES)[name].config, "torch_dtype": "bfloat16", "vocab_size": 200}
    if name == "mixtral":
        config["num_experts"] = config["num_local_experts"]  # the name in MindSpeed-LLM
    if name == "ling 2":
        # mg2hf takes the size of all heads for that of the hidden state.
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def save_source(folder: Path, name: str) -> dict[str, Tensor]:
    """Write a Hugging Face folder with bf16 weights and return the weights.

    Routers' correction biases and the norms of indexers stay float32, as published.
    """
    rules = all_rules(load_shape(families.save_model(folder, row_config(name))))
    wide = {key for rule in rules if rule.dtype == "float32" for key in rule.hf}
    weights = {
        key: value if key in wide else value.to(torch.bfloat16)
        for key, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def assert_same_weights(folder: Path, expected: dict[str, Tensor]) -> None:
    weights = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not same_bits(weights[name], expected[name])] == []


def assert_converts_back(folder: Path, weights: dict[str, Tensor]) -> None:
    """Convert `mg`, without msrl's manifest, and compare the result with the weights."""
    (folder / "mg" / "msrl_manifest.json").unlink()
    folders = ("--load", str(folder / "mg"), "--save", str(folder / "back"))
    assert msrl("convert-ckpt", "mcore2hf", *folders, "--no-verify") == 0
    assert_same_weights(folder / "back", weights)


@pytest.mark.parametrize(("name", "layout"), PARAMETERS)
def test_a_checkpoint_of_mindspeeds_converter_is_read_unchanged(
    tmp_path: Path, name: str, layout: str
) -> None:
    root, words = oracle.checkout(), (LAYOUTS | EXPERTS)[layout].split()
    weights = save_source(tmp_path / "hf", name)
    folders = ("--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg"))
    oracle.convert(
        root,
        "--model-type-hf",
        MODEL_TYPES[name],
        *folders,
        *(THEIRS.get(word, word) for word in words),
    )
    ours = (
        "--load",
        str(tmp_path / "mg"),
        "--hf-config",
        str(tmp_path / "hf"),
        "--save",
        str(tmp_path / "back"),
    )
    assert msrl("convert-ckpt", "mcore2hf", *ours, "--no-verify") == 0
    assert_same_weights(tmp_path / "back", weights)


@pytest.mark.parametrize(("name", "layout"), PARAMETERS)
def test_mindspeeds_converter_reads_a_checkpoint_of_msrl_unchanged(
    tmp_path: Path, name: str, layout: str
) -> None:
    root, words = oracle.checkout(), (LAYOUTS | EXPERTS)[layout].split()
    weights = save_source(tmp_path / "hf", name)
    ours = ["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg")]
    ours += ["--names", "mindspeed"] if name == "qwen3-next" else []
    assert msrl("convert-ckpt", "hf2mcore", *ours, *words, "--no-verify") == 0
    # The layout comes from our arguments; these four are read from its command line alone.
    repeated = [word for word in words if word.startswith(("--moe-", "--noop-"))]
    if "--noop-layers" in words:
        repeated.append(words[words.index("--noop-layers") + 1])
    folders = ("--load-dir", str(tmp_path / "mg"), "--save-dir", str(tmp_path / "back"))
    oracle.convert(
        root,
        "--load-model-type",
        "mg",
        "--save-model-type",
        "hf",
        "--model-type-hf",
        MODEL_TYPES[name],
        *folders,
        *repeated,
    )
    assert_same_weights(tmp_path / "back", weights)


def model_shape(name: str) -> Any:
    return families.shape(row_config(name))


def arguments(name: str, layout: ParallelLayout | None = None, **changes: Any) -> dict[str, Any]:
    return vars(namespace(model_shape(name), layout or ParallelLayout(), **changes))


@pytest.mark.parametrize(
    "readers", [LOADED_BY_MEGATRON, CHECKED_BY_MEGATRON, LOADED_BY_MINDSPEED, READ_BY_MG2HF]
)
@pytest.mark.parametrize("name", ["qwen2.5", "deepseek v3"])
def test_every_argument_that_the_others_read_is_written(readers: list[str], name: str) -> None:
    assert set(readers) - NOT_WRITTEN - arguments(name).keys() == set()
    assert set(readers) - NOT_WRITTEN <= READ_ARGUMENTS.keys()
    assert READ_ARGUMENTS.keys().isdisjoint(NOT_WRITTEN)


def test_every_row_of_the_table_is_read() -> None:
    assert READ_ARGUMENTS.keys() <= {
        *LOADED_BY_MEGATRON,
        *CHECKED_BY_MEGATRON,
        *LOADED_BY_MINDSPEED,
        *READ_BY_MG2HF,
    }


def test_the_lists_above_are_those_of_the_sources() -> None:
    root = oracle.checkout() / "mindspeed_llm"
    loaded = re.findall(
        r"_set_arg\('(\w+)'", (root / "training" / "checkpointing.py").read_text(encoding="utf-8")
    )
    assert sorted(loaded) == sorted(LOADED_BY_MINDSPEED)
    source = (root / "tasks" / "checkpoint" / "convert_mg2hf.py").read_text(encoding="utf-8")
    read = {
        *re.findall(r"self\.load_model\.(\w+)", source),
        *re.findall(r"attr\(self\.load_model, ['\"](\w+)['\"]", source),
    }
    assert read - {"get_weight", "get_bias", "get_module"} - NOT_WRITTEN == set(READ_BY_MG2HF)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "llama 2",
            {
                "num_key_value_heads": 4,
                "num_query_groups": 4,
                "group_query_attention": False,
                "n_shared_experts": None,
            },
        ),
        (
            "qwen2.5",
            {
                "num_key_value_heads": 2,
                "num_query_groups": 2,
                "group_query_attention": True,
                "add_qkv_bias": True,
            },
        ),
        (
            "qwen3",
            {
                "num_key_value_heads": 2,
                "qk_layernorm": True,
                "kv_channels": 32,
                "add_position_embedding": True,
            },
        ),
        (
            "qwen3 moe",
            {
                "num_experts": 8,
                "first_k_dense_replace": 0,
                "moe_layer_freq": 1,
                "moe_intermediate_size": 48,
            },
        ),
        (
            "mixtral",
            {
                "num_experts": 4,
                "n_shared_experts": None,
                "moe_intermediate_size": 96,
                "shared_expert_gate": False,
            },
        ),
        (
            "deepseek v2 lite",
            {
                "n_shared_experts": 2,
                "moe_shared_expert_intermediate_size": 96,
                "q_lora_rank": None,
                "kv_lora_rank": 32,
            },
        ),
        (
            "deepseek v3",
            {
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "q_lora_rank": 40,
                "v_head_dim": 20,
            },
        ),
        (
            "deepseek v3",
            {
                "qk_layernorm": True,
                "multi_latent_attention": True,
                "num_key_value_heads": 4,
                "qk_head_dim": 24,
            },
        ),
    ],
)
def test_arguments_have_the_values_of_the_config(name: str, expected: dict[str, Any]) -> None:
    written = arguments(name)
    assert {key: written[key] for key in expected} == expected


def test_post_norms_of_a_layer_are_recorded() -> None:
    shape = families.shape(FAMILIES["gemma 2"].config)
    assert (
        vars(namespace(shape, ParallelLayout()))["post_norm"] is True
        and arguments("qwen3")["post_norm"] is False
    )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelLayout(2, ep=2, moe_tp_extend_ep=True), None),
        (ParallelLayout(ep=2, moe_tp_extend_ep=True), None),
        (ParallelLayout(2, ep=2, etp=1), 1),
        (ParallelLayout(2, ep=2), 2),
    ],
)  # fmt: skip
def test_the_size_of_an_experts_group_is_unset_beside_extended_expert_parallelism(
    layout: ParallelLayout, expected: int | None
) -> None:
    assert arguments("deepseek v3", layout)["expert_tensor_parallel_size"] == expected


def test_layers_with_experts_are_a_frequency_for_mindspeed_and_a_list_for_megatron() -> None:
    assert arguments("deepseek v3")["moe_layer_freq"] == 1
    assert arguments("deepseek v3", distributed=True)["moe_layer_freq"] == [0, 1, 1, 1]
    irregular = families.shape(MIXTURES["qwen3 moe, every second layer"].config)
    assert vars(namespace(irregular, ParallelLayout()))["moe_layer_freq"] == [0, 1, 0, 0]


@pytest.mark.parametrize(("distributed", "expected"), [(False, "torch"), (True, "torch_dist")])
def test_the_arguments_name_the_format(distributed: bool, expected: str) -> None:
    assert arguments("qwen3", distributed=distributed)["ckpt_format"] == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", ["--tp 2 --ep 2 --moe-tp-extend-ep --moe-grouped-gemm", "--tp 2 --ep 2 --etp 1"]
)
def test_a_checkpoint_with_fewer_arguments_is_read(tmp_path: Path, options: str) -> None:
    """msrl 0.1 wrote expert_tensor_parallel_size=1 with extended expert parallelism, and fewer
    arguments.
    """
    weights = save_source(tmp_path / "hf", "deepseek v3")
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg"))
    assert msrl("convert-ckpt", "hf2mcore", *folders, *options.split(), "--no-verify") == 0
    for path in (tmp_path / "mg").rglob("*.pt"):
        contents = torch.load(path, weights_only=False)
        args = vars(contents["args"])
        args["expert_tensor_parallel_size"] = 1
        for name in (
            "num_key_value_heads",
            "n_shared_experts",
            "moe_intermediate_size",
            "ckpt_format",
            "post_norm",
            "no_save_optim",
        ):
            del args[name]
        torch.save(contents, path)
    assert_converts_back(tmp_path, weights)


@pytest.mark.parametrize("options", ["--tp 2", "--pp 2 --vpp 1"])
def test_a_model_saved_as_a_defaultdict_is_read(tmp_path: Path, options: str) -> None:
    """Hf2MgConvert.run saves one defaultdict per virtual stage."""
    weights = save_source(tmp_path / "hf", "qwen3")
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg"))
    assert msrl("convert-ckpt", "hf2mcore", *folders, *options.split(), "--no-verify") == 0
    for path in (tmp_path / "mg").rglob("*.pt"):
        contents = torch.load(path, weights_only=False)
        models = {
            name: defaultdict(dict, value)
            for name, value in contents.items()
            if name.startswith("model")
        }
        torch.save({**contents, **models}, path, pickle_protocol=4)
    assert_converts_back(tmp_path, weights)


def read_oracle(
    tmp_path: Path, name: str, options: str, **changes: Any
) -> tuple[dict[str, Tensor], int]:
    """Convert with MindSpeed's converter and `options`, and back with msrl."""
    config = {**row_config(name), **changes}
    families.save_model(tmp_path / "hf", config)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    folders = ("--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg"))
    oracle.convert(
        oracle.checkout(), "--model-type-hf", MODEL_TYPES[name], *folders, *options.split()
    )
    ours = ("--load", str(tmp_path / "mg"), "--hf-config", str(tmp_path / "hf"))
    save = ("--save", str(tmp_path / "back"), "--no-verify")
    return weights, msrl("convert-ckpt", "mcore2hf", *ours, *save)


def test_a_vocabulary_that_mindspeed_splits_unevenly_is_read(tmp_path: Path) -> None:
    options = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"
    weights, code = read_oracle(tmp_path, "qwen2.5", options, vocab_size=199)
    assert code == 0
    assert_same_weights(tmp_path / "back", weights)


@pytest.mark.parametrize("name", ["deepseek v3", "glm 5.2"])
def test_a_checkpoint_of_mla_mm_split_is_read(tmp_path: Path, name: str) -> None:
    options = "--target-tensor-parallel-size 2 --mla-mm-split"
    weights, code = read_oracle(tmp_path, name, options)
    assert code == 0
    assert_same_weights(tmp_path / "back", weights)


@pytest.mark.parametrize("name", ["qwen2.5", "deepseek v3", "qwen3 moe"])
@pytest.mark.parametrize("grouped", [False, True])
def test_names_of_transformer_engine_in_the_converter_are_read_and_written(
    tmp_path: Path, name: str, grouped: bool
) -> None:
    options = "--target-tensor-parallel-size 2 --transformer-impl transformer_engine"
    words = ["--moe-grouped-gemm"] if grouped and name != "qwen2.5" else []
    weights, code = read_oracle(tmp_path, name, " ".join([options, *words]))
    assert code == 0
    assert_same_weights(tmp_path / "back", weights)
    ours = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--tp", "2")
    names = ("--names", "te-converter", *words, "--no-verify")
    assert msrl("convert-ckpt", "hf2mcore", *ours, *names) == 0
    for path in (tmp_path / "mg").rglob("*.pt"):
        theirs = torch.load(path, weights_only=False)["model"]
        model = torch.load(
            tmp_path / "ours" / path.relative_to(tmp_path / "mg"), weights_only=False
        )["model"]
        assert model.keys() == theirs.keys()
        assert all(same_bits(model[key], theirs[key]) for key in theirs)


def test_whole_mixers_are_read_in_any_layout(tmp_path: Path) -> None:
    weights = save_source(tmp_path / "hf", "qwen3-next")
    options = ("--tp", "1", "--names", "mindspeed", "--no-verify")
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg"))
    assert msrl("convert-ckpt", "hf2mcore", *folders, *options) == 0
    folders = ("--load", str(tmp_path / "mg"), "--save", str(tmp_path / "own"))
    assert msrl("convert-ckpt", "reshard", *folders, "--tp", "2", "--pp", "2", "--no-verify") == 0
    folders = ("--load", str(tmp_path / "own"), "--save", str(tmp_path / "back"))
    assert msrl("convert-ckpt", "mcore2hf", *folders, "--no-verify") == 0
    assert_same_weights(tmp_path / "back", weights)


@pytest.mark.parametrize(
    ("name", "options", "fragments"),
    [
        ("qwen3-next", "--tp 2", ("--names mindspeed", "--tp", "2")),
        ("qwen3-next", "--format dist", ("--names mindspeed", "distributed")),
        ("qwen3", "", ("--names mindspeed", "Qwen3ForCausalLM")),
    ],
)
def test_whole_mixers_are_written_where_mindspeed_reads_them(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: str,
    fragments: tuple[str, ...],
) -> None:
    save_source(tmp_path / "hf", name)
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg"))
    words = ("--names", "mindspeed", *options.split())
    assert msrl("convert-ckpt", "hf2mcore", *folders, *words) == 2
    assert_mentions(capsys.readouterr().err, *fragments)
    assert not (tmp_path / "mg").exists()


def uneven_vocabulary(folder: Path, rows: tuple[int, int]) -> dict[str, Tensor]:
    """Convert a small model at TP 2 and give each rank other rows of the vocabulary."""
    weights = save_source(folder / "hf", "qwen2.5")
    folders = ("--load", str(folder / "hf"), "--save", str(folder / "mg"), "--tp", "2")
    assert msrl("convert-ckpt", "hf2mcore", *folders, "--no-verify") == 0
    for rank, path in enumerate(sorted((folder / "mg").rglob("*.pt"))):
        contents = torch.load(path, weights_only=False)
        for ours, theirs in (
            ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
            ("output_layer.weight", "lm_head.weight"),
        ):
            contents["model"][ours] = weights[theirs].split(rows)[rank].clone()
        torch.save(contents, path)
    (folder / "mg" / "msrl_manifest.json").unlink()
    return weights


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", ["mcore2hf", "reshard --tp 2", "reshard --tp 4"])
def test_a_vocabulary_without_padding_is_read_in_any_layout(tmp_path: Path, command: str) -> None:
    config = {**row_config("qwen2.5"), "num_attention_heads": 4, "num_key_value_heads": 4}
    families.save_model(tmp_path / "hf", {**config, "vocab_size": 199})
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg"), "--tp", "2")
    assert msrl("convert-ckpt", "hf2mcore", *folders, "--no-verify") == 0
    for path in (tmp_path / "mg").rglob("mp_rank_01/*.pt"):
        contents = torch.load(path, weights_only=False)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            contents["model"][name] = contents["model"][name][:99].clone()
        torch.save(contents, path)
    (tmp_path / "mg" / "msrl_manifest.json").unlink()
    name, *options = command.split()
    last = tmp_path / "mg"
    if name == "reshard":
        target = ("--save", str(tmp_path / "re"), *options, "--no-verify")
        assert msrl("convert-ckpt", "reshard", "--load", str(last), *target) == 0
        last = tmp_path / "re"
    target = ("--save", str(tmp_path / "back"), "--no-verify")
    assert msrl("convert-ckpt", "mcore2hf", "--load", str(last), *target) == 0
    assert_same_weights(tmp_path / "back", weights)


def test_ranks_with_more_rows_after_fewer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uneven_vocabulary(tmp_path, (90, 110))
    folders = ("--load", str(tmp_path / "mg"), "--save", str(tmp_path / "back"))
    assert msrl("convert-ckpt", "mcore2hf", *folders, "--no-verify") == 2
    assert "[90, 110]" in capsys.readouterr().err


def test_layers_for_multi_token_prediction_in_a_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_source(tmp_path / "hf", "deepseek v3")
    folders = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "mg"))
    assert msrl("convert-ckpt", "hf2mcore", *folders, "--no-verify") == 0
    (path,) = (tmp_path / "mg").rglob("*.pt")
    contents = torch.load(path, weights_only=False)
    model = contents["model"]
    # The final norm has another name beside layers for multi-token prediction.
    model["final_layernorm.weight"] = model.pop("decoder.final_layernorm.weight")
    model["mtp.layers.0.enorm.weight"] = model["final_layernorm.weight"].clone()
    torch.save(contents, path)
    (tmp_path / "mg" / "msrl_manifest.json").unlink()
    back = ("--load", str(tmp_path / "mg"), "--save", str(tmp_path / "back"))
    assert msrl("convert-ckpt", "mcore2hf", *back, "--no-verify") == 2
    message = capsys.readouterr().err
    assert "multi-token prediction" in message and "--mtp-num-layers" in message
