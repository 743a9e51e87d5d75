"""Advantages from teachers on servers: log p(teacher) - log p(policy) of every sampled token.

The expected policy gradient of these advantages at a position is minus the gradient of the reverse
KL divergence from the teacher there. T tokens of a sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.algorithms.rollout_arrays import RolloutArrays
from msrl.algorithms.selection import Flags
from msrl.config.sections.algo import TeacherConfig
from msrl.data.tokenizer import TextTokenizer
from msrl.rollout.teacher_server import TeacherServer
from msrl.types import Floats, Ints
from msrl.workflows.rl.distillation import taught_completions

_NUM_COMPARED = 256  # tokens of the vocabulary
_Waiting: TypeAlias = "SimpleQueue[tuple[Ints, Future[Floats]]]"  # token ids and their request


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """Log-probabilities of a teacher, [T] by the number of a sequence that it teaches."""

    weight: float
    logprobs: dict[int, Floats]


class TeacherServers:
    """Teachers on servers, which compute while the ranks do.

    `notes` are lines on their checks.
    """

    def __init__(self, servers: Sequence[TeacherServer] = (), notes: Sequence[str] = ()) -> None:
        self._servers, self.notes = tuple(servers), tuple(notes)

    def __bool__(self) -> bool:
        return bool(self._servers)

    @contextmanager
    def request(
        self,
        arrays: RolloutArrays,
        is_trained: Flags,  # [P, G]
    ) -> Iterator[Callable[[], list[TeacherAnswer]]]:
        """Request the log-probabilities of trained sequences, and provide a function that waits.

        Requests that have not begun at the end of the context are canceled.
        """
        with ExitStack() as stack:
            pending: list[tuple[TeacherServer, dict[int, Future[Floats]]]] = []
            for server in self._servers:
                selected = arrays.repeat_by_sequence(
                    taught_completions(server.section, arrays) & is_trained
                )
                numbers = np.flatnonzero(selected).tolist()
                requests = _start_requests(server, arrays.sequences, numbers)
                for request in requests.values():
                    stack.callback(request.cancel)
                pending.append((server, requests))
            yield lambda: [_answer(server.section, requests) for server, requests in pending]


def _start_requests(
    server: TeacherServer, sequences: Sequences, numbers: Iterable[int]
) -> dict[int, Future[Floats]]:
    """Start the requests of sequences in threads that do not outlive an interrupted program."""
    requests: dict[int, Future[Floats]] = {number: Future() for number in numbers}
    waiting: _Waiting = SimpleQueue()
    for number, request in requests.items():
        waiting.put((sequences.token_ids[number], request))
    for _ in range(min(server.section.concurrency, len(requests))):
        threading.Thread(target=_run_requests, args=(server, waiting), daemon=True).start()
    return requests


def _run_requests(server: TeacherServer, waiting: _Waiting) -> None:
    """Run the requests that wait, one after the other. A failure belongs to its request."""
    while True:
        try:
            token_ids, request = waiting.get_nowait()
        except Empty:
            return
        if not request.set_running_or_notify_cancel():
            continue
        try:
            request.set_result(server.logprobs(token_ids))
        except BaseException as error:  # raised where the result is read
            request.set_exception(error)


def connect(
    teachers: Sequence[TeacherConfig], tokenizer: TextTokenizer, num_tokens: int
) -> TeacherServers:
    """Check all servers and return them.

    Args:
        teachers: Teachers of the run.
        tokenizer: Tokenizer of the policy.
        num_tokens: Maximum length of a sequence.

    Raises:
        MsrlError: A server does not answer, or its model does not fit the policy.
    """
    servers: list[TeacherServer] = []
    notes: list[str] = []
    for number, section in enumerate(teachers):
        if section.url is None:
            continue
        key = f"algo.distill.teachers.{number}.url"
        server = TeacherServer(section, key).connect(num_tokens)
        servers.append(server)
        if server.compare_tokens(token_texts(tokenizer, num_tokens)):
            notes.append(f"Teacher {server.name} at {section.url} has the tokens of the policy")
        else:
            notes.append(
                f"warning: {server.setting}: returns no texts of tokens, so its tokenizer could "
                "not be compared with that of the policy"
            )
    return TeacherServers(servers, notes)


def token_texts(tokenizer: TextTokenizer, num_tokens: int) -> dict[int, str]:
    """Return texts of at most `num_tokens` tokens by id, spread over the vocabulary."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    count = min(len(ids), num_tokens, _NUM_COMPARED)
    chosen = np.linspace(0, len(ids) - 1, count).astype(int).tolist()
    decode = tokenizer.backend.decode
    return {ids[i]: decode([ids[i]], skip_special_tokens=False) for i in chosen}


def teacher_advantages(
    policy: Sequence[Floats],  # [T] each
    answers: Sequence[TeacherAnswer],
) -> tuple[Floats, ...]:  # [T] each
    """Return the weighted sum of log p(teacher) - log p(policy) over the teachers of a sequence.

    It is 0 for a sequence without a teacher.
    """
    rows = [np.zeros(len(logprobs), np.float32) for logprobs in policy]
    for answer in answers:
        for number, logprobs in answer.logprobs.items():
            rows[number] += answer.weight * (logprobs - policy[number])
    return tuple(rows)


def _answer(section: TeacherConfig, requests: dict[int, Future[Floats]]) -> TeacherAnswer:
    """Wait for all requests to a server, or until one fails."""
    wait(requests.values(), return_when=FIRST_EXCEPTION)
    for request in requests.values():
        if request.done() and (error := request.exception()) is not None:
            raise error
    return TeacherAnswer(section.weight, {n: request.result() for n, request in requests.items()})
