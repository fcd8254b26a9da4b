"""Write ``docs/schedules``: a page and a drawing per schedule family, and an index with a table of
them all; and ``docs/versions``: the same for weight-version policies (see ``policies.py``).

Everything about a family is read from its own docstrings, every number is simulated, every picture
is drawn by the library; prose that belongs to no single family is in the templates beside this
file. Run it with ``make gallery`` after a family or a policy has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import policies
from pages import DOCS, cited, described, filled, goes_on, options, percent, points, table

from penstock.base.errors import InputError
from penstock.cli.sources import DrawableSource, load_drawn, load_shown
from penstock.core.schedule import families
from penstock.core.schedule.about import About, about
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.versions import USUAL
from penstock.drawing import draw, draw_borrowed, draw_scatter, draw_stacked

DRAWN = ((4, 8), (4, 4), (2, 4))
"""Sizes for the drawing, the first that a family accepts."""
TABLED = ((4, 8), (8, 8), (8, 32))
"""Sizes for a page's table: the drawing's, few microbatches, and many."""
CHOICE = (8, 32)
"""Size for the table over all families."""
OTHER_COSTS = {
    "hop F/2": Costs(hop=0.5),
    "W = F/2, hop 0.03 F": Costs(1, 1, 0.5, 0.03),
    "F = I + W": Costs(2, 1, 1),
}
"""Of a whole rank's layers. In the zero-bubble paper's measurements W is 0.5 to 0.7 of F and a hop
0.03 of it."""
MADE_FOR = {"chimera": "F = I + W"}
"""Which of them a family's law is about, where F = I = W would show the opposite."""
DEFAULT = "1f1b"
WORDS = 60
"""Of the paragraph that says what a schedule is; details that are longer stay in the docstring."""


def main(docs: Path = DOCS) -> None:
    """Write all pages and pictures into two folders of the documentation."""
    _write_schedules(docs / "schedules")
    policies.write(docs / "versions")


def _write_schedules(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    names = families.names()
    for name in names:
        _draw(name, target / f"{name}.svg")
        (target / f"{name}.md").write_text(_family_page(about(name)), encoding="utf-8")
    draw_borrowed(target / "partime-ticks.svg", 3)
    chosen = _built(CHOICE)
    draw_scatter(
        [(name, built.timeline) for name, built in chosen.items()], target / "choosing.svg"
    )
    pair = [(name, _load(name, 4, 8).timeline) for name in ("1f1b", "zb-h2")]
    draw_stacked(pair, target / "bubbles.svg")
    (target / "index.md").write_text(_index(names, chosen), encoding="utf-8")


def _draw(name: str, path: Path) -> None:
    """A family; what never flushes in its steady state, with versions."""
    size, _ = _drawn(name)
    drawn, versions = load_drawn(name, *size, Costs())
    draw(drawn.shown, path, versions=versions)


@cache
def _load(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> DrawableSource:
    if costs is None:
        return load_shown(name, ranks, microbatches, Costs())
    known = _load(name, ranks, microbatches)
    if known.schedule is None or "costs" in [option.name for option in about(name).options]:
        return load_shown(name, ranks, microbatches, costs)
    # The order is the same for all costs, and need not be built again.
    per_rank = known.schedule.num_stages / known.schedule.num_ranks
    return DrawableSource(simulate(known.schedule, costs.spread(per_rank)), known.schedule)


def _drawn(name: str) -> tuple[tuple[int, int], DrawableSource]:
    """A family at the first size that it accepts, and that size."""
    for size in DRAWN[:-1]:
        with suppress(InputError):
            return size, _load(name, *size)
    return DRAWN[-1], _load(name, *DRAWN[-1])


def _built(size: tuple[int, int], costs: Costs | None = None) -> dict[str, DrawableSource]:
    """The families that flush and accept a size. Those that never flush do not compute the same,
    and have no bubble but where their stream begins and ends."""
    built = {}
    for name in _FLUSHING:
        with suppress(InputError):
            built[name] = _load(name, *size, costs)
    return built


def _times(source: DrawableSource) -> list[str]:
    timeline = source.shown
    shares = (timeline.bubble, timeline.stage_bubble)
    return [f"{timeline.makespan:.5g}", *map(points, shares)]


def _room(name: str, source: DrawableSource) -> list[str]:
    schedule = source.schedule
    assert schedule is not None  # it comes from a family
    copies: float = schedule.weight_copies
    if name in USUAL:
        held = policies.copies(USUAL[name], schedule.num_stages)
        copies = sum(held) / len(held)
    return [f"{max(source.shown.peak_activations):.4g}", str(source.num_hops), f"{copies:.4g}"]


_FLUSHING = [name for name in families.names() if name not in USUAL]
_COLUMNS = ("makespan", "bubble, %", "stage bubble, %", "peak", "hops", "copies")


def _family_page(family: About) -> str:
    size, _ = _drawn(family.name)
    rows = []
    for ranks, microbatches in TABLED if size == DRAWN[0] else (size,):
        with suppress(InputError):
            source = _load(family.name, ranks, microbatches)
            room = _room(family.name, source)
            rows.append([str(ranks), str(microbatches), *_times(source), *room])
    return filled(
        "schedule.md",
        name=family.name,
        title=family.title,
        what=described(family, WORDS),
        citation=cited(family.citation),
        ranks=str(size[0]),
        microbatches=str(size[1]),
        wins=goes_on(family.wins or "Nobody has said yet."),
        loses=goes_on(family.loses or "Nobody has said yet."),
        numbers=table(("p", "m", *_COLUMNS), rows, 0),
        note=_note(family.name),
        options=options(family),
        source=_source_file(family.name),
    )


def _note(name: str) -> str:
    """Under which costs the table is, and what else one must know to read it."""
    costs = "Costs: F = I = W, free hops."
    if name in USUAL:
        return f"{costs} {_stream_note(name)}"
    schedule = _drawn(name)[1].schedule
    if schedule is not None and schedule.num_slices > 1:
        return f"{costs} Layers must say how they work on a slice: `penstock.engine.stage.slices`."
    if name in MADE_FOR:
        other = OTHER_COSTS[MADE_FOR[name]]
        mine, plain = (_load(each, *CHOICE, other).timeline.bubble for each in (name, DEFAULT))
        ranks, microbatches = CHOICE
        return (
            f"{costs} With {MADE_FOR[name]}, p = {ranks} and m = {microbatches}, the bubble is "
            f"{percent(mine)}, and {about(DEFAULT).title}'s {percent(plain)}."
        )
    return costs


def _stream_note(name: str) -> str:
    policy = USUAL[name]
    link = f"[`{policy.name}`](../versions/{policy.name}.md)"
    if policy.activations == "newest":
        return (
            "A row is m ticks, cut out of the middle; a long stream has no bubble. Weights and "
            f"activations are read as {link} says; [how to learn on a live stream](../streams.md)."
        )
    return (
        f"A row is a stream that fills and drains once; a long stream has no bubble and takes "
        f"{_steady(name):g} F per microbatch. Weights are read as {link} says, or "
        "[another policy](../versions/index.md); [how to train so](../asynchronous.md)."
    )


def _steady(name: str) -> float:
    """What one more microbatch takes in a long stream."""
    few, many = (_load(name, 4, count).timeline.makespan for count in (32, 64))
    return (many - few) / 32


def _source_file(name: str) -> str:
    path = sys.modules[families.family(name).__module__].__file__ or ""
    return Path(path).name


def _index(names: Sequence[str], chosen: dict[str, DrawableSource]) -> str:
    ranks, microbatches = CHOICE
    others = {label: _built(CHOICE, costs) for label, costs in OTHER_COSTS.items()}
    rows = [[_linked(name), *_cells(name, chosen, others.values())] for name in names]
    plain, split = (_load(name, 4, 8).timeline for name in ("1f1b", "zb-h2"))
    return filled(
        "schedules.md",
        ranks=str(ranks),
        microbatches=str(microbatches),
        table=table(("schedule", *_COLUMNS_OF_ALL, *others), rows),
        pictures="\n\n".join(f"[![{name}]({name}.svg)]({name}.md)" for name in names),
        plain=percent(chosen[DEFAULT].timeline.bubble),
        zb_h1=percent(chosen["zb-h1"].timeline.bubble),
        zb_v=percent(chosen["zb-v"].timeline.bubble),
        plain_bubble=percent(plain.bubble),
        split_bubble=percent(split.bubble),
        split_makespan=f"{split.makespan:g}",
        split_work=f"{max(split.busy):g}",
    )


_COLUMNS_OF_ALL = ("makespan", "bubble", "stage bubble", "peak", "hops", "copies")


def _linked(name: str) -> str:
    link = f"[{name}]({name}.md)"
    if name == DEFAULT:
        return f"**{link}**, the default"
    return link


def _cells(
    name: str, chosen: dict[str, DrawableSource], others: Iterable[dict[str, DrawableSource]]
) -> list[str]:
    """A row of the table over all families; empty where there is nothing to compare."""
    if name in chosen:
        source = chosen[name]
        return [*_times(source), *_room(name, source), *(_both(other[name]) for other in others)]
    room = ["", "", ""]
    with suppress(InputError):
        room = _room(name, _load(name, *CHOICE))
    return ["", "", "", *room, *("" for _ in others)]


def _both(source: DrawableSource) -> str:
    """The makespan bubble; behind it the stage bubble, if it is another."""
    bubble, stage = source.timeline.bubble, source.timeline.stage_bubble
    shown = points(bubble)
    return shown if abs(bubble - stage) < 5e-4 else f"{shown} [{points(stage)}]"


if __name__ == "__main__":
    main()
