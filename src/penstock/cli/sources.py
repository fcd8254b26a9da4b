"""The sources that a verb can be pointed at: a schedule's name, a CSV, a plan, a timeline."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeGuard, TypeVar

import msgspec

from penstock import drawing
from penstock.base.errors import FileError, InputError
from penstock.base.mistaken import kind_in, other_file
from penstock.base.values import decoded, refused_as
from penstock.cli.input import stem_of, suffix_of, text_of, title_of
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.check import check
from penstock.core.schedule.lower import add_update, add_updates
from penstock.core.schedule.op import Kind
from penstock.core.schedule.repetition import MOST_PARTS, abridged
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.timing.spans import BUSY, NO_VERSION
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import POLICIES, USUAL, Flush, Policy, rounds_of, versions_read
from penstock.drawing.timeline.excerpt import (
    ends_to_draw,
    most_steady,
    simulated_to_draw,
    steady_part,
)
from penstock.planning import plans

if TYPE_CHECKING:
    from penstock.core.schedule.memory import Sizes
    from penstock.planning.plans import Plan

_TORCH = re.compile("UNSHARD|RESHARD|REDUCE_GRAD|OVERLAP_F_B")

_DRAWABLE = "a plan, a schedule, a timeline or a run's report"

P = ParamSpec("P")
T = TypeVar("T")

_STAGES_PER_RANK = {"v": 2}
"""Stages per rank of the placements with a name; a straight pipeline has one."""


class DrawableSource(NamedTuple):
    """Something that can be drawn: its timeline, and the schedule and the plan if it came from
    them.

    Attributes:
        num_ticks: of the prediction of a live stream, how much of its steady state is to be seen;
            0: all of the timeline is.
        left_out: microbatches of the timeline that the schedule leaves out of its middle.
    """

    timeline: Timeline
    schedule: Schedule | None
    plan: Plan | None = None
    num_ticks: int = 0
    left_out: int = 0

    @property
    def shown(self) -> Timeline:
        """The timeline to be seen. A live stream does not look like its beginning or its end."""
        return self.timeline.steady(self.num_ticks) if self.num_ticks else self.timeline

    def with_schedule(self) -> DrawableSource:
        """With the schedule of its plan: pictures do without, and millions of ops take seconds."""
        return self if self.plan is None else self._replace(schedule=self.plan.build_schedule())

    @property
    def num_hops(self) -> int | None:
        """Messages of what is shown, if a schedule says so."""
        if self.schedule is None:
            return None
        hops, count = self.schedule.num_hops, self.schedule.num_microbatches
        return hops * (self.num_ticks or count + self.left_out) // count

    @property
    def is_fed(self) -> bool:
        """Whether a source decides when microbatches come, so that rate and latency count."""
        return bool(self.timeline.arrivals)

    @property
    def sizes(self) -> Sizes | None:
        """The bytes that a microbatch keeps, if a plan says so."""
        return self.plan.sizes if self.plan else None


Content: TypeAlias = "Plan | Schedule | DrawableSource"


def load(
    name: str, ranks: int, microbatches: int, costs: Costs, arrivals: float | None = None
) -> DrawableSource:
    """Find what ``name`` means and make a timeline of it.

    Args:
        name: a schedule family, with options behind a colon, as in ``hanayo:waves=2``; or a file:
            ``.csv`` (ops, as torch writes them) or ``.json`` (a schedule, a plan, a timeline or a
            run's report); or ``-``, such a file on standard input.
        ranks, microbatches: for a family.
        costs: for a family or a CSV; plain numbers are those of a whole rank's layers.
        arrivals: microbatches that come per unit of time; by default all are there.

    Raises:
        InputError: neither, or a file that does not hold what it should.
    """
    return loaded(read(name), name, ranks, microbatches, costs, arrivals)


def is_plan(content: Content | None) -> TypeGuard[Plan]:
    """Asked without loading what plans need, of which most verbs have no use."""
    return not isinstance(content, Schedule | DrawableSource | None)


def loaded(
    content: Content | None,
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs,
    arrivals: float | None = None,
) -> DrawableSource:
    """As ``load``, of what ``read`` gave: a pipe is read only once."""
    name = title_of(name)
    if isinstance(content, DrawableSource):
        if arrivals is not None:
            raise InputError(f"{name} has happened already; leave --arrivals out")
        return content
    if is_plan(content):
        if arrivals is None:
            return _planned(content)
        schedule = content.build_schedule(max(microbatches, content.num_microbatches))
        return DrawableSource(
            simulate(schedule, content.costs, arrivals=arrivals), schedule, content
        )
    schedule = _schedule(content, name, ranks, microbatches, costs)
    timeline = _named(name, simulate, schedule, _spread(costs, schedule), arrivals=arrivals)
    return DrawableSource(timeline, schedule)


def load_shown(
    name: str, ranks: int, microbatches: int, costs: Costs, arrivals: float | None = None
) -> DrawableSource:
    """As ``load``, to be looked at: of a live stream, so many ticks of the steady state are shown,
    and frames come as fast as they are taken unless ``arrivals`` says something else."""
    if not _is_live(name):
        return load(name, ranks, microbatches, costs, arrivals)
    length = _live_length(ranks, microbatches)
    if arrivals is None:
        arrivals = _pace(name, ranks, microbatches, costs)
    return load(name, ranks, length, costs, arrivals)._replace(num_ticks=microbatches)


def _is_live(name: str) -> bool:
    usual = USUAL.get(name.partition(":")[0])
    return usual is not None and usual.activations == "newest"


def _pace(name: str, ranks: int, num_ticks: int, costs: Costs) -> float | None:
    """Frames per unit of time that a live stream takes, which only a long one shows."""
    return load(name, ranks, _live_length(ranks, num_ticks), costs).timeline.rate or None


def _live_length(ranks: int, num_ticks: int) -> int:
    """Frames of a stream whose steady state is as long; twice as many as fill the pipeline come
    before it, and as many behind it."""
    return max(1, num_ticks) + 4 * max(1, ranks)


def load_with_versions(
    name: str, ranks: int, microbatches: int, costs: Costs, policy: str | None = None
) -> DrawableSource:
    """As ``load``, but the timeline says which version of the weights each op read, and has the
    updates between them.

    Args:
        name, ranks, microbatches, costs: as for ``load``.
        policy: name of a weight-version policy, for a schedule that never flushes; by default the
            schedule's own.

    Raises:
        InputError: a timeline that does not know, or a policy that does not go with the schedule.
    """
    content, name = read(name), title_of(name)
    if isinstance(content, DrawableSource) or is_plan(content):
        return _file_with_versions(name, content, policy)
    schedule = _schedule(content, name, ranks, microbatches, costs)
    if any(op.kind is Kind.UPDATE for op in schedule.where):
        raise InputError(
            f"{name} has updates, but does not say which versions its ops read; leave the updates "
            "out, or draw it without --versions"
        )
    chosen = _policy(name.partition(":")[0], policy)
    if not chosen.asynchronous:
        flushed = simulate(add_update(schedule), _spread(costs, schedule))
        return DrawableSource(_reading_the_first(flushed), schedule)
    size = families.named(name)[1].get("minibatch") or schedule.num_stages
    arrivals = _pace(name, ranks, microbatches, costs) if _is_live(name) else None
    return DrawableSource(_named(name, _stream, schedule, chosen, size, costs, arrivals), schedule)


def load_drawn(
    name: str, ranks: int, microbatches: int, costs: Costs, *, whole: bool = False
) -> tuple[DrawableSource, bool]:
    """As ``load_shown``, to be drawn, and whether with versions: what never flushes in its steady
    state, with the versions that its ops read, since its beginning looks like any other
    schedule's. Of very many microbatches, what no picture shows is missing, unless the ``whole`` is
    asked for."""
    content = read(name)
    if is_plan(content):
        return _plan_drawn(content, whole=whole)
    if isinstance(content, DrawableSource):
        return content, False
    if content is None and USUAL.get(name.partition(":")[0], Flush()).asynchronous:
        shown = microbatches if whole else min(microbatches, most_steady(ranks))
        source = load_with_versions(name, ranks, _live_length(ranks, shown), costs)
        return source._replace(timeline=steady_part(source.timeline, shown)), True
    if content is None and not whole:
        short = _abridged(name, ranks, microbatches, costs)
        if short is not None:
            return short, False
    schedule = _schedule(content, name, ranks, microbatches, costs)
    predict = simulate if whole else simulated_to_draw
    timeline = _named(title_of(name), predict, schedule, _spread(costs, schedule))
    return DrawableSource(timeline, schedule), False


def _abridged(name: str, ranks: int, microbatches: int, costs: Costs) -> DrawableSource | None:
    """A family's schedule of very many microbatches, of which only a short one is built; ``None``
    where that does not tell how all of it looks."""
    family, options = _family(name)
    families.check_size(family, ranks, microbatches, options)
    if family in families.SEARCHED:
        return None
    build = partial(_build, name, ranks, costs=costs)
    short = abridged(build, microbatches, 2 * ranks, most_parts=MOST_PARTS)
    if short is None:
        return None
    left_out = microbatches - short.num_microbatches
    ends = _named(name, ends_to_draw, short, left_out, _spread(costs, short))
    return None if ends is None else DrawableSource(ends, short, left_out=left_out)


def _plan_drawn(plan: Plan, *, whole: bool) -> tuple[DrawableSource, bool]:
    from penstock.planning.plans.picture import timeline_to_draw

    timeline, versions = timeline_to_draw(plan, whole=whole)
    return DrawableSource(timeline, None, plan), versions


def _stream(
    schedule: Schedule, policy: Policy, minibatch: int, costs: Costs, arrivals: float | None
) -> Timeline:
    """The prediction of a stream of microbatches.

    Args:
        schedule: compute only.
        policy: which versions passes read.
        minibatch: microbatches per update, where the policy updates once per minibatch.
        costs: of a whole rank's layers.
        arrivals: microbatches that come per unit of time; by default all are there.
    """
    rounds = rounds_of(policy, schedule, minibatch)
    stream = add_updates(schedule, rounds)
    timeline = simulate(stream, _spread(costs, schedule), arrivals=arrivals)
    named = replace(timeline, name=f"{schedule.name} ({policy.name})")
    return named.with_versions(versions_read(stream, policy, rounds))


def _reading_the_first(timeline: Timeline) -> Timeline:
    """A minibatch that ends in a flush: every op reads what the weights are at its beginning."""
    return timeline.with_versions(
        [[0 if op.kind in BUSY else NO_VERSION for op in row.ops] for row in timeline.rows]
    )


def _policy(schedule: str, name: str | None) -> Policy:
    usual: Policy = USUAL.get(schedule, Flush())
    if name is None:
        return usual
    policy = POLICIES[name]()
    if policy.asynchronous and not usual.asynchronous:
        raise InputError(
            f"the policy {name} is for schedules that never flush, as {' or '.join(USUAL)}, but "
            f"{schedule} does; draw one of those, or leave --policy out"
        )
    if usual.activations != policy.activations:
        raise InputError(
            f"the policy {name} is for {policy.family}, not for {schedule}: their backwards go "
            "through other activations; draw that one, or leave --policy out"
        )
    if usual.asynchronous and not policy.asynchronous:
        raise InputError(f"{schedule} never flushes; for the policy {name}, draw 1f1b")
    return policy


def _spread(costs: Costs, schedule: Schedule) -> Costs:
    return costs.spread(schedule.num_stages / schedule.num_ranks)


def _schedule(
    content: Content | None, name: str, ranks: int, microbatches: int, costs: Costs
) -> Schedule:
    """The schedule of a file, checked, or else of a family."""
    if not isinstance(content, Schedule):
        return _build(name, ranks, microbatches, costs)
    _named(name, check, content)
    return content


def read(name: str) -> Content | None:
    """Read a file: a plan, a timeline, or ops, which are not checked; ``None`` for the name of a
    family.

    Raises:
        FileError: a cell is not an op (the file, the line and the cell are named), or it holds
            something else.
    """
    suffix = suffix_of(name, ".csv")
    if suffix not in (".csv", ".json"):
        return None
    text, stem, name = text_of(name), stem_of(name), title_of(name)
    if suffix == ".json":
        return _json(text, name)
    if not _TORCH.search(text):  # words that only torch's files have
        return _named(name, Schedule.parse, text, stem)
    from penstock.planning.handover import from_torch_csv

    return _named(name, from_torch_csv, text, stem)


def _named(name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, and say in its refusal which of several sources it is about."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        message = str(error)
        raise InputError(message if name in message else f"{name}: {message}") from None


def _family(name: str) -> tuple[str, dict[str, Any]]:
    if name.partition(":")[0] not in families.names() and Path(name).is_file():
        raise FileError(
            f"{name} is a file, but neither a .csv of ops nor a .json schedule, plan, timeline or "
            "run, which can be drawn and simulated"
        )
    return families.named(name)


def _build(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    family, options = _family(name)
    searched = {}
    if "costs" in inspect.signature(families.family(family)).parameters:
        # A search is to find the order for the costs under which it is then judged.
        per_rank = _STAGES_PER_RANK.get(str(options.get("placement")), 1)
        searched["costs"] = costs.spread(per_rank)
    schedule = families.build(
        family, num_ranks=ranks, num_microbatches=microbatches, **options, **searched
    )
    # Two of one family may stand beside each other; their options tell them apart.
    return schedule.renamed(name) if options else schedule


def _planned(plan: Plan) -> DrawableSource:
    return DrawableSource(plan.simulate(), plan.build_schedule(), plan, plan.prediction.num_shown)


def _file_with_versions(
    path: str, content: DrawableSource | Plan, policy: str | None
) -> DrawableSource:
    if not isinstance(content, DrawableSource):
        chosen = _policy(content.schedule, policy)
        source = _planned(content if policy is None else content.with_versions(chosen))
        if chosen.asynchronous:
            return source
        return source._replace(timeline=_reading_the_first(source.timeline))
    if policy is not None:
        raise InputError(f"{path} is a timeline, whose ops have read already; leave --policy out")
    if not content.timeline.has_versions:
        raise InputError(
            f"{path} does not say which versions of the weights its ops read; draw it without "
            "--versions"
        )
    return content


def load_plan(path: str) -> Plan:
    """The plan in a file.

    Raises:
        FileError: it holds something else, or a plan that cannot be.
    """
    return plans.Plan.from_json(text_of(path), where=title_of(path))


def json_object(path: str) -> dict[str, object]:
    """The object in a JSON file of another program's.

    Raises:
        FileError: it holds something else.
    """
    with refused_as(f"{title_of(path)} holds no JSON object"):
        return decoded(text_of(path), dict[str, object])


def _json(text: str, path: str) -> Content:
    held = kind_in(text)
    if held == "Schedule":
        return Schedule.from_json(text, where=path)
    if held == "Timeline":
        return DrawableSource(Timeline.from_json(text, where=path), None)
    if held == "Plan":
        return plans.Plan.from_json(text, where=path)
    if held == "Report":
        report = drawing.Report.from_json(text, where=path)
        record = report.measured or report.predicted
        if record is not None:
            return DrawableSource(record.timeline(), None)
        raise FileError(f"{path} is the report of a run without a timeline; give the plan's file")
    if held is not None:
        raise FileError(other_file(held, _DRAWABLE, path))
    with refused_as(f"{path} holds neither a plan nor a schedule, a timeline or a run's report"):
        decoded(text, dict[str, msgspec.Raw])
        raise InputError("it has the keys of none of them")


def read_policy(text: str) -> Policy:
    """A weight-version policy from its name and fields, as in ``pipemare:t1=1000,t2=0.3``.

    Raises:
        InputError: no such policy, no such field, or a value that it may not have.
    """
    name, _, rest = text.partition(":")
    name = name.lower()
    if name not in POLICIES:
        raise InputError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
    fields = dict(part.partition("=")[::2] for part in filter(None, rest.split(",")))
    try:
        return msgspec.convert({"policy": name, **fields}, POLICIES[name], strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"the policy {text!r} cannot be read: {error}") from None
