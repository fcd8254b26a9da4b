"""What this machine shows of the lectures' effects: the column "measured here".

``python -m benchmarks.lectures --measure --keep`` takes the figures of ``MEASUREMENTS``, in about
three minutes, on a machine that does nothing else. The page reads what was kept, of that and of
other benchmarks; until then it says so. Emulated devices are real processes with real messages
that wait where they would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from benchmarks.common.alone import RESULTS
from benchmarks.lectures.hydra_here import hydra_here
from penstock import Costs, rehearse, schedules

NOT_YET = "not measured yet"
_OP_SECONDS = 0.01
_ACCURACY = """PipeDream's table has the time to accuracy beside that of an epoch. `python -m
benchmarks.learning.accuracy` trains a GPT on text (to 2.8 nats per byte held out) and a CNN on
digits (to 0.5) with four stages or copies; PipeDream's own was there 1 to 4.25 times as soon as
data parallelism. "foreseen" is updates times the schedule's time for one, in updates of one device,
with messages and sums that are free."""
_FRAMES_PER_RANK, _MINIBATCHES = 12, 6

Figures = Iterator[tuple[str, str]]
"""By the name of an effect, what was measured."""


def kept_table(name: str) -> list[list[str]]:
    """The cells of Markdown tables in a kept result; none if there is no such file."""
    path = RESULTS / f"{name}.txt"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]


@cache
def _kept() -> dict[str, str]:
    return {cells[0]: cells[1] for cells in kept_table("lectures") if len(cells) == 2}


def figure(effect: str) -> str:
    """What was measured of an effect on this machine."""
    return _kept().get(effect, NOT_YET)


@cache
def servers_measured() -> str:
    """A ring's time over that of summation servers, which ``benchmarks.network.reducers`` keeps."""
    path, found = RESULTS / "network.reducers.txt", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        words = line.split()
        if len(words) == 8 and words[1].startswith("4,"):
            spares, measured, ring = words[1][2:], *(float(words[i][:-1]) for i in (4, 6))
            found.append(f"{ring / measured:.2f}× (k = {spares})")
    return f"the exchange: {', '.join(found)}" if found else NOT_YET


def stream_curve(title: str, pixels: str, launch: str) -> str:
    """Speed-up of two real stages and, where each kernel is launched by itself, of emulated
    devices, which ``benchmarks.streaming.speed_up`` keeps: of a network at a resolution."""
    head, *lines = kept_table("streaming.speed_up") or [[]]
    rows = [dict(zip(head, cells, strict=True)) for cells in lines]
    own = [row for row in rows if (row["network"], row.get("pixels")) == (title, pixels)]
    real = [f"2 cores {row['measured']}×" for row in own if row.get("launch") == launch]
    if not real:
        return NOT_YET
    waits = " ".join(f"{row['emulated']}×" for row in own if row["emulated"])
    return f"{pixels} px: {real[0]}" + (f"; emulated {waits}" if launch == "eager" else "")


def accuracy_section() -> str:
    """What ``benchmarks.learning.accuracy`` keeps, as a part of the page."""
    rows = kept_table("learning.accuracy")
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows) or f"{NOT_YET.capitalize()}."
    return f"\n## Time to accuracy, on two small tasks\n\n{_ACCURACY}\n\n{table}\n"


def _flushed(num_ranks: int, count: int, costs: Costs) -> float:
    """Seconds per microbatch of GPipe."""
    schedule = schedules.build("gpipe", num_ranks=num_ranks, num_microbatches=count)
    _, _, measured = rehearse(schedule, costs, steps=4).comparisons[0]
    return measured / count


def _streaming(name: str, num_ranks: int, count: int | None, costs: Costs) -> float:
    """Seconds per microbatch of a schedule that never flushes."""
    length = max(_FRAMES_PER_RANK * num_ranks, _MINIBATCHES * (count or 1))
    schedule = schedules.build(name, num_ranks=num_ranks, num_microbatches=length)
    steady = rehearse(schedule, costs, steps=2, minibatch=count).steady_seconds
    assert steady is not None  # streams are long enough
    return steady.measured


def beside_gpipe() -> Figures:
    """Schedules without a flush beside GPipe on emulated devices, with F = I = W."""
    costs = Costs(_OP_SECONDS, _OP_SECONDS, _OP_SECONDS)
    twice = Costs(_OP_SECONDS, 2 * _OP_SECONDS, _OP_SECONDS)  # the forward runs again
    loss = 1 - _streaming("pipedream", 8, None, costs) / _flushed(8, 8, twice)
    yield "GPipe below PipeDream", f"{loss:.0%} (8 emulated devices)"
    four = _streaming("pipedream", 4, None, costs)
    yield (
        "PipeDream over model parallelism",
        f"{_flushed(4, 1, costs) / four:.2f}× (4 emulated devices)",
    )
    ratios = [
        _flushed(8, count, costs) / _streaming("pipedream-2bw", 8, count, costs)
        for count in (8, 16, 32)
    ]
    shown = " ".join(f"{ratio:.2f}×" for ratio in ratios)
    yield "2BW over GPipe", f"{shown} (8 emulated devices, 8, 16, 32 microbatches)"


def over_depth() -> Figures:
    """The same work on eight emulated devices: four copies of two stages, two of four, one of
    eight; a message takes a tenth of what a stage of eight does."""
    rates = []
    for depth in (2, 4, 8):
        op = 8 * _OP_SECONDS / depth
        costs = Costs(op, op, op, hop=3 * _OP_SECONDS / 10)
        copies = 8 // depth
        rates.append(copies / _streaming("pipedream-2bw", depth, 8, costs))
    shown = " ".join(f"{rate / rates[0]:.2f}×" for rate in rates)
    yield "2BW over depth", f"{shown} (emulated, 2, 4, 8 stages)"


MEASUREMENTS: tuple[Callable[[], Figures], ...] = (beside_gpipe, over_depth, hydra_here)


def measure() -> None:
    """Take all figures, and print them as a table that the page can read."""
    rows = [row for measurement in MEASUREMENTS for row in measurement()]
    print("| effect | measured here |\n|---|---|")
    print("\n".join(f"| {effect} | {text} |" for effect, text in rows))
