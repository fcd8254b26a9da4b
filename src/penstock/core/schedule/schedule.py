"""``Schedule``: for every rank, the ops it performs, in order.

The same value is checked, simulated, run, drawn and exchanged with torch as CSV.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.base.errors import InputError, ScheduleError
from penstock.base.lazily import method_provided
from penstock.base.values import Value, expect, read_text, refused_as, shown, write_atomically
from penstock.core.schedule.columns.rank_ops import RankOps, stages_in
from penstock.core.schedule.op import BACKWARD, COMPUTE, OF_A_ROUND, Kind, Op, dependencies

if TYPE_CHECKING:
    from penstock.core.schedule.columns.columns import Columns

MANY_OPS = 10_000
"""From so many on, columns are quicker than ops, though numpy may have to be loaded first."""


Activations = Literal["own", "newest"]
"""Which activations a backward goes through: those of its own microbatch's forward, or those that
the newest forward of its stage has left."""


class ScheduleFile(Value, frozen=True, kw_only=True):
    """What stands in the file of a schedule; of each rank, its ops with commas between them."""

    name: str
    ranks: tuple[str, ...]
    activations: Activations = "own"


@dataclass(frozen=True)
class Schedule:
    """An order of ops for every rank.

    Of millions of ops, it is made, checked and simulated as ``columns``; ``ranks`` are then made
    when somebody first asks for them.

    Attributes:
        ranks: the ops of each rank, in the order in which it performs them.
        name: the family it came from, for people; two schedules with the same ops are equal.
        activations: which activations its backwards go through: ``"own"`` or the ``"newest"``, of
            which a stage then keeps one microbatch's. It says what is held, never what an op waits
            for.
    """

    ranks: tuple[tuple[Op, ...], ...]
    name: str = field(default="", compare=False)
    activations: Activations = field(default="own", compare=False)

    @classmethod
    def of(
        cls, ranks: Iterable[Iterable[Op]], name: str = "", activations: Activations = "own"
    ) -> Schedule:
        """Build a schedule from any iterables of ops.

        Args:
            ranks: the ops of each rank.
            name: of the family.
            activations: which of them backwards go through.

        Raises:
            InputError: something else than iterables of ops.
        """
        expect(ranks, Iterable, "the ranks", "give a list of ops for each rank")
        lists: list[tuple[Op, ...]] = []
        for ops in ranks:
            expect(ops, Iterable, f"rank {len(lists)}", "give a list of its ops")
            lists.append(tuple(ops))
        schedule = cls(tuple(lists), name, activations)
        schedule.check_types()
        return schedule

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
        return Schedule.of(ranks, self.name, self.activations)

    def with_columns(self, columns: Columns) -> Schedule:
        """As ``with_ranks``, from columns."""
        return Schedule.of_columns(columns, self.name, self.activations)

    if not TYPE_CHECKING:

        def __getattr__(self, attribute: str) -> object:
            # Only what is not there is asked for here: the ops of a schedule of columns.
            if attribute != "ranks" or "columns" not in vars(self):
                raise AttributeError(f"a schedule has no {attribute}")
            ranks = vars(self)["ranks"] = tuple(ops.as_tuple for ops in self.rank_ops)
            return ranks

    @property
    def _columns(self) -> Columns | None:
        """The columns, if they are there already: then they answer at once."""
        columns: Columns | None = vars(self).get("columns")
        return columns

    @cached_property
    def rank_ops(self) -> tuple[Sequence[Op], ...]:
        """The same as ``ranks``, for whoever can do without looking at each op."""
        if "ranks" in vars(self):
            return self.ranks
        columns = self._columns
        return () if columns is None else tuple(RankOps(columns, span) for span in columns.spans())

    def check_types(self) -> None:
        """Raise ``InputError`` unless there is a tuple of ops for every rank."""
        if self._columns is not None:
            return
        expect(self.ranks, tuple, "the ranks", "build schedules with Schedule.of or parse")
        for rank, ops in enumerate(self.ranks):
            expect(ops, tuple, f"rank {rank}", "build schedules with Schedule.of or parse")
            # Of millions of ops, the set of types is found out quickly.
            if any(kind is not Op for kind in set(map(type, ops))):
                wrong = next(op for op in ops if type(op) is not Op)
                raise InputError(
                    f"rank {rank} has {shown(wrong)} where an op belongs; give a "
                    "penstock.Op, or read text with Schedule.parse"
                )

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
        return cls(tuple(ranks), name)

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
        file = ScheduleFile.from_json(text, where)
        with refused_as(f"{where} is not a valid Schedule"):
            parsed = cls.parse("".join(f"{line}\n" for line in file.ranks), file.name)
            return replace(parsed, activations=file.activations)

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
        with refused_as(f"{path} is not a valid Schedule"):
            return cls.parse(text, Path(path).stem)

    _repr_html_ = method_provided("schedule_cell")

    @property
    def num_ranks(self) -> int:
        """How many ranks (devices) it is for."""
        if self._columns is not None:
            return self._columns.num_ranks
        return len(self.ranks)

    @property
    def num_ops(self) -> int:
        """How many ops all ranks perform together."""
        if self._columns is not None:
            return self._columns.count
        return sum(map(len, self.ranks))

    @cached_property
    def columns(self) -> Columns | None:
        """The ops as arrays, for schedules of millions of them; ``None`` if their fields do not
        fit into any."""
        # Only here, so that small schedules are handled before numpy is there.
        from penstock.core.schedule.columns.columns import Columns

        return Columns.of_ranks(self.ranks)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its ops."""
        if self._columns is not None:
            return self._columns.kinds
        # Of millions of ops, plain fields are looked at quickly.
        return frozenset(op[1] for ops in self.ranks for op in ops)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards come in two halves."""
        return Kind.BACKWARD_INPUT in self.kinds

    @cached_property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        if self._columns is not None:
            return self._columns.num_stages
        return 1 + self._largest(0, default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches the minibatch, or the stream, is cut into."""
        if self._columns is not None:
            return self._columns.num_microbatches
        if all(ops[-1].kind in COMPUTE for ops in self.ranks if ops):
            return 1 + self._largest(2, default=-1)
        # Updates of replicas may be named after a microbatch that would have been theirs.
        computed = (op[2] for ops in self.ranks for op in ops if op[1] in COMPUTE)
        return 1 + max(computed, default=-1)

    @cached_property
    def num_slices(self) -> int:
        """How many slices a microbatch's sequence is cut into; 1 where it is not."""
        if self._columns is not None:
            return self._columns.num_slices
        return 1 + self._largest(3, default=0)

    def _largest(self, field: int, default: int) -> int:
        # By position: for millions of ops, this takes a tenth of what attributes take.
        return max((max(map(itemgetter(field), ops)) for ops in self.ranks if ops), default=default)

    @cached_property
    def where(self) -> dict[Op, int]:
        """The rank of every op; of an op that stands twice, the last one."""
        return {op: rank for rank, ops in enumerate(self.ranks) for op in ops}

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank computes, ascending."""
        return tuple(map(stages_in, self.rank_ops))

    @cached_property
    def copies(self) -> Counter[int]:
        """How many ranks hold each stage's weights."""
        return Counter(stage for stages in self.stages_of for stage in stages)

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that compute a stage, ascending."""
        return tuple(rank for rank, stages in enumerate(self.stages_of) if stage in stages)

    @property
    def weight_copies(self) -> int:
        """The most ranks that hold one stage's weights: 2 where a pipeline runs both ways."""
        return max(self.copies.values(), default=0)

    @cached_property
    def num_hops(self) -> int:
        """How many tensors one minibatch sends from rank to rank, forward and backward."""
        # Each output that crosses is followed by a gradient on its way back.
        both_ways = 2 if self.kinds & BACKWARD else 1
        rank_of = {
            (op.stage, op.microbatch, op.slice): rank
            for rank, ops in enumerate(self.ranks)
            for op in ops
            if op[1] is Kind.FORWARD
        }
        return both_ways * sum(
            rank_of.get((stage - 1, microbatch, part), rank) != rank
            for (stage, microbatch, part), rank in rank_of.items()
        )

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
    """What each update waits for: the gradients of the stage's copies, or if it has none but hands
    in gradients, of the stages that share weights; and all ranks' agreement. The n-th update of a
    stage on a rank is made of the n-th hand-in of every rank.

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
