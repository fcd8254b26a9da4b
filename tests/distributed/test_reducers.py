"""Every way to sum trains as threads do, and says what is wrong when somebody dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.launch import forked
from tests.kit.reducing import served

JOB = Path(__file__).parent / "jobs" / "reducers.py"


PARTS = [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]
"""(stage, part) of the pieces of three checkpoints, with copies 1-2, 3 and 2-1."""


def run(case, servers, num_ranks=3):
    addresses, pids = servers
    return forked(JOB, num_ranks, case, ",".join(addresses), ",".join(map(str, pids)))


@pytest.fixture(scope="module")
def servers():
    with served(2) as started:
        yield started


def test_all_ways_train_as_threads_do_while_servers_die():
    with served(2) as servers:
        job = run("same", servers)
    assert job.reports == {0: [], 1: [], 2: []}, job.output


def test_ranks_may_come_to_their_stages_in_any_order(servers):
    job = run("both ways", servers, 2)
    assert job.reports == {0: [], 1: []}, job.output


@pytest.mark.soak
def test_every_way_sums_what_is_on_accelerators(accelerator, servers):
    job = run("devices", servers, 2)
    assert job.reports == {0: [], 1: []}, job.output


def test_every_way_sums_what_devices_send_to_each_other(accelerator, servers):
    """By a library with the manners of NCCL; one stage has two copies."""
    job = run("linked devices", servers, 3)
    assert job.reports == {rank: [] for rank in range(3)}, job.output


def test_devices_of_a_host_hand_each_other_gradients_before_servers_sum(accelerator, servers):
    """Two devices add on a device, and a third one is elsewhere: the order of the ranks."""
    job = run("near devices", servers, 3)
    assert job.reports == {rank: [] for rank in range(3)}, job.output


def test_hosts_sum_what_devices_send_to_each_other(accelerator):
    job = run("hosts of linked devices", ([], []), 4)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


def test_processes_add_in_levels_as_threads_do():
    job = run("hosts", ([], []), 4)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


@pytest.mark.parametrize("way", ["owners", pytest.param("sharded", marks=pytest.mark.soak)])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_is_killed_on_a_host_is_missed_by_name(way, victim):
    before = {*Path("/dev/shm").iterdir()}
    job = run(f"killed {way}:0011 {victim}", ([], []), 4)
    assert set(job.reports) == {0, 1, 2, 3} - {victim}, job.output
    for kind, text in job.reports.values():
        assert kind == "PeerError" and f"rank {victim} is gone" in text, text
    assert not [path for path in {*Path("/dev/shm").iterdir()} - before if "penstock" in path.name]


@pytest.mark.soak
def test_a_parameter_server_updates_what_devices_send_to_it(accelerator):
    job = run("served linked devices", ([], []), 4)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


@pytest.mark.soak
def test_a_parameter_server_updates_what_is_on_accelerators(accelerator):
    job = run("served devices", ([], []))
    assert job.reports == {rank: [] for rank in range(3)}, job.output


def test_checkpoints_of_shards_go_on_in_any_layout():
    job = run("checkpoint", ([], []))
    named = [f"stage-{stage}.part-{part}.safetensors" for stage, part in PARTS]
    assert job.reports == dict.fromkeys(range(3), named), job.output


def test_a_server_of_another_job_refuses(servers):
    job = run("stranger", servers)
    assert set(job.reports) == {0, 1, 2}, job.output
    kinds, texts = zip(*job.reports.values(), strict=True)
    assert {*kinds} <= {"RunError", "PeerError"}
    assert any("the secret or the name of the job is another one" in text for text in texts)


def test_parameter_servers_update_as_copies_do_and_checkpoints_fit_both():
    job = run("parameter servers", ([], []), 4)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


def test_stale_updates_are_what_their_journal_says():
    job = run("stale", ([], []))
    assert job.reports == {rank: [] for rank in range(3)}, job.output


@pytest.mark.parametrize(
    ("way", "victim"),
    [
        pytest.param("servers", 1, marks=pytest.mark.soak),
        pytest.param("parameter-server", 2, marks=pytest.mark.soak),
        pytest.param("parameter-server", 1, marks=pytest.mark.soak),
        ("stale", 1),
        pytest.param("stale", 2, marks=pytest.mark.soak),
        pytest.param("all-reduce", 1, marks=pytest.mark.soak),
        pytest.param("sharded", 1, marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_is_killed_is_missed_by_all(servers, way, victim):
    job = run(f"killed {way} {victim}", servers)
    assert set(job.reports) == {0, 1, 2} - {victim}, job.output
    for kind, text in job.reports.values():
        assert kind == "PeerError", text
