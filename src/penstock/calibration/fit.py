"""By how much ranks of one machine are slower than their layers alone."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from penstock.calibration.runs import FAMILIES, NUM_ROUNDS, Run, Runner
from penstock.cluster import Cluster
from penstock.cluster.local import usable_cores
from penstock.errors import PenstockError
from penstock.graph import Contention, LayerGraph, Mode
from penstock.planner import Plan, plan
from penstock.profiler import Sample, device_of
from penstock.run.joining import several_processes
from penstock.spine import spine_of

_MOST_RANKS = 8
_MICROBATCHES_PER_RANK = 4
_FACTORS = [0.1 * 1.002**power for power in range(3500)]  # up to about 100
_LONG_SECONDS = 15.0
_FAR_APART = 0.25


class Calibrated(NamedTuple):
    """What was found, and what could not be."""

    contention: Contention
    warnings: tuple[str, ...] = ()


def num_ranks(model: nn.Module, sample: Sample, num_threads: int, asked: int | None) -> int:
    """How many ranks shall compete; 0 where that would tell nothing.

    Args:
        model: with a spine.
        sample: one microbatch.
        num_threads: of each rank.
        asked: by the user; by default as many as there are cores for.
    """
    if device_of(model, sample.inputs).type != "cpu" or several_processes():
        return 0
    wanted = min(usable_cores() // num_threads, _MOST_RANKS) if asked is None else asked
    count = min(wanted, len(spine_of(model)))
    return count if count > 1 else 0


def calibrate(
    runner: Runner, graph: LayerGraph, count: int, tell: Callable[[int], None]
) -> Calibrated:
    """Run pipelines of a copy of the model, and see by how much they are slower than simulated.

    Of each mode, the schedule in ``FAMILIES`` is run. Its factor for updates is what these took
    over what the profile says; that for passes is the one with which the simulator gives the step
    that was measured.

    Args:
        runner: of the copy.
        graph: the model's profile.
        count: of the pipelines' ranks.
        tell: called with how many runs have ended.
    """
    # Without updates no pipeline goes without a flush.
    modes = [mode for mode in FAMILIES if mode != "stream" or runner.updates]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            runs, warnings = _measure(runner, graph, modes, count, tell)
        return Calibrated(_fitted(graph, runs, count), warnings)
    except Exception as error:  # a model may refuse in any way
        return uncalibrated(error)


def uncalibrated(error: Exception) -> Calibrated:
    """Nothing, with the reason."""
    return Calibrated(Contention(), (_warning("", error),))


def _measure(
    runner: Runner,
    graph: LayerGraph,
    modes: Sequence[Mode],
    count: int,
    tell: Callable[[int], None],
) -> tuple[dict[Mode, Run], tuple[str, ...]]:
    runs: dict[Mode, Run] = {}
    failed: dict[Mode, Exception] = {}
    begun = time.perf_counter()
    # In turns, so that a noisy machine is noisy for all of them.
    for number, (turn, mode) in enumerate(product(range(NUM_ROUNDS), modes), start=1):
        if turn and time.perf_counter() - begun > _LONG_SECONDS:
            break
        try:
            if mode not in failed:
                runs.setdefault(mode, Run(_plan(graph, FAMILIES[mode], count)))
                runner.run(runs[mode])
        except PenstockError as error:
            failed[mode] = error
            runs.pop(mode, None)
        tell(number)
    warnings = [_warning(f" of {FAMILIES[mode]}", error) for mode, error in failed.items()]
    return runs, (*warnings, *_disagreements(runs))


def _disagreements(runs: dict[Mode, Run]) -> Iterator[str]:
    for mode, run in runs.items():
        if run.disagreement > _FAR_APART:
            yield (
                f"contention of {FAMILIES[mode]}: one of its runs took {run.disagreement:.0%} "
                "longer than the other; was the machine busy?"
            )


def _warning(of_what: str, error: Exception) -> str:
    told = str(error) or type(error).__name__
    return f"contention{of_what} was not measured: {told.splitlines()[0]}"


def _plan(graph: LayerGraph, family: str, count: int) -> Plan:
    return plan(
        graph,
        Cluster.local(count, kind="cpu"),
        microbatches=_MICROBATCHES_PER_RANK * count,
        schedule=family,
        stages=count,
        recompute="never",
    )


def _fitted(graph: LayerGraph, runs: dict[Mode, Run], count: int) -> Contention:
    updates = {mode: _of_updates(run) for mode, run in runs.items()}
    passes = {mode: _of_passes(run, updates[mode], graph.op_seconds) for mode, run in runs.items()}
    whole, update = passes.get("whole", 1.0), updates.get("whole", 1.0)
    return Contention(
        whole=whole,
        split=passes.get("split", whole),
        stream=passes.get("stream", whole),
        update=update,
        stream_update=updates.get("stream", update),
        num_ranks=count if runs else 0,
    )


def _of_updates(run: Run) -> float:
    planned = sum(stage.update_seconds for stage in run.plan.stages)
    return run.update_seconds / planned if planned else 1.0


def _of_passes(run: Run, updates: float, op_seconds: float) -> float:
    """With which factor the simulated step takes as long as the measured one."""

    def foreseen(factor: float) -> float:
        return _slower(run.plan, factor, updates, op_seconds).step_seconds

    return _FACTORS[bisect_left(_FACTORS[:-1], run.step_seconds, key=foreseen)]


def _slower(plan: Plan, passes: float, updates: float, op_seconds: float) -> Plan:
    """What the planner would say of the same stages."""

    def longer(seconds: float) -> float:
        return passes * (seconds - op_seconds) + op_seconds

    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                forward_seconds=longer(stage.forward_seconds),
                backward_input_seconds=longer(stage.backward_input_seconds),
                backward_weight_seconds=passes * stage.backward_weight_seconds,
                split_seconds=longer(stage.split_seconds),
                update_seconds=updates * stage.update_seconds,
            )
            for stage in plan.stages
        ),
    )
