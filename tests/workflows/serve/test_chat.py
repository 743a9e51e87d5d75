"""`msrl chat`: dropped and cleared turns, with a real engine and a real terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from msrl.config.sections.rollout import EngineConfig
from msrl.platforms import get
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.types import Message, Prompt, SamplingParams
from msrl.workflows.engine import choose_renderer
from msrl.workflows.serve.chat import ChatPrompts, converse, fit_conversation, interruptible
from support import HANG_S, assert_each_mentions, assert_mentions
from tiny_qwen2 import make_tokenizer, save_model

SYSTEM = (Message("system", "be brief"),)
COMMAND = "import sys; from msrl.cli.app import main; main()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    save_model(path, tied=False)
    return path


@pytest.fixture(scope="module")
def renderer(folder):
    return choose_renderer(folder, None)


@pytest.fixture(scope="module")
def engine(folder):
    running = VllmEngine(
        EngineSettings(folder, engine=EngineConfig(max_model_len=256, max_num_seqs=1)), get("cpu")
    )
    yield running
    running.close()


def dialogue(*lengths: int) -> tuple[Message, ...]:
    """Return questions and responses in turn with these numbers of letters."""
    return tuple(
        Message("assistant" if i % 2 else "user", chr(97 + i) * n) for i, n in enumerate(lengths)
    )


def num_tokens(renderer, turns) -> int:
    rows = [{"role": turn.role, "content": turn.content} for turn in (*SYSTEM, *turns)]
    return len(make_tokenizer().apply_chat_template(rows, add_generation_prompt=True)["input_ids"])


def test_a_conversation_that_fits_is_unchanged(renderer):
    turns = dialogue(10, 10, 10)
    fitted = fit_conversation(
        ChatPrompts(renderer, SYSTEM), turns, num_tokens(renderer, turns) + 20, 20
    )
    assert fitted.turns == turns
    assert fitted.num_dropped == 0


def test_the_oldest_questions_and_responses_are_dropped_but_not_the_system_text(renderer):
    turns = dialogue(10, 10, 10, 10, 10)
    length = num_tokens(renderer, turns) + 19  # one token too few
    fitted = fit_conversation(ChatPrompts(renderer, SYSTEM), turns, length, 20)
    assert fitted.turns == turns[2:]
    assert fitted.num_dropped == 2
    assert len(fitted.token_ids) == num_tokens(renderer, turns[2:])
    assert "be brief" in make_tokenizer().decode(fitted.token_ids)


def test_the_last_question_may_use_the_room_of_its_response(renderer):
    turns = dialogue(10, 10, 100)
    length = num_tokens(renderer, turns[2:])
    assert fit_conversation(ChatPrompts(renderer, SYSTEM), turns, length + 1, 50).num_dropped == 2
    assert fit_conversation(ChatPrompts(renderer, SYSTEM), turns, length, 50).token_ids is None


def test_an_interrupt_is_recorded_and_the_handler_restored():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
    assert signal.getsignal(signal.SIGINT) is before


def greedy_response(engine, renderer, *turns) -> str:
    """Return the greedy response to a conversation, generated at once."""
    from msrl.types import Conversation

    token_ids = renderer.prompt(Conversation((*SYSTEM, *turns)))
    sampling = SamplingParams(
        max_tokens=16, temperature=0.0, stop_token_ids=renderer.stop_token_ids
    )
    return (
        engine.generate([Prompt(0, token_ids)], sampling, 0)[0]
        .completions[0]
        .text.rstrip("\N{REPLACEMENT CHARACTER}")
    )


@pytest.mark.slow
def test_turns_are_kept_until_they_are_cleared_and_nothing_follows_quit(engine, renderer, capsys):
    sampling = SamplingParams(
        max_tokens=16, temperature=0.0, stop_token_ids=renderer.stop_token_ids
    )
    converse(
        engine,
        ChatPrompts(renderer, SYSTEM),
        sampling,
        ["one\n", "\n", "two\n", "/clear\n", "two\n", "/quit\n", "never\n"],
    )
    first = greedy_response(engine, renderer, Message("user", "one"))
    second = greedy_response(
        engine,
        renderer,
        Message("user", "one"),
        Message("assistant", first),
        Message("user", "two"),
    )
    third = greedy_response(engine, renderer, Message("user", "two"))
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{third}\n"
    assert second != third
    assert_each_mentions(captured.err.splitlines(), ("conversation",))


@pytest.mark.slow
def test_turns_that_do_not_fit_are_dropped_with_a_note(engine, renderer, capsys):
    sampling = SamplingParams(
        max_tokens=64, temperature=0.0, stop_token_ids=renderer.stop_token_ids
    )
    converse(engine, ChatPrompts(renderer), sampling, ["x" * 90, "y" * 90, "z" * 300, "w"])
    notes = capsys.readouterr().err.splitlines()
    assert_mentions(notes[0], "256 tokens", "2 oldest turns")
    assert_mentions(notes[1], "256 tokens", "question")


@pytest.mark.full
@pytest.mark.slow
def test_chat_answers_lines_from_a_pipe_and_leaves_at_its_end(folder):
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "chat",
        "--model",
        str(folder),
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    ]
    done = subprocess.run(
        command, input="hello\n", capture_output=True, text=True, errors="replace", timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("\n")) > 0
    assert "Traceback" not in done.stderr


class Terminal:
    """A program in a separate terminal, by default msrl."""

    def __init__(self, arguments: list[str], code: str = COMMAND) -> None:
        self.child, self.master = pty.fork()
        if self.child == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default of an interactive shell
            os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = HANG_S) -> str:
        """Wait for `text` and return the output before it."""
        assert self.shows(lambda: text in self.seen, seconds), (
            f"{text!r} did not appear; output: {self.seen!r}"
        )
        before, _, self.seen = self.seen.partition(text)
        return before

    def shows(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return True if the condition becomes true within the time."""
        until = time.monotonic() + seconds
        while not condition():
            remaining_s = until - time.monotonic()
            if remaining_s <= 0:
                return False
            if select.select([self.master], [], [], remaining_s)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        return True

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C until the prompt's line ends.

        One that arrives between readline's prompt and its wait is kept for the next key.
        """
        for _ in range(20):
            self.type("\x03")
            if self.shows(lambda: "\n" in self.seen, 10.0):
                return
        raise AssertionError(f"the prompt ignored Ctrl-C; output: {self.seen!r}")

    def exit_code(self, seconds: float = HANG_S) -> int:
        """Return the program's exit code, which must be available within the time.

        Output is read meanwhile, since the program could not end otherwise.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the terminal's other side is closed
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        raise AssertionError(f"the program did not end; output: {self.seen!r}")


def _never_end(folder):
    """Set the logits of control tokens to 0, which is never the largest.

    A greedy response then continues to its limit.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][AutoTokenizer.from_pretrained(folder).all_special_ids] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.full
@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_a_response_and_then_leaves(tmp_path):
    save_model(tmp_path, tied=False, positions=8192)
    _never_end(tmp_path)
    sections = ["--set", "rollout.engine.max_model_len=8192"]
    terminal = Terminal(
        [
            "chat",
            "--model",
            str(tmp_path),
            "--max-tokens",
            "4000",
            "--seed",
            "1",
            "--temperature",
            "0",
            *sections,
        ]
    )
    terminal.wait_for("> ")
    terminal.type("tell me all\n")
    terminal.wait_for("tell me all")  # the terminal's echo
    # a part of the response, far less than 4000 tokens
    assert terminal.shows(lambda: len(terminal.seen) > 10, HANG_S)
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    terminal.type("/clear\n")
    terminal.wait_for("new conversation")
    terminal.wait_for("> ")
    terminal.interrupt_prompt()
    assert terminal.exit_code() == 130


@pytest.mark.slow
def test_in_a_terminal_ctrl_d_ends_the_input():
    terminal = Terminal(
        [], "from msrl.workflows.serve.chat import read_lines; print(list(read_lines()))"
    )
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.wait_for("['hello']")
    assert terminal.exit_code() == 0


def _questions(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the questions that reach the model."""
    questions: list[str] = []

    def respond(engine, prompts, turns, sampling):
        questions.append(turns[-1].content)
        return turns

    monkeypatch.setattr("msrl.workflows.serve.chat._respond", respond)
    converse(None, None, SamplingParams(max_tokens=1), lines)  # type: ignore[arg-type]
    return questions


def test_commands_begin_with_a_slash_and_words_can_be_asked(monkeypatch, capsys):
    lines = ["new\n", "q\n", "clear\n", "/help\n", "/foo\n", "//etc/hosts\n", "/q\n", "never\n"]
    assert _questions(lines, monkeypatch) == ["new", "q", "clear", "/etc/hosts"]
    notes = capsys.readouterr().err.splitlines()
    assert_each_mentions(notes, ("/clear", "/quit"), ("/foo", "/clear", "/quit"))
    for word in ("quit", "exit", "/quit", "/exit"):
        assert _questions(["a", word, "never"], monkeypatch) == ["a"]


def test_lines_between_quotes_are_one_question(monkeypatch):
    lines = ["a\n", '"""\n', "first\n", "\n", "/clear\n", '"""\n', "b\n", '"""\n', "last\n"]
    assert _questions(lines, monkeypatch) == ["a", "first\n\n/clear", "b", "last"]


@pytest.mark.full
@pytest.mark.slow
def test_in_a_terminal_ctrl_c_discards_a_question_that_is_not_complete():
    code = "from msrl.workflows.serve.chat import _questions, read_lines\n"
    code += "print(list(_questions(read_lines())))"
    terminal = Terminal([], code)
    terminal.wait_for("> ")
    terminal.type("half a li")
    terminal.wait_for("half a li")
    terminal.interrupt_prompt()
    terminal.wait_for("> ")
    terminal.type('"""\n')
    terminal.wait_for("... ")
    terminal.type("first\n")
    terminal.wait_for("... ")
    terminal.interrupt_prompt()
    terminal.wait_for("> ")
    terminal.type("whole\n")
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.wait_for("['whole']")
    assert terminal.exit_code() == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # with a locale and without one
def test_bytes_that_are_not_text_become_placeholders(errors):
    code = "from msrl.workflows.serve.chat import read_lines; print(ascii(list(read_lines())))"
    environment = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b"a\xe4\xbd\nb\n",
        capture_output=True,
        env=environment,
        timeout=HANG_S,
        check=False,
    )
    assert (done.stdout.decode(), done.returncode) == ("['a\\ufffd\\n', 'b\\n']\n", 0)


def _dialogue(length):
    roles = ("user", "assistant")
    return tuple(Message(roles[number % 2], f"<{number}>") for number in range(length))


@pytest.mark.parametrize(
    ("keeps_oldest", "expected"),
    [(False, "<4><5><6><7><8>"), (True, "<0><1><2><3><8>")],
)
def test_a_chat_remembers_as_many_turns_as_configured(keeps_oldest, expected, renderer):
    prompts = ChatPrompts(renderer, is_raw=True, num_turns=2, keeps_oldest=keeps_oldest)
    turns = prompts.recall(_dialogue(9))
    assert "".join(turn.content for turn in turns) == expected
    assert make_tokenizer().decode(prompts.token_ids(turns)) == expected


@pytest.mark.slow
def test_a_chat_without_a_template_sends_the_plain_text_of_all_turns(renderer):
    prompts = ChatPrompts(renderer, is_raw=True)
    assert prompts.recall(_dialogue(5)) == _dialogue(5)
    assert make_tokenizer().decode(prompts.token_ids(_dialogue(3))) == "<0><1><2>"
