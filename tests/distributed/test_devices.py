"""Jobs of several processes, each with an accelerator of its own, which are emulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Cluster
from penstock.base.errors import InputError
from penstock.core.cluster import local
from tests.docs.pages import blocks_of
from tests.kit.accelerator import building
from tests.kit.examples import more
from tests.kit.launch import forked
from tests.kit.paths import ROOT

JOB = Path(__file__).parent / "jobs" / "devices.py"

pytestmark = pytest.mark.skipif(bool(building.why_not()), reason=building.why_not() or "")


@pytest.mark.parametrize(
    ("num_ranks", "cases", "transport"),
    [
        (2, "two", "shared-memory"),
        more(2, "two", "process-group"),
        more(2, "two", "auto"),
        (2, "two linked", "auto"),
        (2, "library alone", "auto"),
        more(2, "library alone", "process-group"),
        more(2, "two linked", "shared-memory"),
        more(4, "four", "auto"),
    ],
)
def test_processes_train_on_their_own_devices_as_threads_on_the_cpu(num_ranks, cases, transport):
    done = forked(JOB, num_ranks, cases, transport, "emu")
    assert done.returncode == 0, done.output
    assert done.reports == {rank: [] for rank in range(num_ranks)}


def test_ranks_whose_devices_cannot_be_linked_say_why_and_train_all_the_same():
    done = forked(JOB, 2, "apart", "auto", "emu")
    assert done.returncode == 0, done.output
    assert done.reports == {0: [], 1: []}


def test_where_the_library_cannot_connect_devices_all_go_through_main_memory():
    done = forked(JOB, 2, "refused", "auto", "emu")
    assert done.returncode == 0, done.output
    why = "emulated could not connect them (rank 0: no route to the other device)"
    for told, *_ in done.reports.values():
        assert told.endswith(f"through main memory between ranks 0 and 1 ({why}).")
    assert [len(reports) for reports in (done.reports[0], done.reports[1])] == [2, 1]
    assert done.reports[0][1].startswith(f"tensors go through main memory, which is slower: {why}")


def test_a_rank_that_fails_with_tensors_under_way_leaves_nothing_behind():
    done = forked(JOB, 2, "failing", "auto", "emu")
    assert done.returncode == 0, done.output
    for (told,) in done.reports.values():
        assert "rank 1 failed" in told or "stage 1" in told
        assert "boom" in told


def test_no_host_waits_where_tensors_go_straight_to_the_other_device():
    done = forked(JOB, 2, "waits", "auto", "emu")
    assert done.returncode == 0, done.output
    for counts in done.reports.values():
        assert counts["bytes"] > 0
        assert counts["reads"] == counts["waits"] == counts["connected"] == 0


def test_what_was_sent_is_given_back_though_nothing_comes_from_the_other_rank():
    """A library need not tell that something is over before it was waited for."""
    done = forked(JOB, 2, "one way", "auto", "emu")
    assert done.returncode == 0, done.output
    for taken in done.reports.values():
        assert taken[2] == taken[1]


def test_a_host_waits_for_what_it_hands_over_in_main_memory_and_for_nothing_else():
    done = forked(JOB, 2, "waits", "shared-memory", "emu")
    assert done.returncode == 0, done.output
    for counts in done.reports.values():
        assert counts["bytes"] == counts["reads"] == 0
        assert 0 < counts["waits"] <= 8 * 4  # steps, and messages in each


@pytest.fixture
def plugged_in(tmp_path, monkeypatch):
    """Other processes find the devices as torch finds what is not its own: by an entry point."""
    plugin = tmp_path / "emulated-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(
        "[torch.backends]\nemu = tests.kit.accelerator.devices:register\n"
    )
    folders = (tmp_path, ROOT, ROOT / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # none that are real


def test_a_cluster_has_the_accelerators_that_torch_knows(plugged_in, monkeypatch):
    monkeypatch.setattr(local, "accelerators_of_loaded_torch", lambda: None)  # as where it is not
    cluster = Cluster.local(kind="gpu")
    assert [device.name for device in cluster.devices] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert {device.kind for device in cluster.devices} == {"gpu"}
    (memory_bytes,) = {device.memory_bytes for device in cluster.devices}
    assert memory_bytes > 2**30
    assert len(Cluster.local(3, kind="gpu").devices) == 3
    with pytest.raises(InputError, match=r"5 accelerators are asked for, but .* know of 4"):
        Cluster.local(5, kind="gpu")


@pytest.mark.soak
def test_links_of_accelerators_without_a_library_of_their_own_are_those_of_main_memory(plugged_in):
    """As long as messages between processes go through it."""
    command = ("-m", "penstock.cli", "measure-cluster", "-p", "2", "--seconds", "0.1", "--json")
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env=outside, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    devices = json.loads(done.stdout)["cluster"]["devices"]
    assert [device["kind"] for device in devices] == ["cpu", "cpu"]


@pytest.mark.soak
def test_the_first_script_of_the_readme_runs_on_accelerators_as_it_stands(plugged_in, tmp_path):
    block = next(block for block in blocks_of("README.md") if block.language == "python")
    told = "\nprint('trained on', loss.device, [d.kind for d in plan.devices])\n"
    script = tmp_path / "script.py"
    script.write_text(block.text + told)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained on emu:3 ['gpu', 'gpu', 'gpu', 'gpu']\n")
    assert (tmp_path / "measured.svg").exists()
