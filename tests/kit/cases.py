"""The main program of jobs that run one of several cases in all ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist


def run_case(
    cases: Mapping[str, Callable[[], list]], of_failing_ranks: Callable[[str], list] | None = None
) -> None:
    """In a rank of ``JOB CASE … FOLDER``: run the case, and report what it gives.

    Args:
        cases: by name.
        of_failing_ranks: given the name of any other case. In those, ranks are missing at the end
            to whom the others would have to say goodbye.
    """
    case, folder = sys.argv[1], Path(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = cases[case]() if case in cases else of_failing_ranks(case)
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    if case in cases:
        dist.destroy_process_group()
