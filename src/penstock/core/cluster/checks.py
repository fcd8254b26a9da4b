"""What must hold between the parts of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from penstock.base.errors import InputError
from penstock.core.cluster.parts import Device, Group, SpareMachine, Wire

T = TypeVar("T")

MOST_DEVICES = 100_000
"""No cluster has more; a file that says so has a slip in it, and would fill the memory."""


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
    """Raise ``InputError`` if a group is inside itself."""
    done: set[str] = set()
    for first in names:
        way: dict[str, None] = {}
        name = first
        while name in parent and name not in done:
            if name in way:
                ring = [*list(way)[list(way).index(name) :], name]
                raise InputError(
                    f"groups are members of each other in a circle: {' in '.join(map(repr, ring))}"
                )
            way[name] = None
            name = parent[name]
        done.update(way)


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


def _some(names: Collection[str], most: int = 6) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown + (", …" if len(names) > most else "")
