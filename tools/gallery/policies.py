"""Write ``docs/versions``: a page and a picture per weight-version policy, and an index with a
table of them all.

What a policy is, it says in its docstring: the idea, the law, ``Wins:``, ``Loses:``, ``Paper:`` and
its attributes. Versions, delays and what is held are read off streams that the library traces, so
that a page cannot say anything else than what the runtime does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from pages import cited, filled, goes_on, options, table

from penstock.cli.sources import load, load_drawn
from penstock.core.cluster import Cluster
from penstock.core.graph import Layer, LayerGraph
from penstock.core.schedule import Schedule, families
from penstock.core.schedule.about import About, Option
from penstock.core.schedule.lower import add_updates
from penstock.core.schedule.rounds import Rounds
from penstock.core.timing.costs import Costs
from penstock.core.timing.simulator import simulate
from penstock.core.timing.timeline import Timeline
from penstock.core.versions import POLICIES, Latest, PipeMare, Policy, Predict, Stash, trace
from penstock.drawing import draw, draw_stacked
from penstock.planning.planner import plan
from penstock.planning.plans.explanation import Explanation, explain

NUM_STAGES, NUM_MICROBATCHES, MINIBATCH = 4, 12, 4
"""Of the pictures."""
NUM_TICKS = 6
"""Of the picture of a live stream."""
SIZES = (4, 8)
DEFAULT = "flush"

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
    abouts = {name: about_policy(name) for name in POLICIES}
    for name, policy in abouts.items():
        draw(_drawn(name).timeline, target / f"{name}.svg", versions=True)
        (target / f"{name}.md").write_text(_page(policy), encoding="utf-8")
    flushed = simulate(_flushed(NUM_STAGES, MINIBATCH, NUM_MICROBATCHES), Costs())
    pair = [
        (f"1F1B with a flush after every {MINIBATCH} microbatches", flushed),
        (
            "PipeDream, which never flushes",
            load("pipedream", NUM_STAGES, NUM_MICROBATCHES, Costs()).timeline,
        ),
    ]
    draw_stacked(pair, target / "flush-or-not.svg")
    (target / "index.md").write_text(_index(abouts), encoding="utf-8")


def about_policy(name: str) -> About:
    """A policy as its docstring describes it."""
    text = inspect.cleandoc(POLICIES[name].__doc__ or "").replace("``", "`")
    said = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    marked = dict(_marked(said))
    return About(
        name=name,
        idea=said[0],
        law=said[1],
        details=tuple(paragraph for paragraph in said[2:] if paragraph not in marked.values()),
        wins=_behind(marked["Wins"]),
        loses=_behind(marked["Loses"]),
        options=tuple(_options(name, _behind(marked.get("Attributes", "")))),
        citation=_behind(marked["Paper"]),
        drawing="",
    )


def _marked(said: Sequence[str]) -> Iterator[tuple[str, str]]:
    for paragraph in said[1:]:
        mark, colon, _ = paragraph.partition(":")
        if colon and mark in ("Wins", "Loses", "Paper", "Attributes"):
            yield mark, paragraph


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
    timeline = simulate(named, Costs()).with_versions([own.versions for own in traces])
    return Stream(timeline, tuple(own.held[stage] for stage, own in enumerate(traces)))


def _flushed(num_stages: int, minibatch: int, num_microbatches: int) -> Schedule:
    """Minibatches one after the other. A rank begins the next when its own part of this one is
    done, and of 1F1B the first rank is the last to be done."""
    single = families.build("1f1b", num_ranks=num_stages, num_microbatches=minibatch)
    firsts = range(0, num_microbatches, minibatch)
    ranks = (
        [op._replace(microbatch=op.microbatch + first) for first in firsts for op in ops]
        for ops in single.ranks
    )
    return Schedule.of(ranks, single.name)


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
            microbatches=num_stages,
            stages=num_stages,
            schedule=policy.family,
            versions=policy,
        )
    )


def delays(policy: Policy, num_stages: int) -> tuple[float, ...]:
    """By stage, of the microbatches of the last but one minibatch of a stream."""
    by_stage = _steady(policy, num_stages).timeline.delays
    last = range(3 * num_stages, 4 * num_stages)
    return tuple(sum(ages[k] for k in last) / num_stages for ages in by_stage.values())


def copies(policy: Policy, num_stages: int) -> tuple[int, ...]:
    """By stage, versions held and buffers as large as the weights."""
    held = _steady(policy, num_stages).held
    extra = (stage.extra_bytes for stage in _explained(policy, num_stages).stages)
    return tuple(map(sum, zip(held, extra, strict=True)))


def _page(about: About) -> str:
    policy, expression, written = POLICIES[about.name](), *ASKED[about.name]
    return filled(
        "policy.md",
        name=about.name,
        title=about.title,
        idea=about.summary,
        schedule=policy.family,
        law=" ".join((about.law, *about.details)),
        ranks=str(NUM_STAGES),
        microbatches=str(_num_drawn(policy)),
        caption=_caption(policy),
        command=_command(policy),
        reads=_reads(policy),
        memory=_memory(about.name),
        wins=goes_on(about.wins),
        loses=goes_on(about.loses),
        defined="\n".join(f"- **{topic}.** {text}" for topic, text in defined(policy)),
        expression=expression,
        written=written,
        microbatches_asked=str(MINIBATCH),
        options=options(about),
        citation=cited(about.citation),
        how=_how(policy),
    )


def _command(policy: Policy) -> str:
    if not policy.asynchronous:
        return f"penstock draw {policy.family} -p {NUM_STAGES} -m {MINIBATCH} --versions"
    written = f"-o {policy.name}.svg"
    if policy.activations == "newest":
        return f"penstock draw {policy.family} -p {NUM_STAGES} -m {NUM_TICKS} {written}"
    asked = f" --policy {policy.name}" if policy.name != "2bw" else ""
    drawn = f"penstock draw {policy.family} -p {NUM_STAGES} -m {NUM_MICROBATCHES}"
    return f"{drawn} --versions{asked} {written}"


def _num_drawn(policy: Policy) -> int:
    return NUM_TICKS if policy.activations == "newest" else NUM_MICROBATCHES


def _caption(policy: Policy) -> str:
    bands = "The band under an op is the version of the weights that it reads"
    if isinstance(policy, Predict):
        bands += " (and predicts from)"
    if policy.activations == "newest":
        return f"{bands}. Ticks from the middle of a stream; there is an update after each."
    if policy.updates == "microbatch":
        return f"{bands}; each microbatch is an update."
    return f"{bands}; an update after every {MINIBATCH} microbatches."


def _how(policy: Policy) -> str:
    if policy.asynchronous:
        return "[Training without a flush, and what it refuses](../asynchronous.md)"
    return "[Training](../training.md)"


def _reads(policy: Policy) -> str:
    late, kept = delays(policy, NUM_STAGES), copies(policy, NUM_STAGES)
    rows = [
        (own.forward.formula, own.backward.formula, f"{late[stage]:g}", str(kept[stage]))
        for stage, own in enumerate(_explained(policy, NUM_STAGES).stages)
    ]
    columns = ("stage", "forward reads", "backward reads", "delay", "weights")
    return table(columns, _alike(rows), 3)


def _alike(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """One row for neighbours that are alike, behind which stages it is for."""
    for row, stages in groupby(range(len(rows)), key=lambda stage: rows[stage]):
        numbers = list(stages)
        yield "–".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))), *row


def _memory(name: str) -> str:
    """How often the weights of the whole model are kept."""
    few, many = SIZES
    ways = {"": POLICIES[name](), **VARIANTS.get(name, {})}
    said = [
        f"{way}{' ' if way else ''}{_kept(policy, few)} × at p = {few}, "
        f"{_kept(policy, many)} × at p = {many}"
        for way, policy in ways.items()
    ]
    return f"In all, the model's weights are kept {'; '.join(said)}."


def _kept(policy: Policy, num_stages: int) -> str:
    return f"{sum(copies(policy, num_stages)) / num_stages:.4g}"


def _index(abouts: dict[str, About]) -> str:
    pictures = (f"[![{name}]({name}.svg)]({name}.md)" for name in abouts)
    return filled(
        "versions.md",
        table=_policies(abouts),
        minibatch=str(MINIBATCH),
        flushed_makespan=f"{_drawn('flush').timeline.makespan:g}",
        stream_makespan=f"{_drawn('stash').timeline.makespan:g}",
        stream_length=str(NUM_MICROBATCHES),
        pictures="\n\n".join(pictures),
    )


def _policies(abouts: dict[str, About]) -> str:
    few, many = SIZES
    rows = []
    for name in abouts:
        policy = POLICIES[name]()
        late = delays(policy, many)
        ends = dict.fromkeys(f"{delay:.3g}" for delay in (late[0], late[-1]))
        link = f"[{name}]({name}.md)"
        rows.append(
            [
                f"**{link}**, the default" if name == DEFAULT else link,
                _explained(policy, few).stages[0].forward.formula,
                _explained(policy, few).stages[0].backward.formula,
                policy.updates,
                " … ".join(ends),
                *(_kept(policy, size) for size in SIZES),
            ]
        )
    columns = (
        "policy",
        f"forward reads (s = 0, p = {few})",
        "backward reads",
        "update per",
        f"delay (p = {many})",
        *(f"weights (p = {size})" for size in SIZES),
    )
    return table(columns, rows, 4)


def defined(policy: Policy) -> Iterator[tuple[str, str]]:
    """Topics, and what is to be said on each."""
    if not policy.asynchronous:
        yield (
            "Replicas",
            'With 1F1B and GPipe, as in `replicas="2-1"`: microbatch k is on replica k mod r of a '
            "stage; gradients are summed before the update, and learning rates stay. Running "
            "statistics of batch norm are refused there.",
        )
    elif policy.activations == "newest":
        yield from _of_live_streams()
    elif policy.stashes:
        yield "Recomputation", "Changes nothing: the second forward reads the version of the first."
    else:
        yield (
            "Recomputation",
            "Trains otherwise than without: the second forward reads the weights of the backward's "
            'time. With `recomputing("stage")` the backward of a stage is then a gradient of one '
            "function again, though its input is older.",
        )


def _of_live_streams() -> Iterator[tuple[str, str]]:
    yield (
        "Replicas",
        "Refused: a gradient goes through the frame that its stage has just seen. Cut the model "
        "into more stages.",
    )
    yield (
        "Recomputation",
        '`recomputing("layers")` changes nothing; `recomputing("stage")` is refused.',
    )
    yield (
        "State of layers",
        "Parameters may have hooks, and layers may write into theirs. What a layer carries from "
        "frame to frame, and detaches, sees each frame once, in order.",
    )
