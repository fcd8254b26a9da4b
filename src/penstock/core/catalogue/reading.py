"""Reads the catalogue, and files of the same form that people write or ``penstock measure-device``
wrote; finds entries by short names, and offers the nearest where there is none. ``as_toml`` writes
such a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import field

from penstock.base.errors import InputError
from penstock.base.values import MOST_TOML_BYTES, Value, check_toml, expect, read_text, refused_as
from penstock.core.catalogue.parts import Efficiency, Hardware, HostSpec, Software

T = TypeVar("T")


class _CatalogueFile(Value, frozen=True, kw_only=True):
    """One file: entries by short name, without the name inside."""

    efficiencies: dict[str, Efficiency] = field(default_factory=dict)
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    software: dict[str, dict[str, Any]] = field(default_factory=dict)


@cache
def devices() -> Mapping[str, Hardware]:
    """The devices of the catalogue by short name."""
    shared = _packaged("efficiencies.toml").efficiencies
    return _devices_of(_packaged("devices.toml"), shared)


@cache
def hosts() -> Mapping[str, HostSpec]:
    """The hosts of the catalogue by short name."""
    return _named(_packaged("hosts.toml").hosts, HostSpec)


@cache
def software() -> Mapping[str, Software]:
    """How frameworks run kernels, by short name."""
    return _named(_packaged("efficiencies.toml").software, Software)


@cache
def sources() -> Mapping[str, str]:
    """What the keys that stand beside numbers mean."""
    text = _text_of("sources.toml")
    return msgspec.toml.decode(text, type=dict[str, str])


def device_named(name: str, *, or_host: bool = False) -> Hardware:
    """A device by its short name, in any case, or by the name of a file that has one.

    Args:
        name: of the catalogue, or of a file that ends in ``.toml``.
        or_host: whether a host would do as well, so that near names of hosts are offered, too.

    Raises:
        InputError: there is none, and the nearest names are offered; or it is the name of a host.
        FileError: the file cannot be read, or is no catalogue.
    """
    expect(name, str, "device", 'give the short name of one, as "h100-sxm"')
    if name.endswith(".toml"):
        return _only_device(name)
    known = devices()
    by_name = {alias: entry for entry in known.values() for alias in entry.aliases} | dict(known)
    if names_a_host(name):
        host = host_named(name)
        raise InputError(f"{host.name} is a host; its devices are {host.device}: give that name")
    return _looked_up("device", name, by_name, hosts() if or_host else ())


def names_a_host(name: str) -> bool:
    """Whether a name is that of a host of the catalogue, and of no device."""
    return isinstance(name, str) and _normal(name) in hosts()


def host_named(name: str) -> HostSpec:
    """A host by its short name.

    Raises:
        InputError: there is none; the nearest names are offered.
    """
    return _looked_up("host", name, hosts())


def software_named(name: str) -> Software:
    """A software stack by its short name.

    Raises:
        InputError: there is none; the nearest names are offered.
    """
    return _looked_up("software", name, software())


def load_devices(path: str | os.PathLike[str]) -> Mapping[str, Hardware]:
    """The devices of a file of the catalogue's form.

    Raises:
        FileError: it cannot be read, or is no catalogue.
    """
    text = read_text(path, MOST_TOML_BYTES)
    with refused_as(f"{path} is no catalogue of devices"):
        parsed = _parsed(text)
        shared = {**_packaged("efficiencies.toml").efficiencies, **parsed.efficiencies}
        return _devices_of(parsed, shared)


def _only_device(path: str) -> Hardware:
    entries = list(load_devices(path).values())
    if len(entries) != 1:
        raise InputError(
            f"{path} has {len(entries)} devices, but one is meant; leave one [devices.…] in it"
        )
    return entries[0]


def _looked_up(kind: str, name: str, entries: Mapping[str, T], others: Iterable[str] = ()) -> T:
    expect(name, str, kind, f"give the short name of a {kind} of the catalogue")
    wanted = _normal(name)
    if wanted in entries:
        return entries[wanted]
    either = f"{kind} or host" if others else kind
    nearest = _nearest(wanted, [*entries, *others])
    raise InputError(f"the catalogue has no {either} {name!r}; {nearest}")


def _normal(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _nearest(wanted: str, names: Iterable[str]) -> str:
    known = sorted(names)
    # A family's beginning says more than likeness: of "h100-nvl", H100s are the nearest.
    head = wanted.partition("-")[0]
    close = [name for name in known if head and name.startswith(head)]
    close = get_close_matches(wanted, close, n=4, cutoff=0) or get_close_matches(
        wanted, known, n=3, cutoff=0.5
    )
    said = f"the nearest are {', '.join(close)}" if close else f"it has {', '.join(known)}"
    return f"{said} (`penstock devices` shows all, `penstock measure-device` adds yours)"


@cache
def _packaged(name: str) -> _CatalogueFile:
    return _parsed(_text_of(name))


def _text_of(name: str) -> str:
    from importlib.resources import files  # most clusters are of no device in the catalogue

    return (files(__package__) / name).read_text(encoding="utf-8")


def _parsed(text: str) -> _CatalogueFile:
    check_toml(text)
    return msgspec.toml.decode(text, type=_CatalogueFile)


def _devices_of(
    parsed: _CatalogueFile, efficiencies: Mapping[str, Efficiency]
) -> Mapping[str, Hardware]:
    entries = {}
    for name, entry in parsed.devices.items():
        generation = entry.get("efficiency", "other")
        entries[name] = entry
        if isinstance(generation, str):
            if generation not in efficiencies:
                raise InputError(f"device {name!r}: there are no efficiencies {generation!r}")
            entries[name] = {**entry, "efficiency": msgspec.to_builtins(efficiencies[generation])}
    return _named(entries, Hardware)


def _named(entries: Mapping[str, Mapping[str, Any]], kind: type[T]) -> Mapping[str, T]:
    named = {}
    for name, entry in entries.items():
        try:
            named[name] = msgspec.convert({**entry, "name": name}, kind)
        except msgspec.ValidationError as error:
            raise InputError(f"{name}: {error}") from None
    return named


def as_toml(entry: Hardware) -> str:
    """TOML that ``device_named`` reads from a file."""
    fields = {key: value for key, value in msgspec.to_builtins(entry).items() if key != "name"}
    efficiency = fields.pop("efficiency")
    head = f"[devices.{entry.name}]"
    inner = f"[devices.{entry.name}.efficiency]"
    return "\n".join([head, *_lines(fields), "", inner, *_lines(efficiency), ""])


def _lines(fields: dict[str, Any]) -> list[str]:
    return [f"{key} = {_text(value)}" for key, value in fields.items() if value is not None]


def _text(value: Any) -> str:
    match value:
        case dict():
            return (
                "{ " + ", ".join(f"{key} = {_text(inner)}" for key, inner in value.items()) + " }"
            )
        case list() | tuple():
            return "[" + ", ".join(map(_text, value)) + "]"
        case bool():
            return str(value).lower()
        case str():
            return msgspec.json.encode(value).decode()
        case float():
            return f"{value:.6g}"
    return str(value)
