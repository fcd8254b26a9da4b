"""Run a job of several processes, forked or under torchrun, and read what its ranks report."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.kit.paths import ROOT
from tests.kit.waiting import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}


class Finished(NamedTuple):
    """A job that has ended."""

    returncode: int
    reports: dict[int, dict]
    output: str
    seconds: float


def torchrun(
    script: str | Path,
    num_ranks: int,
    *arguments: str,
    reports=True,
    limit_seconds=380,
    options=(),
    environment=(),
) -> Finished:
    """Start ``script`` on ``num_ranks`` processes and wait for it.

    With ``reports``, each rank may write ``report-<rank>.json`` into the folder that is
    the last argument of the job. ``options`` and ``environment`` are torchrun's.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), *options),
            *(str(script), *arguments, *([folder] if reports else [])),
        ]
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**ENVIRONMENT, **dict(environment)},
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
        seconds = time.monotonic() - start
        return Finished(
            done.returncode, reports_in(Path(folder)), done.stdout + done.stderr, seconds
        )


def forked(
    script: str | Path, num_ranks: int, *arguments: str, reports=True, limit_seconds=380
) -> Finished:
    """The same without torchrun: ranks are forked from a process that has loaded everything.

    For all that is not about how ranks are launched: torchrun and each of its ranks load torch for
    three seconds. Unlike torchrun, nobody ends the other ranks when one has failed.
    """
    template = _template()
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name), time.monotonic()
        output = folder / "output.txt"
        request = {
            "script": str(script),
            "num_ranks": num_ranks,
            "arguments": [*arguments, *([name] if reports else [])],
            "folder": name,
            "output": str(output),
        }
        template.stdin.write(json.dumps(request).encode() + b"\n")
        template.stdin.flush()
        in_time, _, _ = select.select([template.stdout], [], [], limit_seconds)
        if not in_time:
            os.killpg(int((folder / "job").read_text()), signal.SIGKILL)
        said = template.stdout.readline()
        assert said, "the process that ranks are forked from has ended"
        seconds = time.monotonic() - start
        assert in_time, f"the job has not ended within {limit_seconds} s:\n{output.read_text()}"
        assert (folder / "exits").exists(), output.read_text()
        failed = any(json.loads((folder / "exits").read_text()))
        return Finished(int(failed), reports_in(folder), output.read_text(), seconds)


@cache
def _template() -> subprocess.Popen:
    """The process that ranks are forked from; it ends with this one, whose pipe it reads."""
    template = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.template"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(template.communicate)
    return template


def stall(folder: Path, others: set[int], limit_seconds: float) -> None:
    """Do nothing, in a rank of a job, until all ``others`` have reported that they gave it up."""
    reports = [folder / f"report-{rank}.json" for rank in others]
    until(lambda: all(report.exists() for report in reports), limit_seconds)


def reports_in(folder: Path) -> dict[int, dict]:
    """What ranks have written, by their numbers."""
    return {
        int(path.stem.split("-")[1]): json.loads(path.read_text())
        for path in folder.glob("report-*.json")
    }
