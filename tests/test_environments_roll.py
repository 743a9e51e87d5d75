"""The frozen lake shows the maps and prompts of ROLL's own environment, byte for byte."""

from __future__ import annotations

import random

import pytest

import roll_oracle as oracle
from msrl.environments.builtin import sokoban
from msrl.environments.builtin.frozen_lake import environment
from msrl.errors import MsrlError
from support import mentions

SYMBOLS = ["P", "_", "O", "G", "X", "√"]
TEMPLATE = "Turn {turn_idx}:\n{observation}\n{{left}}: {actions_left}, {max_response_length}\n"
PATTERN = "<answer>(.*?)</answer>"
ANSWERS = [
    "<answer>Right</answer>", "<answer> down </answer>", "<answer>LEFT</answer><|im_end|>",
    "<think>no</think><answer>up</answer>", "right", "<answer>jump</answer>",
    "<answer>Up</answer> or <answer>Left</answer>", "<think><answer>Down</answer>",
]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4, 6])
@pytest.mark.parametrize("seed", range(8))
def test_the_frozen_lake_has_the_maps_prompts_and_rewards_of_roll(size: int, seed: int) -> None:
    theirs = oracle.frozen_lake(size=size, p=0.8, is_slippery=False, format_penalty=-0.01)
    observation, info = theirs.reset(seed=seed)
    talk = oracle.Conversation("Be good.", TEMPLATE, max_steps=6, max_tokens=64)
    ours = environment(
        size=size, hole_share=0.2, max_steps=6, invalid_reward=-0.01, random_ends=True,
        symbols=SYMBOLS, action_pattern=PATTERN, template=TEMPLATE, system="Be good.",
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
