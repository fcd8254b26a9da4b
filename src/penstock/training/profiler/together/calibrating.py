"""Runs rounds of pipelines in turns with the layers alone, until contention is steady."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.base.errors import PenstockError
from penstock.core.cluster.local import usable_cores
from penstock.core.graph import Contention, LayerGraph, Mode
from penstock.engine.model.spine import spine_of
from penstock.engine.run.drive.joining import several_processes
from penstock.planning.plans import Plan
from penstock.training.profiler.alone import Alone, Sample, device_of
from penstock.training.profiler.together.disturbance import Reference, Usage, share_of_others
from penstock.training.profiler.together.fit import Factors, Lap, factors_of, paced, plan_of
from penstock.training.profiler.together.judgement import Judgement, Round
from penstock.training.profiler.together.runs import FAMILIES, Runner

_MOST_RANKS = 8
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 40

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
    figures are steady (``Judgement``) or patience ends.

    Args:
        count: ranks of the pipelines.
        patience_seconds: for all rounds; two are measured in any case.
        tell: called after each round.
    """
    # Without updates no pipeline goes without a flush.
    modes = [mode for mode in FAMILIES if mode != "stream" or runner.updates]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rounds = _Rounds(runner, graph, modes, count)
            judgement = _until_steady(rounds, count, patience_seconds, tell)
    except Exception as error:  # a model may refuse in any way
        return uncalibrated(graph, error)
    if judgement is None:
        return Calibrated(graph, Contention(), rounds.refusals)
    return Calibrated(
        paced(graph, judgement.alone),
        judgement.contention,
        (*rounds.refusals, *judgement.warnings()),
    )


def uncalibrated(graph: LayerGraph, error: Exception) -> Calibrated:
    """The profile without contention, and a warning that says why."""
    return Calibrated(graph, Contention(), (_refusal("", error),))


def _refusal(of_what: str, error: Exception) -> str:
    told = str(error) or type(error).__name__
    return f"contention{of_what} was not measured: {told.splitlines()[0]}"


def _until_steady(
    rounds: _Rounds, count: int, patience_seconds: float, tell: Advance
) -> Judgement | None:
    """Measure rounds until they are steady; ``None`` if no pipeline could be run."""
    judgement, measured = None, list[Round]()
    begun = time.perf_counter()
    for number in range(1, _MOST_ROUNDS + 1):
        measured.append(rounds.measure())
        if not rounds.modes:
            return None
        judgement = Judgement(measured, count)
        spent = time.perf_counter() - begun
        tell(max(spent / patience_seconds, number / _MOST_ROUNDS))
        ends_late = spent * (number + 1) / number > patience_seconds
        if judgement.is_enough or (ends_late and number >= _LEAST_ROUNDS):
            break
    return judgement


class _Rounds:
    """Measures round by round; a mode that cannot be run is left out of the next ones.

    Attributes:
        modes: those that can be run.
    """

    def __init__(
        self, runner: Runner, graph: LayerGraph, modes: Sequence[Mode], count: int
    ) -> None:
        self.modes = list(modes)
        self._runner = runner
        self._graph = graph
        self._count = count
        self._plans: dict[Mode, Plan] = {}
        self._refused: dict[Mode, PenstockError] = {}
        self._reference = Reference()

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why some modes were not measured."""
        return tuple(
            _refusal(f" of {FAMILIES[mode]}", error) for mode, error in self._refused.items()
        )

    def measure(self) -> Round:
        """Measure one round."""
        before, first = Usage.now(), self._reference.seconds()
        alone = [self._alone()]
        laps: dict[Mode, Lap] = {}
        for mode in tuple(self.modes):
            try:
                ran = self._runner.run(self._plan(mode))
            except PenstockError as error:
                self._refused[mode] = error
                self.modes.remove(mode)
                continue
            alone.append(self._alone())
            laps[mode] = Lap(_mean(alone[-2:]), ran)
        last = self._reference.seconds()
        others = share_of_others(before, Usage.now())
        factors: dict[Mode, Factors] = {
            mode: factors_of(self._graph, self._plan(mode), lap) for mode, lap in laps.items()
        }
        return Round(factors, _mean(alone), others, max(first, last))

    def _alone(self) -> Alone:
        return self._runner.alone(self._graph.num_threads)

    def _plan(self, mode: Mode) -> Plan:
        if mode not in self._plans:
            self._plans[mode] = plan_of(self._graph, mode, self._count)
        return self._plans[mode]


def _mean(alone: Sequence[Alone]) -> Alone:
    return Alone(*map(statistics.fmean, zip(*alone, strict=True)))
