"""Strangers at a summation server: silent, slow, many, and on a machine that has nothing left."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import ExitStack
from itertools import pairwise

import pytest

from penstock.base.errors import RunError
from penstock.core.summation import frames, listener
from penstock.core.summation.frames import FrameHead, FrameKind, Member, greet, is_loopback, key_of
from penstock.core.summation.server import SummationServer
from tests.kit.waiting import until

KEY = key_of("a secret", "a job")
SECONDS = 60.0


@pytest.fixture
def told():
    return queue.SimpleQueue()


@pytest.fixture
def server(told):
    server = SummationServer("127.0.0.1", 0, KEY, told.put)
    yield server
    server.close()


def lets_in(server, place=0):
    """Whether a worker is welcome, which leaves again."""
    with socket.create_connection(server.address, SECONDS) as worker:
        greet(worker, Member(bytes(16), 0, place, 2), KEY)
    return True


def hear(told, words):
    while words not in (sentence := told.get(timeout=SECONDS)):
        pass
    return sentence


def test_silent_callers_are_limited_and_do_not_keep_workers_out(server, monkeypatch):
    monkeypatch.setattr(listener, "_MOST_CALLERS", 4)
    monkeypatch.setattr(frames, "GREETING_SECONDS", 10 * SECONDS)  # it is not that they are late
    threads = threading.active_count()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(server.address, SECONDS))
            for _ in range(40)
        ]
        assert lets_in(server)
        assert all(caller.recv(1) == b"" for caller in silent[:30])  # those were hung up on
        assert until(lambda: threading.active_count() <= threads + 4)


@pytest.mark.parametrize("known", [False, True], ids=["stranger", "one of another job"])
def test_a_greeting_has_one_deadline_however_slowly_it_comes(server, told, monkeypatch, known):
    monkeypatch.setattr(frames, "GREETING_SECONDS", 1.0)
    end = time.monotonic() + SECONDS
    with socket.create_connection(server.address, SECONDS) as slow:
        slow.settimeout(0.1)
        if known:
            slow.sendall(frames._MAGIC + bytes(16))
        drips = 0
        while time.monotonic() < end:
            try:
                slow.sendall(frames._MAGIC[drips : drips + 1] or b"x")
            except OSError:
                break  # hung up on
            drips = min(drips + 1, 7)
            time.sleep(0.3)  # more often than the deadline of a single wait
        else:
            pytest.fail("it was listened to without end")
    assert hear(told, "lost")


def test_a_worker_has_one_deadline_for_a_slow_server_too(monkeypatch):
    monkeypatch.setattr(frames, "GREETING_SECONDS", 0.5)
    here, there = socket.socketpair()
    ended = threading.Event()

    def drip():
        while not ended.wait(0.1):
            there.sendall(frames._MAGIC[:1])

    slow = threading.Thread(target=drip)
    slow.start()
    try:
        monkeypatch.setattr(frames, "_MAGIC", b"P" * 1000)
        with pytest.raises(TimeoutError):
            greet(here, Member(bytes(16), 0, 0, 2), KEY)
    finally:
        ended.set()
        slow.join()
        here.close()
        there.close()


def test_the_server_survives_that_there_are_no_threads(server, told, monkeypatch):
    with monkeypatch.context() as patch:

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with socket.create_connection(server.address, SECONDS) as unlucky:
            assert hear(told, "cannot let anybody in (can't start new thread)")
            assert unlucky.recv(1) == b""
    assert lets_in(server)


def test_the_server_survives_that_there_are_no_descriptors_and_does_not_spin(
    server, told, monkeypatch
):
    calls = []

    def accept(self):
        calls.append(time.monotonic())
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        assert lets_in(server)  # by the call of accept that was under way
        assert "cannot let anybody in (Too many open files)" in hear(told, "cannot")
        assert until(lambda: len(calls) >= 5)
    pauses = [after - before for before, after in pairwise(calls)]
    assert min(pauses) >= 0.5 * listener._BREATH_SECONDS
    assert lets_in(server, place=1)


def test_a_pace_that_cannot_be_ends_the_connection_with_one_sentence(server, told):
    with socket.create_connection(server.address, SECONDS) as worker:
        greet(worker, Member(bytes(16), 0, 0, 2), KEY)
        worker.sendall(FrameHead(FrameKind.PACE, start=2**64 - 1).packed())
        sentence = hear(told, "refused")
        assert "it asks for 18,446,744,073,709,551,615 bytes per second" in sentence
        worker.settimeout(SECONDS)
        while worker.recv(4096):
            pass
    assert lets_in(server)


def test_a_worker_without_a_thread_for_its_sums_is_refused(server, told, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("sums to"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert lets_in(server)
        assert "no thread left" in hear(told, "refused")
    assert lets_in(server)


def test_only_addresses_are_known_to_be_of_this_machine():
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["127.example.com", "127.0.0.1.nip.io", "10.0.0.1", "::", ""]))


def test_who_is_refused_is_told_why(server):
    with (
        socket.create_connection(server.address, SECONDS) as worker,
        pytest.raises(RunError, match="worker 7 of 2 cannot be"),
    ):
        greet(worker, Member(bytes(16), 0, 7, 2), KEY)
