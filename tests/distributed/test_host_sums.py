"""Servers and all-reduce sum inside hosts first, in processes that believe to be on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.launch import forked
from tests.kit.reducing import served

JOB = Path(__file__).parent / "jobs" / "host_sums.py"
TWO_HOSTS = [[0, 0, 1, 1]]
UNEVEN = [[0, 0, 0, 1, 1]]
SWITCHES = [[0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1]]


def run(case, levels, servers=((), ())):
    addresses, pids = servers
    words = json.dumps(levels), ",".join(addresses), ",".join(map(str, pids))
    return forked(JOB, len(levels[0]), case, *words)


@pytest.mark.parametrize(
    ("levels", "num_servers"),
    [(UNEVEN, 2), pytest.param(SWITCHES, 1, marks=pytest.mark.soak)],
)
def test_servers_sum_in_the_order_of_the_tree_while_they_die(levels, num_servers):
    with served(num_servers) as servers:
        job = run("servers", levels, servers)
    assert job.reports == {rank: [] for rank in range(len(levels[0]))}, job.output


@pytest.mark.parametrize(
    "levels", [TWO_HOSTS, pytest.param([[0, 0, 0, 1]], marks=pytest.mark.soak)]
)
def test_all_reduce_sums_inside_hosts_first(levels):
    job = run("all-reduce", levels)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


@pytest.mark.parametrize(
    ("way", "victim"),
    [("servers", 3), pytest.param("servers", 2, marks=pytest.mark.soak), ("all-reduce", 1)],
)
def test_a_rank_that_is_killed_in_a_host_ends_the_sum_for_all(way, victim):
    job = run(f"killed {way} {victim}", TWO_HOSTS)
    assert set(job.reports) == {0, 1, 2, 3} - {victim}, job.output
    for kind, text, *left in job.reports.values():
        assert (kind, left) == ("PeerError", []), text
    assert any(f"rank {victim}" in text for _, text in job.reports.values()), job.output
