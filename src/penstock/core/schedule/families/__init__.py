"""Every schedule family, by name. To add one: a function here, and a line in ``FAMILIES``.

A family is a pure function ``(num_ranks, num_microbatches, **options) -> Schedule`` that emits
compute only.

Decisions:

Backwards run in the order of the forwards in GPipe, not reversed as in the paper's figure. The
makespan is the same, and gradients then accumulate in the order of one device, so results are equal
to the bit.

DualPipeV is simulated as what it says: the F of a pair hands over its result before the B starts,
so its bubble is half the published one, in which a pair is one unit of work. A test reproduces the
published numbers with pairs as units.

What a family says about itself lives in its docstring (law, wins, loses, paper, drawing); the
command line and the gallery read it there through ``schedule/about.py``.
"""

from __future__ import annotations

import difflib
import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from penstock.base.errors import InputError
from penstock.base.values import expect, is_whole, shown
from penstock.core.schedule.families.bidirectional import chimera, hanayo
from penstock.core.schedule.families.building_block import v_half, v_min
from penstock.core.schedule.families.looped import (
    breadth_first,
    interleaved,
    interleaved_zb,
    spilled,
)
from penstock.core.schedule.families.options import at_least
from penstock.core.schedule.families.searched import optimal, zb_auto
from penstock.core.schedule.families.side_by_side import replicated
from penstock.core.schedule.families.straight import (
    eager_one_f_one_b,
    gpipe,
    one_f_one_b,
    partime,
    pipedream,
    pipedream_2bw,
    seq1f1b,
)
from penstock.core.schedule.families.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_v
from penstock.core.schedule.schedule import Schedule

__all__ = [
    "breadth_first",
    "build",
    "chimera",
    "dualpipe_v",
    "eager_one_f_one_b",
    "family",
    "gpipe",
    "hanayo",
    "interleaved",
    "interleaved_zb",
    "names",
    "one_f_one_b",
    "optimal",
    "partime",
    "pipedream",
    "pipedream_2bw",
    "seq1f1b",
    "spilled",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

FAMILIES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager-1f1b": replicated("eager-1f1b", eager_one_f_one_b),
    "interleaved-1f1b": replicated("interleaved-1f1b", interleaved),
    "breadth-first": replicated("breadth-first", breadth_first),
    "zb-h1": replicated("zb-h1", zb_h1),
    "zb-h2": replicated("zb-h2", zb_h2),
    "zb-v": replicated("zb-v", zb_v),
    "interleaved-zb": replicated("interleaved-zb", interleaved_zb),
    "v-half": replicated("v-half", v_half),
    "v-min": replicated("v-min", v_min),
    "dualpipe-v": replicated("dualpipe-v", dualpipe_v),
    "chimera": replicated("chimera", chimera),
    "hanayo": replicated("hanayo", hanayo),
    "seq1f1b": replicated("seq1f1b", seq1f1b),
    "spilled": replicated("spilled", spilled),
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "partime": partime,
    "zb-auto": replicated("zb-auto", zb_auto),
    "optimal": replicated("optimal", optimal),
}

SEARCHED = frozenset({"zb-auto", "optimal"})
"""Families that search for an order: they take time, and they take costs."""

UNLIKE_REPLICAS = ("1f1b", "gpipe", "pipedream", "pipedream-2bw")
"""Families whose stages may have unlike numbers of replicas: each rank has one stage. In all others
that drain, pipelines stand side by side."""

HOLD_ALL = frozenset({"gpipe", "breadth-first", "spilled"})
"""Families whose ranks may hold all microbatches of a minibatch at once: these have no middle in
which forwards and backwards take turns."""

LARGEST = 100_000_000
"""The most ranks times microbatches, times the parts that an option makes of each."""

_NO_TEXT = {
    "costs": "give costs with --costs, or from Python as a penstock.Costs",
    "sizes": "sizes can be given from Python only, as a penstock.Sizes",
}
_PARTS = ("stages_per_rank", "num_waves", "num_slices")


def names() -> tuple[str, ...]:
    """The names that ``build`` takes."""
    return tuple(FAMILIES)


def family(name: str) -> Callable[..., Schedule]:
    """The function behind a name; its docstring says what it does and who published it.

    Raises:
        InputError: no family has this name.
    """
    expect(name, str, "the schedule's name", f"take one of {', '.join(FAMILIES)}")
    if name not in FAMILIES:
        close = difflib.get_close_matches(name.lower(), FAMILIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(FAMILIES)}"
        raise InputError(f"no schedule is called {name!r}{hint}")
    return FAMILIES[name]


def has_replicas(name: str) -> bool:
    """Whether stages of a family may have replicas.

    >>> has_replicas("zb-h1"), has_replicas("partime")
    (True, False)
    """
    return "replicas" in inspect.signature(family(name)).parameters


def check_options(name: str, options: Collection[str]) -> None:
    """Raise ``InputError`` if a family does not take one of these options."""
    known = tuple(inspect.signature(family(name)).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes no options"
        raise InputError(f"{name} has no option {', '.join(unknown)}; {takes}")


def named(text: str) -> tuple[str, dict[str, Any]]:
    """A family and its options, as people write both: ``"hanayo"``, ``"hanayo:num_waves=2"``.

    Raises:
        InputError: no such family, an option without ``=``, one that it does not take or that
            cannot be written as text, or a value of another type than the option has.

    >>> named("spilled:stages_per_rank=4,group=1")
    ('spilled', {'stages_per_rank': 4, 'group': 1})
    """
    expect(text, str, "the schedule's name", f"take one of {', '.join(FAMILIES)}")
    name, _, rest = text.partition(":")
    types = get_type_hints(family(name))
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{name}: {shown(part)} is no option; write {name}:name=value")
        if option in options:
            raise InputError(f"{name}: {option} is given twice")
        if option in _NO_TEXT:
            raise InputError(f"{name}: {_NO_TEXT[option]}")
        check_options(name, [option])
        options[option] = _value_of(f"{name}: {option}", value, types[option])
    return name, options


def _value_of(subject: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise InputError(f"{subject} is {shown(text)}; take {' or '.join(get_args(kind))}")
    try:
        return msgspec.convert(text, kind, strict=False)
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(f"{subject} cannot be {shown(text)}: {error}") from None


def build(name: str, *, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Build the schedule called ``name``.

    Args:
        name: one of ``names()``.
        num_ranks: devices, at least 1.
        num_microbatches: microbatches per minibatch, at least 1.
        options: what the family takes besides.

    Raises:
        InputError: an unknown name or option, or a count below 1.
    """
    check_size(name, num_ranks, num_microbatches, options)
    check_options(name, options)
    with _no_garbage_collection():
        return family(name)(num_ranks, num_microbatches, **options)


def check_size(
    name: str, num_ranks: int, num_microbatches: int, options: Mapping[str, Any]
) -> None:
    """Raise ``InputError`` unless there is such a family, and ranks and microbatches, no more than
    memory holds.

    Args:
        name: of the family.
        num_ranks, num_microbatches, options: as ``build`` takes them.
    """
    family(name)
    at_least(name, "num_ranks", num_ranks, 1, LARGEST)
    at_least(name, "num_microbatches", num_microbatches, 1, LARGEST)
    parts = [options[part] for part in _PARTS if is_whole(options.get(part))]
    if num_ranks * num_microbatches * max(1, *parts, 1) > LARGEST:
        times = f" × {shown(max(parts))} parts" if parts else ""
        raise InputError(
            f"{name}: {num_ranks} ranks × {num_microbatches} microbatches{times} are more than "
            f"{LARGEST:,}, which no memory holds; ask for less"
        )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Ops hold no cycles; looking for some again and again takes most of the time of building
    millions of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return __all__
