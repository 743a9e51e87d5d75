"""msrl chat: a conversation in the terminal, each answer shown as it is sampled.

`clear` (or `new`) forgets the conversation; `quit`, `exit` or `q`, or the end of the input, leave. Ctrl-C during an answer stops that
answer and keeps what was said; at the prompt it leaves.
"""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from msrl.config.schema import Config
from msrl.data.render import Renderer
from msrl.rollout.engine import Engine, Piece, sample_seed
from msrl.types import Conversation, Ints, Message, Prompt, SamplingParams
from msrl.workflows.serve.engine import choose_renderer, engine_settings, is_mcore, open_model, running_engine, sampling_of, system_turns
from msrl.workflows.training.interrupts import children_ignore_interrupts

_LEAVE = ("quit", "exit", "q")
_FORGET = ("clear", "new")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The turns that the model can see, as token ids (None when not even the last turn fits), and how many older ones it cannot."""

    turns: tuple[Message, ...]
    token_ids: Ints | None  # [P]
    num_dropped: int


def run(config: Config) -> None:
    """Chat as `config.chat` says until the user leaves. Raises KeyboardInterrupt for Ctrl-C at the prompt."""
    section = config.chat
    source = open_model(section.model, "chat.model")
    renderer = choose_renderer(source.hf_dir, section.template)
    system = system_turns(section.system)
    sampling = sampling_of(config, section, renderer.stop_token_ids)
    settings = engine_settings(config, source.hf_dir, dtype=section.dtype, max_num_seqs=1, random_weights=is_mcore(source, section.model))
    renderer.prompt(Conversation((*system, Message("user", "?"))))  # a template that cannot show a question is refused now
    _say(f"loading {section.model}")
    with contextlib.ExitStack() as stack:
        with children_ignore_interrupts() if settings.tp > 1 else contextlib.nullcontext():
            engine = stack.enter_context(running_engine(config, source, settings))
        _say("ask away; `clear` starts anew, `quit` leaves, Ctrl-C stops an answer")
        converse(engine, renderer, system, sampling, read_lines())


def converse(engine: Engine, renderer: Renderer, system: tuple[Message, ...], sampling: SamplingParams, lines: Iterable[str]) -> None:
    """Answer each line, which is a question or a command, until one says to leave."""
    turns: tuple[Message, ...] = ()
    for number, line in enumerate(lines):
        text = line.strip()
        if text.lower() in _LEAVE:
            return
        if text.lower() in _FORGET:
            turns = ()
            _say("the conversation is forgotten")
        elif text:
            seeded = sampling if sampling.seed is None else replace(sampling, seed=sample_seed(sampling.seed, 0, number, 0, 0))
            turns = _answer(engine, renderer, system, (*turns, Message("user", text)), seeded)


def _answer(
    engine: Engine, renderer: Renderer, system: tuple[Message, ...], turns: tuple[Message, ...], sampling: SamplingParams
) -> tuple[Message, ...]:
    """Show the answer to the last turn; the conversation with it, or without the question when that is too long."""
    fitted = fit(renderer, system, turns, engine.max_model_len, sampling.max_tokens)
    if fitted.token_ids is None:
        _say(f"this is too long for the model, which takes {engine.max_model_len} tokens with the answer; it is left out")
        return turns[:-1]
    if fitted.num_dropped:
        dropped = f"its {fitted.num_dropped} oldest turns are forgotten"
        _say(f"the conversation no longer fits the model's {engine.max_model_len} tokens: {dropped}")
    with interruptible() as interrupted, closing(engine.stream(Prompt(0, fitted.token_ids), sampling)) as pieces:
        text = _show(pieces, interrupted)
    if interrupted():
        _say("stopped")
    return (*fitted.turns, Message("assistant", text))


def fit(renderer: Renderer, system: tuple[Message, ...], turns: tuple[Message, ...], max_model_len: int, max_tokens: int) -> Fitted:
    """Leave out the oldest questions with their answers until the rest fits with an answer of `max_tokens`, or of half the model's
    length if that is less; the last question alone may leave less than that for its answer."""
    room = max_model_len - min(max_tokens, max_model_len // 2)
    questions = [number for number, turn in enumerate(turns) if turn.role == "user"]
    for first in questions:
        token_ids = renderer.prompt(Conversation((*system, *turns[first:])))
        last = first == questions[-1]
        if len(token_ids) <= room or (last and len(token_ids) < max_model_len):
            return Fitted(turns[first:], token_ids, first)
    return Fitted(turns, None, 0)


def read_lines() -> Iterator[str]:
    """Lines of standard input, with a prompt and editing on a terminal. Bytes that are no text, as a half-deleted character leaves them,
    become placeholders.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives `input` line editing and a history)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            raise


@contextlib.contextmanager
def interruptible() -> Generator[Callable[[], bool], None, None]:
    """Within it Ctrl-C raises nothing and is only noted, since an exception inside the engine would leave it in pieces."""
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)


def _show(pieces: Iterable[Piece], interrupted: Callable[[], bool]) -> str:
    """Print the pieces as they come until Ctrl-C; their whole text. What would control the terminal is shown as a placeholder."""
    texts: list[str] = []
    for piece in pieces:
        texts.append(piece.text)
        sys.stdout.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece.text) if sys.stdout.isatty() else piece.text)
        sys.stdout.flush()
        if interrupted():
            break
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(texts)


def _say(text: str) -> None:
    """A remark that is not part of the conversation."""
    print(f"({text})", file=sys.stderr, flush=True)
