"""Which rounds of a calibration count, the contention they show, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

from penstock.core.graph import Contention, Mode
from penstock.training.profiler.alone import Alone
from penstock.training.profiler.together.disturbance import QUIET_SHARE, SLOWER_REFERENCE
from penstock.training.profiler.together.fit import Factors
from penstock.training.profiler.together.runs import FAMILIES

STEADY = 0.02
"""A spread that is small enough to stop measuring."""

_UNSTEADY = 0.04
"""A spread from which on people are warned."""

_LEAST_ROUNDS = 3
_LEAST_QUIET = 2
_OR_LONGER = ", or for longer (patience_seconds=…, --patience)"


class Round(NamedTuple):
    """What was measured in one round, in which the layers alone and every pipeline had a turn.

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

    def __init__(self, rounds: Sequence[Round], num_ranks: int) -> None:
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
        return len(self._quiet) >= _LEAST_ROUNDS and self._largest_spread <= STEADY

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
        """What people should know about the figures, and what helps."""
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
    def _counted(self) -> Sequence[Round]:
        return self._rounds if self.by_cpu else self._quiet

    @property
    def _others_share(self) -> float:
        return statistics.median(measured.others_share for measured in self._rounds)

    @property
    def _largest_spread(self) -> float:
        return max(map(self._spread, FAMILIES))

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
