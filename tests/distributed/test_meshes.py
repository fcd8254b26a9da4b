"""Meshes whose members are processes train what one device trains."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from tests.kit.accelerator import building
from tests.kit.examples import more
from tests.kit.launch import forked
from tests.kit.training import DEADLINE_SECONDS

JOB = Path(__file__).parent / "jobs" / "meshes.py"
REDUCERS = JOB.with_name("mesh_reducers.py")
SEQUENCES = JOB.with_name("sequences.py")
STATES = JOB.with_name("mesh_states.py")
FAULT = JOB.with_name("mesh_fault.py")

emulated = pytest.mark.skipif(bool(building.why_not()), reason=building.why_not() or "")


@pytest.mark.parametrize(
    ("schedule", "sizes", "transport", "where"),
    [
        more("1f1b", "2x1x2", "shared-memory", "cpu"),
        ("zb-h1", "1x1x2", "process-group", "cpu"),
        more("1f1b", "2x2x2", "shared-memory", "cpu"),
        more("1f1b", "2x2x2", "process-group", "cpu"),
        more("interleaved-1f1b", "2x1x2", "process-group", "cpu"),
        more("1f1b", "2,1", "shared-memory", "cpu"),
        more("1f1b", "1,2", "process-group", "cpu"),
        more("1f1b", "2,3", "shared-memory", "cpu"),
        pytest.param("zb-h1", "1x1x2", "auto", "emu", marks=[emulated, pytest.mark.soak]),
        pytest.param("1f1b", "2x1x2", "auto", "emu", marks=[emulated, pytest.mark.soak]),
        pytest.param("1f1b", "2x1x2", "shared-memory", "emu", marks=[emulated, pytest.mark.soak]),
        pytest.param("1f1b", "1,2", "auto", "emu", marks=[emulated, pytest.mark.soak]),
    ],
)
def test_a_mesh_of_processes_trains_as_one_device(schedule, sizes, transport, where):
    num_processes = (
        sum(map(int, sizes.split(","))) if "," in sizes else prod(map(int, sizes.split("x")))
    )
    job = forked(JOB, num_processes, schedule, sizes, transport, where)
    assert job.returncode == 0, job.output
    assert {number: report["differences"] for number, report in job.reports.items()} == {
        number: [] for number in range(num_processes)
    }


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("chain", "1x1x2"),
        more("chain", "2x1x2"),
        more("chain", "1x2x2"),
        more("chain", "1x1x4"),
        more("chain", "2x2x2"),
        more("Llama", "2x1x2"),
        more("Llama", "1x1x4"),
        more("Llama, tied", "2x1x2"),
        more("Llama", "2x2x2"),
    ],
)
def test_processes_share_positions_and_classes(model, sizes):
    num_processes = prod(map(int, sizes.split("x")))
    job = forked(SEQUENCES, num_processes, model, sizes)
    assert job.reports == {rank: [] for rank in range(num_processes)}, job.output


@pytest.mark.parametrize("ways", ["sharded", more("servers,all-reduce,sharded,owners")])
def test_copies_of_groups_sum_in_every_way(ways):
    job = forked(REDUCERS, 4, ways)
    assert job.reports == {rank: [] for rank in range(4)}, job.output


@pytest.mark.soak
def test_a_parameter_server_of_groups_is_a_group_of_processes():
    job = forked(REDUCERS, 6, "parameter-server")
    assert job.reports == {rank: [] for rank in range(6)}, job.output


@pytest.mark.parametrize("sizes", [more("2x1x2"), "1x1x2", more("1x1x3"), more("1x2x2")])
def test_weights_go_through_distributed_checkpoints(sizes):
    num_processes = prod(map(int, sizes.split("x")))
    job = forked(STATES, num_processes, sizes)
    assert job.reports == {rank: [] for rank in range(num_processes)}, job.output


@pytest.mark.parametrize("transport", ["shared-memory", more("process-group")])
def test_when_a_member_is_killed_the_others_hear_of_it(transport):
    job = forked(FAULT, 4, transport)
    assert set(job.reports) == {0, 1, 2}, job.output
    for report in job.reports.values():
        assert "rank 3" in report["told"], report
        assert report["seconds"] < DEADLINE_SECONDS / 2
