"""What is compared: a training as one printable value, and how hypothesis draws and shrinks it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.kit.helpers import runnable_cases
from tests.oracles import nets

MOST_LAYERS = 9
SCHEDULES = runnable_cases((1, 2, 3, 4), (1, 2, 3, 4, 6, 8))
POLICIES = (
    "stash",
    "stash per minibatch",
    "vertical sync",
    "2bw",
    "latest",
    "latest per minibatch",
)


IN_HALVES = {"zb-h1", "zb-h2", "zb-v", "interleaved-zb", "v-half", "v-min", "dualpipe-v"}
"""Schedules that compute a backward in two halves, which is another computation than a whole one:
of batch norm, some CPUs' kernels round it otherwise."""


def _is_exact(schedule, names):
    in_halves = schedule in IN_HALVES and "batch norm" in names
    return schedule != "chimera" and "tied" not in names and not in_halves


@dataclass(frozen=True)
class Case:
    """A synchronous training."""

    names: tuple[str, ...]
    tokens: bool
    double: bool
    schedule: str
    num_ranks: int
    num_microbatches: int
    cuts: tuple[int, ...]
    rows: tuple[int, ...]
    recompute: str = "none"
    optimizer: str = "sgd"
    scheduler: bool = False
    clip_norm: float | None = None
    scaler: bool = False
    autocast: bool = False
    accumulates: bool = False
    streams: bool = False
    post_validate: bool = False

    @property
    def exact(self) -> bool:
        """Whether all sums have the order of one device; if not, only rounding may differ."""
        return _is_exact(self.schedule, self.names)


@dataclass(frozen=True)
class LateCase:
    """An asynchronous training."""

    names: tuple[str, ...]
    tokens: bool
    policy: str
    num_microbatches: int
    cuts: tuple[int, ...]
    num_minibatches: int
    optimizer: str = "sgd"


def num_layers(names, tokens):
    """How many layers a net of these names has."""
    return len(nets.make(names, tokens, None).layers)


@st.composite
def names_of(draw, without=frozenset()):
    """Names of a net's layers."""
    known = sorted({*nets.SIMPLE, *nets.PAIRS, "tied"} - set(without))
    return tuple(draw(st.lists(st.sampled_from(known), min_size=2, max_size=MOST_LAYERS)))


@st.composite
def cuts_of(draw, count, num_stages):
    """Where to cut so many layers into stages."""
    places = st.lists(
        st.integers(1, count - 1), min_size=num_stages - 1, max_size=num_stages - 1, unique=True
    )
    return tuple(sorted(draw(places))) if num_stages > 1 else ()


@st.composite
def trainings(draw, schedules=SCHEDULES):
    """Synchronous trainings that the runtime takes."""
    tokens = draw(st.booleans())
    schedule = draw(st.sampled_from(sorted({name for name, _, _ in schedules})))
    without = nets.WITH_STATISTICS if schedule == "chimera" else set()
    names = draw(names_of(without))
    count = num_layers(names, tokens)
    fitting = [
        (num_ranks, num_microbatches)
        for name, num_ranks, num_microbatches in schedules
        if name == schedule and num_stages_of(name, num_ranks) <= count
    ]
    if not fitting:
        schedule, fitting = "1f1b", [(2, 2)]
    num_ranks, num_microbatches = draw(st.sampled_from(fitting))
    exact = _is_exact(schedule, names)
    autocast = exact and draw(st.integers(0, 3)) == 3
    scaler = draw(st.booleans())
    streams = draw(st.booleans())
    clip_norm = draw(st.sampled_from([None, 0.05, 10.0]))
    return Case(
        names=names,
        tokens=tokens,
        double=not exact or (not autocast and draw(st.booleans())),
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        cuts=draw(cuts_of(count, num_stages_of(schedule, num_ranks))),
        rows=tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))),
        recompute=draw(st.sampled_from(["none", "none", "stage", "layers"])),
        # Adam turns the rounding of a gradient that is zero into a step of full length.
        optimizer=draw(st.sampled_from(["sgd", "adamw"])) if exact else "sgd",
        scheduler=draw(st.booleans()),
        clip_norm=clip_norm,
        scaler=scaler,
        autocast=autocast,
        accumulates=not streams and draw(st.booleans()),
        streams=streams,
        post_validate=(scaler or clip_norm is not None) and draw(st.booleans()),
    )


@st.composite
def late_trainings(draw):
    """Asynchronous trainings that the runtime takes."""
    tokens = draw(st.booleans())
    names = draw(names_of({"tied"}))
    count = num_layers(names, tokens)
    num_stages = draw(st.integers(1, min(4, count)))
    return LateCase(
        names=names,
        tokens=tokens,
        policy=draw(st.sampled_from(POLICIES)),
        num_microbatches=draw(st.integers(max(1, num_stages - 1), 4)),
        cuts=draw(cuts_of(count, num_stages)),
        num_minibatches=draw(st.integers(1, 5)),
        optimizer=draw(st.sampled_from(["sgd", "adam"])),
    )


def num_stages_of(schedule, num_ranks):
    """How many stages a family has on so many ranks."""
    from penstock.core.schedule import families

    built = families.build(schedule, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    return built.num_stages
