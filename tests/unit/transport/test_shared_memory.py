"""Messages in shared memory: values, order, memory, deadlines, and news of failures.

Both ends live in this process, since the sockets and the memory do not care.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import socket
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.base.errors import DeadlineError, PeerError, RunError
from penstock.engine.model import tree
from penstock.engine.transport import (
    Codec,
    Edge,
    Noted,
    SharedMemoryTransport,
    link,
    packing,
    shared_memory,
    slots,
)
from penstock.engine.transport.base import NOTE_BYTES
from tests.unit.transport.test_packing import Pair, bytes_of, tensors, values

FORWARD, OTHER, BACKWARD = Edge(0, 1, 0), Edge(0, 1, 2), Edge(1, 0, 1)


def connected(num_ranks, deadline_seconds=0.2):
    """Transports of all ranks."""
    sockets = [{} for _ in range(num_ranks)]
    for a, b in itertools.combinations(range(num_ranks), 2):
        sockets[a][b], sockets[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    transports = [
        SharedMemoryTransport(rank, connections, deadline_seconds, Codec([Pair]))
        for rank, connections in enumerate(sockets)
    ]
    for transport in transports:
        transport.meet()
    return transports


@pytest.fixture(params=["rings", "notices"])
def told_by(request, monkeypatch):
    """How messages are told of: as on this machine, and as where stores are not seen in order."""
    if request.param == "notices":
        monkeypatch.setattr(shared_memory, "HAS_RINGS", False)


@pytest.fixture
def trio(told_by):
    transports = connected(3)
    yield transports
    for transport in transports:
        transport.close("the test is over")


def num_segments():
    """Mapped by this process, at either end."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:penstock" in line for line in maps)


def assert_same(ours, theirs):
    ours, our_structure = tree.flatten(ours)
    theirs, their_structure = tree.flatten(theirs)
    assert our_structure == their_structure
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor):
            assert mine.is_leaf
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
            assert mine.requires_grad == other.requires_grad
            assert torch.equal(bytes_of(mine), bytes_of(other))
        else:
            assert type(mine) is type(other)
            assert mine == other


@given(
    messages=st.lists(st.tuples(st.sampled_from([FORWARD, OTHER]), values), min_size=1, max_size=8),
    data=st.data(),
)
def test_values_arrive_as_they_were_sent_in_whatever_order_they_are_awaited(messages, data):
    sender, receiver = connected(2)
    by_edge = {edge: [v for e, v in messages if e == edge][:4] for edge in (FORWARD, OTHER)}
    sent = [(edge, k, v) for edge, found in by_edge.items() for k, v in enumerate(found)]
    for edge, k, value in sent:
        sender.send(edge, k, value)
    held = []
    for edge, k, value in data.draw(st.permutations(sent)):
        held.append((receiver.recv(edge, k, "rank 1"), value))
        if data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
    for ours, theirs in held:
        assert_same(ours, theirs)
    sender.close("")
    receiver.close("")


def test_after_messages_in_inference_mode_others_may_be_trained_on(trio):
    """They lie in the same memory, in which tensors of inference mode must not be left."""
    sender, receiver, _ = trio
    weight = nn.Parameter(torch.ones(3))
    for number in range(6):
        with torch.inference_mode(number < 3):
            sender.send(FORWARD, number, torch.full((3,), float(number)))
            received = receiver.recv(FORWARD, number, "rank 1")
            received.mul_(2)
            if number >= 3:
                (received * weight).sum().backward()
    assert weight.grad.tolist() == [24.0, 24.0, 24.0]


def test_memory_is_the_senders_again_once_nothing_made_of_a_message_is_left(trio):
    sender, receiver, _ = trio
    before = num_segments()
    kept = []
    for number in range(20):
        sender.send(FORWARD, number, torch.full((3,), float(number)))
        received = receiver.recv(FORWARD, number, "rank 1")
        if number < 3:
            kept.append(received[1:])  # a view keeps the whole message
    assert [view.tolist() for view in kept] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    # Each at both ends: three that are kept, and two in turns for all others.
    assert num_segments() - before == 2 * 5


@given(
    messages=st.lists(
        st.tuples(tensors(), st.integers(0, 3), st.booleans()), min_size=1, max_size=20
    )
)
def test_slots_that_are_used_again_never_change_what_is_still_held(messages):
    """One after the other; each grows, is held for a while, or is overwritten by its receiver."""
    sender, receiver = connected(2)
    held = []
    for k, (tensor, doublings, overwrite) in enumerate(messages):
        value = tensor.detach()
        if value.dim():
            value = value.repeat(4**doublings, *[1] * (value.dim() - 1))
        sender.send(FORWARD, k, (value, value))
        first, second = receiver.recv(FORWARD, k, "rank 1")
        if overwrite:
            first.zero_()
            held.append((second, value.clone()))
        else:
            held.append((first, value.clone()))
        del first, second
        for ours, theirs in held:
            assert_same(ours, theirs)
        del ours, theirs
        held = held[-3:]
    assert len(sender._peers[1].pool) <= 4
    sender.close("")
    receiver.close("")


def test_a_layout_that_returns_or_only_looks_alike_is_told_apart(trio):
    sender, receiver, _ = trio
    one = torch.ones(3)
    alike = [one, [one], (one,), {"a": one}, Pair(one, one), (one, 1), (one, True), (one, 1.0)]
    alike += [(one, 0.0), (one, -0.0), [one, None], [None, one], one.double(), one[:2], one]
    for k, value in enumerate(alike + alike[::-1]):
        sender.send(FORWARD, k, value)
        assert_same(receiver.recv(FORWARD, k, "rank 1"), value)
        sender.send(FORWARD, k, value)  # the same layout as before
        assert repr(receiver.recv(FORWARD, k, "rank 1")) == repr(value)


def test_layouts_that_take_turns_in_one_slot_are_laid_out_once(trio, monkeypatch):
    sender, receiver, _ = trio
    laid_out = []
    places = packing.places
    monkeypatch.setattr(
        packing, "places", lambda block, layout: laid_out.append(layout) or places(block, layout)
    )
    for k in range(20):
        note = bytes([1 + k // 5]) * NOTE_BYTES  # a step's messages have the same
        value = torch.full((2, 3), float(k))
        sender.send(FORWARD, k, Noted(value, note))
        arrived, its_note = receiver.recv(FORWARD, k, "rank 1")
        assert_same(arrived, value)
        assert its_note == note
        del arrived
        sender.send(OTHER, k, [value.double()])
        assert_same(receiver.recv(OTHER, k, "rank 1"), [value.double()])
    assert len(sender._peers[1].pool) == 1
    assert len(laid_out) == 2


def test_messages_with_and_without_a_note_are_told_apart_also_on_one_edge(trio):
    sender, receiver, _ = trio
    notes = [b"", bytes([7]) * NOTE_BYTES, bytes([7]) * NOTE_BYTES, b"", bytes([8]) * NOTE_BYTES]
    for k, note in enumerate(notes):
        sender.send(FORWARD, k, Noted(torch.ones(3), note))
        arrived = receiver.recv(FORWARD, k, "rank 1")
        assert (arrived.note if type(arrived) is Noted else b"") == note
        del arrived  # so that the next one lies in the same slot


def test_a_slot_remembers_few_layouts_and_gets_all_of_them_right(trio):
    sender, receiver, _ = trio
    for k in range(60):
        value = torch.arange(float(1 + k % 20))
        sender.send(FORWARD, k, value)
        assert_same(receiver.recv(FORWARD, k, "rank 1"), value)
    (slot,) = sender._peers[1].pool._slots
    assert len(slot._places_of) <= slots._MOST_LAYOUTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_of_a_lone_tensor_keeps_its_slot(trio, dtype):
    sender, receiver, _ = trio
    value = torch.arange(12, dtype=dtype).view(4, 3)
    sender.send(FORWARD, 0, value)
    view = receiver.recv(FORWARD, 0, "rank 1").t()[1:]
    for k in range(1, 4):
        sender.send(FORWARD, k, torch.zeros(4, 3, dtype=dtype))
        receiver.recv(FORWARD, k, "rank 1")
    assert torch.equal(view, value.t()[1:])
    assert len(sender._peers[1].pool) == 2
    del view
    assert all(slot.state == slots.SlotState.FREE for slot in sender._peers[1].pool._slots)


def test_what_was_sent_may_be_overwritten(trio):
    tensor = torch.ones(1000)
    trio[0].send(FORWARD, 0, tensor)
    tensor.zero_()
    assert torch.equal(trio[1].recv(FORWARD, 0, "rank 1"), torch.ones(1000))


def test_the_receiver_may_overwrite_one_tensor_while_autograd_needs_the_other(trio):
    weight = torch.ones(4, requires_grad=True)
    for k in range(2):
        trio[0].send(FORWARD, k, (torch.ones(4), torch.ones(4)))
    first, second = trio[1].recv(FORWARD, 0, "rank 1")
    later, _ = trio[1].recv(FORWARD, 1, "rank 1")
    product = (weight * first).sum()
    nn.ReLU(inplace=True)(second)
    later.mul_(7)
    product.backward()
    assert torch.equal(weight.grad, torch.ones(4))


def test_a_sender_with_gradients_sends_values_and_that_they_want_some(trio):
    """Whether they do may change with every message."""
    for number, wants in enumerate([True, False, True, True, False]):
        trio[0].send(FORWARD, number, torch.ones(2, requires_grad=wants) * 2)
        received = trio[1].recv(FORWARD, number, "rank 1")
        assert received.is_leaf
        assert received.requires_grad is wants


def test_memory_follows_what_is_held(trio):
    sender, receiver, _ = trio
    pool = sender._peers[1].pool
    for k in range(100):
        sender.send(FORWARD, k, torch.full((3000,), float(k)))
        receiver.recv(FORWARD, k, "rank 1")
    assert len(pool) == 1
    held = []
    for k in range(7):
        sender.send(FORWARD, k, torch.full((3000,), float(k)))
        held.append(receiver.recv(FORWARD, k, "rank 1"))
    assert len(pool) == 7
    assert [tensor.unique().tolist() for tensor in held] == [[k] for k in range(7)]
    part = held[3][5:6]  # a view is enough to keep it
    held.clear()
    for k in range(50):
        sender.send(FORWARD, k, torch.zeros(3000))
        receiver.recv(FORWARD, k, "rank 1")
    assert len(pool) == 7
    assert part.item() == 3


def test_a_larger_message_takes_the_place_of_a_smaller_one(trio):
    sender, receiver, _ = trio
    before = num_segments()
    for k in range(12):
        sender.send(FORWARD, k, torch.zeros(2**k * 1000))
        receiver.recv(FORWARD, k, "rank 1")
    assert len(sender._peers[1].pool) == 1
    assert num_segments() - before == 2  # one, at both ends


def test_memory_of_a_peak_is_given_back_after_some_steps(trio):
    sender, receiver, _ = trio
    for k in range(4):
        sender.send(FORWARD, k, torch.zeros(10_000))
    for k in range(4):
        receiver.recv(FORWARD, k, "rank 1")
    pool = sender._peers[1].pool
    assert len(pool) == 4
    for k in range(20):
        sender.send(FORWARD, k, torch.zeros(10_000))
        receiver.recv(FORWARD, k, "rank 1")
        sender.flush()
    assert len(pool) == 1


def test_received_tensors_outlive_both_transports():
    before = num_segments()
    sender, receiver = connected(2)
    sender.send(FORWARD, 0, torch.arange(5))
    tensor = receiver.recv(FORWARD, 0, "rank 1")
    sender.close("done")
    receiver.close("done")
    del sender, receiver
    gc.collect()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert num_segments() > before
    del tensor
    gc.collect()
    assert num_segments() == before


def test_a_sender_runs_ahead_only_so_far():
    sender, receiver = connected(2, deadline_seconds=0.1)
    with pytest.raises(DeadlineError, match="rank 0, sending to rank 1: rank 1 did not answer"):
        for k in range(100):
            sender.send(FORWARD, k, torch.ones(1))
    assert k == 64
    sender.send(OTHER, 0, "another edge has room of its own")
    receiver.recv(FORWARD, 0, "rank 1")
    sender.send(FORWARD, 64, torch.ones(1))
    sender.close("")
    receiver.close("")


@pytest.mark.parametrize("looks", [True, False])
def test_nobody_sleeps_past_a_message(monkeypatch, looks):
    """Not even where no clock would wake it, and whether it looks first or not."""
    monkeypatch.setattr(shared_memory, "_LONGEST_SLEEP_MILLISECONDS", 120_000.0)
    monkeypatch.setattr(link, "usable_cores", lambda: 1_000 if looks else 1)
    left, right = connected(2, deadline_seconds=300)
    num_messages = 2_000

    def answer():
        for k in range(num_messages):
            right.send(BACKWARD, k, right.recv(FORWARD, k, "rank 1"))
            if k % 50 == 0:
                time.sleep(0.002)  # longer than anybody looks

    thread = threading.Thread(target=answer)
    thread.start()
    for k in range(num_messages):
        left.send(FORWARD, k, k)
        assert left.recv(BACKWARD, k, "rank 0") == k
    thread.join()
    left.close("")
    right.close("")


def test_a_long_wait_costs_no_core(trio):
    trio[1].patience = trio[1].patience._replace(seconds=1.0)
    start = time.thread_time()
    with pytest.raises(DeadlineError):
        trio[1].recv(FORWARD, 0, "rank 1")
    assert time.thread_time() - start < 0.3


def test_what_comes_before_the_first_ring_is_not_missed():
    """Each rank makes its rings when it comes; the other may have sent by then."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    early = SharedMemoryTransport(0, {1: ends[0]}, 10)
    early.send(FORWARD, 0, torch.ones(3))
    early.close("that was all")
    late = SharedMemoryTransport(1, {0: ends[1]}, 10)
    assert torch.equal(late.recv(FORWARD, 0, "rank 1"), torch.ones(3))
    with pytest.raises(PeerError, match="that was all"):
        late.recv(FORWARD, 1, "rank 1")
    late.close("")


def test_many_messages_may_be_awaited_last_first():
    sender, receiver = connected(2, deadline_seconds=10)
    thread = threading.Thread(
        target=lambda: [sender.send(FORWARD, k, torch.tensor(k)) for k in range(40)]
    )
    thread.start()
    found = [receiver.recv(FORWARD, k, "rank 1").item() for k in reversed(range(40))]
    thread.join()
    assert found == list(reversed(range(40)))
    sender.close("")
    receiver.close("")


def test_two_ranks_that_only_send_for_a_while_do_not_block_each_other():
    ranks = connected(2, deadline_seconds=240)

    def run(rank):
        edges = [Edge(rank, 1 - rank, tag) for tag in range(200)]
        for edge, k in itertools.product(edges, range(2)):  # more notices than a socket holds
            ranks[rank].send(edge, k, None)
        for edge, k in itertools.product(edges, range(2)):
            ranks[rank].recv(Edge(1 - rank, rank, edge.tag), k, f"rank {rank}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 200
    for transport in ranks:
        transport.close("")


def test_a_missed_deadline_names_who_waited_for_whom_and_what_to_do(trio):
    trio[0].send(FORWARD, 5, "not this one")
    start = time.monotonic()
    with pytest.raises(
        DeadlineError,
        match=r"rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0: rank 0 .* 0\.2 s; .*raise",
    ):
        trio[1].recv(FORWARD, 0, "rank 1, waiting at 1RECV_F0 for 0SEND_F0 of rank 0")
    assert 0.19 < time.monotonic() - start < 200
    assert trio[1].recv(FORWARD, 5, "rank 1") == "not this one"


def test_a_failure_of_any_rank_ends_who_waits_for_another(trio):
    trio[2].fail("rank 2 failed: \udc80" + "é" * 5000, ())
    trio[0].send(FORWARD, 0, "arrived")
    assert trio[1].recv(FORWARD, 0, "rank 1") == "arrived"
    for _ in range(2):
        with pytest.raises(
            PeerError, match=r"rank 1: cancelled because rank 2 failed: \?é"
        ) as told:
            trio[1].recv(FORWARD, 1, "rank 1")
    assert told.value.reason.startswith("rank 2 failed")


def test_the_first_failure_is_the_one_that_is_told(trio):
    trio[2].fail("first", ())
    with pytest.raises(PeerError, match="first"):
        trio[1].recv(FORWARD, 1, "rank 1")
    trio[0].fail("second", ())
    with pytest.raises(PeerError, match="first"):
        trio[1].recv(FORWARD, 1, "rank 1")


def test_a_step_that_was_given_up_is_forgotten(trio):
    sender, receiver, third = trio
    sender.send(FORWARD, 0, torch.ones(3))
    sender.send(FORWARD, 1, torch.ones(3))
    receiver.recv(FORWARD, 1, "rank 1")  # 0 is early now
    third.fail("boom", ())
    with pytest.raises(PeerError):
        receiver.recv(FORWARD, 2, "rank 1")
    receiver.discard(10)
    sender.send(FORWARD, 3, torch.ones(3))  # it has not heard yet
    sender.fail("cancelled because boom", ())
    sender.discard(10)
    sender.send(FORWARD, 10, torch.ones(3))
    assert torch.equal(receiver.recv(FORWARD, 10, "rank 1"), torch.ones(3))
    assert receiver._early == {}
    slots = sender._peers[1].pool._slots
    assert {slot.state for slot in slots} == {0}  # what was forgotten was given back
    sender.fail("again", ())
    with pytest.raises(PeerError, match="again"):
        receiver.recv(FORWARD, 11, "rank 1")


def test_discarded_messages_are_not_in_the_way_of_new_ones(trio):
    sender, receiver, _ = trio
    for numbers in (range(4), range(10, 14)):
        sender.discard(numbers[0])
        for k in numbers:
            sender.send(FORWARD, k, k)
    receiver.discard(10)
    assert [receiver.recv(FORWARD, k, "rank 1") for k in range(10, 14)] == [10, 11, 12, 13]


def test_a_failure_in_a_step_that_others_have_not_begun_is_kept(trio):
    trio[0].discard(10)
    trio[0].fail("boom", ())
    with pytest.raises(PeerError, match="boom"):
        trio[1].recv(FORWARD, 0, "rank 1")
    trio[1].discard(10)
    with pytest.raises(PeerError, match="boom"):
        trio[1].recv(FORWARD, 10, "rank 1")


def test_a_rank_that_closes_its_pipeline_is_missed_by_those_who_wait_for_it_alone(trio):
    trio[0].send(FORWARD, 0, "sent before")
    trio[0].close("training is over")
    trio[2].send(Edge(2, 1, 0), 0, "from another")
    assert trio[1].recv(FORWARD, 0, "rank 1") == "sent before"
    with pytest.raises(PeerError, match=r"rank 1: rank 0 closed its pipeline \(training is over\)"):
        trio[1].recv(FORWARD, 1, "rank 1")
    with pytest.raises(PeerError, match=r"rank 0 closed its pipeline \(training is over\)"):
        trio[1].send(BACKWARD, 0, None)
    assert trio[1].recv(Edge(2, 1, 0), 0, "rank 1") == "from another"
    with pytest.raises(DeadlineError):  # rank 2 may yet send more
        trio[1].recv(Edge(2, 1, 0), 1, "rank 1")
    trio[1].flush()
    with pytest.raises(RunError, match=r"rank 0 has closed its pipeline \(training is over\)"):
        trio[0].send(FORWARD, 1, None)
    trio[0].close("again")


@pytest.mark.skipif(not shared_memory.HAS_RINGS, reason="nobody needs waking without rings")
@pytest.mark.parametrize(
    ("takes", "says_goodbye", "told"),
    [
        (True, True, None),
        (False, True, "closed its pipeline"),  # it has left without the message
        (True, False, "is gone"),
    ],
)
def test_who_took_a_message_may_leave_before_it_is_woken(monkeypatch, takes, says_goodbye, told):
    sender, receiver = connected(2)
    ring = sender._peers[1].outgoing
    must_wake = ring.must_wake

    def after_it_has_left():
        if takes:
            assert receiver.recv(FORWARD, 0, "rank 1") == "the last"
        receiver.close("training is over") if says_goodbye else receiver.abandon()
        return must_wake() or not says_goodbye

    monkeypatch.setattr(ring, "must_wake", after_it_has_left)
    if told is None:
        sender.send(FORWARD, 0, "the last")
    else:
        with pytest.raises(PeerError, match=f"rank 1 {told}"):
            sender.send(FORWARD, 0, "the last")
    monkeypatch.undo()
    with pytest.raises(PeerError, match="rank 1"):
        sender.send(FORWARD, 1, "one more")
    sender.close("")


def test_a_transport_that_is_dropped_says_goodbye():
    left, right = connected(2)
    del left
    gc.collect()
    with pytest.raises(PeerError, match=r"rank 0 closed its pipeline \(its process ended\)"):
        right.recv(FORWARD, 0, "rank 1")
    right.close("")


def test_what_is_closed_keeps_nothing_open():
    """Also while somebody still holds it: collectors of garbage find closed pipelines late."""
    gc.collect()
    gc.disable()
    try:
        before = num_segments()
        transports = connected(3)
        for send in (True, False):
            for source, target in itertools.permutations(range(3), 2):
                edge = Edge(source, target, 0)
                if send:
                    transports[source].send(edge, 0, torch.ones(3))
                else:
                    transports[target].recv(edge, 0, "it")
        assert num_segments() > before
        for transport in transports:
            transport.close("done")
        assert num_segments() == before
    finally:
        gc.enable()


def test_an_end_without_goodbye_ends_whoever_waits(trio):
    trio[0].abandon()
    with pytest.raises(PeerError, match=r"rank 0 is gone \(its process ended or was killed\)"):
        trio[1].recv(Edge(2, 1, 0), 0, "rank 1")
    with pytest.raises(PeerError, match="rank 0 is gone"):
        trio[2].send(Edge(2, 0, 0), 0, None)


def test_news_that_came_before_the_end_explain_it(trio):
    trio[0].fail("rank 0 failed: boom", ())
    trio[0].abandon()
    with pytest.raises(PeerError, match="boom"):
        trio[2].send(Edge(2, 0, 0), 0, None)


def test_no_memory_is_an_error_that_says_how_much_and_what_to_do(trio):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        trio[0].send(FORWARD, 0, torch.ones(10))
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises(
            RunError,
            match=r"rank 0 could not get 425,984 bytes of shared memory for a message to rank 1 "
            r".*ulimit -f.*transport='process-group'",
        ):
            trio[0].send(FORWARD, 1, torch.ones(100_000))
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    trio[0].send(FORWARD, 1, torch.ones(100_000))
    assert trio[1].recv(FORWARD, 1, "rank 1").sum() == 100_000


def test_too_many_open_files_are_named_at_either_end(trio):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    trio[0].send(FORWARD, 0, torch.ones(3))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(RunError, match=r"rank 0 could not get .* bytes .*ulimit -n"):
            trio[0].send(FORWARD, 1, torch.ones(3))
        with pytest.raises(RunError, match=r"rank 1 could not .* shared memory .*ulimit -n"):
            trio[1].recv(FORWARD, 0, "rank 1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_dense_tensors_keep_their_strides_others_arrive_densely_and_none_share_memory(trio):
    # docs/training.md says so under "Equal to the bit, and where not".
    whole = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    trio[0].send(FORWARD, 0, (whole, whole[:, ::2], whole[:, :1].expand(2, 3, 4, 4)))
    received = trio[1].recv(FORWARD, 0, "waiting")
    assert received[0].stride() == whole.stride()
    assert all(tensor.is_contiguous() for tensor in received[1:])
    assert len({tensor.data_ptr() for tensor in received}) == 3
    received[0].zero_()
    assert torch.equal(received[1], whole[:, ::2])
