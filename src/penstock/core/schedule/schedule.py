"""``Schedule``: for every rank, the ops it performs, in order.

The same value is checked, simulated, run, drawn and exchanged with torch as CSV.

A schedule that somebody has planned, as far as rooms below the planner see it.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeGuard

import numpy as np

from penstock.base.errors import ScheduleError
from penstock.base.lazily import method_provided
from penstock.base.values import Value, decoded, expect, read_as, read_text, write_atomically
from penstock.core.schedule.columns import Columns, RankOps
from penstock.core.schedule.op import BACKWARD, OF_A_ROUND, Activations, Kind, Op, dependencies


class ScheduleFile(Value, frozen=True, kw_only=True):
    """The file of a schedule; of each rank, its ops with commas between them."""

    name: str
    ranks: tuple[str, ...]
    activations: Activations = "own"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Schedule:
    """An order of ops for every rank.

    It is stored as ``columns``; ``ranks`` are made when somebody first asks for them. Two schedules
    with the same ops are equal.

    Args:
        ranks: the ops of each rank, in the order in which it performs them; any iterables.
        name: the family it came from, for people.
        activations: which activations its backwards go through: ``"own"`` or the ``"newest"``, of
            which a stage then keeps one microbatch's. It says what is held, never what an op waits
            for.

    Raises:
        InputError: something else than iterables of ops.
    """

    columns: Columns
    name: str
    activations: Activations

    def __init__(
        self, ranks: Iterable[Iterable[Op]], name: str = "", activations: Activations = "own"
    ) -> None:
        expect(ranks, Iterable, "the ranks", "give a list of ops for each rank")
        lists: list[Sequence[Op]] = []
        for ops in ranks:
            expect(ops, Iterable, f"rank {len(lists)}", "give a list of its ops")
            lists.append(ops if isinstance(ops, RankOps) else tuple(ops))
        columns = Columns.of_ranks(lists)
        vars(self).update(columns=columns, name=name, activations=activations)

    @classmethod
    def of(
        cls, ranks: Iterable[Iterable[Op]], name: str = "", activations: Activations = "own"
    ) -> Schedule:
        """The schedule of these ops; as the class itself, for whoever reads it as a sentence."""
        return cls(ranks, name, activations)

    @classmethod
    def of_columns(
        cls, columns: Columns, name: str = "", activations: Activations = "own"
    ) -> Schedule:
        """The schedule that these columns are."""
        schedule = cls.__new__(cls)
        vars(schedule).update(columns=columns, name=name, activations=activations)
        return schedule

    def with_ranks(self, ranks: Iterable[Iterable[Op]]) -> Schedule:
        """This schedule with other ops, as passes make it."""
        return Schedule(ranks, self.name, self.activations)

    def with_columns(self, columns: Columns) -> Schedule:
        """As ``with_ranks``, from columns."""
        return Schedule.of_columns(columns, self.name, self.activations)

    def renamed(self, name: str) -> Schedule:
        """The same order under another name."""
        return Schedule.of_columns(self.columns, name, self.activations)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        columns = self.columns
        fields = columns.first, columns.stage, columns.kind, columns.microbatch, columns.slice
        return tuple(field.tobytes() for field in fields)

    def __repr__(self) -> str:
        return (
            f"Schedule(ranks={self.ranks!r}, name={self.name!r}, activations={self.activations!r})"
        )

    @cached_property
    def rank_ops(self) -> tuple[RankOps, ...]:
        """The same as ``ranks``, for whoever can do without looking at each op."""
        return tuple(RankOps(self.columns, span) for span in self.columns.spans())

    @cached_property
    def ranks(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each rank, in the order in which it performs them."""
        return tuple(ops.as_tuple for ops in self.rank_ops)

    @classmethod
    def parse(cls, text: str, name: str = "") -> Schedule:
        """Read torch's CSV: one line per rank, ops separated by commas, empty cells are idle.

        >>> str(Schedule.parse("0F0,,0B0\\n1F0,1B0\\n"))
        '0F0,0B0\\n1F0,1B0\\n'

        Raises:
            ScheduleError: a cell is not an op; its line and column are named.
        """
        expect(text, str, "the schedule's text", "read it from its file first")
        ranks = []
        for number, line in enumerate(text.splitlines(), start=1):
            ops = []
            for column, cell in enumerate(line.split(","), start=1):
                if cell.strip():
                    try:
                        ops.append(Op.parse(cell.strip()))
                    except ScheduleError as error:
                        raise ScheduleError(f"line {number}, cell {column}: {error}") from None
            ranks.append(tuple(ops))
        if not any(ranks):
            raise ScheduleError("the schedule is empty; write one line of ops per rank")
        return cls(ranks, name)

    def __str__(self) -> str:
        return "".join(",".join(map(str, ops)) + "\n" for ops in self.ranks)

    def to_json(self) -> str:
        """This schedule as indented JSON; ``from_json`` reads it back."""
        lines = tuple(str(self).splitlines())
        return ScheduleFile(name=self.name, activations=self.activations, ranks=lines).to_json()

    @classmethod
    def from_json(cls, text: str, where: str = "text") -> Schedule:
        """Read what ``to_json`` wrote.

        Raises:
            FileError: it is something else, or a cell is not an op; ``where`` is named.
        """
        with read_as("Schedule", text, where):
            file = decoded(text, ScheduleFile)
            parsed = cls.parse("".join(f"{line}\n" for line in file.ranks))
            return cls.of_columns(parsed.columns, file.name, file.activations)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this schedule to ``path``, atomically: as JSON, or where the name ends in ``.csv``,
        as torch's table of ops, which knows no name and no ``activations``.

        Raises:
            FileError: the file cannot be written.
        """
        is_table = os.fspath(path).lower().endswith(".csv")
        write_atomically(path, str(self) if is_table else self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read what ``save`` wrote. A schedule from a ``.csv`` has the file's name.

        Raises:
            FileError: the file is not there, or holds something else.
        """
        text = read_text(path)
        if not os.fspath(path).lower().endswith(".csv"):
            return cls.from_json(text, where=str(path))
        with read_as("Schedule", text, str(path)):
            return cls.parse(text, Path(path).stem)

    _repr_html_ = method_provided("schedule_cell")

    @property
    def num_ranks(self) -> int:
        """How many ranks (devices) it is for."""
        return self.columns.num_ranks

    @property
    def num_ops(self) -> int:
        """How many ops all ranks perform together."""
        return self.columns.count

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its ops."""
        return self.columns.kinds

    @property
    def splits_backward(self) -> bool:
        """Whether backwards come in two halves."""
        return Kind.BACKWARD_INPUT in self.kinds

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.columns.num_stages

    @property
    def num_microbatches(self) -> int:
        """How many microbatches the minibatch, or the stream, is cut into."""
        return self.columns.num_microbatches

    @property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into; 1 where it is not."""
        return self.columns.num_slices

    @cached_property
    def where(self) -> dict[Op, int]:
        """The rank of every op; of an op that stands twice, the last one."""
        return {op: rank for rank, ops in enumerate(self.ranks) for op in ops}

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank computes, ascending."""
        return tuple(ops.stages for ops in self.rank_ops)

    @property
    def copies(self) -> Counter[int]:
        """How many ranks hold each stage's weights."""
        return self.columns.copies

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that compute a stage, ascending."""
        return self._ranks_of.get(stage, ())

    @cached_property
    def _ranks_of(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every stage that is computed."""
        ranks: dict[int, list[int]] = {}
        for rank, stages in enumerate(self.stages_of):
            for stage in stages:
                ranks.setdefault(stage, []).append(rank)
        return {stage: tuple(own) for stage, own in ranks.items()}

    @property
    def weight_copies(self) -> int:
        """The most ranks that hold one stage's weights: 2 where a pipeline runs both ways."""
        return max(self.copies.values(), default=0)

    @cached_property
    def num_hops(self) -> int:
        """How many tensors one minibatch sends from rank to rank, forward and backward."""
        # Each output that crosses is followed by a gradient on its way back.
        both_ways = 2 if self.kinds & BACKWARD else 1
        columns = self.columns
        forwards = np.flatnonzero(columns.are_of({Kind.FORWARD}))
        stage, _, microbatch, part = columns.fields(forwards)
        order = np.lexsort((stage, part, microbatch))
        rank = columns.rank[forwards]
        steps = [np.diff(own[order]) for own in (stage, part, microbatch, rank)]
        follows = (steps[0] == 1) & (steps[1] == 0) & (steps[2] == 0)
        return both_ways * int(np.count_nonzero(follows & (steps[3] != 0)))

    def dependencies(self, op: Op) -> tuple[Op, ...]:
        """The ops in this schedule whose results ``op`` needs."""
        if op not in self._needs:
            exchanges = self._exchanges.get(op, ()) if op.kind is Kind.UPDATE else ()
            needed = dependencies(op, self.num_stages - 1, self.where, exchanges)
            if op.kind in OF_A_ROUND and op._replace(kind=Kind.FORWARD) not in self.where:
                # A replica takes part in a last round that has no microbatch for it.
                needed = tuple(need for need in needed if need in self.where)
            self._needs[op] = needed
        return self._needs[op]

    @cached_property
    def _exchanges(self) -> dict[Op, list[Op]]:
        return exchanges(self.ranks, self.copies)

    @cached_property
    def _needs(self) -> dict[Op, tuple[Op, ...]]:
        # Each op is asked about many times: by the check, the simulator, and whenever it waits.
        return {}


def exchanges(ranks: Sequence[Sequence[Op]], copies: Mapping[int, int]) -> dict[Op, list[Op]]:
    """The ops that updates wait for: the gradients of the stage's copies, or if it has none but
    hands in gradients, of the stages that share weights; and all ranks' agreement. The n-th update
    of a stage on a rank is made of the n-th hand-in of every rank.

    Args:
        ranks: the ops of each rank, or its reductions, agreements and updates alone.
        copies: how many ranks hold each stage's weights.

    Raises:
        ScheduleError: an update has nothing to wait for on another rank.
    """
    agrees = [op for ops in ranks for op in ops if op.kind is Kind.AGREE]
    reduces, updates = (_by_stage(ranks, kind) for kind in (Kind.REDUCE, Kind.UPDATE))
    tied = [turns for stage, turns in reduces.items() if copies[stage] == 1]
    waits = {}
    for stage, turns in updates.items():
        for number, ops in enumerate(turns):
            sources = [reduces[stage]] if copies[stage] > 1 else tied
            if reduces[stage] and any(number >= len(reduced) for reduced in sources):
                raise ScheduleError(
                    f"{ops[0]} is update {number + 1} of stage {stage}, but not every stage that "
                    f"shares its weights hands in gradients (REDUCE) {number + 1} times; let all "
                    "hand in before each update"
                )
            handed = [op for reduced in sources for op in reduced[number]] if reduces[stage] else []
            waits.update(dict.fromkeys(ops, handed + agrees))
    return waits


def _by_stage(ranks: Sequence[Sequence[Op]], kind: Kind) -> dict[int, list[list[Op]]]:
    """For each stage, the first ops of a kind on all ranks, then the second ones, and so on."""
    turns: dict[int, list[list[Op]]] = defaultdict(list)
    for ops in ranks:
        seen: Counter[int] = Counter()
        for op in ops:
            if op.kind is kind:
                own = turns[op.stage]
                if len(own) == seen[op.stage]:
                    own.append([])
                own[seen[op.stage]].append(op)
                seen[op.stage] += 1
    return turns


class Planned(Protocol):
    """A ``Plan``, or whatever else builds a schedule of its own."""

    def build_schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The checked schedule."""


def is_planned(value: object) -> TypeGuard[Planned]:
    """Whether a value builds a schedule of its own.

    >>> is_planned("1f1b")
    False
    """
    return hasattr(type(value), "build_schedule")
