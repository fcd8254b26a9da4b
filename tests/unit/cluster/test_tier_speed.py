"""A tier's speed is that of training: both ways at once, with the sums of pages, beside compute."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

import pytest

from penstock.base.errors import FileError
from penstock.core.cluster import local
from penstock.core.cluster.local import measured_tier
from penstock.core.cluster.parts import Tier


@pytest.fixture(params=["disk", "host"])
def tier(request, tmp_path):
    return Tier(kind=request.param, folder=str(tmp_path) if request.param == "disk" else "")


@pytest.fixture
def looks(monkeypatch):
    """For each piece that is moved, (the thread, whether cores compute meanwhile)."""
    computing, seen = local._computing, []
    state = {"computes": False}

    @contextmanager
    def noted():
        with computing():
            state["computes"] = True
            yield
            state["computes"] = False

    original = local._sum

    def summed(memory):
        seen.append((threading.current_thread(), state["computes"]))
        original(memory)

    monkeypatch.setattr(local, "_computing", noted)
    monkeypatch.setattr(local, "_sum", summed)
    return seen


@pytest.mark.parametrize("computes", [True, False])
def test_both_ways_at_once_beside_compute(tier, looks, computes, tmp_path):
    timed = measured_tier(tier, computes_on_host=computes)
    assert 1e5 < timed.read_bytes_per_second < 1e12
    assert 1e5 < timed.write_bytes_per_second < 1e12
    in_lanes = [one for one in looks if one[0] is not threading.main_thread()]
    if tier.kind == "host" and not computes:  # nobody copies on the host
        assert not looks
        assert timed.read_bytes_per_second == timed.write_bytes_per_second == 5e9
        return
    assert len({thread for thread, _ in in_lanes}) == 2
    assert {state for _, state in in_lanes} == {computes}
    assert not list(tmp_path.iterdir())
    assert not [one for one in in_lanes if one[0].is_alive()]


def test_what_is_written_down_stays(tmp_path):
    known = Tier(folder=str(tmp_path / "absent"), read_bytes_per_second=3, write_bytes_per_second=4)
    assert measured_tier(known) == known
    half = measured_tier(Tier(folder=str(tmp_path), read_bytes_per_second=7))
    assert half.read_bytes_per_second == 7
    assert half.write_bytes_per_second > 0


def test_a_disk_that_fails_while_it_is_measured_is_told(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(FileError, match=r"cannot measure the tier in .*: Input/output error"):
        measured_tier(Tier(folder=str(tmp_path)))
    assert not list(tmp_path.iterdir())
