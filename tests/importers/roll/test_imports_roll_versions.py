"""Keys of ROLL's files are judged by the version for which a file was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkouts import checkout
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.status import KeyStatus
from support import assert_mentions, mentions
from test_imports_commands import RLVR, edit
from test_imports_environments import AGENTIC, convert, tree
from test_imports_losses import convert as imported_file
from test_imports_losses import statuses

TEMPLATE = '    agent_template: "{state}"\n'


def early(text: str) -> str:
    """Return a file of v0.1.0: its templates show a state."""
    return edit(text, ("    use_thread_lock: true\n", f"    use_thread_lock: true\n{TEMPLATE}"))


def with_manager(line: str) -> str:
    return edit(AGENTIC, ("train_env_manager: {", f"train_env_manager: {{{line}, "))


def native(text: str, folder: Path) -> Any:
    return tree(convert(text, folder))


def test_the_penalty_of_the_manager_is_subtracted_in_the_first_version_only(tmp_path: Path) -> None:
    text = with_manager("format_penalty: -0.15")
    assert native(early(text), tmp_path)["environment"]["format_penalty"] == 0.15
    assert "format_penalty" not in native(text, tmp_path)["environment"]
    with pytest.raises(MsrlError, match=mentions("format_penalty=0.2", "bonus")):
        convert(early(with_manager("format_penalty: 0.2")), tmp_path)


def test_asym_clip_bounds_normalized_rewards_in_the_first_version_only(tmp_path: Path) -> None:
    norm = ("{grouping: traj_group_id, method: mean}", "{grouping: batch, method: asym_clip}")
    text = edit(AGENTIC, norm)
    clipped = native(early(text), tmp_path)["reward"]["norm"]
    assert clipped == {"center": "batch", "scale": "batch", "clip": [-1.0, 3.0]}
    translation = convert(text, tmp_path)
    assert "clip" not in tree(translation)["reward"]["norm"]
    assert_mentions(report(translation), "asym_clip", "v0.1.3")


def test_unknown_workers_of_environments_are_refused(tmp_path: Path) -> None:
    worker = "worker_cls: roll.pipeline.agentic.environment_worker.EnvironmentWorker"
    keys = statuses(convert(with_manager(worker), tmp_path))
    assert keys["train_env_manager.worker_cls"] is KeyStatus.SAME
    with pytest.raises(MsrlError, match=mentions("worker_cls=my.Worker", "environment.path")):
        convert(with_manager("worker_cls: my.Worker"), tmp_path)


def test_the_horizon_without_a_target_has_its_own_reason(tmp_path: Path) -> None:
    text = f"{RLVR}add_token_level_kl: true\nkl_horizon: 10000\n"
    translation = imported_file("roll", text, tmp_path)
    assert_mentions(report(translation), "kl_horizon=10000", "target_kl")


ENVIRONMENT = """\
class Lake:
    def __init__(self, grid_lookup=None, env_instruction=None):
        self.GRID_LOOKUP = {0: "p", 1: "i", 2: "h", 3: "g", 4: "x", 5: "y"}
        self.GRID_VOCAB = {"p": "you", "h": "hole"}
        self.ACTION_LOOKUP = {0: "Left", 1: "Down"}
        self.env_instruction = ("Walk. "
                                f"Take care.")
        if env_instruction is not None:
            self.env_instruction = env_instruction

    def get_instructions(self):
        symbols = "\\nSymbols:\\n" + ", ".join([f"{k}: {v}" for k, v in self.GRID_VOCAB.items()])
        actions = "\\nActions:\\n" + ", ".join([f"{v}" for k, v in self.ACTION_LOOKUP.items()])
        return self.env_instruction + symbols + actions
"""
TEXTS = """\
    use_thread_lock: true
    agent_system_template: Be good.
    agent_template: "{turn_idx}: {observation}"
"""


def in_checkout(folder: Path) -> Path:
    """Write the class of the environment as in a checkout, and return the folder of a file."""
    module = folder / "roll" / "pipeline" / "agentic" / "env" / "frozen_lake" / "env.py"
    module.parent.mkdir(parents=True)
    module.write_text(ENVIRONMENT, encoding="utf-8")
    examples = folder / "examples"
    examples.mkdir()
    return examples


def test_texts_of_a_game_come_from_the_file_and_from_the_checkout_around_it(tmp_path: Path) -> None:
    text = edit(AGENTIC, ("    use_thread_lock: true\n", TEXTS))
    options = native(text, in_checkout(tmp_path))["environment"]["options"]
    expected = "Walk. Take care.\nSymbols:\np: you, h: hole\nActions:\nLeft, Down"
    assert options["instructions"] == expected
    assert options["symbols"] == ["p", "i", "h", "g", "x", "y"]
    assert (options["system"], options["template"]) == ("Be good.", "{turn_idx}: {observation}")
    assert (options["max_response_length"], options["max_steps"]) == (64, 5)
    own = (
        "is_slippery: false,",
        'is_slippery: false, env_instruction: "Go.", grid_lookup: {1: "-"},',
    )
    options = native(edit(text, own), tmp_path / "examples")["environment"]["options"]
    assert options["instructions"].startswith("Go.\nSymbols:")
    assert options["symbols"] == ["p", "-", "h", "g", "x", "y"]


def in_game(folder: Path, *changes: tuple[str, str]) -> Any:
    """Return the import of a file with texts in a checkout, without --approximate."""
    text = edit(AGENTIC, ("    use_thread_lock: true\n", TEXTS), *changes)
    file = in_checkout(folder) / "given.yaml"
    file.write_text(text, encoding="utf-8")
    return translate_arguments("roll", [str(file)])


def test_turns_and_limits_of_a_game_are_those_of_the_original(tmp_path: Path) -> None:
    translation = in_game(tmp_path)
    environment = tree(translation)["environment"]
    assert (environment["history"], environment["enable_thinking"]) == ("separate", False)
    assert (environment["max_tokens"], environment["max_turns"]) == (1024, 5)
    assert not translation.differences
    text = f"{AGENTIC}skip_mock_system_prompt: false\n"
    assert "history" not in native(text, tmp_path)["environment"]  # without the texts of a checkout
    with pytest.raises(MsrlError, match=mentions("skip_mock_system_prompt=true", "system")):
        convert(text.replace("prompt: false", "prompt: true"), tmp_path)


TURN = '{turn_idx}: {observation}"'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((TURN, '{turn_idx}: <|x|> {observation}"'), ("control tokens",)),
        (('"<answer>(.*?)</answer>"', '"^(.*)$"'), ("pattern", "ends an answer")),
        (("is_slippery: false,", "is_slippery: false, map_seed: 3,"), ("map_seed=3",)),
        ((TURN, '{turn_idx}: {suffix}{observation}"'), ("words", "messages")),
    ],
)
def test_a_game_whose_tokens_or_actions_differ_is_no_exact_import(
    change: tuple[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions(*words, "--approximate")):
        in_game(tmp_path, change)


def test_a_room_that_ends_before_its_episode_is_no_exact_import(tmp_path: Path) -> None:
    rooms = ("tags: [Lake]", "tags: [Room]")
    options = ("num_boxes: 1, max_steps: 7}", "num_boxes: 1, max_steps: 6, search_depth: 30}")
    translation = convert(edit(AGENTIC, rooms, options), tmp_path)
    assert tree(translation)["environment"]["options"]["search_depth"] == 30
    assert_mentions("\n".join(translation.differences), "env_type=sokoban", "6 steps", "7")
    translation = convert(edit(AGENTIC, rooms), tmp_path)
    assert tree(translation)["environment"]["options"]["search_depth"] == 300
    assert "steps of" not in "\n".join(translation.differences)


@pytest.mark.parametrize(
    ("room", "size", "problem"),
    [
        ("dim_x: 6, dim_y: 6", 6, ()),
        ("dim_x: 8, dim_y: 8, dim_room: [6, 6]", 8, ()),
        ("dim_x: 6, dim_y: 8", None, ("dim_x=6", "square")),
        ("dim_x: 6", None, ("dim_x=6", "dim_y")),
        ("dim_x: a, dim_y: a", None, ("dim_x=a", "number")),
    ],
)
def test_the_sides_of_a_room_of_the_first_version_are_its_size(
    room: str, size: int | None, problem: tuple[str, ...], tmp_path: Path
) -> None:
    text = edit(AGENTIC, ("tags: [Lake]", "tags: [Room]"), ("dim_room: [6, 6]", room))
    if problem:
        with pytest.raises(MsrlError, match=mentions(*problem)):
            convert(text, tmp_path)
        return
    assert native(text, tmp_path)["environment"]["options"]["size"] == size


def test_rooms_of_a_checkout_of_the_first_version_are_imported() -> None:
    name = "examples/qwen2.5-0.5B-agentic/agentic_val_sokoban.yaml"
    file = checkout("ROLL-v0.1.0", name) / name
    environment = tree(translate_arguments("roll", [str(file)], approximate=True))["environment"]
    assert (environment["name"], environment["options"]["size"]) == ("sokoban", 6)


def test_without_a_checkout_the_words_of_a_game_are_reported_as_others(tmp_path: Path) -> None:
    text = edit(AGENTIC, ("    use_thread_lock: true\n", TEXTS))
    translation = convert(text, tmp_path)
    assert "instructions" not in tree(translation)["environment"]["options"]
    assert_mentions("\n".join(translation.differences), "env_type", "checkout", "agent_template")


def test_secrets_among_the_variables_of_a_file_are_neither_written_nor_printed(
    tmp_path: Path,
) -> None:
    secrets = 'WANDB_API_KEY: s3cret-a, HF_TOKEN: s3cret-b, URL: "https://me:s3cret-c@host"'
    text = f"{RLVR}system_envs: {{{secrets}, LEVEL: 1}}\n"
    text = edit(text, ("  infer_batch_size: 4\n", f"  system_envs: {{{secrets}, OTHER: 2}}\n"))
    translation = imported_file("roll", text, tmp_path)
    assert "s3cret" not in native_yaml(translation) + report(translation)
    assert_mentions(report(translation), "WANDB_API_KEY", "HF_TOKEN", "URL", "Export")
    assert tree(translation)["cluster"]["env"]["LEVEL"] == "1"


@pytest.mark.parametrize(
    ("line", "is_set"), [("warmup_steps: 20", True), ("warmup_steps: 0", False)]
)
def test_a_warmup_of_roll_begins_at_zero(line: str, is_set: bool, tmp_path: Path) -> None:
    text = edit(RLVR, ("warmup_steps: 20", line))
    optimizer = tree(imported_file("roll", text, tmp_path))["train"]["optimizer"]
    assert optimizer.get("warmup_from_zero", False) is is_set


def test_gigpo_names_states_that_it_does_not_compare(tmp_path: Path) -> None:
    text = edit(AGENTIC, ("adv_estimator: grpo", "adv_estimator: gigpo"))
    differences = "\n".join(convert(text, tmp_path).differences)
    assert_mentions(differences, "adv_estimator=gigpo", "same state", "--approximate")
    assert "once per turn" not in differences
