"""Routing replay: storage of routes by sequence, routers that replay them, and the checks.

`test_routing_replay_ranks.py` trains complete models.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from config_inputs import GENERATING, make_configs, make_working_folder
from fake_workers import FakeWorkers
from families import QWEN2
from mixture_families import QWEN3_MOE
from msrl.algorithms.packing import Sequences, micro_batch
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from msrl.memory.routes import route_bytes, route_rows
from msrl.models.shape import Moe
from msrl.plan.run_plan import resolve
from msrl.trainer.objective.batches import BatchLimits, pad_sequences, select
from msrl.trainer.objective.losses import ComparedModel
from msrl.trainer.objective.requests import RankValues, TokenRequest, UpdateRequest
from msrl.types import MicroBatch, Routes, StageRoutes
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.updater import Updater
from msrl.workflows.training.train_worker import WorkerPosition
from msrl.workflows.training.trainer_group import ForwardResult, TrainerGroup
from support import mentions
from test_grpo_update import Ranks, group

TWO_UPDATES = ["train.updates.epochs=2", "train.router.replay=trainer"]
SEQUENCES = Sequences(
    tuple(np.arange(start, start + size) for start, size in ((0, 3), (10, 5), (20, 2), (30, 4))),
    tuple(np.ones(size, np.bool_) for size in (3, 5, 2, 4)),
    {},
)
LAYERS, CHOSEN = 3, 2
MOE = Moe(num_experts=6, experts_per_token=2, ffn_hidden_size=4)


def routes(token_ids: np.ndarray) -> Routes:
    """Return routes that tell the token and the layer, [T, L, k]."""
    by_layer = token_ids[:, None] * LAYERS + np.arange(LAYERS)
    return np.stack((by_layer, by_layer + 100), -1).astype(np.int16)


def test_routes_of_virtual_stages_are_joined_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from msrl.trainer.model import routes as module

    offloaded: list[list[int]] = []
    monkeypatch.setattr(
        module.RecordedRoutes, "offload", lambda self: offloaded.append(sorted(self.experts))
    )
    monkeypatch.setattr(module, "token_positions", lambda *_: torch.arange(4))
    monkeypatch.setattr(module, "_token_group", lambda: None)
    for name, value in (("get_world_size", 1), ("get_rank", 0)):
        monkeypatch.setattr(module.dist, name, lambda _, value=value: value)
    batch: Any = SimpleNamespace(token_ids=np.arange(4))
    packed: Any = SimpleNamespace()
    recording = module.RouteRecording(torch.int16, torch.device("cpu"))
    for layer in (0, 1):
        recording.add(0, batch, packed).choose(layer, torch.full((4, 2), layer))
    stage = recording.gather([batch])
    assert offloaded == [[0], [1]]
    assert stage is not None and stage.layers == (0, 1)
    assert stage.micro_batches[0][:, :, 0].tolist() == [[0, 1]] * 4


class Stages(FakeWorkers):
    """Fake ranks: two data-parallel replicas of two stages with one and two mixture layers.

    The first stage reports no log-probabilities.
    """

    layers = ((0,), (1, 2))

    def __init__(self) -> None:
        super().__init__(4)
        self.updates = list[MicroBatch]()

    def start(self, rank: int, *_: object) -> tuple[WorkerPosition, dict[str, Any]]:
        return WorkerPosition(rank // 2, rank % 2 == 1, sequence_multiple=4), {}

    def forward(
        self, rank: int, batches: Sequence[MicroBatch], request: TokenRequest
    ) -> RankValues:
        layers = self.layers[rank % 2]
        recorded = tuple(routes(batch.token_ids)[:, list(layers)] for batch in batches)
        labels = [batch.labels.astype(np.float32) for batch in batches]
        return RankValues({"logprobs": labels} if rank % 2 else None, StageRoutes(layers, recorded))

    def update(self, rank: int, batches: Sequence[MicroBatch], *_: object) -> dict[str, float]:
        self.updates += batches
        return {}


@pytest.mark.parametrize("limits", [BatchLimits(1), BatchLimits(2), BatchLimits(8, max_tokens=6)])
def test_routes_belong_to_sequences_whatever_the_micro_batches(limits: BatchLimits):
    stages: Any = Stages()
    trainers = TrainerGroup(stages)
    saves: Any = None
    trainers.start(None, saves)
    values = trainers.forward(TokenRequest(records_routes=True), SEQUENCES, limits)
    recorded = values.routes
    assert recorded is not None
    for ids, logprobs, own in zip(SEQUENCES.token_ids, values["logprobs"], recorded, strict=True):
        np.testing.assert_array_equal(logprobs[1:], ids[1:])
        np.testing.assert_array_equal(own, routes(ids))
    reordered = select(SEQUENCES._replace(routes=recorded), (3, 0, 2, 1))
    loss: Any = None
    trainers.update(UpdateRequest(loss, 0.0), reordered, BatchLimits(8, max_tokens=8))
    for batch in stages.updates:
        assert batch.routes is not None and len(batch.routes) == len(batch.token_ids)
        num_real = len(batch.token_ids) - batch.num_padding
        expected = routes(batch.token_ids)[:num_real]
        np.testing.assert_array_equal(batch.routes[:num_real], expected)


def test_a_repeated_sequence_repeats_its_routes():
    tables = tuple(map(routes, SEQUENCES.token_ids))
    with_routes = SEQUENCES._replace(routes=tables)
    repeated = pad_sequences(select(with_routes, (0, 1, 2)), 4)
    assert repeated.routes is not None
    np.testing.assert_array_equal(repeated.routes[3], routes(SEQUENCES.token_ids[2]))
    assert micro_batch(*select(SEQUENCES, (0,))).routes is None
    with pytest.raises(ValueError, match="routes"):
        micro_batch(SEQUENCES.token_ids, SEQUENCES.loss_masks, {}, tables[::-1])


def _router(number: int = 1) -> Any:
    """Return a router with the logits as its input."""
    from msrl.trainer.model.experts import Router

    class LogitRouter(Router):
        """Router without the parts of Megatron's constructor that need process groups."""

        def __init__(self, moe: Moe, number: int) -> None:
            torch.nn.Module.__init__(self)
            self.moe, self.number, self.hook, self.expert_bias = moe, number, None, None

        def _maintain_float32_expert_bias(self) -> None:
            pass

        def gating(self, input: Tensor) -> Tensor:
            return input

    return LogitRouter(MOE, number)


def _replay_routes(experts: Tensor, is_token: Sequence[bool]) -> tuple[Any, Tensor]:
    """Return routes that replay the experts [n, k] in layer 1, and their counts."""
    from msrl.trainer.model.routes import ReplayedRoutes

    everywhere = torch.full((len(experts), LAYERS, CHOSEN), 5, dtype=torch.uint8)
    everywhere[:, 1] = experts.to(torch.uint8)
    counts = torch.zeros(2, dtype=torch.int64)
    return ReplayedRoutes(everywhere, torch.tensor(is_token), counts), counts


def test_a_router_weights_the_replayed_experts_by_its_current_logits():
    torch.manual_seed(0)
    logits = torch.randn(4, 1, 6, requires_grad=True)
    own = logits.detach()[:, 0].topk(2).indices
    experts = own.clone()
    experts[1] = torch.tensor([(own[1, 0] + 1) % 6, own[1, 0]])
    experts[3] = logits.detach()[3, 0].topk(2, largest=False).indices
    table, counts = _replay_routes(experts.flip(-1), [True, True, True, False])
    weights, chosen = _router()(logits, None, table)
    experts[3] = own[3]  # padding keeps its own choice
    scores = logits[:, 0].softmax(-1).gather(-1, experts)
    expected = torch.zeros(4, 6).scatter(-1, experts, scores / scores.sum(-1, keepdim=True))
    torch.testing.assert_close(weights, expected)
    assert torch.equal(chosen, expected > 0)
    differing = len({*experts[1].tolist()} ^ {*own[1].tolist()}) > 0
    assert counts.tolist() == [int(differing), 3]
    slopes = torch.randn(4, 6)
    actual_slopes, expected_slopes = (
        torch.autograd.grad((w * slopes).sum(), logits)[0] for w in (weights, expected)
    )
    torch.testing.assert_close(actual_slopes, expected_slopes)
    assert actual_slopes[1].abs().sum() > 0


def test_the_first_pass_of_a_recomputed_layer_replays_but_does_not_count():
    logits = torch.arange(12.0).reshape(2, 1, 6)
    table, counts = _replay_routes(torch.tensor([[0, 1], [4, 5]]), [True, True])
    with torch.no_grad():
        first = _router()(logits, None, table)[1]
    assert counts.tolist() == [0, 0]
    second = _router()(logits, None, table)[1]
    assert torch.equal(first, second)
    assert first[0].nonzero().flatten().tolist() == [0, 1]
    assert counts.tolist() == [1, 2]


def test_a_router_records_its_choice_in_a_small_type():
    from msrl.trainer.model.routes import RecordedRoutes

    record = RecordedRoutes(torch.uint8)
    _, chosen = _router(2)(torch.randn(3, 1, 6), None, record)
    assert record.experts[2].dtype == torch.uint8
    assert torch.equal(torch.zeros(3, 6).scatter(-1, record.experts[2].long(), 1.0) > 0, chosen)
    sizes = [replace(MOE, num_experts=count).expert_number_bytes for count in (256, 257)]
    assert sizes == [1, 2]


class _Group:
    """Rank of a process group that is simulated in this process."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _context_rows(lengths: Sequence[int], rank: int, multiple: int) -> Tensor:
    """Return the positions in the micro-batch of one of two context-parallel ranks, [n]."""
    from msrl.trainer.model.context import padded_lengths, rank_positions, unpadded_positions

    lengths_with_padding = padded_lengths(lengths, 2, multiple)
    rows = unpadded_positions(lengths, lengths_with_padding)
    return torch.from_numpy(rows[rank_positions(lengths_with_padding, rank, 2)])


def test_ranks_that_share_a_micro_batch_record_and_replay_its_tokens_together(
    monkeypatch: pytest.MonkeyPatch,
):
    """Simulate two tensor-parallel times two context-parallel ranks one after the other."""
    from msrl.trainer.model import routes as module

    tables = tuple(map(routes, SEQUENCES.token_ids))
    batch = micro_batch(*SEQUENCES._replace(routes=tables), pad_to_multiple=4)
    assert batch.routes is not None and batch.num_padding == 2
    num_real = len(batch.token_ids) - batch.num_padding
    lengths, device = np.diff(batch.cu_seqlens).tolist(), torch.device("cpu")
    parts: list[Tensor] = []
    monkeypatch.setattr(module, "_token_group", lambda: None)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(module.dist, "all_reduce", lambda x, group: parts.append(x.clone()))
    for context_rank, tensor_rank in np.ndindex(2, 2):
        group = _Group(tensor_rank, 2)
        monkeypatch.setattr(module.groups, "tp_group", lambda group=group: group)
        share: Any = SimpleNamespace(rows=_context_rows(lengths, context_rank, multiple=2))
        packed: Any = SimpleNamespace(context=share)
        positions = module.token_positions(len(batch.token_ids), packed, device)
        replay = module.RoutingReplay(replace(MOE, num_experts=300), device)
        table = replay.routes(0, batch, packed)
        assert table is not None
        own = torch.full((len(positions), CHOSEN), 299)
        chosen = [table.choose(layer, own) for layer in range(LAYERS)]
        for row, position in enumerate(positions.tolist()):
            is_token = 0 <= position < num_real
            expected = batch.routes[position] if is_token else np.full((LAYERS, CHOSEN), 299)
            np.testing.assert_array_equal([experts[row] for experts in chosen], expected)
        with replay.record() as recording:
            record = replay.routes(0, batch, packed)
            assert record is not None
            for layer in range(LAYERS):
                known = torch.from_numpy(batch.routes[positions.clamp(min=0).numpy(), layer])
                record.choose(layer, known)
        assert recording.gather([batch]) is not None
    gathered = torch.stack(parts).sum(0).numpy()
    np.testing.assert_array_equal(gathered[:num_real], batch.routes[:num_real])


class RoutedRanks(Ranks):
    """Fake ranks that record the number of every sequence as its routes."""

    def forward(self, request: TokenRequest, sequences: Sequences, limits: object) -> ForwardResult:
        values = super().forward(request, sequences, limits)
        if not request.records_routes:
            return values
        numbers = enumerate(sequences.token_ids)
        own = tuple(np.full((len(ids), 1, 1), number, np.uint8) for number, ids in numbers)
        return replace(values, routes=own)


class _RecordingPolicy:
    """A policy with adapters that stores the micro-batches of its passes."""

    adapters = SimpleNamespace(initial=nullcontext)

    def __init__(self) -> None:
        self.compared: list[MicroBatch] = []
        self.trained: list[MicroBatch] = []

    def distributions(self, batches: Sequence[MicroBatch], temperature: float) -> list[None]:
        self.compared += batches
        return [None] * len(batches)

    def update(self, batches: Sequence[MicroBatch], *_: object) -> None:
        self.trained += batches


@pytest.mark.parametrize("teacher", [None, "self"], ids=["reference", "teacher"])
def test_only_the_policy_of_an_update_replays_routes(teacher: str | None) -> None:
    from msrl.trainer.rank import TrainingRank

    policy: Any = _RecordingPolicy()
    rank = object.__new__(TrainingRank)
    rank._policy, rank.reference, rank.teachers = policy, None, {}
    rank.position = cast("Any", SimpleNamespace(is_last_stage=True))
    batch = micro_batch(*SEQUENCES._replace(routes=tuple(map(routes, SEQUENCES.token_ids))))
    loss: Any = SimpleNamespace(compared=(ComparedModel(teacher),), temperature=1.0)
    rank.update([batch], UpdateRequest(loss, 0.0, divisor=1.0))
    assert [compared.routes for compared in policy.compared] == [None]
    assert [compared.is_routed for compared in policy.compared] == [None]
    np.testing.assert_array_equal(policy.compared[0].token_ids, batch.token_ids)
    assert policy.trained == [batch] and batch.routes is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_working_folder(tmp_path, **GENERATING)
    return make_configs(tmp_path, {"mixture": QWEN3_MOE, "dense": QWEN2})


def test_every_update_of_a_step_gets_the_routes_of_its_sequences(folder: Path):
    sizes = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    updates = ["train.updates.samples_per_update=1", *TWO_UPDATES]
    settings = ["model.path=mixture", *sizes, *updates]
    ranks: Any = RoutedRanks()
    updater = Updater(load(["grpo.yaml"], settings, command="train-grpo").config, ranks, 1, {})
    prepared = updater.prepare([group(0, 1.0, 0.0), group(1, 2.0, 1.0)], Clock())
    updater.update(prepared, 0, Clock())
    numbers = [int(sequences.routes[0].flat[0]) for sequences in ranks.sequences]
    assert sorted(numbers) == [0, 0, 1, 1, 2, 2, 3, 3]
    for sequences, number in zip(ranks.sequences, numbers, strict=True):
        np.testing.assert_array_equal(sequences.token_ids[0], prepared.sequences.token_ids[number])


@pytest.mark.parametrize(
    ("model", "sets", "fragments"),
    [
        ("dense", TWO_UPDATES, ("train.router.replay=trainer", "experts")),
        ("mixture", TWO_UPDATES[1:], ("train.router.replay=trainer", "one update")),
        (
            "mixture",
            [*TWO_UPDATES, "algo.old_logprobs=behavior"],
            ("train.router.replay=trainer", "algo.old_logprobs=behavior"),
        ),
        ("mixture", ["train.router.replay=R3"], ("train.router.replay=R3", "engine")),
    ],
)
def test_a_replay_without_routes_is_refused_before_launch(
    folder: Path, model: str, sets: list[str], fragments: tuple[str, ...]
):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        load(["grpo.yaml"], [f"model.path={model}", *sets], command="train-grpo")


def test_only_commands_with_rollouts_replay_routes(folder: Path):
    with pytest.raises(MsrlError, match=mentions("train.router.replay=trainer", "train-sft")):
        load(
            ["sft.yaml"],
            ["model.path=mixture", "train.router.replay=trainer"],
            command="train-sft",
        )


def test_the_plan_tells_the_host_memory_of_the_routes(folder: Path):
    config = load(["grpo.yaml"], ["model.path=mixture", *TWO_UPDATES], command="train-grpo").config
    plan = resolve(config, "train-grpo")
    # 4 prompts with 8 samples of 64 + 64 tokens; 4 layers with 3 experts per token of 1 byte.
    assert plan.shape.moe is not None
    assert route_bytes(plan, plan.shape) == 4 * 8 * 128 * 4 * 3
    assert "0.0 MB" in route_rows(plan)["routing replay"]
    assert not route_rows(resolve(config, "train-sft"))


@pytest.mark.parametrize(
    ("mode", "value"), [("disable", "none"), ("R2", "trainer"), ("R3", "engine")]
)
def test_roll_names_the_modes_of_routing_replay(tmp_path: Path, mode: str, value: str):
    file = tmp_path / "roll.yaml"
    worker = f"{{device_mapping: list(range(1)), router_replay: {{mode: {mode}}}}}"
    file.write_text(f"response_length: 8\nactor_train: {worker}\n", encoding="utf-8")
    results = translate_arguments("roll", [str(file)]).key_results
    modes = [each for each in results if each.entry.key == "router_replay"]
    assert [each.status.name for each in modes] == ["APPLIED"]
    assert value in modes[0].text
