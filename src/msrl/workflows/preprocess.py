"""Workflow of `msrl preprocess`: convert rows of text to indexed files with a manifest.

Rows become conversations, then token ids. Several worker processes tokenize batches of rows; the
results are written in the order of the rows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from msrl.config.schema import Config, PreprocessConfig
from msrl.data.chat_template import chat_template
from msrl.data.files.readers import DataFile, RowBatch, find_files, read_batches
from msrl.data.handlers import default_handler, make_handler
from msrl.data.images.load import FileState
from msrl.data.manifest import KEYS, TEXTS, bad_rows_path, reason_text
from msrl.data.native import shows_date, with_date
from msrl.data.render import Renderer, make_renderer
from msrl.data.rows.steps import step_tokens
from msrl.data.templates.files import load_template, template_names
from msrl.data.templates.form import Template
from msrl.data.tokenize import ALL, TokenizedRows, TokenizeSettings, tokenize_rows
from msrl.data.tokenizer import TextTokenizer, open_tokenizer, vocab_hash
from msrl.data.writer import DatasetWriter, check_prefix
from msrl.errors import MsrlError, nearest
from msrl.limits import print_note
from msrl.processes.parent import end_with_parent
from msrl.registry.own import is_own
from msrl.types import DatasetManifest
from msrl.workflows.row_images import image_record, make_image_settings, split_batches
from msrl.workflows.shown_examples import ShownExample, print_examples, show_rows
from msrl.workflows.training.interrupts import children_ignore_interrupts

_REPORT_EVERY_S = 5.0
_CHECKED_FILES = 20  # by `check`, which reads one batch of rows of each
_PROCESS_BYTES = 64 << 20  # of input for each worker process
_LISTED_COLUMNS = 30
_THREADS = 2  # one converts rows while the other one waits for the tokenizer


class WrittenData(NamedTuple):
    """Preprocessed data: its manifest, lines on what was not read, and the files of its images."""

    manifest: DatasetManifest
    notes: list[str]
    image_files: Mapping[str, FileState]


def run(config: Config) -> DatasetManifest | None:
    """Preprocess the data of `config.preprocess`, or show its first rows.

    Raises:
        MsrlError: the configuration or the data is not valid. No data is written then.
    """
    settings, start = config.preprocess, time.perf_counter()
    if settings.show is not None:
        print_examples(examples(settings), open_tokenizer(str(settings.tokenizer)))
        return None
    prefix = _require("output_prefix", settings.output_prefix)
    written = write(settings, prefix)
    for line in written.notes:
        print(line)
    print(summary(prefix, written.manifest, time.perf_counter() - start))
    return written.manifest


def examples(settings: PreprocessConfig) -> Iterator[ShownExample]:
    """Yield the first `settings.show` rows as they are rendered.

    Raises:
        MsrlError: a setting or a row is not valid.
    """
    files = find_files(settings.input, settings.split)
    count = 0
    for example in show_rows(make_job(settings), files, settings.show or 0):
        count += 1
        yield example
    _check_not_empty(count, {}, files)


def write(settings: PreprocessConfig, prefix: str) -> WrittenData:
    """Preprocess the rows of `settings.input` to data with this prefix.

    Raises:
        MsrlError: a setting or the data is not valid. No data is written then.
    """
    files = find_files(settings.input, settings.split)
    job = make_job(settings)
    capacity = settings.seq_length if settings.pack else None
    pad = job.tokenizer.pad_token_id
    dataset = DatasetWriter(
        prefix,
        job.handler.kind,
        capacity=capacity,
        pad_token_id=pad,
        overwrite=settings.overwrite,
        is_linked=settings.images == "link",
    )
    with _exit_when_terminated(), dataset as writer:
        progress = PreprocessProgress(time.perf_counter())
        workers = settings.workers if needs_processes(job, files, settings.workers) else 1
        with contextlib.closing(tokenize_all(job, _batches(job, files), workers)) as results:
            for result in results:
                writer.add(result)
                progress.report(writer)
        writer.finish()
        manifest = make_manifest(settings, job, writer)
        _check_not_empty(manifest.num_examples, manifest.dropped, files)
        _check_kept(settings.keep, writer.kept, writer.unread)
        manifest = writer.commit(manifest)
    notes = (unread_columns(writer.unread), shown_date(job), *bad_rows(prefix, writer))
    return WrittenData(manifest, [line for line in notes if line], writer.image_files)


def check(config: Config) -> int:
    """Check the configuration and the first rows of the first files, without writing anything.

    Returns:
        The number of rows that were read and tokenized.

    Raises:
        MsrlError: the configuration or one of the rows is not valid.
    """
    settings = config.preprocess
    files = find_files(settings.input, settings.split)
    job = make_job(settings)
    if settings.show is None:
        prefix = _require("output_prefix", settings.output_prefix)
        check_prefix(prefix, overwrite=settings.overwrite)
    num_read = num_examples = 0
    dropped, unread, kept = Counter[str](), Counter[str](), set[str]()
    is_all = len(files) <= _CHECKED_FILES
    for path in files[:_CHECKED_FILES]:
        batches = _batches(job, (path,))
        for batch in itertools.islice(batches, 1):
            result = tokenize_rows(job, batch)
            num_read += result.num_read
            num_examples += len(result.sequences.lengths) + len(result.preferences)
            dropped.update(result.dropped)
            dropped.update(bad.reason for bad in result.bad)
            unread.update(result.unread)
            kept |= result.kept
        is_all = is_all and next(batches, None) is None
    if is_all:
        _check_not_empty(num_examples, dropped, files)
        _check_kept(settings.keep, kept, unread)
    return num_read


def _batches(job: TokenizeSettings, files: Iterable[DataFile]) -> Iterator[RowBatch]:
    """Return the batches of files, which are smaller if rows may have images."""
    return read_batches(files) if job.image_settings is None else split_batches(read_batches(files))


def make_job(settings: PreprocessConfig) -> TokenizeSettings:
    """Return the settings for every row.

    Raises:
        MsrlError: a setting is not valid. This is checked before any row is read.
    """
    name = _require("handler", settings.handler or default_handler(settings.input))
    handler = make_handler(
        name, kind=settings.kind, map_keys=settings.map_keys, options=settings.options
    )
    _check_kind(settings, handler.kind)
    if settings.keep and is_own(name):
        raise MsrlError(
            f"preprocess.keep: has no effect with handler {name}, which returns `extra` itself. "
            "Remove it."
        )
    template = None if handler.kind in TEXTS else _load_template(settings.template)
    tokenizer = open_tokenizer(_require("tokenizer", settings.tokenizer))
    tokenizer = with_date(tokenizer, template, settings.date)
    images, no_images = make_image_settings(settings, tokenizer)
    renderer: Renderer | None = None
    if template is not None:
        renderer = make_renderer(
            template,
            tokenizer,
            enable_thinking=settings.enable_thinking,
            image_text="" if images is None else images.text,
        )
    return TokenizeSettings(
        handler=handler,
        tokenizer=tokenizer,
        renderer=renderer,
        seq_length=settings.seq_length,
        truncate=settings.too_long == "truncate",
        eod_token_id=_end_of_document(tokenizer) if settings.append_eod else None,
        step_tokens=step_tokens(tokenizer, handler.options) if handler.kind == "steps" else None,
        kept=settings.keep,
        ignored=frozenset(settings.ignore),
        drop_bad_rows=settings.on_bad_row == "drop",
        image_settings=None if handler.kind in TEXTS else images,
        no_images=no_images,
    )


def tokenize_all(
    job: TokenizeSettings, batches: Iterable[RowBatch], workers: int
) -> Generator[TokenizedRows]:
    """Yield the result of every batch in order.

    With one worker, this process tokenizes with the threads of the tokenizer on all cores.
    Otherwise `workers` other processes do.
    """
    if workers > 1:
        yield from _in_processes(job, batches, workers)
    elif _is_bound_to_python(job):
        yield from (tokenize_rows(job, batch) for batch in batches)
    else:
        yield from _in_threads(job, batches)


def _in_threads(job: TokenizeSettings, batches: Iterable[RowBatch]) -> Iterator[TokenizedRows]:
    """Yield the results of threads that convert rows while the tokenizer encodes other rows."""
    pool = ThreadPoolExecutor(_THREADS)

    def submit(batch: RowBatch) -> Future[TokenizedRows]:
        return pool.submit(tokenize_rows, job, batch)

    try:
        yield from _in_order(submit, batches, 2 * _THREADS)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_processes(
    job: TokenizeSettings, batches: Iterable[RowBatch], workers: int
) -> Iterator[TokenizedRows]:
    """Yield the results of worker processes."""
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job, os.getpid()))

    def submit(batch: RowBatch) -> Future[TokenizedRows]:
        with children_ignore_interrupts():  # submitting may start a worker process
            return pool.submit(_work, batch)

    try:
        yield from _in_order(submit, batches, 3 * workers)
    except BrokenProcessPool as error:
        raise MsrlError(
            "a worker process was killed, probably because the machine ran out of memory. "
            "Use fewer preprocess.workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def needs_processes(job: TokenizeSettings, files: Iterable[DataFile], workers: int) -> bool:
    """Return True if worker processes are faster than the threads of the tokenizer.

    Starting a process costs as much as tokenizing several megabytes. The threads of the tokenizer
    do not help where Python does most of the work: in a chat template or in a user's handler.
    """
    if workers == 1:
        return False
    threads = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower()
    if (
        _is_bound_to_python(job)
        or job.image_settings is not None
        or threads in ("false", "off", "no", "f", "n", "0")
    ):
        return True
    size = sum(file.stat().st_size for file in files if isinstance(file, Path))
    return size >= _PROCESS_BYTES * workers


def _is_bound_to_python(job: TokenizeSettings) -> bool:
    """Return True if most of the work is a chat template or a handler of the user."""
    is_native = job.renderer is not None and job.renderer.template.native
    return is_native or is_own(job.handler.name)


def make_manifest(
    settings: PreprocessConfig, job: TokenizeSettings, writer: DatasetWriter
) -> DatasetManifest:
    """Return the manifest of the written data."""
    counts, kind, renderer = writer.counts, job.handler.kind, job.renderer
    vocab = job.tokenizer.get_vocab()
    loss_tokens = {"pretrain": counts["tokens"], "prompts": 0}
    return DatasetManifest(
        kind=kind,
        template="" if renderer is None else renderer.template.name,
        handler=job.handler.name,
        tokenizer_hash=vocab_hash(vocab),
        vocab_size=max(vocab.values()) + 1,
        seq_length=settings.seq_length or writer.max_tokens,
        pack=settings.pack,
        num_rows=counts["rows"],
        num_examples=counts["examples"],
        num_tokens=counts["tokens"],
        num_loss_tokens=loss_tokens.get(kind, counts["loss_tokens"]),
        max_tokens=writer.max_tokens,
        dropped=dict(sorted(writer.dropped.items())),
        keys=KEYS[kind],
        eos_token_id=_eos_token_id(job.tokenizer, renderer),
        stop_token_ids=() if renderer is None else renderer.stop_token_ids,
        truncated=counts["truncated"],
        num_without_answer=counts["without_answer"],
        chat_template="" if renderer is None else chat_template(renderer),
        date=_written_day(job),
        vision=image_record(job, writer.images, is_linked=settings.images == "link"),
    )


def unread_columns(unread: Mapping[str, int]) -> str:
    """Return the line that names the columns and keys that nothing read, or ""."""
    names = [f"{name} ({_row_count(name, number)})" for name, number in sorted(unread.items())]
    more = f" and {len(names) - _LISTED_COLUMNS:,} more" if len(names) > _LISTED_COLUMNS else ""
    return f"columns not read: {', '.join(names[:_LISTED_COLUMNS])}{more}" if names else ""


def _row_count(name: str, number: int) -> str:
    """Return the number of rows with a key, or of turns and blocks with it."""
    unit = "" if " of " in name else " row" if number == 1 else " rows"
    return f"{number:,}{unit}"


def shown_date(job: TokenizeSettings) -> str:
    """Return the line on a chat template that writes the date into the rows, or ""."""
    day = _written_day(job)
    if not day or job.tokenizer.date is not None:
        return day and f"the chat template writes the date {day} into rows (preprocess.date)"
    return (
        f"the chat template may write the current date ({day}) into rows, so that another day "
        f"gives other tokens. Set preprocess.date={day} (--date {day}) to fix it."
    )


def _written_day(job: TokenizeSettings) -> str:
    """Return the day that the chat template may write, as YYYY-MM-DD, or ""."""
    renderer = job.renderer
    if renderer is None or not renderer.template.native or not shows_date(renderer.tokenizer):
        return ""
    return renderer.tokenizer.date or date.today().isoformat()


def bad_rows(prefix: str, writer: DatasetWriter) -> Iterator[str]:
    """Yield the lines on rows that were dropped because they are not valid."""
    for reason, message in writer.first_bad.items():
        yield f"bad rows ({reason}): {writer.dropped[reason]:,}, the first: {message}"
    if writer.first_bad:
        yield f"wrote all bad rows to {bad_rows_path(prefix)}"


def summary(prefix: str, manifest: DatasetManifest, wall_s: float) -> str:
    """Return the line that is printed at the end."""
    reasons = [f"{n:,} ({reason_text(reason)})" for reason, n in manifest.dropped.items()]
    dropped = ", ".join(reasons) or "none"
    packed = f" in {manifest.num_rows:,} rows" if manifest.pack else ""
    truncated = f"; truncated: {manifest.truncated:,}" if manifest.truncated else ""
    if manifest.vision:
        truncated += f"; images: {manifest.vision['num_images']:,}"
    if manifest.num_without_answer:
        truncated += f"; without a ground truth: {manifest.num_without_answer:,}"
    return (
        f"{prefix}: {manifest.num_examples:,} {_NOUNS[manifest.kind]}{packed}, "
        f"{manifest.num_tokens:,} tokens (longest {manifest.max_tokens:,}), {wall_s:.1f} s; "
        f"dropped: {dropped}{truncated}"
    )


_NOUNS = {
    "pretrain": "documents",
    "sft": "examples",
    "prompts": "prompts",
    "pairs": "pairs",
    "labeled": "labeled answers",
    "steps": "texts with labeled steps",
}


class PreprocessProgress:
    """Progress as a line on standard error every few seconds."""

    def __init__(self, start: float) -> None:
        self._start = self._last = start

    def report(self, writer: DatasetWriter) -> None:
        """Print the progress if the last line is old enough."""
        now = time.perf_counter()
        if now - self._last >= _REPORT_EVERY_S:
            self._last = now
            rows, tokens = writer.counts["read"], writer.counts["tokens"]
            rate = rows / (now - self._start)
            line = f"preprocess: {rows:,} rows, {tokens:,} tokens, {rate:,.0f} rows/s"
            print_note(line)


def _in_order(
    submit: Callable[[RowBatch], Future[TokenizedRows]], batches: Iterable[RowBatch], ahead: int
) -> Iterator[TokenizedRows]:
    """Yield the results in the order of the batches, with at most `ahead` batches submitted."""
    waiting: deque[Future[TokenizedRows]] = deque()
    for batch in batches:
        waiting.append(submit(batch))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextlib.contextmanager
def _exit_when_terminated() -> Generator[None, None, None]:
    """Remove temporary files on SIGTERM as on Ctrl-C. Batch systems and containers send SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


_JOB: list[TokenizeSettings] = []


def _start_worker(job: TokenizeSettings, parent: int) -> None:
    """Initialize a worker process: one thread, and the settings for all its batches.

    The main process handles Ctrl-C. When it ends, the worker would wait forever: the other workers
    keep its queue open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _JOB.append(job)


def _work(batch: RowBatch) -> TokenizedRows:
    return tokenize_rows(_JOB[0], batch)


def _load_template(name: str | None) -> Template:
    """Return the template. Raises MsrlError if it is not set, since conversations need one."""
    if name is None:
        raise MsrlError(
            "preprocess.template: not set, but conversations need one; "
            f"known: {', '.join(template_names())}, or a .yaml file"
        )
    return load_template(name)


def _check_kind(settings: PreprocessConfig, kind: str) -> None:
    """Raise MsrlError if a key is set that has no effect for this kind of data."""
    unused = {
        "pack": settings.pack and kind != "sft",
        "too_long": settings.too_long == "truncate" and kind in ("prompts", "pretrain"),
        "seq_length": settings.seq_length is not None and kind == "pretrain",
        "template": settings.template is not None and kind in TEXTS,
        "enable_thinking": settings.enable_thinking is not None and kind in TEXTS,
        "date": settings.date is not None and kind in TEXTS,
        "append_eod": settings.append_eod and kind != "pretrain",
        "keep": bool(settings.keep) and kind != "prompts",
    }
    for key, is_set in unused.items():
        if is_set:
            raise MsrlError(
                f"preprocess.{key}={getattr(settings, key)}: has no effect for {kind} data. "
                "Remove it."
            )
    if settings.too_long == "truncate" and settings.seq_length is None:
        raise MsrlError(
            "preprocess.too_long=truncate: has no effect without a length. Set "
            "preprocess.seq_length."
        )
    if settings.pack and settings.seq_length is None:
        raise MsrlError("preprocess.pack=true: needs the row length. Set preprocess.seq_length.")


def _end_of_document(tokenizer: TextTokenizer) -> int:
    """Return the id of the token that ends a document."""
    number = None if tokenizer.eos_token is None else tokenizer.token_id(tokenizer.eos_token)
    if number is None:
        raise MsrlError(
            "preprocess.append_eod=true: the tokenizer of "
            f"{tokenizer.folder} has no end-of-text token"
        )
    return number


def _eos_token_id(tokenizer: TextTokenizer, renderer: Renderer | None) -> int | None:
    """Return the id of the token that ends an answer or a document."""
    if renderer is not None:
        return renderer.eos_token_id
    return None if tokenizer.eos_token is None else tokenizer.token_id(tokenizer.eos_token)


def _check_not_empty(
    num_examples: int, dropped: Mapping[str, int], files: tuple[DataFile, ...]
) -> None:
    """Raise MsrlError if there is nothing to write."""
    if not num_examples:
        reasons = ", ".join(
            f"{n:,} ({reason_text(reason)})" for reason, n in sorted(dropped.items())
        )
        reason = f"all rows were dropped ({reasons})" if reasons else "there are no rows"
        raise MsrlError(
            f"preprocess.input={', '.join(map(str, files[:3]))}: nothing to write: {reason}. "
            "Check the handler, its columns (preprocess.map_keys) and preprocess.seq_length."
        )


def _check_kept(names: Iterable[str], kept: Set[str], unread: Mapping[str, int]) -> None:
    """Raise MsrlError if no row has a column that prompts must keep."""
    missing = [name for name in names if name != ALL and name not in kept]
    if missing:
        hint = f"; {nearest(missing[0], unread)}" if unread else ""
        raise MsrlError(
            f"preprocess.keep={missing[0]}: no row has this column, or the handler reads it. Name "
            f"another column, or none{hint}"
        )


def _require(key: str, value: str | None) -> str:
    """Return the value of a key. Raises MsrlError if it is not set."""
    if value is None:
        raise MsrlError(f"preprocess.{key}: not set. Pass --{key.replace('_', '-')}.")
    return value
