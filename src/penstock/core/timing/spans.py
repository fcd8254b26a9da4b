"""Parts of timelines: ops with their times, one by one or a rank at a time.

``encode`` and ``decode`` are the file that lists them with the versions of the weights that they
read; ``entries``, ``outputs`` and ``beat`` say when microbatches enter and leave a pipeline, and
how fast they follow each other.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.base.errors import FileError, InputError
from penstock.base.values import MOST_AMOUNT, Value, amount, decoded, expect, read_as, whole
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
    with read_as("Timeline", text, where):
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


_SAME = 1e-9
"""Relative: what additions in another order change."""


def entries(rows: Sequence[Row]) -> dict[int, float]:
    """When the first stage begins with each microbatch."""
    first: dict[int, float] = {}
    for op, start, _ in _forwards(rows):
        if not op.stage:
            first[op.microbatch] = min(start, first.get(op.microbatch, start))
    return dict(sorted(first.items()))


def outputs(rows: Sequence[Row]) -> dict[int, float]:
    """When the last stage has the output of each microbatch."""
    by_stage = outputs_by_stage(rows)
    return by_stage[max(by_stage)] if by_stage else {}


def outputs_by_stage(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    """When each stage has its output of each microbatch."""
    last: dict[int, dict[int, float]] = {}
    for op, _, end in _forwards(rows):
        ends = last.setdefault(op.stage, {})
        ends[op.microbatch] = max(end, ends.get(op.microbatch, end))
    return {stage: dict(sorted(ends.items())) for stage, ends in last.items()}


def _forwards(rows: Sequence[Row]) -> Iterator[tuple[Op, float, float]]:
    for row in rows:
        for op, start, end in zip(row.ops, row.starts, row.ends, strict=True):
            if op.kind is Kind.FORWARD:
                yield op, start, end


def slowest_beat(rows: Sequence[Row]) -> tuple[float, bool]:
    """(the beat that a stream comes to, whether it has come to it by now): that of the stage which
    is slowest. The others go faster only until they have worked off what lies between them."""
    stages = [list(ends.values()) for ends in outputs_by_stage(rows).values()]
    regular = [_regular_beat(times) for times in stages]
    beats = (
        _mean_beat(times) if same is None else same
        for times, same in zip(stages, regular, strict=True)
    )
    return max(beats, default=0.0), None not in regular


def window(rows: Sequence[Row], begins: float, ends: float) -> Iterator[Row]:
    """The part of rows that starts between two times, so that the first of them is 0."""
    for row in rows:
        first, last = (bisect_left(row.starts, time * (1 - _SAME)) for time in (begins, ends))
        yield Row(
            row.ops[first:last],
            array("d", [time - begins for time in row.starts[first:last]]),
            array("d", [time - begins for time in row.ends[first:last]]),
            row.versions[first:last] if row.versions else None,
        )


def beat(times: Sequence[float]) -> float:
    """From one of many regular events to the next, in the second half of them: the mean over whole
    periods, or over all where no period shows.

    Args:
        times: of events, ascending.

    Returns:
        Seconds, or whatever the times are in; 0 of fewer than two events.
    """
    regular = _regular_beat(times)
    return _mean_beat(times) if regular is None else regular


def _mean_beat(times: Sequence[float]) -> float:
    half = len(times) // 2
    later = times[half if half + 1 < len(times) else 0 :]
    return (later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else 0.0


def _regular_beat(times: Sequence[float]) -> float | None:
    """The mean of events over whole periods, and so exact; ``None`` where no period shows in the
    second half of them.

    A pipeline repeats itself after as many microbatches as fit into the loop that holds it up, with
    any rhythm in between.
    """
    half = len(times) // 2
    same = _SAME * max(map(abs, times), default=0.0)
    for period in range(1, len(times) // 4 + 1):
        whole = times[half + period] - times[half]
        if all(
            abs(times[place + period] - times[place] - whole) <= same
            for place in range(half, len(times) - period)
        ):
            return whole / period
    return None
