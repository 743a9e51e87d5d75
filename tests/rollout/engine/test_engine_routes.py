"""Routes of the engine: from vLLM's routers through requests, episodes and packing to the trainer.

The engine is a fake. `test_rollout_families.py` has a real one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from config_inputs import GENERATING, make_configs, make_working_folder
from families import QWEN2
from mixture_families import QWEN3_MOE
from msrl.algorithms.packing import has_all_routes, micro_batch
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.memory.routes import engine_route_bytes, route_bytes, route_rows
from msrl.models.families import load_shape
from msrl.models.shape import Moe
from msrl.plan.run_plan import RunPlan, resolve
from msrl.platforms import get
from msrl.rollout.engine import EngineSettings, NewTokens
from msrl.rollout.engine_limits import check_limits
from msrl.rollout.episodes.tokens import EpisodeTokens
from msrl.rollout.route_store import ComputedTokens, RouteStore
from msrl.rollout.routed_requests import RoutedRequests
from msrl.rollout.runtime.buffer import BufferState, FinishedGroup, Ticket
from msrl.rollout.runtime.engine_loop import EngineLoop
from msrl.rollout.vllm_routes import ROUTES_KEY, RouteRecorder, StepRecorder
from msrl.trainer.objective.requests import TokenRequest
from msrl.types import (
    Completion,
    Episode,
    Prompt,
    Reward,
    RolloutGroup,
    Routes,
    ScoredGroup,
    TokenSequence,
    VersionRun,
)
from msrl.workflows.rl.asynchronous.records import decode, encode
from msrl.workflows.rl.rollouts import greedy_sampling
from msrl.workflows.rl.setup import rollout_engine_settings
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.updater import Updater
from msrl.workflows.training.trainer_group import ForwardResult
from support import mentions
from test_engine_loop import ScriptedEngine, group_request
from test_grpo_update import Ranks, group

ENGINE = ["model.path=mixture", "train.router.replay=engine"]
LAYERS = (1, 3)  # mixture layers of the fake model
MOE = Moe(6, 2, 4)


def routes(token_ids: Sequence[int] | np.ndarray, shift: int = 0) -> Routes:
    """Return routes that tell the token and the layer, [T, 2, 2]."""
    by_layer = np.asarray(token_ids)[:, None] * 2 + np.arange(2) + shift
    return np.stack((by_layer, by_layer + 1), -1).astype(np.uint8)


def step(store: RouteStore, *requests: tuple[ComputedTokens, np.ndarray]) -> None:
    """Add a step whose requests compute these tokens."""
    store.add_step([r for r, _ in requests], np.concatenate([routes(ids) for _, ids in requests]))


def test_a_request_has_the_routes_of_its_prompt_and_of_every_sampled_token_that_was_read():
    store, ids = RouteStore(4), np.arange(10, 20)
    blocks = [7, 2, 5]
    step(store, (ComputedTokens("a", 0, 6, blocks[:2]), ids[:6]))
    for position in range(6, 10):
        other = np.array([50 + position])
        step(
            store,
            (ComputedTokens(None, position, 1, [0, 1, 3]), other),
            (ComputedTokens("a", position, 1, blocks), ids[position : position + 1]),
        )
    (stored,) = store.take(["a"])
    np.testing.assert_array_equal(stored, routes(ids))
    assert stored.dtype == np.uint8
    with pytest.raises(KeyError):
        store.take(["a"])


def test_tokens_of_the_prefix_cache_have_the_routes_of_the_pass_that_computed_them():
    store, prefix = RouteStore(2), np.arange(4)
    first, second = np.array([*prefix, 8, 9]), np.array([*prefix, 20])
    # The second request of a step reads blocks that the first one computes in the same step.
    step(
        store,
        (ComputedTokens("a", 0, 6, [4, 1, 2]), first),
        (ComputedTokens("b", 4, 1, [4, 1, 3]), second[4:]),
    )
    step(store, (ComputedTokens("c", 2, 3, [4, 5, 6]), second[2:]))
    stored = store.take(["a", "b", "c"])
    for own, ids in zip(stored, (first, second, second), strict=True):
        np.testing.assert_array_equal(own, routes(ids))
    # A block that is shared up to a token in its middle is copied.
    store.copy_blocks([(1, 9)])
    copied = np.array([0, 1, 2, 40])
    step(store, (ComputedTokens("e", 3, 1, [4, 9]), copied[3:]))
    np.testing.assert_array_equal(store.take(["e"])[0], routes(copied))
    # A block that is used again has the routes of its new tokens.
    step(store, (ComputedTokens("d", 0, 2, [4]), np.array([30, 31])))
    np.testing.assert_array_equal(store.take(["d"])[0], routes([30, 31]))


def test_a_recomputed_token_keeps_the_route_of_the_pass_that_sampled_its_successor():
    store, ids = RouteStore(4), np.arange(10, 16)
    step(store, (ComputedTokens("a", 0, 4, [0]), ids[:4]))
    step(store, (ComputedTokens("a", 4, 1, [0, 1]), ids[4:5]))
    # After a preemption, or with new weights, the engine computes all tokens in other blocks.
    store.add_step([ComputedTokens("a", 0, 6, [2, 3])], routes(ids, shift=100))
    (stored,) = store.take(["a"])
    np.testing.assert_array_equal(stored[:5], routes(ids[:5]))
    np.testing.assert_array_equal(stored[5:], routes(ids[5:], shift=100))


def test_routes_of_aborted_requests_are_forgotten_and_missing_tokens_are_an_error():
    store = RouteStore(4)
    step(store, (ComputedTokens("a", 0, 2, [0]), np.arange(2)))
    store.drop(["a", "unknown"])
    with pytest.raises(KeyError):
        store.take(["a"])
    with pytest.raises(RuntimeError, match=mentions("3", "2")):
        store.add_step([ComputedTokens("b", 0, 2, [0])], routes([1, 2, 3]))


class FakeRouter:
    """Router of vLLM with its hook."""

    capture: Any = None

    def set_capture_fn(self, capture: Any) -> None:
        self.capture = capture


class FakeMixture(torch.nn.Module):
    """Mixture layer of vLLM."""

    def __init__(self, layer_id: int, *, is_monolithic: bool = False) -> None:
        super().__init__()
        self.layer_id, self.router = layer_id, FakeRouter()
        self._quant_method = SimpleNamespace(is_monolithic=is_monolithic)


class FullAttentionSpec:
    """KV cache specification under vLLM's name."""

    def __init__(self, block_size: int = 4) -> None:
        self.block_size = block_size


class FakeRunner:
    """Model runner of vLLM whose routers choose experts by the tokens."""

    def __init__(self, *specs: Any, layers: Sequence[int] = LAYERS, **options: Any) -> None:
        mixtures = [FakeMixture(layer, **options) for layer in reversed(layers)]
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 1), *mixtures)
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.requests = dict[str, Any]()
        self.input_batch: Any = None
        self.token_ids = np.zeros(0, np.int64)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def execute_model(self, scheduled: Any, intermediate: Any = None) -> str:
        padded = np.append(self.token_ids, 77)  # the runner may pad a batch
        for module in self.model:
            if isinstance(module, FakeMixture):
                chosen = routes(padded)[:, LAYERS.index(module.layer_id)]
                module.router.capture(torch.from_numpy(chosen.astype(np.int32)))
        return "output"

    def run(self, tokens: Mapping[str, tuple[int, np.ndarray]], blocks: Any) -> str:
        """Execute a step over tokens from a position on, by request."""
        starts = np.array([start for start, _ in tokens.values()])
        self.input_batch = SimpleNamespace(req_ids=[*tokens], num_computed_tokens_cpu=starts)
        self.token_ids = np.concatenate([ids for _, ids in tokens.values()])
        for name in tokens:
            params = SimpleNamespace(extra_args={ROUTES_KEY: f"key {name}"})
            params = params if name != "unnamed" else SimpleNamespace(extra_args=None)
            self.requests[name] = SimpleNamespace(sampling_params=params, block_ids=blocks[name])
        counts = {name: len(ids) for name, (_, ids) in tokens.items()}
        return self.execute_model(
            SimpleNamespace(
                total_num_scheduled_tokens=sum(counts.values()), num_scheduled_tokens=counts
            )
        )


class FakeWorker(RouteRecorder):
    """vLLM's worker with the methods of msrl."""

    def __init__(self, runner: FakeRunner, rank: int = 0) -> None:
        self.model_runner, self.rank = runner, rank

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self, method)(*arguments)]


class WindowSpec(SimpleNamespace):
    """KV cache specification of a sliding window."""


def test_a_worker_records_the_choice_of_every_router_of_the_requests_with_a_key():
    runner = FakeRunner(WindowSpec(block_size=8), FullAttentionSpec(4))
    worker = FakeWorker(runner)
    requests = RoutedRequests(worker.call)
    requests.begin(2, MOE)
    ids = np.arange(10, 16)
    blocks = {"a": ([0], [3, 4]), "unnamed": ([0], [5])}
    runner.run({"unnamed": (0, np.arange(3)), "a": (0, ids[:5])}, blocks)
    assert runner.run({"a": (5, ids[5:])}, blocks) == "output"
    empty = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
    runner.token_ids = np.zeros(0, np.int64)
    runner.execute_model(empty)
    # The engine has read five tokens of six, the last of which it has sampled only.
    prompt, completion = Prompt(0, ids[:4]), Completion(ids[4:6], np.zeros(2), "stop", 0, "")
    (routed,) = requests.add_routes([prompt], [completion], ["key a"])
    np.testing.assert_array_equal(routed.routes, routes(ids[:5]))
    assert FakeWorker(FakeRunner(), rank=1).call("take_routes", ["key a"]) == [[]]


@pytest.mark.parametrize(
    ("runner", "fragment"),
    [
        (FakeRunner(layers=(1,)), "1 of 2"),
        (FakeRunner(is_monolithic=True), "one operation"),
        (FakeRunner(WindowSpec(block_size=4)), "window"),
        (SimpleNamespace(), "model runner"),
    ],
)
def test_a_model_whose_experts_vllm_hides_is_refused(runner: Any, fragment: str):
    with pytest.raises(MsrlError, match=mentions("train.router.replay=engine", fragment)):
        StepRecorder(runner, len(LAYERS), 1)


def test_a_step_has_the_routes_of_the_requests_that_it_finishes():
    ids = np.arange(5)
    calls: list[Any] = []

    def call(method: str, keys: list[str]) -> list[Any]:
        calls.append((method, keys))
        return [[routes(ids)[:4] for _ in keys]]

    requests = RoutedRequests(call)
    requests.start("a", 3)
    requests.start("b", 3)
    new = [NewTokens(name, ids[:1], np.zeros(1), None) for name in ("a", "b", "c")]
    assert requests.add_step_routes(new) == new and not calls
    last = [replace(each, finish_reason="stop") for each in new]
    routed = {each.request: each.routes for each in requests.add_step_routes([last[0], *new[1:]])}
    np.testing.assert_array_equal(routed["a"], routes(ids)[:4])
    assert routed["b"] is None and routed["c"] is None
    requests.abort(["b", "c"])
    assert calls == [("take_routes", ["a"]), ("drop_routes", ["b"])]
    requests.start("long", 5)
    with pytest.raises(RuntimeError, match="long"):
        requests.add_step_routes([replace(last[0], request="long")])


def test_the_loop_of_an_engine_passes_the_routes_of_finished_requests_on():
    class RoutedEngine(ScriptedEngine):
        """Scripted engine whose requests have routes."""

        def step(self) -> list[NewTokens]:
            return [
                new if new.finish_reason is None else replace(new, routes=routes(range(25)))
                for new in super().step()
            ]

    engine = RoutedEngine()
    engine.allow(100)
    loop = EngineLoop(engine, version=0)
    (finished,) = loop.complete([group_request(0)]).values()
    for completion in finished.completions:
        np.testing.assert_array_equal(completion.routes, routes(range(25)))


def test_the_sequences_of_an_episode_have_the_routes_of_the_turns_that_read_them_first():
    tokens, versions = EpisodeTokens(np.arange(3)), (VersionRun(0, 2),)
    tokens.add_answer(np.array([10, 11]), np.zeros(2), versions, routes([0, 1, 2, 10]))
    tokens.add_messages(np.array([20]))
    second = routes([0, 1, 2, 10, 11, 20, 12], shift=100)
    tokens.add_answer(np.array([12, 13]), np.zeros(2), versions, second)
    tokens.restart(np.array([30, 31]))
    tokens.add_answer(np.array([14]), np.zeros(1), (VersionRun(0, 1),), routes([30, 31]))
    first, edited = tokens.sequences()
    assert first.routes is not None and len(first.routes) == len(first.token_ids) - 1
    np.testing.assert_array_equal(first.routes[:4], routes([0, 1, 2, 10]))
    np.testing.assert_array_equal(first.routes[4:], second[4:])
    np.testing.assert_array_equal(edited.routes, routes([30, 31]))
    assert EpisodeTokens(np.arange(2)).sequences()[0].routes is None


def _routed_group(number: int) -> ScoredGroup:
    """Return a group of two responses with routes, the second of which is an episode."""
    prompt = Prompt(number, np.array([1, 2]))
    plain = Completion(np.array([5, 6]), np.zeros(2, np.float32), "stop", 0, "")
    plain = replace(plain, routes=routes([1, 2, 5]))
    mask = np.array([False, False, True, False, True])
    sequence = TokenSequence(np.array([1, 2, 5, 7, 6]), mask, routes([1, 2, 5, 7]))
    episode = replace(plain, routes=None, episode=Episode((sequence,), (), ()))
    rewards = (Reward(1.0, {}), Reward(0.0, {}))
    return ScoredGroup(RolloutGroup(prompt, (plain, episode)), rewards)


def _without_first_routes(group: ScoredGroup) -> ScoredGroup:
    first, second = group.rollout.completions
    rollout = replace(group.rollout, completions=(replace(first, routes=None), second))
    return replace(group, rollout=rollout)


def test_samples_and_micro_batches_have_the_routes_of_all_tokens_but_the_last():
    sequences = rollout_arrays([_routed_group(0)]).sequences
    assert has_all_routes(sequences)
    batch = micro_batch(*sequences, pad_to_multiple=4)
    assert batch.routes is not None and batch.is_routed is not None
    assert batch.is_routed.tolist() == [True] * 3 + [False] + [True] * 4 + [False] + [False] * 3
    np.testing.assert_array_equal(batch.routes[batch.is_routed], routes([1, 2, 5, 1, 2, 5, 7]))
    # Every position that predicts has routes, and so have all positions before it.
    assert batch.is_routed[batch.loss_mask].all()
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        assert (np.diff(batch.is_routed[start:end].astype(int)) <= 0).all()


def test_a_sequence_without_loss_needs_no_routes_and_any_other_does():
    sequences = rollout_arrays([_routed_group(0)]).sequences
    assert sequences.routes is not None
    first, second = sequences.routes
    absent = rollout_arrays([_without_first_routes(_routed_group(0))]).sequences
    assert absent.routes is not None and [len(rows) for rows in absent.routes] == [0, 4]
    assert not has_all_routes(absent)
    assert not has_all_routes(sequences._replace(routes=None))
    assert not has_all_routes(sequences._replace(routes=(first[:2], second)))
    no_loss = np.zeros_like(absent.loss_masks[0])
    masked = absent._replace(loss_masks=(no_loss, absent.loss_masks[1]))
    assert has_all_routes(masked)
    batch = micro_batch(*masked)
    assert batch.is_routed is not None
    assert batch.is_routed.tolist() == [False] * 4 + [True] * 4 + [False]


def test_a_router_keeps_its_own_choice_for_tokens_without_routes(monkeypatch: pytest.MonkeyPatch):
    from msrl.trainer.model import routes as module

    tensor_group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(module.groups, "tp_group", lambda: tensor_group)
    batch = micro_batch(*rollout_arrays([_routed_group(0)]).sequences, pad_to_multiple=4)
    assert batch.routes is not None and batch.is_routed is not None
    packed: Any = SimpleNamespace(context=None)
    replay = module.RoutingReplay(MOE, torch.device("cpu"))
    table = replay.routes(0, batch, packed)
    assert table is not None
    own = torch.full((len(batch.token_ids), 2), 99)
    chosen = torch.stack([table.choose(layer, own) for layer in range(2)], 1).numpy()
    np.testing.assert_array_equal(chosen[batch.is_routed], batch.routes[batch.is_routed])
    assert (chosen[~batch.is_routed] == 99).all()
    monkeypatch.setattr(module.dist, "all_reduce", lambda counts: None)
    assert replay.end() == {"router_disagreement": 1.0}
    assert replay._counts.tolist() == [2 * 7, 2 * 7]


def test_a_checkpoint_keeps_the_routes_of_finished_groups():
    saved = ScoredGroup(_routed_group(3).rollout, _routed_group(3).rewards, _routed_group(3))
    item = FinishedGroup(Ticket(3, 0), 0, saved)
    values = json.loads(json.dumps(encode(BufferState(4, 3, (), (item,), ()))))
    (restored,) = decode(values, lambda number: Prompt(number, np.array([1, 2]))).finished
    plain, episode = restored.group.rollout.completions
    np.testing.assert_array_equal(plain.routes, routes([1, 2, 5]))
    assert plain.routes is not None and plain.routes.dtype == np.uint8
    assert episode.episode is not None and episode.routes is None
    np.testing.assert_array_equal(episode.episode.sequences[0].routes, routes([1, 2, 5, 7]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_working_folder(tmp_path, **GENERATING)
    return make_configs(tmp_path, {"mixture": QWEN3_MOE, "dense": QWEN2})


def _plan(*sets: str) -> RunPlan:
    config = load(["grpo.yaml"], [*ENGINE, *sets], command="train-grpo").config
    return resolve(config, "train-grpo")


class RoutedPolicy(Ranks):
    """Fake ranks that record which passes of the policy get routes."""

    def __init__(self) -> None:
        super().__init__()
        self.with_routes = list[bool]()

    def forward(self, request: TokenRequest, sequences: Any, limits: object) -> ForwardResult:
        if request.model == "policy":
            self.with_routes.append(sequences.routes is not None)
        return super().forward(request, sequences, limits)


def test_all_passes_of_the_policy_replay_the_routes_of_the_engine(folder: Path):
    sizes = ["rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"]
    updates = ["train.updates.samples_per_update=1", "train.updates.epochs=2"]
    ranks: Any = RoutedPolicy()
    config = load(["grpo.yaml"], [*ENGINE, *sizes, *updates], command="train-grpo").config
    updater = Updater(config, ranks, 1, {})
    prepared = updater.prepare([_routed_group(0)], Clock())
    updater.update(prepared, 0, Clock())
    assert ranks.with_routes == [True] and len(ranks.sequences) == 4
    expected = {len(own): own for own in (routes([1, 2, 5]), routes([1, 2, 5, 7]))}
    for sequences in ranks.sequences:
        np.testing.assert_array_equal(sequences.routes[0], expected[len(sequences.routes[0])])
    with pytest.raises(MsrlError, match=mentions("train.router.replay=engine", "routes")):
        updater.prepare([group(0, 1.0, 0.0)], Clock())


def test_only_rollouts_that_are_trained_on_have_routes(folder: Path):
    plan = _plan()
    assert plan.sampling.with_routes and rollout_engine_settings(plan).records_routes
    assert not greedy_sampling(plan.sampling).with_routes
    plan = _plan("train.router.replay=none")
    assert not plan.sampling.with_routes and not rollout_engine_settings(plan).records_routes


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (["model.path=dense"], ("train.router.replay=engine", "experts")),
        (["cluster.platform=cuda"], ("train.router.replay=engine", "cuda")),
        (["rollout.engine.eager=false"], ("rollout.engine.eager=false", "compiled", "hook")),
        (
            ["rollout.engine.options.async_scheduling=true"],
            ("rollout.engine.options.async_scheduling=true", "train.router.replay"),
        ),
    ],
)
def test_what_hides_the_routes_of_the_engine_is_refused(
    folder: Path, sets: list[str], fragments: tuple[str, ...]
):
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        _plan(*sets)


def test_a_platform_without_the_hook_is_refused_before_the_engine_starts(folder: Path):
    settings = EngineSettings(folder / "mixture", records_routes=True)
    with pytest.raises(MsrlError, match=mentions("train.router.replay=engine", "npu")):
        check_limits(settings, get("npu"))


def test_the_plan_tells_the_host_memory_of_the_routes_of_engines(folder: Path):
    plan, shape = _plan("rollout.engine.max_num_seqs=8"), load_shape(folder / "mixture")
    assert shape.moe is not None
    # 4 prompts with 8 samples of 64 + 64 tokens; 4 layers with 3 experts per token of 1 byte.
    assert route_bytes(plan, shape) == 4 * 8 * 128 * 12
    # Blocks of 128 tokens for 8 sequences, one more block, and 32 responses.
    assert engine_route_bytes(plan, shape) == (9 + 32) * 128 * 12
    assert {*route_rows(plan)} == {"routing replay", "routing replay, engine"}
    stale = _plan("rollout.async.max_staleness=2", "rollout.async.allow_uncorrected=true")
    assert route_bytes(stale, shape) == 3 * route_bytes(plan, shape)
