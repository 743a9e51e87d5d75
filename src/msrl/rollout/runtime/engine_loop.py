"""Thread that runs an engine: admit, step, emit finished groups, apply weights between two steps.

All tokens of one step are sampled by the weights that were applied last, so each token has exactly
one version. If running requests are recomputed after an update, later tokens do not depend on keys
and values of old weights either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from msrl.rollout.engine import NewTokens, StepEngine
from msrl.rollout.episodes.runner import Answer, EpisodeRunner, TurnRequest
from msrl.types import (
    Completion,
    Floats,
    Ints,
    Prompt,
    RolloutGroup,
    Routes,
    SamplingParams,
    VersionRun,
    without_images,
)


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for all completions of one prompt.

    Attributes:
        key: Name that is unique among the running requests.
        prompt: The prompt.
        sampling: Sampling of the completions.
        seeds: Seed of each completion.
        greedy: Sampling of one more completion, which is the last one of the finished group.
    """

    key: str
    prompt: Prompt
    sampling: SamplingParams
    seeds: tuple[int | None, ...]
    greedy: SamplingParams | None = None

    @property
    def samples(self) -> list[tuple[SamplingParams, int | None]]:
        """Sampling and seed of each completion."""
        samples: list[tuple[SamplingParams, int | None]] = [
            (self.sampling, seed) for seed in self.seeds
        ]
        return samples if self.greedy is None else [*samples, (self.greedy, None)]


@dataclass(frozen=True, slots=True)
class LoopMessage:
    """Message to a loop. It can be sent again if its arrival is uncertain.

    Attributes:
        requests: Groups to start. A group that the loop has already is not started again.
        aborted: Keys of groups to stop.
        received: Keys of finished groups that need not be reported again.
    """

    requests: tuple[GroupRequest, ...] = ()
    aborted: tuple[str, ...] = ()
    received: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoopCounters:
    """Sums since the start of a loop."""

    generated_tokens: int = 0
    recomputed_tokens: int = 0  # of prompts and responses, after updates
    aborted_tokens: int = 0
    updates: int = 0
    busy_s: float = 0.0  # in steps
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopReport:
    """State of a loop.

    Attributes:
        version: Policy version of the engine's weights.
        finished: Finished groups by key, until a message says that they were received.
        progress: Number of tokens of each unfinished group.
        counters: Sums since the start.
    """

    version: int
    finished: Mapping[str, RolloutGroup]
    progress: Mapping[str, int]
    counters: LoopCounters


@dataclass(slots=True)
class _Sample:
    """Unfinished completion, or the unfinished turn of an episode."""

    num_prompt: int = 0
    num_earlier: int = 0  # tokens of earlier turns
    token_ids: list[Ints] = field(default_factory=list["Ints"])
    logprobs: list[Floats] = field(default_factory=list["Floats"])
    versions: list[VersionRun] = field(default_factory=list[VersionRun])
    routes: Routes | None = None  # of the finished turn
    completion: Completion | None = None

    @property
    def num_tokens(self) -> int:
        return sum(run.num_tokens for run in self.versions)

    def take_answer(self, reason: Literal["stop", "length"]) -> Answer:
        """Return the turn that is finished, and begin the next one."""
        token_ids, logprobs = np.concatenate(self.token_ids), np.concatenate(self.logprobs)
        answer = Answer(token_ids, logprobs, tuple(self.versions), reason, self.routes)
        self.num_earlier += self.num_tokens
        self.token_ids, self.logprobs, self.versions, self.routes = [], [], [], None
        return answer

    def add(self, new: NewTokens, version: int) -> None:
        """Append tokens that `version` sampled."""
        self.routes, count = new.routes, len(new.token_ids)
        if not count:
            return
        self.token_ids.append(new.token_ids)
        self.logprobs.append(new.logprobs)
        if self.versions and self.versions[-1].version == version:
            self.versions[-1] = VersionRun(version, self.versions[-1].num_tokens + count)
        else:
            self.versions.append(VersionRun(version, count))

    def finish(self, reason: Literal["stop", "length"], text: Callable[[Ints], str]) -> None:
        """Complete the sample."""
        token_ids = np.concatenate(self.token_ids)
        self.completion = Completion(
            token_ids,
            np.concatenate(self.logprobs),
            reason,
            min(run.version for run in self.versions),
            text(token_ids),
            tuple(self.versions),
            routes=self.routes,
        )


@dataclass(slots=True)
class _Group:
    """Unfinished group."""

    request: GroupRequest
    samples: list[_Sample]

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_earlier + sample.num_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True)
class _Update:
    version: int
    apply: Callable[[], None]


class EngineLoop:
    """Loop over the steps of an engine, in a thread. All other methods only exchange data with it.

    Args:
        engine: Engine that nothing else uses until the loop ends.
        version: Policy version of its weights.
        waits_for_requests: Apply weights only when no request is running, and start none before.
        recompute: Recompute the keys and values of running requests after an update.
        episodes: Turns of episodes; None if every response is one turn.
    """

    def __init__(
        self,
        engine: StepEngine,
        version: int,
        *,
        waits_for_requests: bool = False,
        recompute: bool = True,
        episodes: EpisodeRunner | None = None,
    ) -> None:
        self._engine, self._version, self._episodes = engine, version, episodes
        self._waits_for_requests, self._recompute = waits_for_requests, recompute
        self._condition = threading.Condition()
        # Shared with other threads:
        self._incoming: list[GroupRequest] = []
        self._aborted: list[str] = []
        self._update: _Update | None = None
        self._finished: dict[str, RolloutGroup] = {}
        self._keys: set[str] = set()  # of all groups that were requested and not received
        self._counters = LoopCounters()
        self._progress: Mapping[str, int] = {}
        self._error: BaseException | None = None
        self._is_closing, self._is_paused, self._is_idle = False, False, False
        # Of the thread:
        self._groups: dict[str, _Group] = {}
        self._active: set[str] = set()  # requests that the engine has
        self._on_finished: Callable[[int], object] | None = None
        if episodes is not None:
            episodes.wake = self._wake
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def exchange(self, message: LoopMessage, timeout_s: float) -> LoopReport:
        """Receive a message and report the state.

        Waits at most `timeout_s` seconds for a group to finish or an update to be applied.

        Raises:
            Exception: The engine failed.
        """
        with self._condition:
            self._receive(message)
            version = self._version
            self._condition.wait_for(
                lambda: self._finished or self._error or self._version != version, timeout_s
            )
            self._raise_error()
            finished = dict(self._finished)
            return LoopReport(self._version, finished, self._progress, self._counters)

    def _receive(self, message: LoopMessage) -> None:
        for key in (*message.received, *message.aborted):
            self._finished.pop(key, None)
            self._keys.discard(key)
        self._aborted += message.aborted
        self._incoming += [item for item in message.requests if item.key not in self._keys]
        self._keys.update(item.key for item in message.requests)
        self._condition.notify_all()

    def complete(
        self,
        requests: Sequence[GroupRequest],
        *,
        in_lockstep: bool = False,
        on_finished: Callable[[int], object] | None = None,
    ) -> dict[str, RolloutGroup]:
        """Finish these groups in this thread and return them by key; `start` is not called.

        `on_finished` is called with the number 1 after each sample.

        With `in_lockstep`, the turns of all episodes start together, in the order of the requests,
        so that no step depends on the times at which environments reply.
        """
        self._keys.update(request.key for request in requests)
        self._on_finished = on_finished
        try:
            for request in requests:
                self._admit(request)
            while self._groups:
                if in_lockstep and self._episodes is not None:
                    self._run_turns(self._episodes)
                else:
                    self._advance_or_wait()
        finally:
            for key in list(self._groups):  # after an error
                self._abort(key)
            self._keys.clear()
        finished, self._finished = self._finished, {}
        return finished

    def _advance_or_wait(self) -> None:
        with self._condition:
            self._condition.wait_for(self._has_work)
        self._advance()
        if self._active:
            self._step()

    def _run_turns(self, episodes: EpisodeRunner) -> None:
        """Wait until the environments of all episodes have replied, and run their next turns."""
        order = {
            _request_name(key, n): (position, n)
            for position, (key, group) in enumerate(self._groups.items())
            for n, sample in enumerate(group.samples)
            if sample.completion is None
        }
        ready: list[TurnRequest] = []
        num_left = len(order)
        while num_left:
            with self._condition:
                self._condition.wait_for(self._has_work)
            turns, finished = episodes.advance()
            num_left -= len(turns) + len(finished)
            ready += turns
            self._finish_all(finished)
        for turn in sorted(ready, key=lambda turn: order[turn.name]):
            self._start_turn(turn)
        while self._active:
            self._step()

    def _wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def update(self, version: int, apply: Callable[[], None]) -> None:
        """Make the thread call `apply`, which loads the weights of `version`.

        Returns immediately. An update that was not applied yet is replaced.
        """
        with self._condition:
            self._raise_error()
            self._update = _Update(version, apply)
            self._condition.notify_all()

    def pause(self) -> None:
        """Stop after the current step. Requests are kept, but their keys and values are dropped."""
        with self._condition:
            self._is_paused = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_idle or self._error)
            self._raise_error()

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._condition:
            self._is_paused = False
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread after the current step, and remove all requests from the engine."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        if self._error is None:
            for key in list(self._groups):
                self._abort(key)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._cycle()
            for key in list(self._groups):
                self._abort(key)
        except BaseException as error:
            with self._condition:
                # The next call of another thread raises it.
                self._error = error
                self._condition.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; return False if the loop ends."""
        with self._condition:
            if self._is_paused and not self._is_closing:
                self._engine.recompute_requests()
                self._is_idle = True
                self._condition.notify_all()
                self._condition.wait_for(lambda: not self._is_paused or self._is_closing)
                self._is_idle = False
            self._condition.wait_for(self._has_work)
            return not self._is_closing

    def _has_work(self) -> bool:
        changes = self._is_closing or self._is_paused or self._aborted or self._update
        has_replies = self._episodes is not None and self._episodes.has_replies
        return bool(changes or self._incoming or self._active or has_replies)

    def _cycle(self) -> None:
        """Abort, apply pending weights, admit, and run one step."""
        requests, aborted, update = self._take_changes()
        for key in aborted:
            self._abort(key)
        if update is not None:
            self._apply(update)
        for request in requests:
            self._admit(request)
        self._advance()
        if self._active:
            self._step()

    def _take_changes(self) -> tuple[list[GroupRequest], list[str], _Update | None]:
        """Return the requests to start, those to abort, and the weights to apply now."""
        with self._condition:
            aborted, self._aborted = self._aborted, []
            for key in aborted:
                self._incoming = [request for request in self._incoming if request.key != key]
            is_running = any(key not in aborted for key in self._groups)
            # New requests wait too. Otherwise requests would always be running.
            if self._update is not None and self._waits_for_requests and is_running:
                return [], aborted, None
            update, self._update = self._update, None
            requests, self._incoming = self._incoming, []
            return requests, aborted, update

    def _abort(self, key: str) -> None:
        group = self._groups.pop(key, None)
        if group is None:
            return
        names = {_request_name(key, n) for n in range(len(group.samples))}
        active = sorted(self._active & names)
        self._engine.abort_requests(active)
        self._active.difference_update(active)
        if self._episodes is not None:
            for name in names:
                self._episodes.abort(name)
        self._count(aborted_tokens=group.num_tokens)

    def _apply(self, update: _Update) -> None:
        start = time.perf_counter()
        update.apply()
        if self._recompute:
            self._engine.recompute_requests()
            self._count(recomputed_tokens=self._num_cached_tokens())
        self._count(updates=1, update_s=time.perf_counter() - start)
        with self._condition:
            self._version = update.version
            self._condition.notify_all()

    def _num_cached_tokens(self) -> int:
        """Return the number of tokens whose keys and values an update makes invalid."""
        samples = [self._sample(name) for name in self._active]
        return sum(item.num_prompt + item.num_tokens for item in samples if item.versions)

    def _sample(self, name: str) -> _Sample:
        key, _, number = name.rpartition("/")
        return self._groups[key].samples[int(number)]

    def _admit(self, request: GroupRequest) -> None:
        samples = request.samples
        self._groups[request.key] = _Group(request, [_Sample() for _ in samples])
        for n, (sampling, seed) in enumerate(samples):
            name = _request_name(request.key, n)
            if self._episodes is not None:
                self._episodes.start(name, request.prompt, sampling, seed)
            else:
                self._start_turn(TurnRequest(name, request.prompt, sampling, seed))

    def _start_turn(self, turn: TurnRequest) -> None:
        # The version is the salt: no prompt reuses keys and values of older weights.
        self._engine.add_request(
            turn.name, turn.prompt, turn.sampling, turn.seed, str(self._version)
        )
        self._sample(turn.name).num_prompt = len(turn.prompt.token_ids)
        self._active.add(turn.name)

    def _advance(self) -> None:
        """Start the turns whose environments have replied."""
        if self._episodes is None:
            return
        turns, finished = self._episodes.advance()
        self._finish_all(finished)
        for turn in turns:
            self._start_turn(turn)

    def _finish_all(self, completions: Mapping[str, Completion]) -> None:
        for name, completion in completions.items():
            if not completion.versions:
                completion = replace(completion, policy_version=self._version)
            self._sample(name).completion = completion
            self._emit(name)

    def _step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        # Count before groups are emitted: a report with a finished group has all of its tokens.
        generated = sum(len(new.token_ids) for new in outputs)
        self._count(generated_tokens=generated, busy_s=time.perf_counter() - start)
        start = time.perf_counter()
        for new in outputs:
            self._add(new)
        self._count(busy_s=time.perf_counter() - start)
        with self._condition:
            self._progress = {key: group.num_tokens for key, group in self._groups.items()}

    def _add(self, new: NewTokens) -> None:
        """Add new tokens to their sample, and end its turn after the last one."""
        sample = self._sample(new.request)
        sample.add(new, self._version)
        if new.finish_reason is None:
            return
        self._active.discard(new.request)
        if self._episodes is not None:
            self._episodes.add_answer(new.request, sample.take_answer(new.finish_reason))
        else:
            sample.finish(new.finish_reason, self._engine.text)
            self._emit(new.request)

    def _emit(self, name: str) -> None:
        """Report a finished sample, and emit its group if all of its samples are finished."""
        if self._on_finished is not None:
            self._on_finished(1)
        key = name.rpartition("/")[0]
        group = self._groups[key]
        completions = [sample.completion for sample in group.samples]
        finished = tuple(completion for completion in completions if completion is not None)
        if len(finished) == len(completions):
            del self._groups[key]
            with self._condition:
                if key in self._keys:  # not aborted meanwhile
                    prompt = without_images(group.request.prompt)  # the caller has them
                    self._finished[key] = RolloutGroup(prompt, finished)
                self._condition.notify_all()

    def _count(self, **increments: float) -> None:
        with self._condition:
            counters = self._counters
            sums = {name: getattr(counters, name) + more for name, more in increments.items()}
            self._counters = replace(counters, **sums)


def _request_name(key: str, number: int) -> str:
    return f"{key}/{number}"
