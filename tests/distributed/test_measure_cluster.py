"""Measuring the links of real processes: under torchrun, without it, and over shaped networks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import shaped_network
from benchmarks.network.shaped_network import ShapedNetwork
from penstock import Cluster
from penstock.core.cluster import Topology
from tests.distributed.jobs.measuring import LONG_SECONDS
from tests.kit.command_line import refused
from tests.kit.launch import forked, torchrun
from tests.kit.paths import ROOT

JOB = Path(__file__).parent / "jobs" / "measuring.py"
MODULE = ("-m", "penstock.cli", "measure-cluster")
QUICKLY = ("--seconds", "0.2", "--deadline", "60")


def run(*arguments, **environment):
    """The verb without torchrun."""
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return subprocess.run(
        [sys.executable, *MODULE, *arguments],
        cwd=ROOT, env={**outside, **environment}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


@pytest.mark.soak  # the processes that it starts itself are tried in make test
def test_under_torchrun_rank_0_writes_the_cluster(tmp_path):
    path = tmp_path / "cluster.json"
    job = torchrun(MODULE[0], 3, *MODULE[1:], *QUICKLY, "-o", str(path), reports=False)
    assert job.returncode == 0, job.output
    cluster = Cluster.load(path)
    assert [device.name for device in cluster.devices] == ["cpu0", "cpu1", "cpu2"]
    assert cluster.memory_bytes == Cluster.local(kind="cpu").memory_bytes
    topology = Topology(cluster)
    for pair in ((0, 1), (0, 2), (1, 2)):
        link = topology.link(*pair)
        assert 0 < link.latency_seconds < 1
        assert 1e6 < link.bytes_per_second < 1e12
        assert "cpu{} – cpu{}".format(*pair) in job.output
    assert job.output.count("all-reduce of") == 1  # other ranks say nothing


def test_without_torchrun_it_starts_processes_here(tmp_path):
    path = tmp_path / "cluster.json"
    done = run("--ranks", "2", *QUICKLY, "--json", "-o", str(path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cluster"] == json.loads(path.read_text())
    (link,) = found["links"]
    assert link["between"] == ["cpu0", "cpu1"]
    measured = {"bytes_per_second": link["bytes_per_second"]}
    assert found["cluster"]["link"] == {"latency_seconds": link["latency_seconds"], **measured}
    for one in found["all_reduces"]:
        ring = one["num_bytes"] / link["bytes_per_second"] + 2 * link["latency_seconds"]
        assert one["predicted_seconds"] == pytest.approx(ring)
        assert one["measured_seconds"] > 0
    assert len(found["all_reduces"]) >= 4


def test_one_process_alone_is_told_how():
    told = refused("measure-cluster")
    assert "torchrun --nproc-per-node" in told
    assert "--ranks" in told


def test_a_job_whose_ranks_do_not_come_is_given_up():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run("--deadline", "2", **place)
    assert done.returncode == 1
    assert "rank 0 did not meet the others within 2 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_ends_is_missed_by_all():
    job = forked(JOB, 3, "kill")
    assert set(job.reports) == {0, 2}, job.output
    for rank, report in job.reports.items():
        assert report["kind"] == "PeerError", report
        assert re.match(rf"rank {rank}, measuring", report["message"])
        assert "is gone" in report["message"]


def test_a_rank_that_is_silent_is_given_up():
    job = forked(JOB, 3, "stall")
    for rank in (0, 2):
        report = job.reports[rank]
        assert report["kind"] in ("DeadlineError", "PeerError")  # who waits on whom is a race
        assert report["seconds"] < LONG_SECONDS / 2
    assert "DeadlineError" in {job.reports[rank]["kind"] for rank in (0, 2)}


def namespaces():
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if f"penstock-{os.getpid()}-" in line]


reason = shaped_network.missing()
shaped = pytest.mark.skipif(reason is not None, reason=str(reason))


@shaped
@pytest.mark.soak
def test_a_shaped_rate_is_found_again(tmp_path):
    path = tmp_path / "cluster.json"
    with ShapedNetwork(3, 50) as network:
        assert len(namespaces()) == 4
        assert network.run([sys.executable, *MODULE, *QUICKLY, "-o", str(path)]) == 0
    assert namespaces() == []
    cluster = Cluster.load(path)
    assert len(cluster.devices) == 3
    assert all(device.memory_bytes for device in cluster.devices)  # a host each
    assert not cluster.groups
    # A token bucket lets a burst through, and of short messages it is a larger part.
    assert cluster.link.bytes_per_second == pytest.approx(50e6 / 8, rel=0.25)


@shaped
def test_ranks_that_share_a_card_are_known_by_sending_at_once(tmp_path):
    path, said = tmp_path / "cluster.json", tmp_path / "said.toml"
    said.write_text(
        """
        [[servers]]
        count = 2
        devices = 2
        link = "100MB/s"
        link_kind = "shared-memory"
        card = "1Gbit/s"
        """
    )
    command = [sys.executable, *MODULE, *QUICKLY, "-o", str(path), "--against", str(said)]
    with ShapedNetwork(2, 50) as network:
        assert network.run(command, per_host=2) == 0
    topology = Topology(Cluster.load(path))
    first, *_ = topology.cards
    assert topology.cards[0] == topology.cards[1] >= 0
    assert topology.cards[2] == topology.cards[3] != first
    # A token bucket lets a burst through, and of short messages it is a larger part.
    assert topology.card(first).bytes_per_second == pytest.approx(50e6 / 8, rel=0.3)


@shaped
def test_a_failing_command_leaves_nothing_behind():
    # Rank 1 fails; the others would wait for an hour.
    command = ["sh", "-c", 'test "$RANK" = 1 && exit 7; sleep 3600']
    with ShapedNetwork(2, 50) as network:
        assert network.run(command) == 7
    assert namespaces() == []


@shaped
def test_a_network_that_cannot_be_built_leaves_nothing_behind():
    with (
        pytest.raises(RuntimeError, match="tbf"),
        ShapedNetwork(2, 1e-9),
    ):
        pass
    assert namespaces() == []
