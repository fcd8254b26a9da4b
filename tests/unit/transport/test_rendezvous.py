"""Ranks meet in the job's store; here they are threads, and who keeps the store is a process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest
import torch.distributed as dist

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.transport.rendezvous import Process, Rendezvous, within

LONG_SECONDS = 60.0
KEEPER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sizes: tuple[int, ...]


def meet(store, rank, num_ranks, seconds=LONG_SECONDS):
    return Rendezvous(store, rank, num_ranks, "building", seconds, "wait longer")


def together(*parts):
    """What each part returns or raises; all run at the same time."""
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = [pool.submit(part) for part in parts]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "s"), 9)


def test_every_rank_gets_the_values_of_all_in_their_order(store):
    def part(rank):
        meeting = meet(store, rank, 3)
        offers = meeting.exchange(Offer(f"rank {rank}", (rank, 7)), Offer, "to say its name")
        return offers, meeting.exchange([rank] * rank, list[int], "to count")

    expected = [Offer(f"rank {rank}", (rank, 7)) for rank in range(3)], [[], [1], [2, 2]]
    for _ in range(3):  # one meeting after the other, in one store
        assert together(*(lambda rank=rank: part(rank) for rank in range(3))) == [expected] * 3


def test_who_does_not_come_is_named_with_what_it_was_asked_for(store):
    def part(rank):
        meeting = meet(store, rank, 4, seconds=0.5)
        return meeting.exchange(rank, int, "to say its name")

    for error in together(lambda: part(0), lambda: part(2)):
        assert isinstance(error, DeadlineError)
        assert "rank 1 and rank 3 did not come to say its name within 0.5 s" in str(error)
        assert str(error).endswith("or wait longer")


def test_a_rank_that_fails_says_why_at_once_though_another_is_still_to_come():
    store = dist.HashStore()

    def fails():
        meeting = meet(store, 1, 3)
        meeting.exchange(1, int, "to begin")
        meeting.fail("rank 1 failed: no such optimizer")
        meeting.fail("rank 1 failed: a second reason")

    def waits(rank):
        meeting = meet(store, rank, 3)
        meeting.exchange(rank, int, "to begin")
        if rank == 2:
            return None  # and does not come again
        start = time.monotonic()
        with pytest.raises(PeerError, match="cancelled because rank 1 failed: no such optimizer"):
            meeting.exchange(rank, int, "to go on")
        return time.monotonic() - start

    seconds = together(fails, lambda: waits(0), lambda: waits(2))[1]
    assert seconds < LONG_SECONDS / 2


@pytest.mark.skipif(Process.numbered(os.getpid()) is None, reason="no /proc")
def test_a_rank_whose_process_has_ended_is_named_at_once():
    child = subprocess.Popen(["sleep", "60"])
    other = Process.numbered(child.pid)
    assert other.where == Process.numbered(os.getpid()).where
    assert not other.is_gone()
    assert Process(other.where, child.pid, other.started - 1).is_gone()  # another has its number
    store = dist.HashStore()

    def part(rank):
        meeting = meet(store, rank, 2)
        if rank == 1:
            meeting._own = other
        meeting.exchange(rank, int, "to begin")
        if rank == 1:
            child.kill()
            child.wait()
            return None
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"rank 1 is gone .* before it came to go on"):
            meeting.exchange(rank, int, "to go on")
        return time.monotonic() - start

    seconds, _ = together(lambda: part(0), lambda: part(1))
    assert seconds < LONG_SECONDS / 2


class Trap:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize(
    "text",
    [
        pickle.dumps(Trap(), protocol=0).decode(),
        '{"process": null, "value": {"name": "x"}}',
        '{"process": null, "value": {"name": "x", "sizes": [1], "more": 1}}',
        '{"process": null, "value": {"name": "x", "sizes": ["1"]}}',
    ],
)
def test_what_is_no_value_of_the_kind_is_refused_and_never_run(text):
    store = dist.HashStore()
    store.set("penstock/building/1/1/1", text)
    store.add("penstock/building/1/1/num arrived", 1)
    with pytest.raises(RunError, match="rank 1 came to say its name with something else"):
        meet(store, 0, 2).exchange(Offer("rank 0", ()), Offer, "to say its name")


@contextmanager
def keeper():
    """(process, store): a process that keeps a store, and this one's end of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        yield process, dist.TCPStore("127.0.0.1", port, is_master=False)
    finally:
        process.kill()
        process.communicate()


def test_a_store_whose_keeper_is_stopped_or_gone_hangs_nobody(monkeypatch):
    monkeypatch.setattr("penstock.engine.transport.rendezvous._ANSWER_SECONDS", 1.0)
    with keeper() as (process, store):
        stopped, killed = (meet(store, 0, 2, seconds=0.5) for _ in range(2))
        killed._store = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"rank 0, building: the store .* did not answer"):
            stopped.exchange(0, int, "to begin")
        stopped.fail("nobody hears it")
        with pytest.raises(DeadlineError, match="did not answer"):
            stopped.exchange(0, int, "to begin")
        process.kill()
        process.wait()
        with pytest.raises(PeerError, match=r"kept the job's store .* is gone"):
            killed.exchange(0, int, "to begin")


def test_work_that_fails_within_its_time_raises_its_own_error():
    assert within(LONG_SECONDS, lambda: 7) == 7
    with pytest.raises(KeyError, match="lost"):
        within(LONG_SECONDS, lambda: {}["lost"])


def begin(store, rank, num_ranks=2, seconds=LONG_SECONDS):
    return Rendezvous(store, rank, num_ranks, "building", seconds, "wait longer", anew=True)


def test_an_attempt_finds_nothing_of_those_before_it(store):
    """torchrun keeps the store: a rank may have been killed anywhere, and another one not."""
    begin_alone = [lambda: begin(store, 1, seconds=0.2), lambda: begin(store, 0).fail("old news")]
    for left_alone in begin_alone:
        together(left_alone)

    def part(rank):
        meeting = begin(store, rank)
        come = meeting.exchange(rank, int, "to begin")
        meeting.store.set(f"address of {rank}", "new")
        return come, meeting.exchange(rank + 10, int, "to go on")

    for _ in range(3):
        assert together(lambda: part(0), lambda: part(1)) == [([0, 1], [10, 11])] * 2
    assert not store.check(["address of 0"])


def test_who_waits_for_an_attempt_to_begin_names_who_is_missing(store):
    (error,) = together(lambda: begin(store, 1, seconds=0.3))
    assert isinstance(error, DeadlineError)
    assert "rank 0 did not come to begin within 0.3 s" in str(error)

    def part(rank):
        return begin(store, rank, 3, seconds=0.5).exchange(rank, int, "to begin")

    for error in together(lambda: part(0), lambda: part(2)):
        assert "rank 1 did not come to begin within 0.5 s" in str(error)
