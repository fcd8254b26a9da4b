"""What benchmarks ask of the system: bytes of this process, a port that nobody has."""

from __future__ import annotations

import socket
from pathlib import Path


def status_bytes(*entries: str) -> int:
    """Bytes in entries of this process's status, together."""
    lines = Path("/proc/self/status").read_text().splitlines()
    told = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(told[entry].split()[0]) * 1024 for entry in entries)


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
