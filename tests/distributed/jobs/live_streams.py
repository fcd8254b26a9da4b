"""Ranks learn from a live stream that rank 0 alone has, and report what differs from the replay."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.base.errors import RunError
from tests.kit.live import (
    LEARN,
    PREDICT,
    UNLABELLED,
    differences,
    frames_of,
    live_plan,
    replayed,
    stream_of,
)
from tests.kit.streams import layered_model

FRAMES = frames_of([LEARN, UNLABELLED, LEARN, PREDICT, LEARN] * 8)
TAKEN = [number for number, given in enumerate(FRAMES) if given.learn]
LABELLED = [FRAMES[number][:2] for number in TAKEN]


def equality(transport, folder):
    """Frames are pushed, played and dropped; what was saved in between, another stream resumes."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = layered_model()
    plan = live_plan(model, num_ranks)
    how = {"transport": transport, "deadline_seconds": 300}
    results, mine = [], rank == 0
    with stream_of(model, plan, **how) as stream:
        for frame, target, learn in FRAMES:
            given = (frame, target) if mine else (None, None)
            result = stream(*given, learn=learn)
            results += [] if result is None else [result]
        results += stream.rest()
        stream.save(folder)
        behind = list(stream.over(LABELLED if mine else None, rate=300, when_late="drop-oldest"))
        kept = [TAKEN[result.frame - len(FRAMES)] for result in behind]
        told = [kept]
        dist.broadcast_object_list(told)
        admitted = [*FRAMES, *(FRAMES[number] for number in told[0])]
    seen, reference, _ = replayed(plan, admitted)
    yield from differences([*results, *behind], seen)
    expected = reference.state_dict()
    own = stream.state_dict()
    yield from (name for name, value in own.items() if not torch.equal(value, expected[name]))
    other = layered_model()
    with stream_of(other, plan, **how) as stream:
        at = stream.load(folder)
        again = list(stream.over(LABELLED[:9] if mine else None))
    first, _, _ = replayed(plan, [*FRAMES, *(FRAMES[number] for number in TAKEN[:9])])
    if at != len(FRAMES):
        yield f"resumed at {at}"
    yield from differences(again, first[len(FRAMES) :])


def idle(transport):
    """A source that gives nothing for longer than the deadline is slow, and not dead."""
    num_ranks, mine = dist.get_world_size(), dist.get_rank() == 0
    model = layered_model()

    def source():
        yield from LABELLED[:4]
        time.sleep(6)
        yield from LABELLED[4:8]

    plan = live_plan(model, num_ranks)
    with stream_of(model, plan, transport=transport, deadline_seconds=3) as stream:
        results = list(stream.over(source() if mine else None))
    if len(results) != 8:
        yield f"{len(results)} results"


def failing(transport, spoiled, told):
    """A frame that is not finite: all hear of it by its number, no weight has learned of it, and
    nobody hangs."""
    num_ranks, mine = dist.get_world_size(), dist.get_rank() == 0
    model = layered_model()
    frames = [*LABELLED]
    frames[6] = spoiled(*LABELLED[6])
    try:
        with stream_of(model, live_plan(model, num_ranks), transport=transport) as stream:
            list(stream.over(frames if mine else None))
        yield "nothing failed"
    except RunError as error:
        if told not in str(error) or "frame 6, microbatch 6" not in str(error):
            yield f"rank {dist.get_rank()}: {error}"
    own = stream.state_dict()
    yield from (f"{name} has learned" for name, value in own.items() if not value.isfinite().all())


def failings(transport):
    """Frames that are not finite: their input, or what they should give."""
    nan = float("nan")
    yield from failing(transport, lambda x, y: (x, x * nan), "the loss is nan")
    yield from failing(transport, lambda x, y: (x * nan, None), "the output of stage 0 is nan")


def leaving(transport):
    """A source that raises on rank 0 ends the stream there, and the others hear that it is over."""
    num_ranks, mine = dist.get_world_size(), dist.get_rank() == 0
    model = layered_model()

    def source():
        yield from LABELLED[:3]
        raise OSError("the camera is gone")

    try:
        plan = live_plan(model, num_ranks)
        with stream_of(model, plan, transport=transport, deadline_seconds=300) as stream:
            list(stream.over(source() if mine else None))
        yield "nothing failed"
    except OSError:
        if not mine:
            yield "the source is rank 0's"
    except RunError as error:
        if mine:
            yield f"rank 0: {error}"


def left(transport):
    """Rank 0 leaves its loop and the stream: the others hear that it is over."""
    num_ranks, mine = dist.get_world_size(), dist.get_rank() == 0
    model = layered_model()
    with stream_of(model, live_plan(model, num_ranks), transport=transport) as stream:
        for result in stream.over(LABELLED * 9 if mine else None):
            if mine and result.frame == 5:
                break
    yield from ()


def calling_again(transport):
    """A rank that calls the stream once more than rank 0 hears that it is over, whatever it asks
    for; what it has taken at once has not hidden that rank 0 has taken all."""
    num_ranks, mine = dist.get_world_size(), dist.get_rank() == 0
    model = layered_model()
    try:
        with stream_of(model, live_plan(model, num_ranks), transport=transport) as stream:
            for frame, target in LABELLED[:6]:
                stream(frame, target)
            while not mine and stream.get() is not None:
                pass  # what has come
            left = [result.frame for result in stream.rest()]
            if mine and left != list(range(7 - num_ranks, 6)):
                yield f"the rest was {left}"
            if not mine:
                if [*stream.rest(), *stream.rest()]:
                    yield "more came behind the rest"
                for _ in range(num_ranks):
                    stream(None)
                yield "nothing failed"
    except RunError as error:
        if mine or "but rank 0 has left the stream; all processes must call" not in str(error):
            yield f"rank {dist.get_rank()}: {error}"


def changing(transport):
    """What a process reads behind the rest has all updates, and changes no more."""
    num_ranks = dist.get_world_size()
    model = layered_model()
    plan = live_plan(model, num_ranks)
    with stream_of(model, plan, transport=transport) as stream:
        for frame, target, learn in FRAMES[:13]:
            stream(frame, target, learn=learn)
        list(stream.rest())
        own = stream.state_dict()
        dist.barrier()
        for frame, target, learn in FRAMES[13:]:
            stream(frame, target, learn=learn)
        list(stream.rest())
        after = stream.state_dict()
    for count, states in ((13, own), (len(FRAMES), after)):
        _, reference, _ = replayed(plan, FRAMES[:count])
        expected = reference.state_dict()
        for name, value in states.items():
            if not torch.equal(value, expected[name]):
                yield f"{name} after {count} frames"


def killed(transport, report):
    """A rank that dies in the middle: the others raise at once."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = layered_model()
    begin = time.monotonic()
    try:
        with stream_of(model, live_plan(model, num_ranks), transport=transport) as stream:
            source = LABELLED * 100 if rank == 0 else None
            for result in stream.over(source, rate=100):
                if result.frame == 5 and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        told = "nothing failed"
    except RunError as error:
        told = type(error).__name__
    report({"told": told, "seconds": time.monotonic() - begin})


def main(what, transport, folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def report(value):
        Path(folder, f"report-{rank}.json").write_text(json.dumps(value))

    if what == "killed":
        killed(transport, report)
        os._exit(0)
    apart = [*equality(transport, Path(folder, "run"))]
    if transport == "shared-memory":  # it is the same loop that waits
        apart += idle(transport)
    apart += [*failings(transport), *left(transport), *leaving(transport)]
    apart += [*calling_again(transport), *changing(transport)]
    report({"differences": apart})


if __name__ == "__main__":
    main(*sys.argv[1:])
