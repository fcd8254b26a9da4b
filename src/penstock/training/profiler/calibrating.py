"""Runs rounds of pipelines in turns with the layers alone until contention is steady, and judges
which rounds count, what contention they show, and how sure that is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import nn

from penstock.base.errors import PenstockError
from penstock.base.kept import kept
from penstock.base.units import format_seconds
from penstock.core.cluster.local import usable_cores
from penstock.core.graph import Contention, LayerGraph, Mode
from penstock.engine.model.spine import spine_of
from penstock.engine.run.drive.joining import several_processes
from penstock.planning.plans import Plan
from penstock.training.profiler.alone import LONG_SECONDS, Alone, Sample, device_of
from penstock.training.profiler.disturbance import (
    QUIET_SHARE,
    SLOWER_REFERENCE,
    Reference,
    Usage,
    share_of_others,
)
from penstock.training.profiler.runs import (
    FAMILIES,
    SHORT,
    USUAL,
    Effort,
    Factors,
    Lap,
    Runner,
    factors_of,
    paced,
    plan_of,
)

_MOST_RANKS = 8
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 40
_PASSES_OF_SHORT_TURN = 7
"""About as long as so many passes of a microbatch through all layers a short turn takes."""

Advance = Callable[[float], None]
"""Called with the share of the patience, or of the rounds, that is spent."""


class Calibrated(NamedTuple):
    """The profile as measured beside pipelines.

    Attributes:
        graph: with the layers' times of the undisturbed rounds.
        contention: all factors are 1 where it could not be measured.
        warnings: what could not be measured, or is not sure.
    """

    graph: LayerGraph
    contention: Contention
    warnings: tuple[str, ...] = ()


def num_ranks(model: nn.Module, sample: Sample, num_threads: int, asked: int | None) -> int:
    """How many ranks the measured pipelines have; 0 where they would tell nothing.

    Args:
        num_threads: intra-op threads of each rank.
        asked: what the user wants; by default as many as there are cores for.
    """
    if device_of(model, sample.inputs).type != "cpu" or several_processes():
        return 0
    wanted = min(usable_cores() // num_threads, _MOST_RANKS) if asked is None else asked
    count = min(wanted, len(spine_of(model)))
    return count if count > 1 else 0


def calibrate(
    runner: Runner, graph: LayerGraph, count: int, patience_seconds: float, tell: Advance
) -> Calibrated:
    """Run pipelines of a copy of the model in turns with its layers alone.

    A round is: fixed work, the layers alone, 1F1B, alone, ZB-H1, alone, PipeDream, alone. So
    whatever state the machine is in, what is compared has seen the same one. Rounds go on until the
    figures are steady (``Judgement``), patience ends, or somebody interrupts them.

    Where a microbatch takes longer than ``LONG_SECONDS``, turns are short; and where patience is
    too short for these, there is none but that of whole backwards. What the others cost more is
    work in Python, which is little beside such passes, and copies of weights.

    Args:
        count: ranks of the pipelines.
        patience_seconds: for all rounds; two are measured in any case.
        tell: called after each turn.
    """
    # Without updates no pipeline goes without a flush.
    modes = [mode for mode in FAMILIES if mode != "stream" or runner.updates]
    pass_seconds = sum(layer.compute_seconds for layer in graph.layers)
    effort, warnings = USUAL, list[str]()
    if pass_seconds > LONG_SECONDS:
        effort = SHORT
        needed = _LEAST_ROUNDS * len(modes) * _PASSES_OF_SHORT_TURN * pass_seconds
        if needed > patience_seconds:
            modes = modes[:1]
            warnings.append(_only_whole(pass_seconds, needed))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rounds = _CalibrationRounds(runner, graph, modes, count, effort)
            judgement = _until_steady(rounds, count, patience_seconds, tell)
    except Exception as error:  # a model may refuse in any way
        return uncalibrated(graph, error)
    finally:
        runner.close()
    warnings += rounds.refusals
    if judgement is None:
        return Calibrated(graph, Contention(), tuple(warnings))
    return Calibrated(
        paced(graph, judgement.alone),
        judgement.contention,
        (*warnings, *judgement.warnings()),
    )


def _only_whole(pass_seconds: float, needed_seconds: float) -> str:
    return (
        f"a microbatch takes {format_seconds(pass_seconds)}, so contention was measured of "
        f"{FAMILIES['whole']} alone, and is taken for that of all schedules; "
        f"{needed_seconds:.0f} s measure the others, too (patience_seconds=…, --patience)"
    )


def uncalibrated(graph: LayerGraph, error: BaseException) -> Calibrated:
    """The profile without contention, and a warning that says why."""
    return Calibrated(graph, Contention(), (_refusal("", error),))


def _refusal(of_what: str, error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return f"contention{of_what} was not measured: {text.splitlines()[0]}"


def _until_steady(
    rounds: _CalibrationRounds, count: int, patience_seconds: float, tell: Advance
) -> Judgement | None:
    """Measure rounds until they are steady; ``None`` if no pipeline could be run."""
    judgement, measured = None, list[CalibrationRound]()
    begun = time.perf_counter()

    def tell_turn(share_of_round: float) -> None:
        done = len(measured) + share_of_round
        spent = (time.perf_counter() - begun) / patience_seconds
        # Two rounds there are, however long they take.
        tell(min(max(spent, done / _MOST_ROUNDS), done / _LEAST_ROUNDS))

    for number in range(1, _MOST_ROUNDS + 1):
        try:
            measured.append(rounds.measure(tell_turn))
        except KeyboardInterrupt:
            rounds.interrupted = True
            break
        if not rounds.modes:
            return None
        judgement = Judgement(measured, count)
        spent = time.perf_counter() - begun
        ends_late = spent * (number + 1) / number > patience_seconds
        if judgement.is_enough or (ends_late and number >= _LEAST_ROUNDS):
            break
    return judgement


class _CalibrationRounds:
    """Measures round by round; a mode that cannot be run is left out of the next ones.

    Attributes:
        modes: those that can be run.
        interrupted: whether somebody has ended them.
    """

    def __init__(
        self,
        runner: Runner,
        graph: LayerGraph,
        modes: Sequence[Mode],
        count: int,
        effort: Effort,
    ) -> None:
        self.modes = list(modes)
        self.interrupted = False
        self._effort = effort
        self._last_alone: Alone | None = None
        self._runner = runner
        self._graph = graph
        self._count = count
        self._refused: dict[Mode, PenstockError] = {}
        self._reference = Reference()

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why some modes were not measured, or not for long."""
        refused = (_refusal(f" of {FAMILIES[mode]}", why) for mode, why in self._refused.items())
        return (*refused, *["interrupted while contention was measured"] * self.interrupted)

    def measure(self, tell: Advance) -> CalibrationRound:
        """Measure one round, and tell after each turn what share of it is done."""
        before, first = Usage.now(), self._reference.seconds()
        modes, laps = tuple(self.modes), dict[Mode, Lap]()
        num_turns = 1 + 2 * len(modes)
        alone = [self._last_alone or self._alone()]
        for number, mode in enumerate(modes):
            tell((2 * number + 1) / num_turns)
            try:
                ran = self._runner.run(self._plan(mode), self._effort)
            except PenstockError as error:
                self._refused[mode] = error
                self.modes.remove(mode)
                continue
            tell((2 * number + 2) / num_turns)
            alone.append(self._alone())
            laps[mode] = Lap(_mean(alone[-2:]), ran)
        tell(1.0)
        if self._effort is SHORT:  # what ends this round begins the next one
            self._last_alone = alone[-1]
        last = self._reference.seconds()
        others = share_of_others(before, Usage.now())
        factors: dict[Mode, Factors] = {
            mode: factors_of(self._graph, self._plan(mode), lap) for mode, lap in laps.items()
        }
        return CalibrationRound(factors, _mean(alone), others, max(first, last))

    def _alone(self) -> Alone:
        return self._runner.alone(self._graph.num_threads, self._effort)

    @kept
    def _plan(self, mode: Mode) -> Plan:
        return plan_of(self._graph, mode, self._count, self._effort.microbatches_per_rank)


def _mean(alone: Sequence[Alone]) -> Alone:
    return Alone(*map(statistics.fmean, zip(*alone, strict=True)))


STEADY = 0.02
"""A spread that is small enough to stop measuring."""

_UNSTEADY = 0.04
"""A spread from which on people are warned."""

_ENOUGH_ROUNDS = 3
_LEAST_QUIET = 2
_OR_LONGER = ", or for longer (patience_seconds=…, --patience)"


class CalibrationRound(NamedTuple):
    """The measurements of one round, in which the layers alone and every pipeline had a turn.

    Attributes:
        factors: for each mode that could be run.
        alone: a microbatch through all layers.
        others_share: the share of the cores' time that other programs had.
        reference_seconds: the time of the fixed work.
    """

    factors: Mapping[Mode, Factors]
    alone: Alone
    others_share: float
    reference_seconds: float


class Judgement:
    """Contention according to some rounds.

    A round is disturbed if other programs had more than 5 % of the cores' time in it, or if fixed
    work took 1.15 times as long as in the best round. Disturbed rounds do not count. Where fewer
    than two are left, the time on the clock says more about other programs than about ranks, so
    processor time stands for it in all rounds.

    Args:
        rounds: at least one.
        num_ranks: of the pipelines.
    """

    def __init__(self, rounds: Sequence[CalibrationRound], num_ranks: int) -> None:
        self._rounds = rounds
        self._num_ranks = num_ranks
        limit = SLOWER_REFERENCE * min(measured.reference_seconds for measured in rounds)
        self._quiet = [
            measured
            for measured in rounds
            if measured.others_share <= QUIET_SHARE and measured.reference_seconds <= limit
        ]

    @property
    def is_enough(self) -> bool:
        """Whether more rounds would hardly tell more."""
        return len(self._quiet) >= _ENOUGH_ROUNDS and max(map(self._spread, FAMILIES)) <= STEADY

    @property
    def by_cpu(self) -> bool:
        """Whether processor time stands for time, since the machine was too busy."""
        return len(self._quiet) < _LEAST_QUIET

    @property
    def alone(self) -> Alone:
        """The usual time of a microbatch through all layers."""
        columns = zip(*(counted.alone for counted in self._counted), strict=True)
        forward, backward, cpu = map(statistics.median, columns)
        # Interruptions take no processor time; where several threads share a pass, it is more.
        share = min(1.0, cpu / (forward + backward)) if self.by_cpu and forward + backward else 1.0
        return Alone(share * forward, share * backward, cpu)

    @property
    def contention(self) -> Contention:
        """The usual factors; where a mode could not be run, those of whole backwards."""
        whole, update = self._usual("whole") or (1.0, 1.0)
        split, _ = self._usual("split") or (whole, update)
        stream, stream_update = self._usual("stream") or (whole, update)
        num_rounds = 0 if self.by_cpu else len(self._quiet)
        return Contention(
            whole=whole,
            split=split,
            stream=stream,
            update=update,
            stream_update=stream_update,
            whole_spread=self._spread("whole"),
            split_spread=self._spread("split" if self._passes("split") else "whole"),
            stream_spread=self._spread("stream" if self._passes("stream") else "whole"),
            num_ranks=self._num_ranks,
            num_rounds=num_rounds,
            num_rejected=len(self._rounds) - num_rounds,
            others_share=self._others_share,
        )

    def warnings(self) -> Iterator[str]:
        """Sentences on how far the figures can be trusted, and what helps."""
        disturbed = len(self._rounds) - len(self._quiet)
        if self.by_cpu or self._others_share > QUIET_SHARE:
            instead = ", so contention is estimated from processor time" if self.by_cpu else ""
            yield (
                f"the machine was busy: other programs had {self._others_share:.0%} of its cores, "
                f"and {disturbed} of {len(self._rounds)} rounds were disturbed{instead}; profile "
                f"again when it is quiet{_OR_LONGER}"
            )
        mode = max(FAMILIES, key=self._spread)
        usual, spread = self._usual(mode), self._spread(mode)
        if usual is not None and spread > _UNSTEADY:
            yield (
                f"contention is not steady: {usual[0]:.2f} ± {spread:.0%} with {FAMILIES[mode]} "
                f"after {len(self._rounds)} rounds, of which {disturbed} were disturbed; profile "
                f"again{_OR_LONGER}"
            )

    @property
    def _counted(self) -> Sequence[CalibrationRound]:
        return self._rounds if self.by_cpu else self._quiet

    @property
    def _others_share(self) -> float:
        return statistics.median(measured.others_share for measured in self._rounds)

    def _passes(self, mode: Mode) -> list[float]:
        return [own.by_cpu if self.by_cpu else own.passes for own in self._factors(mode)]

    def _factors(self, mode: Mode) -> list[Factors]:
        return [counted.factors[mode] for counted in self._counted if mode in counted.factors]

    def _usual(self, mode: Mode) -> tuple[float, float] | None:
        """The factors of passes and of updates."""
        passes = self._passes(mode)
        if not passes:
            return None
        updates = [own.updates for own in self._factors(mode)]
        return statistics.median(passes), 1.0 if self.by_cpu else statistics.median(updates)

    def _spread(self, mode: Mode) -> float:
        """The standard error of a median, about: the distance between the quartiles over the root
        of their number."""
        passes = self._passes(mode)
        if not passes:
            return 0.0
        if len(passes) < 2:
            return 1.0  # one throw of the dice says nothing
        low, middle, high = statistics.quantiles(passes, n=4, method="inclusive")
        return (high - low) / sqrt(len(passes)) / middle
