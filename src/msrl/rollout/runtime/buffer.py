"""Ordered buffer of the groups between generation and training.

A group is identified by its number, its position in the order of prompts. B groups per step, policy
version v (the number of updates of the policy), staleness bound S.

With `on_stale: wait`, a batch has the B lowest numbers, and the trainer waits for them. Since at
most (S + v + 1) B groups have been started at version v, no group of a batch has a token of a
version below v - S. A group that is filtered out gives its place to one with a higher number, so it
only moves later groups to earlier batches.

With `on_stale: drop`, a batch has any B finished groups. A group that became too old is dropped and
its prompt issued again, once. A group that was issued again is not dropped: the trainer waits for
it. Its deadline is the version that started it plus S. A batch is formed only if the groups with
deadlines that remain fit into the batches up to their deadlines, which is always possible because
at most (S + 1) B groups exist at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from msrl.config.sections.rollout import OnStale
from msrl.rollout.runtime.admission import admission

Group = TypeVar("Group")
Stage = Literal["pending", "running", "scoring", "finished"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Right to generate a group. The second attempt replaces a dropped group."""

    number: int
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class FinishedGroup(Generic[Group]):
    """Group that can be trained on, with the oldest version that sampled any of its tokens."""

    ticket: Ticket
    oldest_version: int
    group: Group


@dataclass(frozen=True, slots=True)
class BufferState(Generic[Group]):
    """Content of a buffer in a checkpoint.

    Attributes:
        next_number: First number that was never issued.
        taken: Number of groups that were taken for training.
        pending: Groups that must be generated again after a resume.
        finished: Groups that are ready for training.
        filtered: Groups that were filtered out since the last batch.
    """

    next_number: int
    taken: int
    pending: tuple[Ticket, ...] = ()
    finished: tuple[FinishedGroup[Group], ...] = ()
    filtered: tuple[FinishedGroup[Group], ...] = ()

    def without_groups(self, tickets: Collection[Ticket]) -> BufferState[Group]:
        """Return the state in which these finished groups are pending."""
        pending = sorted([*self.pending, *tickets], key=lambda ticket: ticket.number)
        finished = tuple(item for item in self.finished if item.ticket not in tickets)
        return replace(self, pending=tuple(pending), finished=finished)


def outdated_tickets(
    state: BufferState[Any], batch: int, max_staleness: int, on_stale: OnStale
) -> list[Ticket]:
    """Return the finished groups of a checkpoint that would exceed the staleness bound.

    There are none with the bound and the treatment of stale groups of the run that saved them.
    """
    version = state.taken // batch
    ranks = _ranks(state) if on_stale == "wait" else _second_ranks(state, batch, max_staleness)
    return [
        item.ticket
        for item in state.finished
        if item.ticket in ranks
        and item.oldest_version + max_staleness < version + ranks[item.ticket] // batch
    ]


def _ranks(state: BufferState[Any]) -> dict[Ticket, int]:
    """Return the positions of all groups in the order in which they are trained."""
    tickets = [*state.pending, *(item.ticket for item in state.finished)]
    ordered = sorted(tickets, key=lambda ticket: ticket.number)
    return {ticket: rank for rank, ticket in enumerate(ordered)}


def _second_ranks(state: BufferState[Any], batch: int, max_staleness: int) -> dict[Ticket, int]:
    """Return the positions of the second attempts, which are not dropped, by their deadlines.

    A group that misses its deadline leaves its position to the next one.
    """
    version, rank, ranks = state.taken // batch, 0, dict[Ticket, int]()
    for item in sorted(state.finished, key=lambda item: item.oldest_version):
        if item.ticket.attempt > 1:
            ranks[item.ticket] = rank
            rank += item.oldest_version + max_staleness >= version + rank // batch
    return ranks


@dataclass(slots=True)
class _Slot:
    """Position of a group in the buffer; `version` is a lower bound for all its tokens."""

    ticket: Ticket
    stage: Stage
    version: int
    group: Any = None

    @property
    def is_kept(self) -> bool:
        """True if the group may not be dropped."""
        return self.ticket.attempt > 1


class GroupBuffer(Generic[Group]):
    """Groups from their start to their training. Not safe for use by several threads."""

    def __init__(
        self,
        batch: int,
        max_staleness: int,
        *,
        on_stale: OnStale = "wait",
        max_running: int | None = None,
        num_groups: int | None = None,
        state: BufferState[Group] | None = None,
    ) -> None:
        """Start empty or from the state of a checkpoint.

        Args:
            batch: Number of groups per step.
            max_staleness: Staleness bound.
            on_stale: Treatment of groups that became too old.
            max_running: Largest number of groups that generate at the same time. Default: no limit
                but the staleness bound.
            num_groups: Number of groups of the whole run. Default: no limit.
            state: State of a checkpoint.
        """
        self._batch, self._staleness, self._on_stale = batch, max_staleness, on_stale
        self._max_running = max_running or (max_staleness + 1) * batch
        self._num_groups = num_groups
        state = state or BufferState(0, 0)
        self._next_number, self._taken = state.next_number, state.taken
        self._slots: dict[int, _Slot] = {}
        for ticket in state.pending:
            self._slots[ticket.number] = _Slot(ticket, "pending", 0)
        for item in state.finished:
            slot = _Slot(item.ticket, "finished", item.oldest_version, item.group)
            self._slots[item.ticket.number] = slot
        self._filtered = list(state.filtered)

    def state(self) -> BufferState[Group]:
        """Return the state for a checkpoint. Groups that are not finished are pending in it."""
        finished = self._in_stage("finished")
        pending = [slot.ticket for slot in self._ordered_slots() if slot.stage != "finished"]
        groups = [FinishedGroup(slot.ticket, slot.version, slot.group) for slot in finished]
        return BufferState(
            self._next_number, self._taken, tuple(pending), tuple(groups), tuple(self._filtered)
        )

    @property
    def first_number(self) -> int:
        """Lowest number of a group in the buffer, or else of the next group."""
        return min(self._slots, default=self._next_number)

    def count(self, stage: Stage) -> int:
        """Return the number of groups in a stage."""
        return sum(slot.stage == stage for slot in self._slots.values())

    def issue(self, version: int) -> list[Ticket]:
        """Return the groups to start now, lowest numbers first.

        Args:
            version: Policy version of the engines, which samples the first token of these groups.
        """
        running = self.count("running")
        # Groups that were filtered out do not count, so that others start in their places.
        accepted = self._taken + self.count("scoring") + self.count("finished")
        count = admission(
            self._max_running, running, self._staleness, version, self._batch, accepted
        )
        tickets = [slot.ticket for slot in self._in_stage("pending")[:count]]
        while len(tickets) < count and not self._is_exhausted:
            ticket = Ticket(self._next_number)
            self._slots[ticket.number] = _Slot(ticket, "pending", version)
            tickets.append(ticket)
            self._next_number += 1
        for ticket in tickets:
            self._slots[ticket.number] = _Slot(ticket, "running", version)
        return tickets

    def is_current(self, ticket: Ticket) -> bool:
        """Return False if the group was dropped or taken."""
        slot = self._slots.get(ticket.number)
        return slot is not None and slot.ticket == ticket

    def add_generated(self, ticket: Ticket, oldest_version: int) -> bool:
        """Record that a group is generated and waits for its scores.

        Returns:
            False if the group was dropped in the meantime.
        """
        if not self.is_current(ticket):
            return False
        slot = self._slots[ticket.number]
        slot.stage, slot.version = "scoring", oldest_version
        return True

    def add_scored(self, ticket: Ticket, group: Group) -> bool:
        """Add the scored group; return False if it was dropped in the meantime."""
        if not self.is_current(ticket):
            return False
        slot = self._slots[ticket.number]
        slot.stage, slot.group = "finished", group
        return True

    def filter_out(self, ticket: Ticket, group: Group) -> bool:
        """Remove a scored group that is not trained on; another one may start in its place.

        Returns:
            False if the group was dropped in the meantime.
        """
        if not self.is_current(ticket):
            return False
        slot = self._slots.pop(ticket.number)
        self._filtered.append(FinishedGroup(ticket, slot.version, group))
        return True

    @property
    def num_filtered(self) -> int:
        """Number of groups that were filtered out since the last call of `take_filtered`."""
        return len(self._filtered)

    def take_filtered(self) -> tuple[FinishedGroup[Group], ...]:
        """Return the groups that were filtered out since the last call, in the order of prompts."""
        filtered = sorted(self._filtered, key=lambda item: item.ticket.number)
        self._filtered = []
        return tuple(filtered)

    def requeue(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Issue running groups again, as after the loss of an engine; return those affected."""
        lost = [
            ticket
            for ticket in tickets
            if self.is_current(ticket) and self._slots[ticket.number].stage == "running"
        ]
        for ticket in lost:
            self._slots[ticket.number].stage = "pending"
        return lost

    def drop_stale(self, version: int) -> list[Ticket]:
        """Drop groups that are too old for a batch of `version` and issue their prompts again.

        With `on_stale: wait` there are none.

        Returns:
            The dropped groups, of which the caller stops those that are running.
        """
        if self._on_stale == "wait":
            return []
        dropped: list[Ticket] = []
        for slot in self._ordered_slots():
            is_stale = slot.version < version - self._staleness and slot.stage != "pending"
            if is_stale and not slot.is_kept:
                dropped.append(slot.ticket)
                again = Ticket(slot.ticket.number, slot.ticket.attempt + 1)
                self._slots[again.number] = _Slot(again, "pending", version)
        return dropped

    def take(self, version: int) -> tuple[FinishedGroup[Group], ...] | None:
        """Return the batch of the step that trains version `version`, in the order of prompts.

        Call `drop_stale` before.

        Returns:
            None if groups that belong to it are not finished.
        """
        slots = self._oldest() if self._on_stale == "wait" else self._finished_first(version)
        if slots is None:
            return None
        slots = sorted(slots, key=_number)
        for slot in slots:
            if version - slot.version > self._staleness:
                raise RuntimeError(
                    f"group {slot.ticket.number} has tokens of version {slot.version}, but version "
                    f"{version} may train on groups of version {version - self._staleness} or later"
                )
            del self._slots[slot.ticket.number]
        self._taken += len(slots)
        return tuple(FinishedGroup(slot.ticket, slot.version, slot.group) for slot in slots)

    def missing(self) -> Mapping[Ticket, Stage]:
        """Return the unfinished groups among those that the next batch waits for."""
        slots = self._ordered_slots()
        if self._on_stale == "wait":
            slots = slots[: self._batch]
        return {slot.ticket: slot.stage for slot in slots if slot.stage != "finished"}

    @property
    def _is_exhausted(self) -> bool:
        issued = self._taken + len(self._slots)
        return self._num_groups is not None and issued >= self._num_groups

    def _ordered_slots(self) -> list[_Slot]:
        return sorted(self._slots.values(), key=_number)

    def _in_stage(self, stage: Stage) -> list[_Slot]:
        return [slot for slot in self._ordered_slots() if slot.stage == stage]

    def _oldest(self) -> list[_Slot] | None:
        """Return the groups with the lowest numbers if they are all finished."""
        slots = self._ordered_slots()[: self._batch]
        is_ready = len(slots) == self._batch and all(slot.stage == "finished" for slot in slots)
        return slots if is_ready else None

    def _finished_first(self, version: int) -> list[_Slot] | None:
        """Return finished groups, oldest first, if the deadlines of all others can be met.

        If they cannot, groups with deadlines go first.
        """
        finished = self._in_stage("finished")
        if len(finished) < self._batch:
            return None
        finished.sort(key=lambda slot: slot.version)
        for slots in (finished, sorted(finished, key=lambda slot: not slot.is_kept)):
            chosen = slots[: self._batch]
            if self._meets_deadlines(version, {slot.ticket.number for slot in chosen}):
                return chosen
        return None

    def _meets_deadlines(self, version: int, taken: set[int]) -> bool:
        """Return True if the groups with deadlines fit into the batches after batch `version`."""
        deadlines = sorted(self._deadlines(exclude=taken))
        return all(
            rank <= (deadline - version) * self._batch
            for rank, deadline in enumerate(deadlines, start=1)
        )

    def _deadlines(self, *, exclude: set[int]) -> Iterator[int]:
        """Yield the last versions that may train on the groups that are not dropped."""
        for number, slot in self._slots.items():
            if slot.is_kept and slot.stage != "pending" and number not in exclude:
                yield slot.version + self._staleness


def _number(slot: _Slot) -> int:
    return slot.ticket.number
