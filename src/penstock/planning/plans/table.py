"""A plan as text for people: its title, its stages as a table, what it is predicted to give, and
why it was chosen. ``Alternative`` is a plan that was weighed, a row of the table that tells why.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.base.telling import WARNING, wrap_to
from penstock.base.units import (
    count_of,
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_speed_up,
)
from penstock.base.values import Value, shown
from penstock.core.graph import Contention
from penstock.core.versions import Policy
from penstock.drawing.plan_picture import counted
from penstock.planning.plans.prediction import Prediction

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.planning.plans.plan import Plan


def title(plan: Plan) -> str:
    """The schedule and how many stages, ranks and microbatches, for text.

    >>> from penstock.planning.plans import Plan, StagePlan
    >>> stage = StagePlan(layers=("a",), rank=0)
    >>> title(Plan(model="m", schedule="1f1b", num_microbatches=8, stages=(stage,)))
    '1f1b: 1 stage on 1 rank, 8 microbatches'
    """
    return ", ".join([_shape(plan), _microbatches(plan), *_rest(plan)])


def full_title(plan: Plan) -> str:
    """As ``title``, with devices per rank and rows per microbatch, for pictures."""
    sizes = {*plan.group_sizes}
    each = f"{max(sizes)} devices each" if len(sizes) == 1 else f"{plan.num_seats} devices"
    devices = [each] if max(sizes) > 1 else []
    rows = f" of {plan.microbatch_size}" if plan.microbatch_size else ""
    return ", ".join([_shape(plan), *devices, _microbatches(plan) + rows, *_rest(plan)])


def _rest(plan: Plan) -> list[str]:
    marks = [] if plan.estimate is None else [plan.estimate.mark]
    return [*_versions(plan), *_experts(plan), *_summing(plan), *_tier(plan), *marks]


def family_title(schedule: str, replicas: Sequence[int], versions: Policy) -> str:
    """A schedule family with its replicas and its policy where it has any, as in
    ``pipedream 2-1 (stash)``."""
    words = [schedule]
    words += ["-".join(map(str, replicas))] if replicas else []
    words += [f"({versions.name})"] if versions.asynchronous else []
    return " ".join(words)


def _shape(plan: Plan) -> str:
    stages, ranks = count_of(len(plan.stages), "stage"), count_of(plan.num_ranks, "rank")
    return f"{plan.schedule}: {stages} on {ranks}"


def _microbatches(plan: Plan) -> str:
    return count_of(plan.num_microbatches, "microbatch", "es")


def _tier(plan: Plan) -> list[str]:
    said = [] if plan.spill is None else [f"stages come from {plan.spill.tier} and leave again"]
    if plan.offload is not None:
        count = len(plan.offload.chosen(len(plan.stages)))
        said.append(f"activations of {count_of(count, 'stage')} wait in {plan.offload.tier}")
    return said


def _versions(plan: Plan) -> list[str]:
    return [f"versions: {plan.versions.name}"] if plan.versions.asynchronous else []


def _experts(plan: Plan) -> list[str]:
    """Among how many copies experts are divided, and how evenly tokens come to these."""
    divided = [stage for stage in plan.stages if stage.expert_ranks > 1]
    if not divided:
        return []
    counts = sorted({stage.expert_ranks for stage in divided})
    copies = f"experts over {' or '.join(map(str, counts))} copies"
    most = max(
        (max(stage.expert_loads) * stage.expert_ranks for stage in divided if stage.expert_loads),
        default=0.0,
    )
    return [
        f"{copies}, of which the busiest gets {most:.2f} × its share of tokens" if most else copies
    ]


def _summing(plan: Plan) -> list[str]:
    return [*_reducer(plan), *_levels(plan)]


def _reducer(plan: Plan) -> list[str]:
    reducer, servers = plan.summing.reducer, len(plan.summing.servers)
    if reducer == "owners":
        return []
    if reducer == "parameter-server":
        stale = plan.summing.stale
        late = f", up to {count_of(stale, 'update')} late" if stale else ""
        return [f"gradients: {count_of(max(servers, 1), 'parameter server')}{late}"]
    return [f"gradients: {count_of(servers, 'server') if servers else reducer}"]


_MOST_GROUPS = 4
"""Of ranks that sum among themselves, as many as a line names."""


def _levels(plan: Plan) -> list[str]:
    """Which ranks sum among themselves before others, if any do."""
    named = []
    for numbers in plan.summing.levels:
        together = [
            [rank for rank, own in enumerate(numbers) if own == number]
            for number in dict.fromkeys(numbers)
        ]
        groups = [_group(ranks) for ranks in together if len(ranks) > 1]
        if groups:
            more = ", …" if len(groups) > _MOST_GROUPS else ""
            named.append(f"ranks {', '.join(groups[:_MOST_GROUPS])}{more}")
    return [f"sums inside hosts first: {'; then '.join(named)}"] if named else []


def _group(ranks: Sequence[int]) -> str:
    """The ranks of a group.

    >>> _group([0, 1, 2, 3]), _group([0, 2])
    ('0–3', '0+2')
    """
    first, last = ranks[0], ranks[-1]
    if last - first + 1 == len(ranks):
        return f"{first}–{last}"
    return "+".join(map(str, ranks))


WIDTH = 80
"""Columns of a plan as text, unless its reader has more."""

_STAGES = ("rank", "layers", "F", "B", "share", "memory")
_TOO_LITTLE = 0.002
"""Of a rank's memory, to be told of."""

_MOST_SPENT = 6
"""Columns of a table of what memory is spent on, besides the rank's, in lines of ``WIDTH``."""


def render(
    title: str,
    prediction: Prediction,
    one_device_seconds: float,
    rate: float | None = None,
    *,
    spending: str = "",
    width: int = WIDTH,
    details: bool = True,
    shards_optimizer: bool = False,
) -> str:
    """A plan as text without colour codes: a row per stage (share: its seconds over the slowest
    stage's; memory: of its rank), what ranks spend their memory on, the predicted step, and its
    drawing; of a live stream, rate and latency, too.

    Args:
        rate: in frames per second, that was asked for.
        spending: what a step costs, in words, if anybody knows.
        width: of the longest line, in columns.
        details: whether to say what memory is spent on.
        shards_optimizer: whether replicas have a shard of the optimizer's state each.
    """
    from penstock.drawing.timeline.text import text  # a plan that runs is not drawn

    outcome = (
        f"{_outcome(prediction, one_device_seconds)}, "
        f"{format_bytes(sum(prediction.rank_bytes))} in all"
    )
    words = [outcome, *([_live_words(prediction, rate)] if prediction.is_live or rate else [])]
    words += [f"cost: {spending}"] if spending else []
    return "\n".join(
        [
            wrap_to(title, width),
            as_text(_table(_STAGES, list(_cells(prediction))), width),
            *(
                as_text(table, width)
                for table in (_spent(prediction, width, shards_optimizer) if details else ())
            ),
            *(wrap_to(line, width) for line in words),
            text(prediction.shown, window=width),
        ]
    )


def _spent(prediction: Prediction, width: int, shards_optimizer: bool) -> Iterator[Table]:
    """What ranks spend their memory on, those that spend alike in one row."""
    rows: list[dict[str, str]] = []
    first = 0
    parts = prediction.memory_parts
    described = [_described(prediction, rank, shards_optimizer) for rank in range(len(parts))]
    for last, (own, behind) in enumerate(zip(described, [*described[1:], None], strict=True)):
        if own != behind:
            rows.append({"rank": str(first) if first == last else f"{first}–{last}", **own})
            first = last + 1
    columns = [
        name
        for name in parts[0]._fields
        if any(getattr(own, name) > _TOO_LITTLE * own.total for own in parts)
    ]
    most = _MOST_SPENT if width < _WITH_REMARKS else len(parts[0])
    for start in range(0, len(columns), most):
        yield _table(("rank", *columns[start : start + most]), rows, {"communication": "sums"})


def _described(prediction: Prediction, rank: int, shards_optimizer: bool) -> dict[str, str]:
    """By parts of memory, what a rank spends, as products where it has one stage."""
    parts, own = prediction.memory_parts[rank], prediction.placement.stages_of[rank]
    cells = {name: format_bytes(size) for name, size in parts._asdict().items()}
    if shards_optimizer and prediction.replicas[own[0]] > 1:
        cells["optimizer"] = f"{cells['optimizer']} (1/{prediction.replicas[own[0]]})"
    if len(own) == 1 and prediction.spill is None:
        stage = prediction.stages[own[0]]
        if stage.weight_versions > 1:
            cells["weights"] = f"{format_bytes(stage.held_bytes)} × {stage.weight_versions}"
        each = stage.input_bytes if stage.recompute == "stage" else stage.kept_bytes
        count = parts.activations / each if each else 0.0
        if count:
            cells["activations"] = f"{format_bytes(each)} × {count:.3g}"
    return cells


def _table(
    columns: Sequence[str],
    rows: Iterable[Mapping[str, str]],
    headings: Mapping[str, str] | None = None,
) -> Table:
    from rich.text import Text

    table = new_table()
    for name in columns:
        # Where the table is too wide, the names of layers give way, not the numbers.
        number = name != "layers"
        heading = (headings or {}).get(name, name)
        table.add_column(heading, justify="right" if number else "left", no_wrap=number)
    for row in rows:
        table.add_row(*(Text(row[name], no_wrap=True, overflow="ellipsis") for name in columns))
    return table


def _cells(prediction: Prediction) -> Iterator[dict[str, str]]:
    """By column, what stands in each stage's row; a rank's memory stands in that of its first."""
    seen: set[int] = set()
    slowest = max(stage.compute_seconds for stage in prediction.stages)
    for stage, count in zip(prediction.stages, prediction.replicas, strict=True):
        backward = stage.backward_input_seconds + stage.backward_weight_seconds
        yield {
            "rank": str(stage.rank) if count == 1 else f"{stage.rank}–{stage.rank + count - 1}",
            "layers": counted(stage.layers),
            "F": format_seconds(stage.forward_seconds),
            "B": format_seconds(backward),
            "share": f"{stage.compute_seconds / slowest:.0%}" if slowest else "–",
            "memory": "" if stage.rank in seen else format_bytes(prediction.rank_bytes[stage.rank]),
        }
        seen.add(stage.rank)


def _outcome(prediction: Prediction, one_device_seconds: float) -> str:
    by_frame = prediction.is_live and prediction.num_microbatches == 1
    pace = f" a {'frame' if by_frame else 'minibatch'} in the steady state"
    if prediction.left_out:
        pace = f" a step, bubble {format_share(prediction.bubble)}"
    elif prediction.flushes:
        timeline = prediction.timeline
        bubbles = format_share(timeline.bubble), format_share(timeline.stage_bubble)
        pace = f" a step, bubble {bubbles[0]}, stage bubble {bubbles[1]}"
    return (
        f"predicted: {format_seconds(prediction.step_seconds)}{pace}, "
        f"{format_speed_up(one_device_seconds, prediction.step_seconds)} one device"
    )


def _live_words(prediction: Prediction, rate: float | None) -> str:
    """Rate and latency of a stream, never one without the other.

    Args:
        rate: that was asked for.
    """
    asked = "" if rate is None else f" ({format_rate(rate)} asked for)"
    light, saturated = map(format_seconds, prediction.latency)
    return (
        f"rate: up to {format_rate(prediction.frames_per_second)}{asked}; latency of an output: "
        f"{light} at light load, {saturated} saturated, and any wait in front"
    )


def new_table() -> Table:
    """A table of rich's in the style of plans, without columns yet."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=True)


def as_text(table: Table, width: int = WIDTH) -> str:
    """A table of rich's, in lines of at most so many columns."""
    from rich.console import Console

    file = io.StringIO()
    Console(
        file=file,
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        markup=False,
        emoji=False,
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").splitlines())


_WITH_REMARKS = 100
"""Columns of a table that has a column for remarks."""


class Alternative(Value, frozen=True, kw_only=True):
    """A plan that was weighed.

    Attributes:
        label: what it is the best of, for example ``"data parallel"``.
        description: schedule, stages, replicas.
        step_seconds: of a minibatch; without a flush, in the steady state.
        is_bound: whether it was not simulated, and takes at least so long.
        bubble: idle rank-time over all rank-time of a step.
        memory_bytes: of the rank that needs most.
        moved_bytes: over all links, per minibatch.
        delay: updates between the version of the weights that a gradient is computed with and the
            one that it is applied to, of the stage that waits longest; 0 in a synchronous plan.
        remark: for example why it was not chosen.
    """

    label: str
    description: str
    step_seconds: float
    is_bound: bool = False
    bubble: float = 0.0
    memory_bytes: int = 0
    moved_bytes: int = 0
    delay: float = 0.0
    remark: str = ""

    def __post_init__(self) -> None:
        self.check_fields(f"alternative {shown(self.label)}")


def argued(
    sheet: str,
    rows: Sequence[Alternative],
    reason: str,
    contention: Contention | None,
    warnings: Sequence[str],
    width: int,
) -> str:
    """A plan as text with why it was chosen and how sure that is, a paragraph each.

    Args:
        sheet: the plan as text.
        rows: what was weighed.
        contention: what ranks of one machine were taken to cost each other; ``None`` to leave that
            out.
        warnings: what makes the choice doubtful.
        width: of the longest line, in columns.
    """
    paragraphs = (
        sheet,
        comparison(rows, width) if rows else "",
        wrap_to(reason, width),
        wrap_to(f"measured: {contention}", width) if contention and contention.num_ranks else "",
        "\n".join(wrap_to(warning, width, WARNING) for warning in warnings),
    )
    return "\n\n".join(filter(None, paragraphs))


def comparison(rows: Sequence[Alternative], width: int = WIDTH) -> str:
    """Plans side by side, as text without colour codes; below each what is remarked of it, where
    lines of ``width`` columns have no room for that behind it."""
    apart = width < _WITH_REMARKS
    table = new_table()
    for name in ("", "plan", "step", "bubble", "memory", "moved", "delay"):
        text = name in ("", "plan")
        table.add_column(name, justify="left" if text else "right", no_wrap=not text)
    if not apart:
        table.add_column("", justify="right")
    for row in rows:
        remark = f"\n({row.remark})" if row.remark and apart else ""
        table.add_row(
            row.label,
            f"{row.description}{remark}",
            "≥ " * row.is_bound + format_seconds(row.step_seconds),
            format_share(row.bubble, 0),
            format_bytes(row.memory_bytes),
            format_bytes(row.moved_bytes),
            f"{row.delay:g}",
            *([] if apart else [row.remark]),
        )
    return as_text(table, width)
