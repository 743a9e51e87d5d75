"""Rollout record: one row per sample of a step, in a Parquet file per step.

T tokens of a sequence: the tokens of the prompt, those of the model, and those of an environment.
Token arrays have length T. `docs/rollouts.md` describes the columns for users.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msrl.errors import MsrlError
from msrl.files import atomic_write
from msrl.limits import whole_number
from msrl.table_batches import record_batches
from msrl.types import Bools, Floats, Ints, Routes

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "1"  # raised whenever a column changes its meaning
_ROWS_OF_A_BATCH = 4096
_MAX_ROW_BYTES = 256 << 20
# Columns whose values repeat. A dictionary of the numbers of tokens would cost time and space.
_REPEATED = ["prompt_index", "finish_reason", "answer", "fault", "tag"]


class RecordedImage(NamedTuple):
    """Image of a sequence: its first token, the SHA-256 of its file, and its size in patches."""

    offset: int
    key: str
    rows: int
    columns: int


class EpisodeRecord(NamedTuple):
    """Values of an episode that no other attribute of a record has.

    `prompt_ids` are the tokens of the row of the data, and `response` is the text that reward
    sources score. The other values are those of `msrl.types.Episode`.
    """

    prompt_ids: Sequence[int]
    response: str
    environment: str
    fault_detail: str
    truncated_messages: int
    repeats: int


class GreedyRecord(NamedTuple):
    """Greedy response with its reward."""

    token_ids: Sequence[int]
    response: str
    finish_reason: str
    reward: float
    scores: Mapping[str, float]
    is_decided: bool


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One sequence of a sample of a step. An episode may have several.

    Attributes:
        step: Step, counted from 1.
        group: Number of the group in the step. The samples of a group have the same prompt.
        sample: Number of the sample in its group.
        prompt_index: Row of the prompt in the data.
        token_ids: Tokens of the sequence.
        loss_mask: True for sampled tokens that the step trained on, before `algo.top_entropy`.
        is_sampled: True for tokens that the model sampled.
        behavior_logprobs: Log-probabilities of the sampling distribution; 0 if not sampled.
        versions: Policy versions of the sampled tokens, in order, as (version, number of tokens).
        trainer_version: Policy version at the start of the step's first update.
        advantages: Advantages; 0 if not trained.
        reward: Reward, after weights and before processing.
        scores: Score of each reward source by name.
        finish_reason: `stop` or `length`; of episodes also `turns`, `time` or `fault`.
        messages: Turns as (role, text). A rendered prompt is one turn with the role `prompt`.
        answer: Ground truth of the prompt.
        times: Seconds since 1970 at which stages of the step ended, by stage.
        trainer_logprobs: The trainer's log-probabilities before the first update; 0 if not sampled.
            None if the step did not compute them.
        reference_logprobs: The same of the reference model.
        sequence: Number of the sequence in its episode.
        turns: Turns of an episode as fields of `msrl.types.EpisodeTurn`; `tool_calls` is JSON.
        success: True or False if the environment reports it.
        fault: Kind of the environment's failure; empty without one.
        entropies: Entropies of the trainer's distributions before the first update, in nats.
        tag: Tag of the row of the data, which selects its reward sources.
        is_right: True for a right answer; None if nothing decides.
        reasons: Why each verifier gave its score, for those that explain it.
        images: Images of the sequence. Files without any have no such column.
        is_decided: False if a reward source or the environment did not decide on the reward.
        is_dropped: True for groups that the step sampled, but replaced or did not need.
        extra: Further columns of the row of the data, such as the tag.
        episode: What else is known of an episode, as `EpisodeRecord`; None for a single response.
        greedy: Greedy response to the prompt. Files without any have no such column.
        routes: Experts that the engine chose. Files without any have no such column.
    """

    step: int
    group: int
    sample: int
    prompt_index: int
    token_ids: Ints  # [T]
    loss_mask: Bools  # [T]
    is_sampled: Bools  # [T]
    behavior_logprobs: Floats  # [T]
    versions: Sequence[tuple[int, int]]
    trainer_version: int
    advantages: Floats  # [T]
    reward: float
    scores: Mapping[str, float]
    finish_reason: str
    messages: Sequence[tuple[str, str]]
    answer: str = ""
    times: Mapping[str, float] = field(default_factory=dict[str, float])
    trainer_logprobs: Floats | None = None  # [T]
    reference_logprobs: Floats | None = None  # [T]
    sequence: int = 0
    turns: Sequence[Mapping[str, Any]] = ()
    success: bool | None = None
    fault: str = ""
    entropies: Floats | None = None  # [T]
    tag: str = ""
    is_right: bool | None = None
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    images: Sequence[RecordedImage] = ()
    is_decided: bool = True
    is_dropped: bool = False
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    episode: EpisodeRecord | None = None
    greedy: GreedyRecord | None = None
    routes: Routes | None = None  # [T - 1, L, k]

    @property
    def staleness(self) -> int:
        """Number of policy versions between the oldest sampled token and the trainer."""
        return max((self.trainer_version - version for version, _ in self.versions), default=0)


LoggedValues = Mapping[str, Sequence[Floats]]
"""Arrays [T] of the logged sequences, the first ones of a step, by the name of an attribute."""


def remove_after(run_dir: Path, step: int) -> None:
    """Remove the files of rollouts and evaluations of later steps, which a run repeats."""
    for folder in ("rollouts", "eval"):
        for path in (run_dir / folder).glob("step_*"):
            number = whole_number(path.stem.removeprefix("step_"))
            if path.suffix in (".jsonl", ".parquet") and number is not None and number > step:
                path.unlink(missing_ok=True)


def write_records(path: Path, records: Sequence[RolloutRecord]) -> None:
    """Write a Parquet file atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    for name, type in _rare_columns().items():
        values = [getattr(record, name) for record in records]
        if any(value is not None and len(value) for value in values):
            schema = schema.append(pa.field(name, type))
    arrays = [
        _array([getattr(record, column.name) for record in records], column.type)
        for column in schema
    ]
    table = pa.Table.from_arrays(arrays, schema=schema)
    with atomic_write(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            use_dictionary=_REPEATED,  # pyright: ignore[reportArgumentType]
            write_statistics=False,
        )


def _array(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """Return a column. None is a missing value."""
    import pyarrow as pa

    if pa.types.is_map(type):
        values = [list(value.items()) for value in values]
    elif type == pa.list_(_image_type()):
        values = [[image._asdict() for image in images] for images in values]
    elif type == _greedy_type():
        values = [None if value is None else _greedy_row(value) for value in values]
    elif type == _episode_type():
        values = [None if value is None else value._asdict() for value in values]
    elif type == _routes_type():
        values = [None if value is None else _packed_routes(value) for value in values]
    elif _has_arrays(type):
        # Arrow copies arrays of its own dtype, and converts others number by number.
        dtype = type.value_type.to_pandas_dtype()
        values = [None if value is None else np.asarray(value, dtype) for value in values]
    return pa.array(values, type)


def _has_arrays(type: pa.DataType) -> bool:
    """Return True for a column with an array of numbers per row."""
    import pyarrow as pa

    return pa.types.is_list(type) and pa.types.is_primitive(type.value_type)


def read_records(path: Path) -> list[RolloutRecord]:
    """Return the rows of a file that `write_records` of this or an earlier version has written.

    Raises:
        MsrlError: The file has JSON lines, the default of `log.rollouts`, or is no such file.
    """
    return [*iterate_records(path)]


def iterate_records(path: Path) -> Iterator[RolloutRecord]:
    """Yield the rows of a file, of which a few are decoded at once.

    Raises:
        MsrlError: The same as for `read_records`.
    """
    if path.suffix == ".jsonl":
        raise MsrlError(
            f"{path}: JSON lines, which lack values of a record. Read each line as JSON, or train "
            "with log.rollouts=parquet."
        )
    for batch in record_batches(path, max_rows=_ROWS_OF_A_BATCH, max_row_bytes=_MAX_ROW_BYTES):
        yield from _records(batch)


def recorded_steps(run_dir: Path) -> list[Path]:
    """Return the files of the rollout record of a run in the order of their steps.

    Raises:
        MsrlError: The run has no rollout record, or not of all steps up to the last one.
    """
    folder = run_dir / "rollouts"
    files = sorted(folder.glob("step_*.parquet"))
    if not files:
        has_lines = any(folder.glob("step_*.jsonl"))
        reason = "has JSON lines, which round log-probabilities" if has_lines else "does not exist"
        raise MsrlError(
            f"{run_dir}: the rollout record {reason}. Repeat the run with log.rollouts=parquet."
        )
    for number, path in enumerate(files, 1):
        if path.name != f"step_{number:06d}.parquet":
            raise MsrlError(
                f"{folder}: has no step_{number:06d}.parquet, but {files[-1].name}. Restore the "
                "missing file."
            )
    return files


def column_names(path: Path) -> frozenset[str]:
    """Return the columns of a file. Raises MsrlError if it is no Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return frozenset(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise MsrlError(f"{path}: not a complete Parquet file: {reason}") from error


def iterate_values(path: Path, *columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield the values of some columns for each row. Raises MsrlError if the file is damaged."""
    for batch in record_batches(
        path, max_rows=_ROWS_OF_A_BATCH, max_row_bytes=_MAX_ROW_BYTES, columns=columns
    ):
        yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _records(batch: pa.RecordBatch) -> Iterator[RolloutRecord]:
    # Lists of Python objects would take most of the time.
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    names = [column.name for column in batch.schema if _has_arrays(column.type)]
    arrays = {name: columns[name].to_numpy(zero_copy_only=False) for name in names}
    rows = batch.drop_columns([*arrays]).to_pylist(maps_as_pydicts="strict")
    for index, row in enumerate(rows):
        yield _record(row | {name: values[index] for name, values in arrays.items()})


@functools.cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    numbers = pa.map_(pa.string(), pa.float64())
    version = pa.struct([("version", pa.int64()), ("tokens", pa.int64())])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    types: dict[str, pa.DataType] = {
        "step": pa.int64(),
        "group": pa.int64(),
        "sample": pa.int64(),
        "prompt_index": pa.int64(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "is_sampled": pa.list_(pa.bool_()),
        "behavior_logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(version),
        "trainer_version": pa.int64(),
        "advantages": pa.list_(pa.float32()),
        "reward": pa.float64(),
        "scores": numbers,
        "finish_reason": pa.string(),
        "messages": pa.list_(message),
        "answer": pa.string(),
        "times": numbers,
        "trainer_logprobs": pa.list_(pa.float32()),
        "reference_logprobs": pa.list_(pa.float32()),
        "sequence": pa.int64(),
        "turns": pa.list_(_turn_type()),
        "success": pa.bool_(),
        "fault": pa.string(),
        "entropies": pa.list_(pa.float32()),
        "tag": pa.string(),
        "is_right": pa.bool_(),
        "reasons": pa.map_(pa.string(), pa.string()),
        "is_decided": pa.bool_(),
        "is_dropped": pa.bool_(),
        "extra": pa.map_(pa.string(), pa.string()),
        "episode": _episode_type(),
    }
    return pa.schema(types, metadata={"msrl.rollouts": FORMAT})


@functools.cache
def _rare_columns() -> dict[str, pa.DataType]:
    """Return the columns of files that have values for them."""
    import pyarrow as pa

    images = pa.list_(_image_type())
    return {"images": images, "greedy": _greedy_type(), "routes": _routes_type()}


def _image_type() -> pa.DataType:
    import pyarrow as pa

    numbers = {"offset": pa.int64(), "rows": pa.int64(), "columns": pa.int64()}
    return pa.struct({"key": pa.string(), **numbers})


def _episode_type() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        [
            ("prompt_ids", pa.list_(pa.int32())),
            ("response", pa.string()),
            ("environment", pa.string()),
            ("fault_detail", pa.string()),
            ("truncated_messages", pa.int64()),
            ("repeats", pa.int64()),
        ]
    )


def _greedy_type() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        [
            ("token_ids", pa.list_(pa.int32())),
            ("response", pa.string()),
            ("finish_reason", pa.string()),
            ("reward", pa.float64()),
            ("scores", pa.map_(pa.string(), pa.float64())),
            ("is_decided", pa.bool_()),
        ]
    )


def _routes_type() -> pa.DataType:
    import pyarrow as pa

    names = {"layers": pa.int64(), "per_token": pa.int64(), "dtype": pa.string()}
    return pa.struct({**names, "experts": pa.binary()})


def _greedy_row(greedy: GreedyRecord) -> dict[str, Any]:
    return {**greedy._asdict(), "scores": [*greedy.scores.items()]}


def _packed_routes(routes: Routes) -> dict[str, Any]:
    """Return routes as bytes, with what `_unpacked_routes` needs to read them."""
    _, layers, per_token = routes.shape
    little = np.ascontiguousarray(routes, routes.dtype.newbyteorder("<"))
    return {
        "layers": layers,
        "per_token": per_token,
        "dtype": routes.dtype.name,
        "experts": little.tobytes(),
    }


def _unpacked_routes(values: Mapping[str, Any]) -> Routes:
    dtype = np.dtype(values["dtype"])
    flat = np.frombuffer(values["experts"], dtype.newbyteorder("<")).astype(dtype)
    return flat.reshape(-1, values["layers"], values["per_token"])


def _turn_type() -> pa.DataType:
    import pyarrow as pa

    return pa.struct(
        [
            ("num_tokens", pa.int64()),
            ("state", pa.string()),
            ("finish_reason", pa.string()),
            ("reward", pa.float64()),
            ("generation_s", pa.float64()),
            ("environment_s", pa.float64()),
            ("tool_calls", pa.string()),
            ("is_invalid", pa.bool_()),
        ]
    )


def _record(row: Mapping[str, Any]) -> RolloutRecord:
    versions = tuple((run["version"], run["tokens"]) for run in row["versions"])
    messages = tuple((turn["role"], turn["content"]) for turn in row["messages"])
    values = {**row, "versions": versions, "messages": messages}
    values["token_ids"] = row["token_ids"].astype(np.int64)
    values["reasons"] = row.get("reasons") or {}  # which files of earlier versions do not have
    if "turns" in row:  # which files of earlier versions do not have
        values["turns"] = tuple(row["turns"])
    values["images"] = recorded_images(row.get("images") or ())
    for name, read in _READERS.items():
        if row.get(name) is not None:
            values[name] = read(row[name])
    return RolloutRecord(**values)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "episode": lambda values: EpisodeRecord(**values),
    "greedy": lambda values: GreedyRecord(**values),
    "routes": _unpacked_routes,
}


def recorded_images(images: Iterable[Mapping[str, Any]]) -> tuple[RecordedImage, ...]:
    """Return the images of a row of a file. Raises TypeError or ValueError for other values."""
    return tuple(
        RecordedImage(int(i["offset"]), str(i["key"]), int(i["rows"]), int(i["columns"]))
        for i in images
    )


def num_image_tokens(token_ids: Ints, offset: int) -> int:  # [T]
    """Return the number of equal tokens from the first token of an image on."""
    others = np.flatnonzero(token_ids[offset:] != token_ids[offset])
    return int(others[0]) if len(others) else len(token_ids) - offset
