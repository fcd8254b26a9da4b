"""``Timeline``: which op ran where and when, predicted by the simulator or recorded by the runtime.

One set of metrics reads both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple

import msgspec

from penstock.errors import FileError, ScheduleError
from penstock.schedule.memory import (
    Curve,
    Sizes,
    changes,
    curve,
    even_sizes,
    peak_activations,
    peaks,
    units,
)
from penstock.schedule.op import COMPUTE, Kind, Op
from penstock.schedule.schedule import Schedule
from penstock.values import expect

BUSY = COMPUTE | {Kind.RECOMPUTE, Kind.UPDATE}
"""Kinds that count as work; sends and receives are waiting."""

Source = Literal["predicted", "measured"]


class Span(NamedTuple):
    """One op on one rank from ``start`` to ``end`` (seconds, or the unit of the costs)."""

    op: Op
    rank: int
    start: float
    end: float


_SLICE = itemgetter(3)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    source: Source
    num_ranks: int
    spans: list[tuple[str, int, float, float]]


class Row(NamedTuple):
    """One rank: its ops, when each starts and when each ends."""

    ops: Sequence[Op]
    starts: array[float]
    ends: array[float]


@dataclass(frozen=True)
class Timeline:
    """What happened, or is predicted to happen, on every rank during one minibatch.

    Attributes:
        rows: one per rank, each in order of start. Times are kept as columns, so that a schedule
            of millions of ops stays small.
        name: of the schedule, for people.
        source: ``"predicted"`` or ``"measured"``.
    """

    rows: tuple[Row, ...]
    name: str = ""
    source: Source = "predicted"

    @classmethod
    def of(
        cls, spans: Iterable[Span], num_ranks: int, name: str = "", source: Source = "predicted"
    ) -> Timeline:
        """Build a timeline that starts at 0 from spans in any order."""
        ordered = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
        zero = min((span.start for span in ordered), default=0.0)
        ranks: list[list[Span]] = [[] for _ in range(num_ranks)]
        for span in ordered:
            ranks[span.rank].append(span)
        rows = (
            Row(
                tuple(span.op for span in spans),
                array("d", [span.start - zero for span in spans]),
                array("d", [span.end - zero for span in spans]),
            )
            for spans in ranks
        )
        return cls(tuple(rows), name, source)

    @property
    def num_ranks(self) -> int:
        """How many ranks, also those without a span."""
        return len(self.rows)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """In order of start on each rank; ranks one after the other."""
        return tuple(span for spans in self.by_rank for span in spans)

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank."""
        return tuple(
            tuple(Span(op, rank, start, end) for op, start, end in zip(*row, strict=True))
            for rank, row in enumerate(self.rows)
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The order of ops that it shows, of every kind that was recorded."""
        return Schedule.of(self._ops, self.name)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank computes, ascending."""
        return tuple(
            tuple(sorted({op.stage for op in row.ops if op.kind in COMPUTE})) for row in self.rows
        )

    @cached_property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into; 1 where it is not."""
        return 1 + max((max(map(_SLICE, row.ops), default=0) for row in self.rows), default=0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        starts = (min(row.starts) for row in self.rows if row.ops)
        ends = (max(row.ends) for row in self.rows if row.ops)
        return max(ends, default=0.0) - min(starts, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank worked."""
        return tuple(
            sum(end - start for op, start, end in zip(*row, strict=True) if op.kind in BUSY)
            for row in self.rows
        )

    @cached_property
    def bubble(self) -> float:
        """Makespan bubble: idle rank-time over all rank-time of one flushed step."""
        return _idle_share(self.busy, self.makespan)

    @cached_property
    def stage_bubble(self) -> float:
        """Stage bubble: idle share of the longest time any rank needs from its first op to its
        last. Realised only when the update does not synchronise the ranks, as with
        post-validation (arXiv 2401.10241, section 4)."""
        return _idle_share(self.busy, max(map(_extent, self.rows), default=0.0))

    @cached_property
    def in_flight(self) -> tuple[Curve, ...]:
        """Per rank, (time, activations held from then on), in microbatches of the rank's layers;
        a microbatch counts from its forward until its weight gradient is done."""
        sizes = even_sizes(self._num_stages)
        shares = units(self._ops, self.num_slices)
        return tuple(
            tuple((time, held / unit) for time, held in self._held(row, sizes))
            for row, unit in zip(self.rows, shares, strict=True)
        )

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most activations held at once, in microbatches of the rank's layers."""
        return peak_activations(self._ops, self.num_slices)

    def held(self, sizes: Sizes) -> tuple[Curve, ...]:
        """Per rank, (time, bytes of activations held from then on).

        Raises:
            InputError: the sizes are for another number of stages.
        """
        self._check_sizes(sizes)
        return tuple(self._held(row, sizes) for row in self.rows)

    def peak_bytes(self, sizes: Sizes) -> tuple[float, ...]:
        """Per rank, the most bytes of activations held at once; what stays from I until W counts
        at its own size.

        Raises:
            InputError: the sizes are for another number of stages.
        """
        self._check_sizes(sizes)
        return peaks(self._ops, sizes, self.num_slices)

    def _check_sizes(self, sizes: Sizes) -> None:
        expect(sizes, Sizes, "sizes", "give a penstock.Sizes")
        sizes.check_stages(self._num_stages)

    def _held(self, row: Row, sizes: Sizes) -> Curve:
        steps = changes(row.ops, sizes, self.num_slices)
        times = zip(row.starts, row.ends, strict=True)
        return curve((*time, *step) for time, step in zip(times, steps, strict=True))

    @cached_property
    def _ops(self) -> tuple[Sequence[Op], ...]:
        return tuple(row.ops for row in self.rows)

    @cached_property
    def _num_stages(self) -> int:
        return 1 + max((stage for own in self.stages_of for stage in own), default=-1)

    def to_json(self) -> str:
        """This timeline as JSON; ``from_json`` reads it back."""
        spans = [(str(span.op), span.rank, span.start, span.end) for span in self.spans]
        return msgspec.json.encode(_File(self.name, self.source, self.num_ranks, spans)).decode()

    @classmethod
    def from_json(cls, text: str, where: str = "text") -> Timeline:
        """Read what ``to_json`` wrote.

        Raises:
            FileError: it is something else; ``where`` is named.
        """
        try:
            file = msgspec.json.decode(text, type=_File)
            spans = [Span(Op.parse(op), rank, start, end) for op, rank, start, end in file.spans]
        except (msgspec.DecodeError, ScheduleError) as error:
            raise FileError(f"{where} is not a timeline: {error}") from None
        outside = [span for span in spans if not 0 <= span.rank < file.num_ranks]
        if outside:
            raise FileError(
                f"{where}: {outside[0].op} is on rank {outside[0].rank}, but num_ranks is "
                f"{file.num_ranks}"
            )
        return cls.of(spans, file.num_ranks, file.name, file.source)


def _idle_share(busy: tuple[float, ...], length: float) -> float:
    total = len(busy) * length
    return 1 - sum(busy) / total if total else 0.0


def _extent(row: Row) -> float:
    working = [at for at, op in enumerate(row.ops) if op.kind in BUSY]
    if not working:
        return 0.0
    return max(row.ends[at] for at in working) - min(row.starts[at] for at in working)
