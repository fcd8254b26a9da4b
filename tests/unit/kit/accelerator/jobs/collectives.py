"""Two ranks that break the rules of a collective library; each reports what it was told."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.kit.accelerator import collectives
from tests.kit.accelerator.devices import register


class Pair:
    """This rank's end of a group of the library, and its device."""

    def __init__(self):
        self.rank, self.other = dist.get_rank(), 1 - dist.get_rank()
        self.device = torch.device("emu", self.rank)
        self.side = torch.Stream(self.device)
        self.group = dist.new_group(backend=collectives.LIBRARY)

    def connect(self):
        """As whoever uses such a library should, before anything waits for something else."""
        (self.receive if self.rank else self.send)(self.room(1)).wait()
        torch.accelerator.synchronize(self.device)

    def room(self, size=8):
        return torch.ones(size, dtype=torch.uint8, device=self.device)

    def send(self, tensor):
        return dist.isend(tensor, group=self.group, group_dst=self.other)

    def receive(self, tensor):
        return dist.irecv(tensor, group=self.group, group_src=self.other)


def what_is_sent_arrives(pair):
    """And nobody is told that it has before he has waited for it."""
    if pair.rank == 0:
        work = pair.send(torch.arange(8, dtype=torch.uint8, device=pair.device))
    else:
        room = pair.room()
        work = pair.receive(room)
    dist.barrier()
    assert not work.is_completed()
    work.wait()
    torch.accelerator.synchronize(pair.device)
    assert work.is_completed()
    if pair.rank == 1:
        assert room.tolist() == [*range(8)]


def ranks_that_do_not_connect(pair):
    if pair.rank == 0:
        pair.send(pair.room())


def sends_that_meet(pair):
    pair.send(pair.room()).wait()


def sizes_that_differ(pair):
    if pair.rank == 0:
        pair.send(pair.room(8)).wait()
    else:
        pair.receive(pair.room(4)).wait()


def a_send_without_a_receive(pair):
    work = pair.send(pair.room()) if pair.rank == 0 else None
    if work is not None:
        assert not work.is_completed()
        work.wait()


def a_send_that_is_overwritten(pair):
    tensor = pair.room()
    work = pair.send(tensor) if pair.rank == 0 else pair.receive(pair.room())
    if pair.rank == 0:
        tensor.add_(1)
    work.wait()


def a_send_that_is_not_kept(pair):
    work = pair.send(pair.room()) if pair.rank == 0 else pair.receive(pair.room())
    if pair.rank == 0:
        torch.zeros(8, device=pair.device)
    work.wait()


def a_receive_that_is_not_waited_for(pair):
    room = pair.room()
    work = pair.send(room) if pair.rank == 0 else pair.receive(room)
    if pair.rank == 1:
        room + 1
    work.wait()


def a_receive_waited_for_on_another_stream(pair):
    room = pair.room()
    work = pair.send(room) if pair.rank == 0 else pair.receive(room)
    with pair.side:
        work.wait()
    if pair.rank == 1:
        room + 1


CASES = (
    ranks_that_do_not_connect,
    what_is_sent_arrives,
    sends_that_meet,
    sizes_that_differ,
    a_send_without_a_receive,
    a_send_that_is_overwritten,
    a_send_that_is_not_kept,
    a_receive_that_is_not_waited_for,
    a_receive_waited_for_on_another_stream,
)


def main() -> None:
    torch.set_num_threads(1)
    register()
    collectives.register()
    collectives.PATIENCE = timedelta(seconds=1)
    dist.init_process_group("gloo")
    told = {}
    for case in CASES:
        pair = Pair()
        try:
            if case is not ranks_that_do_not_connect:
                pair.connect()
            case(pair)
        except RuntimeError as error:
            told[case.__name__] = str(error)
        torch.accelerator.synchronize(pair.device)  # what a case left behind is not the next one's
        dist.barrier()
    Path(sys.argv[1], f"report-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()


if __name__ == "__main__":
    main()
