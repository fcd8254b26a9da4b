"""Run a job under torchrun and read what its ranks report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
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
) -> Finished:
    """Start ``script`` on ``num_ranks`` processes and wait for it.

    With ``reports``, each rank may write ``report-<rank>.json`` into the folder that is
    the last argument of the job.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks)),
            *(str(script), *arguments, *([folder] if reports else [])),
        ]
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
        reports = {
            int(path.stem.split("-")[1]): json.loads(path.read_text())
            for path in Path(folder).glob("report-*.json")
        }
        return Finished(
            done.returncode, reports, done.stdout + done.stderr, time.monotonic() - start
        )
