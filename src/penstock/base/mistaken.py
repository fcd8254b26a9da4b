"""The kinds of values that people hand over, and which of them they gave in place of another.

A file of the wrong kind, a value of the wrong class, a name where a file is wanted: whoever refuses
it says what it is, what is wanted, and what was probably meant. A file is known by its keys, a
value by its class.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePath
from types import UnionType
from typing import Any, NamedTuple

import msgspec

from penstock.base.errors import FileError, InputError
from penstock.base.lazily import provider_of

_FILE_SUFFIXES = (".json", ".toml", ".csv", ".txt")
_OPS = re.compile(r"[\s,]*\d+[A-Z_]+\d*\s*(,|$)", re.MULTILINE)
"""How a table of ops begins."""


class ValueKind(NamedTuple):
    """What is said of a kind of value.

    Attributes:
        words: what it is, in a sentence.
        keys: those by which its files are known: of several kinds, the one that has most of them.
        use: what takes such a file, whose name stands for ``{}``.
        call: what takes such a value.
        origin: what makes one.
        makes: the class of what these make of it.
    """

    words: str
    keys: frozenset[str] = frozenset()
    use: str = ""
    call: str = ""
    origin: str = ""
    makes: str = ""


VALUE_KINDS = {
    "Schedule": ValueKind(
        "a schedule",
        frozenset({"ranks"}),
        "`penstock draw {}` draws it, penstock.Schedule.load reads it",
        "penstock.simulate makes a timeline of it",
        "penstock.schedules.build builds one",
        "Timeline",
    ),
    "Timeline": ValueKind(
        "a timeline",
        frozenset({"spans"}),
        "`penstock draw {}` draws it, penstock.Timeline.load reads it",
        "penstock.draw draws it",
        "penstock.simulate makes one of a schedule or a plan",
    ),
    "Report": ValueKind(
        "a run's report",
        frozenset({"measured", "predicted"}),
        "`penstock draw {}` draws what it measured",
        origin="`penstock train` writes one",
    ),
    "ChromeTrace": ValueKind(
        "a Chrome trace",
        frozenset({"traceEvents"}),
        "Perfetto opens it, and `penstock trace` makes a timeline of those of all ranks",
    ),
    "Plan": ValueKind(
        "a plan",
        frozenset({"stages", "schedule"}),
        "`penstock draw {}` shows it, penstock.Plan.load reads it",
        "penstock.draw shows it, penstock.replan plans for other devices",
        "`penstock plan` and penstock.plan make one of a model's profile",
    ),
    "LayerGraph": ValueKind(
        "a model's profile",
        frozenset({"layers"}),
        "`penstock plan {}` makes a plan of it, penstock.LayerGraph.load reads it",
        "penstock.plan makes a plan of it",
        "`penstock profile` and penstock.profile make one of a model",
        "Plan",
    ),
    "Cluster": ValueKind(
        "a cluster",
        frozenset({"devices"}),
        "`penstock plan GRAPH {}` plans for it, penstock.Cluster.load reads it",
        "penstock.plan takes it behind a profile",
        "`penstock cluster` and penstock.Cluster.local say what this machine is",
    ),
    "FleetFile": ValueKind(
        "a fleet", use="`penstock fleet {}` trains it", origin="docs/many-models.md shows one"
    ),
    "EngineConfig": ValueKind(
        "another engine's config", origin="docs/other-engines.md says which are read"
    ),
    "Pipeline": ValueKind(
        "a pipeline", call="give its pipeline.timeline, of the last step, or its pipeline.plan"
    ),
}
"""By the name of the class."""


def kind_in(text: str | bytes, wanted: str = "") -> str | None:
    """The kind of value that a file holds, as far as its keys tell; of those that fit as well as
    each other, ``wanted``.

    >>> kind_in('{"layers": []}'), kind_in("0F0,0B0"), kind_in("a = 1")
    ('LayerGraph', 'Schedule', None)
    """
    try:
        keys = set(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError):
        plain = text if isinstance(text, str) else text[:1000].decode(errors="replace")
        return "Schedule" if _OPS.match(plain) else None
    fitting = {name: len(kind.keys & keys) for name, kind in VALUE_KINDS.items()}
    closest = max(fitting, key=lambda name: (fitting[name], name == wanted))
    return closest if fitting[closest] else None


@contextmanager
def held_to(wanted: str, text: str | bytes, where: str) -> Iterator[None]:
    """Within, text that cannot be read raises ``FileError``; if it holds a value of another kind,
    one that says so.

    Args:
        wanted: the name of the class that it is read as.
        text: all of it.
        where: the name that errors have for it, for example the file's.
    """
    try:
        yield
    except FileError:
        given = kind_in(text, wanted)
        if given is None or given == wanted:
            raise
        raise FileError(other_file(given, wanted, where)) from None


def other_file(given: str, wanted: str, where: str) -> str:
    """That a file holds one kind of value in place of another.

    Args:
        given, wanted: names of classes; ``wanted`` may be several in words.
        where: the name that errors have for it.
    """
    kind = VALUE_KINDS[given]
    named = shlex.quote(where) if PurePath(where).suffix else "FILE"
    return f"{where} holds {kind.words}, {_instead(wanted, kind.use.format(named), kind.makes)}"


def name_as_file(name: str, wanted: str) -> str:
    """That a schedule's name was given in place of a file; empty if it is none.

    Args:
        wanted: the name of the class that the file is to hold.
    """
    if _family_of(name) is None:
        return ""
    use = (
        f"`penstock plan GRAPH --schedule {name} -o plan.json` plans with it, "
        f"`penstock schedules {name.partition(':')[0]}` tells about it"
    )
    return f"{name} is the name of a schedule, {_instead(wanted, use, 'Plan')}"


def _instead(wanted: str, use: str, makes: str) -> str:
    kind = VALUE_KINDS.get(wanted, ValueKind(wanted))
    origin = "" if makes == wanted else kind.origin
    return f"where {kind.words} is wanted; " + "; ".join(filter(None, (use, origin)))


def mistaken(value: object, wanted: Any, remedy: str) -> str:
    """What a value is, and what to do, where one of another class is wanted: the end of an error's
    sentence. Empty where it is nothing that people mix up with these.

    Args:
        wanted: a class, or a union of some.
        remedy: what else makes such a value.
    """
    classes = wanted.__args__ if isinstance(wanted, UnionType) else (wanted,)
    names = [kind.__name__ for kind in classes if kind.__name__ in VALUE_KINDS]
    if not names:
        return ""
    if isinstance(value, str | os.PathLike):
        return _mistaken_text(str(value), names[0], remedy)
    given = next((kind.__name__ for kind in type(value).__mro__ if _is_known(kind)), None)
    if given is None:
        return ""
    kind = VALUE_KINDS[given]
    steps = [kind.call] if kind.makes in names else [kind.call, remedy]
    return f"{kind.words}; {'; '.join(steps)}"


def _is_known(kind: type) -> bool:
    known = VALUE_KINDS.get(kind.__name__)
    return known is not None and known.call != "" and kind.__module__.startswith("penstock.")


def _mistaken_text(text: str, wanted: str, remedy: str) -> str:
    if PurePath(text).suffix.lower() in _FILE_SUFFIXES:
        return f"{text!r}, the name of a file; penstock.{wanted}.load({text!r}) reads it"
    named = _family_of(text)
    if named is None:
        return ""
    family, options = named
    given = {"num_ranks": 4, "num_microbatches": 8, **options}
    keywords = ", ".join(f"{name}={value!r}" for name, value in given.items())
    schedule = f"penstock.schedules.build({family!r}, {keywords})"
    steps = {
        "Plan": f"penstock.plan(…, schedule={text!r}) plans with it",
        "Schedule": f"{schedule} builds it",
        "Timeline": f"penstock.simulate({schedule}) makes a timeline of it",
    }
    return f"{text!r}, the name of a schedule; {steps.get(wanted, remedy)}"


def _family_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """The schedule that a text names, and its options; ``None`` if it is no such name."""
    family, colon, options = text.partition(":")
    # This room knows no schedules.
    families = importlib.import_module(provider_of("named"))
    with suppress(InputError):
        named: tuple[str, dict[str, Any]] = families.named(f"{family.lower()}{colon}{options}")
        return named
    return None
