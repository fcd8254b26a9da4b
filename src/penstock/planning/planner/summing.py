"""What each way to sum gradients costs a stage: seconds, and bytes besides the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from penstock.core.cluster import SpareMachine
from penstock.core.summation.portions import num_portions
from penstock.core.summation.split import PART_OVERHEAD_SECONDS, best_part_bytes, best_split
from penstock.planning.partition.chain import RING
from penstock.planning.planner.task import Task
from penstock.planning.plans.summing import ReducerName, Summing


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
        if self.reducer == "parameter-server" and num_replicas > 1:
            return 0
        return ceil(whole / num_replicas) if self.reducer == "sharded" else ceil(whole)

    def update_seconds(self, whole: float, num_replicas: int) -> float:
        """Seconds of an update where a copy that updates everything takes ``whole``."""
        if self.reducer == "parameter-server" and num_replicas > 1:
            return whole / self._num_servers
        return whole / num_replicas if self.reducer == "sharded" else whole

    def num_parts(self, num_bytes: float, devices: Sequence[int]) -> int:
        """In how many parts gradients leave while the last backward makes them; 1 where they leave
        when it is done."""
        if self.reducer == "parameter-server" and len(devices) > 1:
            return 1  # who steps takes all gradients of a copy at once
        devices_here = [self.task.cluster.devices[device] for device in devices]
        model = self.task.communication
        if any(device.kind == "gpu" for device in devices_here) or model.name != RING:
            return 1  # an accelerator's gradients leave when all have been asked for
        # Whoever says what share hides has said it all; nothing that takes no time can hide.
        if model.overlap or not self.exchange_seconds(num_bytes, devices):
            return 1
        return num_portions(num_bytes)

    def exchange_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Seconds of one exchange among copies, without the additions that they wait for."""
        task = self.task
        link = task.topology.slowest_link(devices, num_bytes)
        if self.reducer == "parameter-server" and len(devices) > 1:
            return self._stepped_seconds(num_bytes, devices) + 2 * link.latency_seconds
        if self.reducer != "servers" or len(devices) < 2 or not num_bytes:
            return task.communication.reduce_seconds(num_bytes, len(devices), link)
        rates = [rate_of(task, device, devices) for device in devices]
        if inf in rates:
            return task.communication.reduce_seconds(num_bytes, len(devices), link)
        servers = self._rates_of(task.cluster.spares, devices)
        split = best_split(num_bytes, rates, servers)
        # A flow shop: besides the slowest link's work, the first part comes before anything can
        # be added, and the last one goes to all when all is added; and each part costs a little.
        size, slowest = best_part_bytes(num_bytes, min(rates), len(devices)), min(rates)
        parting = (len(devices) + 1) * min(size, num_bytes) / slowest
        overhead = PART_OVERHEAD_SECONDS * num_bytes / size
        return split.seconds + parting + overhead + 2 * link.latency_seconds

    @property
    def most_stale(self) -> int:
        """By how many updates gradients may be late."""
        return self.task.stale if self.reducer == "parameter-server" else 0

    @property
    def _num_servers(self) -> int:
        """Parameter servers, at least one."""
        return max(len(spares_of(self.task)), 1)

    def _rates_of(self, spares: Sequence[SpareMachine], devices: Sequence[int]) -> list[float]:
        """Bytes per second that machines have for one sum: of each stage with copies, and of each
        tensor rank of one, there is a sum."""
        num_sums = self.num_sums * self.task.num_devices_at(devices[0])
        return [spare.bytes_per_second / num_sums for spare in spares]

    def _stepped_seconds(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Seconds until parameter servers have all gradients, and copies all weights.

        Each of k servers has an equal slice. All weights of a slice leave when it has stepped, so
        the two directions follow one another.
        """
        rates = [rate_of(self.task, device, devices) for device in devices]
        servers = self._rates_of(spares_of(self.task), devices)
        own = num_bytes / min(rates)
        served = len(devices) * num_bytes / self._num_servers / min(servers, default=min(rates))
        return 2 * max(own, served)

    def added_bytes(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Bytes that whoever sums a slice adds up."""
        if self.reducer == "parameter-server":
            return (len(devices) - 1) / self._num_servers * num_bytes
        return (len(devices) - 1) / len(devices) * num_bytes


def spares_of(task: Task) -> tuple[SpareMachine, ...]:
    """The machines that parameter servers run on: where they need not wait for all, one decides
    what each update gets."""
    return task.cluster.spares[:1] if task.stale else task.cluster.spares


def rate_of(task: Task, device: int, others: Sequence[int]) -> float:
    """Bytes per second of a device's slowest link to others; infinite where links cost nothing."""
    links = (task.topology.link(device, other) for other in others if other != device)
    return min((link.bytes_per_second or inf for link in links), default=inf)


def written(task: Task, reducer: ReducerName, devices: Sequence[Sequence[int]]) -> Summing:
    """What a plan says of a way to sum.

    Args:
        devices: of each rank, with the others that hold the same stage.
    """
    uses_spares = reducer in {"servers", "parameter-server"}
    servers: tuple[SpareMachine, ...] = spares_of(task) if uses_spares else ()
    stale = task.stale if reducer == "parameter-server" else 0
    rates = [rate_of(task, own, group) for own, *group in devices]
    known = reducer == "servers" and not all(rate == inf for rate in rates)
    most = max((rate for rate in rates if rate < inf), default=0.0)
    # Who shares no stage sends no gradients; it only must have a number.
    told = tuple(most if rate == inf else rate for rate in rates) if known else ()
    return Summing(reducer=reducer, servers=servers, stale=stale, bytes_per_second=told)
