"""Says what a script finds around it: environment, arguments, paths, threads."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

OURS = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "TORCH_NCCL", "OMP_", "ROLE_", "GROUP_")


class Defined:
    """Something of this module that is pickled by its name."""


def main() -> None:
    """Write a file for this rank."""
    folder = Path(sys.argv[-1])
    found = {
        "environment": {
            name: value
            for name, value in os.environ.items()
            if any(part in name for part in OURS) and not name.startswith("PENSTOCK")
        },
        "arguments": [*sys.argv[:-1]],
        "first path": sys.path[0],
        "file": __file__,
        "name": __name__,
        "main": sys.modules["__main__"].main is main,
        "pickled": type(pickle.loads(pickle.dumps(Defined()))) is Defined,
        "source": inspect.getsource(Defined).splitlines()[0],
        "threads": torch.get_num_threads(),
        "draws": [torch.rand(1).item(), random.random(), np.random.random()],
        "leads a session": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "held back": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    }
    (folder / os.environ["RANK"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
