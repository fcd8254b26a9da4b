"""A process that has loaded what jobs of several ranks need, and forks itself into their ranks.

    python -m tests.kit.template

``launch.forked`` starts it and asks it for jobs, one after another. A rank begins in milliseconds
where one under torchrun loads torch for three seconds; it has the same environment, and a store
that a process of its own keeps. At its end it does what an interpreter does, but for taking apart
all modules, by which each would copy the memory of everything that was loaded.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

# For the ranks, which then need not load them.
import tests.kit.helpers
import tests.numerics.test_asynchronous  # noqa: F401 - with what jobs share of it, and pytest


def main() -> None:
    """Serve requests, a line of JSON each, until there are no more."""
    torch.set_num_threads(1)
    # The first optimizer loads what takes longer than torch itself.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    while line := sys.stdin.readline():
        request = json.loads(line)
        load_for(request["script"])
        job = os.fork()
        if job == 0:
            be_job(request)
        os.waitpid(job, 0)
        print("done", flush=True)


def load_for(script: str) -> None:
    """Import what a script imports first: once, and not in each of its ranks."""
    loaded = len(sys.modules)
    tree = ast.parse(Path(script).read_text())
    tree.body = [part for part in tree.body if isinstance(part, ast.Import | ast.ImportFrom)]
    with contextlib.suppress(Exception):  # the ranks tell it
        exec(compile(tree, script, "exec"), {})
    if len(sys.modules) > loaded:
        gc.collect()
        gc.freeze()  # a rank that looks through all objects would copy the memory of them


def be_job(request: dict) -> None:
    """Start the ranks of a job and wait for them."""
    os.setsid()  # whoever gives the job up ends this whole group of processes
    redirect(request["output"])
    Path(request["folder"], "job").write_text(str(os.getpid()))
    here, there = socket.socketpair()
    keeper = os.fork()
    if keeper == 0:
        keep_store(there)
    port = int.from_bytes(here.recv(4), "big")
    here.close()
    there.close()
    ranks = []
    for rank in range(request["num_ranks"]):
        child = os.fork()
        if child == 0:
            end(be_rank(request, rank, port))
        ranks.append(child)
    exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    Path(request["folder"], "exits").write_text(json.dumps(exits))
    os._exit(0)


def redirect(output: str) -> None:
    """Let this process and its children read nothing and write into a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(written)


def keep_store(channel: socket.socket) -> None:
    """Keep the job's store, as torchrun's agent does, until the job ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel.send(store.port.to_bytes(4, "big"))
    while True:
        time.sleep(1000)


def be_rank(request: dict, rank: int, port: int) -> int:
    """Run the script as torchrun would; gives its exit code."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": request["num_ranks"],
        "LOCAL_WORLD_SIZE": request["num_ranks"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    os.environ |= {name: str(value) for name, value in place.items()}
    sys.argv = [request["script"], *request["arguments"]]
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        print(f"rank {rank} of {Path(request['script']).name}:", file=sys.stderr)
        traceback.print_exc()
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End this process."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # the script has closed it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
