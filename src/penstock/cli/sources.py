"""What a verb can be pointed at: a schedule's name, a CSV, a plan, a timeline, a workload."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.cost import Costs
from penstock.drawing import Report
from penstock.errors import FileError, InputError, ModelError
from penstock.planner import Plan
from penstock.schedule import Schedule, families
from penstock.schedule.check import check
from penstock.simulator import simulate
from penstock.timeline import Timeline
from penstock.values import read_text

if TYPE_CHECKING:
    from penstock.trial import Workload

DEFAULT_WORKLOAD = "penstock.demo:workload"


class Source(NamedTuple):
    """Something that can be drawn: its timeline, and the schedule if it came from one."""

    timeline: Timeline
    schedule: Schedule | None


def load(name: str, ranks: int, microbatches: int, costs: Costs) -> Source:
    """Find what ``name`` means and make a timeline of it.

    Args:
        name: a schedule family; or a file: ``.csv`` (ops, as torch writes them) or ``.json`` (a
            plan, a timeline or a run's report).
        ranks, microbatches: for a family.
        costs: for a family or a CSV.

    Raises:
        InputError: neither, or a file that does not hold what it should.
    """
    suffix = Path(name).suffix.lower()
    if suffix == ".csv":
        schedule = Schedule.parse(read_text(name), Path(name).stem)
        check(schedule)
        return Source(simulate(schedule, costs), schedule)
    if suffix == ".json":
        return _load_json(name)
    schedule = families.build(name, num_ranks=ranks, num_microbatches=microbatches)
    return Source(simulate(schedule, costs), schedule)


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
    if not {"stages", "schedule"} & keys:
        raise FileError(f"{path} holds neither a plan nor a timeline nor a run's report")
    plan = Plan.from_json(text, where=path)
    return Source(plan.simulate(), plan.build_schedule())


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
