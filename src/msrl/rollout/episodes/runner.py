"""Episodes of an engine: turns are requested, answers go to environments, replies become prompts.

All methods are called by the thread that runs the engine. Environments run in other processes, so
an episode that waits for one does not delay the others.
"""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from msrl.environments.base import EpisodeFault, Opening, StepResult
from msrl.environments.pool import ENVIRONMENT_COLUMN, select_environment
from msrl.errors import MsrlError
from msrl.processes.child import MAX_REPEATS
from msrl.rollout.engine import sample_seed
from msrl.rollout.episodes.messages import digest, readable_messages, shorten_message
from msrl.rollout.episodes.settings import EpisodeSettings, environment_sources
from msrl.rollout.episodes.template import EpisodeTemplate
from msrl.rollout.episodes.tokens import EpisodeTokens
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    FinishReason,
    Floats,
    Ints,
    JsonObject,
    Message,
    Prompt,
    Routes,
    SamplingParams,
    VersionRun,
)

_SEED_BITS = 62
Reply = Opening | StepResult | EpisodeFault


class Environments(Protocol):
    """Environments of episodes, as `msrl.environments.pool.EnvironmentPool` runs them."""

    def open(self, episode_id: str, row: dict[str, Any]) -> Future[Opening | EpisodeFault]: ...

    def step(
        self, episode_id: str, answer: str, *, is_truncated: bool = False
    ) -> Future[StepResult | EpisodeFault]: ...

    def close(self, episode_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request for the next answer of an episode."""

    name: str
    prompt: Prompt
    sampling: SamplingParams
    seed: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the policy, with the versions that sampled it as run lengths.

    `routes` cover the turn's prompt and the answer without its last token.
    """

    token_ids: Ints  # [R]
    logprobs: Floats  # [R]
    versions: tuple[VersionRun, ...]
    finish_reason: Literal["stop", "length"]
    routes: Routes | None = None  # [T - 1, L, k]


@dataclass(slots=True)
class _Running:
    """Unfinished episode."""

    name: str
    row: Prompt
    sampling: SamplingParams
    seed: int | None
    tokens: EpisodeTokens
    since: float  # time at which the present wait began
    started: float
    transcript: list[Message] = field(default_factory=list[Message])
    history: list[Message] = field(default_factory=list[Message])  # as the template shows it
    has_opening: bool = False
    tools: Sequence[JsonObject] = ()
    limit: int = 0  # number of tokens of opening and responses
    state: str = ""
    turns: list[EpisodeTurn] = field(default_factory=list[EpisodeTurn])
    texts: list[str] = field(default_factory=list[str])
    num_shortened: int = 0
    success: bool | None = None
    last_token: int | None = None
    environment: str = ""  # name in the mixture
    num_repeats: int = 0  # after a loss of its environment

    def waited_s(self) -> float:
        """Return the seconds of the wait that ends now."""
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        return seconds


class EpisodeRunner:
    """Unfinished episodes of an engine.

    Args:
        environments: Environments of the episodes.
        settings: Limits of episodes.
        template: Chat template of the prompts.
        max_model_len: Largest number of tokens of a sequence.
        text: Function that decodes sampled tokens without control tokens.
    """

    def __init__(
        self,
        environments: Environments,
        settings: EpisodeSettings,
        template: EpisodeTemplate,
        max_model_len: int,
        text: Callable[[Ints], str],
    ) -> None:
        self._environments, self._settings, self._template = environments, settings, template
        self._section = settings.environment
        self._max_model_len, self._text = max_model_len, text
        # Called in another thread when an environment has replied.
        self.wake: Callable[[], None] = lambda: None
        self._special = {
            number
            for number, token in template.tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._running: dict[str, _Running] = {}
        self._replies: queue.SimpleQueue[tuple[str, Reply]] = queue.SimpleQueue()

    @property
    def has_replies(self) -> bool:
        """True if `advance` has something to do."""
        return not self._replies.empty()

    def start(self, name: str, prompt: Prompt, sampling: SamplingParams, seed: int | None) -> None:
        """Start an episode, whose environment is opened first."""
        now = time.perf_counter()
        tokens = EpisodeTokens(prompt.token_ids)
        self._running[name] = _Running(name, prompt, sampling, seed, tokens, now, now)
        row = environment_row(prompt, sampling.seed, keeps_name=bool(self._section.mixture))
        if self._section.mixture:
            selected = select_environment(environment_sources(self._section), row)
            self._running[name].environment = selected
        self._await(name, self._environments.open(name, row))

    def _repeat(self, episode: _Running) -> None:
        """Start an episode again from its beginning, with the same seeds."""
        self._environments.close(episode.name)
        self.start(episode.name, episode.row, episode.sampling, episode.seed)
        self._running[episode.name].num_repeats = episode.num_repeats + 1

    def abort(self, name: str) -> None:
        """End an episode without a completion."""
        if self._running.pop(name, None) is not None:
            self._environments.close(name)

    def advance(self) -> tuple[list[TurnRequest], dict[str, Completion]]:
        """Process the replies of environments; return new requests and finished episodes."""
        requests: list[TurnRequest] = []
        finished: dict[str, Completion] = {}
        while not self._replies.empty():
            name, reply = self._replies.get()
            episode = self._running.get(name)
            if episode is None:
                continue  # aborted
            is_lost = isinstance(reply, EpisodeFault) and reply.reason == "lost"
            if is_lost and episode.num_repeats < MAX_REPEATS:
                self._repeat(episode)
                continue
            end = self._receive(episode, reply)
            if end is None:
                requests.append(self._request(episode))
            else:
                finished[name] = self._finish(episode, *end)
        return requests, finished

    def add_answer(self, name: str, answer: Answer) -> None:
        """Pass an answer of the policy to the environment of its episode."""
        episode = self._running[name]
        episode.tokens.add_answer(answer.token_ids, answer.logprobs, answer.versions, answer.routes)
        is_complete = answer.finish_reason == "stop"
        episode.last_token = int(answer.token_ids[-1]) if is_complete else None
        text = self._answer_text(answer, episode.sampling)
        episode.transcript.append(Message("assistant", text))
        episode.history.append(Message("assistant", text))
        episode.texts.append(self._text(answer.token_ids))
        turn = EpisodeTurn(
            len(answer.token_ids),
            episode.state,
            answer.finish_reason,
            generation_s=episode.waited_s(),
        )
        episode.turns.append(turn)
        self._await(name, self._environments.step(name, text, is_truncated=not is_complete))

    def _await(self, name: str, future: Future[Any]) -> None:
        # Called in a thread of the environments, hence the queue of replies.
        future.add_done_callback(partial(self._put_reply, name))

    def _put_reply(self, name: str, future: Future[Any]) -> None:
        if future.cancelled():
            return  # the episode was closed
        error = future.exception()
        reply = EpisodeFault("crash", str(error)) if error is not None else future.result()
        self._replies.put((name, reply))
        self.wake()

    def _receive(self, episode: _Running, reply: Reply) -> tuple[FinishReason, str, str] | None:
        """Process a reply; return the end of the episode, or None if a turn follows."""
        waited_s = episode.waited_s()
        if isinstance(reply, EpisodeFault):
            return "fault", reply.reason, reply.detail
        try:
            if isinstance(reply, Opening):
                return self._open(episode, reply)
            return self._continue(episode, reply, waited_s)
        except MsrlError as error:  # the template cannot render the messages
            return "fault", "template", str(error)

    def _open(self, episode: _Running, opening: Opening) -> tuple[FinishReason, str, str] | None:
        """Render the first prompt."""
        episode.tools = opening.tools
        if opening.messages:
            episode.history = self._shorten(episode, opening.messages)
            episode.transcript, episode.has_opening = list(episode.history), True
            prompt_ids = self._template.conversation(episode.history, opening.tools)
            episode.tokens = EpisodeTokens(prompt_ids)
        episode.state = _state(opening.info, episode.history)
        length = episode.tokens.num_tokens
        if not length:
            return "fault", "invalid", "reset returned no messages, and the row has no prompt"
        problem = self._why_too_long(length)
        if problem:
            return "fault", "long_prompt", problem
        longest = self._section.max_tokens or length + episode.sampling.max_tokens
        episode.limit = min(longest, self._max_model_len)
        return None

    def _why_too_long(self, length: int) -> str:
        """Return why a first prompt is too long; empty if it is not."""
        longest, context = self._settings.max_prompt_tokens, self._max_model_len
        name, largest = "the engine's max_model_len", self._section.max_tokens
        if largest is not None and largest < context:
            name, context = "environment.max_tokens", largest
        if length <= min(longest, context - 1):
            return ""
        if longest < context:
            return f"{length} tokens, but rollout.max_prompt_tokens={longest}"
        return f"{length} tokens, but {name}={context} includes an answer"

    def _continue(
        self, episode: _Running, result: StepResult, waited_s: float
    ) -> tuple[FinishReason, str, str] | None:
        """Record the reply to an answer, and append its messages if another turn follows."""
        info = result.info
        turn = replace(
            episode.turns[-1],
            reward=None if result.reward is None else float(result.reward),
            environment_s=waited_s,
            tool_calls=tuple(info.get("tool_calls") or ()),
            is_invalid=bool(info.get("invalid_action")),
        )
        if turn.is_invalid or any(call.get("error") == "malformed" for call in turn.tool_calls):
            turn = replace(turn, is_invalid=True)
            if self._section.format_penalty:
                turn = replace(turn, reward=(turn.reward or 0.0) - self._section.format_penalty)
        episode.turns[-1] = turn
        if isinstance(info.get("success"), bool):
            episode.success = info["success"]
        messages = self._shorten(episode, result.messages)
        end = self._end(episode, turn, done=result.done)
        if end is None:
            end = self._append(episode, messages, info)
        episode.transcript += messages
        return None if end is None else (end, "", "")

    def _end(self, episode: _Running, turn: EpisodeTurn, *, done: bool) -> FinishReason | None:
        """Return the end of an episode after a turn, or None."""
        if done:
            return turn.finish_reason
        if episode.tokens.num_tokens >= episode.limit:
            return "length"
        if len(episode.turns) >= self._section.max_turns:
            return "turns"
        limit_s = self._section.max_episode_s
        if limit_s is not None and time.perf_counter() - episode.started > limit_s:
            return "time"
        return None

    def _append(
        self, episode: _Running, messages: list[Message], info: Mapping[str, Any]
    ) -> FinishReason | None:
        """Append messages to the prompt; return "length" if no room for an answer remains."""
        history = info.get("history")
        if history is not None:
            if isinstance(info.get("tools"), list):
                episode.tools = info["tools"]
            self._edit(episode, readable_messages(history), messages)
        elif self._section.history == "template":
            self._edit(episode, episode.history, messages)
        else:
            new = self._new_tokens(episode, messages)
            if episode.tokens.num_tokens + len(new) >= episode.limit:
                return "length"
            episode.tokens.add_messages(new)
            episode.history += messages
        episode.state = _state(info, messages)
        return None if episode.tokens.num_tokens < episode.limit else "length"

    def _new_tokens(self, episode: _Running, messages: Sequence[Message]) -> Ints:
        """Return the tokens of messages that follow the last answer."""
        if self._section.history == "separate":
            return self._template.separate(messages)
        return self._template.suffix(len(episode.turns), messages, episode.last_token)

    def _edit(
        self, episode: _Running, history: Sequence[Message], messages: Sequence[Message]
    ) -> None:
        """Render the whole conversation. A sequence continues if its tokens are a prefix."""
        if not episode.has_opening:
            raise MsrlError(
                "environment.history: the environment begins with the prompt of the row, whose "
                "messages are unknown, so the history cannot be edited. Return messages from reset."
            )
        episode.history = [*history, *messages]
        episode.tokens.restart(self._template.conversation(episode.history, episode.tools))

    def _request(self, episode: _Running) -> TurnRequest:
        room = episode.limit - episode.tokens.num_tokens
        sampling = replace(
            episode.sampling, max_tokens=min(room, self._section.max_turn_tokens or room)
        )
        prompt = replace(episode.row, token_ids=episode.tokens.prompt)
        seed = turn_seed(episode.seed, len(episode.turns))
        return TurnRequest(episode.name, prompt, sampling, seed)

    def _shorten(self, episode: _Running, messages: Sequence[Message]) -> list[Message]:
        """Return messages of at most the largest length; count those that were longer."""
        short: list[Message] = []
        for message in messages:
            text = shorten_message(message, self._section.max_message_chars)
            episode.num_shortened += len(text.content) < len(message.content)
            short.append(text)
        return short

    def _answer_text(self, answer: Answer, sampling: SamplingParams) -> str:
        """Return the text for the environment: with control tokens, without the stop token."""
        token_ids = answer.token_ids.tolist()
        ends = self._special.union(sampling.stop_token_ids)
        if answer.finish_reason == "stop" and token_ids[-1] in ends:
            token_ids = token_ids[:-1]
        return self._template.tokenizer.backend.decode(token_ids, skip_special_tokens=False)

    def _finish(self, episode: _Running, end: FinishReason, fault: str, detail: str) -> Completion:
        """Return the completion of an episode and close its environment."""
        del self._running[episode.name]
        self._environments.close(episode.name)
        token_ids, logprobs, versions = episode.tokens.sampled_tokens()
        messages: list[Mapping[str, Any]] = [
            {"role": message.role, "content": message.content} for message in episode.transcript
        ]
        record = Episode(
            episode.tokens.sequences(),
            tuple(episode.turns),
            tuple(messages),
            episode.success,
            (fault, detail),
            episode.num_shortened,
            episode.environment,
            episode.num_repeats,
        )
        oldest = min((run.version for run in versions), default=0)
        text = "\n".join(episode.texts)
        return Completion(token_ids, logprobs, end, oldest, text, versions, record)


def turn_seed(seed: int | None, number: int) -> int | None:
    """Return the seed of a turn, counted from 0. The first turn has the sample's seed."""
    if seed is None or number == 0:
        return seed
    data = f"{seed},{number}".encode()
    bits = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    return bits >> (64 - _SEED_BITS)


def environment_row(prompt: Prompt, seed: int | None, *, keeps_name: bool) -> JsonObject:
    """Return what an environment is reset with. A row has the same seed in every pass.

    Without `keeps_name`, a column with the name of an environment is dropped.
    """
    columns = dict(prompt.extra)
    if not keeps_name:
        columns.pop(ENVIRONMENT_COLUMN, None)
    own_seed = sample_seed(seed or 0, 0, prompt.index, 0, 0)
    return {**columns, "answer": prompt.answer, "index": prompt.index, "seed": own_seed}


def _state(info: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """Return a digest of the state that the environment names, else of the new messages."""
    state = info.get("state")
    if isinstance(state, str):
        return digest([state])
    return digest([f"{message.role}\n{message.content}" for message in messages])
