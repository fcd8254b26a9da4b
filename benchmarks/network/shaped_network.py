"""Hosts with slow links on one machine: network namespaces, a bridge, and a token bucket per end.

    python -m benchmarks.network.shaped_network --hosts 4 --mbit 100 --
        penstock measure-cluster -o c.json

Runs the command once on every host, with the environment that torchrun would give it (one process
per host; rank 0 serves the store), and takes everything down again, whatever happens. Needs root
and iproute2 (`apt-get install iproute2`); where one is missing it says so and ends with code 77.

Each host is a network namespace with one end of a veth pair; the other ends meet on a bridge in a
namespace of its own, so that the machine's own network is left alone. Both ends are shaped by tbf,
which makes the link's rate hold in both directions. TCP's congestion control is set to cubic on the
route, because bbr misbehaves with queues as short as these; messages that come now and then neither
start slowly each time nor wait for acknowledgements, and what is lost at the end of one is sent
again soon, and not after the 200 ms that are usual in wide networks. Namespaces share the machine's
cores, memory and name; only the network is shaped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

SKIPPED = 77
"""Exit code of what cannot be run here, as test drivers read it."""

QUEUE_BYTES = "64kb"
BURST_BYTES = "4kb"
"""Passes at once: little, so that short messages are slow too, but more than a packet."""

_TCP = "congctl cubic quickack 1 rto_min 10ms"
_PREFIX = "10.77.0"
_PORT = "29577"
_INTERFACE = "wire"
_GRACE_SECONDS = 5.0


def missing() -> str | None:
    """Why networks cannot be shaped here; ``None`` if they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} is not installed; apt-get install iproute2"
    trial = f"penstock-{os.getpid()}-trial"
    try:
        _command(f"ip netns add {trial}")
        _command(f"ip netns del {trial}")
    except RuntimeError as error:
        return f"network namespaces are not allowed here: {error}"
    return None


def end_on_signals() -> None:
    """Make SIGTERM an ordinary end of this program, so that it leaves no namespaces behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def cannot_shape() -> bool:
    """Whether networks cannot be shaped here, which is then said; where they can, SIGTERM is an
    ordinary end from now on."""
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
    end_on_signals()
    return reason is not None


class ShapedNetwork:
    """Hosts on a switch, for use with ``with``.

    Args:
        num_hosts: at least 1, at most 200.
        mbit_per_second: of every host's link, in each direction.
    """

    def __init__(self, num_hosts: int, mbit_per_second: float) -> None:
        if not 1 <= num_hosts <= 200 or not mbit_per_second > 0:
            raise ValueError("between 1 and 200 hosts, and a positive rate")
        self._mbit = mbit_per_second
        stem = f"penstock-{os.getpid()}"
        self._switch = f"{stem}-switch"
        self.hosts = tuple(f"{stem}-{index}" for index in range(num_hosts))

    def __enter__(self) -> ShapedNetwork:
        try:
            self._build()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_down()

    def _build(self) -> None:
        for name in (self._switch, *self.hosts):
            _command(f"ip netns add {name}")
            _command(f"ip -n {name} link set lo up")
        _command(f"ip -n {self._switch} link add bridge0 type bridge")
        _command(f"ip -n {self._switch} link set bridge0 up")
        for index, host in enumerate(self.hosts):
            port = f"port{index}"
            _command(
                f"ip -n {self._switch} link add {port} type veth peer name {_INTERFACE} "
                f"netns {host}"
            )
            _command(f"ip -n {self._switch} link set {port} master bridge0 up")
            _command(f"ip -n {host} addr add {_PREFIX}.{index + 1}/24 dev {_INTERFACE}")
            _command(f"ip -n {host} link set {_INTERFACE} up")
            route = f"{_PREFIX}.0/24 dev {_INTERFACE} {_TCP}"
            _command(f"ip -n {host} route replace {route}")
            _command(f"ip netns exec {host} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")
            shape = f"root tbf rate {self._mbit}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
            _command(f"tc -n {host} qdisc replace dev {_INTERFACE} {shape}")
            _command(f"tc -n {self._switch} qdisc replace dev {port} {shape}")

    def _take_down(self) -> None:
        for name in (*self.hosts, self._switch):
            # Its devices, queues and addresses go with a namespace.
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def run(
        self,
        command: Sequence[str],
        *,
        limit_seconds: float = 600.0,
        environment: Mapping[str, str] | None = None,
        per_host: int = 1,
    ) -> int:
        """Run a command on every host at once.

        Args:
            command: program and arguments.
            limit_seconds: after which all are killed.
            environment: besides this process's and what torchrun gives.
            per_host: how many processes each host has, which share its link.

        Returns:
            The first exit code that is not 0, or 0. When one fails, the others are given a little
            time, and then killed.
        """
        with ExitStack() as stack:
            running = [
                stack.enter_context(self._start(rank, per_host, command, environment or {}))
                for rank in range(len(self.hosts) * per_host)
            ]
            stack.callback(_end_all, running)
            return _wait(running, limit_seconds)

    def _start(
        self, rank: int, per_host: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        host, place_on_host = divmod(rank, per_host)
        place = {
            "MASTER_ADDR": f"{_PREFIX}.1",
            "MASTER_PORT": _PORT,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts) * per_host),
            "LOCAL_RANK": str(place_on_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(host),
            "GLOO_SOCKET_IFNAME": _INTERFACE,
        }
        return subprocess.Popen(
            ["ip", "netns", "exec", self.hosts[host], *command],
            env={**os.environ, **environment, **place},
            # A group of its own, so that what it starts can be ended with it.
            start_new_session=True,
        )


def _command(text: str) -> None:
    done = subprocess.run(text.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{text}` failed: {done.stderr.strip()}")


def _wait(running: Sequence[subprocess.Popen[bytes]], limit_seconds: float) -> int:
    end = time.monotonic() + limit_seconds
    failed = 0
    while None in (codes := [process.poll() for process in running]):
        found = next(filter(None, codes), 0)
        if found and not failed:
            failed, end = found, min(end, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > end:
            return failed or 124
        time.sleep(0.05)
    return failed or next(filter(None, codes), 0)


def _end_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each link, in Mbit/s")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    command = [word for word in options.command if word != "--"]
    if cannot_shape():
        return SKIPPED
    with ShapedNetwork(options.hosts, options.mbit) as network:
        return network.run(command, limit_seconds=options.limit)


if __name__ == "__main__":
    sys.exit(main())
