"""Writes a device as a file of the catalogue's form."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.catalogue.parts import Hardware


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
