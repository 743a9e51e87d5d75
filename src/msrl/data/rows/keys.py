"""Keys of rows, turns and content blocks that decide what is trained, shown or masked.

A handler reads some keys. Of the others, a key with a meaning is refused by name if its value says
something, and every other key is counted as not read. A key has a meaning if its name is one of the
spellings of a `Meaning`, or contains one of its words. Names are compared without case, separators
and plural: `lossMask`, `loss-masks` and `LOSS_MASK` are one name. A name that ends in a word such
as `id` or `source` describes something, and has no meaning itself.

Sources of the spellings: documentation and code of ms-swift 4.3, LLaMA-Factory, slime, TRL, verl,
axolotl, ROLL, MindSpeed-LLM and MindSpeed-RL, OpenAI's and Anthropic's messages, OpenRouter,
harmony (gpt-oss), and data sets of the hubs. docs/data.md has the same table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast
from unicodedata import normalize

from msrl.data.columns import is_empty
from msrl.errors import MsrlError

MARKS = (
    "loss", "loss_scale", "loss_weight", "loss_mask", "step_loss_mask", "weight", "train",
    "training", "trainable", "trained", "is_trained",
)  # fmt: skip
"""Keys of a turn or a block that say whether an answer is trained: true, false, 1 or 0."""
_MARKS = frozenset(MARKS)
# Marks that have no effect on turns other than answers in the systems that define them.
_MARKS_OF_ANSWERS = frozenset({"loss", "loss_scale", "loss_weight", "step_loss_mask", "weight"})
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts")
"""Keys of a turn that hold its thought."""
DETAILS = "reasoning_details"
_TURN_KEYS = frozenset(
    {"role", "from", "content", "value", "name", "tool_call_id", "tool_calls", "function_call"}
    | {*MARKS, *THOUGHTS, DETAILS}
)
_BLOCK_KEYS = frozenset(
    {"type", "text", "value", "content", "thinking", "signature", "cache_control", *MARKS}
    | {"id", "name", "input", "tool_use_id"}
)
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "source")
"""Keys of a content part that hold its image."""
_IMAGE_KEYS = _BLOCK_KEYS | {*IMAGE_KEYS, "detail"}
# Names that would have a meaning by one of their words.
_HARMLESS = frozenset({"paralleltoolcall", "toolchoice", "toolkwarg", "needtoolkwarg"})
# A name that ends in one of these words describes something.
_DESCRIPTIONS = frozenset({
    "id", "uuid", "hash", "count", "num", "number", "len", "length", "time", "timestamp", "date",
    "version", "source", "origin", "language", "lang", "model", "author", "license", "split",
    "dataset", "url", "type", "category",
})  # fmt: skip
# A name such as `correct_answer` holds an answer, not a verdict on one.
_ANSWERS = frozenset(
    ["answer", "option", "choice", "response", "letter", "index", "idx", "solution"]
)
_TRUTHS = {
    **dict.fromkeys(("true", "yes", "correct", "desirable", "1"), True),
    **dict.fromkeys(("false", "no", "incorrect", "wrong", "undesirable", "0"), False),
}
_TRUNCATIONS = frozenset(("length", "max_tokens", "content_filter", "incomplete"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\d_A-Za-z]+|\d+")


def truth(value: Any) -> bool | None:
    """Return a truth value, also as 0 or 1 or in the text form of CSV files; None for others."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    return _TRUTHS.get(value.strip().lower()) if isinstance(value, str) else None


def _is_present(value: Any) -> bool:
    return not is_empty(value)


def _is_true(value: Any) -> bool:
    return _is_present(value) and truth(value) is not False


def _is_no_full_weight(value: Any) -> bool:
    return _is_present(value) and truth(value) is not True


def _is_label(value: Any) -> bool:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    return any(truth(item) is not None for item in values)


def _is_negative(value: Any) -> bool:
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    return any(truth(item) is False for item in values)


def _is_positive(value: Any) -> bool:
    return truth(value) is True


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(cast("list[Any]", value))


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_text, cast("list[Any]", value)))
    return isinstance(value, str | dict) and _is_present(value)


def _is_truncated(value: Any) -> bool:
    return _is_positive(value) or (isinstance(value, str) and value.lower() in _TRUNCATIONS)


def _is_set(value: Any) -> bool:
    return value is not None and not is_empty(value)


@dataclass(frozen=True, slots=True)
class Meaning:
    """A class of keys.

    Attributes:
        title: Its name in docs/data.md.
        keys: Names of the class, in the spelling of their sources.
        words: Words that give any name that contains one of them this meaning.
        says: Whether a value says something.
        problem: Why a key that is not read is refused.
        remedy: What to do instead of ignoring the key.
        kinds: Kinds of data for which it is refused.
    """

    title: str
    keys: tuple[str, ...]
    words: tuple[str, ...]
    says: Callable[[Any], bool]
    problem: str
    remedy: str
    kinds: frozenset[str]


_ALL = frozenset({"sft", "prompts", "pairs", "labeled", "steps", "pretrain"})
_CHATS = _ALL - {"pretrain"}
_NO_MASK = "it does not mask or weight parts of a row"
_MASK_REMEDY = 'Write "loss": false into the turns that are context only, or remove the row'
MEANINGS = (
    Meaning(
        "token ids",
        ("input_ids", "token_ids", "attention_mask", "position_ids", "label_ids", "prompt_ids",
         "completion_ids", "chosen_ids", "rejected_ids", "prompt_input_ids", "tokens"),
        (), _is_list,
        "the row is tokenized already", "Give the rows as text", _ALL,
    ),
    Meaning(
        "mask or weight",
        (*MARKS, "completion_mask", "assistant_masks", "response_mask", "label_mask", "segments",
         "train_detail", "training_detail", "train_on_turn", "sample_weight"),
        (), _is_no_full_weight, _NO_MASK, _MASK_REMEDY, _ALL,
    ),
    # Under other names, 1 may mean that a part is trained or that it is skipped.
    Meaning(
        "other mask or weight", (),
        ("loss", "mask", "masked", "train", "trained", "training", "trainable", "weight",
         "learnable", "supervised", "skip", "ignore"),
        _is_set, _NO_MASK, _MASK_REMEDY, _ALL,
    ),
    Meaning(
        "preference pair",
        ("rejected_response", "rejected_messages", "positive_messages", "negative_messages",
         "rejected_answer", "chosen_response"),
        ("chosen", "rejected"), _is_text,
        "one side of a preference pair (DPO)",
        "Preprocess the rows for train-dpo with handler pairs, alpaca_pairs or sharegpt_pairs",
        frozenset({"sft", "prompts", "labeled", "steps"}),
    ),
    Meaning(
        "other side of a pair", ("rejected_response", "rejected_messages", "negative_messages"),
        (), _is_text, "another side of the pair would not be read",
        "Name the side with --map-keys, as in '{\"rejected\": \"COLUMN\"}'", frozenset({"pairs"}),
    ),
    Meaning(
        "better side",
        ("preference", "overall_preference", "winner", "better_response_id", "tie", "is_tie"),
        (), _is_true, "which side is better is not read",
        "Write the better side into the column of the chosen answer, and remove ties",
        frozenset({"pairs"}),
    ),
    # Under other names, a value may mean either side.
    Meaning(
        "other better side", (), ("better",), _is_set, "which side is better is not read",
        "Write the better side into the column of the chosen answer, and remove ties",
        frozenset({"pairs"}),
    ),
    Meaning(
        "label", ("label", "labels", "kto_tag"), ("kto",), _is_label,
        "answers labeled as desirable or not (KTO)",
        "Preprocess the rows for train-dpo with handler labeled",
        frozenset({"sft", "prompts", "pairs"}),
    ),
    Meaning(
        "verdict", ("is_correct", "correctness", "verified", "accepted", "passed", "is_valid"),
        ("correct", "correctness", "verified", "verdict", "accepted", "passed", "valid",
         "resolved", "solved", "success", "successful", "desirable"),
        _is_negative, "the answer is marked as wrong",
        "Remove the row, or use handler labeled for train-dpo",
        frozenset({"sft", "prompts", "pairs"}),
    ),
    Meaning(
        "negative verdict", ("is_wrong",),
        ("incorrect", "wrong", "invalid", "failed", "undesirable"), _is_positive,
        "the answer is marked as wrong", "Remove the row, or use handler labeled for train-dpo",
        frozenset({"sft", "prompts", "pairs"}),
    ),
    Meaning(
        "truncated answer", ("finish_reason", "stop_reason", "done_reason"), ("truncated",),
        _is_truncated, "the answer is truncated, and would be trained as a complete one",
        "Remove the row", frozenset({"sft", "pairs", "labeled"}),
    ),
    Meaning(
        "options of the template",
        ("chat_template_kwargs", "apply_chat_template_kwargs", "template_kwargs",
         "chat_template", "enable_thinking",
         "preserve_thinking", "reasoning_effort", "model_identity", "response_prefix", "prefill"),
        (), _is_set, "options of a template are not read from rows",
        "Write rows with other options into another file, and set them there with "
        "preprocess.enable_thinking or the template", _CHATS,
    ),
    Meaning(
        "system text", ("system", "system_prompt", "sys", "sys_prompt"), ("system",), _is_text,
        "a system text would not be shown",
        "Name it with --map-keys '{\"system\": \"{key}\"}'", _CHATS,
    ),
    Meaning(
        "tools",
        ("tools", "functions", "function_list", "available_functions", "function_schemas",
         "function_definitions", "apis", "api_list", "plugins"),
        ("tool",), _is_text, "tools would not be shown",
        "Use handler sharegpt with --map-keys '{\"tools\": \"{key}\"}'", _CHATS,
    ),
    Meaning(
        "options of a question",
        ("options", "choices", "opa", "opb", "opc", "opd", "A", "B", "C", "D"),
        ("option", "choice", "distractor", "ending"), _is_present,
        "the options would not be shown with the question",
        "Write them into the question, or use a handler of your own (path/file.py:NAME)",
        frozenset({"sft", "prompts", "pairs", "labeled"}),
    ),
    Meaning(
        "thought",
        (*THOUGHTS, DETAILS, "tool_plan", "cot", "chain_of_thought", "scratchpad",
         "inner_monologue"),
        ("thought", "thinking", "think", "reasoning", "cot", "rationale", "scratchpad"), _is_text,
        "a thought would not be trained",
        "Write it into reasoning_content of the answer's turn, or name it with handler alpaca and "
        "--map-keys '{\"thought\": \"{key}\"}'",
        frozenset({"sft", "pairs", "labeled"}),
    ),
    Meaning(
        "images, videos and sounds",
        ("image", "images", "image_path", "image_url", "video", "videos", "audio", "audios",
         "objects", "pixel_values", "mm_processor_kwargs", "multi_modal_data", "ref_audios",
         "audio_codes"),
        ("image", "video", "audio", "pixel", "multimodal", "modal"), _is_true,
        "images are read from content parts and the column images of conversations; videos and "
        "sounds are not supported",
        "If it has images, name it with --map-keys '{\"images\": \"{key}\"}', otherwise remove it",
        _ALL,
    ),
    Meaning(
        "context of a question",
        ("context", "passage", "document", "article", "paragraph", "premise", "background",
         "evidence", "knowledge", "history", "chat_history", "conversation_history",
         "dialogue_history", "few_shot"),
        (), _is_text, "the text would not be part of the question",
        "Add it with --map-keys '{\"query\": \"{key}\"}' or write it into the question", _CHATS,
    ),
    Meaning(
        "prompt of a teacher", ("teacher_prompt", "teacher_messages", "privileged_context"),
        ("teacher",), _is_text, "a teacher reads the same prompt as the student",
        "Remove it", _CHATS,
    ),
)  # fmt: skip


@lru_cache(maxsize=4096)
def name_words(name: str) -> tuple[str, ...]:
    """Return the words of a name in lower case and in the singular.

    The pieces between separators come first: `Complex_CoT` has complex, cot, complex, co and t.
    """
    pieces = _pieces(name)
    words = [word for piece in pieces for word in _WORD.findall(piece)]
    return tuple(_singular(word.lower()) for word in (*pieces, *words))


def _pieces(name: str) -> list[str]:
    # Full-width letters and the like count as letters of ASCII.
    return [piece for piece in re.split(r"[\W_]+", normalize("NFKC", name)) if piece]


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _same(name: str) -> str:
    """Return a name in the form in which names are compared. Single letters keep their case."""
    pieces = [_singular(piece.lower()) for piece in _pieces(name)]
    return "".join(pieces) if len(name) > 1 else name


def _spellings() -> dict[str, tuple[Meaning, ...]]:
    """Return the meanings of every spelling."""
    meanings: dict[str, tuple[Meaning, ...]] = {}
    for meaning in MEANINGS:
        for key in meaning.keys:
            meanings[_same(key)] = (*meanings.get(_same(key), ()), meaning)
    return meanings


_SPELLINGS = _spellings()


@lru_cache(maxsize=4096)
def meaning_of(name: str, kind: str | None = None) -> Meaning | None:
    """Return the meaning of a key for a kind of data, or None. Without a kind: for any kind."""
    same, words = _same(name), name_words(name)
    if same in _HARMLESS:
        return None
    exact = _SPELLINGS.get(same, ())
    by_word = [m for m in MEANINGS if set(m.words) & set(words)]
    if words and words[-1] in _DESCRIPTIONS:
        by_word = []
    elif words and words[-1] in _ANSWERS:
        by_word = [m for m in by_word if m.says not in (_is_negative, _is_positive)]
    fitting = (m for m in (*exact, *by_word) if kind is None or kind in m.kinds)
    return next(fitting, None)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Keys of rows that have the same keys: those with a meaning, those unread and those read."""

    checked: tuple[tuple[str, Meaning], ...]
    unread: tuple[str, ...]
    read: tuple[str, ...]


@lru_cache(maxsize=1024)
def _row_plan(names: tuple[Any, ...], read: frozenset[str], kind: str) -> _Plan:
    texts = [name for name in names if isinstance(name, str)]
    unread = [name for name in texts if name not in read]
    meanings = ((name, meaning_of(name, kind)) for name in unread)
    checked = tuple((name, meaning) for name, meaning in meanings if meaning is not None)
    return _Plan(checked, tuple(unread), tuple(name for name in texts if name in read))


def check_row(
    row: Any, read: frozenset[str], kind: str, unread: Counter[str], *, is_kept: bool = False
) -> None:
    """Count the keys of a row that nothing reads.

    Args:
        row: a row of the input.
        read: columns that the handler reads, the output keeps, or the user ignores.
        kind: kind of data.
        unread: counts by name, which this function increases.
        is_kept: whether the output keeps all columns that are not read.

    Raises:
        MsrlError: a key that is not read decides what is trained, shown or masked.
    """
    if not isinstance(row, dict):
        return
    values = cast("dict[Any, Any]", row)
    plan = _row_plan(tuple(values), read, kind)
    problems = [
        refusal(f"column {key}", key, values[key], meaning)
        for key, meaning in plan.checked
        if meaning.says(values[key])
    ]
    if problems:
        raise MsrlError(" ".join(problems))
    for name in () if is_kept else plan.unread:
        if not is_empty(values[name]):
            unread[name] += 1
            _count_members(name, values[name], kind, unread)
    for name in plan.read:
        if isinstance(values[name], list | dict):
            _count_turn_keys(values[name], unread)


def _count_members(name: str, value: Any, kind: str, unread: Counter[str]) -> None:
    """Count the members of an unread object, such as `metadata`, that have a meaning.

    They describe the row or repeat parts of it in many data sets, so they are named, not refused.
    """
    if isinstance(value, dict):
        for key, member in cast("dict[Any, Any]", value).items():
            meaning = meaning_of(key, kind) if isinstance(key, str) else None
            if meaning is not None and meaning.says(member):
                unread[f"{name}.{key}"] += 1


def refusal(subject: str, key: str, value: Any, meaning: Meaning) -> str:
    """Return the message for a key that is refused."""
    shown = f"={value}" if isinstance(value, bool | int | float) else ""
    if isinstance(value, str) and len(value) <= 20:
        shown = f"={value}"
    remedy = meaning.remedy.replace("{key}", key)
    return f"{subject}{shown}: {meaning.problem}. {remedy}, or use --ignore {key}."


def without_keys(value: Any, ignored: frozenset[str]) -> Any:
    """Return a row without the ignored keys, also of its turns and their parts."""
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: without_keys(item, ignored) for key, item in items if key not in ignored}
    if isinstance(value, list):
        return [without_keys(item, ignored) for item in cast("list[Any]", value)]
    return value


def _count_turn_keys(value: Any, unread: Counter[str]) -> None:
    """Count the keys of turns and content blocks that nothing reads."""
    turns = cast("list[Any]", value) if isinstance(value, list) else [value]
    for turn in turns:
        if not isinstance(turn, dict) or not ("role" in turn or "from" in turn):
            continue
        values = cast("dict[str, Any]", turn)
        for name in _part_plan(tuple(values), _TURN_KEYS).unread:
            if not is_empty(values[name]):
                unread[f"{name} of turns"] += 1
        content = values.get("content")
        for block in cast("list[Any]", content) if isinstance(content, list) else ():
            _count_block_keys(block, unread)


def _count_block_keys(block: Any, unread: Counter[str]) -> None:
    if isinstance(block, dict):
        values = cast("dict[str, Any]", block)
        known = _IMAGE_KEYS if is_image(values) else _BLOCK_KEYS
        for name in _part_plan(tuple(values), known).unread:
            if not is_empty(values[name]):
                unread[f"{name} of content blocks"] += 1


@lru_cache(maxsize=1024)
def _part_plan(names: tuple[Any, ...], known: frozenset[str]) -> _Plan:
    unread = [name for name in names if isinstance(name, str) and name not in known]
    meanings = ((name, meaning_of(name)) for name in unread)
    checked = tuple((name, meaning) for name, meaning in meanings if meaning is not None)
    return _Plan(checked, tuple(unread), ())


def check_turn(turn: Mapping[str, Any], location: str) -> None:
    """Raise MsrlError if a key of a turn that is not read decides what is trained or shown."""
    if turn.keys() <= _TURN_KEYS:
        return
    _check_part(turn, _TURN_KEYS, location)
    for key, harmless, problem in _TURN_FLAGS:
        value = turn.get(key)
        if not is_empty(value) and value not in harmless:
            raise MsrlError(f"{location}: {key}={value}: {problem}, or use --ignore {key}.")


# (key, values without an effect, problem and remedy)
_TURN_FLAGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("channel", ("final",), "a part of an answer in harmony's form. Write the analysis into "
     "reasoning_content of the final turn, calls into tool_calls"),
    ("recipient", ("all", "assistant", "user"), "a call in harmony's form. Write it into "
     "tool_calls"),
    ("end_turn", (True, 1), "answers without an end are not supported. Join the parts of the turn"),
    ("partial", (False, 0), "the beginning of an answer is not supported. Complete the answer"),
    ("prefix", (False, 0), "the beginning of an answer is not supported. Complete the answer"),
    ("refusal", (), "a refusal is trained only as the content of the turn. Write it there"),
)  # fmt: skip


_TURN_REMEDIES = {
    "system text": "Write it into a turn of the role system",
    "tools": "Write them into the column tools of the row",
    "thought": "Write it into reasoning_content of the answer's turn",
    "context of a question": "Write it into the content of the turn",
    "images, videos and sounds": "Write an image as a content part of type image",
}


def check_block(block: Mapping[str, Any], location: str) -> None:
    """Raise MsrlError if a key of a content block that is not read has a meaning."""
    known = _IMAGE_KEYS if is_image(block) else _BLOCK_KEYS
    _check_part(block, known, f"{location}: a content block")


def is_image(block: Mapping[str, Any]) -> bool:
    """Return True for a content part that is an image."""
    return block.get("type") in ("image", "image_url")


def _check_part(part: Mapping[str, Any], known: frozenset[str], location: str) -> None:
    for key, meaning in _part_plan(tuple(part), known).checked:
        if meaning.says(part[key]):
            # A column can be named with --map-keys, a key of a turn cannot.
            remedy = _TURN_REMEDIES.get(meaning.title, meaning.remedy)
            raise MsrlError(
                refusal(f"{location}: {key}", key, part[key], replace(meaning, remedy=remedy))
            )


def is_trained(
    turn: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], role: str, location: str
) -> bool:
    """Return False if marks exclude an answer from the loss.

    Args:
        turn: the turn.
        blocks: the blocks of its content. Those without a mark are trained, as in axolotl.
        role: role of the turn.
        location: location of the turn for messages.

    Raises:
        MsrlError: a mark is neither true nor false, marks differ, or a mark asks to train a turn
            that is no answer.
    """
    parts = [part for part in (turn, *blocks) if not _MARKS.isdisjoint(part)]
    if not parts:
        return True
    marks = [mark for part in parts for mark in _read_marks(part, role, location)]
    is_partial = turn not in parts or len(parts) > 1
    unmarked = sum(_MARKS.isdisjoint(block) for block in blocks) if is_partial else 0
    values = {value for _, value in marks} | {True for _ in range(unmarked)}
    if len(values) > 1:
        shown = " and ".join(f"{name}={str(value).lower()}" for name, value in marks)
        raise MsrlError(
            f"{location}: {shown}: an answer is trained completely or not at all. Give all of its "
            "marks the same value, or split the answer into two rows."
        )
    return False not in values


def _read_marks(part: Mapping[str, Any], role: str, location: str) -> Iterator[tuple[str, bool]]:
    """Yield the marks of a turn or block of an answer."""
    for name in MARKS:
        value = part.get(name)
        if value is None:
            continue
        mark = None if isinstance(value, str) else truth(value)
        if mark is None:
            raise MsrlError(
                f"{location}: {name}={value}: an answer is trained (true or 1) or context only "
                f"(false or 0). Write one of them, or use --ignore {name}."
            )
        if role == "assistant":
            yield name, mark
        elif mark and name not in _MARKS_OF_ANSWERS:
            raise MsrlError(
                f"{location}: {name}={value}: only answers are trained, not a turn of {role}. "
                f"Remove the mark, or use --ignore {name}."
            )
