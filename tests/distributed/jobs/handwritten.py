"""The hand-written contestants of the benchmark, proven like all others, one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.common.works import tiny_work
from benchmarks.contest.handwritten import AREA
from benchmarks.contest.peers import Watch, prove_same, reference, two_ranks
from benchmarks.contest.runtime import BY_HAND, all_contestants, yardstick

NUM_STEPS = 6


def main() -> None:
    exact, contestants = {}, all_contestants()
    names = [yardstick(kind, name) for kind in ("threads", "processes") for name in BY_HAND]
    with two_ranks() as rank:
        for num_microbatches in map(int, sys.argv[1].split(",")):
            work = tiny_work(num_microbatches, rows=2, width=8)
            expected = reference(work, NUM_STEPS)
            for name in names:
                if rank == 0 or not contestants[name].on_one_rank:
                    watch = Watch()
                    peer = contestants[name].build(watch.over(work))
                    same = prove_same(work, expected, peer, watch)
                    # And it goes on so, for longer than any channel has room.
                    rest = expected[2 if same else 1 :]
                    losses = peer.train([(work.inputs, work.targets)] * len(rest))
                    for loss, then in zip(losses, rest, strict=True):
                        assert loss is None or torch.allclose(loss, then.loss, rtol=1e-4)
                    exact[f"{name}, m = {num_microbatches}"] = same
                    peer.close()
        report = {"exact": exact, "left": AREA in Path("/proc/self/maps").read_text()}
        (Path(sys.argv[-1]) / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
