"""What processes that build a pipeline must have alike, and whose plan counts."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.base.errors import InputError, ModelError
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.planning.plans import Plan


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank would build.

    Attributes:
        model: fingerprint of its model.
        seed: the seed of its random layers.
        plan: as JSON; only rank 0's counts, so that only rank 0 tells it.
        attempt: the name that rank 0 has given to this pipeline.
        settings: arguments of ``Pipeline`` that must be alike, as text.
    """

    model: str
    seed: int
    plan: str | None
    attempt: str
    settings: dict[str, str]


class Agreed(NamedTuple):
    """What all ranks take from rank 0."""

    plan: Plan
    seed: int
    attempt: str


def agree(
    meeting: Rendezvous, plan: Plan, model: str, seed: int, attempt: str, settings: dict[str, str]
) -> Agreed:
    """Rank 0's plan and seed, on every process: each profiles and plans a little differently.

    Args:
        meeting: where all processes meet.
        plan: this process's.
        model: fingerprint of this process's model.
        seed: this process's.
        attempt: what this process would call the pipeline.
        settings: its arguments that must be alike everywhere, as text by their names.

    Raises:
        ModelError: the processes have built different models.
        InputError: their settings differ.
        PeerError, DeadlineError: another rank did not come.
    """
    own = _Offer(model, seed, None if meeting.rank else plan.to_json(), attempt, settings)
    offers = meeting.exchange(own, _Offer, "to its Pipeline")
    others = [rank for rank, offer in enumerate(offers) if offer.model != offers[0].model]
    if others:
        raise ModelError(
            f"rank {others[0]} has built another model than rank 0; build the same one everywhere"
        )
    for rank, offer in enumerate(offers):
        for name, value in offers[0].settings.items():
            if offer.settings.get(name) != value:
                raise InputError(
                    f"{name} is {value} on rank 0, but {offer.settings.get(name)} on rank {rank}; "
                    "give Pipeline the same on every rank"
                )
    first = offers[0]
    return Agreed(Plan.from_json(first.plan or "", "rank 0's plan"), first.seed, first.attempt)
