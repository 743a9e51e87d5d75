"""Games have the maps, rooms, prompts, tokens and rewards of ROLL's own environments."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roll_oracle as oracle
from msrl import registry
from msrl.config.sections.environment import EnvironmentConfig
from msrl.data.tokenizer import load_tokenizer, open_tokenizer
from msrl.environments.base import Environment, Opening, StepResult
from msrl.environments.builtin import sokoban
from msrl.environments.builtin._sokoban_rooms import make_room
from msrl.environments.builtin.frozen_lake import environment
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from msrl.rollout.episodes.runner import Answer, EpisodeRunner
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.types import Completion, Prompt, SamplingParams, VersionRun
from support import mentions, shared_data
from test_imports_commands import native_tree

SYMBOLS = ["P", "_", "O", "G", "X", "√"]
TEMPLATE = "Turn {turn_idx}:\n{observation}\n{{left}}: {actions_left}, {max_response_length}\n"
PATTERN = "<answer>(.*?)</answer>"
ANSWERS = [
    "<answer>Right</answer>", "<answer> down </answer>", "<answer>LEFT</answer><|im_end|>",
    "<think>no</think><answer>up</answer>", "right", "<answer>jump</answer>",
    "<answer>Up</answer> or <answer>Left</answer>", "<think><answer>Down</answer>",
]  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slips", [False, True])
def test_the_frozen_lake_has_the_maps_prompts_and_rewards_of_roll(
    size: int, seed: int, *, slips: bool
) -> None:
    theirs = oracle.frozen_lake(size=size, p=0.8, is_slippery=slips, format_penalty=-0.01)
    observation, info = theirs.reset(seed=seed)
    talk = oracle.Conversation("Be good.", TEMPLATE, max_steps=6, max_tokens=64)
    ours = environment(
        size=size, hole_share=0.2, max_steps=6, invalid_reward=-0.01, random_ends=True,
        slippery=slips, symbols=SYMBOLS, action_pattern=PATTERN,
        template=TEMPLATE, system="Be good.",
        instructions=info["env_instruction"], max_response_length=64,
    )  # fmt: skip
    messages = ours.reset({"seed": seed})
    expected = talk.add(observation, info["env_instruction"])
    assert [(message.role, message.content) for message in messages] == expected
    choose = random.Random(seed)
    for number in range(6):
        answer = choose.choice(ANSWERS)
        observation, reward, is_done, _, info = theirs.step(answer)
        result = ours.step(answer)
        assert result.reward == reward
        assert result.info["invalid_action"] is not info["metrics"]["action_is_valid"]
        assert result.done == (is_done or number == 5)
        assert ours.text() == observation
        if result.done:
            assert result.info["success"] == bool(info["metrics"]["success"])
            return
        expected = talk.add(observation)
        assert [(message.role, message.content) for message in result.messages] == expected


@pytest.mark.parametrize(
    ("option", "fragments"),
    [
        ({"template": "{state}"}, ("template", "state", "observation")),
        ({"template": "{observation.x}"}, ("template", "observation.x")),
        ({"template": "{observation"}, ("template",)),
        ({"symbols": ["a"]}, ("symbols", "6")),
        ({"action_pattern": "("}, ("action_pattern",)),
        ({"action_pattern": "a"}, ("action_pattern", "group")),
    ],
)
def test_texts_and_patterns_of_games_are_checked(
    option: dict[str, object], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions("environment.options", *fragments)):
        environment(**option)  # type: ignore[arg-type]


def test_a_room_has_the_symbols_and_texts_of_its_options() -> None:
    room = sokoban.environment(
        symbols=list("Ww.cbap"), template="{turn_idx}/{actions_left}\n{observation}", system="Go.",
        instructions="Push.", action_pattern=PATTERN, max_steps=3,
    )  # fmt: skip
    system, first = room.reset({"seed": 1})
    plain = sokoban.environment()
    plain.reset({"seed": 1})
    own = dict(zip("#_O*XPS", "Ww.cbap", strict=True))
    shown = "".join(own.get(character, character) for character in plain.text().replace(" ", ""))
    assert (system.role, system.content) == ("system", "Go.")
    assert first.content == f"Push.\n1/3\n{shown}"
    result = room.step("jump")
    assert result.info["invalid_action"]
    assert result.messages[0].content == f"2/2\n{shown}"


def their_room(seed: int, size: int, num_boxes: int, depth: int) -> tuple[str, str] | None:
    """Return ROLL's room of a seed, without moves of boxes as a text; None if it has none."""
    functions = oracle.rooms()
    state, places = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        steps = int(1.7 * (size + size))
        fixed, cells, _, _ = functions.generate_room(
            dim=(size, size), num_steps=steps, num_boxes=num_boxes, search_depth=depth
        )
    except (RuntimeError, RuntimeWarning):
        return None
    finally:
        random.setstate(state)
        np.random.set_state(places)
    names = "#_O?xp"
    return tuple("".join(names[int(cell)] for cell in grid.ravel()) for grid in (fixed, cells))


@pytest.mark.parametrize(
    ("size", "num_boxes", "depth"), [(6, 1, 300), (6, 1, 30), (10, 2, 10), (7, 2, 12), (5, 1, 2)]
)
def test_rooms_with_a_search_depth_are_those_of_roll(size: int, num_boxes: int, depth: int) -> None:
    for seed in (0, 7, 2**32 - 1, *range(100, 105)):
        expected = their_room(seed, size, num_boxes, depth)
        room = make_room(seed, size, num_boxes, depth)
        if expected is not None:  # else the original draws another seed by the hash of a text
            assert room is not None
            assert (room.fixed, room.state) == expected


def test_a_room_with_a_search_depth_is_that_of_its_seed_and_has_a_box_off_its_target() -> None:
    room = sokoban.environment(search_depth=300, num_boxes=2)
    texts = []
    for seed in (3, 3 + 2**32, 4):
        room.reset({"seed": seed})
        texts.append(room.text())
        assert len(room.boxes) == len(room.targets) == 2
        assert not room.boxes & room.targets
        assert room.player not in room.walls | room.boxes
    assert texts[0] == texts[1] != texts[2]
    impossible = sokoban.environment(search_depth=2, size=4, num_boxes=3)
    with pytest.raises(MsrlError, match=mentions("num_boxes=3", "size")):
        impossible.reset({"seed": 1})
    with pytest.raises(MsrlError, match=mentions("search_depth=1", "2")):
        sokoban.environment(search_depth=1)


class Direct:
    """An environment in this process."""

    def __init__(self, game: Environment) -> None:
        self.game, self.seed = game, 0

    def open(self, episode_id: str, row: dict[str, Any]) -> Future[Any]:
        self.seed = row["seed"] = row["seed"] % 2**32
        return self._done(Opening(self.game.reset(row)))

    def step(self, episode_id: str, answer: str, *, is_truncated: bool = False) -> Future[Any]:
        return self._done(self.game.step(answer))

    def close(self, episode_id: str) -> None: ...

    @staticmethod
    def _done(value: Opening | StepResult) -> Future[Any]:
        future = Future[Any]()
        future.set_result(value)
        return future


TOKENIZERS = ["qwen2.5-0.5b-instruct", "qwen3-4b"]
TEXTS = [
    "<answer>Right</answer>", "I think <answer> down </answer>.", "<answer>LEFT</answer>",
    "<think>no</think>\n<answer>up</answer>", "right", "<answer>jump</answer>", "é🙂 <|im_start|>",
    "<answer>Up</answer> or <answer>Left</answer>", "a long answer " * 40, "",
]  # fmt: skip


class Policy:
    """Answers with and without the token that ends them, the same ones in every run."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._choose = tokenizer, random.Random(seed)
        self.prompts = list[tuple[list[int], int]]()
        self.stops = (tokenizer.eos_token_id, tokenizer.pad_token_id)

    def __call__(self, prompt: list[int], limit: int) -> list[int]:
        self.prompts.append((prompt, limit))
        text = self._choose.choice(TEXTS)
        stop = self._choose.choice([self.stops[0], self.stops[0], self.stops[1]])
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], stop][:limit]


def our_episode(
    section: EnvironmentConfig, folder: Path, policy: Policy, number: int
) -> tuple[Completion, int]:
    """Return an episode of an imported section, and its seed."""
    plugin = registry.load(registry.ENVIRONMENTS, section.name or "", key="environment.name")
    direct = Direct(plugin.environment(**section.options))
    settings = EpisodeSettings(section, folder, "", "hermes", 1024)
    text = open_tokenizer(folder).backend.decode
    runner = EpisodeRunner(
        direct, settings, settings.template(), 10**6, lambda ids: text(ids.tolist())
    )
    sampling = SamplingParams(max_tokens=10**5, num_samples=1, stop_token_ids=policy.stops, seed=1)
    runner.start("a", Prompt(number, np.zeros(0, np.int64), "", {}), sampling, 5)
    while True:
        requests, finished = runner.advance()
        if finished:
            return finished["a"], direct.seed
        [request] = requests
        ids = policy(request.prompt.token_ids.tolist(), request.sampling.max_tokens)
        ended = "stop" if ids[-1] in policy.stops else "length"
        zeros = np.zeros(len(ids), np.float32)
        runner.add_answer("a", Answer(np.array(ids), zeros, (VersionRun(0, len(ids)),), ended))


FOLDER = Path("examples", "qwen2.5-0.5B-agentic")


FILES = ["agent_val_frozen_lake.yaml", "agentic_val_sokoban.yaml"]


@pytest.mark.parametrize("tokenizer_name", TOKENIZERS)
@pytest.mark.parametrize("name", FILES)
def test_an_episode_of_an_imported_file_has_the_prompts_tokens_masks_and_score_of_roll(
    name: str, tokenizer_name: str
) -> None:
    translation = translate_arguments("roll", [str(oracle.checkout() / FOLDER / name)])
    native = native_tree(translation)
    section = EnvironmentConfig.model_validate(native["environment"])
    folder = shared_data("tokenizers", tokenizer_name)
    tokenizer, options = load_tokenizer(str(folder)), section.options
    keys = {
        "max_steps": options["max_steps"],
        "max_tokens_per_step": section.max_turn_tokens,
        "agent_system_template": options["system"],
        "agent_template": options["template"],
    }
    game = their_game(section.name or "")
    for number, length in enumerate([section.max_tokens, 500] * 3):
        limited = section.model_copy(update={"max_tokens": length})
        policy, other = Policy(tokenizer, number), Policy(tokenizer, number)
        completion, seed = our_episode(limited, folder, policy, number)
        tokens, mask, score = oracle.Trajectory(game, tokenizer, keys, length or 0, other).run(seed)
        assert policy.prompts == other.prompts
        assert completion.episode is not None
        [sequence] = completion.episode.sequences
        assert sequence.token_ids.tolist() == tokens
        assert sequence.is_sampled.tolist() == mask
        total = sum(turn.reward or 0.0 for turn in completion.episode.turns)
        assert total == pytest.approx(score, abs=1e-6)


EXACT = (
    "agent_val_frozen_lake", "agent_val_frozen_lake_amd", "agent_val_frozen_lake-pg_var",
    "agentic_val_sokoban", "agentic_val_sokoban_dynamic_batching", "agentic_val_sokoban_lora",
    "agentic_sokoban_rollout_mock_dump", "../qwen3-30BA3B-agentic_fsdp2/agentic_val_sokoban_30a3",
)  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_a_file_of_a_game_without_differences_needs_no_approximation(name: str) -> None:
    file = oracle.checkout() / FOLDER / f"{name}.yaml"
    assert not translate_arguments("roll", [str(file)]).differences


def their_game(name: str) -> Any:
    """Return ROLL's environment with the options of its files."""
    if name == "frozen_lake":
        return oracle.frozen_lake(is_slippery=False, format_penalty=-0.01, max_steps=10)
    return oracle.sokoban(dim_room=(6, 6), num_boxes=1, max_steps=10, format_penalty=-0.15)
