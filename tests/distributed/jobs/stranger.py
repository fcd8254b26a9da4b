"""Training while a stranger of this host reads and writes whatever listens there.

    stranger.py FOLDER [own-group]

With ``own-group`` the script makes torch's process group itself. Rank 0 plays the stranger, with
what every user of the host can know: the port of torch's store, and the names that Penstock uses.
What it has seen there, and the losses, go to FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed.jobs.restarting import pipeline_of, train

PURPOSES = ("making the process group", "building a Pipeline")
LIE = "a stranger says so"


def main() -> None:
    folder, own_group = Path(sys.argv[1]), "own-group" in sys.argv[2:]
    if own_group:
        dist.init_process_group("gloo")
    rank, seen = int(os.environ["RANK"]), {}
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        stranger = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
        tell_lies(stranger)
    if own_group:
        tell_lies(dist.group.WORLD.get_group_store())  # with prefixes that a stranger can know
        dist.barrier()
    if rank == 0:
        seen["before"] = stranger.num_keys()
    with pipeline_of(int(os.environ["WORLD_SIZE"])) as pipeline:
        losses = [train(pipeline, step, None) for step in range(2)]
        if rank == 0:
            seen |= {"after": stranger.num_keys(), "losses": losses}
            (folder / "seen.json").write_text(json.dumps(seen))


def tell_lies(store) -> None:
    """Write that ranks have failed, wherever Penstock would look for that."""
    for purpose in PURPOSES:
        for meeting in range(1, 4):
            store.set(f"penstock/{purpose}/{meeting}/failure", LIE)


if __name__ == "__main__":
    main()
