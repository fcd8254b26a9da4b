"""Write ``docs/schedules``: a page and a drawing per schedule family, an index, a page on choosing;
and ``docs/versions``: the same for weight-version policies (see ``policies.py``).

Everything about a family is read from its own docstrings, every number is simulated, every picture
is drawn by the library; prose that belongs to no single family is in the templates beside this
file. Run it with ``make gallery`` after a family or a policy has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import policies
from pages import HERE, bibtex, filled, linked, options, paragraphs, percent, table
from penstock.errors import InputError
from penstock.schedule import Schedule, families
from penstock.schedule.about import About, about
from penstock.timing.costs import Costs
from penstock.timing.simulator import simulate
from penstock.versions import USUAL

from penstock.cli.sources import Drawable, load_drawn, load_shown
from penstock.drawing import draw, draw_borrowed, draw_scatter, draw_stacked

DOCS = HERE.parent

DRAWN = ((4, 8), (4, 4), (2, 4))
"""Sizes for the drawing, the first that a family accepts."""
TABLED = ((4, 8), (4, 16), (8, 16), (8, 32))
CHOICE, MANY = (8, 32), 128
OTHER_COSTS = {
    "F = I = W": Costs(),
    "hop F/10": Costs(hop=0.1),
    "hop F/2": Costs(hop=0.5),
    "W = F/2, hop 0.03 F": Costs(1, 1, 0.5, 0.03),
    "F = 2I = 2W": Costs(2, 1, 1),
}
"""Of a whole rank's layers. In the zero-bubble paper's measurements W is 0.5 to 0.7 of F and a hop
0.03 of it. F = I + W is where Chimera was made for."""


def main(docs: Path = DOCS) -> None:
    """Write all pages and pictures into two folders of the documentation."""
    _write_schedules(docs / "schedules")
    policies.write(docs / "versions")


def _write_schedules(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    told = [about(name) for name in families.names()]
    for one in told:
        _draw(one.name, target / f"{one.name}.svg")
        (target / f"{one.name}.md").write_text(_family_page(one), encoding="utf-8")
    draw_borrowed(target / "partime-ticks.svg", 3)
    chosen = _built(CHOICE)
    draw_scatter([(name, one.timeline) for name, one in chosen.items()], target / "choosing.svg")
    pair = [(name, _load(name, 4, 8).timeline) for name in ("1f1b", "zb-h2")]
    draw_stacked(pair, target / "bubbles.svg")
    for page, values in (("index.md", _index(told)), ("choosing.md", _choosing(chosen))):
        (target / page).write_text(filled(page, **values), encoding="utf-8")


def _draw(name: str, path: Path) -> None:
    """A family; what never flushes in its steady state, with versions."""
    size, _ = _drawn(name)
    drawn, versions = load_drawn(name, *size, Costs())
    draw(drawn.shown, path, versions=versions)


@cache
def _load(name: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Drawable:
    if costs is None:
        return load_shown(name, ranks, microbatches, Costs())
    known = _load(name, ranks, microbatches)
    if known.schedule is None or "costs" in [option.name for option in about(name).options]:
        return load_shown(name, ranks, microbatches, costs)
    # The order is the same for all costs, and need not be built again.
    per_rank = known.schedule.num_stages / known.schedule.num_ranks
    return Drawable(simulate(known.schedule, costs.spread(per_rank)), known.schedule)


def _drawn(name: str) -> tuple[tuple[int, int], Drawable]:
    """A family at the first size that it accepts, and that size."""
    for size in DRAWN[:-1]:
        with suppress(InputError):
            return size, _load(name, *size)
    return DRAWN[-1], _load(name, *DRAWN[-1])


def _built(size: tuple[int, int], costs: Costs | None = None) -> dict[str, Drawable]:
    """The families that flush and accept a size. Those that never flush do not compute the same,
    and have no bubble but where their stream begins and ends."""
    found = {}
    for name in _FLUSHING:
        with suppress(InputError):
            found[name] = _load(name, *size, costs)
    return found


def _numbers(source: Drawable) -> list[str]:
    timeline, schedule = source.shown, source.schedule
    assert schedule is not None  # it comes from a family
    return [
        f"{timeline.makespan:.5g}",
        percent(timeline.bubble),
        percent(timeline.stage_bubble),
        f"{max(timeline.peak_activations):.4g}",
        str(source.num_hops),
        str(schedule.weight_copies),
    ]


_FLUSHING = [name for name in families.names() if name not in USUAL]
_COLUMNS = ("makespan", "bubble", "stage bubble", "peak", "hops", "copies")


def _runs(name: str, schedule: Schedule | None) -> str:
    assert schedule is not None  # it comes from a family
    if _is_live(name):
        return (
            "Each row is m ticks of the steady state, in which frames come as fast as they are "
            "taken: a long stream has no bubble; what there is here is where the ticks of the "
            "ranks are cut off. An output comes p forwards and p−1 hops after its frame, if frames "
            "come no faster than they are taken, and p ticks after it at most, if no more than p "
            "frames are let in; a wait in front comes on top.\n\n"
            "![Two ticks of PARTIME on 3 stages](partime-ticks.svg)\n\n"
            "Penstock's runtime performs it, with the results of the same recurrence on one "
            f"device, tick by tick. The policy is [{USUAL[name].name}]"
            f"(../versions/{USUAL[name].name}.md), and no other; "
            "[how to learn on a live stream](../streams.md)."
        )
    if name in USUAL:
        return (
            "The picture shows its steady state, and under each op which version of the weights "
            "it reads. Each row is a stream of m microbatches, which fills the pipeline once and "
            f"drains it once: that is all the bubble there is. In between, a microbatch takes "
            f"{_steady(name):g} F, which is what a device works for it, so a long stream has no "
            "bubble. Do not compare these bubbles with those of schedules that flush.\n\n"
            "Penstock's runtime performs it, with the results of the same delays on one device, "
            f"one microbatch at a time. The policy is [{USUAL[name].name}]"
            f"(../versions/{USUAL[name].name}.md) unless [another](../versions/index.md) is asked "
            "for; [how to train so](../asynchronous.md)."
        )
    runs = "Penstock's runtime performs it, with the results of one device"
    if schedule.num_slices > 1:
        return f"{runs}, where layers say how they work on a slice (see `penstock.stage.slices`)."
    return f"{runs}."


def _is_live(name: str) -> bool:
    return name in USUAL and USUAL[name].activations == "newest"


def _steady(name: str) -> float:
    """What one more microbatch takes in a long stream."""
    few, many = (_load(name, 4, count).timeline.makespan for count in (32, 64))
    return (many - few) / 32


def _family_page(one: About) -> str:
    size, drawn = _drawn(one.name)
    rows = []
    for ranks, microbatches in TABLED if size == DRAWN[0] else (size,):
        with suppress(InputError):
            source = _load(one.name, ranks, microbatches)
            rows.append([f"p = {ranks}, m = {microbatches}", *_numbers(source)])
    return filled(
        "family.md",
        name=one.name,
        title=one.title,
        idea=one.summary,
        ranks=str(size[0]),
        microbatches=str(size[1]),
        law=one.law,
        details=paragraphs(one.details),
        numbers=table(("", *_COLUMNS), rows),
        runs=_runs(one.name, drawn.schedule),
        wins=one.wins or "Not said yet.",
        loses=one.loses or "Not said yet.",
        options=options(one),
        citation=linked(one.citation),
        bibtex=bibtex(one),
        source=_source_file(one.name),
    )


def _source_file(name: str) -> str:
    path = sys.modules[families.family(name).__module__].__file__ or ""
    return Path(path).name


def _index(told: Sequence[About]) -> dict[str, str]:
    rows = []
    for one in told:
        size, source = _drawn(one.name)
        mark = "" if size == DRAWN[0] else f" (p = {size[0]}, m = {size[1]})"
        if one.name in USUAL:
            mark = " (never flushes)"
        numbers = _numbers(source)
        rows.append([f"[{one.name}]({one.name}.md){mark}", one.law, *numbers])
    pictures = "\n\n".join(
        f"[![{one.name}, drawn by Penstock]({one.name}.svg)]({one.name}.md)" for one in told
    )
    return {"table": table(("schedule", "law", *_COLUMNS), rows, 2), "pictures": pictures}


def _choosing(chosen: dict[str, Drawable]) -> dict[str, str]:
    ranks, microbatches = CHOICE
    by_memory = sorted(chosen, key=lambda name: max(chosen[name].timeline.peak_activations))
    left_out = [name for name in _FLUSHING if name not in chosen]
    earns = [
        [f"[{name}]({name}.md)", percent(one.timeline.bubble), percent(one.timeline.stage_bubble)]
        for name, one in chosen.items()
        if abs(one.timeline.bubble - one.timeline.stage_bubble) > 1e-9
    ]
    others = {label: _built(CHOICE, costs) for label, costs in OTHER_COSTS.items()}
    return {
        "ranks": str(ranks),
        "microbatches": str(microbatches),
        "left_out": f" {' and '.join(left_out)} cannot be built at this size." if left_out else "",
        "table": table(
            ("schedule", *_COLUMNS),
            ([f"[{name}]({name}.md)", *_numbers(chosen[name])] for name in by_memory),
        ),
        "earns": table(("schedule", "bubble", "stage bubble"), earns),
        "costs": table(
            ("schedule", *others),
            (
                [f"[{name}]({name}.md)", *(_both(found[name]) for found in others.values())]
                for name in by_memory
            ),
        ),
        **_figures(),
    }


def _both(source: Drawable) -> str:
    """The makespan bubble; behind it the stage bubble, if it is another."""
    bubble, stage = source.timeline.bubble, source.timeline.stage_bubble
    shown = percent(bubble)
    return shown if abs(bubble - stage) < 5e-4 else f"{shown} [{percent(stage)}]"


def _figures() -> dict[str, str]:
    """Single numbers that the prose of ``choosing.md`` speaks of."""
    plain, split = (_load(name, 4, 8).timeline for name in ("1f1b", "zb-h2"))
    long_forward = {
        f"{word}_{size}": percent(_load(name, CHOICE[0], m, Costs(2, 1, 1)).timeline.bubble)
        for word, name in (("plain", "1f1b"), ("v_half", "v-half"), ("v_min", "v-min"))
        for size, m in (("few", CHOICE[1]), ("many", MANY))
    }
    return {
        **long_forward,
        "many": str(MANY),
        "plain_bubble": percent(plain.bubble),
        "split_bubble": percent(split.bubble),
        "split_stage_bubble": percent(split.stage_bubble),
        "split_makespan": f"{split.makespan:g}",
        "split_work": f"{max(split.busy):g}",
    }


if __name__ == "__main__":
    main()
