"""The offers of processes that build a pipeline: alike in all but the plan, which is rank 0's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from penstock.base.errors import InputError, ModelError
from penstock.base.units import count_of
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.planning.plans import Plan


class _BuildOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pipeline that a rank would build.

    Attributes:
        model: fingerprint of its model.
        traced: what its model was traced as, if it was: a digest of all layers'.
        seed: the seed of its random layers.
        plan: as JSON; only rank 0's counts, so that only rank 0 tells it.
        attempt: the name that rank 0 has given to this pipeline.
        settings: arguments of ``Pipeline`` that must be alike, as text.
    """

    model: str
    traced: str
    seed: int
    plan: str | None
    attempt: str
    settings: dict[str, str]


class Agreed(NamedTuple):
    """The plan, seed and name of rank 0, which all ranks take."""

    plan: Plan
    seed: int
    attempt: str


def agree(
    meeting: Rendezvous,
    plan: Plan,
    model: str,
    seed: int,
    attempt: str,
    settings: dict[str, str],
    traced: dict[str, str],
) -> Agreed:
    """Rank 0's plan and seed, on every process: each profiles and plans a little differently.

    Args:
        meeting: where all processes meet.
        plan: this process's.
        model: fingerprint of this process's model.
        seed: this process's.
        attempt: what this process would call the pipeline.
        settings: its arguments that must be alike everywhere, as text by their names.
        traced: digests of the graphs of the layers of a model that was traced, by their names.

    Raises:
        ModelError: the processes have built different models, or traced them otherwise.
        InputError: their settings differ.
        PeerError, DeadlineError: another rank did not come.
    """
    own = _BuildOffer(
        model, _digest(traced), seed, None if meeting.rank else plan.to_json(), attempt, settings
    )
    offers = meeting.exchange(own, _BuildOffer, "to its Pipeline")
    others = [rank for rank, offer in enumerate(offers) if offer.model != offers[0].model]
    if others:
        raise ModelError(
            f"rank {others[0]} has built another model than rank 0; build the same one everywhere"
        )
    if any(offer.traced != offers[0].traced for offer in offers):
        # All have seen it, so all come; who has thousands of layers tells of them only now.
        asked = "to say what it has traced"
        raise _other_graph(meeting.exchange(traced, dict[str, str], asked))
    for rank, offer in enumerate(offers):
        for name, value in offers[0].settings.items():
            if offer.settings.get(name) != value:
                raise InputError(
                    f"{name} is {value} on rank 0, but {offer.settings.get(name)} on rank {rank}; "
                    "give Pipeline the same on every rank"
                )
    first = offers[0]
    return Agreed(Plan.from_json(first.plan or "", "rank 0's plan"), first.seed, first.attempt)


def _digest(traced: Mapping[str, str]) -> str:
    return blake2b(msgspec.json.encode(traced), digest_size=8).hexdigest()


def _other_graph(traced: Sequence[Mapping[str, str]]) -> ModelError:
    """The error where the first rank that differs has traced its model otherwise than rank 0."""
    first = traced[0]
    rank, other = next((rank, other) for rank, other in enumerate(traced) if other != first)
    odd = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    where = f"layer {odd[0]!r}" if odd else "the order of the layers"
    rest = f" (and {count_of(len(odd) - 1, 'more layer')})" if len(odd) > 1 else ""
    return ModelError(
        f"rank {rank} has traced {where} to another graph than rank 0{rest}, so stages would not "
        "compute one model; build it with the same settings and on the same kind of device on "
        "every rank, with the same version of torch, and profile it with inputs of the same shapes"
    )
