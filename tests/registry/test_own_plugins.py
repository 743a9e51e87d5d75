"""Plugins in files of users: `path/file.py:NAME` in place of a plugin's name.

The files are the examples of docs/extending.md.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from msrl import registry
from msrl.algorithms.answers import Answers, Pairs
from msrl.algorithms.token_rewards import TokenRewards
from msrl.algorithms.tokens import PolicyTokens
from msrl.checks.validate import find_errors
from msrl.config.loader import InvalidConfigError, load
from msrl.config.own_files import own_digests, own_names
from msrl.data.rows.turns import ToolCall
from msrl.environments.tools import read_answer
from msrl.plan.derived import preference_plan
from msrl.plan.run_plan import resolve
from msrl.registry import own
from msrl.registry.declarations import declaration
from msrl.rewards.pool import Call, CallResult, Pool
from msrl.rewards.sources import Source, mistakes
from msrl.tracking.run import RunFolder, read_attempts
from msrl.workflows.rl.update.advantages import estimate_advantages
from support import ROOT, assert_mentions, mentions

GUIDE = ROOT / "docs" / "extending.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the example files of the guide, and work in their folder."""
    text = GUIDE.read_text(encoding="utf-8")
    for name, source in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_own(package: str, name: str) -> Any:
    """Return the module of a plugin, by an absolute path: loaded files are cached by it."""
    return registry.load(package, own.located(name), key="algo")


def errors(command: str, *sets: str) -> list[str]:
    resolved = load(sets=sets)
    return find_errors(resolved, resolve(resolved.config, command))


def test_an_own_policy_loss_runs_and_has_options():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -1.5]), torch.tensor([1.0, -1.0])
    mask, sequences = torch.tensor([True, True]), torch.tensor([0, 0])
    tokens = PolicyTokens.of(logprobs, old, advantages, mask, sequences)
    losses = load_own(registry.LOSSES, "losses.py:damped").policy_loss(tokens, strength=0.2)
    ratio = (logprobs - old).exp()
    factor = torch.tensor([0.0, -0.1]).exp()
    torch.testing.assert_close(losses.loss, -ratio * factor * advantages)
    torch.testing.assert_close(losses.stats["damping"], factor)
    sets = ("algo.policy_loss=losses.py:damped", "algo.options={strength: 0.2, weight: 1}")
    lines = [line for line in errors("train-grpo", *sets) if "algo." in line]
    assert len(lines) == 1
    assert_mentions(lines[0], "algo.options.weight", "strength")


def test_an_own_advantage_estimator_runs():
    name = own.located("estimators.py:centered")
    sets = (f"algo.advantage.estimator={name}", "algo.options={factor: 2.0}")
    rewards = TokenRewards(np.array([[1.0, 3.0]]), np.array([[1, 2]]))
    advantages = estimate_advantages(load(sets=sets).config.algo, rewards)
    np.testing.assert_allclose(advantages, [-2.0, 2.0, 2.0])
    lines = errors("train-grpo", *sets, "rollout.samples_per_prompt=1")
    assert any("rollout.samples_per_prompt" in line for line in lines)


def test_an_own_preference_loss_runs():
    def answers(*logprobs: float) -> Answers:
        zeros = torch.zeros(len(logprobs))
        return Answers(torch.tensor(logprobs), torch.ones(len(logprobs)), zeros)

    pairs = Pairs(answers(-1.0, 9.0), answers(-2.0, -9.0), torch.zeros(2))
    plugin = load_own(registry.PREFERENCES, "preferences.py:hinge")
    losses = plugin.preference_loss(pairs, beta=0.5)
    torch.testing.assert_close(losses.loss, torch.tensor([0.5, 0.0]))
    plan = preference_plan(load(sets=["algo.preference.loss=preferences.py:hinge"]).config)
    assert (plan.beta, plan.needs_reference) == (0.1, True)


def test_an_own_divergence_has_the_slopes_of_its_terms():
    student = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()
    plugin = load_own(registry.DIVERGENCES, "divergences.py:squared")
    terms, slopes = plugin.divergence(student, teacher)
    assert terms.sum().item() == pytest.approx(0.01)
    torch.testing.assert_close(torch.autograd.grad(terms.sum(), student)[0], slopes.detach())


def test_an_own_verifier_scores_in_the_processes_of_rewards():
    source = Source(verifier="verifiers.py:contains", options={"ignore_case": True})
    assert not list(mistakes([source]))
    assert (source.label, source.wrong_score, source.needs_answer) == ("contains", 0.0, True)
    with Pool([source.worker_function(0)], 1) as pool:
        calls = [Call(0, "The Answer", "answer"), Call(0, "none", "answer")]
        assert pool.map(calls) == (CallResult(1.0), CallResult(0.0))
    wrong = Source(verifier="verifiers.py:contains", options={"ignore": True})
    assert any("ignore_case" in message for _, _, message in mistakes([wrong]))


def test_an_own_tool_format_reads_and_writes_calls():
    toolbox: Any = SimpleNamespace(tool_format=own.located("formats.py:Brackets"))
    toolbox.opens_thought = False
    call = ToolCall("search", {"query": "msrl"})
    text = load_own(registry.TOOL_FORMATS, "formats.py:Brackets").render([call])
    parsed = read_answer(toolbox, f"I search. {text}", []).parsed
    assert (parsed.content, parsed.calls) == ("I search.", (call,))
    sets = ("environment.name=frozen_lake", "environment.tool_format=formats.py:Bracket")
    assert any("Brackets" in line for line in errors("train-grpo", *sets))


def test_a_function_that_does_not_fit_is_refused_before_the_start(folder: Path):
    (folder / "wrong.py").write_text("def two(a, b): ...\ndef one(a): ...\nname = one\n")
    (folder / "broken.py").write_text("def one(")
    cases = {
        "absent.py:one": "does not exist",
        "broken.py:one": "not Python",
        "wrong.py:on": "one",
        "wrong.py:two": "argument",
        "wrong.py:name": "function",
    }
    for name, word in cases.items():
        (line,) = errors("train-grpo", f"algo.policy_loss={name}")
        assert_mentions(line, "algo.policy_loss", name, word)
    message = mentions("algo.policy_loss=ppoo", "path/file.py:NAME", "ppo")
    with pytest.raises(InvalidConfigError, match=message):
        load(sets=["algo.policy_loss=ppoo"])


def test_a_run_records_the_checksums_of_own_files(folder: Path):
    sets = [
        "algo.policy_loss=losses.py:damped",
        "reward.sources=[{verifier: verifiers.py:contains}, {verifier: acc}]",
        "environment.path=absent.py:Walk",
    ]
    config = load(sets=sets).config
    assert own_names(config) == {
        "algo.policy_loss": "losses.py:damped",
        "reward.sources.0": "verifiers.py:contains",
        "environment.path": "absent.py:Walk",
    }
    digests = own_digests(config)
    expected = hashlib.sha256((folder / "losses.py").read_bytes()).hexdigest()
    assert digests["losses.py"] == expected and [*digests] == ["losses.py", "verifiers.py"]
    RunFolder.create("runs", "own", config={}, files=digests).close()
    assert read_attempts(folder / "runs" / "own")[0]["files"] == digests


def test_declarations_of_a_file_are_read_again_when_it_changes(folder: Path):
    name = "losses.py:damped"
    before = declaration(registry.LOSSES, name, key="algo.policy_loss").options("policy_loss")
    (folder / "losses.py").write_text("def damped(tokens, *, other=1): ...")
    after = declaration(registry.LOSSES, name, key="algo.policy_loss").options("policy_loss")
    assert ([*before], [*after]) == (["strength"], ["other"])
