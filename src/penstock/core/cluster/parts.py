"""A cluster's parts, and what must hold between them: ``Device``, ``Link``, ``Group``, ``Wire``,
``SpareMachine``, ``Tier``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, Self, TypeVar

from penstock.base.errors import InputError
from penstock.base.values import Value, number, shown

_LEAST_SPEED, _MOST_SPEED = 1e-6, 1e6
_MOST_SLACK = 10.0

DeviceKind = Literal["cpu", "gpu"]
GroupKind = Literal["shared-memory", "nvlink", "pcie"]
TierKind = Literal["disk", "host"]


class Device(Value, frozen=True, kw_only=True):
    """One place that runs a rank's ops, one at a time.

    Attributes:
        name: for people, for example ``cpu0``.
        memory_bytes: what a rank may use here; 0 means not limited.
        speed: relative to the machine the profile was measured on (2.0 is twice as fast).
        kind: ``"cpu"`` or ``"gpu"`` (any accelerator that torch knows); ``None`` where nobody says,
            which counts as ``"cpu"`` when the plan is run.
        price_per_hour: what it costs, in any currency; 0 where nobody says.
        allocator_slack: what its allocator takes of its memory besides tensors (fragments, whole
            blocks), as a share of these; 0 where nobody says.

    Raises:
        InputError: a negative memory, price or slack, or a speed that is not a positive number.
    """

    name: str
    memory_bytes: int = 0
    speed: float = 1.0
    kind: DeviceKind | None = None
    price_per_hour: float = 0.0
    allocator_slack: float = 0.0

    def __post_init__(self) -> None:
        whose = f"device {shown(self.name)}"
        self.check_fields(whose)
        number(f"{whose}: price_per_hour", self.price_per_hour)
        number(f"{whose}: allocator_slack", self.allocator_slack, most=_MOST_SLACK)
        if not _LEAST_SPEED <= self.speed <= _MOST_SPEED:
            raise InputError(
                f"{whose}: speed is {self.speed}, but must be > 0: {_LEAST_SPEED:g} to "
                f"{_MOST_SPEED:g} times that of the machine that was profiled"
            )


class Link(Value, frozen=True, kw_only=True):
    """How neighbouring devices are joined.

    Attributes:
        latency_seconds: time before the first byte arrives.
        bytes_per_second: bandwidth after that; 0 means so high that it does not count (for
            example threads that share memory).

    Raises:
        InputError: one of them is negative or not finite.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        self.check_fields()

    def seconds(self, num_bytes: float) -> float:
        """Time from sending ``num_bytes`` until they have arrived."""
        transfer = num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0
        return self.latency_seconds + transfer


class Card(Value, frozen=True, kw_only=True):
    """A network card that all members of a group share: whatever goes between one of them and
    another host passes it, in each direction as much per second.

    Attributes:
        bytes_per_second: in each direction.
        latency_seconds: what it adds to the first byte of a message.

    Raises:
        InputError: the bandwidth is not a positive number, or the latency negative.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.check_fields("card")
        number("card: bytes_per_second", self.bytes_per_second, positive=True)

    @classmethod
    def of(cls, link: Link) -> Self:
        """The card that is as fast, and as late, as a link."""
        return cls(bytes_per_second=link.bytes_per_second, latency_seconds=link.latency_seconds)

    @property
    def link(self) -> Link:
        """A link as fast, and as late, as the card."""
        return Link(bytes_per_second=self.bytes_per_second, latency_seconds=self.latency_seconds)


class Group(Value, frozen=True, kw_only=True):
    """Devices that are nearer to each other than to the rest, as those of one server.

    Attributes:
        name: for people; unlike that of any device or other group.
        members: names of devices or of other groups, at least one; one, where a device has a card
            of its own.
        link: between any two members.
        memory_bytes: memory that all devices in it share (cores of one host), or 0 when each has
            its own.
        card: the network card that all members share; ``None`` where nobody says, and each member
            has what the links around say for itself.
        kind: how members of a host, or of a part of it, are joined: ``"shared-memory"``,
            ``"nvlink"`` (and whatever else joins accelerators directly) or ``"pcie"`` (a switch);
            ``None`` where nobody says. The outermost group with a kind or a card is a host: what
            stays in it passes no card.

    Raises:
        InputError: no members, one named twice, or a negative memory.
    """

    name: str
    members: tuple[str, ...]
    link: Link = Link()
    memory_bytes: int = 0
    card: Card | None = None
    kind: GroupKind | None = None

    def __post_init__(self) -> None:
        self.check_fields(f"group {shown(self.name)}")
        if not self.members:
            raise InputError(f"group {self.name!r} has no members; give it some or leave it out")


class Wire(Value, frozen=True, kw_only=True):
    """A wire that joins two devices, instead of what their groups say.

    Attributes:
        between: their names.
        link: in both directions.

    Raises:
        InputError: both names are the same.
    """

    between: tuple[str, str]
    link: Link

    def __post_init__(self) -> None:
        self.check_fields()
        if self.between[0] == self.between[1]:
            raise InputError(f"a wire joins {self.between[0]!r} with itself; name two devices")


class SpareMachine(Value, frozen=True, kw_only=True):
    """A machine without accelerators that can sum gradients for others.

    Attributes:
        name: for people; unless ``address`` says otherwise, also the host's.
        bytes_per_second: of its network, in each direction.
        address: where ``penstock serve`` listens on it, as ``"10.0.0.7:5600"``; by default its name
            and the usual port.

    Raises:
        InputError: the bandwidth is not a positive number.
    """

    name: str
    bytes_per_second: float
    address: str = ""

    @property
    def where(self) -> str:
        """The address, given or not."""
        return self.address or self.name

    def __post_init__(self) -> None:
        whose = f"spare machine {shown(self.name)}"
        self.check_fields(whose)
        number(f"{whose}: bytes_per_second", self.bytes_per_second, positive=True)


class Tier(Value, frozen=True, kw_only=True):
    """Where a rank keeps what of its stages is not in memory.

    Attributes:
        kind: ``"disk"``, or ``"host"`` for main memory.
        folder: of a disk, where the spill file is; by default the system's for temporary files.
        read_bytes_per_second, write_bytes_per_second: 0 means that nobody has measured them, and so
            high that they do not count.

    Raises:
        InputError: main memory with a folder, or a negative speed.
    """

    kind: TierKind = "disk"
    folder: str = ""
    read_bytes_per_second: float = 0.0
    write_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        self.check_fields("tier")
        if self.kind == "host" and self.folder:
            raise InputError(
                f"tier: main memory has no folder {shown(self.folder)}; leave it out, or say "
                'kind="disk"'
            )

    def __str__(self) -> str:
        return "main memory" if self.kind == "host" else f"disk ({self.folder or 'temporary'})"

    def read_seconds(self, num_bytes: float) -> float:
        """Seconds to read so many bytes."""
        return num_bytes / self.read_bytes_per_second if self.read_bytes_per_second else 0.0

    def write_seconds(self, num_bytes: float) -> float:
        """Seconds to write so many bytes."""
        return num_bytes / self.write_bytes_per_second if self.write_bytes_per_second else 0.0


T = TypeVar("T")

_MOST_SHOWN = 6

MOST_DEVICES = 100_000
"""No cluster has more; a file that says so has a slip in it, and would fill the memory."""


MOST_LEVELS = 32
"""Of groups in groups: switches, hosts, racks and rooms are a few."""


def check_names(
    devices: Sequence[Device], groups: Sequence[Group], spares: Sequence[SpareMachine]
) -> None:
    """Raise ``InputError`` unless everything has a name of its own."""
    named: Sequence[Device | Group | SpareMachine] = (*devices, *groups, *spares)
    names = [part.name for part in named]
    if not all(names):
        raise InputError("a device, group or spare machine has an empty name; give it one")
    twice = _repeated(names)
    if twice is not None:
        raise InputError(
            f"{twice!r} is the name of more than one device, group or spare machine; names are "
            "unique"
        )


def check_groups(devices: Collection[str], groups: Sequence[Group]) -> None:
    """Raise ``InputError`` unless groups are a tree."""
    known = {*devices, *(group.name for group in groups)}
    parent: dict[str, str] = {}
    for group in groups:
        for member in group.members:
            if member not in known:
                raise InputError(
                    f"group {group.name!r} has a member {member!r}, but no device or group is "
                    f"called that; there are {_some(known - {group.name})}"
                )
            if member in parent:
                raise InputError(
                    f"{member!r} is a member of {parent[member]!r} and again of {group.name!r}; "
                    "nobody is a member twice"
                )
            parent[member] = group.name
    _check_ends([group.name for group in groups], parent)


def _check_ends(names: Iterable[str], parent: Mapping[str, str]) -> None:
    depth: dict[str, int] = {}
    for first in names:
        way: dict[str, None] = {}
        name = first
        while name in parent and name not in depth:
            if name in way:
                ring = [*list(way)[list(way).index(name) :], name]
                raise InputError(
                    f"groups are members of each other in a circle: {' in '.join(map(repr, ring))}"
                )
            way[name] = None
            name = parent[name]
        above = depth.setdefault(name, 1)
        depth |= {inner: above + far for far, inner in enumerate(reversed(way), start=1)}
        if depth[first] > MOST_LEVELS:
            raise InputError(
                f"group {first!r} is inside {depth[first] - 1} others, one in the other; write at "
                f"most {MOST_LEVELS} levels of groups"
            )


def check_cards(groups: Sequence[Group]) -> None:
    """Raise ``InputError`` if the way out of a group passes two cards."""
    parent = {member: group for group in groups for member in group.members}
    for group in groups:
        outer = parent.get(group.name) if group.card else None
        while outer is not None:
            if outer.card:
                raise InputError(
                    f"group {group.name!r} has a card, and so has {outer.name!r}, which it is in; "
                    "a device is behind one card: name it where devices really share it"
                )
            outer = parent.get(outer.name)


def check_wires(devices: Collection[str], wires: Sequence[Wire]) -> None:
    """Raise ``InputError`` unless wires join known devices, each pair once."""
    known = set(devices)
    for wire in wires:
        absent = [name for name in wire.between if name not in known]
        if absent:
            raise InputError(
                f"a wire goes from {wire.between[0]!r} to {wire.between[1]!r}, but there is no "
                f"device {absent[0]!r}; there are {_some(known)}"
            )
    twice = _repeated(tuple(sorted(wire.between)) for wire in wires)
    if twice is not None:
        raise InputError(f"{twice[0]!r} and {twice[1]!r} have more than one wire; give them one")


def _repeated(values: Iterable[T]) -> T | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _some(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_SHOWN])
    return shown + (", …" if len(names) > _MOST_SHOWN else "")
