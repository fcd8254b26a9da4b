"""Sums over sockets: bits, bytes, and what happens when somebody dies, lies or is a stranger."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import DeadlineError, InputError, PeerError, RunError
from penstock.core.summation.adding import add_to
from penstock.core.summation.exchange import SumExchange
from penstock.core.summation.frames import (
    HEAD_BYTES,
    FrameHead,
    FrameKind,
    Member,
    greet,
    key_of,
    parse_address,
    receive,
)
from penstock.core.summation.server import SummationServer
from penstock.core.summation.split import MOST_PART_BYTES, Owner, divide
from tests.kit.waiting import until

SECONDS = 60.0
KEY = key_of("a secret", "a job")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Ring:
    """Workers in this process, and servers, all connected."""

    def __init__(self, stack, num_workers, num_servers=0, rates=(), part_bytes=0):
        self.inside = [self._server(stack) for _ in range(num_workers)]
        self.spares = [self._server(stack) for _ in range(num_servers)]
        rates = rates or (0.0,) * (num_workers + num_servers)
        names = [f"rank {n}" for n in range(num_workers)] + [
            f"server {n}" for n in range(num_servers)
        ]
        self.owners = [
            Owner(name, server.address, KEY, rate)
            for name, server, rate in zip(names, self.inside + self.spares, rates, strict=True)
        ]
        self.workers = [
            SumExchange(Member(bytes(16), 0, place, num_workers), self.owners, own, part_bytes)
            for place, own in enumerate(self.inside)
        ]
        stack.callback(lambda: [worker.close() for worker in self.workers])

    @staticmethod
    def _server(stack):
        server = SummationServer("127.0.0.1", 0, KEY)
        stack.callback(server.close)
        return server

    def sum(self, number, given, delays=None):
        """Every worker's sums of a round, by dtype."""
        sums = [{dtype: np.empty_like(own[dtype]) for dtype in own} for own in given]

        def work(place):
            time.sleep(delays[place] if delays else 0.0)
            self.workers[place].begin(number, given[place], sums[place])
            self.workers[place].wait(SECONDS, f"rank {place}")

        with ThreadPoolExecutor(len(given)) as pool:
            list(pool.map(work, range(len(given))))
        return sums


@pytest.fixture
def ring():
    with ExitStack() as stack:
        yield lambda *args, **options: Ring(stack, *args, **options)


def given_by(num_workers, counts, seed):
    """Tensors that cannot be added without rounding, and the same as numbers: of each worker."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        {
            dtype: (100 ** torch.randn(count, generator=generator, dtype=torch.float64)).to(kind)
            for dtype, (kind, count) in enumerate(zip(DTYPES, counts, strict=True))
            if count
        }
        for _ in range(num_workers)
    ]
    return tensors, [{dtype: numbers_of(one) for dtype, one in own.items()} for own in tensors]


def numbers_of(tensor):
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def folded(tensors, dtype):
    total = tensors[0][dtype].clone()
    for own in tensors[1:]:
        total += own[dtype]
    return total


def check(tensors, sums):
    for own in sums:
        for dtype, numbers in own.items():
            assert np.array_equal(numbers, numbers_of(folded(tensors, dtype)), equal_nan=dtype < 3)


@settings(max_examples=25, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    rates=st.lists(st.floats(1e8, 1e9), min_size=6, max_size=6),
    num_servers=st.integers(0, 2),
    counts=st.tuples(*[st.integers(0, 600)] * 4).filter(any),
    part_bytes=st.integers(8, 1000),
    delays=st.permutations([0.0, 0.002, 0.004, 0.006]),
    seed=st.integers(0, 99),
)
def test_sums_are_the_left_fold_whoever_owns_what_and_comes_when(
    num_workers, rates, num_servers, counts, part_bytes, delays, seed
):
    with ExitStack() as stack:
        ring = Ring(stack, num_workers, num_servers, rates[: num_workers + num_servers], part_bytes)
        for number in range(2):
            tensors, given = given_by(num_workers, counts, seed + number)
            check(tensors, ring.sum(number, given, delays))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_short_numbers_are_added_as_torch_adds_them(kind):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 1 << 16), generator=generator, dtype=torch.int16)
    first, second = bits.view(kind).unbind()
    total = numbers_of(first.clone())
    add_to(total, numbers_of(second), DTYPES.index(kind))
    expected, ours = first + second, torch.from_numpy(total.view(np.int16)).view(kind)
    assert torch.equal(expected.isnan(), ours.isnan())
    assert torch.equal(expected.nan_to_num(7.0), ours.nan_to_num(7.0))


@pytest.mark.parametrize(("n", "k"), [(2, 0), (3, 0), (3, 1), (4, 2), (3, 3)])
def test_workers_send_the_bytes_of_the_formula(ring, n, k):
    count, part = 60_000, 4096
    made = ring(n, k, (1e8,) * (n + k), part)
    tensors, given = given_by(n, (count, 0, 0, 0), 1)
    check(tensors, made.sum(0, given))
    num_bytes = 4 * count
    shares = divide(num_bytes, (1e8,) * (n + k), n, 0).shares
    for place, worker in enumerate(made.workers):
        worker.close()  # its server sends what it still has
        made.inside[place].close(SECONDS)
        formula = num_bytes + (n - 2) * shares[place]
        heads = HEAD_BYTES * n * (num_bytes / part + n + k)
        assert formula - 4 * n <= worker.sent + made.inside[place].sent <= formula + heads + part
        assert worker.received <= num_bytes - shares[place] + heads + part
    for spare, share in zip(made.spares, shares[n:], strict=True):
        assert spare.sent <= n * share + heads + part


def test_when_a_server_dies_the_update_is_summed_again(ring):
    rates = (1e8,) * 5
    made = ring(3, 2, rates, part_bytes=2048)
    tensors, given = given_by(3, (50_000, 100, 0, 0), 2)
    check(tensors, made.sum(0, given))
    for number, spare in enumerate(made.spares, start=1):
        sums = [{dtype: np.empty_like(own[dtype]) for dtype in own} for own in given]
        for place in range(2):
            made.workers[place].begin(number, given[place], sums[place])
        spare.close()  # while it has numbers of two workers and waits for the third's
        made.workers[2].begin(number, given[2], sums[2])
        for place, worker in enumerate(made.workers):
            worker.wait(SECONDS, f"rank {place}")
        check(tensors, sums)
    assert {worker.missing for worker in made.workers} == {0b11}
    check(tensors, made.sum(5, given))
    # Who is left answers faster than before.
    paces = [divide(1000, rates, 3, missing).rate(0) for missing in (0, 0b11)]
    assert paces[0] < paces[1]
    assert until(lambda: paces_of(made.inside[0]) == [round(paces[1])] * 2)


def paces_of(server):
    """Bytes per second at which a server answers its workers."""
    name = struct.Struct("<Q")
    told = [one.getsockopt(socket.SOL_SOCKET, 47, name.size) for one in server._connections]
    return [name.unpack(one)[0] for one in told]


def test_a_server_that_one_worker_cannot_reach_is_left_out_by_all(ring):
    made = ring(2, 1, part_bytes=1024)
    tensors, given = given_by(2, (20_000, 0, 0, 0), 3)
    sums = [{0: np.empty_like(own[0])} for own in given]
    made.workers[1]._connections[2].shutdown(socket.SHUT_RD)  # the network fails it
    for place in range(2):
        made.workers[place].begin(0, given[place], sums[place])
    for place in range(2):
        made.workers[place].wait(SECONDS, f"rank {place}")
    check(tensors, sums)
    assert made.workers[0].missing == made.workers[1].missing == 0b1


def test_a_worker_that_is_ahead_helps_those_that_lack_a_sum(ring, monkeypatch):
    """One worker has all of a round and is in the next when the server dies; another has not."""
    made = ring(2, 1, part_bytes=1024)
    ahead, behind = made.workers
    rounds = [given_by(2, (20_000, 0, 0, 0), seed) for seed in (3, 4)]
    sums = [[{0: np.empty_like(own[0])} for own in given] for _, given in rounds]
    take = behind.take
    monkeypatch.setattr(
        behind, "take", lambda head, numbers, place: place == 2 or take(head, numbers, place)
    )
    ahead.begin(0, rounds[0][1][0], sums[0][0])
    behind.begin(0, rounds[0][1][1], sums[0][1])
    ahead.wait(SECONDS, "rank 0")
    ahead.begin(1, rounds[1][1][0], sums[1][0])
    made.spares[0].close()
    behind.wait(SECONDS, "rank 1")
    behind.begin(1, rounds[1][1][1], sums[1][1])
    for worker in made.workers:
        worker.wait(SECONDS, "a rank")
    for (tensors, _), own in zip(rounds, sums, strict=True):
        check(tensors, own)


@pytest.mark.parametrize("how", ["closes", "dies"])
def test_a_worker_that_leaves_is_named_to_all(ring, how):
    made = ring(3, 1)
    tensors, given = given_by(3, (1000, 0, 0, 0), 4)
    check(tensors, made.sum(0, given))
    sums = [{0: np.empty_like(own[0])} for own in given]
    for place in range(2):
        made.workers[place].begin(1, given[place], sums[place])
    if how == "closes":
        made.workers[2].close()
    else:
        for connection in made.workers[2]._connections.values():
            connection.shutdown(socket.SHUT_RDWR)
        made.inside[2].close()
    for place in range(2):
        with pytest.raises(PeerError, match="rank 2 has left"):
            made.workers[place].wait(SECONDS, f"rank {place}")


def test_who_leaves_after_the_last_round_takes_no_sum_along(ring):
    for _ in range(5):
        made = ring(3, 1, part_bytes=512)
        tensors, given = given_by(3, (20_000, 0, 0, 0), 5)
        sums = [{0: np.empty_like(own[0])} for own in given]

        def work(place, made=made, given=given, sums=sums):
            made.workers[place].begin(0, given[place], sums[place])
            made.workers[place].wait(SECONDS, f"rank {place}")
            made.workers[place].close()
            made.inside[place].close(SECONDS)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        check(tensors, sums)


def test_a_silent_owner_is_named_at_the_deadline(ring):
    made = ring(2, 1)
    _, given = given_by(2, (1000, 0, 0, 0), 6)
    made.workers[0].begin(0, given[0], {0: np.empty_like(given[0][0])})
    with pytest.raises(DeadlineError, match=r"rank 0.*server 0.* did not answer within 0\.2 s"):
        made.workers[0].wait(0.2, "rank 0, waiting")


@contextmanager
def connected(server, key=KEY, **changes):
    with socket.create_connection(server.address, 5.0) as connection:
        member = Member(bytes(16), 0, 0, 1)
        greet(connection, member._replace(**changes), key)
        yield connection


@pytest.mark.parametrize("told", [("another", "a job"), ("a secret", "another job"), ("", "")])
def test_a_stranger_is_refused(told):
    said = []
    server = SummationServer("127.0.0.1", 0, KEY, said.append)
    refused = pytest.raises(RunError, match="refuses: the secret or the name of the job")
    with refused, connected(server, key_of(*told)):
        pass
    with connected(server, place=1, num_members=2):
        pass  # and who knows the secret is served still
    server.close()
    assert until(lambda: any("refused 127.0.0.1" in line and "secret" in line for line in said))


def test_a_server_must_know_the_secret_too():
    """An impostor that repeats what it hears has no proof of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pose():
        connection, _ = listener.accept()
        with connection:
            connection.recv(24)
            connection.sendall(b"PSTKSUM1" + bytes(16))
            connection.recv(64)
            connection.sendall(bytes(3) + bytes(32))
            connection.recv(1)

    thread = threading.Thread(target=pose)
    thread.start()
    refused = pytest.raises(RunError, match="does not know the secret")
    with socket.create_connection(listener.getsockname(), 5.0) as connection, refused:
        greet(connection, Member(bytes(16), 0, 0, 1), KEY)
    thread.join()
    listener.close()


LIES = {
    "too long": FrameHead(FrameKind.PUSH, 0, 0, 0, 0, MOST_PART_BYTES),
    "empty": FrameHead(FrameKind.PUSH, 0, 0, 0, 0, 0),
    "no type": FrameHead(FrameKind.PUSH, 0)._replace(dtype=9, length=1),
    "no kind": FrameHead(FrameKind.SUM, 0, 0, 0, 0, 1),
    "numbers behind none": FrameHead(FrameKind.GONE, 0, 0, 0, 0, 5),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_frame_ends_its_sender_and_nobody_else(lie):
    said = []
    server = SummationServer("127.0.0.1", 0, KEY, said.append)
    with connected(server) as honest, connected(server, session=bytes(15) + b"!") as liar:
        liar.settimeout(SECONDS)
        liar.sendall(LIES[lie].packed())
        assert liar.recv(1) == b""
        numbers = np.arange(5, dtype=np.float32)
        honest.settimeout(SECONDS)
        honest.sendall(FrameHead(FrameKind.PUSH, length=5).packed() + numbers.tobytes())
        answer = b""
        while len(answer) < HEAD_BYTES + 20:
            answer += honest.recv(1000)
        assert answer[HEAD_BYTES:] == numbers.tobytes()
    server.close()
    assert until(lambda: sum(" it announced" in line or " it sent" in line for line in said) == 1)


class Reads(socket.socket):
    """A socket that counts how often it is read."""

    count = 0

    def recv_into(self, *args):
        self.count += 1
        return super().recv_into(*args)


@contextmanager
def sending_pieces(pieces):
    """(a connection on which pieces come with pauses between them; what lets it end)."""
    may_end = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()

    def send():
        with sender:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                sender.sendall(piece)
                time.sleep(0.002)
            may_end.wait(SECONDS)

    thread = threading.Thread(target=send)
    with Reads(fileno=accepted.detach()) as receiver:
        thread.start()
        try:
            yield receiver, may_end
        finally:
            may_end.set()
            thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="others may wake a reader sooner")
def test_numbers_that_come_in_packets_are_read_at_once():
    pieces = [bytes([number]) * 1500 for number in range(40)]
    room = bytearray(40 * 1500)
    with sending_pieces([*pieces, b"and a short head"]) as (connection, may_end):
        connection.settimeout(SECONDS / 2)  # before it ends by itself
        receive(connection, memoryview(room))
        assert connection.count <= 4  # of 40: a kernel that lacks memory may wake earlier
        assert bytes(room) == b"".join(pieces)
        short = bytearray(16)
        receive(connection, memoryview(short))  # what is short is waited for by nobody
        assert short == b"and a short head"
        may_end.set()
        assert not receive(connection, memoryview(short), may_end=True)


def test_a_connection_that_ends_in_the_middle_of_numbers_is_no_reason_to_wait():
    with (
        sending_pieces([bytes(3000)]) as (connection, may_end),
        pytest.raises(ConnectionError, match="in the middle of a frame"),
    ):
        may_end.set()
        receive(connection, memoryview(bytearray(100_000)))


def test_numbers_of_a_part_are_taken_once():
    said = []
    server = SummationServer("127.0.0.1", 0, KEY, said.append)
    with connected(server, num_members=2) as worker:
        worker.settimeout(SECONDS)
        worker.sendall(2 * (FrameHead(FrameKind.PUSH, length=1).packed() + bytes(4)))
        assert worker.recv(1) == b""
    server.close()
    assert until(lambda: any("twice" in line for line in said))


def test_a_lying_server_is_refused(ring):
    made = ring(1, 0)
    worker = made.workers[0]
    worker.begin(0, {0: np.ones(3, np.float32)}, {0: np.empty(3, np.float32)})
    worker.wait(SECONDS, "rank 0")
    with pytest.raises(RunError, match="round 7, which nobody began"):
        worker.take(FrameHead(FrameKind.SUM, round=7, length=1), np.ones(1, np.float32), 0)
    with pytest.raises(RunError, match="which is no server"):
        worker.take(FrameHead(FrameKind.GONE, start=0), None, 0)


def test_an_address_that_is_taken_is_refused():
    server = SummationServer("127.0.0.1", 0, KEY)
    with pytest.raises(InputError, match="cannot listen on 127"):
        SummationServer("127.0.0.1", server.address[1], KEY)
    server.close()


@pytest.mark.parametrize("text", ["", ":5", "a:b", "a:99999"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(RunError, match="no address"):
        parse_address(text)


def test_servers_need_no_torch():
    code = (
        "import sys, penstock.core.summation.server, penstock.core.summation.exchange; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)
