"""What each way to sum gradients costs a stage: seconds, and bytes besides the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from penstock.cluster import SpareMachine
from penstock.planner.task import Task
from penstock.plans.summing import ReducerName, Summing
from penstock.summation.split import PART_OVERHEAD_SECONDS, best_part_bytes, best_split


@dataclass(frozen=True)
class Way:
    """A way to sum, for one setting.

    Attributes:
        task: what is planned.
        reducer: the way's name.
        num_sums: stages whose copies sum; servers divide their time among them.
    """

    task: Task
    reducer: ReducerName
    num_sums: int = 1

    def optimizer_bytes(self, whole: float, num_replicas: int) -> int:
        """Bytes of optimizer state on each copy of a stage that needs ``whole`` in all."""
        return ceil(whole / num_replicas) if self.reducer == "sharded" else ceil(whole)

    def update_seconds(self, whole: float, num_replicas: int) -> float:
        """Seconds of an update where a copy that updates everything takes ``whole``."""
        return whole / num_replicas if self.reducer == "sharded" else whole

    def exchange_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Seconds of one exchange among copies, without the additions that they wait for."""
        task = self.task
        link = task.topology.slowest_link(devices, num_bytes)
        if self.reducer != "servers" or len(devices) < 2 or not num_bytes:
            return task.communication.reduce_seconds(num_bytes, len(devices), link)
        rates = [rate_of(task, device, devices) for device in devices]
        if inf in rates:
            return task.communication.reduce_seconds(num_bytes, len(devices), link)
        servers = [one.bytes_per_second / self.num_sums for one in task.cluster.spares]
        split = best_split(num_bytes, rates, servers)
        # A flow shop: besides the slowest link's work, the first part comes before anything can
        # be added, and the last one goes to all when all is added; and each part costs a little.
        size, slowest = best_part_bytes(num_bytes, min(rates), len(devices)), min(rates)
        parting = (len(devices) + 1) * min(size, num_bytes) / slowest
        overhead = PART_OVERHEAD_SECONDS * num_bytes / size
        return split.seconds + parting + overhead + 2 * link.latency_seconds

    def added_bytes(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Bytes that a copy adds up itself."""
        return (len(devices) - 1) / len(devices) * num_bytes


def rate_of(task: Task, device: int, others: Sequence[int]) -> float:
    """Bytes per second of a device's slowest link to others; infinite where links cost nothing."""
    links = (task.topology.link(device, other) for other in others if other != device)
    return min((link.bytes_per_second or inf for link in links), default=inf)


def written(task: Task, reducer: ReducerName, devices: Sequence[Sequence[int]]) -> Summing:
    """What a plan says of a way to sum.

    Args:
        devices: of each rank, with the others that hold the same stage.
    """
    servers: tuple[SpareMachine, ...] = task.cluster.spares if reducer == "servers" else ()
    rates = [rate_of(task, own, group) for own, *group in devices]
    known = reducer == "servers" and not all(rate == inf for rate in rates)
    most = max((rate for rate in rates if rate < inf), default=0.0)
    # Who shares no stage sends no gradients; it only must have a number.
    told = tuple(most if rate == inf else rate for rate in rates) if known else ()
    return Summing(reducer=reducer, servers=servers, bytes_per_second=told)
