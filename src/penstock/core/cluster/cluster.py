"""``Cluster``: devices and how they are joined. A file people write and edit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.base.lazily import method_provided
from penstock.base.values import MOST_TOML_BYTES, Value, expect, read_text, refused_as, whole
from penstock.core.cluster import local
from penstock.core.cluster.checks import MOST_DEVICES, check_groups, check_names, check_wires
from penstock.core.cluster.parts import Device, DeviceKind, Group, Link, SpareMachine, Tier, Wire
from penstock.core.cluster.tier_speed import measured


class Cluster(Value, frozen=True, kw_only=True):
    """Devices and how they are joined.

    Attributes:
        devices: at least one. By default rank i of a plan runs on device i.
        link: between any two devices or groups that no group has.
        memory_bytes: memory all devices share (cores of one host), or 0 when each has its own.
        groups: servers, racks and so on; nobody is a member twice.
        wires: pairs of devices with a link of their own.
        spares: machines that can sum gradients.
        tiers: where ranks may keep stages that are not in memory (``docs/larger-than-memory.md``).

    Raises:
        InputError: no device, a negative memory, a name that two have, a member or the end of a
            wire that is not there, a member twice, a circle of groups, or a pair with two wires.
    """

    devices: tuple[Device, ...]
    link: Link = Link()
    memory_bytes: int = 0
    groups: tuple[Group, ...] = ()
    wires: tuple[Wire, ...] = ()
    spares: tuple[SpareMachine, ...] = ()
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        self.check_fields()
        if not self.devices:
            raise InputError("a Cluster needs at least one device")
        whole("the number of devices", len(self.devices), 1, MOST_DEVICES)
        names = [device.name for device in self.devices]
        check_names(self.devices, self.groups, self.spares)
        check_groups(names, self.groups)
        check_wires(names, self.wires)

    _repr_html_ = method_provided("cluster_cell")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a cluster from a file.

        Args:
            path: ends in ``.toml`` for what people write (``docs/clusters.md``); anything else is
                JSON, as ``save`` writes it.

        Raises:
            FileError: the file is not there, an unknown key, a wrong type or unit, or parts that
                contradict each other; the path inside the file is named where there is one.
        """
        expect(path, str | os.PathLike, "the path", "give a file's name")
        if Path(path).suffix.lower() != ".toml":
            return cls.from_json(read_text(path), where=str(path))
        return cls.from_toml(read_text(path, MOST_TOML_BYTES), where=str(path))

    @classmethod
    def from_toml(cls, text: str, where: str = "text") -> Self:
        """Read what people write, with units and servers; see ``docs/clusters.md``.

        Args:
            text: TOML.
            where: the name to use in errors, for example the path of the file.

        Raises:
            FileError: as ``load``.
        """
        from penstock.core.cluster import (
            written,  # takes as long to load as all the rest of this room
        )

        expect(text, str, "the text", "give TOML")
        with refused_as(f"{where} is not a valid Cluster"):
            return cls(**written.read(text))

    @classmethod
    def tree(
        cls, counts: Sequence[int], links: Sequence[Link], *, device: Device | None = None
    ) -> Cluster:
        """A regular tree.

        Args:
            counts: how many members the groups of each level have, innermost first: ``(4, 2)`` is
                two servers of four devices.
            links: between the members of a group of each level, innermost first.
            device: what all devices are like; its name is not used.

        Raises:
            InputError: no levels, a count below 1, or not one link per level.
        """
        _check_levels(counts, links)
        expect(device, Device | None, "device", "give a penstock.Device, whose name is not used")
        pattern = device or Device(name="device")
        names = [f"device{index}" for index in range(prod(counts))]
        devices = tuple(replace(pattern, name=name) for name in names)
        groups: list[Group] = []
        for level, (count, link) in enumerate(zip(counts[:-1], links[:-1], strict=True)):
            parts = [tuple(names[first : first + count]) for first in range(0, len(names), count)]
            word = "server" if level == 0 else f"level{level}-"
            made = [
                Group(name=f"{word}{index}", members=members, link=link)
                for index, members in enumerate(parts)
            ]
            groups += made
            names = [group.name for group in made]
        return cls(devices=devices, link=links[-1], groups=tuple(groups))

    @classmethod
    def local(
        cls,
        num_devices: int | None = None,
        kind: DeviceKind = "cpu",
        *,
        tiers: Sequence[Tier] = (),
    ) -> Cluster:
        """This machine: the CPU cores that this process may use, or its accelerators.

        Links are without cost, since nobody has measured them (``penstock measure-cluster`` does).

        Args:
            num_devices: how many. By default one worker per core, or all accelerators; more workers
                than cores may be asked for, more accelerators may not.
            kind: ``"cpu"`` for cores, which share the host's memory, or ``"gpu"`` for accelerators
                of any make, each with its own: those of torch where it is loaded. Where it is not,
                and the driver has no program that tells of them, a second process asks torch,
                which takes seconds.
            tiers: where ranks may keep stages that are not in memory. Speeds that are not written
                down are measured, with a file of 32 MiB; where ranks are cores, these compute
                meanwhile.

        Raises:
            InputError: ``num_devices`` is below 1, no such kind, or not so many accelerators.
            FileError: a tier's folder cannot be written to.
        """
        devices, memory_bytes = local.devices(num_devices, kind)
        expect(tiers, list | tuple, "tiers", "give a list, as in [pk.Tier(folder='/scratch')]")
        for tier in tiers:
            expect(tier, Tier, "one of tiers", "give a penstock.Tier for each")
        timed = tuple(measured(tier, computes_on_host=kind == "cpu") for tier in tiers)
        return cls(devices=devices, memory_bytes=memory_bytes, tiers=timed)


def _check_levels(counts: Sequence[int], links: Sequence[Link]) -> None:
    expect(counts, list | tuple, "counts", "give a list, innermost first, as in (4, 2)")
    expect(links, list | tuple, "links", "give a list, innermost first")
    for link in links:
        expect(link, Link, "one of links", "give a penstock.Link for each level")
    if not counts:
        raise InputError("a tree needs at least one level; give counts, for example (4, 2)")
    if len(counts) != len(links):
        raise InputError(
            f"a tree with {len(counts)} counts needs as many links, innermost first, not "
            f"{len(links)}"
        )
    for count in counts:
        whole("a count of a tree", count, 1, MOST_DEVICES)
    whole("the number of devices", prod(counts), 1, MOST_DEVICES)
