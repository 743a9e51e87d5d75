"""LoRA adapters of PEFT and of Megatron ranks agree with W + (alpha / r) B A and with PEFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_checkpoints as tiny
from msrl.checkpoint.adapters.megatron import read_adapter
from msrl.checkpoint.adapters.merge import MergedSource
from msrl.checkpoint.adapters.peft import write_peft
from msrl.checkpoint.convert import write_hf
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.errors import MsrlError
from msrl.models.families import all_rules, load_shape
from msrl.models.parallel_layout import Coords, ParallelLayout
from support import mentions
from test_cli import msrl
from test_convert import run, save_real, to_mcore

LAYER, RANK, ALPHA = "model.layers.{}.", 4, 8.0
QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
HF_NAMES = {
    QKV: [f"self_attn.{kind}_proj" for kind in "qkv"],
    PROJ: ["self_attn.o_proj"],
    FC1: ["mlp.gate_proj", "mlp.up_proj"],
    FC2: ["mlp.down_proj"],
}


def full_adapter(seed: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of the tiny model by Hugging Face module; modules of a fused layer share A.

    The model has hidden size 64, q 64, k and v 32 each, feed-forward 96.
    """
    torch.manual_seed(seed)
    rows = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 96, "up": 96, "down": 64}
    adapter = {}
    for layer in range(2):
        for names in HF_NAMES.values():
            a = torch.randn(RANK, 96 if "down" in names[0] else 64)
            adapter |= {
                LAYER.format(layer) + name: (
                    a,
                    torch.randn(rows[name.split(".")[1].split("_")[0]], RANK),
                )
                for name in names
            }
    return adapter


def by_hand(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)


def save_peft(folder: Path, adapter: dict[str, tuple[Tensor, Tensor]], **config: Any) -> None:
    folder.mkdir(parents=True)
    tensors = {f"base_model.model.{n}.lora_A.weight": a.clone() for n, (a, _) in adapter.items()}
    tensors |= {f"base_model.model.{n}.lora_B.weight": b for n, (_, b) in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **config})
    )


def rank_adapter(
    adapter: dict[str, tuple[Tensor, Tensor]], layout: ParallelLayout, at: Coords
) -> dict[str, Tensor]:
    """Return the tensors that one rank of tp 1 or 2 and pp 1 or 2 saves.

    The slices are written by hand for the tiny model (2 groups of 2 heads of size 16).
    """
    layers = [at.pp] if layout.pp == 2 else [0, 1]
    tensors = {}
    for local, layer in enumerate(layers):
        for module, names in HF_NAMES.items():
            a = adapter[LAYER.format(layer) + names[0]][0]
            factors = [adapter[LAYER.format(layer) + name][1] for name in names]
            if module in (PROJ, FC2):
                b, columns = factors[0], a.shape[1] // layout.tp
                a = a[:, at.tp * columns : (at.tp + 1) * columns]
            elif module == FC1:
                b = torch.cat([factor.chunk(layout.tp)[at.tp] for factor in factors])
            else:
                q, k, v = factors
                groups = [
                    torch.cat([q[:32], k[:16], v[:16]]),
                    torch.cat([q[32:64], k[16:32], v[16:32]]),
                ]
                b = groups[at.tp] if layout.tp == 2 else torch.cat(groups)
            name = f"decoder.layers.{local}.{module}"
            tensors |= {
                f"{name}.lora_A.default.weight": a.clone(),
                f"{name}.lora_B.default.weight": b.clone(),
            }
    return tensors


def save_ranks(
    folder: Path,
    hf: Path,
    layout: ParallelLayout,
    adapter: dict[str, tuple[Tensor, Tensor]],
    *,
    base: bool,
    load: str | None = None,
    head: Tensor | None = None,
) -> None:
    """Write an mcore checkpoint as a trainer does.

    It has only the adapter, or also the base weights under their `base_layer` names. `head` is the
    score head of a reward model.
    """
    source = open_weights(hf)
    for at in layout.ranks():
        args = mcore.namespace(source.shape, layout)
        vars(args).update(
            lora_r=RANK,
            lora_alpha=ALPHA,
            lora_target_modules=[module.split(".")[1] for module in HF_NAMES],
            load=load,
        )
        model = rank_adapter(adapter, layout, at)
        if head is not None and at.pp == layout.pp - 1:
            model["rm_head.weight"] = head.chunk(layout.tp, dim=1)[at.tp]
        for name, tensor in source.local_tensors(layout, at) if base else ():
            adapted = any(f".{module}." in name for module in HF_NAMES)
            model[
                name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
                if adapted
                else name
            ] = tensor
        mcore.write_rank_file(mcore.rank_file(folder, 7, layout, at), model, args, 7)
    mcore.publish(folder, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_peft_adapter_is_added_to_its_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    weights, adapter = tiny.save(tmp_path / "hf", dtype=dtype), full_adapter()
    save_peft(tmp_path / "peft", adapter)
    base = open_weights(tmp_path / "hf")
    merged = MergedSource(base, read_adapter(tmp_path / "peft", base.shape))
    write_hf(merged, tmp_path / "out", None)
    actual = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        expected = by_hand(tensor, *adapter[module], ALPHA / RANK) if module in adapter else tensor
        torch.testing.assert_close(
            actual[name], expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-5
        )
        # Rounded once, so nearly all values are bitwise equal.
        assert (actual[name] != expected).float().mean() < 0.01 or dtype == torch.float32


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("base", [True, False])
def test_an_adapter_saved_by_ranks_is_read_as_the_same_adapter(
    tmp_path: Path, tp: int, pp: int, base: bool
) -> None:
    tiny.save(tmp_path / "hf")
    adapter, shape = full_adapter(), load_shape(tmp_path / "hf")
    save_ranks(tmp_path / "ranks", tmp_path / "hf", ParallelLayout(tp, pp), adapter, base=base)
    actual = read_adapter(tmp_path / "ranks", shape)
    assert actual.deltas.keys() == {f"{module}.weight" for module in adapter}
    for module, (a, b) in adapter.items():
        delta = actual.deltas[f"{module}.weight"]
        assert torch.equal(delta.a, a) and torch.equal(delta.b, b) and delta.scale == ALPHA / RANK
    assert actual.summary() == "rank 4, scale 2, 14 weights"


def test_merging_into_a_layout_equals_merging_first_and_converting(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path / "hf", vocab_size=99)
    save_ranks(tmp_path / "ranks", tmp_path / "hf", ParallelLayout(2, 2), full_adapter(), base=True)
    base = open_mcore(tmp_path / "ranks", tmp_path / "hf", beside_adapter=True)
    merged = MergedSource(base, read_adapter(tmp_path / "ranks", base.shape))
    write_hf(merged, tmp_path / "merged", None)
    converted = open_weights(tmp_path / "merged")
    for layout in (ParallelLayout(), ParallelLayout(2), ParallelLayout(1, 2), ParallelLayout(2, 2)):
        for at in layout.ranks():
            expected = dict(converted.local_tensors(layout, at))
            assert (
                all(
                    torch.equal(tensor, expected.pop(name))
                    for name, tensor in merged.local_tensors(layout, at)
                )
                and not expected
            )
    assert to_mcore(tmp_path / "merged", tmp_path / "again")


@pytest.mark.slow
def test_peft_merges_to_the_same_model(tmp_path: Path) -> None:
    """PEFT finds transformers' model through the exported folder, and its merge equals msrl's."""
    peft = pytest.importorskip("peft")
    tiny.save(tmp_path / "hf", dtype=torch.float32, model_type="qwen2")
    base = open_weights(tmp_path / "hf")
    save_ranks(
        tmp_path / "ranks",
        tmp_path / "hf",
        ParallelLayout(2),
        full_adapter(),
        base=False,
        load=str(tmp_path / "hf"),
    )
    (tmp_path / "ranks" / "hf").mkdir()
    shutil.copyfile(tmp_path / "hf" / "config.json", tmp_path / "ranks" / "hf" / "config.json")
    run(command="lora2hf", load=tmp_path / "ranks", save=tmp_path / "peft")
    write_hf(
        MergedSource(base, read_adapter(tmp_path / "ranks", base.shape)), tmp_path / "merged", None
    )
    model = peft.AutoPeftModelForCausalLM.from_pretrained(
        str(tmp_path / "peft"), dtype=torch.float32
    )
    expected = model.merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(expected[name], tensor, rtol=1e-6, atol=1e-5)


def test_an_adapter_written_for_peft_is_read_as_the_same_adapter(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    shape, adapter = load_shape(tmp_path / "hf"), full_adapter()
    save_ranks(tmp_path / "ranks", tmp_path / "hf", ParallelLayout(2, 2), adapter, base=False)
    write_peft(read_adapter(tmp_path / "ranks", shape), tmp_path / "peft", "Qwen/tiny")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        8,
        "Qwen/tiny",
    )
    assert config["target_modules"] == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    actual = read_adapter(tmp_path / "peft", shape)
    for module, (a, b) in adapter.items():
        delta = actual.deltas[f"{module}.weight"]
        assert torch.equal(delta.a, a) and torch.equal(delta.b, b) and delta.scale == ALPHA / RANK


def test_scales_follow_patterns_and_rank_stabilization(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    shape = load_shape(tmp_path / "hf")
    save_peft(tmp_path / "pattern", full_adapter(), alpha_pattern={"0.self_attn.q_proj": 2})
    scales = {
        name: delta.scale
        for name, delta in read_adapter(tmp_path / "pattern", shape).deltas.items()
    }
    assert (
        scales["model.layers.0.self_attn.q_proj.weight"] == 0.5
        and scales["model.layers.1.self_attn.q_proj.weight"] == 2.0
    )
    save_peft(tmp_path / "stable", full_adapter(), use_rslora=True)
    assert {delta.scale for delta in read_adapter(tmp_path / "stable", shape).deltas.values()} == {
        4.0
    }


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"alpha_pattern": {"(": 8}}, ("alpha_pattern", "'('", "regular expression")),
        ({"alpha_pattern": ["x"]}, ("alpha_pattern", "['x']", "map")),
        ({"alpha_pattern": {"q_proj": "8"}}, ("alpha_pattern", "q_proj", "'8'", "number")),
        ({"alpha_pattern": {"q_proj": True}}, ("alpha_pattern", "q_proj", "True", "number")),
        ({"alpha_pattern": {"(a+)+b": 1}}, ("alpha_pattern", "(a+)+b", "complex")),
        ({"alpha_pattern": {"(a|a)" * 30: 1}}, ("alpha_pattern", "complex")),
        ({"alpha_pattern": {"a?" * 30: 1}}, ("alpha_pattern", "complex")),
        ({"alpha_pattern": {".*" * 9: 1}}, ("alpha_pattern", "complex")),
        ({"alpha_pattern": {"(a{1,9}){9}": 1}}, ("alpha_pattern", "complex")),
        ({"alpha_pattern": {r"(a+)\1": 1}}, ("alpha_pattern", "complex")),
        ({"lora_alpha": float("nan")}, ("lora_alpha", "number")),
        ({"lora_alpha": 10**400}, ("lora_alpha", "number")),
    ],
)
def test_an_adapter_config_of_others_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], words: tuple[str, ...]
) -> None:
    tiny.save(tmp_path / "hf")
    save_peft(tmp_path / "peft", full_adapter(), **config)
    with pytest.raises(MsrlError, match=mentions("adapter_config.json", *words)):
        read_adapter(tmp_path / "peft", load_shape(tmp_path / "hf"))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^model\.layers\.\d+\.self_attn\.q_proj",
        r".*\.layers\.\d+\..*q_proj",
        r"(?:self_attn|mlp)\.(q|k|v|gate)_proj",
        r"layers\.[0-9]+\.self_attn\.[qk]_proj",
        rf"layers\.({'|'.join(map(str, range(80)))})\..*\.(q|k|v|o)_proj",
        r"layers\.\d{1,2}\.self_attn\.q_proj",
        r"(?:self_attn\.)?q_proj",
        "q_proj",
    ],
)
def test_usual_patterns_of_an_adapter_are_accepted(tmp_path: Path, pattern: str) -> None:
    tiny.save(tmp_path / "hf")
    save_peft(tmp_path / "peft", full_adapter(), alpha_pattern={pattern: 2})
    deltas = read_adapter(tmp_path / "peft", load_shape(tmp_path / "hf")).deltas
    assert deltas["model.layers.1.self_attn.q_proj.weight"].scale == 2 / RANK


@pytest.mark.parametrize("shapes", [((0, 64), (64, 0)), ((), (64, 4)), ((4,), (64, 4))])
def test_an_adapter_of_rank_zero_or_without_a_matrix_is_refused(
    tmp_path: Path, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    tiny.save(tmp_path / "hf")
    module = LAYER.format(0) + "self_attn.q_proj"
    factors = torch.ones(shapes[0]), torch.ones(shapes[1])
    save_peft(tmp_path / "peft", {**full_adapter(), module: factors})
    with pytest.raises(MsrlError, match=mentions(module, str(list(shapes[0])), "needs")):
        read_adapter(tmp_path / "peft", load_shape(tmp_path / "hf"))


@pytest.mark.full
@pytest.mark.slow
def test_all_commands_merge_to_one_verified_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters of PEFT and of ranks give the same model; transformers and Megatron verify it."""
    save_real(tmp_path / "hf", "qwen2", tied=False)
    small = {name: (a * 0.1, b * 0.1) for name, (a, b) in full_adapter().items()}
    save_peft(tmp_path / "peft", small)
    save_ranks(tmp_path / "both", tmp_path / "hf", ParallelLayout(2), small, base=True)
    both = {"load": tmp_path / "both", "lora": tmp_path / "both", "hf_config": tmp_path / "hf"}
    run(command="hf2hf", load=tmp_path / "hf", lora=tmp_path / "peft", save=tmp_path / "a")
    run(command="mcore2hf", save=tmp_path / "b", **both)
    run(command="hf2mcore", load=tmp_path / "hf", lora=tmp_path / "peft", save=tmp_path / "c", tp=2)
    run(command="reshard", save=tmp_path / "d", pp=2, **both)
    run(
        command="lora2hf",
        load=tmp_path / "both",
        hf_config=tmp_path / "hf",
        save=tmp_path / "peft2",
    )
    run(command="hf2hf", load=tmp_path / "hf", lora=tmp_path / "peft2", save=tmp_path / "e")
    output = capsys.readouterr().out
    assert output.count("14 merged weights") == 5
    assert output.count("transformers, Megatron: ") == 2 and output.count("transformers: ") == 3
    first = load_file(tmp_path / "a" / "model.safetensors")
    for name in ("b", "c", "d", "e"):
        source = open_weights(tmp_path / name)
        for rule in all_rules(source.shape):
            assert all(
                torch.equal(t, first[hf])
                for hf, t in zip(rule.hf, source.hf_tensors(rule), strict=True)
            ), (name, rule.mcore)


# --- adapters of reward models

HEAD = torch.linspace(-1.0, 1.0, 64)[None]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_score_head_saved_beside_adapters_replaces_the_output_layer(
    tmp_path: Path, tp: int, pp: int, tied: bool
) -> None:
    dtype = torch.float32
    weights = tiny.save(tmp_path / "hf", dtype=dtype, tie_word_embeddings=tied)
    adapter, layout = full_adapter(), ParallelLayout(tp, pp)
    save_ranks(tmp_path / "ranks", tmp_path / "hf", layout, adapter, base=False, head=HEAD)
    base = open_weights(tmp_path / "hf")
    merged = MergedSource(base, read_adapter(tmp_path / "ranks", base.shape))
    write_hf(merged, tmp_path / "out", None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["num_labels"] == 1
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(actual["score.weight"], HEAD)
    assert actual.keys() == (weights.keys() - {"lm_head.weight"}) | {"score.weight"}
    for module, factors in adapter.items():
        expected = by_hand(weights[f"{module}.weight"], *factors, ALPHA / RANK)
        torch.testing.assert_close(actual[f"{module}.weight"], expected, rtol=1e-6, atol=1e-5)


def test_the_adapter_of_a_reward_model_survives_the_way_through_peft(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf", dtype=torch.float32)
    shape = load_shape(tmp_path / "hf")
    layout = ParallelLayout(2, 2)
    save_ranks(tmp_path / "ranks", tmp_path / "hf", layout, full_adapter(), base=False, head=HEAD)
    write_peft(read_adapter(tmp_path / "ranks", shape), tmp_path / "peft", "Qwen/tiny")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    actual = read_adapter(tmp_path / "peft", shape)
    assert torch.equal(actual.replaced["score.weight"], HEAD) and len(actual.deltas) == 14
    assert actual.summary() == "rank 4, scale 2, 14 weights, 1 weights replaced"


@pytest.mark.parametrize("shard", [None, torch.zeros(1, 8), torch.zeros(32)])
def test_a_score_head_with_a_missing_or_different_shard_is_refused(
    tmp_path: Path, shard: Tensor | None
) -> None:
    tiny.save(tmp_path / "hf", dtype=torch.float32)
    layout, folder = ParallelLayout(2), tmp_path / "ranks"
    save_ranks(folder, tmp_path / "hf", layout, full_adapter(), base=False, head=HEAD)
    path = mcore.rank_file(folder, 7, layout, Coords(1, 0))
    content = mcore.read_rank_file(path)
    # Copies: the tensors are mapped from the file that is replaced.
    model = {n: t.clone() for n, t in content["model"].items() if n != "rm_head.weight"}
    if shard is not None:
        model["rm_head.weight"] = shard
    mcore.write_rank_file(path, model, content["args"], 7)
    with pytest.raises(MsrlError, match=mentions(folder, "rm_head.weight", "shards")):
        read_adapter(folder, load_shape(tmp_path / "hf"))


@pytest.mark.full
@pytest.mark.slow
def test_commands_merge_the_adapter_of_a_reward_model_and_verify_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=False)
    small = {name: (a * 0.1, b * 0.1) for name, (a, b) in full_adapter().items()}
    load = str(tmp_path / "hf")
    layout = ParallelLayout(2)
    save_ranks(tmp_path / "a", tmp_path / "hf", layout, small, base=False, head=HEAD, load=load)
    (tmp_path / "a" / "hf").mkdir()
    shutil.copyfile(tmp_path / "hf" / "config.json", tmp_path / "a" / "hf" / "config.json")
    with pytest.raises(MsrlError, match=mentions("only", "adapter", "hf2hf")):
        open_weights(tmp_path / "a")
    run(command="lora2hf", load=tmp_path / "a", save=tmp_path / "peft", hf_config=tmp_path / "hf")
    for name, adapter in (("first", "a"), ("second", "peft")):
        lora = tmp_path / adapter
        run(command="hf2hf", load=tmp_path / "hf", lora=lora, save=tmp_path / name)
    output = capsys.readouterr().out
    assert output.count("scores, fp32") == 2 and output.count("14 merged weights") == 2
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")
    )
    assert first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


# --- refused adapters and checkpoints


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        ({"peft_type": "IA3"}, ("peft_type", "LORA")),
        ({"use_dora": True}, ("DoRA",)),
        ({"bias": "all"}, ("biases",)),
        ({"r": None}, ("r", "lora_alpha", "numbers")),
        ({"target_parameters": ["mlp.experts.down_proj"]}, ("adapters", "experts")),
        ({"layer_replication": [[0, 2], [1, 2]]}, ("layers", "adapter")),
        ({"alora_invocation_tokens": [1, 2]}, ("adapters", "token")),
        (
            {"init_lora_weights": "pissa_niter_4"},
            ("init_lora_weights=pissa_niter_4", "base weights"),
        ),
        ({"init_lora_weights": "olora"}, ("path_initial_model_for_weight_conversion",)),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    tmp_path: Path, config: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    tiny.save(tmp_path / "hf")
    save_peft(tmp_path / "peft", full_adapter(), **config)
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        read_adapter(tmp_path / "peft", load_shape(tmp_path / "hf"))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf", num_hidden_layers=1)
    save_peft(tmp_path / "peft", full_adapter())
    base = open_weights(tmp_path / "hf")
    with pytest.raises(
        MsrlError, match=mentions("model.layers.1.self_attn.q_proj.weight", "adapt")
    ):
        MergedSource(base, read_adapter(tmp_path / "peft", base.shape))


def test_the_adapter_of_a_narrower_model_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    layout = ParallelLayout(tp=2)
    save_ranks(tmp_path / "adapter", tmp_path / "hf", layout, full_adapter(), base=False)
    tiny.save(tmp_path / "other", intermediate_size=128)
    with pytest.raises(MsrlError, match=mentions("adapter", "linear_fc1", 96, 128)):
        read_adapter(tmp_path / "adapter", load_shape(tmp_path / "other"))


def test_a_checkpoint_with_an_adapter_is_not_read_as_its_base(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    save_ranks(tmp_path / "both", tmp_path / "hf", ParallelLayout(), full_adapter(), base=True)
    with pytest.raises(MsrlError, match=mentions("both", "adapter")):
        open_weights(tmp_path / "both", tmp_path / "hf")
    with pytest.raises(MsrlError, match=mentions("hf", "adapter")):
        read_adapter(tmp_path / "hf", load_shape(tmp_path / "hf"))


def test_an_adapter_in_the_checkpoint_is_not_replaced_by_another(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    save_ranks(tmp_path / "both", tmp_path / "hf", ParallelLayout(), full_adapter(), base=True)
    save_peft(tmp_path / "peft", full_adapter(seed=2))
    arguments = {"load": tmp_path / "both", "hf_config": tmp_path / "hf", "verify": False}
    with pytest.raises(MsrlError, match=mentions("both", "LoRA adapter")):
        run(command="mcore2hf", lora=tmp_path / "peft", save=tmp_path / "out", **arguments)
    run(command="mcore2hf", lora=tmp_path / "both", save=tmp_path / "out", **arguments)


@pytest.mark.parametrize("base", [None, "hf", "mcore", "gone"])
def test_an_adapter_without_base_weights_is_refused_with_the_command_that_merges_it(
    tmp_path: Path, base: str | None
) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore")
    save_ranks(
        tmp_path / "alone",
        tmp_path / "hf",
        ParallelLayout(),
        full_adapter(),
        base=False,
        load=base and str(tmp_path / base),
    )
    with pytest.raises(MsrlError, match=mentions("alone", "LoRA adapter")) as caught:
        open_weights(tmp_path / "alone", tmp_path / "hf")
    command, _, remark = str(caught.value).partition(": msrl ")[2].partition(", ")
    assert bool(remark) == ("BASE" in command) == (base in (None, "gone"))
    words = (
        command.replace("BASE", str(tmp_path / "hf"))
        .replace("FOLDER", str(tmp_path / "merged"))
        .split()
    )
    assert msrl(*words, "--no-verify") == 0
    source = open_weights(tmp_path / "hf")
    write_hf(
        MergedSource(source, read_adapter(tmp_path / "alone", source.shape)),
        tmp_path / "expected",
        None,
    )
    merged, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected")
    )
    assert merged.keys() == expected.keys() and all(
        torch.equal(merged[name], tensor) for name, tensor in expected.items()
    )


def test_peft_loads_the_base_model_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tmp_path / "hf")
    save_ranks(
        tmp_path / "of_hf",
        tmp_path / "hf",
        ParallelLayout(),
        full_adapter(),
        base=False,
        load=str(tmp_path / "hf"),
    )
    save_ranks(
        tmp_path / "of_other",
        tmp_path / "hf",
        ParallelLayout(),
        full_adapter(),
        base=False,
        load=str(tmp_path / "gone"),
    )
    for folder in ("of_hf/hf", "of_other/hf", "mine"):
        (tmp_path / folder).mkdir()
        shutil.copyfile(tmp_path / "hf" / "config.json", tmp_path / folder / "config.json")
    for load, hf_config, base in (
        ("of_hf", None, "hf"),
        ("of_hf", "mine", "mine"),
        ("of_other", None, "of_other/hf"),
        ("of_other", "hf", "hf"),
    ):
        shutil.rmtree(tmp_path / "peft", ignore_errors=True)
        run(
            command="lora2hf",
            load=tmp_path / load,
            save=tmp_path / "peft",
            hf_config=hf_config and tmp_path / hf_config,
        )
        config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tmp_path / base)
        assert ("PEFT cannot load" in capsys.readouterr().out) == (base != "hf")


def test_exporting_an_adapter_from_a_checkpoint_without_one_is_refused(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "full")
    with pytest.raises(MsrlError, match=mentions("full", "adapter")):
        run(command="lora2hf", load=tmp_path / "full", save=tmp_path / "peft")


@pytest.mark.parametrize("module", [QKV, PROJ, FC1, FC2])
def test_an_adapter_that_one_rank_lacks_is_refused(tmp_path: Path, module: str) -> None:
    tiny.save(tmp_path / "hf")
    save_ranks(tmp_path / "ranks", tmp_path / "hf", ParallelLayout(2), full_adapter(), base=False)
    path = mcore.rank_file(tmp_path / "ranks", 7, ParallelLayout(2), Coords(1))
    contents = mcore.read_rank_file(path, mmap=False)
    mcore.write_rank_file(
        path,
        {name: t for name, t in contents["model"].items() if module not in name},
        contents["args"],
        7,
    )
    with pytest.raises(
        MsrlError, match=mentions("ranks", "1 of 2 ranks", f"decoder.layers.0.{module}.weight")
    ):
        run(
            command="lora2hf",
            load=tmp_path / "ranks",
            save=tmp_path / "peft",
            hf_config=tmp_path / "hf",
        )
    assert not (tmp_path / "peft").exists()
