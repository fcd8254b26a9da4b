"""Sums by all-reduce, in buckets that holders begin in one order; the library is played here."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

from penstock.base.errors import DeadlineError, PeerError
from penstock.engine.reduce import delegated
from penstock.engine.reduce.delegated import AllReducer
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.sums import GradientSums
from penstock.engine.transport import ThreadExchange
from penstock.planning.plans.summing import Summing
from tests.unit.reduce.test_sums import (
    between_threads,
    complete,
    fill,
    folded,
    holders,
)

NUM_RANKS = 3


class Library:
    """Sums what ranks, which are threads, have begun as their first, second, … bucket."""

    def __init__(self):
        self.begun = {rank: [] for rank in range(NUM_RANKS)}
        self.news = threading.Condition()

    def all_reduce(self, bucket, *, group, async_op):
        assert async_op
        with self.news:
            self.begun[group].append((bucket, bucket.clone()))
            self.news.notify_all()
        return Work(self, group, len(self.begun[group]) - 1)


class Work(dist.Work):
    """One rank's part in summing one bucket."""

    def __init__(self, library, rank, number):
        super().__init__()
        self.library, self.rank, self.number = library, rank, number

    def wait(self, timeout):
        begun = self.library.begun.values()
        with self.library.news:
            assert self.library.news.wait_for(
                lambda: all(len(own) > self.number for own in begun), timeout.total_seconds()
            )
            same = [own[self.number] for own in begun]
            assert len({(given.dtype, given.shape) for _, given in same}) == 1
            total = same[0][1].clone()
            for _, given in same[1:]:
                total += given
            same[self.rank][0].copy_(total)
        return True


@pytest.fixture(name="library")
def fixture_library(monkeypatch):
    library = Library()
    monkeypatch.setattr(dist, "all_reduce", library.all_reduce)
    monkeypatch.setattr(delegated.groups, "lend", lambda *_: None)
    monkeypatch.setattr(delegated, "_BUCKET_BYTES", 256)
    return library


def sums_of(copies, transports):
    return [
        GradientSums(
            rank, [SharedWeights(0, (*range(NUM_RANKS),), frozenset({0}), own)], transport,
            everywhere=True, make=partial(AllReducer, summing=Summing(), made=[[rank]]),
        )
        for rank, (own, transport) in enumerate(zip(copies, transports, strict=True))
    ]  # fmt: skip


def test_every_holder_has_the_sums_of_all_buckets(library):
    copies = holders(NUM_RANKS)
    sums = sums_of(copies, between_threads(NUM_RANKS))
    for number, (missing, averages) in enumerate([(0.0, False), (0.5, False), (0.0, True)]):
        fill(copies, number, missing)
        expected = folded(copies, sum(range(1, NUM_RANKS + 1)) if averages else 1)
        for own in library.begun.values():
            own.clear()
        complete(sums, number, averages=averages)
        for parameters in copies:
            for parameter, wanted in zip(parameters, expected, strict=True):
                assert (parameter.grad is None) == (wanted is None)
                assert wanted is None or torch.equal(parameter.grad, wanted)
        for own in library.begun.values():
            sizes = [bucket.nbytes for bucket, _ in own]
            assert max(sizes) <= 256
            assert sum(sizes) == sum(parameter.nbytes for parameter in copies[0])


@pytest.mark.parametrize(
    ("says", "kind", "told"),
    [
        (
            "Timed out waiting 100ms",
            DeadlineError,
            "rank 1 or 2 did not answer within 0.1 s; see",
        ),
        ("Connection closed by peer", PeerError, "sum of gradients .*: rank 1 or 2 is gone"),
    ],
)
def test_what_the_library_says_is_told_with_who_is_missing(says, kind, told, library, monkeypatch):
    def wait(*_):
        raise RuntimeError(says)

    copies = holders(NUM_RANKS)
    sums = sums_of(copies, ThreadExchange(NUM_RANKS, deadline_seconds=0.1).transports)
    fill(copies, 0)
    monkeypatch.setattr(Work, "wait", wait)
    for rank in range(NUM_RANKS):
        sums[rank].begin(0, averages=False)
        sums[rank].hand_in(0)
    with pytest.raises(kind, match=told):
        sums[0].complete()


def test_a_bucket_that_cannot_even_begin_is_told(library, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("Connection reset by peer")

    copies = holders(NUM_RANKS)
    sums = sums_of(copies, between_threads(NUM_RANKS))
    fill(copies, 0)
    monkeypatch.setattr(dist, "all_reduce", refuse)
    sums[1].begin(0, averages=False)
    with pytest.raises(PeerError, match="summing gradients: rank 0 or 2 is gone"):
        sums[1].hand_in(0)


def test_a_reducer_needs_its_group_until_it_is_closed(library):
    transport = between_threads(NUM_RANKS)[0]
    shared = SharedWeights(0, (*range(NUM_RANKS),), frozenset({0}), holders(NUM_RANKS)[0])
    reducer = AllReducer(0, shared, transport, Summing(), [[0]])
    assert not reducer.closed
    reducer.close(failed=False)
    assert reducer.closed  # the group goes when all ranks build the next pipeline
