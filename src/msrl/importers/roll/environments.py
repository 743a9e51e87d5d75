"""Environments of agentic ROLL files: `custom_envs` by tag, and the groups of `train_env_manager`.

A tag has an `env_type` and its `env_config`. A step has rollout_batch_size trajectories in groups
of group_size, and num_groups_partition shares the groups among the tags. Source: ROLL 8eb27cc2,
roll/pipeline/agentic/agentic_config.py, env_manager/ and env/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from msrl.config.sources import wrap
from msrl.errors import did_you_mean, similar
from msrl.importers.roll.instructions import game_texts
from msrl.importers.roll.questions import QUESTIONS, tool_turns, translate_questions
from msrl.importers.sections import Keys, settings_of
from msrl.importers.status import KeyStatus
from msrl.importers.translation import SourceKey, Translation

_TURN_ESTIMATORS = ("gigpo", "step_reinforce")
_OWN_TURNS = "the original joins turns in another way"
_NO_TEXTS = (
    "the instructions are in a checkout of the original, and none is above this file: msrl has "
    "words of its own"
)
_OWN_TEXTS = "msrl has words of its own in the messages"
_OPEN_PATTERN = "the pattern may match the token that ends an answer, which msrl does not show it"
_CONTROL = "control tokens in the texts, which msrl shows as text"
_FIELDS = ("observation", "turn_idx", "actions_left", "max_response_length")
_TEMPLATE_FIELD = re.compile(r"(?<!\{)\{(\w*)\}")


def put_environments(translation: Translation, top: Keys, manager: Keys, infer: Keys) -> bool:
    """Translate the environments of the tags that the training uses.

    `manager` holds the keys of train_env_manager. Return True if the file is one of v0.1.0.
    """
    tags, weights = _tags(manager)
    custom = top.get("custom_envs")
    nodes = custom.node.value if custom is not None else {}
    envs = [_CustomEnv(translation, tag, nodes) for tag in tags if _has(top, nodes, tag)]
    for env in envs if len(envs) > 1 else []:
        if env.keys.value("env_type") in QUESTIONS:
            text = "not supported with several tags: the verifier of questions scores all rows"
            env.keys.add_error("env_type", text)
    translated = [env.translate() for env in envs]
    if translated and custom is not None:
        _put_choice(translation, custom, dict(zip(tags, translated, strict=False)), weights)
        _put_limits(translation, custom, top, envs, manager, infer)
        _put_turns(translation, custom, top, envs)
    _put_manager(manager, is_early=is_early(envs))
    for key, text in _MANAGER.items():
        manager.record(key, KeyStatus.APPLIED, text)
    for key in ("max_actions_per_traj", "max_tokens_per_step", "env_manager_cls"):
        top.record(key, KeyStatus.APPLIED, "read by custom_envs")
    manager.apply_remaining()
    _put_turn_estimator(translation, top)
    return is_early(envs)


def is_early(envs: Sequence[_CustomEnv]) -> bool:
    """Return True if a file was written for v0.1.0, whose templates show a `state`."""
    templates = [str(env.keys.value("agent_template") or "") for env in envs]
    has_rewards = any(env.keys.get("reward_template") is not None for env in envs)
    return has_rewards or any("{state}" in template for template in templates)


def _put_manager(manager: Keys, *, is_early: bool) -> None:
    """Translate the penalty of v0.1.0 for invalid actions, and check the class of the workers."""
    entry = manager.get("format_penalty")
    if entry is not None and is_early:
        penalty = -float(manager.real("format_penalty", 0.0))
        if penalty < 0:
            manager.add_error("format_penalty", "not supported: a bonus for invalid actions")
        else:
            why = "v0.1.0 adds the negative number to the reward"
            manager.assign("format_penalty", ["environment.format_penalty"], penalty, why=why)
    text = "only v0.1.0 reads it here; later versions read it in env_config"
    manager.record("format_penalty", KeyStatus.DEAD, text)
    worker = manager.get("worker_cls")
    name = "" if worker is None else str(worker.value or "").rpartition(".")[2]
    if name not in ("", "EnvironmentWorker"):
        text = "not supported: a worker of your own. Use environment.path for its logic"
        manager.add_error("worker_cls", text)
    manager.record("worker_cls", KeyStatus.SAME, "msrl runs every episode in a process")


_MANAGER = {
    "group_size": "rollout.samples_per_prompt",
    "tags": "environment.name, or environment.mixture",
    "num_groups_partition": "environment.mixture.TAG.weight",
    "n_groups": "environment.mixture.TAG.weight",
    "generating_args": "environment.max_turn_tokens, rollout.sampling; those of actor_infer win",
    "num_env_groups": "a step has rollout_batch_size trajectories; rows of the data are groups",
}


def manager_keys(top: Keys) -> Keys:
    """Return the keys of train_env_manager."""
    name, translation = "train_env_manager", top.translation
    entry = top.get(name)
    if entry is not None:
        translation.record(entry, KeyStatus.APPLIED, "key by key")
    node = entry.node if entry is not None else None
    return Keys.read(translation, "env_manager", node, name)


def group_size(manager: Keys) -> int:
    """Return the number of trajectories of a group; 1, with an error, if it is invalid."""
    entry = manager.get("group_size")
    size = 1 if entry is None else entry.value
    if _is_integer(size) and size > 0:
        return size
    manager.add_error("group_size", "must be an integer of 1 or more")
    return 1


def _tags(manager: Keys) -> tuple[list[str], list[float]]:
    """Return the tags of the training, and the number of groups of each; none if invalid."""
    named = manager.get("tags")
    tags = ["SimpleSokoban"] if named is None else [str(tag) for tag in _list(named.value)]
    if not tags:
        manager.add_error("tags", "must be a list of names of custom_envs")
    entry = manager.get("num_groups_partition", "n_groups")
    if entry is None or not tags:
        return tags, [1.0] * len(tags)
    counts = _list(entry.value)
    if len(counts) != len(tags) or not all(_is_integer(count) for count in counts):
        manager.add_error(entry.key, "must have a number of groups for every tag")
        return tags, [1.0] * len(tags)
    return tags, [float(count) for count in counts]


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _has(top: Keys, nodes: Any, tag: str) -> bool:
    if isinstance(nodes, dict) and tag in nodes:
        return True
    names = list(cast("dict[str, Any]", nodes)) if isinstance(nodes, dict) else []
    hint = f"; {did_you_mean(close)}" if (close := similar(tag, names)) else ""
    top.translation.errors.append(
        f"{top.translation.name}: custom_envs.{tag}: missing. Define the environment of this "
        f"tag{hint}"
    )
    return False


class _CustomEnv:
    """One environment of `custom_envs`."""

    def __init__(self, translation: Translation, tag: str, nodes: Any) -> None:
        path = f"custom_envs.{tag}"
        self._translation = translation
        self.keys = Keys.read(translation, "custom_env", nodes[tag], path)
        config = self.keys.get("env_config")
        node = config.node if config is not None else None
        self._config = Keys.read(translation, "env_config", node, f"{path}.env_config")

    def translate(self) -> dict[str, Any]:
        """Return the environment as a part of the section `environment`."""
        kind = str(self.keys.value("env_type"))
        entry = self.keys.get("env_type")
        if entry is None or kind not in ENVIRONMENTS:
            self.keys.add_error(
                "env_type",
                f"not supported: msrl has {', '.join(ENVIRONMENTS)} of these. Use "
                "environment.path for an environment of your own.",
            )
            return {}
        if kind in QUESTIONS:
            self.keys.record("env_config", KeyStatus.APPLIED, "key by key")
            environment = translate_questions(self.keys, self._config, entry)
            self._put_manager()
            return environment
        if self.keys.get("tool_wrapper") is not None:
            text = "not supported: tools around a game. Use environment.path"
            self.keys.add_error("tool_wrapper", text)
        name, make_options = _KINDS[kind]
        self._translation.record(entry, KeyStatus.APPLIED, f"environment.name: {name}")
        self.keys.record("env_config", KeyStatus.APPLIED, "environment.options, key by key")
        options = {**make_options(self._config), **self._own_texts(entry, name)}
        self._put_manager()
        self._record_config(options)
        return {"name": name, "options": options}

    def _own_texts(self, entry: SourceKey, name: str) -> dict[str, Any]:
        """Return the options that show the texts of the original, if the file is a newer one."""
        shows = self.shows_messages
        options = self._symbols(name) if shows else None
        if options is None:
            options, reasons = {}, [_NO_TEXTS] if shows else [_OWN_TURNS, _OWN_TEXTS]
        else:
            reasons = _remaining_differences(options)
            for key in ("agent_system_template", "agent_template"):
                text = f"environment.options.{_OPTIONS[key]}"
                self.keys.record(key, KeyStatus.APPLIED, text)
        if name == "frozen_lake":
            options["random_ends"] = True
        else:
            reasons += self._early_end()
        if reasons:
            self._translation.report_difference(entry, "; ".join(reasons))
        return options

    def _early_end(self) -> list[str]:
        """Return a reason if rooms of the original end before the last turn of an episode."""
        limit, turns = self._config.real("max_steps", 20), self.keys.number("max_steps")
        is_early = turns is not None and limit < turns
        return [f"the original ends rooms after {limit} steps of {turns}"] if is_early else []

    @property
    def is_game(self) -> bool:
        return self.keys.value("env_type") in _KINDS

    @property
    def shows_messages(self) -> bool:
        """Return True if each turn is a message with the fields of msrl's template."""
        manager = str(self.keys.value("env_manager_cls") or "").rpartition(".")[2]
        template, system = (
            self.keys.value(key) for key in ("agent_template", "agent_system_template")
        )
        if manager not in ("", "TrajEnvManager") or not isinstance(template, str):
            return False
        names = _TEMPLATE_FIELD.findall(template)
        return isinstance(system, str) and bool(names) and all(name in _FIELDS for name in names)

    def _symbols(self, name: str) -> dict[str, Any] | None:
        """Return texts and symbols; None without a checkout of the original."""
        texts = game_texts(self._translation.name, name)
        config = self._config
        if texts is None or config.get("action_lookup", "map_lookup") is not None:
            return None
        lookup, vocabulary = config.get("grid_lookup"), config.get("grid_vocab")
        own = settings_of(lookup)
        symbols = {int(key): str(value) for key, value in own.items() if str(key).isdigit()}
        instruction = config.value("env_instruction")
        return {
            "symbols": [{**texts.symbols, **symbols}[key] for key in sorted(texts.symbols)],
            "instructions": texts.instructions(
                instruction if isinstance(instruction, str) else None,
                settings_of(vocabulary) if vocabulary is not None else None,
            ),
            "action_pattern": str(config.value("action_pattern") or "<answer>(.*?)</answer>"),
            "template": str(self.keys.value("agent_template")),
            "system": str(self.keys.value("agent_system_template")),
            "max_response_length": self.keys.number("max_tokens_per_step") or 0,
            "max_steps": self.keys.number("max_steps") or config.real("max_steps", 20),
        }

    def _put_manager(self) -> None:
        """Check the class that builds prompts."""
        name = str(self.keys.value("env_manager_cls") or "").rpartition(".")[2]
        entry = self.keys.get("env_manager_cls")
        if entry is None or name == "TrajEnvManager":
            self.keys.record("env_manager_cls", KeyStatus.SAME, "an episode is one sequence")
        elif name == "StepEnvManager":
            self._translation.difference(
                entry, "every turn is a sequence with the last history_length turns only"
            )
        elif name == "AgentNativeStepEnvManager":
            self._translation.set("environment.history", wrap("template", entry.origin))
            self._translation.difference(entry, "every turn is a sequence of all messages so far")
        else:
            self._translation.add_error(entry, f"not supported: {name}")
        for key in ("agent_system_template", "agent_template", "reward_template"):
            entry = self.keys.get(key)
            is_open = entry is not None and not self._translation.is_recorded(entry)
            if entry is not None and is_open and entry.value is not None:
                self._translation.difference(entry, "text around the observations of a turn")
        for key in ("max_steps", "max_tokens_per_step"):
            text = "environment.max_turns" if key == "max_steps" else "environment.max_turn_tokens"
            self.keys.record(key, KeyStatus.APPLIED, text)
        self.keys.apply_remaining()

    def _record_config(self, options: Mapping[str, Any]) -> None:
        for entry in self._config:
            pattern = entry.key == "action_pattern"
            name = _OPTIONS.get(entry.key)
            if name in options and entry.key in ("action_pattern", "grid_lookup", "grid_vocab"):
                text = f"environment.options.{name}"
                self._translation.record(entry, KeyStatus.APPLIED, text)
            elif pattern and entry.value != "<answer>(.*?)</answer>":
                self._translation.difference(entry, "msrl reads the last <answer> of an answer")
            elif pattern:
                self._translation.record(entry, KeyStatus.SAME, "msrl reads <answer> tags")
            elif entry.key in _OPTIONS and _OPTIONS[entry.key] in options:
                text = f"environment.options.{_OPTIONS[entry.key]}"
                self._translation.record(entry, KeyStatus.APPLIED, text)
            else:
                self._translation.difference(entry, "msrl's environment has no such option")


def _remaining_differences(options: Mapping[str, Any]) -> list[str]:
    """Return why texts of a game have other tokens or actions in msrl."""
    texts = [str(options[key]) for key in ("system", "template", "instructions")]
    reasons = [_CONTROL] if any("<|" in text for text in texts) else []
    is_closed = str(options["action_pattern"]).endswith("</answer>")
    return reasons if is_closed else [*reasons, _OPEN_PATTERN]


_OPTIONS = {  # options of msrl's environments by the keys of env_config
    "size": "size",
    "dim_room": "size",
    "dim_x": "size",
    "dim_y": "size",
    "p": "hole_share",
    "is_slippery": "slippery",
    "max_steps": "max_steps",
    "format_penalty": "invalid_reward",
    "env_instruction": "instructions",
    "num_boxes": "num_boxes",
    "search_depth": "search_depth",
    "action_pattern": "action_pattern",
    "grid_lookup": "symbols",
    "grid_vocab": "symbols",
    "agent_template": "template",
    "agent_system_template": "system",
}


_SEARCH_DEPTH = 300  # of the original's rooms


def _frozen_lake(config: Keys) -> dict[str, Any]:
    """Return the options of frozen_lake, with the defaults of the original."""
    frozen = config.real("p", 0.8)
    options = {
        "size": config.real("size", 4),
        "hole_share": round(1 - frozen, 6),
        "slippery": config.switch("is_slippery", default=True),
        "max_steps": config.real("max_steps", 20),
        "invalid_reward": float(config.real("format_penalty", 0.0)),
    }
    return _with_instructions(options, config)


def _sokoban(
    config: Keys, size: int = 10, num_boxes: int = 4, max_steps: int = 20, penalty: float = 0.0
) -> dict[str, Any]:
    """Return the options of sokoban, with the defaults and rewards of the original."""
    room, key = config.value("dim_room"), "dim_room"
    sizes: list[Any] = [size] if room is None else _list(room)
    if config.get("dim_x", "dim_y") is not None:  # of v0.1.0
        sizes, key = [config.value("dim_x"), config.value("dim_y")], "dim_x"
    if not sizes or not all(_is_integer(side) for side in sizes):
        config.add_error(key, "must be a list of integers, or dim_x and dim_y")
        sizes = [size]
    elif any(side != sizes[0] for side in sizes):
        config.add_error(key, "not supported: msrl's rooms are square")
    options = {
        "size": sizes[0],
        "num_boxes": config.real("num_boxes", num_boxes),
        "search_depth": config.real("search_depth", _SEARCH_DEPTH),
        "max_steps": config.real("max_steps", max_steps),
        "invalid_reward": float(config.real("format_penalty", penalty)),
        "step_reward": -0.1,
        "box_reward": 1.0,
        "success_reward": 10.0,
    }
    return _with_instructions(options, config)


def _native_sokoban(config: Keys) -> dict[str, Any]:
    """Return the options of sokoban_native_env, which has other defaults."""
    return _sokoban(config, size=6, num_boxes=1, max_steps=10, penalty=-0.1)


_KINDS: dict[str, tuple[str, Callable[[Keys], dict[str, Any]]]] = {
    "frozen_lake": ("frozen_lake", _frozen_lake),
    "sokoban": ("sokoban", _sokoban),
    "sokoban_native_env": ("sokoban", _native_sokoban),
}
ENVIRONMENTS = (*_KINDS, *QUESTIONS)


def _with_instructions(options: dict[str, Any], config: Keys) -> dict[str, Any]:
    text = config.value("env_instruction")
    return {**options, "instructions": text} if isinstance(text, str) else options


def _put_choice(
    translation: Translation,
    custom: SourceKey,
    environments: Mapping[str, dict[str, Any]],
    weights: Sequence[float],
) -> None:
    """Set the only environment, or the mixture of several."""
    if len(environments) == 1:
        (environment,) = environments.values()
        for key, value in environment.items():
            translation.set(f"environment.{key}", wrap(value, custom.origin))
        return translation.record(custom, KeyStatus.APPLIED, "environment.name and options")
    pairs = zip(environments.items(), weights, strict=False)
    mixture = {tag: {**environment, "weight": weight} for (tag, environment), weight in pairs}
    return translation.assign(custom, ["environment.mixture"], mixture)


def _put_limits(
    translation: Translation,
    custom: SourceKey,
    top: Keys,
    envs: Sequence[_CustomEnv],
    manager: Keys,
    infer: Keys,
) -> None:
    """Set the largest numbers of turns and of tokens per turn."""
    turns = [env.keys.number("max_steps") for env in envs]
    turns = [count for count in [*turns, top.number("max_actions_per_traj")] if count]
    calls = [count for env in envs if (count := tool_turns(env.keys)) is not None]
    if turns or calls:
        largest = min([*calls, *([max(turns)] if turns else [])])
        translation.set("environment.max_turns", wrap(largest, custom.origin))
    tokens = [count for env in envs if (count := env.keys.number("max_tokens_per_step"))]
    limit = _answer_tokens(manager, infer)
    if tokens or limit:
        value = min([max(tokens or [limit or 0]), *([limit] if limit else [])])
        translation.set("environment.max_turn_tokens", wrap(value, custom.origin))


def _put_turns(
    translation: Translation, custom: SourceKey, top: Keys, envs: Sequence[_CustomEnv]
) -> None:
    """Join turns as TrajEnvManager does, and limit the sequence of an episode."""
    if not all(env.is_game and env.shows_messages for env in envs):
        return
    translation.set("environment.history", wrap("separate", custom.origin))
    translation.set("environment.enable_thinking", wrap(False, custom.origin))
    total = top.number("sequence_length") if top.get("sequence_length") else None
    if total is not None:
        origin = top.origin("sequence_length")
        translation.set("environment.max_tokens", wrap(total, origin))
    limits = {env.keys.number("max_tokens_per_step") for env in envs}
    if len(limits) > 1:
        text = "the original limits the answers of each tag, msrl all by the largest limit"
        translation.report_difference(custom, text)


def _answer_tokens(manager: Keys, infer: Keys) -> int | None:
    """Return max_new_tokens, the length of an answer: of actor_infer, else of the manager."""
    if infer.get("max_new_tokens") is not None:
        return infer.number("max_new_tokens")
    entry = manager.get("generating_args")
    value = settings_of(entry).get("max_new_tokens")
    if value is None or _is_integer(value):
        return value
    manager.add_error("generating_args", "max_new_tokens must be an integer")
    return None


def _put_turn_estimator(translation: Translation, top: Keys) -> None:
    """Translate the weights and the discount of estimators that work by turn."""
    estimator = str(top.value("adv_estimator"))
    options: dict[str, Any] = {}
    if estimator in ("gigpo", "step_reinforce"):
        options["step_gamma"] = top.real("step_reward_gamma", 0.95)
        top.record("step_reward_gamma", KeyStatus.APPLIED, "algo.advantage.options.step_gamma")
    center, scale = reward_scopes(top)
    if estimator == "step_reinforce" and center != "none":
        options["center"] = center
    if estimator == "step_reinforce" and scale != "none":
        options["scale"] = scale
    if estimator == "gigpo" and center in ("batch", "tag"):
        options["grouping"] = center
    if estimator == "gigpo" and (center, scale) == ("none", "none"):
        entry = top.get("reward_normalization") or top.get("adv_estimator")
        assert entry is not None
        text = "the original subtracts no means with method=identity, gigpo of msrl does"
        translation.report_difference(entry, text)
    if estimator == "step_reinforce" and scale == "batch" and (scope := _grouping(top)) != "batch":
        options["zero_alone"] = scope
    name = top.get("adv_estimator")
    if estimator == "gigpo" and name is not None:
        text = "the original compares turns of all groups that began in the same state"
        translation.report_difference(name, f"{text}, msrl those of one group")
    if estimator == "gigpo":
        options["count"] = "turns"
        options["omega"] = _omega(translation, top)
        options["normalize"] = _method(top) in _SCALED
    if options:
        origin = top.origin("adv_estimator")
        translation.set(_OPTIONS_KEY, wrap(options, origin))
    for key in ("step_reward_gamma", "step_reward_weight", "episode_reward_weight"):
        top.record(key, KeyStatus.DEAD, "read by gigpo and step_reinforce only")


def _omega(translation: Translation, top: Keys) -> float:
    """Return the weight of turns relative to the weight of episodes."""
    step, episode = (
        float(top.real(key, 1.0)) for key in ("step_reward_weight", "episode_reward_weight")
    )
    entry = top.get("episode_reward_weight")
    if entry is not None and episode != 1.0:
        translation.difference(entry, "the scale of all advantages; msrl weighs episodes by 1")
    top.record("episode_reward_weight", KeyStatus.SAME, "msrl weighs episodes by 1")
    top.record("step_reward_weight", KeyStatus.APPLIED, "algo.advantage.options.omega")
    return step / episode if episode else step


GROUPINGS = {  # scopes of msrl by `grouping`; state and inductive come from ROLL's guide
    "batch": "batch",
    "traj_group_id": "group",
    "state": "group",
    "tags": "tag",
    "inductive": "tag",
}
NORM_TYPES = ("batch", "group")  # values of norm_mean_type and norm_std_type
_SCALED = ("mean_std", "asym_clip")


def norm_scopes(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the scopes of the mean and the deviation of the section `reward_normalization`.

    The type `group` is the scope of `grouping`. A type that is not set follows from `method`.
    """
    group = GROUPINGS.get(str(settings.get("grouping") or "batch"), "group")
    method = str(settings.get("method") or "identity")
    types = {"batch": "batch", "group": group}
    center = group if method in ("mean", *_SCALED) else "none"
    scale = group if method in _SCALED else "none"
    mean_type, std_type = settings.get("norm_mean_type"), settings.get("norm_std_type")
    return types.get(str(mean_type), center), types.get(str(std_type), scale)


def _grouping(top: Keys) -> str:
    """Return the scope of `grouping`."""
    grouping = settings_of(top.get("reward_normalization")).get("grouping")
    return GROUPINGS.get(str(grouping or "batch"), "group")


def _method(top: Keys) -> str:
    return str(settings_of(top.get("reward_normalization")).get("method", "identity"))


_OPTIONS_KEY = "algo.options"


def reads_turns(top: Keys) -> bool:
    """Return True if the estimator normalizes rewards of turns itself."""
    return str(top.value("adv_estimator")) in _TURN_ESTIMATORS


def reward_scopes(top: Keys) -> tuple[str, str]:
    """Return the scopes of the mean and the deviation by which an agentic run normalizes."""
    return norm_scopes(settings_of(top.get("reward_normalization")))
