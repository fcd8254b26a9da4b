"""Processes that trace a model each by itself hear of it where one has traced another graph."""

from __future__ import annotations

from pathlib import Path

from tests.kit.launch import forked

JOB = Path(__file__).parent / "jobs" / "traced_alike.py"


def test_a_rank_that_has_traced_another_graph_is_named_to_all_and_nothing_is_trained():
    reports = forked(JOB, 2).reports
    for different, _ in reports.values():
        # Weights, names and kinds of the layers are the same: only the graph tells.
        assert "rank 1 has traced layer 'second' to another graph than rank 0" in different
        assert (
            "build it with the same settings and on the same kind of device on every rank"
            in different
        )
        assert different.startswith("ModelError: ")
    alike = [same for _, same in reports.values()]
    assert float(alike[0]) == float(alike[1])
