"""Seats: ranks of the plan, and the devices of each."""

from __future__ import annotations

import pytest

from penstock.base.errors import DeadlineError
from penstock.engine.run.seating import MeshTransport, RankSeat
from penstock.engine.transport import Edge
from penstock.engine.transport.base import Patience, overdue


class Silent:
    """Channels on which nothing ever comes."""

    patience = Patience(5.0)

    def recv(self, edge, number, waiting):
        raise DeadlineError(overdue(waiting, edge.source, self.patience))


def told(seat, edge):
    transport = MeshTransport(Silent(), seat, None, {})
    with pytest.raises(DeadlineError) as caught:
        transport.recv(edge, 0, f"rank {edge.target}, waiting for rank {edge.source}'s weights")
    return str(caught.value)


def test_an_error_on_a_mesh_counts_in_both_ways_and_says_so():
    """ "rank 1, waiting for the weights that rank 2 has updated: rank 5 did not answer"."""
    on_mesh = told(RankSeat(1, 1, (2, 2, 2)), Edge(2, 1, 0))
    assert on_mesh.startswith(
        "rank 1, waiting for rank 2's weights (ranks of the plan; counted by devices, rank 3 waits "
        "for rank 5): rank 5 did not answer within 5 s"
    )


def test_where_every_rank_has_one_device_there_is_one_way_to_count():
    alone = told(RankSeat(1), Edge(2, 1, 0))
    assert alone.startswith("rank 1, waiting for rank 2's weights: rank 2 did not answer")
