"""How Penstock's values become files and come back.

Graphs, clusters and plans are files that people read, diff and edit. They are written as indented
JSON and read strictly: an unknown key, a missing one or a wrong type is refused with its path
inside the file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from penstock.errors import FileError, InputError

V = TypeVar("V", bound="Value")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frozen record that can be written to a file and read back."""

    def to_json(self) -> str:
        """This value as indented JSON text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "text") -> Self:
        """Read a value back from JSON.

        Args:
            text: what ``to_json`` wrote, perhaps edited by hand.
            where: the name to use in errors, for example the path of the file.

        Raises:
            FileError: not JSON, an unknown or missing key, or a wrong type; the path inside the
                file is named.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise FileError(f"{where} is not a valid {cls.__name__}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this value to ``path`` as JSON, atomically."""
        write_atomically(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a value from a file.

        Raises:
            FileError: the file is not there or does not hold this kind of value.
        """
        return cls.from_json(read_text(path), where=str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, or a ``FileError`` that says why it cannot be read."""
    try:
        # Some programs begin a file with a mark that says so.
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FileError(f"cannot read {path}: {reason}") from None


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` so that no reader ever sees half of it.

    Raises:
        FileError: the folder cannot be made or written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            # mkstemp makes private files; a plan or a picture is as readable as any other file.
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(handle, 0o666 & ~umask)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None


def encode(value: Any) -> str:
    """Any tree of plain values as indented JSON, for ``--json`` and saved runs."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def expect(value: object, kind: Any, what: str, remedy: str) -> None:
    """Raise ``InputError`` unless ``value`` is of a kind: for arguments people often mistake."""
    if not isinstance(value, kind):
        raise InputError(f"{what} is of type {type(value).__name__}; {remedy}")


def one_of(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise ``InputError`` unless ``value`` is one of the choices."""
    if value not in choices:
        raise InputError(f"{what} is {value!r}; use {' or '.join(choices)}")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number, numpy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether ``value`` is a whole number, numpy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def items_of(value: Any) -> list[Any] | None:
    """The items of a list, a tuple or an array; ``None`` for what has no order, or is text."""
    # numpy's arrays are sequences in all but name.
    ordered = isinstance(value, Sequence) or hasattr(value, "__array__")
    return list(value) if ordered and not isinstance(value, str | bytes) else None
