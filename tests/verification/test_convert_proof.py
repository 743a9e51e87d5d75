"""Verification of conversions: its measures, and equal results in memory and layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import families
import tiny_checkpoints as tiny
from mixture_families import MIXTURES, QWEN3_MOE
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.source import ShardedSource, open_mcore, open_weights
from msrl.config.sections.commands import ConvertConfig
from msrl.errors import ManyErrors, MsrlError
from msrl.models.families import num_parameters
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.shape import Shape
from msrl.verification import layerwise as convert_layerwise
from msrl.verification import logits as convert_logits
from msrl.verification import report as convert_report
from msrl.verification.agreement import compare_logits
from msrl.verification.bits import require_equal_copies
from msrl.verification.images import ImagePrompt
from msrl.verification.tolerance import family_tolerance
from support import assert_mentions, mentions
from test_cli import msrl
from test_convert import run, save_real, to_mcore
from training_runs import Command, children, files_in, make_tmp, wait_for_end


def _prompts(tokens: list[list[int]]) -> list[ImagePrompt]:
    """Return prompts without images."""
    return [ImagePrompt(ids, ()) for ids in tokens]


def test_agreement_by_hand() -> None:
    """Of two positions over three tokens, the second has another most likely token: KL of (1/2,
    1/4, 1/4) against (1/4, 1/2, 1/4) is ln 2 / 4.
    """
    left = torch.tensor([[3.0, 1.0, 2.0], [2.0, 1.0, 1.0]]).log()
    right = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 1.0]]).log()
    result = compare_logits([left], [right], 3, tie=1e-4)
    assert (result.num_sequences, result.num_positions, result.same_choice) == (1, 2, 1)
    assert result.largest == pytest.approx(0.6931472) and result.divergence == pytest.approx(
        0.6931472 / 4
    )
    assert (
        compare_logits([left], [right], 3, tie=1.0).same_choice == 2
    )  # tied tokens count as the same
    padded = torch.cat([left, torch.full((2, 1), 9.0)], 1)
    assert compare_logits([padded], [left], 3, tie=0.0).largest == 0.0


def test_a_nan_never_agrees() -> None:
    broken = torch.tensor([[0.0, float("nan")]])
    result = compare_logits([torch.zeros(1, 2)], [broken], 2, tie=1e-4)
    assert result.largest == float("inf") and result.divergence == float("inf")


def test_a_mixture_may_have_a_few_outliers_and_a_dense_model_none() -> None:
    """A wrong weight rule affects every position: three of four outliers are refused for a mixture,
    one of four for a dense model.
    """
    left = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    one_off, three_off = left.clone(), left.clone()
    one_off[1] += torch.linspace(0, 0.1, 9)
    three_off[1:] += torch.linspace(0, 0.1, 9)
    samples = convert_report.Samples([[1, 2, 3, 4]], "4 tokens")
    dense, mixture = families.shape({**families.LLAMA, "vocab_size": 9}), mixture_shape(9)
    for shape, right, expected in (
        (dense, one_off, False),
        (mixture, one_off, True),
        (mixture, three_off, False),
        (dense, left, True),
    ):
        checks = convert_report._check_logits(shape, samples, [left], [right], "left, right")
        assert all(check.passed for check in checks) is expected
    (logits, distributions) = convert_report._check_logits(
        mixture, samples, [left], [one_off], "left, right"
    )
    assert_mentions(logits.result, "1 positions", "25%")
    assert "3/3" in distributions.result


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_is_no_outlier_of_a_mixture(value: float) -> None:
    left = torch.randn(8, 9, generator=torch.Generator().manual_seed(0))
    broken = left.clone()
    broken[3, 5] = value
    samples = convert_report.Samples([list(range(8))], "8 tokens")
    checks = convert_report._check_logits(mixture_shape(9), samples, [left], [broken], "a, b")
    assert not checks[0].passed


def mixture_shape(vocab_size: int) -> Shape:
    config = next(
        family.config
        for family in MIXTURES.values()
        if family.architecture == "Qwen3MoeForCausalLM"
    )
    return families.shape({**config, "vocab_size": vocab_size})


def test_every_mixture_has_a_tolerance_and_dense_families_allow_no_outliers() -> None:
    for family in (families.FAMILIES | MIXTURES).values():
        shape = families.shape(family.config)
        assert (family_tolerance(shape).outliers > 0) is (
            shape.moe is not None
        ) and family_tolerance(shape).reason
        assert family_tolerance(shape).outliers < 0.5


def test_the_largest_part_is_a_layer_or_the_vocabulary(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf", vocab_size=100)
    shape = open_weights(tmp_path / "hf").shape
    layers = (
        num_parameters(shape) - 2 * 100 * 64 - 64
    )  # without embedding, output layer and final norm
    assert convert_layerwise.largest_part(shape) == layers // 2
    tiny.save(tmp_path / "wide", vocab_size=5000)
    assert convert_layerwise.largest_part(open_weights(tmp_path / "wide").shape) == 5000 * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen2", True),
        pytest.param("qwen3", False, marks=pytest.mark.full),
        pytest.param("llama", True, marks=pytest.mark.full),
    ],
)
def test_transformers_computes_the_same_layer_by_layer(
    tmp_path: Path, family: str, tied: bool
) -> None:
    save_real(tmp_path / "hf", family, tied=tied)
    source, tokens = open_weights(tmp_path / "hf"), [[0, 5, 98, 7], [3, 1]]
    whole, layer_by_layer = (
        convert_logits._logits_from_folder(tmp_path / "hf", _prompts(tokens)),
        convert_layerwise.transformers_logits(source, tokens, None),
    )
    torch.testing.assert_close(layer_by_layer, whole, rtol=0, atol=1e-5)


LAYERWISE = {
    name: family
    for name, family in (families.FAMILIES | MIXTURES).items()
    if family.reference == "transformers"
}
SOME_LAYERWISE = ("qwen3 moe, every second layer", "gpt-oss", "qwen2.5-vl")


def _assert_alike_layer_by_layer(root: Path, name: str) -> None:
    """Compare both ways on sequences of equal length, as some rope scaling depends on the length of
    the batch.
    """
    families.save_models(root, {name: LAYERWISE[name]})
    folder, tokens = root / name, np.random.default_rng(5).integers(0, 190, (2, 30)).tolist()
    whole, layer_by_layer = (
        convert_logits._logits_from_folder(folder, _prompts(tokens)),
        convert_layerwise.transformers_logits(open_weights(folder), tokens, None),
    )
    assert whole[0].std() > 0.3, "logits so small that nothing is compared"
    torch.testing.assert_close(layer_by_layer, whole, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME_LAYERWISE)
def test_experts_and_models_with_a_vision_tower_are_computed_layer_by_layer(
    tmp_path: Path, name: str
) -> None:
    _assert_alike_layer_by_layer(tmp_path, name)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in LAYERWISE if name not in SOME_LAYERWISE])
def test_every_family_has_sources_for_all_parameters(tmp_path: Path, name: str) -> None:
    _assert_alike_layer_by_layer(tmp_path, name)


@pytest.mark.slow
def test_code_and_unknown_model_type_of_a_folder_are_ignored(tmp_path: Path) -> None:
    """As in the release of Kimi K2, transformers does not know `model_type` kimi_k2, and `auto_map`
    names code.
    """
    families.save_models(tmp_path, {"deepseek": MIXTURES["kimi k2"]})
    folder, tokens = tmp_path / "deepseek", [[0, 5, 98, 7], [3, 1, 2, 2]]
    expected = convert_logits._logits_from_folder(folder, _prompts(tokens))
    config = json.loads((folder / "config.json").read_text())
    auto_map = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoTokenizer": ["tokenization_kimi.Tokenizer", None],
    }
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "kimi_k2", "auto_map": auto_map})
    )
    (folder / "configuration_deepseek.py").write_text(
        "raise SystemExit('code of a checkpoint was run')"
    )
    source = open_weights(folder)
    for result in (
        convert_logits._logits_from_folder(folder, _prompts(tokens)),
        convert_logits._logits_from_weights(source, _prompts(tokens), None),
        convert_layerwise.transformers_logits(source, tokens, None),
    ):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert_mentions(convert_report.sample_tokens(source.shape, folder).origin, "0 texts", "2 rows")


def _assert_verified_layer_by_layer(
    root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    families.save_models(root, {name: LAYERWISE[name]})
    layout = {"ep": 2} if name in MIXTURES else {"tp": 2}
    run(command="hf2mcore", load=root / name, save=root / "mcore", pp=2, **layout)
    output, progress = capsys.readouterr()
    libraries = ("transformers", "Megatron")
    assert_mentions(progress, *(f"computing logits with {name}: done" for name in libraries))
    results = output.partition("Verified in")[2].partition("Moved the")[0]
    assert max(map(len, results.splitlines())) <= 80
    assert_mentions(
        output, "layer by layer", "transformers, Megatron", "round trip", "distributions"
    )


@pytest.mark.slow
def test_a_mixture_larger_than_memory_is_verified_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank holds one layer at a time, with experts, first dense layers, latent attention and
    router biases.
    """
    monkeypatch.setattr(convert_report, "fits_in_memory", lambda shape: False)
    _assert_verified_layer_by_layer(tmp_path, "deepseek v3", capsys)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "qwen3 moe",
        "qwen3 moe, every second layer",
        "mixtral",
        "deepseek v2 lite",
        "deepseek v2",
        "gpt-oss",
        "qwen2.5-vl",
    ],
)
def test_every_mixture_larger_than_memory_is_verified_by_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(convert_report, "fits_in_memory", lambda shape: False)
    _assert_verified_layer_by_layer(tmp_path, name, capsys)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_model_larger_than_memory_is_verified_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=tied)
    monkeypatch.setattr(convert_report, "fits_in_memory", lambda shape: False)
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "mcore", tp=2, pp=2)
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "back", dtype="bf16")
    output = " ".join(capsys.readouterr().out.split())
    counts = {
        name: output.count(name)
        for name in (
            "layer by layer",
            "Verified in",
            "0 texts",
            "2 rows",
            "64 positions x 99",
            " 64/64",
        )
    }
    assert set(counts.values()) == {2}, counts


# --- files that are not as they were written ---


def _rank(folder: Path, tp_rank: int) -> Path:
    return mcore.rank_file(folder, 1, ParallelLayout(2), Coords(tp_rank))


def test_inspect_names_every_missing_truncated_or_altered_file(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(2))
    contents = bytearray(_rank(tmp_path / "mcore", 0).read_bytes())
    _rank(tmp_path / "mcore", 0).write_bytes(contents[:-100])
    _rank(tmp_path / "mcore", 1).unlink()
    with pytest.raises(ManyErrors) as error:
        run(command="inspect", load=tmp_path / "mcore")
    first, second = error.value.messages
    assert_mentions(
        first, "mp_rank_00/model_optim_rng.pt", len(contents) - 100, len(contents), "bytes"
    )
    assert_mentions(second, "mp_rank_01/model_optim_rng.pt", "missing")


def test_a_hugging_face_folder_of_msrl_has_checksums_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tmp_path / "hf")
    run(command="inspect", load=tmp_path / "hf")
    assert_mentions(capsys.readouterr().out, "files:", "no manifest")
    run(command="hf2hf", load=tmp_path / "hf", save=tmp_path / "ours", verify=False)
    run(command="inspect", load=tmp_path / "ours")
    output = capsys.readouterr().out
    assert_mentions(
        output, "Hugging Face", "Qwen2ForCausalLM", "model.safetensors", "files:", "manifest"
    )
    assert "no manifest" not in output
    path = tmp_path / "ours" / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    for command in ("inspect", "hf2mcore"):
        with pytest.raises(
            MsrlError, match=mentions("model.safetensors", "msrl_manifest.json", "altered")
        ):
            run(command=command, load=tmp_path / "ours", save=tmp_path / "mcore")
    path.write_bytes(contents[:-10])
    with pytest.raises(
        MsrlError, match=mentions("model.safetensors", len(contents) - 10, len(contents), "bytes")
    ):
        run(command="hf2mcore", load=tmp_path / "ours", save=tmp_path / "mcore", verify=False)
    (tmp_path / "ours" / "msrl_manifest.json").write_text("{}")
    with pytest.raises(MsrlError, match=mentions("msrl_manifest.json", "Hugging Face")):
        run(command="inspect", load=tmp_path / "ours")
    assert not (tmp_path / "mcore").exists()


def test_a_checkpoint_rewritten_by_another_program_differs_from_the_manifest(
    tmp_path: Path,
) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(2))
    path = _rank(tmp_path / "mcore", 1)
    contents = mcore.read_rank_file(path, mmap=False)
    contents["model"]["decoder.final_layernorm.weight"][0] += 1
    mcore.write_rank_file(path, contents["model"], contents["args"], 1)
    with pytest.raises(MsrlError, match=mentions("mp_rank_01/model_optim_rng.pt")):
        run(command="inspect", load=tmp_path / "mcore")


@pytest.mark.parametrize("command", ["mcore2hf", "reshard"])
def test_an_altered_checkpoint_is_not_converted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore", ParallelLayout(2))
    contents = bytearray(_rank(tmp_path / "mcore", 1).read_bytes())
    contents[len(contents) // 2] ^= 1
    _rank(tmp_path / "mcore", 1).write_bytes(contents)
    assert msrl("convert-ckpt", command, "--load", "mcore", "--save", "out") == 2
    output = capsys.readouterr()
    assert_mentions(output.err, "mp_rank_01", "checksum")
    assert output.out == ""
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "mcore"]


def test_a_copy_of_the_result_that_differs_is_reported(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf", **QWEN3_MOE)
    layout, rank = ParallelLayout(ep=2), Coords(ep=1)
    to_mcore(tmp_path / "hf", tmp_path / "mcore", layout)
    convert = ConvertConfig(command="hf2mcore", load=str(tmp_path / "hf"), verify=True)
    source = open_weights(tmp_path / "hf")
    folders = tmp_path / "hf", tmp_path / "mcore"
    path = mcore.rank_file(tmp_path / "mcore", 1, layout, rank)
    contents = mcore.read_rank_file(path, mmap=False)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    contents["model"][name].view(-1)[0] += 0.5
    mcore.write_rank_file(path, contents["model"], contents["args"], 1)
    read, copies = convert_report.checks(convert, "cpu", source, *folders)
    assert read.passed and not copies.passed
    assert_mentions(copies.result, "1 differ", name, "ep 1")


def test_a_result_without_copies_has_no_check_of_them(tmp_path: Path) -> None:
    tiny.save(tmp_path / "hf")
    for name, layout in (("alone", ParallelLayout()), ("parallel", ParallelLayout(tp=2))):
        to_mcore(tmp_path / "hf", tmp_path / name, layout)
    assert convert_report._check_copies(open_mcore(tmp_path / "alone")) == []
    (check,) = convert_report._check_copies(open_mcore(tmp_path / "parallel"))
    assert check.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layout", "rank", "name"),
    [
        ({}, ParallelLayout(2), Coords(1), "decoder.layers.1.input_layernorm.weight"),
        pytest.param(
            QWEN3_MOE,
            ParallelLayout(ep=2),
            Coords(ep=1),
            "decoder.layers.0.self_attention.linear_qkv.weight",
            marks=pytest.mark.full,
        ),
        pytest.param(
            QWEN3_MOE,
            ParallelLayout(2, ep=2, etp=1),
            Coords(1, ep=1),
            "decoder.layers.0.mlp.router.weight",
            marks=pytest.mark.full,
        ),
    ],
)
def test_ranks_with_different_copies_of_a_tensor_are_not_converted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    layout: ParallelLayout,
    rank: Coords,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "hf", **config)
    to_mcore(tmp_path / "hf", tmp_path / "mcore", layout)
    (tmp_path / "mcore" / mcore.MANIFEST).unlink()  # other systems write no manifest
    source = open_weights(tmp_path / "mcore")
    assert isinstance(source, ShardedSource) and len(list(source.copies())) > 2
    require_equal_copies(source, tmp_path)
    path = mcore.rank_file(tmp_path / "mcore", 1, layout, rank)
    contents = mcore.read_rank_file(path, mmap=False)
    contents["model"][name].view(-1)[0] += 0.5
    mcore.write_rank_file(path, contents["model"], contents["args"], 1)
    assert msrl("convert-ckpt", "mcore2hf", "--load", "mcore", "--save", "out") == 2
    message = capsys.readouterr().err
    assert_mentions(
        " ".join(message.split()), "mcore", name, f"tp {rank.tp} pp 0", "copies", "5.0e-01"
    )
    assert not (tmp_path / "out").exists()
    assert msrl("convert-ckpt", "reshard", "--load", "mcore", "--save", "out", "--no-verify") == 0
    assert msrl("convert-ckpt", "mcore2hf", "--load", "out", "--save", "proven") == 0


def test_contents_that_are_not_converted_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(tmp_path / "hf")
    to_mcore(tmp_path / "hf", tmp_path / "mcore")
    path = mcore.rank_file(tmp_path / "mcore", 1, ParallelLayout(), Coords())
    contents = torch.load(path, weights_only=False)
    torch.save({**contents, "optimizer": {"step": 3}, "rng_state": [1]}, path)
    (tmp_path / "mcore" / "msrl_manifest.json").unlink()
    (path.parent / "distrib_optim.pt").write_bytes(b"x")
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "back", verify=False)
    output = capsys.readouterr().out
    assert_mentions(
        output, "optimizer state", "random number generators", "distrib_optim.pt", "not verified"
    )


@pytest.mark.slow
@pytest.mark.full
def test_a_rank_that_is_killed_ends_the_verification_with_one_message(tmp_path: Path) -> None:
    save_real(tmp_path / "hf", "qwen2", tied=False)
    paths = ("--load", str(tmp_path / "hf"), "--save", str(tmp_path / "out"))
    tmp = make_tmp()
    command = Command(
        "convert-ckpt", "hf2mcore", *paths, "--tp", "2", log=tmp_path / "log", tmp=tmp
    )

    def rank() -> psutil.Process | None:
        family = psutil.Process(command.process.pid).children(recursive=True)
        return next((each for each in family if each.name() == "msrl-rank-1"), None)

    command.when(lambda: rank() is not None)
    started = children(command.process.pid)
    killed = rank()
    assert killed is not None
    killed.kill()
    assert command.wait() == 1
    assert_mentions(command.output(), "rank 1", "SIGKILL", tmp_path / "out.unverified")
    assert "Traceback" not in command.output()
    assert not (tmp_path / "out").exists()
    wait_for_end(started)
    assert files_in(tmp) == []


def test_an_interrupted_verification_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    tiny.save(tmp_path / "hf")
    monkeypatch.setattr(convert_report, "checks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "out")
    assert_mentions(capsys.readouterr().out, tmp_path / "out.unverified", "verification")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out.unverified"]
    with pytest.raises(MsrlError, match=mentions("out.unverified")):
        run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "out")
    run(command="inspect", load=tmp_path / "out.unverified")
    assert_mentions(capsys.readouterr().err, tmp_path / "out.unverified", "not verified")


def test_a_conversion_has_its_name_only_after_its_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(*arguments: Any) -> Any:
        assert not any((tmp_path / "empty").iterdir())
        assert arguments[-1].is_dir()
        return []

    tiny.save(tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    (tmp_path / "out").symlink_to("empty")
    monkeypatch.setattr(convert_report, "checks", watched)
    run(command="hf2mcore", load=tmp_path / "hf", save=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "hf", "out"]
    assert any((tmp_path / "empty").iterdir()) and (tmp_path / "out").is_symlink()
