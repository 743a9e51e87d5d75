"""Logits of every family on Megatron ranks, compared with transformers or a reference."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import families
import parity_ranks
import reference_models
from families import FAMILIES
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.source import open_weights
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.families import by_architecture
from msrl.models.families import families as registered
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.unsupported import UNSUPPORTED
from msrl.trainer.settings import Layout
from parity_ranks import Case
from support import assert_mentions, mentions

SHARDED, MORE_LAYOUTS = Layout(tp=2, pp=2, sp=True), {"whole": Layout(), "tp2": Layout(tp=2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a small random model of each row as a Hugging Face folder."""
    return families.save_models(tmp_path_factory.mktemp("families"), FAMILIES)


@pytest.fixture(scope="module")
def megatron(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    """Return the logits of every row on four ranks, [tokens, vocabulary]."""
    return parity_ranks.rank_logits([Case(name, folders[name], SHARDED) for name in folders])


@pytest.fixture(scope="module")
def more_megatron(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    cases = [
        Case(f"{name}, {layout_name}", folder, layout)
        for layout_name, layout in MORE_LAYOUTS.items()
        for name, folder in folders.items()
    ]
    return parity_ranks.rank_logits(cases)


def family(file: str, *architectures: str) -> ModuleType:
    """Return a family module of that file."""
    module = ModuleType(file)
    module.__file__, module.ARCHITECTURES = file, architectures
    return module


def test_a_family_without_architectures_is_refused_by_name():
    with pytest.raises(MsrlError, match=mentions("b.py", "ARCHITECTURES")):
        by_architecture([family("a.py", "A"), family("b.py")])


def test_an_architecture_of_two_families_is_refused_with_both_files():
    with pytest.raises(MsrlError, match=mentions("b.py", "AForCausalLM", "a.py")):
        by_architecture([family("a.py", "AForCausalLM"), family("b.py", "B", "AForCausalLM")])


def further_layouts(num_layers: int) -> dict[str, Layout]:
    """Return layouts with two stages, virtual stages, uneven stages and empty layers.

    Virtual stages are filled up with empty layers where the number of layers requires it.
    """
    fours = -(-num_layers // 4) * 4
    evens = num_layers + 2 - num_layers % 2
    ends = (0, evens - 1) if evens - num_layers == 2 else (0,)
    return {
        "pp2": Layout(pp=2)
        if num_layers % 2 == 0
        else Layout(pp=2, num_layer_list=(num_layers // 2 + 1, num_layers // 2)),
        "pp2 vpp": Layout(pp=2, vpp=fours // 4, noop_layers=tuple(range(num_layers, fours))),
        "tp2 pp2, uneven": Layout(tp=2, pp=2, num_layer_list=(num_layers - 1, 1)),
        "pp2, empty layers": Layout(pp=2, noop_layers=ends),
    }


@pytest.mark.full
@pytest.mark.slow
def test_logits_do_not_depend_on_virtual_uneven_or_empty_stages(
    folders: dict[str, Path], more_megatron: dict[str, np.ndarray]
) -> None:
    names, cases = list[str](), list[Case]()
    for name, family in FAMILIES.items():
        for key, layout in further_layouts(families.shape(family.config).num_layers).items():
            names.append(name)
            cases.append(Case(f"{name}, {key}", folders[name], layout))
    logits = parity_ranks.rank_logits(cases)
    assert len(logits) == 4 * len(FAMILIES)
    for name, case in zip(names, cases, strict=True):
        whole = more_megatron[f"{name}, whole"]
        np.testing.assert_allclose(logits[case.name], whole, rtol=0, atol=1e-4, err_msg=case.name)


def transformers_logits(folder: Path, ids: list[np.ndarray]) -> np.ndarray:
    """Return the logits of transformers, one sequence at a time, after checking that all weights
    load.
    """
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    classes = getattr(transformers, architecture)
    model, loading_info = classes.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(
        loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    with torch.inference_mode():
        return torch.cat(
            [model.eval()(torch.from_numpy(row)[None]).logits[0] for row in ids]
        ).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_four_ranks_agree_with_the_reference(
    folders: dict[str, Path], megatron: dict[str, np.ndarray], name: str
) -> None:
    assert np.abs(megatron[name] - _reference_logits(folders[name], name)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_the_reference_in_more_layouts(
    folders: dict[str, Path], more_megatron: dict[str, np.ndarray], name: str
) -> None:
    expected = _reference_logits(folders[name], name)
    for layout_name in MORE_LAYOUTS:
        logits = more_megatron[f"{name}, {layout_name}"]
        assert np.abs(logits - expected).max() < 1e-4, layout_name


def _reference_logits(folder: Path, name: str) -> np.ndarray:
    family = FAMILIES[name]
    ids = parity_ranks.sequences(families.shape(family.config).vocab_size)
    if family.reference == "transformers":
        expected = transformers_logits(folder, ids)
    else:
        expected = getattr(reference_models, family.reference)(
            family.config, load_file(folder / "model.safetensors"), ids
        )
    assert expected.std() > 0.3, "logits so small that nothing is compared"
    return expected


def test_packed_tensors_are_split_by_head_and_by_half(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Of ChatGLM's 4 heads of 16 in 2 groups, rank 1 of 2 has rows 32 to 63 (heads), 80 to 95 (key)
    and 112 to 127 (value).
    """
    hf = load_file(folders["chatglm 2"] / "model.safetensors")
    rank = dict(open_weights(folders["chatglm 2"]).local_tensors(ParallelLayout(2), Coords(1)))
    packed, halves = (
        hf[f"transformer.encoder.layers.0.{name}.weight"]
        for name in ("self_attention.query_key_value", "mlp.dense_h_to_4h")
    )
    expected = torch.cat([packed[32:64], packed[80:96], packed[112:128]])
    assert torch.equal(rank["decoder.layers.0.self_attention.linear_qkv.weight"], expected)
    assert torch.equal(
        rank["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([halves[48:96], halves[144:192]])
    )


@pytest.mark.parametrize("name", ["internlm 2", "chatglm 2", "baichuan 2", "glm 4"])
def test_packed_groups_and_halves_are_not_split(name: str) -> None:
    with pytest.raises(MsrlError, match=mentions("tp=8", "KV heads")):
        ParallelLayout(8).check(families.shape(FAMILIES[name].config))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Mamba2ForCausalLM", "state-space"),
        ("Llama4ForConditionalGeneration", "chunks"),
        ("Glm4vForConditionalGeneration", "convolution"),
        ("Glm4vMoeForConditionalGeneration", "convolution"),
        ("InternVLChatModel", "*-hf"),
        ("KimiVLForConditionalGeneration", "vision tower"),
        ("Qwen2_5OmniModel", "audio"),
        ("Qwen3OmniMoeForConditionalGeneration", "audio"),
        ("GemmaForCausalLM", "Gemma 2"),
    ],
)
def test_a_family_of_mindspeed_without_support_is_refused_with_the_reason(
    architecture: str, reason: str
) -> None:
    with pytest.raises(MsrlError, match=mentions(architecture, "not supported", reason)):
        families.shape(families.LLAMA, architectures=[architecture])


def test_no_refused_architecture_is_registered() -> None:
    assert UNSUPPORTED.keys().isdisjoint(registered())


BAD = [
    ("baichuan 2", {"max_position_embeddings": None}, ("ALiBi", "positions")),
    ("baichuan 2", {"num_key_value_heads": 2}, ("num_key_value_heads=2",)),
    ("internlm 2", {"bias": True}, ("bias=true",)),
    ("chatglm 2", {"add_bias_linear": True}, ("add_bias_linear=true",)),
    ("chatglm 2", {"original_rope": False}, ("original_rope=false",)),
    ("chatglm 2", {"pre_seq_len": 128}, ("pre_seq_len=128",)),
    ("chatglm 2", {"padded_vocab_size": None}, ("padded_vocab_size",)),
    ("chatglm 2", {"kv_channels": 18}, ("head_dim", "even")),
    ("glm 4", {"partial_rotary_factor": 1.5}, ("partial_rotary_factor", "1.5")),
    (
        "qwen2.5-vl",
        {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        ("mrope_section", "8"),
    ),
    ("qwen2.5-vl", {"text_config": []}, ("text_config",)),
    (
        "qwen2.5-vl",
        {"rope_scaling": {"type": "mrope", "mrope_section": ["a", 1, 2]}},
        ("mrope_section",),
    ),
    ("seed-oss", {"attention_out_bias": True}, ("attention_out_bias=true",)),
    ("qwen2.5", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, ("'mrope'",)),
    ("gemma 2", {"hidden_activation": "silu"}, ("hidden_activation",)),
    ("gemma 2", {"use_bidirectional_attention": True}, ("use_bidirectional_attention=true",)),
    ("gemma 2", {"query_pre_attn_scalar": 0}, ("query_pre_attn_scalar",)),
    ("gemma 3", {"sliding_window": None}, ("sliding_window",)),
    ("gemma 3", {"hidden_activation": "silu"}, ("hidden_activation",)),
    ("ministral 3", {"rope_parameters": {"rope_theta": 1e6}}, ("llama_4_scaling_beta",)),
    (
        "qwen3",
        {"rope_scaling": {"type": "default", "llama_4_scaling_beta": 0.1}},
        ("llama_4_scaling_beta",),
    ),
    ("mistral 3, language model", {"text_config": {"model_type": "mistral4"}}, ("mistral4",)),
    ("smollm 3", {"no_rope_layers": [1, 0]}, ("no_rope_layers", "4 layers")),
    ("smollm 3", {"layer_types": ["sliding_attention"] * 4}, ("layer_types", "no window")),
    ("olmo 2", {"clip_qkv": 8.0}, ("clip_qkv=8.0",)),
    ("olmo 3", {"rope_theta": 1e6}, ("rope_theta=1000000.0", "rope_parameters")),
    ("phi 3", {"resid_pdrop": 0.1}, ("resid_pdrop=0.1",)),
    ("granite 3", {"attention_bias": True}, ("attention_bias=true",)),
    ("granite 4", {"layer_types": ["mamba", *["attention"] * 3]}, ("layer_types", "Mamba")),
    ("granite 4", {"layer_types": None}, ("layer_types", "Mamba")),
    ("ernie 4.5", {"use_bias": True}, ("use_bias=true",)),
    ("hunyuan v1", {"use_cla": True}, ("use_cla=true",)),
    ("hunyuan v1", {"attention_head_dim": 64}, ("attention_head_dim=64",)),
    ("exaone 4", {"layer_types": None}, ("sliding_window_pattern",)),
    ("cohere", {"use_qk_norm": True}, ("use_qk_norm=true",)),
    ("cohere 2", {"sliding_window": None}, ("sliding_window",)),
    ("minicpm 4", {"sparse_config": {"topk": 64}}, ("sparse_config",)),
    ("minicpm 4", {"num_experts": 8}, ("num_experts=8",)),
    ("mimo", {"attention_bias": False}, ("attention_bias=false",)),
    ("qwen3.5", {"attn_output_gate": False}, ("attn_output_gate=false",)),
    ("qwen3.5", {"linear_num_value_heads": 3}, ("linear_num_value_heads=3", "2")),
    ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, ("layer_types", "full_attention")),
    ("qwen3.5", {"layer_types": ["mamba"] * 4}, ("layer_types", "linear_attention")),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_unsupported_features_of_a_family_are_refused_by_key(
    name: str, changes: dict[str, object], message: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*message)):
        families.shape(FAMILIES[name].config, **changes)


def _convert(**values: object) -> None:
    from msrl.workflows.convert.run import run

    run(
        Config.model_validate(
            {
                "convert": {
                    key: str(value) if isinstance(value, Path) else value
                    for key, value in values.items()
                }
            }
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        pytest.param("mistral 3, language model", "vision_tower.", marks=pytest.mark.full),
    ],
)
def test_a_vision_tower_without_a_module_passes_through(
    tmp_path: Path,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    name: str,
    prefix: str,
) -> None:
    folder = folders[name]
    _convert(command="hf2mcore", load=folder, save=tmp_path / "mcore", tp=2, dtype="bf16")
    assert_mentions(capsys.readouterr().out, f"{prefix}*", "logits, fp32")
    _convert(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "hf")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert before.keys() == after.keys()
    of_tower = {key for key in before if key.startswith(prefix)}
    assert of_tower and all(same_bits(after[key], before[key]) for key in of_tower)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_softcapped_scores_are_in_both_sides_of_a_verification(
    tmp_path: Path,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
) -> None:
    monkeypatch.setattr("msrl.verification.report.fits_in_memory", lambda shape: whole)
    _convert(command="hf2mcore", load=folders["gemma 2"], save=tmp_path / "mcore")
    assert ("layer by layer" in capsys.readouterr().out) is not whole


@pytest.mark.slow
def test_a_family_with_custom_code_reports_that_its_logits_were_not_compared(
    tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _convert(command="hf2mcore", load=folders["internlm 2"], save=tmp_path / "mcore")
    output = capsys.readouterr().out
    assert_mentions(output, "round trip", "transformers", "InternLM2ForCausalLM", "not compared")


def test_a_checkpoint_without_the_vision_tower_is_refused(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    write_mcore(open_weights(folders["gemma 3, language model"]), tmp_path / "mcore", McoreTarget())
    (tmp_path / "mcore" / "hf" / "msrl_carried.safetensors").unlink()
    with pytest.raises(MsrlError, match=mentions("vision_tower.*", "--hf-config")):
        write_hf(open_weights(tmp_path / "mcore"), tmp_path / "hf", None)
    assert not (tmp_path / "hf").exists()
