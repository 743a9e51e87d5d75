r"""Golden rows of plugins: one row per plugin, from a hand calculation or a specification.

A new plugin needs its file and one row in the table of its kind. `test_extension_points.py` asks
for missing rows. Model families have their rows in `families.py` and `mixture_families.py`,
verifiers in `test_rewards_verifiers.py`; platforms need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msrl.data.handlers.reasoning_gym import INSTRUCTION

# --- advantage estimators: algorithms/advantages/ ---

# Rewards 1, 0, 0, 1 for responses of 1, 2, 1, 1 tokens, with gamma 0.5.
# By hand: mean 0.5, unbiased deviation sqrt(4 * 0.25 / 3) = 0.57735.
TOKENS = np.array([1.0, -1.0, -1.0, -1.0, 1.0])
OVER_TOKENS = TOKENS * 0.5 + 0.1  # distance from the mean 0.4 of the returns 1 0 0 0 1
ESTIMATORS: dict[str, np.ndarray] = {  # advantages of the five tokens
    "group_norm": TOKENS * 0.5 / math.sqrt(1 / 3),
    "dr_grpo": TOKENS * 0.5,
    "cpgd": TOKENS * 0.5,
    "rloo": TOKENS * (2 / 3),  # 1 - (0 + 0 + 1) / 3 and 0 - (1 + 0 + 1) / 3
    # The mean weighted by length is (1 + 0 + 0 + 1) / 5 = 0.4.
    "opo": np.array([0.6, -0.4, -0.4, -0.4, 0.6]),
    "pass_at_k": np.zeros(5),  # two completions are the best
    "gpg": TOKENS * 0.5,
    # Four equal norms at the first token: mean 0.5. The second token of one response has no
    # baseline.
    "optimal_token_baseline": np.array([0.5, -0.5, 0.0, -0.5, 0.5]),
    "remax": np.array([0.75, -0.25, -0.25, -0.25, 0.75]),  # the greedy response has 0.25
    "reinforce": np.array([1.0, 0.0, 0.0, 0.0, 1.0]),
    # minus the group mean: 0.5 -0.5 -0.5 -0.5 0.5. Over five tokens: mean -0.1, variance
    # (2 * 0.36 + 3 * 0.16) / 4 = 0.3.
    "reinforce_baseline": (TOKENS * 0.5 + 0.1) / math.sqrt(0.3),
    "reinforce_pp": OVER_TOKENS / math.sqrt(0.3),
    # lambda 0.5, values 0.1 to 0.5: deltas 1 - 0.1, 0.5 * 0.3 - 0.2, 0 - 0.3, 0 - 0.4, 1 - 0.5.
    # The second advantage adds a quarter of the third delta.
    "gae": np.array([0.9, -0.125, -0.3, -0.4, 0.5]),
    # Every response is one turn here and begins in the state of its prompt: gigpo is twice
    # group_norm, and step_reinforce and agentic_reinforce are the return.
    "gigpo": 2 * TOKENS * 0.5 / math.sqrt(1 / 3),
    "step_reinforce": np.array([1.0, 0.0, 0.0, 0.0, 1.0]),
    "agentic_reinforce": np.array([1.0, 0.0, 0.0, 0.0, 1.0]),
}

# --- policy losses: algorithms/losses/ ---


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a sequence, as the formula of its loss reads it."""

    log_ratio: float  # by `algo.ratio`
    advantage: float
    logprob: float
    sequence: Sequence[float]  # log-ratios of all tokens of the sequence
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return math.exp(self.log_ratio)

    @property
    def clipped_ratio(self) -> float:
        return min(max(self.ratio, 1 - self.low), 1 + self.high)


@dataclass(frozen=True, slots=True)
class LossRow:
    """Formula of a token's loss.

    `is_linear` is True if the loss is linear in the log-probability, with a constant weight.
    """

    formula: Callable[[Token], float]
    is_linear: bool = False


def _cpgd(t: Token) -> float:
    d = t.log_ratio
    clipped = min(max(d, math.log(1 - t.low)), math.log(1 + t.high))
    drift = t.ratio - 1 - d
    if t.ratio - 1 > 0.2:
        drift = 0.2 - math.log(1.2) + 0.2 * (d - math.log(1.2))
    return -min(d * t.advantage, clipped * t.advantage) + 0.01 * drift


def _gmpo(t: Token) -> float:
    sign = (t.advantage > 0) - (t.advantage < 0)
    terms = [sign * min(sign * x, sign * min(max(x, -t.low), t.high)) for x in t.sequence]
    return -t.advantage * math.exp(sum(terms) / len(terms))


def _topr(t: Token) -> float:
    taper = min(math.exp(sum(t.sequence)), 1.0) if t.advantage < 0 else 1.0
    return -taper * t.advantage * t.logprob


def _ppo(t: Token) -> float:
    return -min(t.ratio * t.advantage, t.clipped_ratio * t.advantage)


def _sapo(t: Token) -> float:
    tau = 1.0 if t.advantage > 0 else 1.05
    return -t.advantage * 4 / tau / (1 + math.exp(-tau * (t.ratio - 1)))


def _dppo(t: Token) -> float:
    change = math.exp(t.logprob) - math.exp(t.logprob - t.log_ratio)
    is_outside = change > t.high if t.advantage > 0 else -change > t.low
    return 0.0 if is_outside else -min(t.ratio, 20.0) * t.advantage * t.logprob


LOSSES: dict[str, LossRow] = {
    "ppo": LossRow(_ppo),
    "sapo": LossRow(_sapo),
    "dppo": LossRow(_dppo, is_linear=True),
    "gpg": LossRow(lambda t: -t.advantage * t.logprob),
    # Tokens that these two do not select; test_algorithms_covariance.py covers the selected ones.
    "clip_cov": LossRow(_ppo),
    "kl_cov": LossRow(lambda t: -t.ratio * t.advantage),
    "vanilla": LossRow(lambda t: -t.advantage * t.logprob),
    "tis": LossRow(lambda t: -min(t.ratio, 1.0) * t.advantage * t.logprob, is_linear=True),
    "cispo": LossRow(lambda t: -t.clipped_ratio * t.advantage * t.logprob, is_linear=True),
    "topr": LossRow(_topr, is_linear=True),
    "cpgd": LossRow(_cpgd),
    "gmpo": LossRow(_gmpo),
}

# --- preference losses: algorithms/preference/ ---


@dataclass(frozen=True, slots=True)
class Answer:
    """Log-probability of an answer under policy and reference, and its number of tokens."""

    logprob: float
    reference: float
    num_tokens: int

    @property
    def ratio(self) -> float:
        return self.logprob - self.reference

    @property
    def mean(self) -> float:
        return self.logprob / self.num_tokens


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _dpo(c: Answer, r: Answer, beta: float, margin: float) -> float:
    return -math.log(_sigmoid(beta * (c.ratio - r.ratio) - margin))


def _ipo(c: Answer, r: Answer, beta: float, margin: float) -> float:
    return (c.ratio / c.num_tokens - r.ratio / r.num_tokens - 1 / (2 * beta)) ** 2


def _simpo(c: Answer, r: Answer, beta: float, margin: float) -> float:
    return -math.log(_sigmoid(beta * (c.mean - r.mean) - 1.0 - margin))


def _cpo(c: Answer, r: Answer, beta: float, margin: float) -> float:
    return -math.log(_sigmoid(beta * (c.logprob - r.logprob) - margin)) - c.mean


def _orpo(c: Answer, r: Answer, beta: float, margin: float) -> float:
    odds = [math.exp(side.mean) / (1 - math.exp(side.mean)) for side in (c, r)]
    return -c.mean - beta * math.log(_sigmoid(math.log(odds[0] / odds[1])))


def _kto(answer: Answer, is_desirable: bool, beta: float, baseline: float) -> float:
    distance = beta * (answer.ratio - baseline)
    return 1 - _sigmoid(distance if is_desirable else -distance)


PREFERENCES: dict[str, Callable[..., float]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "cpo": _cpo,
    "orpo": _orpo,
    "kto": _kto,
}

# --- divergences: algorithms/divergences/ ---


def _kl(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True))


def _jensen_shannon(student: Sequence[float], teacher: Sequence[float]) -> float:
    mixture = [(a + b) / 2 for a, b in zip(student, teacher, strict=True)]
    return (_kl(student, mixture) + _kl(teacher, mixture)) / 2


# Functions of the probabilities of student and teacher.
DIVERGENCES: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "reverse_kl": _kl,
    "forward_kl": lambda student, teacher: _kl(teacher, student),
    "jensen_shannon": _jensen_shannon,
}

# --- prompt templates: templates/ ---

# Rendering of user "Hi", assistant "Yes" for a tokenizer with the begin-of-text token <s> and the
# end-of-text token <|im_end|>. Trained text is in double brackets; … is the rest of a long text.
_R1_QUESTION = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think><answer> answer here </answer>. Put your final answer within \\boxed{}.\nHi"
)


def _chatml(system: str, question: str = "Hi", answer: str = "Yes") -> str:
    start = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    question = f"<|im_start|>user\n{question}<|im_end|>\n"
    return f"{start}{question}<|im_start|>assistant\n[[{answer}<|im_end|>]]\n"


TEMPLATES: dict[str, str] = {
    "deepseek3": "<s><｜User｜>Hi<｜Assistant｜>[[Yes<|im_end|>]]",
    "default": "Human: Hi\nAssistant:[[Yes<|im_end|>]]\n",
    "empty": "Hi[[Yes]]",
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Yes<|eot_id|>]]"
    ),
    "mistral": "<s>[INST] Hi [/INST][[Yes<|im_end|>]]",
    "native": _chatml(""),
    "qwen": _chatml("You are a helpful assistant."),
    "qwen3": (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "[[Yes<|im_end|>]]\n"
    ),
    "qwen_math_r1": _chatml(
        "Please reason step by step, and put your final answer within \\boxed{}."
    ),
    "qwen_r1": _chatml("You are a helpful assistant.", _R1_QUESTION),
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.\n\n### Instruction:\nHi\n\n### Response:\n"
        "[[Yes<|im_end|>]]"
    ),
    "baichuan2": "<reserved_106>Hi<reserved_107>[[Yes<|im_end|>]]",
    "bailing_mini": (
        "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>[[Yes<|role_end|><|im_end|>]]"
    ),
    "chatglm2": "[gMASK]sop[Round 0]\n\n问：Hi\n\n答：[[Yes<|im_end|>]]",
    "chatglm3": "[gMASK]sop<|user|>\nHi<|assistant|>[[\nYes<|im_end|>]]",
    "chatglm3_system": (
        "[gMASK]sop<|system|>\nYou are ChatGLM3, a large language model trained by "
        "Zhipu.AI. Follow the user's instructions carefully. Respond using "
        "markdown.<|user|>\nHi<|assistant|>[[\nYes<|im_end|>]]"
    ),
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yes<|im_end|>]]",
    "chatml_de": (
        "<|im_start|>system\nDu bist ein freundlicher und hilfsbereiter "
        "KI-Assistent.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "[[Yes<|im_end|>]]"
    ),
    "cpm": "<s><用户>Hi<AI>[[Yes<|im_end|>]]",
    "deepseek2": "<s>User: Hi\n\nAssistant:[[Yes<|im_end|>]]",
    "deepseek2-lite": "<s>User: Hi\n\nAssistant:[[Yes<|im_end|>]]",
    "deepseek3_r1": (
        "<s>A conversation between User and Assistant.…within \\boxed{}. <｜User｜>"
        "Hi<｜Assistant｜>[[Yes<|im_end|>]]"
    ),
    "gemma": (
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[[Yes<end_of_turn>]]\n"
    ),
    "glm4": "[gMASK]<sop><|user|>\nHi<|assistant|>[[\nYes<|im_end|>]]",
    "glm4_moe": "[gMASK]<sop><|user|>\nHi<|assistant|><think>\n\n</think>\n\n[[\nYes<|im_end|>]]",
    "gpt_oss": (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by "
        "OpenAI.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>"
        "analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>"
        "[[Yes<|end|><|im_end|>]]"
    ),
    "hunyuan": "You are a helpful assistant.Hi[[Yes]]",
    "intern2": "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yes<|im_end|>\n]]",
    "llama2": "<s>[INST] Hi [/INST][[Yes<|im_end|>]]",
    "magistral": (
        "<s>[SYSTEM_PROMPT]system_prompt\n\nA user will ask you to solve a "
        "task.…ROMPT][INST]Hi[/INST]<think>\n\n</think>\n\n[[Yes<|im_end|>]]"
    ),
    "minicpm3": "<s>User: Hi\n\nAssistant:[[Yes<|im_end|>]]",
    "mixtral": "<s>[INST] Hi [/INST][[Yes<|im_end|>]]",
    "plm": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "Hi<|im_end|>\n<|im_start|>assistant\n[[Yes<|im_end|>\n]]"
    ),
    "qwen_lf": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "[[Yes<|im_end|>\n]]"
    ),
    "qwen_r1_mindspeed_llm": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nA "
        "conversation between User and Assistant.…d{}. Hi<|im_end|>\n<|im_start|>"
        "assistant\n[[Yes<|im_end|>]]"
    ),
    "qwen_retool": (
        "<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\n…swer goes "
        "here.'}\n<|im_start|>assistant\n[[Yes<|im_end|>]]"
    ),
    "qwen_search_tool": (
        "<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\n…swer goes "
        "here.'}\n<|im_start|>assistant\n[[Yes<|im_end|>]]"
    ),
    "rendered": "Hi[[Yes]]",
    "trl": "<s>Hi[[Yes]]",
}

# --- samplers: data/samplers/ ---

# Pools of prompts with these success rates: their members and their shares.
SUCCESS = np.array([np.nan, 0.0, 0.125, 0.2, 0.5, 0.8, 0.875, 1.0])
SAMPLERS: dict[str, list[tuple[list[int], float]]] = {
    "success_range": [([0, 3, 4, 5], 0.9), ([1, 2, 6, 7], 0.1)],
    "replay": [([2, 3, 4, 5, 6], 0.5), ([0, 1, 7], 0.5)],
}

# --- dataset handlers: data/handlers/ ---


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """A row of a file, and what the handler reads from it: turns and ground truth, or a text."""

    row: dict[str, Any]
    turns: tuple[tuple[str, str], ...] = ()
    answer: str | None = None
    text: str | None = None
    answers: tuple[str, ...] = ()  # of preference data, after `turns`
    labels: tuple[str, ...] = ()  # of steps, beside `text`
    value: float = 0.0  # margin or label of preference data


_TURNS = (("user", "1 + 1?"), ("assistant", "2"))
_CHAT = {
    "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}],
}
_RECORD = {"task": "chain_sum", "parameters": {"size": 1, "seed": 0}, "index": 0}
HANDLERS: dict[str, HandlerRow] = {
    "reasoning_gym": HandlerRow(
        {"question": "1 + 1?", "answer": "2", "record": _RECORD},
        (("user", f"1 + 1?\n\n{INSTRUCTION}"),),
        '{"task": "chain_sum", "parameters": {"size": 1, "seed": 0}, "index": 0}',
    ),
    "alpaca": HandlerRow({"instruction": "1 + 1?", "output": "2"}, _TURNS),
    "gsm8k": HandlerRow(
        {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"},
        (("user", "1 + 1?"), ("assistant", "1 + 1 = 2\n#### 2")),
        answer="2",
    ),
    "pretrain": HandlerRow({"text": "One document."}, text="One document."),
    "r1": HandlerRow({"instruction": "1 + 1?", "output": "2"}, _TURNS[:1], answer="2"),
    "sharegpt": HandlerRow(_CHAT, _TURNS),
    "auto": HandlerRow(_CHAT, _TURNS),
    "sharegpt_pretrain": HandlerRow(_CHAT, text="1 + 1?2"),
    "alpaca_pairs": HandlerRow(
        {"instruction": "1 + 1?", "chosen": "2", "rejected": "3"}, _TURNS[:1], answers=("2", "3")
    ),
    "sharegpt_pairs": HandlerRow(
        {
            "conversations": _CHAT["conversations"][:1],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        _TURNS[:1],
        answers=("2", "3"),
    ),
    "pairs": HandlerRow(
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3", "margin": 0.5},
        _TURNS[:1],
        answers=("2", "3"),
        value=0.5,
    ),
    "steps": HandlerRow(
        {"input": "1 + 1? Two. ки", "value": ["+"]}, text="1 + 1? Two. ки", labels=("+",)
    ),
    "labeled": HandlerRow(
        {"prompt": "1 + 1?", "completion": "2", "label": True},
        _TURNS[:1],
        answers=("2",),
        value=1.0,
    ),
}

# --- trackers: tracking/trackers/ ---


def _tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def wandb_records(file: Path) -> list[bytes]:
    """Return the records of a .wandb file.

    The format is LevelDB's log format (doc/log_format.md) after a header of seven bytes.
    """
    data, at, records, record = file.read_bytes(), 7, list[bytes](), b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the end of a block
            at += 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or its last fragment
            records.append(record)
            record = b""
    return records


def _wandb(folder: Path) -> list[tuple[int, float]]:
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(data) for data in wandb_records(file)]
    rows = [
        {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
    ]
    return [
        (json.loads(row["_step"]), json.loads(row["train/loss"]))
        for row in rows
        if "train/loss" in row
    ]


def _swanlab(folder: Path) -> list[tuple[int, float]]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    (file,) = folder.glob("swanlab/run-*/*.swanlab")  # its blocks have the form of W&B's files
    records = [Record.FromString(data) for data in wandb_records(file)]
    scalars = [record.scalar for record in records if record.HasField("scalar")]
    return [(row.step, row.value.number) for row in scalars if row.key == "train/loss"]


def _mlflow(folder: Path) -> list[tuple[int, float]]:
    import sqlite3

    with sqlite3.connect(folder / "mlflow" / "mlflow.db") as database:
        query = "SELECT step, value FROM metrics WHERE key = 'train/loss' ORDER BY step"
        return database.execute(query).fetchall()


def _trackio(folder: Path) -> list[tuple[int, float]]:
    import json
    import sqlite3

    with sqlite3.connect(folder / "trackio" / "msrl.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    return [(step, json.loads(metrics)["train/loss"]) for step, metrics in rows]


def _clearml(folder: Path) -> list[tuple[int, float]]:
    import json

    (file,) = folder.glob("clearml/offline/*/metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    scalars = [e for e in events if (e.get("metric"), e.get("variant")) == ("train", "loss")]
    return [(event["iter"], event["value"]) for event in scalars]


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """Reader of what a tracker wrote to a run folder: steps and values of `train/loss`.

    `package` is skipped where it is not installed, and `env` is set while the tracker runs.
    """

    read: Callable[[Path], list[tuple[int, float]]]
    package: str
    env: tuple[tuple[str, str], ...] = ()


TRACKERS: dict[str, TrackerRow] = {
    "clearml": TrackerRow(_clearml, "clearml", (("CLEARML_OFFLINE_MODE", "1"),)),
    "mlflow": TrackerRow(_mlflow, "mlflow"),
    "swanlab": TrackerRow(_swanlab, "swanlab", (("SWANLAB_MODE", "offline"),)),
    "tensorboard": TrackerRow(_tensorboard, "tensorboard"),
    "trackio": TrackerRow(_trackio, "trackio"),
    "wandb": TrackerRow(_wandb, "wandb", (("WANDB_MODE", "offline"),)),
}

# --- presets: config/presets/ ---

# Keys of `algo` that a preset sets, with the numbers of its paper.
_TOKEN_CLIP = {"policy_loss": "ppo", "clip.low": 0.2, "clip.high": 0.2}
PRESETS: dict[str, dict[str, Any]] = {
    "cispo": {
        "advantage.estimator": "group_norm",
        "policy_loss": "cispo",
        "clip.low": 1.0,
        "clip.high": 4.0,
        "aggregate.mode": "token-mean",
    },
    "cpgd": {
        "advantage.estimator": "cpgd",
        "policy_loss": "cpgd",
        "clip.low": 0.2,
        "clip.high": 0.2,
        "aggregate.mode": "token-mean",
    },
    "dapo": {
        "advantage.estimator": "group_norm",
        "policy_loss": "ppo",
        "clip.low": 0.2,
        "clip.high": 0.28,
        "aggregate.mode": "token-mean",
        "mask.equal_groups": True,
    },
    "dr_grpo": {
        **_TOKEN_CLIP,
        "advantage.estimator": "dr_grpo",
        "aggregate.mode": "seq-sum-over-constant",
    },
    "gmpo": {
        "advantage.estimator": "group_norm",
        "policy_loss": "gmpo",
        "clip.low": 0.4,
        "clip.high": 0.4,
        "aggregate.mode": "seq-mean-token-mean",
    },
    "grpo": {
        **_TOKEN_CLIP,
        "advantage.estimator": "group_norm",
        "aggregate.mode": "seq-mean-token-mean",
        "kl.loss.coef": 0.001,
        "kl.loss.estimator": "k3",
    },
    "gspo": {
        "advantage.estimator": "group_norm",
        "ratio": "sequence",
        "policy_loss": "ppo",
        "clip.low": 3e-4,
        "clip.high": 4e-4,
        "aggregate.mode": "seq-mean-token-mean",
    },
    "ppo": {
        **_TOKEN_CLIP,
        "advantage.estimator": "gae",
        "advantage.gamma": 1.0,
        "advantage.lambda": 0.95,
        "advantage.whiten": True,
        "aggregate.mode": "token-mean",
        "value.clip": 0.2,
    },
    "reinforce": {
        "advantage.estimator": "reinforce",
        "policy_loss": "vanilla",
        "aggregate.mode": "seq-mean-token-sum",
    },
    "reinforce_pp": {
        **_TOKEN_CLIP,
        "advantage.estimator": "reinforce_pp",
        "aggregate.mode": "token-mean",
        "kl.reward.coef": 0.001,
        "kl.reward.estimator": "k1",
    },
    "rloo": {
        **_TOKEN_CLIP,
        "advantage.estimator": "rloo",
        "aggregate.mode": "seq-mean-token-sum",
    },
    "topr": {
        "advantage.estimator": "dr_grpo",
        "policy_loss": "topr",
        "aggregate.mode": "seq-mean-token-sum",
    },
}
