"""Parts of timelines: ops with their times, one by one or a rank at a time, and the file that lists
them with the versions of the weights that they read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.base.errors import FileError, InputError
from penstock.base.values import MOST_AMOUNT, Value, amount, decoded, expect, refused_as, whole
from penstock.core.schedule.op import COMPUTE, Activations, Kind, Op

BUSY = COMPUTE | {Kind.RECOMPUTE, Kind.UPDATE, Kind.LATE_UPDATE}
"""Kinds that count as work; sends and receives are waiting."""

Source = Literal["predicted", "measured"]
TransferKind = Literal["sum", "value", "gradient", "read", "write", "served"]

ALL_OF_STAGE = -1
"""As the number of a transfer: what comes or goes is the stage's, and no microbatch's."""


NO_VERSION = -1
"""Among versions: the op reads no weights."""


class Span(NamedTuple):
    """One op on one rank from ``start`` to ``end`` (seconds, or the unit of the costs).

    ``version`` is that of the stage's weights that the op read; of an update, how many came before
    it; ``None`` where it reads none or nobody knows.
    """

    op: Op
    rank: int
    start: float
    end: float
    version: int | None = None


class Transfer(NamedTuple):
    """Something that keeps links or tiers busy from ``start`` to ``end`` (seconds, or the unit of
    costs).

    Attributes:
        ranks: of a message, its source and its target; of a sum, all that take part, ascending; of
            what a server has, or comes from a tier or goes there, the one whose it is.
        kind: ``"sum"``: a part of gradients on its way to the sum and back; ``"value"``: a stage's
            output; ``"gradient"``: that of a stage's input; ``"read"`` and ``"write"``: what comes
            from a tier, and what goes there; ``"served"``: gradients at a server, from when they
            leave until its sums, or weights, are here.
        stage: whose gradients or output it is; of ``"gradient"``, the stage that has made it.
        number: of a sum, the part's; of what a server has, the server's, from 0; otherwise the
            microbatch, or −1 where it is the stage's.
    """

    ranks: tuple[int, ...]
    kind: TransferKind
    stage: int
    number: int
    start: float
    end: float


class Row(NamedTuple):
    """One rank: its ops, when each starts and when each ends.

    ``versions`` has one per op: the version of the stage's weights that it read (as many updates
    came before); of an update, how many came before it; −1 where it reads none. ``None`` if they
    are not known, or there is no op.
    """

    ops: Sequence[Op]
    starts: array[float]
    ends: array[float]
    versions: Sequence[int] | None = None


def spans_of(row: Row, rank: int) -> Iterator[Span]:
    """The spans of a rank, in their order."""
    if row.versions is None:
        for op, start, end in zip(*row[:3], strict=True):
            yield Span(op, rank, start, end)
        return
    for op, start, end, version in zip(*row[:3], row.versions, strict=True):
        yield Span(op, rank, start, end, None if version == NO_VERSION else version)


def version_of(span: Span) -> int:
    """The version that a span says, as rows have it: −1 for none."""
    return NO_VERSION if span.version is None else span.version


_MOST_STAGES = 1_000_000


class TimelineFile(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The file of a timeline; spans are (op, rank, start, end).

    Attributes:
        versions: one per span, −1 where it reads none; left out where none are known.
        activations: which of them backwards go through; left out where it is their own.
        arrivals: when microbatches came from a source; left out where all were there.
        transfers: (ranks, kind, stage, number, start, end) of what kept links busy; left out where
            nothing is known.
    """

    name: str
    source: Source
    num_ranks: int
    spans: tuple[tuple[str, int, float, float], ...]
    versions: tuple[int, ...] | None = None
    activations: Activations = "own"
    arrivals: tuple[float, ...] = ()
    transfers: tuple[tuple[tuple[int, ...], TransferKind, int, int, float, float], ...] = ()


def encode(
    spans: Sequence[Span],
    num_ranks: int,
    name: str,
    source: Source,
    *,
    with_versions: bool,
    activations: Activations = "own",
    arrivals: tuple[float, ...] = (),
    transfers: Sequence[Transfer] = (),
) -> str:
    """A timeline as JSON."""
    file = TimelineFile(
        name=name,
        source=source,
        num_ranks=num_ranks,
        spans=tuple((str(span.op), span.rank, span.start, span.end) for span in spans),
        versions=tuple(map(version_of, spans)) if with_versions else None,
        activations=activations,
        arrivals=arrivals,
        transfers=tuple(transfers),
    )
    return msgspec.json.encode(file).decode()


def decode(text: str, where: str) -> tuple[TimelineFile, list[Span]]:
    """Read what ``encode`` wrote; also its spans.

    Raises:
        FileError: it is something else; ``where`` is named.
    """
    expect(text, str | bytes, "the timeline's text", "read it from its file first")
    with refused_as(f"{where} is not a timeline"):
        file = decoded(text, TimelineFile)
        spans = [Span(Op.parse(op), rank, start, end) for op, rank, start, end in file.spans]
        num_ranks = whole("num_ranks", file.num_ranks, 0, _MOST_STAGES)
        _check_spans(spans, num_ranks)
        _check_transfers(file, num_ranks)
    if file.versions is not None:
        spans = _versioned(spans, file.versions, where)
    return file, spans


def _check_spans(spans: Iterable[Span], num_ranks: int) -> None:
    """Raise ``InputError`` for a span on no rank, of no stage that can be, or at no time."""
    for op, rank, start, end, _ in spans:
        if not 0 <= rank < num_ranks:
            raise InputError(f"{op} is on rank {rank}, but num_ranks is {num_ranks}")
        whole(f"{op}: its stage", op.stage, 0, _MOST_STAGES)
        if not -MOST_AMOUNT <= start <= end <= MOST_AMOUNT:
            raise InputError(
                f"{op} starts at {start} and ends at {end}; give the earlier one first"
            )
        amount(f"{op}: how long it takes", end - start, most=2 * MOST_AMOUNT)


def _check_transfers(file: TimelineFile, num_ranks: int) -> None:
    """Raise ``InputError`` for a transfer between ranks that there are not, or at no time."""
    for ranks, kind, stage, number, start, end in file.transfers:
        subject = f"the {kind} {number} of stage {stage}"
        enough = len(ranks) == 1 if kind in ("read", "write", "served") else len(ranks) > 1
        if not enough or not all(0 <= rank < num_ranks for rank in ranks):
            raise InputError(f"{subject} is of ranks {ranks}, but num_ranks is {num_ranks}")
        whole(f"{subject}: its stage", stage, 0, _MOST_STAGES)
        if not -MOST_AMOUNT <= start <= end <= MOST_AMOUNT:
            raise InputError(
                f"{subject} starts at {start} and ends at {end}; give the earlier first"
            )


def _versioned(spans: list[Span], versions: Sequence[int], where: str) -> list[Span]:
    if len(versions) != len(spans):
        raise FileError(f"{where} has {len(spans)} spans, but {len(versions)} versions")
    wrong = next((version for version in versions if version < NO_VERSION), None)
    if wrong is not None:
        raise FileError(f"{where}: a version is {wrong}, but must be ≥ 0, or −1 for none")
    return [
        span if version == NO_VERSION else span._replace(version=version)
        for span, version in zip(spans, versions, strict=True)
    ]
