"""Rows to records, chunk by chunk: here and in helper processes, always in file order, in bounded memory.

    RowSource ─ chunks ─▶ encode_chunk ─▶ records + Tally ─▶ Table (memory, or files of the cache)
                          each row: map, split, format, Encoder.draft; all texts: ids; each row: Draft.keep

Chunks do not depend on one another and tallies add up, so the result is the same however many processes work.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from postgrad.chat import ChatFormat, EncodedConversation, Printed
from postgrad.data.cache import Cache
from postgrad.data.columns import Columns
from postgrad.data.files import Chunk, Rejected, Row
from postgrad.data.formats import Format, Method, detect, require
from postgrad.data.join import Join
from postgrad.data.messages import BadRow
from postgrad.data.report import DataReport, report_of
from postgrad.data.sources import RowSource, Split, check_rejected, rows_of, two_formats
from postgrad.data.table import Record, Table, TableWriter
from postgrad.data.tally import Tally
from postgrad.data.worker import Helper, packed
from postgrad.errors import DataError, RecipeError

T = TypeVar("T")

PARALLEL_BYTES = 8 << 20
"""Files from this size on are encoded by helper processes: starting one takes about a second."""

Progress = Callable[[float, int], None]
"""(share of the work that is done, 0 to 1; rows so far)."""


@dataclass(frozen=True, slots=True)
class Draft(Generic[T]):
    """A row that has been read, as text: its conversations, and what is kept of the row once they are tokens.

    `keep` counts every row: kept, dropped or (by raising `BadRow`) rejected. It is called once, in the order of the rows.
    """

    printed: Sequence[Printed]
    keep: Callable[[Sequence[EncodedConversation], Tally], list[T]]


class Encoder(Protocol[T]):
    """Reads rows. Can be pickled."""

    @property
    def chat(self) -> ChatFormat: ...

    def draft(self, row: Row, format: Format) -> Draft[T]:
        """Raises `BadRow` for what is wrong with this row, `DataError` for what is wrong with the template."""
        ...


class TableEncoder(Encoder[Record], Protocol):
    @property
    def columns(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Work:
    """helpers: processes that encode beside this one; None = `$POSTGRAD_DATA_HELPERS`, else one per further processor for large files and
    none for small ones."""

    helpers: int | None = None
    progress: Progress | None = None

    def processes(self, size: int) -> int:
        if self.helpers is not None:
            return self.helpers
        if named := os.environ.get("POSTGRAD_DATA_HELPERS"):
            if not named.isdecimal():
                raise RecipeError(f"{named!r} is not a number of processes", where="POSTGRAD_DATA_HELPERS", hint="e.g. 0 or 4")
            return int(named)
        return (os.cpu_count() or 1) - 1 if size >= PARALLEL_BYTES else 0


DEFAULT_WORK = Work()


@dataclass(frozen=True, slots=True)
class PartJob:
    """What a helper must know of one part of the source."""

    name: str
    columns: Columns
    format: Format
    join: Join | None


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """What a helper needs to encode any chunk."""

    encoder: Encoder[T]
    parts: tuple[PartJob, ...]
    split: Split | None

    def encode_chunk(self, part: int, chunk: Chunk) -> tuple[list[T], Tally]:
        """Every row is read, then all their texts are encoded together, then every row is counted and kept or not."""
        items = list(rows_of([chunk], self.parts[part], self.split))
        drafts = [self._draft(item, self.parts[part].format) for item in items]
        printed = [conversation for draft in drafts for conversation in draft.printed]
        encoded = iter(self.encoder.chat.encode_printed(printed) if printed else ())
        made: list[T] = []
        tally = Tally()
        for item, draft in zip(items, drafts, strict=True):
            tally.rows += 1
            tally.columns |= set(item.fields) if isinstance(item, Row) else set()
            try:
                made += draft.keep(list(islice(encoded, len(draft.printed))), tally)
            except BadRow as error:
                tally.reject(item.place, str(error))
        return made, tally

    def _draft(self, item: Row | Rejected, format: Format) -> Draft[T]:
        if isinstance(item, Rejected):
            return _failing(BadRow(item.reason))
        if (found := detect(item.fields)) != format:
            return _other(item.name, found or "unknown")
        try:
            return self.encoder.draft(item, format)
        except (BadRow, DataError) as error:
            return _failing(error)


def _failing(error: Exception) -> Draft[Any]:
    """A row that cannot be used, which is said when it is its turn: the first of a file is the one that is named."""

    def keep(encoded: Sequence[EncodedConversation], tally: Tally) -> list[Any]:
        raise error

    return Draft((), keep)


def _other(name: str, format: str) -> Draft[Any]:
    """A row of another format than the file's."""

    def keep(encoded: Sequence[EncodedConversation], tally: Tally) -> list[Any]:
        tally.formats[format] += 1
        tally.first_other = tally.first_other or name
        return []

    return Draft((), keep)


def encode_row(encoder: Encoder[T], row: Row, format: Format, tally: Tally) -> list[T]:
    """One row on its own. Raises what the encoder does."""
    draft = encoder.draft(row, format)
    return draft.keep(encoder.chat.encode_printed(draft.printed), tally)


def encode(
    source: RowSource, method: Method | None, encoder: Encoder[T], take: Callable[[list[T]], None], *, work: Work, strict: bool = True
) -> Tally:
    """Encodes every row and hands what is kept to `take`, in order. `method` None accepts every format.

    Raises `DataError`: a format that the method does not train on, rows of two formats, and, where `strict`, more than `source.max_bad`
    rejected rows.
    """
    if method is not None:
        for part in source.parts:
            require(part.format, method, where=part.name)
    job = Job(encoder, tuple(PartJob(part.name, part.columns, part.format, part.join) for part in source.parts), source.split)
    total = Tally()
    kept_of_part = [0] * len(source.parts)
    rows_of_part = [0] * len(source.parts)
    with closing(_results(source, job, work.processes(source.size))) as results:
        for index, done, (made, tally) in results:
            if strict:
                check_rejected(total.rejected, total.rejected_count, source.max_bad, so_far=True)
            if total.formats and not rows_of_part[index]:
                break  # a part with two formats is complete, and the error names its counts only
            total.add(tally)
            rows_of_part[index] += tally.rows - tally.rejected_count
            kept_of_part[index] += len(made)
            take(made)
            if work.progress is not None:
                work.progress(done, total.rows)
    if strict:
        check_rejected(total.rejected, total.rejected_count, source.max_bad)
    total.parts = kept_of_part
    if total.formats:
        mixed = max(index for index, rows in enumerate(rows_of_part) if rows)
        raise two_formats(source.parts[mixed].format, rows_of_part[mixed] - total.formats.total(), total.formats, total.first_other)
    return total


def encode_all(source: RowSource, method: Method, encoder: TableEncoder, *, work: Work, cache: Cache | None) -> tuple[Table, DataReport]:
    """A table of everything that is kept, and the report. Large files go through the cache, if there is one."""

    def build(folder: Path | None) -> tuple[Table, Tally]:
        with TableWriter(encoder.columns, folder) as writer:
            tally = encode(source, method, encoder, writer.extend, work=work)
            return writer.table(), tally

    table, tally = cache.fetch(source, method, encoder, build) if cache and cache.takes(source) else build(None)
    return table, report_of(source, tally, encoder)


def _results(source: RowSource, job: Job[T], helpers: int) -> Generator[tuple[int, float, tuple[list[T], Tally]]]:
    """(part, share done, result) per chunk, in order."""
    parts = len(source.parts)
    chunks = ((index, chunk) for index, part in enumerate(source.parts) for chunk in part.chunks())
    if not helpers:
        for part, chunk in chunks:
            yield part, (part + chunk.done) / parts, job.encode_chunk(part, chunk)
        return
    with _Team(job, helpers) as team:
        waiting: deque[tuple[int, float, Future[Any]]] = deque()
        for part, chunk in chunks:
            waiting.append((part, (part + chunk.done) / parts, team.encode(part, chunk)))
            while waiting and (waiting[0][-1].done() or len(waiting) > _AHEAD + 2 * helpers):
                part_, done, future = waiting.popleft()
                yield part_, done, future.result()
        for part_, done, future in waiting:
            yield part_, done, future.result()


_AHEAD = 64
"""Chunks that this process may have encoded before it waits for an earlier one: about as many as while the first helper starts."""


class _Team:
    """Helper processes, each with a thread here that talks to it, and this process. Closing it ends them, whatever happened."""

    def __init__(self, job: Job[Any], count: int) -> None:
        self._own = job
        self._job = packed(job)
        self._count = count
        self._asked: list[Future[Any]] = []
        self._helpers: list[Helper] = []
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> _Team:
        try:
            self._helpers += [Helper(self._job) for _ in range(self._count)]
        except BaseException:  # those that did start must not stay
            self.__exit__()
            raise
        self._free = deque(self._helpers)
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def encode(self, part: int, chunk: Chunk) -> Future[Any]:
        """By a helper, as long as one has not two chunks to do; else here, now."""
        self._asked = [future for future in self._asked if not future.done()]
        if len(self._asked) < 2 * self._count:
            self._asked.append(self._threads.submit(self._ask, part, chunk))
            return self._asked[-1]
        own: Future[Any] = Future()
        try:
            own.set_result(self._own.encode_chunk(part, chunk))
        except Exception as error:  # raised when its turn comes, as if a helper had met it
            own.set_exception(error)
        return own

    def _ask(self, part: int, chunk: Chunk) -> Any:
        helper = self._free.popleft()  # as many helpers as threads, so one is always free; deque operations are atomic
        try:
            return helper.call(part, chunk)
        finally:
            self._free.append(helper)
