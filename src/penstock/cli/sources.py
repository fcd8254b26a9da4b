"""What a verb can be pointed at: a schedule's name, a CSV, a plan, a timeline, a workload."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from penstock.cost import Costs
from penstock.drawing import Report
from penstock.errors import FileError, InputError, ModelError
from penstock.interchange import from_torch_csv
from penstock.planner import Plan
from penstock.schedule import Schedule, families
from penstock.schedule.check import check
from penstock.schedule.memory import Sizes
from penstock.simulator import simulate
from penstock.timeline import Timeline
from penstock.values import read_text

if TYPE_CHECKING:
    from penstock.trial import Workload

DEFAULT_WORKLOAD = "penstock.demo:workload"


_TORCH = re.compile("UNSHARD|RESHARD|REDUCE_GRAD|OVERLAP_F_B")

P = ParamSpec("P")
T = TypeVar("T")

_STAGES_PER_RANK = {"v": 2}
"""Of the placements with a name; a straight pipeline has one."""


class Source(NamedTuple):
    """Something that can be drawn: its timeline, the schedule if it came from one, and the bytes
    that a microbatch keeps if a plan says so."""

    timeline: Timeline
    schedule: Schedule | None
    sizes: Sizes | None = None


def load(name: str, ranks: int, microbatches: int, costs: Costs) -> Source:
    """Find what ``name`` means and make a timeline of it.

    Args:
        name: a schedule family, with options behind a colon, as in ``hanayo:waves=2``; or a file:
            ``.csv`` (ops, as torch writes them) or ``.json`` (a plan, a timeline or a run's
            report).
        ranks, microbatches: for a family.
        costs: for a family or a CSV; plain numbers are those of a whole rank's layers.

    Raises:
        InputError: neither, or a file that does not hold what it should.
    """
    suffix = Path(name).suffix.lower()
    if suffix == ".csv":
        schedule = read_csv(name)
        _named(name, check, schedule)
    elif suffix == ".json":
        return _load_json(name)
    else:
        schedule = _build(name, ranks, microbatches, costs)
    per_rank = schedule.num_stages / schedule.num_ranks
    return Source(_named(name, simulate, schedule, costs.spread(per_rank)), schedule)


def read_csv(path: str) -> Schedule:
    """Read ops, as we or torch write them.

    Raises:
        FileError: a cell is not an op; the file, the line and the cell are named.
    """
    text, stem = read_text(path), Path(path).stem
    # Words that only torch's files have.
    read = from_torch_csv if _TORCH.search(text) else Schedule.parse
    return _named(path, read, text, stem)


def _named(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, and say in its refusal which of several sources it is about."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        message = str(error)
        raise InputError(message if name in message else f"{name}: {message}") from None


def _build(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    family, _, rest = name.partition(":")
    options = family_options(family, rest)
    searched = {}
    if "costs" in inspect.signature(families.family(family)).parameters:
        # A search is to find the order for the costs under which it is then judged.
        per_rank = _STAGES_PER_RANK.get(str(options.get("placement")), 1)
        searched["costs"] = costs.spread(per_rank)
    schedule = families.build(
        family, num_ranks=ranks, num_microbatches=microbatches, **options, **searched
    )
    # Two of one family may stand beside each other; their options tell them apart.
    return replace(schedule, name=name) if options else schedule


def family_options(family: str, text: str) -> dict[str, Any]:
    """Read ``option=value,option=value`` into what the family takes.

    Raises:
        InputError: no such family, no ``=``, or a value of another type than the option has.
    """
    types = get_type_hints(families.family(family))
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{family}: {part!r} is no option; write {family}:name=value")
        if option in options:
            raise InputError(f"{family}: {option} is given twice")
        if option == "costs":
            raise InputError(f"{family}: give costs with --costs")
        if option == "sizes":
            raise InputError(f"{family}: sizes can be given from Python only, as a penstock.Sizes")
        if get_origin(types.get(option)) is Literal and value not in get_args(types[option]):
            allowed = " or ".join(get_args(types[option]))
            raise InputError(f"{family}: {option} is {value!r}; take {allowed}")
        try:
            options[option] = msgspec.convert(value, types.get(option, str), strict=False)
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(f"{family}: {option} cannot be {value!r}: {error}") from None
    return options


def _load_json(path: str) -> Source:
    text = read_text(path)
    try:
        keys = set(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError as error:
        raise FileError(f"{path} holds neither a plan nor a timeline: {error}") from None
    if "spans" in keys:
        return Source(Timeline.from_json(text, where=path), None)
    if "measured" in keys:
        report = Report.from_json(text, where=path)
        found = report.measured or report.predicted
        if found is not None:
            return Source(found.timeline(), None)
    if "traceEvents" in keys:
        raise FileError(f"{path} is a Chrome trace, a picture of a timeline; open it in Perfetto")
    if not {"stages", "schedule"} & keys:
        raise FileError(f"{path} holds neither a plan nor a timeline nor a run's report")
    plan = Plan.from_json(text, where=path)
    return Source(plan.simulate(), plan.build_schedule(), plan.sizes)


def load_workload(name: str) -> Workload:
    """Import ``module:function`` and call it.

    Raises:
        ModelError: it cannot be imported, or does not return a ``Workload``.
    """
    from penstock.trial import Workload

    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise InputError(
            f"{name!r} names no workload; write module:function, for example {DEFAULT_WORKLOAD}, "
            "where the function returns a penstock.trial.Workload"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        workload = getattr(importlib.import_module(module_name), function_name)()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load the workload {name!r}: {error}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(workload, Workload):
        raise ModelError(
            f"{name} returned a {type(workload).__name__}; return a penstock.trial.Workload"
        )
    return workload
