"""The planner beside brute force: small models on small clusters, run in every way there is.

Cases are new each time; a failure prints the seed of its case, which ``PENSTOCK_SEED`` brings back.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import count, islice
from math import inf

from benchmarks.planning.large_plans import deep_chain, flat_cluster
from penstock.base.units import format_seconds
from penstock.planning.planner.cuts import candidates
from penstock.planning.planner.limits import lacks_room
from penstock.planning.planner.memory_limits import MemoryLimits
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.recomputing import FEW_RECOMPUTED, recomputing
from penstock.planning.planner.task import Task
from tests.kit.brute_force import (
    any_that_fits,
    best_of_all,
    case_of_one_host,
    every_setting,
    fitting_with,
    small_case,
    uniform_layouts,
)
from tests.kit.examples import TIMES
from tests.kit.planning import all_cuts, attempt

CASES = 15 if TIMES == 1 else 20 * TIMES
MOST_LAYERS = 5 if TIMES == 1 else 6
WITHIN = 1.01
"""No prediction tells plans this close apart."""
NEAR = 1.05
"""Where only a few ways to recompute are simulated."""


def test_a_plan_is_within_one_percent_of_the_best_there_is_and_none_is_refused_that_fits(seed):
    slower, refused = {}, []
    for number in range(seed, seed + CASES):
        graph, cluster, microbatches = small_case(number, MOST_LAYERS)
        task = Task(graph, cluster, microbatches)
        found = attempt(graph, cluster, microbatches=microbatches)
        if found is None:
            refused += [number] if any_that_fits(task) else []
            continue
        best = best_of_all(task, below=found.step_seconds / WITHIN)
        if best is not None:
            slower[number] = f"{format_seconds(found.step_seconds)} for {best.seconds:.4g}: {best}"
    assert not refused
    assert not slower


def test_what_lacks_room_or_takes_too_long_was_worth_nothing(seed):
    """Offers are passed over for lack of room only where nothing fits, and cuts that may take so
    long are the best ones of all where these do."""
    for number in range(seed, seed + 2 * TIMES):
        graph, cluster, microbatches = small_case(number, 4)
        task = Task(graph, cluster, microbatches)
        for setting in every_setting(task):
            terms = {own.name: getattr(setting, own.name) for own in fields(Offer)}
            found = candidates(task, setting)
            assert not (found and lacks_room(task, setting.devices, setting.copies)), number
            for candidate in found:
                promised = Offer(**terms).least_seconds(task)
                assert promised <= candidate.seconds * (1 + 1e-9), number
            least = min((candidate.seconds for candidate in found), default=inf)
            again = candidates(task, setting, most_seconds=least)
            assert min((own.seconds for own in again), default=inf) <= least, number


def test_a_deep_model_with_little_memory_is_never_slower_than_equal_pipelines():
    graph, cluster = deep_chain(40), flat_cluster(8, 500)
    layouts = uniform_layouts(Task(graph, cluster, 32))
    best = min(layout.seconds for layout in layouts if layout.fits)
    assert attempt(graph, cluster, microbatches=32).step_seconds <= best * WITHIN


def test_a_plan_is_never_slower_than_equal_pipelines_of_equally_many_layers(seed):
    for number in range(seed, seed + 10 * TIMES):
        graph, cluster, microbatches = small_case(number, 8)
        layouts = uniform_layouts(Task(graph, cluster, microbatches))
        best = min((layout.seconds for layout in layouts if layout.fits), default=inf)
        found = attempt(graph, cluster, microbatches=microbatches)
        took = inf if found is None else found.step_seconds
        assert took <= best * WITHIN, number


def test_what_ranks_of_one_memory_recompute_is_what_takes_least(seed):
    """No rank's own limit says which of all stages is to run twice. (Of breadth-first, whose stages
    wait longest for their backwards, it is not always among those that are looked at.)"""
    slower, num_recomputing = {}, 0
    for number in count(seed):
        if number >= seed + 10 * TIMES and num_recomputing:
            break
        task, settings = case_of_one_host(number)
        several = (own for own in settings if not own.is_single)
        for setting in (own for own in several if own.family != "breadth-first"):
            memory = MemoryLimits(task, setting)
            for cuts in islice(all_cuts(task.num_layers, setting.num_stages), 2):
                best = min(
                    (own.seconds for own in fitting_with(task, setting, memory, cuts)), default=inf
                )
                found = recomputing(task, setting, cuts, most=FEW_RECOMPUTED)
                least = min((candidate.seconds for candidate in found), default=inf)
                num_recomputing += len(found) > 1
                if least > best * NEAR:
                    slower[number, setting.family, cuts] = least / best
    assert not slower


def test_cuts_for_ranks_of_one_memory_are_near_the_best_of_all(seed):
    """With one stage per rank. The slowest stage is what cuts are chosen by; how long few
    microbatches take depends on more, so some are further away."""
    ratios = {}
    for number in range(seed, seed + 8 * TIMES):
        task, settings = case_of_one_host(number)
        for setting in (own for own in settings if own.is_single):
            memory = MemoryLimits(task, setting)
            best = min(
                (
                    own.seconds
                    for cuts in all_cuts(task.num_layers, setting.num_stages)
                    for own in fitting_with(task, setting, memory, cuts)
                ),
                default=inf,
            )
            least = min((own.seconds for own in candidates(task, setting)), default=inf)
            assert (least < inf) == (best < inf), number
            if best < inf:
                ratios[number, setting.family, setting.num_stages] = least / best
    far = {case: ratio for case, ratio in ratios.items() if ratio > NEAR}
    assert len(far) <= 0.3 * len(ratios), far
    assert max(ratios.values(), default=1.0) < 1.5, far
