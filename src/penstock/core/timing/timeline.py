"""``Timeline``: which op ran where and when, predicted by the simulator or recorded by the runtime.

One set of metrics reads both.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import sub

from penstock.base.errors import InputError
from penstock.base.lazily import method_provided
from penstock.base.values import expect, read_text, whole, write_atomically
from penstock.core.schedule.columns import RankOps
from penstock.core.schedule.memory import (
    Curve,
    Sizes,
    changes,
    curve,
    even_sizes,
    peak_activations,
    peaks,
    units,
)
from penstock.core.schedule.op import RELEASING, Activations, Kind
from penstock.core.schedule.schedule import Schedule
from penstock.core.timing.spans import (
    BUSY,
    NO_VERSION,
    Row,
    Source,
    Span,
    Transfer,
    beat,
    decode,
    encode,
    entries,
    outputs,
    outputs_by_stage,
    spans_of,
    version_of,
    window,
)


@dataclass(frozen=True)
class Timeline:
    """Ops with their times, measured or predicted, on every rank during one minibatch.

    Attributes:
        rows: one per rank, each in order of start. Times are kept as columns, so that a schedule
            of millions of ops stays small.
        name: the schedule's, for people.
        source: ``"predicted"`` or ``"measured"``.
        activations: which activations backwards go through, as ``Schedule`` has it.
        arrivals: when each microbatch came from a live source, from number 0 on; empty where all
            were there at the beginning.
        transfers: what kept links busy meanwhile, as far as it is known.
    """

    rows: tuple[Row, ...]
    name: str = ""
    source: Source = "predicted"
    activations: Activations = "own"
    arrivals: tuple[float, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @classmethod
    def of(
        cls,
        spans: Iterable[Span],
        num_ranks: int,
        name: str = "",
        source: Source = "predicted",
        activations: Activations = "own",
        arrivals: Sequence[float] = (),
        transfers: Iterable[Transfer] = (),
    ) -> Timeline:
        """Build a timeline that starts at 0 from spans and transfers in any order."""
        ordered = sorted(spans, key=lambda span: (span.rank, span.start, span.end))
        zero = min((span.start for span in ordered), default=0.0)
        ranks: list[list[Span]] = [[] for _ in range(num_ranks)]
        known = False
        for span in ordered:
            ranks[span.rank].append(span)
            known = known or span.version is not None
        rows = (
            Row(
                tuple(span.op for span in spans),
                array("d", [span.start - zero for span in spans]),
                array("d", [span.end - zero for span in spans]),
                tuple(map(version_of, spans)) if known and spans else None,
            )
            for spans in ranks
        )
        moved = (
            transfer._replace(start=transfer.start - zero, end=transfer.end - zero)
            for transfer in transfers
        )
        return cls(
            tuple(rows),
            name,
            source,
            activations,
            tuple(time - zero for time in arrivals),
            tuple(sorted(moved)),
        )

    def with_versions(self, versions: Sequence[Sequence[int]]) -> Timeline:
        """This timeline with what weights its ops read, as ``versions.trace`` says it.

        Args:
            versions: of each rank, one per op, in the order of the rank's ops; −1 of an op that
                reads none.

        Raises:
            InputError: there are versions of another number of ranks, or not one per op.
        """
        if len(versions) != self.num_ranks:
            raise InputError(
                f"there are versions of {len(versions)} ranks, but the timeline has "
                f"{self.num_ranks}; give one sequence per rank"
            )
        for rank, (row, read) in enumerate(zip(self.rows, versions, strict=True)):
            if len(row.ops) != len(read):
                raise InputError(
                    f"rank {rank} has {len(row.ops)} ops, but {len(read)} versions; give one per op"
                )
            if min(read, default=0) < NO_VERSION:
                raise InputError(
                    f"a version on rank {rank} is {min(read)}, but must be ≥ 0, or −1 for none"
                )
        rows = (
            row._replace(versions=tuple(read) or None)
            for row, read in zip(self.rows, versions, strict=True)
        )
        return replace(self, rows=tuple(rows))

    _repr_html_ = method_provided("timeline_cell")

    @property
    def has_versions(self) -> bool:
        """Whether the timeline says which version of the weights each op read."""
        return all(row.versions is not None or not row.ops for row in self.rows)

    @cached_property
    def delays(self) -> dict[int, dict[int, int]]:
        """Per stage, per microbatch: how many updates lie between the version that its forward read
        and the one that its gradient was applied to, by the first update of the stage behind its
        backward. A microbatch of which forward or update are not shown is left out.

        Raises:
            InputError: it is not known which versions ops read.
        """
        self.check_versions()
        delays: dict[int, dict[int, int]] = {}
        for row in self.rows:
            for stage, microbatch, delay in _row_delays(row):
                delays.setdefault(stage, {})[microbatch] = delay
        return {stage: dict(sorted(delays[stage].items())) for stage in sorted(delays)}

    def check_versions(self) -> None:
        """Raise ``InputError`` if it is not known which versions ops read."""
        if not self.has_versions:
            raise InputError(
                f"the timeline {self.name!r} does not say which version of the weights its ops "
                "read; give it versions (with_versions), or do without them"
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, also those without a span."""
        return len(self.rows)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in order of start on each rank; ranks one after the other."""
        return tuple(span for spans in self.by_rank for span in spans)

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank."""
        return tuple(tuple(spans_of(row, rank)) for rank, row in enumerate(self.rows))

    @cached_property
    def schedule(self) -> Schedule:
        """The order of ops that the timeline shows, of every kind that was recorded."""
        return Schedule(self._ops, self.name, self.activations)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank computes, ascending."""
        return tuple(ops.stages for ops in self._ops)

    @cached_property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into; 1 where it is not."""
        return max((ops.num_slices for ops in self._ops), default=1)

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
            sum(compress(map(sub, row.ends, row.starts), ops.are_of(BUSY).tolist()))
            for row, ops in zip(self.rows, self._ops, strict=True)
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
    def rate(self) -> float:
        """How many outputs leave the pipeline per second, in the second half of a stream; 0 where
        fewer than two do."""
        seconds = beat(list(outputs(self.rows).values()))
        return 1 / seconds if seconds else 0.0

    @cached_property
    def latencies(self) -> tuple[float, ...]:
        """How long after its arrival each microbatch has its output, waiting included; where there
        are no ``arrivals``, as ``transits``."""
        if not self.arrivals:
            return self.transits
        return tuple(end - self.arrivals[number] for number, end in outputs(self.rows).items())

    @cached_property
    def transits(self) -> tuple[float, ...]:
        """From the start of each microbatch's first forward to its output. Without arrivals the
        first stage takes as many as its order allows, so that they queue between stages."""
        begins = entries(self.rows)
        return tuple(
            end - begins[number] for number, end in outputs(self.rows).items() if number in begins
        )

    def steady(self, num_ticks: int) -> Timeline:
        """The last ticks of a stream in which all stages still work forward: what it looks like
        while it goes on, without its beginning and its end.

        Args:
            num_ticks: how many, each from one frame's first forward to the next one's.

        Raises:
            InputError: the stream has not so many more frames than fill the pipeline twice.
        """
        whole("num_ticks", num_ticks, 1)
        begins = list(entries(self.rows).values())
        filling = 2 * len(outputs_by_stage(self.rows))
        first = len(begins) - num_ticks - filling
        if first < filling:
            raise InputError(
                f"{num_ticks} ticks of the steady state need {num_ticks + 2 * filling} "
                f"microbatches, but there are {len(begins)}; simulate a longer stream"
            )
        rows = window(self.rows, begins[first], begins[first + num_ticks])
        begin, end = begins[first], begins[first + num_ticks]
        moved = (
            transfer._replace(start=transfer.start - begin, end=transfer.end - begin)
            for transfer in self.transfers
            if begin <= transfer.start and transfer.end <= end
        )
        return replace(self, rows=tuple(rows), arrivals=(), transfers=tuple(moved))

    @cached_property
    def in_flight(self) -> tuple[Curve, ...]:
        """Per rank, (time, activations held from then on), in microbatches of the rank's layers;
        a microbatch counts from its forward until its weight gradient is done."""
        sizes = even_sizes(self._num_stages)
        shares = units(self._ops, self.num_slices)
        return tuple(
            tuple((time, held / unit) for time, held in whole)
            for whole, unit in zip(self._held(sizes), shares, strict=True)
        )

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most activations held at once, in microbatches of the rank's layers."""
        return peak_activations(self._ops, self.num_slices, self.activations)

    def held(self, sizes: Sizes) -> tuple[Curve, ...]:
        """Per rank, (time, bytes of activations held from then on).

        Raises:
            InputError: the sizes are for another number of stages.
        """
        self._check_sizes(sizes)
        return tuple(self._held(sizes))

    def peak_bytes(self, sizes: Sizes) -> tuple[float, ...]:
        """Per rank, the most bytes of activations held at once; what stays from I until W counts
        at its own size.

        Raises:
            InputError: the sizes are for another number of stages.
        """
        self._check_sizes(sizes)
        return peaks(self._ops, sizes, self.num_slices, self.activations)

    def _check_sizes(self, sizes: Sizes) -> None:
        expect(sizes, Sizes, "sizes", "give a penstock.Sizes")
        sizes.check_stages(self._num_stages)

    def _held(self, sizes: Sizes) -> Iterator[Curve]:
        for row, ops in zip(self.rows, self._ops, strict=True):
            steps = changes(ops, sizes, self.num_slices, self.activations)
            at_start, change = (column.tolist() for column in steps)
            yield curve(zip(row.starts, row.ends, at_start, change, strict=True))

    @cached_property
    def _ops(self) -> tuple[RankOps, ...]:
        return tuple(RankOps.of(row.ops) for row in self.rows)

    @cached_property
    def _num_stages(self) -> int:
        return 1 + max((stage for stages in self.stages_of for stage in stages), default=-1)

    def to_json(self) -> str:
        """This timeline as JSON; ``from_json`` reads it back."""
        known = any(row.versions is not None for row in self.rows)
        return encode(
            self.spans,
            self.num_ranks,
            self.name,
            self.source,
            with_versions=known,
            activations=self.activations,
            arrivals=self.arrivals,
            transfers=self.transfers,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this timeline to ``path`` as JSON, atomically; ``penstock draw`` takes the file.

        Raises:
            FileError: the file cannot be written.
        """
        write_atomically(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read what ``save`` wrote.

        Raises:
            FileError: the file is not there, or holds something else.
        """
        return cls.from_json(read_text(path), where=str(path))

    @classmethod
    def from_traces(cls, paths: Sequence[str | os.PathLike[str]], step: int = -1) -> Timeline:
        """The measured timeline of a pipeline that something else ran, from the Chrome traces of
        its ranks, as ``torch.profiler`` exports them. Ops are the events that are called ``PP:0F1``
        (torch's pipelines, and torchtitan's), ``Forward 1``, or ``0F1``.

        Args:
            paths: a file for each rank of one pipeline, ``.json`` or ``.json.gz``. A trace says its
                rank, or its name does (``rank0.json``).
            step: which of the steps that were traced, from 0, or from the end; the last one by
                default.

        Raises:
            FileError: a file is no such trace, or has no ops.
            InputError: two files are of one rank, or there is no such step.
        """
        from penstock.core.timing.traces import timeline_of_traces

        return timeline_of_traces(paths, step)

    @classmethod
    def from_json(cls, text: str, where: str = "text") -> Timeline:
        """Read what ``to_json`` wrote.

        Raises:
            FileError: it is something else; ``where`` is named.
        """
        file, spans = decode(text, where)
        return cls.of(
            spans,
            file.num_ranks,
            file.name,
            file.source,
            file.activations,
            file.arrivals,
            [Transfer(*transfer) for transfer in file.transfers],
        )


def _row_delays(row: Row) -> Iterator[tuple[int, int, int]]:
    """(stage, microbatch, delay) of the gradients that are applied on a rank."""
    read: dict[tuple[int, int], int] = {}
    waiting: dict[int, set[int]] = {}
    for op, version in zip(row.ops, row.versions or (), strict=True):
        if op.kind is Kind.FORWARD:
            read[op.stage, op.microbatch] = version
        elif op.kind in RELEASING:
            waiting.setdefault(op.stage, set()).add(op.microbatch)
        elif op.kind is Kind.UPDATE:
            for microbatch in waiting.pop(op.stage, ()):
                if (op.stage, microbatch) in read:
                    yield op.stage, microbatch, version - read[op.stage, microbatch]


def _idle_share(busy: tuple[float, ...], length: float) -> float:
    total = len(busy) * length
    return 1 - sum(busy) / total if total else 0.0


def _extent(row: Row) -> float:
    busy = RankOps.of(row.ops).are_of(BUSY).tolist()
    if not any(busy):
        return 0.0
    return max(compress(row.ends, busy)) - min(compress(row.starts, busy))
