"""What the parts of a plan must agree on, whoever wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.cluster import Device
from penstock.errors import InputError
from penstock.plans.stage_plan import StagePlan
from penstock.plans.table import count_of


def check_layers(stages: Sequence[StagePlan], *, any_rank: bool) -> None:
    """Raise ``InputError`` unless every stage has layers and a rank, and no layer stands twice.

    Args:
        stages: of a plan.
        any_rank: whether there may be more ranks than stages, because stages have replicas.
    """
    if not stages:
        raise InputError("the plan has no stages; give it at least one")
    for index, stage in enumerate(stages):
        if not stage.layers:
            raise InputError(f"stage {index} has no layers; give it one or drop the stage")
        if not any_rank and stage.rank >= len(stages):
            count = len(stages)
            raise InputError(
                f"stage {index} is on rank {stage.rank}, but {count_of(count, 'stage')} "
                f"without replicas are on at most {count_of(count, 'rank')}"
            )
        unknown = [name for name in stage.splits if name not in stage.layers]
        if unknown:
            raise InputError(
                f"stage {index}: splits has {unknown[0]!r}, which is no layer of this stage"
            )
    counts = Counter(name for stage in stages for name in stage.layers)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise InputError(f"layers {', '.join(repeated)} stand in more than one place")


def check_devices(
    devices: Sequence[Device], num_ranks: int, num_tensor_ranks: int, stages: Sequence[StagePlan]
) -> None:
    """Raise ``InputError`` unless every rank and tensor rank has a device of its own, or nobody
    says which, and layers are split only where there are devices to split them over."""
    needed = num_ranks * num_tensor_ranks
    if devices and len(devices) != needed:
        raise InputError(
            f"{needed} devices are needed, but {len(devices)} are named; name one for each rank "
            "and tensor rank, or none"
        )
    names = Counter(device.name for device in devices)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise InputError(f"device {twice[0]!r} is given to more than one rank; name another one")
    split = next((stage for stage in stages if stage.splits), None)
    if split is not None and num_tensor_ranks == 1:
        raise InputError(
            f"layer {next(iter(split.splits))!r} is split, but num_tensor_ranks is 1; take the "
            "splits out, or give each rank several devices"
        )


def check_kinds(devices: Sequence[Device]) -> None:
    """Raise ``InputError`` if a plan's devices are some that nothing trains on yet."""
    gpus = [device.name for device in devices if device.kind == "gpu"]
    if gpus:
        more = f" and {len(gpus) - 4} more" if len(gpus) > 4 else ""
        raise InputError(
            f"the plan is for GPUs ({', '.join(gpus[:4])}{more}), but Penstock trains on CPUs "
            "today and would leave them idle; plan for cores, as in Cluster.local(2), or perform "
            "it without compute: penstock rehearse"
        )
