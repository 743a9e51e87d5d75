"""msrl preprocess: rows of text -> conversations -> token ids -> indexed files with a manifest, by several worker processes in order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path

from msrl.config.schema import Config, PreprocessConfig
from msrl.data.chat_template import chat_template
from msrl.data.handlers import make_handler
from msrl.data.manifest import KEYS
from msrl.data.readers import RowBatch, find_files, read_batches
from msrl.data.render import Renderer, make_renderer
from msrl.data.templates import Template, load_template, template_names
from msrl.data.tokenize import TokenizedRows, TokenizeSettings, tokenize_rows
from msrl.data.tokenizer import TextTokenizer, open_tokenizer, tokenizer_hash
from msrl.data.writer import DatasetWriter
from msrl.errors import MsrlError
from msrl.types import DatasetManifest
from msrl.workflows.training.interrupts import children_ignore_interrupts

_REPORT_EVERY_S = 5.0


def run(config: Config) -> DatasetManifest:
    """Preprocesses as `config.preprocess` says. Raises MsrlError for anything that the user has to mend; then no data is written."""
    settings = config.preprocess
    files = find_files(settings.input)
    job = make_job(settings)
    prefix = _needed("output_prefix", settings.output_prefix)
    capacity = settings.seq_length if settings.pack else None
    start = time.perf_counter()
    pad = job.tokenizer.pad_token_id
    writing = DatasetWriter(prefix, job.handler.kind, capacity=capacity, pad_token_id=pad, overwrite=settings.overwrite)
    with _exit_when_terminated(), writing as writer:
        progress = PreprocessProgress(start)
        for result in tokenise_all(job, read_batches(files), settings.workers):
            writer.add(result)
            progress.report(writer)
        writer.finish()
        manifest = make_manifest(settings, job, writer)
        _check_not_empty(manifest, files)
        manifest = writer.commit(manifest)
    print(summary(prefix, manifest, time.perf_counter() - start))
    return manifest


def make_job(settings: PreprocessConfig) -> TokenizeSettings:
    """What is done with every row, checked before any row is read. Raises MsrlError."""
    name = _needed("handler", settings.handler)
    handler = make_handler(name, kind=settings.kind, map_keys=settings.map_keys, options=settings.options)
    _check_kind(settings, handler.kind)
    template = None if handler.kind == "pretrain" else _template(settings.template)
    tokenizer = open_tokenizer(_needed("tokenizer", settings.tokenizer))
    renderer = None if template is None else make_renderer(template, tokenizer, enable_thinking=settings.enable_thinking)
    end = _end_of_document(tokenizer) if settings.append_eod else None
    return TokenizeSettings(handler, tokenizer, renderer, settings.seq_length, settings.too_long == "truncate", end)


def tokenise_all(job: TokenizeSettings, batches: Iterable[RowBatch], workers: int) -> Iterator[TokenizedRows]:
    """The result of every batch, in order: in this process (on all cores of the tokenizer's own threads), or in `workers` others."""
    if workers == 1:
        yield from (tokenize_rows(job, batch) for batch in batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job,))
    try:
        yield from _in_order(pool, batches, ahead=3 * workers)
    except BrokenProcessPool as error:
        raise MsrlError("a worker process was killed, most likely for want of memory; use fewer preprocess.workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def make_manifest(settings: PreprocessConfig, job: TokenizeSettings, writer: DatasetWriter) -> DatasetManifest:
    """What was written and dropped."""
    counts, kind, renderer = writer.counts, job.handler.kind, job.renderer
    loss_tokens = {"sft": counts["loss_tokens"], "pretrain": counts["tokens"], "prompts": 0}
    return DatasetManifest(
        kind=kind,
        template="" if renderer is None else renderer.template.name,
        handler=job.handler.name,
        tokenizer_hash=tokenizer_hash(job.tokenizer),
        vocab_size=job.tokenizer.vocab_size,
        seq_length=settings.seq_length or writer.max_tokens,
        pack=settings.pack,
        num_rows=counts["rows"],
        num_examples=counts["examples"],
        num_tokens=counts["tokens"],
        num_loss_tokens=loss_tokens[kind],
        max_tokens=writer.max_tokens,
        dropped=dict(sorted(writer.dropped.items())),
        keys=KEYS[kind],
        eos_token_id=_eos_token_id(job.tokenizer, renderer),
        stop_token_ids=() if renderer is None else renderer.stop_token_ids,
        truncated=counts["truncated"],
        chat_template="" if renderer is None else chat_template(renderer),
    )


def summary(prefix: str, manifest: DatasetManifest, wall_s: float) -> str:
    """What was done, in a few words."""
    dropped = ", ".join(f"{number:,} {reason.replace('_', ' ')}" for reason, number in manifest.dropped.items()) or "none"
    packed = f" in {manifest.num_rows:,} rows" if manifest.pack else ""
    truncated = f"; truncated: {manifest.truncated:,}" if manifest.truncated else ""
    return (
        f"{prefix}: {manifest.num_examples:,} {_NOUNS[manifest.kind]}{packed}, {manifest.num_tokens:,} tokens "
        f"(longest {manifest.max_tokens:,}), {wall_s:.1f} s; dropped: {dropped}{truncated}"
    )


_NOUNS = {"pretrain": "documents", "sft": "examples", "prompts": "prompts"}


class PreprocessProgress:
    """A line on standard error every few seconds."""

    def __init__(self, start: float) -> None:
        self._start = self._last = start

    def report(self, writer: DatasetWriter) -> None:
        """Says how far it is, if it is time."""
        now = time.perf_counter()
        if now - self._last >= _REPORT_EVERY_S:
            self._last = now
            rows, tokens = writer.counts["read"], writer.counts["tokens"]
            print(f"preprocess: {rows:,} rows, {tokens:,} tokens, {rows / (now - self._start):,.0f} rows/s", file=sys.stderr, flush=True)


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[RowBatch], ahead: int) -> Iterator[TokenizedRows]:
    """Results in the order of the batches, with at most `ahead` batches on their way."""
    waiting: deque[Future[TokenizedRows]] = deque()
    for batch in batches:
        with children_ignore_interrupts():  # the pool starts a worker for a batch while it has fewer than it may
            waiting.append(pool.submit(_work, batch))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextlib.contextmanager
def _exit_when_terminated() -> Generator[None, None, None]:
    """SIGTERM, which batch systems and containers send, tidies up as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_JOB: list[TokenizeSettings] = []


def _start_worker(job: TokenizeSettings) -> None:
    """A worker's first act: one thread each, the job kept. Ctrl-C is the main process's to handle, whose end is a worker's too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _JOB.append(job)


def _end_with_parent() -> None:
    """End when the main process has been killed: the queue that a worker waits at stays open, since the other workers hold it."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(batch: RowBatch) -> TokenizedRows:
    return tokenize_rows(_JOB[0], batch)


def _template(name: str | None) -> Template:
    """The template, which conversations need."""
    if name is None:
        raise MsrlError(f"preprocess.template: not set, and conversations need one; known: {', '.join(template_names())}, or a .yaml file")
    return load_template(name)


def _check_kind(settings: PreprocessConfig, kind: str) -> None:
    """That no key is set which this kind of data has no use for."""
    wrong = {
        "pack": settings.pack and kind != "sft",
        "too_long": settings.too_long == "truncate" and kind != "sft",
        "seq_length": settings.seq_length is not None and kind == "pretrain",
        "template": settings.template is not None and kind == "pretrain",
        "enable_thinking": settings.enable_thinking is not None and kind == "pretrain",
        "append_eod": settings.append_eod and kind != "pretrain",
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise MsrlError(f"preprocess.{key}={getattr(settings, key)}: means nothing for {kind} data; leave it out")
    if settings.pack and settings.seq_length is None:
        raise MsrlError("preprocess.pack: needs the length of a row; set preprocess.seq_length")


def _end_of_document(tokenizer: TextTokenizer) -> int:
    """The token that ends a document."""
    number = None if tokenizer.eos_token is None else tokenizer.token_id(tokenizer.eos_token)
    if number is None:
        raise MsrlError(f"preprocess.append_eod: the tokenizer of {tokenizer.folder} has no end-of-text token")
    return number


def _eos_token_id(tokenizer: TextTokenizer, renderer: Renderer | None) -> int | None:
    """The token that ends an answer, or a document."""
    if renderer is not None:
        return renderer.eos_token_id
    return None if tokenizer.eos_token is None else tokenizer.token_id(tokenizer.eos_token)


def _check_not_empty(manifest: DatasetManifest, files: tuple[Path, ...]) -> None:
    """That something is left to write."""
    if not manifest.num_examples:
        dropped = ", ".join(f"{number} {reason}" for reason, number in manifest.dropped.items())
        why = f"all rows were dropped ({dropped})" if dropped else "there are no rows"
        raise MsrlError(f"preprocess.input={', '.join(map(str, files[:3]))}: nothing to write: {why}")


def _needed(key: str, value: str | None) -> str:
    """A key that must be set."""
    if value is None:
        raise MsrlError(f"preprocess.{key}: not set; give --{key.replace('_', '-')}")
    return value
