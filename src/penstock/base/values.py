"""How Penstock's values become files and come back.

Graphs, clusters and plans are files that people read, diff and edit. They are written as indented
JSON and read strictly: an unknown key, a missing one or a wrong type is refused with its path
inside the file, as is a key that stands twice. Those that a program makes are held to the same
types.

What an argument may be is asked here too (``expect``, ``one_of``, ``whole``, ``number``, ``flag``),
so that every refusal reads alike.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar, cast, get_type_hints

import msgspec
from msgspec.structs import force_setattr

from penstock.base.arguments import nearest
from penstock.base.errors import ArgumentError, FileError, InputError
from penstock.base.mistaken import held_to, mistaken

T = TypeVar("T")
V = TypeVar("V", bound="Value")

LEAST_AMOUNT, MOST_AMOUNT = 1e-30, 1e30
"""Between them lies whatever is not 0: sums, products and quotients of what people mean stay
finite there, so nothing is ever shown as ``nan``."""

MOST_BYTES = 2**62
"""More than any machine has, and still a number that numpy counts with."""

MOST_FILE_BYTES, MOST_TOML_BYTES = 1 << 29, 1 << 22
"""Of a file that is read as text: the timeline of millions of passes, and what people write."""

_MOST_PARTS = 32
_DEEP_KEY = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*\.[ \t]*)"""
    f"{{{_MOST_PARTS}}}"
)
_LARGEST = sys.float_info.max
_MOST_SHOWN = 80


_PLAIN: dict[Any, tuple[float, float]] = {
    float: (LEAST_AMOUNT, MOST_AMOUNT),
    int: (1, MOST_BYTES),
}
"""From where to where numbers are right whatever their field, as 0 is."""


class FieldsByName(msgspec.StructMeta):
    """Says how records are made to whoever gives values without their names."""

    def __call__(cls, *values: object, **fields: object) -> Any:
        if len(values) > len(cls.__match_args__):
            first = cls.__struct_fields__[0]
            given = shown(values[0])
            raise InputError(
                f"{cls.__name__} takes its fields by name; write {cls.__name__}({first}={given}, …)"
            )
        try:
            return super().__call__(*values, **fields)
        except TypeError as error:
            refusal = cls._refusal(values, fields)
            if refusal is None:
                raise
            raise refusal from error

    def _refusal(
        cls, values: Sequence[object], fields: Mapping[str, object]
    ) -> ArgumentError | None:
        """Why a record cannot be made of these, and what it has."""
        names = cls.__struct_fields__
        unknown = next((name for name in fields if name not in names), None)
        if unknown is not None:
            near = nearest(unknown, names)
            instead = f"it has {', '.join(names)}" if near is None else f"give {near}=…"
            return ArgumentError(f"{cls.__name__} has no field {unknown!r}; {instead}")
        given = {*names[: len(values)], *fields}
        required = (
            field.name
            for field in msgspec.structs.fields(cast(type[msgspec.Struct], cls))
            if field.required
        )
        missing = [f"{name}=…" for name in required if name not in given]
        return ArgumentError(f"{cls.__name__} lacks {', '.join(missing)}") if missing else None


class Value(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    metaclass=FieldsByName,
):
    """A frozen record that can be written to a file and read back."""

    def check_fields(self, whose: str = "") -> None:
        """Hold a record that a program makes to what files are held to: types, and amounts that
        people can mean. numpy's numbers become plain ones, lists tuples.

        Args:
            whose: fields they are, for errors; by default, those of the class.

        Raises:
            InputError: a field is of another type, a number in it is not finite, or one of seconds,
                bytes or bytes per second is negative, or larger than anything.
        """
        for name, kind in _types(type(self)).items():
            value = getattr(self, name)
            # A search makes thousands of records, nearly all of plain amounts.
            if type(value) is kind and kind in _PLAIN:
                least, most = _PLAIN[kind]
                if not value or least <= value <= most:
                    continue
            subject = f"{whose or type(self).__name__}: {name}"
            if type(value) is not kind:
                value = _converted(subject, value, kind)
                force_setattr(self, name, value)
            _check_size(subject, value, name)

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
                file is named. Or it holds a value of another kind, which is named.
        """
        expect(text, str | bytes, "the text", f"give what {cls.__name__}.to_json wrote")
        with read_as(cls.__name__, text, where):
            return decoded(text, cls)

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


def _converted(subject: str, value: object, kind: Any) -> object:
    plain = value.item() if isinstance(value, Real) and hasattr(value, "item") else value
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        said = str(error)
        raise InputError(
            f"{subject} is {shown(value)}, which it cannot be: {said[:1].lower()}{said[1:]}"
        ) from None


def _check_size(subject: str, value: Any, name: str) -> None:
    """Raise ``InputError`` for a number out of all reason; its unit ends its name."""
    if isinstance(value, dict):
        for key, number in value.items():
            _check_size(f"{subject}[{key!r}]", number, name)
    elif not is_number(value):
        return
    elif name.endswith("_bytes"):
        whole(subject, value, 0, MOST_BYTES)
    elif name.endswith(("_seconds", "_per_second")):
        amount(subject, value)
    elif isinstance(value, int):
        whole(subject, abs(value), 0, MOST_BYTES)
    elif not -MOST_AMOUNT <= value <= MOST_AMOUNT:
        raise InputError(f"{subject} is {value}, but must be finite, and ≤ {MOST_AMOUNT:g}")


@cache
def _types(kind: type[Value]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


@contextmanager
def refused_as(subject: str) -> Iterator[None]:
    """Within, text that cannot be read becomes a ``FileError`` that begins with ``subject``."""
    try:
        yield
    except (msgspec.DecodeError, InputError) as error:
        raise FileError(f"{subject}: {error}") from None
    except RecursionError:
        raise FileError(f"{subject}: it is nested too deeply; write it flat") from None


@contextmanager
def read_as(kind: str, text: str | bytes, where: str) -> Iterator[None]:
    """As ``refused_as``, of text that is to be a value; if it is one of another kind, the error
    says of which.

    Args:
        kind: the name of the value's class.
        where: the name that errors have for the text.
    """
    with held_to(kind, text, where), refused_as(f"{where} is not a valid {kind}"):
        yield


def decoded(text: str | bytes, kind: type[T]) -> T:
    """JSON as a value of a type.

    Raises:
        msgspec.DecodeError: it is none.
        InputError: a key stands twice, whose path is named: readers differ in which one counts.
    """
    value = msgspec.json.decode(text, type=kind)
    # Only now: it is JSON, and no deeper than the type.
    path = _repeated_key(text)
    if path:
        raise InputError(f"the key `{path}` stands twice; leave one of them out")
    return value


def _repeated_key(text: str | bytes) -> str:
    """The path of the first key that stands twice in an object; empty if none does."""
    from json import JSONDecoder

    is_repeated, plain = False, text if isinstance(text, str) else text.decode()

    def only_pairs(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        nonlocal is_repeated
        is_repeated |= len({key for key, _ in pairs}) < len(pairs)
        return pairs if is_repeated else []  # nobody looks at what is right

    # Two readings, since a path is known only from outside inwards. Numbers are not read.
    read = JSONDecoder(object_pairs_hook=only_pairs, parse_float=bool, parse_int=bool).decode
    read(plain)
    return _path_of_repeated(read(plain), "$") if is_repeated else ""


def _path_of_repeated(part: Any, path: str) -> str:
    """As ``_repeated_key``, of a part whose objects are lists of pairs."""
    if not isinstance(part, list):
        return ""
    keys: set[str] = set()
    for place, item in enumerate(part):
        key, inner = item if isinstance(item, tuple) else (None, item)
        here = f"{path}[{place}]" if key is None else f"{path}.{key}"
        if key in keys:
            return here
        if deeper := _path_of_repeated(inner, here):
            return deeper
        keys |= set() if key is None else {key}
    return ""


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_FILE_BYTES) -> str:
    """The text of a file, or of what another program writes into a pipe; or a ``FileError`` that
    says why it cannot be read. A device, and what is too large, is not even begun."""
    _expect_path(path)
    try:
        _check_file(os.stat(path), most_bytes)
        with open(path, "rb") as file:
            return read_stream(file, str(path), most_bytes)
    except OSError as error:
        reason = error.strerror or str(error)
    except FileError:
        raise
    except InputError as error:
        reason = str(error)
    raise FileError(f"cannot read {path}: {reason}")


def read_stream(stream: BinaryIO, name: str, most_bytes: int = MOST_FILE_BYTES) -> str:
    """The text of what is open already, to its end; as ``read_text``.

    Args:
        name: what errors call it.
    """
    try:
        content = stream.read(most_bytes + 1)
        if len(content) <= most_bytes:  # a pipe does not say it before
            # Some programs begin a file with a mark that says so.
            return content.decode("utf-8-sig")
        reason = f"it has more than {most_bytes:,} bytes"
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    raise FileError(f"cannot read {name}: {reason}")


def _check_file(status: os.stat_result, most_bytes: int) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFDIR):  # of a folder, reading says it
        raise InputError("it is a device or a socket; give the name of a file")
    if kind == stat.S_IFREG and status.st_size > most_bytes:
        raise InputError(f"it has {status.st_size:,} bytes, and may have {most_bytes:,}")


def check_toml(text: str) -> None:
    """Raise ``InputError`` for TOML that takes far longer to read than it is: some readers need
    time and memory that grow with the square of how deep a key is."""
    if len(text) > MOST_TOML_BYTES:
        raise InputError(f"it has {len(text):,} letters, and may have {MOST_TOML_BYTES:,}")
    deep = _DEEP_KEY.search(text)
    if deep is not None:
        line = text.count("\n", 0, deep.start()) + 1
        raise InputError(
            f"a key in line {line} has more than {_MOST_PARTS} parts; write it with fewer dots"
        )


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes to ``path`` so that no reader ever sees half of it.

    Raises:
        FileError: the folder cannot be made or written.
    """
    _expect_path(path)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's, which nobody else may read: the system knows the user's umask, and asking
        # for it would change it for all threads.
        temporary = target.parent / f".{target.name[:40]}.{os.urandom(8).hex()}"
        try:
            with temporary.open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from None


def encode(value: Any) -> str:
    """Any tree of plain values as indented JSON, for ``--json`` and saved runs."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def expect(value: object, kind: Any, subject: str, remedy: str) -> None:
    """Raise ``InputError`` unless ``value`` is of a kind: for arguments people often mistake."""
    if not isinstance(value, kind):
        if isinstance(value, type):
            raise InputError(f"{subject} is the class {value.__name__}; {remedy}")
        if known := mistaken(value, kind, remedy):
            raise InputError(f"{subject} is {known}")
        raise InputError(f"{subject} is of type {type(value).__name__}; {remedy}")


def one_of(subject: str, value: object, choices: Sequence[str]) -> None:
    """Raise ``InputError`` unless ``value`` is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{subject} is {shown(value)}; use {' or '.join(choices)}")


def whole(subject: str, value: Any, least: int, most: int | None = None) -> int:
    """An argument as a plain whole number.

    Raises:
        InputError: it is no whole number, or one below ``least`` or above ``most``.

    >>> whole("ranks", "2", 1)
    Traceback (most recent call last):
    penstock.errors.InputError: ranks is '2', but must be a whole number ≥ 1
    """
    if not is_whole(value):
        raise InputError(f"{subject} is {shown(value)}, but must be a whole number ≥ {least}")
    if value < least:
        raise InputError(f"{subject} is {shown(value)}, but must be ≥ {least}")
    if most is not None and value > most:
        raise InputError(f"{subject} is {shown(value)}, but may be {most:,} at most")
    return int(value)


def number(subject: str, value: Any, *, most: float = _LARGEST, positive: bool = False) -> float:
    """An argument as a plain number that is ≥ 0 and finite.

    Args:
        subject: the argument, for errors.
        value: as the caller gave it.
        most: the largest that it may be.
        positive: whether it may not be 0 either.

    Raises:
        InputError: it is no such number.

    >>> number("seconds", float("nan"))
    Traceback (most recent call last):
    penstock.errors.InputError: seconds is nan, but must be ≥ 0 and finite
    """
    least = "> 0" if positive else "≥ 0"
    if not is_number(value):
        raise InputError(f"{subject} is {shown(value)}, but must be a number {least}")
    if not (value > 0 or (value == 0 and not positive)) or value == inf:
        raise InputError(f"{subject} is {shown(value)}, but must be {least} and finite")
    if value > most:
        raise InputError(f"{subject} is {shown(value)}, but may be {most:g} at most")
    return float(value)


def amount(subject: str, value: object, *, most: float = MOST_AMOUNT) -> float:
    """An argument as a plain number that is 0, or something that people can mean.

    Raises:
        InputError: it is no number, negative, or not 0 and not from ``LEAST_AMOUNT`` to ``most``.
    """
    plain = number(subject, value, most=most)
    if 0 < plain < LEAST_AMOUNT:
        raise InputError(f"{subject} is {shown(value)}, but must be 0 or ≥ {LEAST_AMOUNT:g}")
    return plain


def flag(subject: str, value: object) -> None:
    """Raise ``InputError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{subject} is {shown(value)}; give True or False")


def shown(value: object) -> str:
    """A value as an error shows it: never long, and whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of more digits than Python prints, or a class that cannot say
        return f"a value of type {type(value).__name__} that cannot be printed"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number, numpy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether ``value`` is a whole number, numpy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def items_of(value: Any) -> list[Any] | None:
    """The items of a list, a tuple or an array; ``None`` for what has no order, or is text."""
    # numpy's arrays are sequences in all but name.
    ordered = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    return list(value) if ordered and not isinstance(value, str | bytes) else None


def _expect_path(path: object) -> None:
    expect(path, str | os.PathLike, "the path", "give a file's name")
    if "\0" in str(path):
        raise FileError(f"no file can be called {shown(path)}; leave the null byte out")
