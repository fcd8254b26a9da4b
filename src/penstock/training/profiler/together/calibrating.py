"""Runs rounds of pipelines in turns with the layers alone, until contention is steady."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.base.errors import PenstockError
from penstock.base.units import format_seconds
from penstock.core.cluster.local import usable_cores
from penstock.core.graph import Contention, LayerGraph, Mode
from penstock.engine.model.spine import spine_of
from penstock.engine.run.drive.joining import several_processes
from penstock.planning.plans import Plan
from penstock.training.profiler.alone import LONG_SECONDS, Alone, Sample, device_of
from penstock.training.profiler.together.disturbance import Reference, Usage, share_of_others
from penstock.training.profiler.together.fit import Factors, Lap, factors_of, paced, plan_of
from penstock.training.profiler.together.judgement import Judgement, Round
from penstock.training.profiler.together.runs import FAMILIES, SHORT, USUAL, Effort, Runner

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
            rounds = _Rounds(runner, graph, modes, count, effort)
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
    told = str(error) or type(error).__name__
    return f"contention{of_what} was not measured: {told.splitlines()[0]}"


def _until_steady(
    rounds: _Rounds, count: int, patience_seconds: float, tell: Advance
) -> Judgement | None:
    """Measure rounds until they are steady; ``None`` if no pipeline could be run."""
    judgement, measured = None, list[Round]()
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


class _Rounds:
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
        self._plans: dict[Mode, Plan] = {}
        self._refused: dict[Mode, PenstockError] = {}
        self._reference = Reference()

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why some modes were not measured, or not for long."""
        refused = (_refusal(f" of {FAMILIES[mode]}", why) for mode, why in self._refused.items())
        return (*refused, *["interrupted while contention was measured"] * self.interrupted)

    def measure(self, tell: Advance) -> Round:
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
        return Round(factors, _mean(alone), others, max(first, last))

    def _alone(self) -> Alone:
        return self._runner.alone(self._graph.num_threads, self._effort)

    def _plan(self, mode: Mode) -> Plan:
        if mode not in self._plans:
            self._plans[mode] = plan_of(
                self._graph, mode, self._count, self._effort.microbatches_per_rank
            )
        return self._plans[mode]


def _mean(alone: Sequence[Alone]) -> Alone:
    return Alone(*map(statistics.fmean, zip(*alone, strict=True)))
