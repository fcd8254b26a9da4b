"""Layers of a graph with branches on devices, found by trial and error under a budget of scores.

``space`` puts layers into groups and knows which maps of groups to devices are pipelines. A placer
draws such maps and has them scored: ``learned`` is the one that learns, ``climbing`` moves one
group at a time. Both are a ``Placer`` and write into a ``ledger``, which keeps to a budget of
scores and remembers the best. The caller brings the score, for example a simulated step under
``stage_costs``.
"""

from penstock.planning.partition.placement.climbing import greedy_placement
from penstock.planning.partition.placement.learned import learned_placement
from penstock.planning.partition.placement.ledger import Placed, Placer
from penstock.planning.partition.placement.space import Score, Stages, make_space, stage_costs

__all__ = [
    "Placed",
    "Placer",
    "Score",
    "Stages",
    "greedy_placement",
    "learned_placement",
    "make_space",
    "stage_costs",
]
