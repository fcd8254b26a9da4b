"""From what a user hands in to a pipeline that is ready to run, whoever drives it then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from penstock.engine.device.memory import keep_freed_pages, return_freed_pages
from penstock.engine.model.spine import names_a_spine, spine_fingerprint, spine_of
from penstock.engine.run.assembly import Assembly, Running, assemble
from penstock.engine.run.drive.driver import Deadlines
from penstock.engine.run.drive.joining import TransportName, joined
from penstock.engine.run.outside import Outside
from penstock.engine.run.recipe import Recipe
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import num_processes


class Built(NamedTuple):
    """A pipeline that is ready to run.

    Attributes:
        model: the one that was given; captured, if it names no spine.
        parts: what runs it.
        recipe: how it trains.
        outside: watches what of the model no stage runs.
    """

    model: nn.Module
    parts: Assembly
    recipe: Recipe
    outside: Outside


def build(
    model: nn.Module,
    plan: Plan,
    transport: TransportName,
    deadlines: Deadlines,
    described: Callable[[nn.Module], tuple[Recipe, Running]],
) -> Built:
    """Meet the other processes if there are any, hold a plan against a model, and build the ranks.

    Args:
        transport: how messages travel between ranks.
        deadlines: how long ranks wait for each other.
        described: says how to train and how to run this model, in layers; what it raises, the other
            processes hear.

    Raises:
        ModelError: the model cannot be cut, or the plan is for another one.
        InputError: a number of processes that the plan does not have.
        PeerError, DeadlineError: another process failed or did not come.
    """
    with joined(transport, deadlines.start.seconds, num_processes(plan)) as meeting:
        if plan.spill is None:
            keep_freed_pages()
        else:  # kept pages would be missing in a budget
            return_freed_pages()
        model = in_layers(model, plan)
        layers = spine_of(model)
        plan.check_model([layer.name for layer in layers], spine_fingerprint(layers))
        outside = Outside(model, layers)
        outside.check()
        recipe, running = described(model)
        parts = assemble(model, layers, plan, recipe, running, meeting)
        return Built(model, parts, recipe, outside)


def in_layers(model: nn.Module, plan: Plan) -> nn.Module:
    """The model itself if it names its spine, or if nobody knows how the plan cuts it; otherwise
    captured as it was for the plan.

    Raises:
        ModelError: it cannot be traced any more.
    """
    if not isinstance(model, nn.Module) or names_a_spine(model):
        return model
    # Tracing takes seconds to import, and few models need it.
    from penstock.engine.tracing.entrance import as_planned

    return as_planned(model, plan) or model
