"""Tables of a TOML file as records, and what is wrong with them in words."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.base.errors import InputError
from penstock.base.values import check_toml, shown

T = TypeVar("T", bound=msgspec.Struct)

_MUST_BE = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text, in quotes",
}


def parsed(text: str) -> dict[str, Any]:
    """What stands in a TOML file.

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
        return " or ".join(_must_be(one) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    return _MUST_BE.get(kind, "another kind of value")


def _in(where: str) -> str:
    return where or "the file"
