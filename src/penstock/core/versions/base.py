"""``BasePolicy``: the questions that all policies answer; ``Place``: the stage they are about."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal

from penstock.base.values import Value, one_of
from penstock.core.schedule.op import Activations

Updates = Literal["microbatch", "minibatch"]


@dataclass(frozen=True)
class Place:
    """Where a stage stands in a pipeline.

    Attributes:
        stage: its number, from 0.
        num_stages: how many the pipeline has.
        warm_up: forwards that it (each of its replicas) runs before its first backward.
        per_update: microbatches (of each replica) that make one update.
    """

    stage: int
    num_stages: int
    warm_up: int
    per_update: float = 1.0


class BasePolicy(Value, frozen=True, tag_field="policy"):
    """The questions that every policy answers."""

    asynchronous: ClassVar[bool] = True
    stashes: ClassVar[bool] = True
    """Whether a backward reads what its forward read; otherwise, the weights of its own time."""
    activations: ClassVar[Activations] = "own"
    """Which activations a backward goes through: its own forward's, or the newest of its stage."""
    ahead: ClassVar[int] = 1
    """How far forwards run ahead in the order of its schedule, as ``rounds.warm_up`` takes it."""
    family: ClassVar[str] = "pipedream"
    """The schedule that it usually runs on."""
    updates: Updates = "microbatch"

    def __post_init__(self) -> None:
        one_of("updates", self.updates, ("microbatch", "minibatch"))

    @property
    def name(self) -> str:
        """For people and files."""
        return str(self.__struct_config__.tag)

    def forward_version(self, round: int, newest: int, num_stages: int) -> int:
        """The version that a forward reads.

        Args:
            round: which update of the stage its gradient will be part of, from 0.
            newest: how many updates the stage has made so far.
            num_stages: how many the pipeline has.
        """
        return newest

    def delay(self, place: Place) -> float:
        """Updates between the version that a forward reads and the one that its gradient is applied
        to, in the steady state; a mean where microbatches of a minibatch read different ones."""
        return place.warm_up / place.per_update

    def damping(self, place: Place) -> float:
        """The factor of a stage's learning rates, because its gradients are old."""
        return 1.0

    def versions_held(self, place: Place) -> int:
        """The most versions of a stage's weights that are alive at once."""
        return ceil(place.warm_up / place.per_update) + 1

    def extra_copies(self, place: Place) -> int:
        """Further buffers as large as the weights that stay from update to update."""
        return 0
