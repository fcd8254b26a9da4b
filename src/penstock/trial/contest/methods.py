"""The methods that a contest compares: for each, its plan on the devices that there are.
``ContestSetting`` has these, the workload and its profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from msgspec.structs import replace as replaced

from penstock.base.errors import InputError, PlanError
from penstock.core.cluster import Cluster, SpareMachine, Tier
from penstock.core.graph import LayerGraph
from penstock.core.versions import DoubleBuffer, PipeMare, Policy, Predict, Stash
from penstock.drawing.contest import ONE_DEVICE, WHOLE_BATCH
from penstock.planning import planner
from penstock.planning.plans import Plan
from penstock.planning.plans.summing import ReducerName
from penstock.trial.workload import Workload

Stage = Literal["cores", "emulated"]
"""Where methods show their pace: on this machine's cores, or on devices that only wait."""

_LEAST_TURN = 5


@dataclass(frozen=True)
class ContestSetting:
    """The workload, its profile and the devices, which all methods of a contest share.

    Attributes:
        workload: what is trained.
        graph: its profile, with microbatches and with whole minibatches.
        cluster: the devices that methods may take.
        num_microbatches: per minibatch.
        num_rows: of a minibatch.
        folder: for what comes and goes.
        stage: whether devices are this machine's cores, or emulated.
        load: makes the workload again, in other processes.
    """

    workload: Workload
    load: Callable[[], Workload]
    graph: LayerGraph
    cluster: Cluster
    num_microbatches: int
    num_rows: int
    folder: str
    stage: Stage = "cores"

    @property
    def num_devices(self) -> int:
        """How many devices a method may take."""
        return len(self.cluster.devices)

    @property
    def turn(self) -> int:
        """Minibatches that a method trains on before the next one's turn: enough for a stream to
        be more than its beginning and its end, since it drains there."""
        return max(_LEAST_TURN, 3 * self.num_devices)

    @property
    def whole(self) -> LayerGraph:
        """The profile with whole minibatches as microbatches."""
        return self.graph.at(self.num_rows)

    @cached_property
    def cuts(self) -> tuple[str, ...]:
        """The layers with which stages begin, one stage for each device: the same for all methods,
        so that what is compared is the methods."""
        plan = planner.plan(
            self.graph,
            self.cluster,
            microbatches=self.num_microbatches,
            schedule="1f1b",
            stages=self.num_devices,
            recompute="never",
        )
        return tuple(stage.layers[0] for stage in plan.stages[1:])

    @cached_property
    def tier(self) -> Tier:
        """Where stages are while they are not in memory; its speed is measured once."""
        return Cluster.local(1, tiers=[Tier(folder=self.folder)]).tiers[0]


WHOLE, ALL_CORES = WHOLE_BATCH, "all-cores"
"""Keys of one device that takes a minibatch at once, with one core, and with as many as there are
devices, which is what people would do."""

Runs = Literal["alone", "threads", "processes"]
"""One device without any engine; ranks as threads of one process; ranks as processes."""

_SPILLED_SHARES = (0.5, 0.65, 0.8, 0.95)
"""Of the memory that one device takes: the smallest of them in which the spilled plan fits."""


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        key: as ``--methods`` takes it.
        title: shown to people.
        page: the page below ``docs/`` that explains it.
        plan: how it spreads a workload; raises what a planner raises where it cannot.
        runs: where its ranks are if devices are this machine's cores.
        least_devices: fewer make no difference to one device.
        num_servers: processes besides its devices' that only sum gradients.
    """

    key: str
    title: str
    page: str
    plan: Callable[[ContestSetting], Plan]
    runs: Runs = "threads"
    least_devices: int = 2
    num_servers: int = 0

    def planned(self, setting: ContestSetting) -> Plan:
        """Its plan.

        Raises:
            InputError: there are too few devices, or whatever else stands in the way.
        """
        if setting.num_devices < self.least_devices:
            raise InputError(
                f"it takes {self.least_devices} devices or more, and there are "
                f"{setting.num_devices} (-p {self.least_devices})"
            )
        return self.plan(setting)


def _one(setting: ContestSetting) -> Plan:
    return planner.plan(
        setting.graph,
        Cluster(devices=setting.cluster.devices[:1]),
        microbatches=setting.num_microbatches,
        schedule="1f1b",
        stages=1,
        recompute="never",
    )


def _whole(setting: ContestSetting) -> Plan:
    return planner.plan(
        setting.whole,
        Cluster(devices=setting.cluster.devices[:1]),
        microbatches=1,
        schedule="1f1b",
        stages=1,
        recompute="never",
    )


def _with_all_cores(setting: ContestSetting) -> Plan:
    if setting.stage == "emulated":
        raise InputError("cores that share each operation cannot be emulated")
    return _whole(setting)


def _naive(setting: ContestSetting) -> Plan:
    return planner.plan(
        setting.whole,
        setting.cluster,
        microbatches=1,
        schedule="gpipe",
        cuts=setting.cuts,
        recompute="never",
    )


def _copied(reducer: ReducerName) -> Callable[[ContestSetting], Plan]:
    def plan(setting: ContestSetting) -> Plan:
        rate = setting.cluster.link.bytes_per_second
        # Where links count, so does who sums; a server's link is like the others.
        spares = (SpareMachine(name="server", bytes_per_second=rate),) if rate else ()
        copies = planner.plan(
            setting.graph,
            replaced(setting.cluster, spares=spares),
            microbatches=setting.num_microbatches,
            schedule="1f1b",
            stages=1,
            replicas=(setting.num_devices,),
            recompute="never",
            reducer=reducer if rate else "owners",
        )
        return copies.with_reducer(reducer)

    return plan


def _tensor(setting: ContestSetting) -> Plan:
    return planner.plan(
        setting.graph,
        setting.cluster,
        microbatches=setting.num_microbatches,
        schedule="1f1b",
        stages=1,
        tensor_ranks=setting.num_devices,
        recompute="never",
    )


def _family(family: str, stages_per_device: int = 1) -> Callable[[ContestSetting], Plan]:
    def plan(setting: ContestSetting) -> Plan:
        stages = None if stages_per_device == 1 else stages_per_device * setting.num_devices
        return planner.plan(
            setting.graph,
            setting.cluster,
            microbatches=setting.num_microbatches,
            schedule=family,
            stages=stages,
            cuts=() if stages else setting.cuts,
            recompute="never",
        )

    return plan


def _late(policy: Policy, *, whole: bool = False) -> Callable[[ContestSetting], Plan]:
    """A pipeline that never flushes; ``whole``: whose units are whole minibatches."""

    def plan(setting: ContestSetting) -> Plan:
        return planner.plan(
            setting.whole if whole else setting.graph,
            setting.cluster,
            microbatches=1 if whole else setting.num_microbatches,
            cuts=setting.cuts,
            versions=policy,
            recompute="never",
        )

    return plan


def _hybrid(setting: ContestSetting) -> Plan:
    """Stages × copies × tensor ranks, each 2 where there are eight devices; without tensor ranks
    where there are four."""
    tensor_ranks = 2 if setting.num_devices >= 8 else 1
    copies = setting.num_devices // (2 * tensor_ranks)
    used = setting.cluster.devices[: 2 * tensor_ranks * copies]
    return planner.plan(
        setting.graph,
        replaced(setting.cluster, devices=used),
        microbatches=setting.num_microbatches,
        schedule="1f1b",
        stages=2,
        replicas=(copies, copies),
        tensor_ranks=tensor_ranks,
        recompute="never",
    )


def _spilled(setting: ContestSetting) -> Plan:
    whole = max(_one(setting).rank_bytes)
    cluster = Cluster(devices=setting.cluster.devices[:1], tiers=(setting.tier,))
    refused: PlanError | None = None
    for share in _SPILLED_SHARES:
        try:
            return planner.plan(
                setting.graph,
                cluster,
                microbatches=setting.num_microbatches,
                memory_bytes=round(share * whole),
                spill="always",
            )
        except PlanError as error:
            refused = error
    assert refused is not None
    raise refused


METHODS: tuple[Method, ...] = (
    Method(ONE_DEVICE, "one device", "training.md", _one, "alone", 1),
    Method(WHOLE, "one device, whole batch", "training.md", _whole, "alone", 1),
    Method(ALL_CORES, "one device, all cores", "training.md", _with_all_cores, "alone", 2),
    Method(
        "all-reduce", "all-reduce (data parallel)", "data-parallelism.md", _copied("all-reduce"),
        "processes",
    ),
    Method(
        "parameter-server", "parameter server (data)", "data-parallelism.md",
        _copied("parameter-server"), "processes", num_servers=1,
    ),
    Method(
        "servers", "summation servers (data)", "summation-servers.md", _copied("servers"),
        "processes", num_servers=1,
    ),
    Method("naive", "naive model parallel", "planning.md", _naive),
    Method("tensor", "tensor parallel", "tensor-parallelism.md", _tensor),
    Method("gpipe", "GPipe", "schedules/gpipe.md", _family("gpipe")),
    Method("1f1b", "1F1B (DAPPLE)", "schedules/1f1b.md", _family("1f1b")),
    Method(
        "interleaved", "interleaved 1F1B", "schedules/interleaved-1f1b.md",
        _family("interleaved-1f1b", 2),
    ),
    Method("zero-bubble", "zero bubble (ZB-H1)", "schedules/zb-h1.md", _family("zb-h1")),
    Method(
        "pipedream", "PipeDream (stashed)", "versions/stash.md", _late(Stash(), whole=True)
    ),
    Method("2bw", "PipeDream-2BW", "versions/2bw.md", _late(DoubleBuffer())),
    Method("pipemare", "PipeMare", "versions/pipemare.md", _late(PipeMare(t1=20, t2=0.5))),
    Method(
        "predict", "weight prediction", "versions/predict.md", _late(Predict(), whole=True)
    ),
    Method("hybrid", "hybrid: stages × copies", "tensor-parallelism.md", _hybrid, least_devices=4),
    Method("spilled", "one device, spilled", "larger-than-memory.md", _spilled, least_devices=1),
)  # fmt: skip
"""Every method, in the order in which the docs explain them."""


def chosen_methods(names: Sequence[str], num_devices: int) -> tuple[Method, ...]:
    """The methods of these keys, in the usual order, one device among them; all by default.

    Raises:
        InputError: there is no such method.
    """
    keys = [method.key for method in METHODS]
    unknown = [name for name in names if name not in keys]
    if unknown:
        raise InputError(f"no method is called {unknown[0]!r}; there are {', '.join(keys)}")
    chosen = [
        method for method in METHODS if not names or method.key in names or method is METHODS[0]
    ]
    if num_devices >= 8:
        chosen = [
            replace(method, title="hybrid: stages × copies × tensor ranks")
            if method.key == "hybrid"
            else method
            for method in chosen
        ]
    return tuple(chosen)
