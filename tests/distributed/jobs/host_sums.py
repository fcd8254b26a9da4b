"""Processes that believe to be on several hosts sum inside these first, by servers or all-reduce.

    torchrun ... host_sums.py CASE LEVELS ADDRESSES PIDS FOLDER

LEVELS is JSON, as ``Summing`` has them; the last one says who shares memory. ADDRESSES and PIDS are
those of servers, with commas between. Cases: ``WAY`` sums random gradients, of which all ranks know
all, and kills the servers, if there are any, one after another; ``killed WAY VICTIM`` loses a rank
in the second round. Each rank reports in ``report-<rank>.json``: parameters whose sums are not
those of the tree; or what it ended with, and what is left in ``/dev/shm``.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.base.errors import PenstockError
from penstock.core.cluster import SpareMachine
from penstock.core.summation import split
from penstock.engine.reduce.reducer import SharedWeights
from penstock.engine.reduce.sums import GradientSums, maker_of
from penstock.engine.transport import connect
from penstock.engine.transport.base import FIRST_EXCHANGE
from penstock.engine.transport.rendezvous import Rendezvous
from penstock.planning.plans.summing import Summing
from tests.unit.reduce.test_sums import fill, holders

DEADLINE_SECONDS = 300.0
NUM_ROUNDS = 4


def summing_of(way, levels, addresses):
    spares = [
        SpareMachine(name=f"spare{number}", bytes_per_second=1e9, address=address)
        for number, address in enumerate(addresses)
    ]
    rates = (1e9,) * len(levels[0])
    return Summing(reducer=way, servers=spares, levels=levels, bytes_per_second=rates)


def sums_of(summing, own, transport, attempt):
    """This rank's sums of two groups of weights, of which the second is held by all but one."""
    rank, count = dist.get_rank(), dist.get_world_size()
    ranks = [tuple(range(count)), tuple(range(1, count))]
    make = maker_of(summing, attempt, [[held] for held in ranks], DEADLINE_SECONDS, ranks=ranks)
    shared = [
        SharedWeights(tag, held, frozenset({tag}), parameters)
        for tag, (held, parameters) in enumerate(zip(ranks, own, strict=True))
        if rank in held
    ]
    sums = GradientSums(rank, shared, transport, everywhere=True, make=make)
    sums.begin_equal(summing)
    return sums


def rounds(summing, transport, between):
    """Places of sums that are not those of the tree; of all-reduce, that are not near them."""
    rank, count = dist.get_rank(), dist.get_world_size()
    attempt = [secrets.token_hex(16)]
    dist.broadcast_object_list(attempt)
    copies = [holders(count), holders(count)]
    sums = sums_of(summing, [own[rank] for own in copies], transport, attempt[0])
    found = []
    for number in range(NUM_ROUNDS):
        between(number)
        for tag, all_copies in enumerate(copies):
            fill(all_copies, 10 * number + tag, missing=0.25 * (number % 2))
        expected = [folded(own[tag:], summing, tag) for tag, own in enumerate(copies)]
        sums.begin(FIRST_EXCHANGE + number, averages=False)
        for tag in range(2 - (rank == 0)):
            sums.hand_in(tag)
        sums.complete()
        for tag in range(2 - (rank == 0)):
            for place, wanted in enumerate(expected[tag]):
                got = copies[tag][rank][place].grad
                if not alike(got, wanted, summing.reducer):
                    found.append([number, tag, place])
    sums.close(failed=False)
    return found


def folded(copies, summing, first):
    tree = summing.tree(range(first, first + len(copies)))
    sums = []
    for column in zip(*copies, strict=True):
        values = {
            first + place: copy.grad for place, copy in enumerate(column) if copy.grad is not None
        }
        sums.append(tree.fold(values, torch.add) if values else None)
    return sums


def alike(got, wanted, way):
    if got is None or wanted is None:
        return got is wanted
    if way == "servers":
        return torch.equal(got, wanted)
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    return torch.allclose(got, wanted, rtol=0.0, atol=largest * 1e-1)


def main() -> None:
    case, levels = sys.argv[1], json.loads(sys.argv[2])
    addresses, pids = ([word for word in text.split(",") if word] for text in sys.argv[3:5])
    folder, rank = Path(sys.argv[-1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    split.LEAST_PORTION_BYTES = 1000  # or these few gradients would leave in one
    dist.init_process_group("gloo")
    meeting = Rendezvous.of_group("connecting", DEADLINE_SECONDS, "wait longer")
    transport = connect(meeting, DEADLINE_SECONDS, host=f"host {levels[-1][rank]}")
    killed = case.split()[1:]
    way, victim = (killed[0], int(killed[1])) if killed else (case, None)

    def between(number):
        if number == 2 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if number and rank == 0 and pids:
            os.kill(int(pids.pop()), signal.SIGKILL)

    try:
        found = rounds(summing_of(way, levels, addresses), transport, between)
        dist.barrier()
    except PenstockError as error:
        transport.fail(str(error), [])
        found = [type(error).__name__, str(error)]
    transport.close("done")
    if killed:
        found += [name for name in os.listdir("/dev/shm") if "penstock" in name]
    (folder / f"report-{rank}.json").write_text(json.dumps(found))
    if not killed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
