"""A fleet as people write it: TOML with a table per job (``docs/many-models.md``), read as records,
with what is wrong said in words.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.base.errors import InputError
from penstock.base.mistaken import held_to
from penstock.base.units import to_bytes
from penstock.base.values import MOST_TOML_BYTES, check_toml, read_text, refused_as, shown, whole
from penstock.core.timing.fleet_timeline import MOST_FLEET_DEVICES
from penstock.planning.turns.stop import Stop, halving, settled
from penstock.planning.turns.visits import PolicyName, check_name

T = TypeVar("T", bound=msgspec.Struct)

_MUST_BE = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text, in quotes",
}


def parsed(text: str) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        InputError: it is no TOML, or one that nobody would write; the line is named.
    """
    check_toml(text)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"it is no TOML: {error}; write key = value, text in quotes, each key once"
        ) from None


def record(
    kind: type[T],
    table: Any,
    where: str,
    *,
    hook: Callable[[type, Any], Any] | None = None,
    nested: Mapping[str, Any] | None = None,
) -> T:
    """A table as a record.

    Args:
        kind: of the record; its fields are the keys.
        table: as it was parsed.
        where: its name in the file, such as ``"jobs.large"``; empty for the file itself.
        hook: makes values of types that TOML does not have, as msgspec's ``dec_hook`` does.
        nested: values of keys that are records already.

    Raises:
        InputError: a key is unknown or missing, or has a wrong value; its place in the file is
            named, and what to write there.
    """
    if not isinstance(table, dict):
        raise InputError(f"{where} is {shown(table)}, but must be a table; write [{where}]")
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key in table:
        if key not in fields:
            close = get_close_matches(key, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"take one of {', '.join(fields)}"
            raise InputError(f"{_in(where)} has no key {key!r}; {hint}")
    for key, field in fields.items():
        if field.required and key not in table:
            raise InputError(f"{_in(where)} lacks the key {key!r}; write {key} = …")
    kinds = get_type_hints(kind)
    values = {
        key: nested[key]
        if nested is not None and key in nested
        else _value(value, kinds[key], f"{where}.{key}" if where else key, hook)
        for key, value in table.items()
    }
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def _value(value: Any, kind: Any, where: str, hook: Callable[[type, Any], Any] | None) -> Any:
    try:
        return msgspec.convert(value, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # the hook's own
            raise InputError(f"{where}: {error.__cause__}") from None
        raise InputError(f"{where} is {shown(value)}, but must be {_must_be(kind)}") from None


def _must_be(kind: Any) -> str:
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(_must_be(member) for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    return _MUST_BE.get(kind, "another kind of value")


def _in(where: str) -> str:
    return where or "the file"


class Size(int):
    """Bytes: a number, or text with a unit."""


class _FleetTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class HalvingTable(_FleetTable, frozen=True):
    """``[halving]``: the arguments of ``pk.stop.halving``."""

    every: int
    metric: str = "loss"
    steps: int | None = None
    largest: bool = False


class JobTable(_FleetTable, frozen=True):
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


class FleetFile(_FleetTable, frozen=True):
    """The content of the file.

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
        with held_to("FleetFile", text, where), refused_as(f"{where} is not a valid fleet"):
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
    paths = {key: str(folder / name) for key, name in named.items() if name is not None}
    return msgspec.structs.replace(job, **paths)


def _quantity(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size(to_bytes(value))
    raise NotImplementedError
