"""What the launcher of a rehearsal's processes writes, a line of JSON each."""

from __future__ import annotations

import msgspec

StepTimes = list[list[float]]
"""For each rank, when its ops start and end: start, end, start, end, …"""


class StepDone(msgspec.Struct, tag="step"):
    """One step has ended."""

    times: StepTimes


class Failed(msgspec.Struct, tag="failed"):
    """Nothing more will come; ``kind`` is a class of ``penstock.errors``."""

    kind: str
    message: str


Line = StepDone | Failed
