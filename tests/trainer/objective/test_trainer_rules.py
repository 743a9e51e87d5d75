"""Parts of a training without a device: schedules, retention, gradient guard, rows and freeze."""

from __future__ import annotations

import math

import numpy as np
import pytest

from msrl.errors import MsrlError
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig
from msrl.models.select import select_names
from msrl.trainer.checkpointing.resume import STATE, Retention, training_dir
from msrl.trainer.guard import GradientError, GradientGuard
from msrl.trainer.schedule import Schedule
from msrl.types import MicroBatch
from msrl.workflows.sft.rows import split
from support import mentions


def rates(kind: str, **options: float) -> list[float]:
    schedule = Schedule(
        **{"kind": kind, "lr": 1.0, "min_lr": 0.1, "warmup": 2, "num_updates": 12, **options}
    )
    return [schedule.at(update) for update in range(13)]


def test_wsd_warms_up_stays_constant_and_decays_at_the_end():
    # By hand: two updates up, six constant, four down to 0.1 in steps of (1 - 0.1) / 4.
    expected = [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1]
    assert rates("wsd", decay=4) == pytest.approx(expected)
    assert rates("wsd", decay=1 / 3) == pytest.approx(expected)


def test_a_warm_up_begins_after_one_step_or_at_zero_as_configured():
    """W updates: (u + 1) / W of the peak, or u / W as Megatron and transformers."""
    assert rates("constant", warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("constant", warmup=4, from_zero=True)[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = transformers.get_linear_schedule_with_warmup(optimizer, 4, 12)
    expected = []
    for _ in range(12):
        expected.append(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    actual = rates("linear", warmup=4, min_lr=0.0, from_zero=True)[:12]
    assert actual == pytest.approx(expected)


def test_linear_and_cosine_reach_the_lowest_rate_after_the_last_update():
    assert rates("linear")[2:5] == pytest.approx([1, 0.91, 0.82])
    assert rates("cosine")[7] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert [rates(kind)[12] for kind in ("linear", "cosine", "constant")] == pytest.approx(
        [0.1, 0.1, 1]
    )


@pytest.fixture
def saves(tmp_path):
    """Checkpoints of steps 1 to 5, of about 1000 bytes each."""
    for step in range(1, 6):
        for folder in (tmp_path / f"iter_{step:07d}", training_dir(tmp_path, step)):
            folder.mkdir(parents=True)
        (tmp_path / f"iter_{step:07d}" / "model").write_bytes(bytes(1000))
        (training_dir(tmp_path, step) / STATE).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("retention", "removed"),
    [
        (Retention(), []),
        (Retention(newest=2), [3, 2, 1]),
        (Retention(newest=2, best=1), [3, 2]),
        (Retention(newest=1, best=5), [4, 3, 2, 1]),
        (Retention(max_bytes=3000), [2, 1]),
        (Retention(max_bytes=3000, best=1), [3, 2]),
        (Retention(newest=4, max_bytes=10), [4, 3, 2, 1]),
    ],
)
def test_checkpoints_are_kept_by_count_and_bytes_and_always_the_newest_and_the_best(
    saves, retention, removed
):
    assert retention.surplus(saves) == removed


def test_too_many_consecutive_nonfinite_gradients_end_the_run_and_save_the_batch(tmp_path):
    batch = MicroBatch(
        np.arange(3),
        np.arange(1, 4),
        np.ones(3, bool),
        np.array([0, 3], np.int32),
        {"advantages": np.ones(3, np.float32)},
    )
    guard = GradientGuard(3, tmp_path / "bad", rank=1)
    assert [
        guard.must_skip(norm, [batch]) for norm in (math.nan, math.inf, 1.0, math.nan, math.nan)
    ] == [True, True, False, True, True]
    with pytest.raises(MsrlError, match=mentions("3 updates", "(inf)", "rank_00001.npz")):
        guard.must_skip(math.inf, [batch, batch])
    with np.load(tmp_path / "bad" / "rank_00001.npz") as saved:
        np.testing.assert_array_equal(saved["1.token_ids"], batch.token_ids)
        assert "0.advantages" in saved
    (tmp_path / "file").write_text("")
    with pytest.raises(GradientError, match=mentions("train.max_skipped=1", "(nan)", "file")):
        GradientGuard(1, tmp_path / "file" / "bad", rank=0).must_skip(math.nan, [batch])


def test_held_out_rows_depend_on_the_seed_and_are_not_trained():
    trained, held_out = split(100, 0.1, seed=3)
    assert len(held_out) == 10 and sorted((*trained, *held_out)) == list(range(100))
    assert split(100, 0.1, seed=3)[1] == held_out != split(100, 0.1, seed=4)[1]
    assert split(5, 0.0, seed=0) == ((0, 1, 2, 3, 4), ())


@pytest.fixture
def shape():
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }
    return shape_from_config(HfConfig(values, "config.json"))


def test_parameters_are_selected_by_hugging_face_and_megatron_names(shape):
    embedding = {"embedding.word_embeddings.weight"}
    assert (
        select_names(shape, ["model.embed_tokens.weight"], key="k")
        == select_names(shape, ["embedding.*"], key="k")
        == embedding
    )
    fused = select_names(shape, ["*.1.self_attn.[qkv]_proj.weight"], key="k")
    assert fused == {"decoder.layers.1.self_attention.linear_qkv.weight"}


def test_a_slice_of_a_fused_parameter_and_a_pattern_without_a_match_are_refused(shape):
    with pytest.raises(
        MsrlError, match=mentions("train.freeze", "q_proj.weight", "k_proj.weight", "v_proj.weight")
    ):
        select_names(shape, ["*.q_proj.weight"], key="train.freeze")
    with pytest.raises(MsrlError, match=mentions("train.freeze", "'lm_heat'", "Qwen2ForCausalLM")):
        select_names(shape, ["lm_heat"], key="train.freeze")
