"""Megatron's distributed checkpoints, exchanged with Megatron's ranks; nothing in a file is
executed.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import families
from dist_ranks import Case
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.distributed.read import GlobalTensors, read_metadata
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.integrity import damages, mcore_checks
from msrl.checkpoint.mcore.locate import find_checkpoint, saved_layout
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.parallel_layout import ParallelLayout
from msrl.trainer.settings import Layout
from msrl.verification.bits import compare
from msrl.workflows.convert.run import run
from support import assert_each_mentions, assert_mentions, mentions, python_path

ROWS = FAMILIES | MIXTURES
RANKS = {
    "qwen1.5": Layout(tp=2, pp=2),
    "qwen3": Layout(tp=2, pp=2),
    "qwen3 moe": Layout(tp=2, ep=2, etp=1, pp=2),
    "qwen3 moe, every second layer": Layout(tp=2, pp=2),
    "deepseek v2 lite": Layout(tp=2, pp=2),
    "deepseek v3": Layout(tp=2, ep=2, etp=1, pp=2),
    "gpt-oss": Layout(ep=2, pp=2),
}
SOME = (*RANKS, "chatglm 2", "gemma 2")
# Outside of the full tables: a dense model and two kinds of experts.
FEW = ("qwen3", "qwen3 moe", "gpt-oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a small random model of each row as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("dist")
    return families.save_models(root, {name: ROWS[name] for name in SOME})


@pytest.mark.parametrize(
    ("name", "te"),
    [
        pytest.param(name, te, marks=() if name in FEW and te else pytest.mark.full)
        for name in SOME
        for te in (False, True)
    ],
)
@pytest.mark.slow
def test_a_distributed_checkpoint_comes_back_bit_for_bit(
    folders: dict[str, Path], name: str, te: bool, tmp_path: Path
) -> None:
    write_mcore(
        open_weights(folders[name]),
        tmp_path / "dist",
        McoreTarget(ParallelLayout(2), naming=Naming(te=te), distributed=True),
    )
    write_mcore(
        open_weights(tmp_path / "dist"), tmp_path / "ranks", McoreTarget(ParallelLayout(2, 2))
    )
    write_mcore(
        open_weights(tmp_path / "ranks"),
        tmp_path / "again",
        McoreTarget(distributed=True, vocab_multiple=64),
    )
    write_hf(open_weights(tmp_path / "again"), tmp_path / "hf", None)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (folders[name], tmp_path / "hf")
    )
    assert before.keys() == after.keys() and all(
        same_bits(before[tensor], after[tensor]) for tensor in before
    )
    assert damages(mcore_checks(tmp_path / "dist")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(RANKS), marks=pytest.mark.full)], ids=["few", "all"]
)
def test_megatron_and_msrl_load_each_others_distributed_checkpoints(
    folders: dict[str, Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Four ranks with Megatron's GPTModel and `dist_checkpointing` have the weights of the Hugging
    Face folder.
    """
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks

    cases: list[Case] = []
    for name in names:
        layout = RANKS[name]
        written, saved = tmp_path / "written" / name, tmp_path / "saved" / name
        write_mcore(
            open_weights(folders[name]), written, McoreTarget(vocab_multiple=64, distributed=True)
        )
        cases.append(
            Case(name, folders[name], written / "iter_0000001", layout, saved / "iter_0000007")
        )
    reports = run_ranks(
        "dist_ranks:main",
        cases,
        num_ranks=4,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    assert len(reports) == 4 * len(cases)
    assert [(name, at, wrong) for name, at, _, wrong in reports if wrong] == []
    assert min(equal for _, _, equal, _ in reports) > 10
    for case in cases:
        saved = case.save.parent
        (saved / "latest_checkpointed_iteration.txt").write_text("7")
        assert compare(open_weights(case.hf), open_mcore(saved, case.hf), None).different == ()


class Harmful:
    """Object that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


@pytest.fixture
def written(folders: dict[str, Path], tmp_path: Path) -> Path:
    write_mcore(open_weights(folders["qwen3"]), tmp_path / "dist", McoreTarget(distributed=True))
    return tmp_path / "dist"


def test_nothing_in_a_distributed_checkpoint_is_executed(written: Path, tmp_path: Path) -> None:
    folder, mark = written / "iter_0000001", tmp_path / "harmed"
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Harmful(mark)}))
    with pytest.raises(MsrlError, match=mentions(".metadata", "pathlib.Path.touch")):
        open_weights(written)
    (folder / ".metadata").write_bytes(metadata)
    # As large as the tensors that it replaces.
    torch.save([Harmful(mark), torch.zeros(1 << 18)], folder / "harmful.pt")
    with (folder / "harmful.pt").open("rb") as file:
        size = len(file.read())
    (folder / "harmful.pt").replace(folder / "__1_0.distcp")
    index = pickle.loads(metadata)
    for location in index.storage_data.values():
        location.offset, location.length = (
            (0, size)
            if location.relative_path == "__1_0.distcp"
            else (location.offset, location.length)
        )
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(MsrlError, match=mentions("__1_0.distcp", "tensor", "names")):
        compare(open_weights(written), open_weights(written), None)
    torch.save({"args": Harmful(mark)}, folder / "common.pt")
    with pytest.raises(MsrlError, match=mentions("common.pt", "checkpoint")):
        saved_layout(written)
    assert not mark.exists()


def test_a_file_outside_of_the_folder_is_not_read(written: Path) -> None:
    path = written / "iter_0000001" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__1_0.distcp", b"../../passwd"))
    with pytest.raises(MsrlError, match=mentions("../../passwd", "folder")):
        open_weights(written)


def test_damage_to_a_distributed_checkpoint_is_named(
    written: Path, folders: dict[str, Path]
) -> None:
    file = written / "iter_0000001" / "__2_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    expected = ("iter_0000001/__2_0.distcp", len(whole) // 2, len(whole), "bytes")
    assert_each_mentions(damages(mcore_checks(written, depth="sizes")), expected)
    with pytest.raises(MsrlError, match=mentions("__2_0.distcp", "bytes")):
        compare(open_weights(folders["qwen3"]), open_weights(written), None)
    altered = bytearray(whole)
    altered[len(whole) // 2] ^= 1
    file.write_bytes(altered)
    (damage,) = damages(mcore_checks(written))
    assert_mentions(damage, "__2_0.distcp", "checksum")
    file.unlink()
    with pytest.raises(MsrlError, match=mentions("__2_0.distcp", "read")):
        compare(open_weights(folders["qwen3"]), open_weights(written), None)


def test_chunks_that_overlap_or_exceed_the_tensor_are_refused(written: Path) -> None:
    """Elements that no chunk covers would be uninitialized memory."""
    folder, key = written / "iter_0000001", "decoder.final_layernorm.weight"
    tensors = GlobalTensors(folder)
    whole = tensors.stored[key]
    half = dataclasses.replace(whole.chunks[0], sizes=(whole.shape[0] // 2,))
    tensors.stored[key] = dataclasses.replace(whole, chunks=(half, half))
    with pytest.raises(MsrlError, match=mentions(key, "[]", "incomplete")):
        tensors.read(key, ())
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.state_dict_metadata[key].chunks[0].sizes = torch.Size([whole.shape[0] + 1])
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(MsrlError, match=mentions(key, "[0]", "exceeds")):
        open_weights(written)


def test_a_distributed_checkpoint_of_another_model_is_refused(
    written: Path, folders: dict[str, Path]
) -> None:
    config = json.loads((folders["qwen3"] / "config.json").read_text())
    for change, message in {
        "tie_word_embeddings": (True, ("Qwen3ForCausalLM", "output_layer.weight")),
        "vocab_size": (300, ("embedding.word_embeddings.weight", "199", "300")),
        "num_hidden_layers": (3, ("[4, 64]", "[3, 64]")),
    }.items():
        (written / "hf" / "config.json").write_text(json.dumps({**config, change: message[0]}))
        with pytest.raises(MsrlError, match=mentions(*message[1])):
            open_weights(written)
    with pytest.raises(MsrlError, match=mentions("distributed", "rank")):
        find_checkpoint(written)


@pytest.mark.parametrize(
    ("layout", "naming", "message"),
    [
        (ParallelLayout(noop_layers=(0,)), Naming(), ("distributed", "layers")),
        (ParallelLayout(), Naming(legacy=True), ("distributed", "legacy")),
    ],
)
def test_options_that_the_distributed_format_does_not_support_are_refused(
    folders: dict[str, Path],
    tmp_path: Path,
    layout: ParallelLayout,
    naming: Naming,
    message: tuple[str, ...],
) -> None:
    with pytest.raises(MsrlError, match=mentions(*message)):
        write_mcore(
            open_weights(folders["qwen3"]),
            tmp_path / "dist",
            McoreTarget(layout, naming=naming, distributed=True),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_commands_write_verify_inspect_and_read_a_distributed_checkpoint(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dist, ranks, hf = (str(tmp_path / name) for name in ("dist", "ranks", "hf"))
    run(
        Config.model_validate(
            {
                "convert": {
                    "command": "hf2mcore",
                    "load": str(folders["qwen3"]),
                    "save": dist,
                    "tp": 2,
                    "format": "dist",
                }
            }
        )
    )
    assert "logits, fp32" in capsys.readouterr().out
    run(Config.model_validate({"convert": {"command": "inspect", "load": dist}}))
    shown = capsys.readouterr().out
    assert_mentions(shown, "distributed", "tp 2", "pp 1", "__4_0.distcp", "manifest")
    run(
        Config.model_validate(
            {
                "convert": {
                    "command": "reshard",
                    "load": dist,
                    "save": ranks,
                    "pp": 2,
                    "verify": False,
                }
            }
        )
    )
    run(
        Config.model_validate(
            {"convert": {"command": "mcore2hf", "load": dist, "save": hf, "verify": False}}
        )
    )
    assert compare(open_weights(folders["qwen3"]), open_weights(Path(ranks)), None).different == ()
    assert compare(open_weights(folders["qwen3"]), open_weights(Path(hf)), None).different == ()


def test_latent_attention_has_megatron_cores_names(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The names come from MLASelfAttention with its two layer specs. Queries of the Lite model
    are not compressed.
    """
    attention = "decoder.layers.2.self_attention."
    for te, name, rows in (
        (False, "deepseek v3", 40),
        (True, "deepseek v3", 40),
        (False, "deepseek v2 lite", 160),
    ):
        folder = tmp_path / f"{name} {te}"
        write_mcore(
            open_weights(folders[name]), folder, McoreTarget(naming=Naming(te=te), distributed=True)
        )
        tensors, objects = read_metadata(folder / "iter_0000001")
        down = f"{attention}linear_q_{'down_' if rows == 40 else ''}proj"
        assert (
            tensors[f"{down}.weight"].shape == (rows, 64)
            and f"{down}._extra_state/shard_0_1" in objects
        )
        assert tensors[f"{attention}linear_kv_down_proj.weight"].shape == (32 + 16, 64)
        norm = "linear_kv_up_proj.layer_norm_weight" if te else "kv_layernorm.weight"
        assert tensors[f"{attention}{norm}"].shape == (32,)
        assert tensors["decoder.layers.2.input_layernorm.weight"].shape == (64,)
        dense = "mlp.linear_fc1.layer_norm_weight" if te else "pre_mlp_layernorm.weight"
        assert tensors[f"decoder.layers.0.{dense}"].shape == (64,)
        assert not [key for key in tensors if "linear_qkv" in key]
