"""msrl chat: what it keeps and forgets, with a real engine and through a real terminal."""

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

from msrl.platforms import get
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.types import Message, Prompt, SamplingParams
from msrl.workflows.serve.chat import converse, fit, interruptible
from msrl.workflows.serve.engine import choose_renderer
from support import assert_each_mentions, assert_mentions
from tiny_qwen2 import make_tokenizer, save_model

SYSTEM = (Message("system", "be brief"),)
LIMIT_S = 300.0  # leaving alone takes three seconds of a free core: vLLM and Python tidy up
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
    running = VllmEngine(EngineSettings(folder, max_model_len=256, max_num_seqs=1), get("cpu"))
    yield running
    running.close()


def dialogue(*lengths: int) -> tuple[Message, ...]:
    """Questions and answers in turn, of so many letters each."""
    return tuple(Message("assistant" if i % 2 else "user", chr(97 + i) * n) for i, n in enumerate(lengths))


def num_tokens(renderer, turns) -> int:
    rows = [{"role": turn.role, "content": turn.content} for turn in (*SYSTEM, *turns)]
    return len(make_tokenizer().apply_chat_template(rows, add_generation_prompt=True)["input_ids"])


def test_a_conversation_that_fits_is_kept_whole(renderer):
    turns = dialogue(10, 10, 10)
    fitted = fit(renderer, SYSTEM, turns, num_tokens(renderer, turns) + 20, 20)
    assert fitted.turns == turns
    assert fitted.num_dropped == 0


def test_the_oldest_questions_go_with_their_answers_and_the_system_text_stays(renderer):
    turns = dialogue(10, 10, 10, 10, 10)
    length = num_tokens(renderer, turns) + 19  # one token too few
    fitted = fit(renderer, SYSTEM, turns, length, 20)
    assert fitted.turns == turns[2:]
    assert fitted.num_dropped == 2
    assert len(fitted.token_ids) == num_tokens(renderer, turns[2:])
    assert "be brief" in make_tokenizer().decode(fitted.token_ids)


def test_the_last_question_may_take_the_room_of_its_answer_but_not_all_of_the_model(renderer):
    turns = dialogue(10, 10, 100)
    length = num_tokens(renderer, turns[2:])
    assert fit(renderer, SYSTEM, turns, length + 1, 50).num_dropped == 2
    assert fit(renderer, SYSTEM, turns, length, 50).token_ids is None


def test_an_interrupt_is_noted_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
    assert signal.getsignal(signal.SIGINT) is before


def answer(engine, renderer, *turns) -> str:
    """The greedy answer to a conversation, all at once."""
    from msrl.types import Conversation

    token_ids = renderer.prompt(Conversation((*SYSTEM, *turns)))
    sampling = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=renderer.stop_token_ids)
    return engine.generate([Prompt(0, token_ids)], sampling, 0)[0].completions[0].text.rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.slow
def test_turns_are_kept_until_they_are_cleared_and_nothing_follows_quit(engine, renderer, capsys):
    sampling = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=renderer.stop_token_ids)
    converse(engine, renderer, SYSTEM, sampling, ["one\n", "\n", "two\n", "clear\n", "two\n", "quit\n", "never\n"])
    first = answer(engine, renderer, Message("user", "one"))
    second = answer(engine, renderer, Message("user", "one"), Message("assistant", first), Message("user", "two"))
    third = answer(engine, renderer, Message("user", "two"))
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{third}\n"
    assert second != third
    assert_each_mentions(captured.err.splitlines(), ("conversation",))


@pytest.mark.slow
def test_what_no_longer_fits_is_dropped_and_said(engine, renderer, capsys):
    sampling = SamplingParams(max_tokens=64, temperature=0.0, stop_token_ids=renderer.stop_token_ids)
    converse(engine, renderer, (), sampling, ["x" * 90, "y" * 90, "z" * 300, "w"])
    remarks = capsys.readouterr().err.splitlines()
    assert_mentions(remarks[0], "256 tokens", "2 oldest turns")
    assert_mentions(remarks[1], "256 tokens", "answer")


@pytest.mark.slow
def test_lines_from_a_pipe_are_answered_and_its_end_leaves(folder):
    command = [sys.executable, "-c", COMMAND, "chat", "--model", str(folder), "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, errors="replace", timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip("\n")) > 0
    assert "Traceback" not in done.stderr


class Terminal:
    """A program in a terminal of its own; unless told otherwise, msrl."""

    def __init__(self, arguments: list[str], code: str = COMMAND) -> None:
        self.child, self.master = pty.fork()
        if self.child == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a shell in a terminal has it, whatever these tests were started with
            os.execv(sys.executable, [sys.executable, "-c", code, *arguments])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, seconds: float = LIMIT_S) -> str:
        """What was shown up to `text`, which must come within the time."""
        assert self.shows(lambda: text in self.seen, seconds), f"{text!r} did not come; seen: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        return before

    def shows(self, wanted: Callable[[], bool], seconds: float) -> bool:
        """Whether what it shows comes to what is wanted within the time."""
        until = time.monotonic() + seconds
        while not wanted():
            left = until - time.monotonic()
            if left <= 0:
                return False
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
        return True

    def interrupt_prompt(self) -> None:
        """Ctrl-C until the prompt's line ends: one that comes between readline's prompt and its waiting is kept for the next key."""
        for _ in range(20):
            self.type("\x03")
            if self.shows(lambda: "\n" in self.seen, 10.0):
                return
        raise AssertionError(f"the prompt heard no Ctrl-C; seen: {self.seen!r}")

    def exit_code(self, seconds: float = LIMIT_S) -> int:
        """What the program left with, which it must do within the time; what it still shows is read, or it could not end."""
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
        raise AssertionError(f"the program did not end; seen: {self.seen!r}")


def _never_end(folder):
    """Control tokens of the model get a logit of 0, which is never the largest: a greedy answer goes on to its limit."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][AutoTokenizer.from_pretrained(folder).all_special_ids] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_an_answer_and_then_leaves(tmp_path):
    save_model(tmp_path, tied=False, positions=8192)
    _never_end(tmp_path)
    sections = ["--set", "rollout.engine.max_model_len=8192"]
    terminal = Terminal(["chat", "--model", str(tmp_path), "--max-tokens", "4000", "--seed", "1", "--temperature", "0", *sections])
    terminal.wait_for("> ")
    terminal.type("tell me all\n")
    terminal.wait_for("tell me all")  # the terminal's echo
    assert terminal.shows(lambda: len(terminal.seen) > 10, LIMIT_S)  # some of the answer, far less than 4000 tokens
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    terminal.type("clear\n")
    terminal.wait_for("forgotten")
    terminal.wait_for("> ")
    terminal.interrupt_prompt()
    assert terminal.exit_code() == 130


def test_in_a_terminal_ctrl_d_ends_the_questions_in_peace():
    terminal = Terminal([], "from msrl.workflows.serve.chat import read_lines; print(list(read_lines()))")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.wait_for("['hello']")
    assert terminal.exit_code() == 0


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as a locale has it, and where there is none
def test_bytes_that_are_no_text_become_placeholders(errors):
    code = "from msrl.workflows.serve.chat import read_lines; print(ascii(list(read_lines())))"
    environment = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"a\xe4\xbd\nb\n", capture_output=True, env=environment, timeout=LIMIT_S, check=False
    )
    assert (done.stdout.decode(), done.returncode) == ("['a\\ufffd\\n', 'b\\n']\n", 0)
