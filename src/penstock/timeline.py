"""``Timeline``: which op ran where and when, predicted by the simulator or recorded by the runtime.

One set of metrics reads both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from penstock.errors import FileError, ScheduleError
from penstock.schedule.op import COMPUTE, RELEASING, Kind, Op

BUSY = COMPUTE | {Kind.UPDATE}
"""Kinds that count as work; sends and receives are waiting."""

Source = Literal["predicted", "measured"]


class Span(NamedTuple):
    """One op on one rank from ``start`` to ``end`` (seconds, or the unit of the costs)."""

    op: Op
    rank: int
    start: float
    end: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    source: Source
    num_ranks: int
    spans: list[tuple[str, int, float, float]]


@dataclass(frozen=True)
class Timeline:
    """What happened, or is predicted to happen, on every rank during one minibatch.

    Attributes:
        spans: in order of start on each rank; ranks one after the other.
        num_ranks: how many ranks, also those without a span.
        name: of the schedule, for people.
        source: ``"predicted"`` or ``"measured"``.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    name: str = ""
    source: Source = "predicted"

    @classmethod
    def of(
        cls, spans: Iterable[Span], num_ranks: int, name: str = "", source: Source = "predicted"
    ) -> Timeline:
        """Build a timeline that starts at 0 from spans in any order."""
        ordered = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
        zero = min((span.start for span in ordered), default=0.0)
        shifted = (Span(op, rank, start - zero, end - zero) for op, rank, start, end in ordered)
        return cls(tuple(shifted), num_ranks, name, source)

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank."""
        ranks: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            ranks[span.rank].append(span)
        return tuple(tuple(spans) for spans in ranks)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank computes, ascending."""
        return tuple(
            tuple(sorted({span.op.stage for span in spans if span.op.kind in COMPUTE}))
            for spans in self.by_rank
        )

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        starts = (span.start for span in self.spans)
        return max((span.end for span in self.spans), default=0.0) - min(starts, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank worked."""
        return tuple(
            sum(span.end - span.start for span in spans if span.op.kind in BUSY)
            for spans in self.by_rank
        )

    @cached_property
    def bubble(self) -> float:
        """Makespan bubble: idle rank-time over all rank-time of one flushed step."""
        return _idle_share(self.busy, self.makespan)

    @cached_property
    def stage_bubble(self) -> float:
        """Stage bubble: idle share of the longest time any rank needs from its first op to its
        last. Realised only when the update does not synchronise the ranks (arXiv 2401.10241,
        section 4)."""
        return _idle_share(self.busy, max(map(_extent, self.by_rank), default=0.0))

    @cached_property
    def in_flight(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Per rank, (time, activations held from then on), in microbatches of the rank's layers."""
        curves = []
        for spans, stages in zip(self.by_rank, self.stages_of, strict=True):
            held, curve = 0, [(0.0, 0.0)]
            for span in spans:
                if span.op.kind is Kind.FORWARD:
                    held += 1
                    curve.append((span.start, held / len(stages)))
                elif span.op.kind in RELEASING:
                    held -= 1
                    curve.append((span.end, held / len(stages)))
            curves.append(tuple(curve))
        return tuple(curves)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most activations held at once, in microbatches of the rank's layers."""
        return tuple(max(held for _, held in curve) for curve in self.in_flight)

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
        return cls(tuple(spans), file.num_ranks, file.name, file.source)


def _idle_share(busy: tuple[float, ...], length: float) -> float:
    total = len(busy) * length
    return 1 - sum(busy) / total if total else 0.0


def _extent(spans: tuple[Span, ...]) -> float:
    working = [span for span in spans if span.op.kind in BUSY]
    return max((s.end for s in working), default=0.0) - min((s.start for s in working), default=0.0)
