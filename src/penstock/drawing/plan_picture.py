"""``PlanPicture``: the picture of a plan as plain values.

Drawing knows nothing of plans; ``plans.picture`` makes these of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.base.units import picture_bytes, picture_seconds
from penstock.core.schedule.op import Kind
from penstock.drawing.markup import text_width, without_beginning


def first_to_last(names: Sequence[str]) -> str:
    """The first and the last layer, and how many there are, for sentences and headings.

    >>> first_to_last(["a"]), first_to_last(["a", "b", "c"])
    ('a', 'a … c (3 layers)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}{_how_many(names)}"


def shortened_layers(names: Sequence[str], size: float, width: float) -> str:
    """The first and last layer and how many, in at most ``width``. Names give up their beginnings,
    because layers of one model differ at their ends."""
    if len(names) == 1:
        return without_beginning(names[0], size, width)
    if text_width(first_to_last(names), size) <= width:
        return first_to_last(names)
    count = _how_many(names)
    each = (width - text_width(f" … {count}", size)) / 2
    first, last = (without_beginning(name, size, each) for name in (names[0], names[-1]))
    return f"{first} … {last}{count}"


def counted(names: Sequence[str]) -> str:
    """How many layers there are, the first and the last, for the narrow column of a table, where
    the end may be cut off.

    >>> counted(["a"]), counted(["a", "b", "c"])
    ('1: a', '3: a … c')
    """
    return f"{len(names)}: {names[0]}{f' … {names[-1]}' if len(names) > 1 else ''}"


def _how_many(names: Sequence[str]) -> str:
    """The words behind the last of several names."""
    return f" ({len(names)} layers)"


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "other")
"""The uses of memory, in the order of ``DeviceRow.memory``. Other: buffers, room to work, and
what allocators take besides."""


@dataclass(frozen=True)
class StageBlock:
    """One stage on one rank.

    Attributes:
        stage: its number.
        parts: (kind, seconds) of what the rank does for it per microbatch of the minibatch, in that
            order; where replicas take turns, the rank's share. Empty where no times are known.
        shade: which of the shades s0 to s3 it has; later stages of a rank are paler.
    """

    stage: int
    parts: tuple[tuple[Kind, float], ...]
    shade: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of all parts together."""
        return sum(length for _, length in self.parts)


@dataclass(frozen=True)
class DeviceRow:
    """One device.

    Attributes:
        name: of the device, or of the rank.
        memory: bytes, one number for each of ``MEMORY_PARTS``.
        limit_bytes: memory that the device has; 0 where nobody says.
    """

    name: str
    memory: tuple[int, ...] = (0,) * len(MEMORY_PARTS)
    limit_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes that the device needs in all."""
        return sum(self.memory)

    @property
    def over_bytes(self) -> int:
        """Bytes that the device needs beyond those that it has."""
        return max(self.memory_bytes - self.limit_bytes, 0) if self.limit_bytes else 0

    @property
    def memory_words(self) -> str:
        """How much memory the device needs, and has, in words; nothing where nobody knows."""
        if not self.memory_bytes:
            return f"of {picture_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        needed = picture_bytes(self.memory_bytes)
        if self.over_bytes:
            return f"{needed}, {picture_bytes(self.over_bytes)} over"
        return f"{needed} of {picture_bytes(self.limit_bytes)}" if self.limit_bytes else needed


@dataclass(frozen=True)
class RankRow:
    """One rank: the blocks that it runs, one after another, and its devices; several where they
    share every layer."""

    blocks: tuple[StageBlock, ...]
    devices: tuple[DeviceRow, ...]

    @property
    def seconds(self) -> float:
        """Seconds that the rank works per microbatch of the minibatch."""
        return sum(block.seconds for block in self.blocks)


@dataclass(frozen=True)
class Heading:
    """The words about a stage above its rows.

    Attributes:
        stage: its number.
        layers: names, at least one.
        remarks: its times, replicas, what runs again and so on, each a few words.
    """

    stage: int
    layers: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def layer_words(self) -> str:
        """The first and last layer and how many."""
        return first_to_last(self.layers)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that stand together: the replicas of one stage, or one rank."""

    headings: tuple[Heading, ...]
    ranks: tuple[RankRow, ...]

    @property
    def devices(self) -> tuple[DeviceRow, ...]:
        """The devices of all ranks of the group."""
        return tuple(device for rank in self.ranks for device in rank.devices)


@dataclass(frozen=True)
class Flow:
    """Outputs that go from one group of ranks to another, and come back as gradients.

    Attributes:
        source, target: indices of the two groups.
        stages: the stages whose outputs flow.
        num_bytes: size of an output, per microbatch.
        seconds: how long until an output can be used.
    """

    source: int
    target: int
    stages: tuple[int, ...]
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """Which stages, how many bytes, how long."""
        between = ", ".join(f"{stage}→{stage + 1}" for stage in self.stages)
        numbers = [picture_bytes(self.num_bytes)] if self.num_bytes else []
        numbers += [picture_seconds(self.seconds)] if self.seconds else []
        amount = " in ".join(numbers)
        return f"{between}: {amount}" if amount else between


@dataclass(frozen=True)
class Choices:
    """A table of what else could have been done.

    Attributes:
        columns: their names.
        rows: a text per column.
        chosen: which row is this plan; none by default.
        num_texts: the first so many columns, and the last, are words; the others numbers.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: int | None = None
    num_texts: int = 2

    def is_text(self, column: int) -> bool:
        """Whether a column is of words."""
        return column < self.num_texts or column == len(self.columns) - 1


@dataclass(frozen=True)
class PlanPicture:
    """A plan as it is drawn.

    Attributes:
        title: schedule, stages, ranks, microbatches.
        facts: what is predicted, each a few words.
        reason: why the plan was chosen; may be empty.
        groups: all ranks, in their order.
        flows: what goes between the groups.
        choices: what else there was, if anything.
    """

    title: str
    facts: tuple[str, ...]
    reason: str
    groups: tuple[RankGroup, ...]
    flows: tuple[Flow, ...] = ()
    choices: Choices | None = None

    @cached_property
    def ranks(self) -> tuple[RankRow, ...]:
        """The ranks of all groups."""
        return tuple(rank for group in self.groups for rank in group.ranks)

    @cached_property
    def devices(self) -> tuple[DeviceRow, ...]:
        """The devices of all groups."""
        return tuple(device for group in self.groups for device in group.devices)

    @cached_property
    def beat(self) -> float:
        """Seconds per microbatch of the rank that has most to do; no plan of these stages can be
        faster."""
        return max((rank.seconds for rank in self.ranks), default=0.0)

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, int], ...]:
        """The kinds of work and the shades that occur."""
        blocks = (block for rank in self.ranks for block in rank.blocks)
        return tuple(sorted({(kind, block.shade) for block in blocks for kind, _ in block.parts}))

    @cached_property
    def memory_extent(self) -> float:
        """Bytes that a bar as long as its place stands for. Limits far beyond what is used are out
        of the picture, or the bars would be too short to be read."""
        most = max((device.memory_bytes for device in self.devices), default=0)
        limits = [device.limit_bytes for device in self.devices]
        return max([most, *(limit for limit in limits if limit <= 4 * most)]) or 1.0

    def neighbours(self, above: int) -> tuple[Flow, ...]:
        """The flows between a group and the one below it, in either direction."""
        pair = {above, above + 1}
        return tuple(flow for flow in self.flows if {flow.source, flow.target} == pair)

    @cached_property
    def far_flows(self) -> tuple[Flow, ...]:
        """The flows between groups that do not stand beside each other."""
        return tuple(flow for flow in self.flows if abs(flow.source - flow.target) > 1)
