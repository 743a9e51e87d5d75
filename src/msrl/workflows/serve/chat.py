"""`msrl chat`: a conversation in the terminal with streamed responses.

Commands begin with a slash: `/clear` forgets the conversation, `/image PATH` adds an image to the
next question, `/quit` leaves, `/help` lists them.
`quit`, `exit` and the end of the input leave too. A line that begins with two slashes is a question
with one of them. Lines between two lines of three double quotes are one question.

Ctrl-C during a response stops the response and keeps the conversation. At the prompt it discards a
question that is not complete, else it leaves.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.config.schema import Config
from msrl.data.images.marks import IMAGE
from msrl.data.images.sources import read_image
from msrl.data.render import Renderer
from msrl.errors import MsrlError
from msrl.limits import print_note, printable
from msrl.rollout.engine import Engine, EngineSettings, Piece, check_stops, sample_seed
from msrl.types import Conversation, Ints, Message, PlacedImage, Prompt, SamplingParams
from msrl.vision.decoding import CheckedImage, check_images
from msrl.vision.errors import ImageError
from msrl.vision.sizes import grid_of
from msrl.workflows.engine import (
    check_engine,
    choose_renderer,
    engine_settings,
    needs_weight_transfer,
    open_model,
    other_template,
    raw_ids,
    running_engine,
    sampling_params,
    system_turns,
)
from msrl.workflows.serve.images import ImagePrompts, optional_images
from msrl.workflows.training.interrupts import children_ignore_interrupts

if TYPE_CHECKING:
    from msrl.checkpoint.source import WeightSource

_LEAVE = ("/quit", "/exit", "/q", "quit", "exit")
_CLEAR = ("/clear", "/new")
_MAX_IMAGES = 32  # of the turns that the model sees
DISCARD = "\x03"  # a line of `read_lines`: Ctrl-C while a question was typed
_IMAGE = "/image"
_QUOTES = '"""'
_HELP = (
    "/clear starts a new conversation, /image PATH adds an image to the next question, /quit "
    "leaves, /help prints this. //text asks /text. "
    f"{_QUOTES} begins and ends a question of several lines. Ctrl-C stops a response"
)


@dataclass(frozen=True, slots=True)
class FittedConversation:
    """The turns that fit the model's context, as token ids, and the number of dropped turns.

    `token_ids` is None if not even the last turn fits. `images` are those of the turns.
    """

    turns: tuple[Message, ...]
    token_ids: Ints | None  # [P]
    num_dropped: int
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompts:
    """Rendering of a conversation as a prompt, with the earlier turns that the model sees.

    With `is_raw`, a prompt is the plain text of all turns. `num_turns` limits the earlier
    questions with their responses; None is no limit. `images` renders questions with images, for
    models that read them.
    """

    renderer: Renderer
    system: tuple[Message, ...] = ()
    is_raw: bool = False
    num_turns: int | None = None
    keeps_oldest: bool = False
    images: ImagePrompts | None = None

    @classmethod
    def of(
        cls, config: Config, renderer: Renderer, images: ImagePrompts | None = None
    ) -> ChatPrompts:
        """Return the prompts of `config.chat`."""
        section = config.chat
        return cls(
            renderer,
            system_turns(section.system),
            section.raw,
            section.history_turns,
            section.history_keeps == "oldest",
            images,
        )

    def recall(self, turns: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the earlier turns that the model sees, and the question, which is the last one."""
        earlier, question = turns[:-1], turns[-1:]
        if self.num_turns is None:
            return turns
        length = 2 * self.num_turns
        seen = earlier[:length] if self.keeps_oldest else earlier[max(0, len(earlier) - length) :]
        return (*seen, *question)

    def token_ids(self, turns: tuple[Message, ...]) -> Ints:
        """Return the token ids [P] of a conversation, including the generation prompt."""
        return self.render(turns)[0]

    def render(self, turns: tuple[Message, ...]) -> tuple[Ints, tuple[PlacedImage, ...]]:
        """Return the token ids [P] of a conversation and its images."""
        if self.is_raw:
            return raw_ids(self.renderer, "".join(turn.content for turn in turns)), ()
        conversation = Conversation((*self.system, *turns))
        if self.images is None or not any(turn.images for turn in turns):
            return self.renderer.prompt(conversation), ()
        return self.images.render(conversation, None, Path())

    def check_size(self, image: CheckedImage) -> None:
        """Raise ImageError if the model cannot resize an image."""
        if self.images is not None and self.images.settings is not None:
            grid_of(image.height, image.width, self.images.settings.vision)

    def refusal(self) -> str | None:
        """Return the reason why questions cannot have images, or None."""
        if self.is_raw:
            return "chat.raw reads text only."
        images = self.images or ImagePrompts(self.renderer)
        return images.reason if images.settings is None else None


def run(config: Config) -> None:
    """Chat with the settings of `config.chat` until the user leaves.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C at the prompt.
    """
    section = config.chat
    source, renderer = prepare(config)
    stop_token_ids = () if section.raw else renderer.stop_token_ids
    sampling = sampling_params(config, section, stop_token_ids)
    settings = _engine_settings(config, source)
    _print_note(f"loading {section.model}")
    with contextlib.ExitStack() as stack:
        with children_ignore_interrupts() if settings.engine.tp > 1 else contextlib.nullcontext():
            engine = stack.enter_context(running_engine(config, source, settings))
        _print_note(
            "ready: /clear starts a new conversation, /quit leaves, /help lists all commands, "
            "Ctrl-C stops a response"
        )
        images = ImagePrompts.of(renderer)
        converse(engine, ChatPrompts.of(config, renderer, images), sampling, read_lines())


def prepare(config: Config) -> tuple[WeightSource, Renderer]:
    """Open the model and check that its template can render a question.

    Raises:
        MsrlError: The model or the template is not valid.
    """
    section = config.chat
    source = open_model(section.model, "chat.model", section.lora)
    renderer = choose_renderer(
        source.hf_dir, section.template, enable_thinking=section.enable_thinking, day=section.date
    )
    if not section.raw and (warning := other_template(source.hf_dir, renderer)):
        _print_note(warning)
    check_stops("chat.stop", section.stop, renderer.tokenizer)
    ChatPrompts.of(config, renderer).token_ids((Message("user", "?"),))
    check_engine(config, _engine_settings(config, source))
    return source, renderer


def _engine_settings(config: Config, source: WeightSource) -> EngineSettings:
    section = config.chat
    settings = engine_settings(
        config,
        source.hf_dir,
        dtype=section.dtype,
        max_num_seqs=1,
        random_weights=needs_weight_transfer(source, section.model, section.lora),
    )
    images = None if section.raw else optional_images(source.hf_dir, _MAX_IMAGES)
    return replace(settings, images=images)


def converse(
    engine: Engine,
    prompts: ChatPrompts,
    sampling: SamplingParams,
    lines: Iterable[str],
) -> None:
    """Respond to each line, which is a question or a command, until a command to leave."""
    turns: tuple[Message, ...] = ()
    images = list[bytes]()  # of the next question
    for number, line in enumerate(_questions(lines)):
        text = line.strip()
        if text.lower() in _LEAVE:
            return
        if text.lower() in _CLEAR:
            turns, images = (), []
            _print_note("started a new conversation")
        elif text.split(maxsplit=1)[:1] == [_IMAGE]:
            _add_image(prompts, images, text.removeprefix(_IMAGE).strip())
        elif text.startswith("/") and not text.startswith("//"):
            known = "" if text.lower() == "/help" else f"{printable(text)}: unknown command. "
            _print_note(f"{known}{_HELP}")
        elif text:
            text = text.removeprefix("/") if text.startswith("//") else text
            turn_sampling = sampling
            if sampling.seed is not None:
                turn_sampling = replace(sampling, seed=sample_seed(sampling.seed, 0, number, 0, 0))
            question = Message("user", IMAGE * len(images) + text, images=tuple(images))
            turns, images = _respond(engine, prompts, (*turns, question), turn_sampling), []


def _add_image(prompts: ChatPrompts, images: list[bytes], path: str) -> None:
    """Read an image for the next question, or print why it cannot be used."""
    try:
        if refusal := prompts.refusal():
            raise MsrlError(refusal)
        if not path:
            raise MsrlError("name a file, as in /image cat.png.")
        data = read_image(path, Path()).data
        (checked,) = check_images([data])
        if isinstance(checked, ImageError):
            raise checked
        prompts.check_size(checked)
        if len(images) == _MAX_IMAGES:
            raise MsrlError(f"the question has {_MAX_IMAGES} images, the largest number.")
    except MsrlError as error:
        _print_note(f"{_IMAGE} {printable(path)}: {error}")
        return
    images.append(data)
    _print_note(f"{printable(path)} ({checked.width} x {checked.height}) is in the next question")


def _questions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, with those between two lines of three double quotes as one text.

    At the end of the input, an incomplete text is complete.
    """
    text: list[str] | None = None
    for line in lines:
        if line == DISCARD:
            text = None
        elif line.strip() == _QUOTES:
            if text is not None:
                yield "\n".join(text)
            text = [] if text is None else None
        elif text is None:
            yield line
        else:
            text.append(line.rstrip("\r\n"))
    if text:
        yield "\n".join(text)


def _respond(
    engine: Engine,
    prompts: ChatPrompts,
    turns: tuple[Message, ...],
    sampling: SamplingParams,
) -> tuple[Message, ...]:
    """Print the response to the last turn and return the conversation with it.

    If the question is too long, it is dropped from the conversation instead.
    """
    turns = prompts.recall(turns)
    fitted = fit_conversation(prompts, turns, engine.max_model_len, sampling.max_tokens)
    if fitted.token_ids is None:
        _print_note(
            f"too long: question and response together may have {engine.max_model_len} tokens; "
            "dropped the question"
        )
        return turns[:-1]
    if fitted.num_dropped:
        limit = engine.max_model_len
        _print_note(
            f"dropped the {fitted.num_dropped} oldest turns: the conversation exceeds the "
            f"model's {limit} tokens"
        )
    prompt = Prompt(0, fitted.token_ids, images=fitted.images)
    with (
        interruptible() as interrupted,
        closing(engine.stream(prompt, sampling)) as pieces,
    ):
        text = _show(pieces, interrupted)
    if interrupted():
        _print_note("stopped")
    return (*fitted.turns, Message("assistant", text))


def fit_conversation(
    prompts: ChatPrompts,
    turns: tuple[Message, ...],
    max_model_len: int,
    max_tokens: int,
) -> FittedConversation:
    """Drop the oldest questions with their responses until the conversation fits the model.

    A response of `max_tokens`, or of half the model's length if that is less, must fit too. The
    last question alone may leave less room for its response.
    """
    room = max_model_len - min(max_tokens, max_model_len // 2)
    questions = [number for number, turn in enumerate(turns) if turn.role == "user"]
    for first in questions:
        token_ids, images = prompts.render(turns[first:])
        is_last = first == questions[-1]
        if len(images) > _MAX_IMAGES:
            continue
        if len(token_ids) <= room or (is_last and len(token_ids) < max_model_len):
            return FittedConversation(turns[first:], token_ids, first, images)
    return FittedConversation(turns, None, 0)


def read_lines() -> Iterator[str]:
    """Yield lines of standard input, with a prompt and line editing on a terminal.

    Bytes that are not valid text, as a half-deleted character leaves them, become placeholders.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (adds line editing and history to `input`)
    is_open = False  # inside of three double quotes
    while True:
        try:
            line = input("... " if is_open else "> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if not is_open and not _typed_text():
                raise
            is_open, line = False, DISCARD
        else:
            is_open = is_open != (line.strip() == _QUOTES)
        yield line


def _typed_text() -> str:
    """Return the text of the line that was being typed, which readline still has."""
    try:
        import readline
    except ImportError:
        return ""
    return readline.get_line_buffer()


@contextlib.contextmanager
def interruptible() -> Generator[Callable[[], bool], None, None]:
    """Record Ctrl-C instead of raising KeyboardInterrupt.

    An exception inside the engine would leave it in an inconsistent state.
    """
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGINT, before)


def _show(pieces: Iterable[Piece], interrupted: Callable[[], bool]) -> str:
    """Print the pieces as they arrive until Ctrl-C, and return their text.

    On a terminal, control characters are escaped.
    """
    texts: list[str] = []
    for piece in pieces:
        texts.append(piece.text)
        is_terminal = sys.stdout.isatty()
        sys.stdout.write(printable(piece.text) if is_terminal else piece.text)
        sys.stdout.flush()
        if interrupted():
            break
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(texts)


def _print_note(text: str) -> None:
    """Print a note that is not part of the conversation."""
    print_note(f"({text})")
