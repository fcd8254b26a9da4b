"""What all placers share: a budget of scores, what they have seen, and what they find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from penstock.base.errors import InputError, PlanError
from penstock.core.graph import LayerGraph
from penstock.planning.partition.placement.space import Score, Space, Stages, make_space

_PATIENCE = 50
"""Draws per score of the budget, after which a placer gives up finding anything new."""


@dataclass(frozen=True)
class Placed:
    """The best that a placer found.

    Attributes:
        stages: names of layers, stage by stage, in the order in which devices hand data on.
        seconds: its score.
        history: the best score so far, after each one.
        num_draws: placements drawn, valid or not, new or not.
        num_invalid: how many of these were no pipeline.
    """

    stages: Stages
    seconds: float
    history: tuple[float, ...]
    num_draws: int
    num_invalid: int


@dataclass
class Ledger:
    """Scores within a budget, and remembers them: a placement is paid for once.

    Attributes:
        score: what is made small.
        budget: how often it may be asked.
    """

    score: Score
    budget: int
    known: dict[Stages, float] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    best: Stages = ()
    num_draws: int = 0
    num_invalid: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be asked, or asking has long been of no use."""
        spent = len(self.history) >= self.budget
        return spent or self.num_draws >= _PATIENCE * self.budget

    @property
    def num_stale(self) -> int:
        """Draws of placements that were known."""
        return self.num_draws - self.num_invalid - len(self.history)

    def ask(self, stages: Stages) -> float | None:
        """The score of a placement; ``None`` if the placement is new and the budget is spent."""
        self.num_draws += 1
        if stages not in self.known:
            if len(self.history) >= self.budget:
                return None
            seconds = self.known[stages] = self.score(stages)
            least = self.history[-1] if self.history else inf
            if seconds < least or not self.best:
                self.best = stages
            self.history.append(min(least, seconds))
        return self.known[stages]

    def refuse(self) -> None:
        """Count a draw that is no pipeline."""
        self.num_draws += 1
        self.num_invalid += 1

    @property
    def placement(self) -> Placed:
        """The best so far.

        Raises:
            PlanError: nothing valid was drawn.
        """
        if not self.best:
            raise PlanError(
                f"none of {self.num_draws} placements drawn was a pipeline; raise num_samples"
            )
        return Placed(
            self.best, self.known[self.best], tuple(self.history), self.num_draws, self.num_invalid
        )


Search = Callable[[Space, Ledger, int], None]
"""(groups of layers, ledger, seed): draws placements and has them scored until the ledger is spent.
"""


@dataclass(frozen=True)
class Placer:
    """A way to look for a good placement with a budget of scores.

    Attributes:
        search: what it draws; the same seed draws the same.
    """

    search: Search

    def __call__(
        self,
        graph: LayerGraph,
        num_devices: int,
        score: Score,
        *,
        num_samples: int = 400,
        seed: int = 0,
        max_groups: int = 40,
        tiny: float = 0.005,
    ) -> Placed:
        """The best placement that it drew.

        Args:
            graph: the profile, which may have branches (``Layer.inputs``) and skips.
            num_devices: at most so many stages.
            score: seconds of a step with given stages, for example a simulated makespan; less is
                better. Called once per placement, with pipelines only.
            num_samples: how many different placements to score.
            seed: of the draws; the same seed gives the same placement.
            max_groups: layers are put together until there are no more.
            tiny: and until no group has less than this share of the compute.

        Returns:
            The best one as stages, in the order in which devices hand data on, and how it was
            found.

        Raises:
            InputError: a count below 1.
            PlanError: fewer layers than devices, or no draw was a pipeline.
        """
        if num_samples < 1:
            raise InputError(f"num_samples is {num_samples}, but must be ≥ 1")
        space = make_space(graph, num_devices, max_groups=max_groups, tiny=tiny)
        ledger = Ledger(score, num_samples)
        self.search(space, ledger, seed)
        return ledger.placement
