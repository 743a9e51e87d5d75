"""Buffer of asynchronous rollouts: staleness bound, exactly-once training, resume."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl.rollout.runtime.admission import admission
from msrl.rollout.runtime.buffer import GroupBuffer, OnStale, Ticket, outdated_tickets


def test_admission_is_limited_by_the_free_places_and_by_the_bound() -> None:
    assert admission(8, 3, staleness=1, version=0, batch=4, accepted=0) == 5
    assert admission(100, 3, staleness=1, version=0, batch=4, accepted=2) == 3
    assert admission(100, 4, staleness=0, version=2, batch=4, accepted=8) == 0
    assert admission(2, 5, staleness=9, version=0, batch=4, accepted=0) == 0


def test_a_resumed_run_starts_no_more_groups_than_one_that_was_not_interrupted() -> None:
    # Version 5, 2 finished groups in the checkpoint, none running.
    assert admission(100, 0, staleness=1, version=5, batch=4, accepted=5 * 4 + 2) == 6


def test_a_bound_of_zero_starts_one_batch_at_a_time() -> None:
    buffer = GroupBuffer[str](batch=3, max_staleness=0)
    tickets = buffer.issue(version=0)
    assert [ticket.number for ticket in tickets] == [0, 1, 2]
    for ticket in tickets:
        buffer.add_generated(ticket, oldest_version=0)
        buffer.add_scored(ticket, "group")
    assert buffer.issue(version=0) == []
    assert len(buffer.take(version=0) or ()) == 3
    assert buffer.issue(version=0) == []  # the engines do not have the new weights yet
    assert [ticket.number for ticket in buffer.issue(version=1)] == [3, 4, 5]


def test_no_more_groups_generate_at_the_same_time_than_allowed() -> None:
    buffer = GroupBuffer[str](batch=3, max_staleness=2, max_running=2)
    first, second = buffer.issue(version=0)
    assert buffer.issue(version=0) == []
    buffer.add_generated(second, 0)
    assert [ticket.number for ticket in buffer.issue(version=0)] == [2]
    buffer.add_generated(first, 0)
    assert [ticket.number for ticket in buffer.issue(version=0)] == [3]


def test_a_batch_waits_for_its_oldest_group() -> None:
    buffer = GroupBuffer[str](batch=2, max_staleness=1)
    tickets = buffer.issue(version=0)
    for ticket in tickets[1:]:
        buffer.add_generated(ticket, 0)
        buffer.add_scored(ticket, "group")
    assert buffer.take(0) is None
    assert buffer.missing() == {Ticket(0): "running"}


def test_a_dropped_group_is_issued_again_once_and_then_waited_for() -> None:
    buffer = GroupBuffer[str](batch=1, max_staleness=1, on_stale="drop")
    slow, *tickets = buffer.issue(version=0)
    for version in (0, 1):
        for ticket in tickets:
            buffer.add_generated(ticket, version)
            buffer.add_scored(ticket, "group")
        assert buffer.drop_stale(version) == []
        assert buffer.take(version) is not None
        tickets = buffer.issue(version + 1)
    assert buffer.drop_stale(2) == [slow]
    assert not buffer.add_generated(slow, 0)
    (again,) = buffer.issue(2)
    assert again == Ticket(slow.number, attempt=2)
    for ticket in tickets:
        buffer.add_generated(ticket, 2)
        buffer.add_scored(ticket, "group")
    assert buffer.take(2) is not None
    for ticket in buffer.issue(3):
        buffer.add_generated(ticket, 3)
        buffer.add_scored(ticket, "group")
    assert buffer.drop_stale(3) == []
    assert buffer.take(3) is None  # version 3 is the last one that may train on the group
    buffer.add_generated(again, 2)
    buffer.add_scored(again, "again")
    (group,) = buffer.take(3) or ()
    assert group.group == "again"


def test_a_limited_number_of_running_groups_is_respected() -> None:
    buffer = GroupBuffer[str](batch=4, max_staleness=2, max_running=3)
    assert len(buffer.issue(0)) == 3
    assert buffer.issue(0) == []


def test_no_group_starts_beyond_the_end_of_the_run() -> None:
    buffer = GroupBuffer[str](batch=2, max_staleness=4, num_groups=3)
    assert len(buffer.issue(0)) == 3
    assert buffer.issue(5) == []


@dataclass
class _Run:
    """Simulated run: events happen in random order."""

    buffer: GroupBuffer[int]
    batch: int
    staleness: int
    on_stale: OnStale
    num_steps: int
    random: random.Random
    is_filtered: Callable[[int], bool]
    settings_change: bool = False  # at each resume
    trainer_version: int = 0
    engine_version: int = 0
    is_training: bool = False
    running: dict[Ticket, int] = field(default_factory=dict[Ticket, int])  # first token's version
    scoring: list[Ticket] = field(default_factory=list[Ticket])
    trained: list[int] = field(default_factory=list[int])

    def events(self) -> list[str]:
        names = ["issue"]
        names += ["generate"] * 3 * bool(self.running)
        names += ["score"] * 3 * bool(self.scoring)
        names += ["train"] if self.is_training else ["take"]
        names += ["load"] * (self.engine_version < self.trainer_version)
        return names

    def issue(self) -> None:
        tickets = self.buffer.issue(self.engine_version)
        for ticket in tickets:
            assert ticket not in self.running
            self.running[ticket] = self.engine_version
        bound = (self.staleness + self.engine_version + 1) * self.batch
        existing = sum(self.buffer.count(stage) for stage in ("running", "scoring", "finished"))
        assert not tickets or len(self.trained) + existing <= bound

    def generate(self) -> None:
        ticket = self.random.choice(list(self.running))
        if self.buffer.add_generated(ticket, self.running.pop(ticket)):
            self.scoring.append(ticket)

    def score(self) -> None:
        ticket = self.scoring.pop(self.random.randrange(len(self.scoring)))
        if self.is_filtered(ticket.number):
            self.buffer.filter_out(ticket, ticket.number)
        else:
            self.buffer.add_scored(ticket, ticket.number)

    def take(self) -> None:
        for ticket in self.buffer.drop_stale(self.trainer_version):
            self.running.pop(ticket, None)
            assert ticket.attempt == 1
        groups = self.buffer.take(self.trainer_version)
        if groups is None:
            return
        assert len(groups) == self.batch
        for group in groups:
            assert 0 <= self.trainer_version - group.oldest_version <= self.staleness
        self.trained += [group.group for group in groups]
        self.is_training = True

    def train(self) -> None:
        self.is_training, self.trainer_version = False, self.trainer_version + 1

    def load(self) -> None:
        self.engine_version = self.trainer_version

    def lose_engine(self) -> None:
        lost = [ticket for ticket in self.running if self.random.random() < 0.5]
        assert set(self.buffer.requeue(lost)) <= set(lost)
        for ticket in lost:
            del self.running[ticket]

    def resume(self) -> None:
        """Continue from a checkpoint between two steps."""
        if self.is_training:
            return
        state = self.buffer.state()
        assert outdated_tickets(state, self.batch, self.staleness, self.on_stale) == []
        if self.settings_change:
            self.staleness = self.random.randint(0, 4)
            self.on_stale = self.random.choice(["wait", "drop"])
            state = state.without_groups(
                outdated_tickets(state, self.batch, self.staleness, self.on_stale)
            )
        self.buffer = GroupBuffer(
            self.batch,
            self.staleness,
            on_stale=self.on_stale,
            num_groups=self.num_steps * self.batch,
            state=state,
        )
        self.engine_version = self.trainer_version
        self.running, self.scoring = {}, []


@settings(max_examples=300, deadline=None)
@given(
    batch=st.integers(1, 4),
    staleness=st.integers(0, 4),
    on_stale=st.sampled_from(["wait", "drop"]),
    max_running=st.none() | st.integers(1, 6),
    seed=st.integers(0, 2**32),
    has_failures=st.booleans(),
    filtered_share=st.sampled_from([0.0, 0.3, 0.7]),
    settings_change=st.booleans(),
)
def test_the_bound_holds_and_every_prompt_is_trained_once_whatever_the_delays(
    batch: int,
    staleness: int,
    on_stale: OnStale,
    max_running: int | None,
    seed: int,
    has_failures: bool,
    filtered_share: float,
    settings_change: bool,
) -> None:
    num_steps = 8
    buffer = GroupBuffer[int](
        batch,
        staleness,
        on_stale=on_stale,
        max_running=max_running,
        num_groups=num_steps * batch,
    )

    def is_filtered(number: int) -> bool:
        return random.Random(seed + number).random() < filtered_share

    run = _Run(buffer, batch, staleness, on_stale, num_steps, random.Random(seed), is_filtered)
    run.settings_change = settings_change
    for _ in range(20_000):
        if run.trainer_version == num_steps:
            break
        if has_failures and run.random.random() < 0.02:
            run.random.choice([run.lose_engine, run.resume])()
        getattr(run, run.random.choice(run.events()))()
    assert run.trainer_version == num_steps, run.buffer.missing()
    state = run.buffer.state()
    issued = range(state.next_number)
    filtered = [item.group for item in state.filtered]
    waiting = [ticket.number for ticket in state.pending]
    waiting += [item.ticket.number for item in state.finished]
    assert Counter([*run.trained, *filtered, *waiting]) == Counter(issued)
    assert all(is_filtered(number) for number in filtered)
    trainable = [number for number in issued if not is_filtered(number)]
    assert len(run.trained) == num_steps * batch and set(run.trained) <= set(trainable)
    if on_stale == "wait" and not settings_change:
        assert run.trained == trainable[: num_steps * batch]


def test_a_group_that_breaks_the_bound_is_never_trained() -> None:
    buffer = GroupBuffer[str](batch=1, max_staleness=1)
    (ticket, *_) = buffer.issue(0)
    buffer.add_generated(ticket, 0)
    buffer.add_scored(ticket, "group")
    with pytest.raises(RuntimeError, match="version 0"):
        buffer.take(2)
