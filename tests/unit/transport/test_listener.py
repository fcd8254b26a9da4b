"""Processes of one host find each other; here they are threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.base.errors import DeadlineError, RunError
from penstock.core.cluster.local import host_identity
from penstock.engine.transport import SharedMemoryExchange
from penstock.engine.transport.listener import RankListener


def connect_and_say(address, words):
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(address)
    if words:
        stranger.send(words)
    return stranger


def test_who_does_not_know_the_secret_is_not_let_in():
    first, second = RankListener(2), RankListener(2)
    credentials = {0: first.credentials, 1: second.credentials}
    rank_one = (1).to_bytes(8, "big")
    strangers = [
        connect_and_say(first.credentials.address, words)
        for words in (b"\0" * 16 + rank_one, rank_one, b"x")
    ]
    with ThreadPoolExecutor() as pool:
        zero = pool.submit(first.connections, 0, {1: credentials[1]}, 5)
        one = pool.submit(second.connections, 1, {0: credentials[0]}, 5)
    zero.result()[1].send(b"hello")
    assert one.result()[0].recv(10) == b"hello"
    for stranger in strangers:
        assert stranger.recv(10) == b""
        stranger.close()
    for connection in (zero.result()[1], one.result()[0]):
        connection.close()
    first.close()
    second.close()


def test_nobody_waits_for_a_guest_that_says_nothing():
    listeners = [RankListener(3) for _ in range(3)]
    silent = [connect_and_say(listeners[0].credentials.address, b"") for _ in range(2)]
    hosts = {rank: listener.credentials for rank, listener in enumerate(listeners)}

    def meet(rank):
        others = {other: it for other, it in hosts.items() if other != rank}
        return listeners[rank].connections(rank, others, 30)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(meet, range(3)))
    assert [sorted(connections) for connections in found] == [[1, 2], [0, 2], [0, 1]]
    for stranger in silent:
        assert stranger.recv(1) == b""  # let go in the end
        stranger.close()
    for connections in found:
        for connection in connections.values():
            connection.close()
    for listener in listeners:
        listener.close()


def as_another_user(function):
    """The exit status of a child process that belongs to nobody, and does this."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setuid(65534)
            status = function()
        finally:
            os._exit(status)
    return child


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_turned_away_though_it_knows_the_secret():
    listener, own = RankListener(2), RankListener(2)
    address, secret = listener.credentials

    def come():
        try:
            stranger = connect_and_say(address, secret + (1).to_bytes(8, "big"))
            stranger.settimeout(30)
            return stranger.recv(10) != b""
        except ConnectionError:
            return False  # turned away before it had said anything

    with ThreadPoolExecutor() as pool:
        child = as_another_user(come)
        zero = pool.submit(listener.connections, 0, {1: own.credentials}, 60)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        guest = own.connections(1, {0: listener.credentials}, 60)[0]
    guest.send(b"hello")
    host = zero.result()[1]
    assert host.recv(10) == b"hello"
    guest.close()
    host.close()
    listener.close()
    own.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_address_that_another_user_has_taken_is_not_told_the_secret():
    before = RankListener(2)
    credentials = before.credentials
    before.close()
    told, tell = os.pipe()

    def listen():
        thief = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thief.bind(credentials.address)
        thief.listen()
        os.write(tell, b"ready")
        heard, _ = thief.accept()
        heard.settimeout(30)
        return heard.recv(100) != b""

    child = as_another_user(listen)
    assert os.read(told, 5) == b"ready"
    own = RankListener(2)
    with pytest.raises(PermissionError, match="another user has taken"):
        own.connections(1, {0: credentials}, 30)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    own.close()
    os.close(told)
    os.close(tell)


def test_a_rank_that_does_not_come_is_named_and_nothing_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    listeners = [RankListener(3) for _ in range(3)]
    others = {rank: listeners[rank].credentials for rank in (0, 2)}
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"rank 1, connecting .*: rank 2 did not come"):
        listeners[1].connections(1, others, 0.1)
    assert time.monotonic() - start < 200
    for listener in listeners:
        listener.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_ended_before_it_came_is_told_apart_from_a_late_one():
    exchange = SharedMemoryExchange(2, deadline_seconds=5)
    exchange._listeners[0].close()
    with pytest.raises(RunError, match=r"rank 1 could not connect .* has ended before it came"):
        exchange.transport(1)


def test_a_lone_rank_needs_nobody():
    transport = SharedMemoryExchange(1, deadline_seconds=5).transport(0)
    assert transport.ranks == frozenset()
    transport.flush()
    transport.close("done")


def test_all_pairs_of_many_ranks_are_connected():
    """Children have closed the listeners of others; threads would close them for each other."""
    listeners = [RankListener(6) for _ in range(6)]
    credentials = {rank: listener.credentials for rank, listener in enumerate(listeners)}
    found = {}

    def meet(rank):
        others = {other: it for other, it in credentials.items() if other != rank}
        found[rank] = listeners[rank].connections(rank, others, 10)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in credentials]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, connections in found.items():
        for other, connection in connections.items():
            connection.send(f"{rank} to {other}".encode())
    for rank, connections in found.items():
        for other, connection in connections.items():
            assert connection.recv(100).decode() == f"{other} to {rank}"
            connection.close()
    for listener in listeners:
        listener.close()


def test_one_host_has_one_name():
    assert host_identity() == host_identity()
    assert socket.gethostname() in host_identity()
