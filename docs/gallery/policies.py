"""Write ``docs/versions``: a page and a picture per weight-version policy, an index, a page on
choosing.

What a policy is, it says in its docstring: the idea, the law, ``Wins:``, ``Loses:``, ``Paper:`` and
its attributes. Versions, delays and what is held are read off streams that the library traces, so
that a page cannot say anything else than what the runtime does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from defined import defined
from pages import bibtex, filled, linked, options, paragraphs, percent, table
from penstock.cluster import Cluster
from penstock.graph import Layer, LayerGraph
from penstock.planner import plan
from penstock.plans.explanation import Explanation, explain, stability_bound
from penstock.schedule import Schedule, families
from penstock.schedule.about import About, Option
from penstock.schedule.lower import add_updates
from penstock.schedule.rounds import Rounds
from penstock.timing.costs import Costs
from penstock.timing.simulator import simulate
from penstock.timing.timeline import Timeline
from penstock.versions import POLICIES, Latest, PipeMare, Policy, Predict, Stash, trace

from penstock.cli.sources import load, load_drawn
from penstock.drawing import draw, draw_stacked

NUM_STAGES, NUM_MICROBATCHES, MINIBATCH = 4, 12, 4
"""Of the pictures."""
NUM_TICKS = 6
"""Of the picture of a live stream."""
SIZES = (4, 8)
RATIOS = (1, 2, 4, 8)
"""Of microbatches to stages."""
DEPTHS = (4, 8, 16)
DELAYS = (0, 1, 2, 3, 7, 15)

ASKED: dict[str, tuple[str, str]] = {
    "flush": ("Flush()", "flush"),
    "latest": ("Latest()", "latest"),
    "stash": ("Stash()", "stash"),
    "vertical-sync": ("VerticalSync()", "vertical-sync"),
    "2bw": ("DoubleBuffer()", "2bw"),
    "pipemare": ("PipeMare(t1=1000, t2=0.3)", "pipemare:t1=1000,t2=0.3"),
    "predict": ("Predict()", "predict"),
    "sideways": ("Sideways()", "sideways"),
}
"""How to ask for each, in Python and on the command line."""

VARIANTS: dict[str, dict[str, Policy]] = {
    "latest": {"once per minibatch": Latest(updates="minibatch")},
    "stash": {"once per minibatch": Stash(updates="minibatch")},
    "pipemare": {"with T2": PipeMare(t2=0.3)},
}
"""Other ways to have a policy that need other memory."""


_MEASURED = (
    " All versions share what a stage does not\n"
    "train. After a loop over `steps`, `pipeline.held_versions` says what was held, in versions "
    "and bytes."
)


class Stream(NamedTuple):
    """A stream of microbatches, followed to its end.

    Attributes:
        timeline: with versions.
        held: the most versions at once, by stage.
    """

    timeline: Timeline
    held: tuple[int, ...]


def write(target: Path) -> None:
    """Write all pages and pictures into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    told = {name: about_policy(name) for name in POLICIES}
    for name, one in told.items():
        draw(_drawn(name).timeline, target / f"{name}.svg", versions=True)
        (target / f"{name}.md").write_text(_page(one), encoding="utf-8")
    flushed = simulate(_flushed(NUM_STAGES, MINIBATCH, NUM_MICROBATCHES), Costs())
    pair = [
        (f"1F1B with a flush after every {MINIBATCH} microbatches", flushed),
        (
            "PipeDream, which never flushes",
            load("pipedream", NUM_STAGES, NUM_MICROBATCHES, Costs()).timeline,
        ),
    ]
    draw_stacked(pair, target / "flush-or-not.svg")
    for page, values in (("index", _index(told)), ("choosing", _choosing(told))):
        text = filled(f"versions_{page}.md", **values)
        (target / f"{page}.md").write_text(text, encoding="utf-8")


def about_policy(name: str) -> About:
    """What a policy says about itself in its docstring."""
    text = inspect.cleandoc(POLICIES[name].__doc__ or "").replace("``", "`")
    said = [" ".join(one.split()) for one in text.split("\n\n")]
    marked = dict(_marked(said))
    return About(
        name=name,
        idea=said[0],
        law=said[1],
        details=tuple(one for one in said[2:] if one not in marked.values()),
        wins=_behind(marked["Wins"]),
        loses=_behind(marked["Loses"]),
        options=tuple(_options(name, _behind(marked.get("Attributes", "")))),
        citation=_behind(marked["Paper"]),
        drawing="",
    )


def _marked(said: Sequence[str]) -> Iterator[tuple[str, str]]:
    for one in said[1:]:
        mark, colon, _ = one.partition(":")
        if colon and mark in ("Wins", "Loses", "Paper", "Attributes"):
            yield mark, one


def _behind(marked: str) -> str:
    return marked.partition(":")[2].strip()


def _options(name: str, meanings: str) -> Iterator[Option]:
    if not meanings:
        return
    policy = POLICIES[name]()
    border = "|".join(policy.__struct_fields__)
    parts = re.split(rf"(?:^|(?<= ))({border}): ", meanings)
    for field, meaning in zip(parts[1::2], parts[2::2], strict=True):
        yield Option(field, repr(getattr(policy, field)), meaning.strip())


@cache
def stream(policy: Policy, num_stages: int, minibatch: int, num_microbatches: int) -> Stream:
    """Trace a stream under a policy: F, I and W take 1, hops and updates nothing."""
    if policy.asynchronous:
        schedule = families.build(
            policy.family, num_ranks=num_stages, num_microbatches=num_microbatches
        )
    else:
        schedule = _flushed(num_stages, minibatch, num_microbatches)
    replicas = (1,) * num_stages
    rounds = Rounds(replicas)
    if policy.updates == "minibatch":
        rounds = Rounds.of_minibatches(replicas, minibatch, num_microbatches)
    lowered = add_updates(schedule, rounds)
    traces = [trace(ops, policy, rounds, num_stages) for ops in lowered.ranks]
    named = Schedule(lowered.ranks, f"{schedule.name} ({policy.name})")
    timeline = simulate(named, Costs()).with_versions([one.versions for one in traces])
    return Stream(timeline, tuple(one.held[stage] for stage, one in enumerate(traces)))


def _flushed(num_stages: int, minibatch: int, num_microbatches: int) -> Schedule:
    """Minibatches one after the other. A rank begins the next when its own part of this one is
    done, and of 1F1B the first rank is the last to be done."""
    one = families.build("1f1b", num_ranks=num_stages, num_microbatches=minibatch)
    firsts = range(0, num_microbatches, minibatch)
    ranks = (
        [op._replace(microbatch=op.microbatch + first) for first in firsts for op in ops]
        for ops in one.ranks
    )
    return Schedule.of(ranks, one.name)


@cache
def _drawn(name: str) -> Stream:
    policy = POLICIES[name]()
    if policy.activations == "newest":
        live, _ = load_drawn(policy.family, NUM_STAGES, NUM_TICKS, Costs())
        return Stream(live.shown, (1,) * NUM_STAGES)
    return stream(POLICIES[name](), NUM_STAGES, MINIBATCH, NUM_MICROBATCHES)


def _steady(policy: Policy, num_stages: int) -> Stream:
    """Long enough for the steady state, in minibatches of one microbatch per stage."""
    return stream(policy, num_stages, num_stages, 5 * num_stages)


@cache
def _explained(policy: Policy, num_stages: int) -> Explanation:
    seconds = dict.fromkeys(
        ("forward_seconds", "backward_input_seconds", "backward_weight_seconds"), 1.0
    )
    layers = (Layer(name=f"{at}", parameter_bytes=1, **seconds) for at in range(num_stages))
    return explain(
        plan(
            LayerGraph(layers=tuple(layers)),
            Cluster.local(num_stages),
            num_microbatches=num_stages,
            stages=num_stages,
            schedule=policy.family,
            versions=policy,
        )
    )


def delays(policy: Policy, num_stages: int) -> tuple[float, ...]:
    """By stage, of the microbatches of the last but one minibatch of a stream."""
    found = _steady(policy, num_stages).timeline.delays
    last = range(3 * num_stages, 4 * num_stages)
    return tuple(sum(found[stage][one] for one in last) / num_stages for stage in found)


def copies(policy: Policy, num_stages: int) -> tuple[int, ...]:
    """By stage, versions held and buffers as large as the weights."""
    held = _steady(policy, num_stages).held
    extra = (stage.extra_bytes for stage in _explained(policy, num_stages).stages)
    return tuple(map(sum, zip(held, extra, strict=True)))


def _page(one: About) -> str:
    policy, expression, written = POLICIES[one.name](), *ASKED[one.name]
    return filled(
        "policy.md",
        name=one.name,
        title=one.title,
        idea=one.summary,
        schedule=policy.family,
        law=one.law,
        details=paragraphs(one.details),
        ranks=str(NUM_STAGES),
        microbatches=str(_num_drawn(policy)),
        drawn=_how_drawn(policy),
        bubble=_whose_bubble(policy),
        command=_command(policy),
        reads=_reads(policy),
        text=draw(_drawn(one.name).timeline, versions=True),
        memory=_memory(one.name),
        measured=_MEASURED if policy.asynchronous and policy.activations == "own" else "",
        wins=one.wins,
        loses=one.loses,
        defined="\n".join(f"- **{topic}.** {text}" for topic, text in defined(policy)),
        expression=expression,
        written=written,
        microbatches_asked=str(MINIBATCH),
        options=options(one),
        citation=linked(one.citation),
        bibtex=bibtex(one),
    )


def _command(policy: Policy) -> str:
    if not policy.asynchronous:
        return (
            f"penstock draw {policy.family} -p {NUM_STAGES} -m {MINIBATCH} --versions` draws one "
            "minibatch of it"
        )
    if policy.activations == "newest":
        return (
            f"penstock draw {policy.family} -p {NUM_STAGES} -m {NUM_TICKS} -o {policy.name}.svg` "
            "draws it"
        )
    policy_option = f" --policy {policy.name}" if policy.name != "2bw" else ""
    return (
        f"penstock draw {policy.family} -p {NUM_STAGES} -m {NUM_MICROBATCHES} --versions"
        f"{policy_option} -o {policy.name}.svg` draws it"
    )


def _num_drawn(policy: Policy) -> int:
    return NUM_TICKS if policy.activations == "newest" else NUM_MICROBATCHES


def _how_drawn(policy: Policy) -> str:
    if policy.updates == "microbatch":
        return "each microbatch is an update"
    return f"an update after every {MINIBATCH} microbatches"


def _whose_bubble(policy: Policy) -> str:
    if not policy.asynchronous:
        return "The bubble is that of any number of minibatches."
    if policy.activations == "newest":
        return (
            "These are ticks in the middle of a stream: each frame meets, at each stage, the "
            "gradient\nof an older one, with the same weights. The bubble is where ticks are cut "
            "off; in a stream there is none."
        )
    whole = (
        "The bubble is that of filling and draining so short a stream; in between there is none."
    )
    if isinstance(policy, Predict):
        return f"Of a prediction, it is the version that it starts from.\n{whole}"
    return whole


def _reads(policy: Policy) -> str:
    found = _explained(policy, NUM_STAGES)
    late, held = delays(policy, NUM_STAGES), _steady(policy, NUM_STAGES).held
    rows = [
        [
            str(stage),
            f"{one.forward.formula} (k = {found.example}: {one.forward.example})",
            f"{one.backward.formula} (k = {found.example}: {one.backward.example})",
            f"{late[stage]:g}",
            str(held[stage]),
            str(one.activations_in_flight),
        ]
        for stage, one in enumerate(found.stages)
    ]
    columns = ("stage", "forward reads", "backward reads", "delay", "versions", "in flight")
    return table(columns, rows, 3)


def _memory(name: str) -> str:
    rows = []
    for num_stages in SIZES:
        ways = {"": POLICIES[name](), **VARIANTS.get(name, {})}
        for way, policy in ways.items():
            counts = copies(policy, num_stages)
            rows.append(
                [
                    f"p = {num_stages}{f', {way}' if way else ''}",
                    *map(str, counts),
                    *[""] * (max(SIZES) - num_stages),
                    f"{sum(counts) / num_stages:.4g} ×",
                ]
            )
    stages = (f"s = {stage}" for stage in range(max(SIZES)))
    return table(("", *stages, "whole model"), rows)


def _index(told: dict[str, About]) -> dict[str, str]:
    pictures = "\n\n".join(
        f"[![{name}, drawn by Penstock]({name}.svg)]({name}.md)" for name in told
    )
    return {"table": _policies(told), "pictures": pictures, "sizes": _and(SIZES)}


def _policies(told: dict[str, About]) -> str:
    few, many = SIZES
    rows = []
    for name in told:
        policy = POLICIES[name]()
        late = delays(policy, many)
        ends = dict.fromkeys(f"{one:.3g}" for one in (late[0], late[-1]))
        rows.append(
            [
                f"[{name}]({name}.md)",
                _explained(policy, few).stages[0].forward.formula,
                _explained(policy, few).stages[0].backward.formula,
                policy.updates,
                " … ".join(ends),
                *(f"{sum(copies(policy, size)) / size:.4g} ×" for size in SIZES),
            ]
        )
    columns = (
        "policy",
        f"forward reads (s = 0, p = {few})",
        "backward reads",
        "update per",
        f"delay at p = {many}, first … last stage",
        *(f"weights at p = {size}" for size in SIZES),
    )
    return table(columns, rows, 4)


def _and(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))


def _choosing(told: dict[str, About]) -> dict[str, str]:
    flushes = [
        [
            f"m = {ratio if ratio > 1 else ''}p",
            *(
                f"{percent(_bubble('1f1b', depth, ratio * depth))}, "
                f"{percent(_bubble('zb-h1', depth, ratio * depth))}"
                for depth in DEPTHS
            ),
        ]
        for ratio in RATIOS
    ]
    four = 1 / (1 - _bubble("1f1b", max(DEPTHS), 4 * max(DEPTHS))) - 1
    stable = ("delay τ", "rate × curvature at most", "of that without delay")
    bounds = [
        [str(delay), f"{stability_bound(delay):.3g}", f"1/{2 / stability_bound(delay):.3g}"]
        for delay in DELAYS
    ]
    return {
        "flushes": table(("", *(f"p = {depth}" for depth in DEPTHS)), flushes),
        "at_four": percent(four),
        "deepest": str(max(DEPTHS)),
        "policies": _policies(told),
        "sizes": _and(SIZES),
        "bounds": table(stable, bounds, 0),
        "minibatch": str(MINIBATCH),
        "flushed_makespan": f"{_drawn('flush').timeline.makespan:g}",
        "stream_makespan": f"{_drawn('stash').timeline.makespan:g}",
        "stream_length": str(NUM_MICROBATCHES),
    }


def _bubble(name: str, ranks: int, microbatches: int) -> float:
    return load(name, ranks, microbatches, Costs()).timeline.bubble
