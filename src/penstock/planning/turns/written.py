"""A fleet as people write it: TOML with a table per job (``docs/many-models.md``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.base.units import to_bytes
from penstock.base.values import MOST_TOML_BYTES, read_text, refused_as, shown, whole
from penstock.core.timing.fleet_timeline import MOST_FLEET_DEVICES
from penstock.planning.turns.policies import PolicyName
from penstock.planning.turns.stop import Stop, halving, settled
from penstock.planning.turns.tables import parsed, record
from penstock.planning.turns.visits import check_name


class Size(int):
    """Bytes: a number, or text with a unit."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class HalvingTable(_Table, frozen=True):
    """``[halving]``: the arguments of ``pk.stop.halving``."""

    every: int
    metric: str = "loss"
    steps: int | None = None
    largest: bool = False


class JobTable(_Table, frozen=True):
    """``[jobs.NAME]``: a job with its plan, or with a profile of which a plan is made.

    Attributes:
        plan: file of a plan, for one device.
        graph: file of a profile, where there is no plan.
        memory: what a device may hold of it; without, it is to fit as it is.
        tier: folder to which its stages may go, or ``host``: main memory.
        microbatches: per minibatch, where it is planned now.
        workload: module:function that makes the model, its loss, optimizer and data; not needed to
            simulate.
        steps: minibatches after which it ends in any case.
        seed: of dropout and other random layers.
    """

    plan: str | None = None
    graph: str | None = None
    memory: Size | None = None
    tier: str | None = None
    microbatches: int = 8
    workload: str | None = None
    steps: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.plan is None) is (self.graph is None):
            raise InputError("give either plan, the file of a plan, or graph, that of a profile")
        if self.plan is not None and not (self.memory is None and self.tier is None):
            raise InputError("a plan has its memory and its tier already; leave them out")
        whole("microbatches", self.microbatches, 1)
        for name in ("steps", "memory"):
            if (given := getattr(self, name)) is not None:
                whole(name, given, 1)


class FleetFile(_Table, frozen=True):
    """What stands in the file.

    Attributes:
        jobs: by name.
        devices: how many share them.
        policy: by which devices choose.
        steps, epochs, halving: how long jobs train; at most one of them.
    """

    jobs: dict[str, JobTable]
    devices: int = 2
    policy: PolicyName = "longest"
    steps: int | None = None
    epochs: int | None = None
    halving: HalvingTable | None = None

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InputError("there is no job; write a table [jobs.NAME] for each")
        whole("devices", self.devices, 1, MOST_FLEET_DEVICES)
        self.stop()  # refuses now what it would refuse later

    def stop(self) -> Stop:
        """How long jobs train.

        Raises:
            InputError: nobody says, or several do.
        """
        rungs = None
        if self.halving is not None:
            table = self.halving
            rungs = halving(
                table.metric, every=table.every, steps=table.steps, largest=table.largest
            )
        has_own = [job.steps is not None for job in self.jobs.values()]
        given = (rungs, self.steps, self.epochs)
        if not all(has_own) and all(said is None for said in given):
            raise InputError(
                "nobody says how long jobs train; write steps or epochs at the top of the file, a "
                "table [halving], or steps for each job"
            )
        return settled(rungs, self.steps, self.epochs, has_own)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FleetFile:
        """Read a fleet; files that it names are found from the folder in which it is.

        Raises:
            FileError: it is not there, not TOML, or has an unknown key, a missing one or a wrong
                value, whose place in the file is named.
        """
        return cls.from_toml(read_text(path, MOST_TOML_BYTES), Path(path).parent, str(path))

    @classmethod
    def from_toml(cls, text: str, folder: Path, where: str = "text") -> FleetFile:
        """As ``load``, of the text of a file.

        Args:
            folder: from which files that it names are found.
            where: the name to use in errors.
        """
        with refused_as(f"{where} is not a valid fleet"):
            table = parsed(text)
            nested: dict[str, Any] = {}
            if "jobs" in table:
                nested["jobs"] = _jobs(table["jobs"], folder)
            if "halving" in table:
                nested["halving"] = record(HalvingTable, table["halving"], "halving")
            return record(cls, table, "", nested=nested)


def _jobs(tables: Any, folder: Path) -> dict[str, JobTable]:
    if not isinstance(tables, dict):
        raise InputError(f"jobs is {shown(tables)}; write a table [jobs.NAME] for each job")
    for name in tables:
        check_name(name)
    return {
        name: _from(folder, record(JobTable, table, f"jobs.{name}", hook=_quantity))
        for name, table in tables.items()
    }


def _from(folder: Path, job: JobTable) -> JobTable:
    named = {"plan": job.plan, "graph": job.graph}
    found = {key: str(folder / name) for key, name in named.items() if name is not None}
    return msgspec.structs.replace(job, **found)


def _quantity(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size(to_bytes(value))
    raise NotImplementedError
