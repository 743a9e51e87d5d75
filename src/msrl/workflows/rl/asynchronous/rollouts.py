"""Rollouts of an asynchronous run: generation and scoring in threads alongside the training.

The generation thread starts groups as the buffer allows, exchanges messages with the engines and
passes finished groups to the scoring thread. The thread of the training takes batches.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from msrl.cluster.waiting import WorkerError
from msrl.config.sections.rollout import FilterConfig
from msrl.errors import MsrlError, ProcessFailedError
from msrl.plan.derived import needs_greedy, updates_per_step
from msrl.rewards.score import Scorer, Scores
from msrl.rollout.engine import sample_seeds
from msrl.rollout.runtime.buffer import (
    BufferState,
    FinishedGroup,
    GroupBuffer,
    Ticket,
    outdated_tickets,
)
from msrl.rollout.runtime.engine_loop import GroupRequest
from msrl.types import Prompt, RolloutGroup, SamplingParams, ScoredGroup
from msrl.workflows.rl.asynchronous.dispatcher import Dispatcher
from msrl.workflows.rl.asynchronous.engines import NO_WEIGHTS, LoopingEngines
from msrl.workflows.rl.asynchronous.prompts import NumberedPrompts
from msrl.workflows.rl.asynchronous.records import decode, encode
from msrl.workflows.rl.asynchronous.statistics import StepStatistics
from msrl.workflows.rl.curriculum import open_curriculum
from msrl.workflows.rl.rollouts import (
    StepRollouts,
    filter_metrics,
    greedy_sampling,
    missing_note,
    select_informative,
    with_greedy,
)
from msrl.workflows.rl.setup import GenerationSetup
from msrl.workflows.rl.step import Clock

_END_S = 10.0  # longest wait for a thread at the end; a reward may take longer
_ANSWER_S = 5.0  # an exchange with the engines takes less, unless one of them hangs or is restarted
_NO_SCORES = Scores((), {}, ())


class AsyncRollouts:
    """Generator of the scored groups of each step.

    Its state has the finished groups and the numbers of unfinished ones.
    """

    def __init__(
        self,
        job: GenerationSetup,
        engines: LoopingEngines,
        scorer: Scorer,
        publish: Callable[[int], None],
        state: Mapping[str, Any],
    ) -> None:
        """Start from `state()` of the checkpoint to resume from, or from an empty state.

        `publish` sends the trainer's weights to all engines as those of a version.
        """
        self._job, self._engines, self._scorer, self._publish = job, engines, scorer, publish
        self._options = job.config.rollout.asynchronous
        batch = job.config.rollout.prompts_per_step
        self._greedy = greedy_sampling(job.sampling) if needs_greedy(job.config) else None
        self._batch = batch
        position = int(state.get("prompts_taken", job.start_step * batch))
        self._curriculum = open_curriculum(job, position, state)
        prompts = self._curriculum or job.prompts
        self._prompts = NumberedPrompts(prompts, batch, job.sampling, self._greedy)
        self._filter = job.config.rollout.filter
        self._max_replaced = _max_replaced(self._filter, batch, len(job.prompts.rows))
        self._notes: tuple[str, ...] = ()  # for the first step
        initial = self._initial_state(state)
        if self._curriculum is not None:
            self._choose_prompts(job.start_step)
        self._buffer = GroupBuffer[ScoredGroup](
            batch,
            self._options.max_staleness,
            on_stale=self._options.on_stale,
            max_running=self._options.max_running_groups,
            num_groups=job.num_steps * batch,
            state=initial,
        )
        self._dispatcher = Dispatcher(engines, job.start_step)
        self._condition = threading.Condition()
        self._tickets: dict[str, Ticket] = {}  # by the key of the request
        self._num_tokens = {  # of generated groups in the buffer, by their number
            item.ticket.number: item.group.rollout.num_tokens for item in initial.finished
        }
        self._aborted: list[str] = []
        self._to_score: list[tuple[Ticket, RolloutGroup]] = []  # with greedy completions
        self._direct: list[GroupRequest] = []  # to send
        self._direct_requests: dict[str, GroupRequest] = {}  # unfinished
        self._direct_results: dict[str, RolloutGroup] = {}
        self._direct_numbers = itertools.count()
        self._transfer = threading.Lock()  # while engines are restarted or called by the trainer
        self._loss: WorkerError | None = None  # in a call of the trainer
        self._num_restarts = 0
        self._exchange_began = time.monotonic()
        self._needs_weights = False  # since engines were restarted
        self._scores = _NO_SCORES  # failures and calls since the last step
        self._error: BaseException | None = None
        self._is_closing = False
        self._statistics = StepStatistics(engines.size, updates_per_step(job.config))
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (("generation", self._generate), ("scoring", self._score))
        ]

    def __enter__(self) -> AsyncRollouts:
        """Start the engines' loops and the threads."""
        self._engines.start(self._job.start_step, self._options)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(_END_S)
        # An engine that is lost now is not needed, or is restarted if the run is repeated.
        ignored = (ProcessFailedError,) if error is None else (ProcessFailedError, MsrlError)
        is_used_again = error is None or isinstance(error, ProcessFailedError)
        with (
            suppress(*ignored),
            self._transfer if is_used_again else nullcontext(),  # until a restart is complete
        ):
            self._engines.stop()

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        with self._condition:
            state = self._buffer.state()
            curriculum = {} if self._curriculum is None else self._curriculum.state()
        return {"prompts_taken": state.next_number, "rollouts": encode(state), **curriculum}

    # Called by the thread of the training

    def take(self, step: int, clock: Clock) -> StepRollouts:
        """Wait for the batch of a step, counted from 0.

        Raises:
            MsrlError: The batch is not complete after `cluster.rpc_timeout_s`, or a reward source
                returned no score.
        """
        with clock("wait"):
            finished, depth = self._wait_for_batch(step)
        groups = tuple(item.group for item in finished)
        with self._condition:
            scores, self._scores = self._scores, _NO_SCORES
            replaced = tuple(item.group for item in self._buffer.take_filtered())
            counters = self._dispatcher.counters
            wait_s = clock.seconds["wait"]
            statistics = self._statistics.step(step, groups, counters, wait_s, depth)
            curriculum = self._measure(step, (*groups, *replaced))
        scores.require_scores(f"step {step + 1}")
        notes, self._notes = [*self._notes, *scores.notes], ()
        num_informative = int(select_informative(self._filter, groups).sum())
        num_missing, num_replaced = len(groups) - num_informative, len(replaced)
        if num_missing and self._filter.refill:
            repeats = f"{num_replaced} groups were replaced"
            notes.append(missing_note(num_informative, len(groups), repeats))
        num_groups = len(groups) + num_replaced
        metrics = {
            **statistics,
            **filter_metrics(self._filter, num_groups, num_informative, num_missing),
            **curriculum,
        }
        scores = replace(scores, groups=(*groups, *replaced), notes=tuple(notes))
        return StepRollouts(scores, groups, replaced, metrics)

    def _measure(self, step: int, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Measure the groups of a step, and choose prompts; return metrics of the curriculum.

        Prompts are chosen before the first version that may start them is published, so that delays
        do not change them. Only the replacements of a filter may need them earlier.
        """
        if self._curriculum is None:
            return {}
        first_open = self._buffer.first_number
        metrics = self._curriculum.measure(groups, first_open - first_open % self._batch)
        self._choose_prompts(step + 1)
        return metrics

    def _choose_prompts(self, version: int) -> None:
        """Choose the prompts that engines may start with a policy version."""
        self._prompts.find((version + self._options.max_staleness) * self._batch)

    def publish(self, version: int) -> None:
        """Send the weights of the trainer to the engines. They load them between two steps."""

        def send() -> None:
            self._publish(version)
            with self._condition:
                self._needs_weights = False

        self._call_engines(send)

    def pause(self) -> None:
        """Stop generation after the current step of each engine."""
        self._call_engines(self._engines.pause)

    def resume(self) -> None:
        """Continue generation."""
        self._call_engines(self._engines.resume)

    def _call_engines(self, call: Callable[[], None]) -> None:
        """Call the engines, and again after those that are lost in it have been restarted.

        The thread of the generation restarts them, since it knows their prompts.

        Raises:
            WorkerError: They cannot be restarted, or a training rank was lost.
        """
        while True:
            with self._transfer:
                num_restarts = self._num_restarts
                try:
                    return call()
                except WorkerError as error:
                    with self._condition:
                        self._loss = error
            with self._condition:
                while self._num_restarts == num_restarts:
                    self._raise_error()
                    self._condition.wait()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """Return groups that `policy_version` samples alongside the rollouts.

        They do not count as rollouts. The trainer must not publish another version until this call
        returns.
        """
        count, seeds = sampling.num_samples, sample_seeds(prompts, sampling, policy_version)
        with self._condition:
            self._wait_until(
                lambda: self._dispatcher.version >= policy_version, policy_version, _unanswered
            )
            requests = dict[str, GroupRequest]()
            for n, prompt in enumerate(prompts):
                key = f"direct {next(self._direct_numbers)}"
                own_seeds = tuple(seeds[n * count : (n + 1) * count])
                requests[key] = GroupRequest(key, prompt, sampling, own_seeds)
            self._direct += requests.values()
            self._direct_requests |= requests
            self._wait_until(
                lambda: self._direct_results.keys() >= requests.keys(), policy_version, _unanswered
            )
            return tuple(self._direct_results.pop(key) for key in requests)

    def onload(self) -> None:
        """Do nothing: the engines always hold their memory."""

    def forget_prompts(self) -> None:
        """Do nothing: each update clears the engines' caches, and versions have separate ones."""

    def _wait_until(
        self, is_done: Callable[[], bool], version: int, problem: Callable[[], str]
    ) -> None:
        """Wait until `is_done`, at most `cluster.rpc_timeout_s`. The caller holds the lock.

        Restarted engines and replaced groups take time too, so that the limit begins again.

        Raises:
            MsrlError: It took too long; `problem` describes it.
        """
        limit_s = self._job.config.cluster.rpc_timeout_s
        end, repeated = time.monotonic() + limit_s, (0, self._num_restarts)
        while True:
            self._raise_error()
            if repeated != (now := (self._buffer.num_filtered, self._num_restarts)):
                end, repeated = time.monotonic() + limit_s, now
            self._replace_weights(version)
            if is_done():
                return
            if time.monotonic() > end and self._engines_answer():
                raise MsrlError(f"cluster.rpc_timeout_s={limit_s:g}: {problem()}")
            self._condition.wait(min(1.0, limit_s))

    def _replace_weights(self, version: int) -> None:
        """Send the trainer's weights again after engines were restarted.

        The caller holds the lock, which is released during the wait.
        """
        if not self._needs_weights:
            return
        self._condition.release()
        try:
            self.publish(version)
        finally:
            self._condition.acquire()

    def _wait_for_batch(self, step: int) -> tuple[tuple[FinishedGroup[ScoredGroup], ...], int]:
        """Return the batch of a step, and the number of finished groups that remain."""
        batch = tuple[FinishedGroup[ScoredGroup], ...]()

        def take() -> bool:
            nonlocal batch
            self._drop_stale(step)
            batch = self._buffer.take(step) or ()
            return bool(batch)

        with self._condition:
            self._wait_until(take, step, lambda: self._missing_groups(step))
            for item in batch:
                self._num_tokens.pop(item.ticket.number, None)
            self._condition.notify_all()
            return batch, self._buffer.count("finished")

    def _engines_answer(self) -> bool:
        """Return False while an exchange or a restart takes long, which has its own limit."""
        return time.monotonic() - self._exchange_began < _ANSWER_S

    def _drop_stale(self, step: int) -> None:
        for ticket in self._buffer.drop_stale(step):
            key = _key(ticket)
            count = self._num_tokens.pop(ticket.number, self._dispatcher.num_tokens(key))
            self._statistics.repeated.update(
                dropped_groups=1, dropped_tokens=count, reissued_groups=1, reissued_tokens=count
            )
            self._aborted.append(key)
            self._tickets.pop(key, None)

    def _missing_groups(self, step: int) -> str:
        """Return a message that names the missing prompts and who holds them."""
        missing = self._buffer.missing()
        lines = [
            f"prompt {self._prompts.find(ticket.number).index}: {self._describe(ticket, stage)}"
            for ticket, stage in list(missing.items())[:8]
        ]
        return (
            f"the batch of step {step + 1} is not complete: {len(missing)} groups are missing. "
            + "; ".join(lines)
        )

    def _describe(self, ticket: Ticket, stage: str) -> str:
        if stage == "running":
            return self._dispatcher.describe(_key(ticket))
        if stage == "scoring":
            return "the reward sources have not scored it"
        return "waits for its start"

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # Threads

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread and pass its exception to the thread of the training."""
        try:
            work()
        except BaseException as error:
            with self._condition:
                self._error = self._error or error
                self._condition.notify_all()

    def _generate(self) -> None:
        while True:
            with self._condition:
                if self._is_closing or self._error is not None:
                    return
                self._exchange_began = time.monotonic()
                loss = self._loss
                requests, aborted = ([], []) if loss is not None else self._next_requests()
            if loss is not None:
                self._restart_engines(loss)
                continue
            try:
                finished = self._dispatcher.exchange(requests, aborted)
            except WorkerError as error:
                self._restart_engines(error)
                continue
            with self._condition:
                for key, group in finished.items():
                    self._receive(key, group)
                self._condition.notify_all()

    def _restart_engines(self, error: WorkerError) -> None:
        """Restart lost engines, and issue their groups again."""
        with self._transfer:
            if self._is_closing:
                return
            lost = self._engines.restart(error)
            with self._condition:
                for engine in lost:
                    for key, count in self._dispatcher.lose(engine).items():
                        self._issue_again(key, count)
                self._loss, self._needs_weights = None, True
                self._num_restarts += 1
                self._condition.notify_all()

    def _issue_again(self, key: str, num_tokens: int) -> None:
        if key in self._direct_requests:
            self._direct.append(self._direct_requests[key])
        ticket = self._tickets.pop(key, None)
        if ticket is not None and self._buffer.requeue([ticket]):
            self._statistics.repeated.update(reissued_groups=1, reissued_tokens=num_tokens)

    def _next_requests(self) -> tuple[list[GroupRequest], list[str]]:
        """Return the requests to send and the keys to abort."""
        aborted, self._aborted = self._aborted, []
        if self._dispatcher.version == NO_WEIGHTS:
            return [], aborted  # all engines were restarted
        requests, self._direct = self._direct, []
        for ticket in self._buffer.issue(self._dispatcher.version):
            self._tickets[_key(ticket)] = ticket
            requests.append(self._prompts.request(ticket.number, _key(ticket)))
        return requests, aborted

    def _receive(self, key: str, group: RolloutGroup) -> None:
        request = self._direct_requests.pop(key, None)
        if request is not None:
            self._direct_results[key] = replace(group, prompt=request.prompt)
            return
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            group = replace(group, prompt=self._prompts.find(ticket.number))  # with its images
        sampled = group.completions[: self._job.sampling.num_samples]
        oldest = min(completion.policy_version for completion in sampled)
        if ticket is not None and self._buffer.add_generated(ticket, oldest):
            self._num_tokens[ticket.number] = group.num_tokens
            self._to_score.append((ticket, group))

    def _score(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._to_score or self._is_closing)
                if self._is_closing:
                    return
                waiting, self._to_score = self._to_score, []
            scores = self._score_groups([group for _, group in waiting])
            with self._condition:
                self._scores = self._scores.plus(replace(scores, groups=()))
                for (ticket, _), group in zip(waiting, scores.groups, strict=True):
                    self._add_scored(ticket, group)
                self._condition.notify_all()

    def _score_groups(self, groups: Sequence[RolloutGroup]) -> Scores:
        """Return the scores of groups, of which the greedy completion is the last one, if any."""
        count = self._job.sampling.num_samples
        sampled = [replace(group, completions=group.completions[:count]) for group in groups]
        greedy = [replace(group, completions=group.completions[count:]) for group in groups]
        scores = self._scorer.score(sampled)
        if not greedy[0].completions:
            return scores
        return with_greedy(scores, self._scorer.score(greedy))

    def _add_scored(self, ticket: Ticket, group: ScoredGroup) -> None:
        """Add a group to the buffer, or replace it by another one. The caller holds the lock."""
        is_last = self._buffer.num_filtered >= self._max_replaced
        if is_last or select_informative(self._filter, [group])[0]:
            self._buffer.add_scored(ticket, group)
            return
        if self._buffer.filter_out(ticket, group):
            self._num_tokens.pop(ticket.number, None)
        if self._buffer.num_filtered >= self._job.config.rollout.prompts_per_step:
            # Before a source without scores makes the run sample more and more prompts.
            self._scores.require_scores("the replacement of filtered groups")

    def _initial_state(self, state: Mapping[str, Any]) -> BufferState[ScoredGroup]:
        batch, start_step = self._job.config.rollout.prompts_per_step, self._job.start_step
        if "rollouts" in state:
            return self._usable(decode(state["rollouts"], self._prompts.find))
        first = int(state.get("prompts_taken", start_step * batch))
        return BufferState(next_number=first, taken=start_step * batch)

    def _usable(self, state: BufferState[ScoredGroup]) -> BufferState[ScoredGroup]:
        """Return the state without groups that do not fit the settings, which have changed since.

        Their prompts are sampled again, except those that a filter has replaced.
        """
        batch, options = self._job.config.rollout.prompts_per_step, self._options
        misfits = [item.ticket for item in state.finished if not self._fits(item.group)]
        filtered = tuple(item for item in state.filtered if self._fits(item.group))
        fitting = replace(state.without_groups(misfits), filtered=filtered)
        late = outdated_tickets(fitting, batch, options.max_staleness, options.on_stale)
        count = len(misfits) + len(late)
        if count:
            self._notes = (
                f"{count} finished groups of the checkpoint do not fit rollout.async, "
                "rollout.samples_per_prompt or algo.advantage.estimator, which have changed; their "
                "prompts are sampled again",
            )
        return fitting.without_groups(late)

    def _fits(self, group: ScoredGroup) -> bool:
        """Return True if a group has the completions that a new one would have."""
        has_greedy = group.greedy is not None
        is_complete = len(group.rewards) == self._job.sampling.num_samples
        return is_complete and (has_greedy or self._greedy is None)


def _unanswered() -> str:
    """Return the message of an evaluation that took too long."""
    return (
        "the engines did not answer the prompts of an evaluation in time. Raise it, or lower "
        "eval.max_response_tokens."
    )


def _max_replaced(section: FilterConfig, batch: int, num_prompts: int) -> int:
    """Return how many groups of a step the filter may replace.

    A synchronous step refills `max_refills` times, with at most one batch each. A step of an
    asynchronous run therefore replaces at most `max_refills` times as many groups as a batch has.
    Without that limit, it replaces as many as there are prompts beside the batch.
    """
    if not section.refill:
        return 0
    if section.max_refills is None:
        return max(num_prompts - batch, 0)
    return section.max_refills * batch


def _key(ticket: Ticket) -> str:
    return f"{ticket.number} {ticket.attempt}"
