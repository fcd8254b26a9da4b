"""Checks that the parts of a plan agree, whoever wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec.structs import replace

from penstock.base.errors import InputError, ModelError
from penstock.base.units import count_of
from penstock.base.values import MOST_BYTES, whole
from penstock.core.cluster import Device
from penstock.core.schedule import Schedule
from penstock.core.versions import Policy
from penstock.planning.plans.stage_plan import StagePlan, sharing_ranks
from penstock.planning.plans.summing import Summing

MOST_THREADS = 4096
"""Of a rank: no host has so many cores."""

MOST_STAGES = 10_000
"""No model has so many layers."""

MOST_MICROBATCHES = 10_000_000
"""Of a minibatch: a training has thousands."""

_MOST_NAMES = 8
"""Of layers that an error lists."""


def check_counts(least: int, **counts: int) -> None:
    """Raise ``InputError`` for a count of a plan that is below ``least``, or beyond all reason."""
    for name, count in counts.items():
        whole(name, count, least, MOST_BYTES)


def check_options(options: Collection[str]) -> None:
    """Raise ``InputError`` for an option of the schedule that the plan says elsewhere."""
    given = [name for name in ("name", "num_ranks", "num_microbatches") if name in options]
    if given:
        raise InputError(
            f"options: {given[0]} is none, it follows from the rest of the plan; leave it out"
        )


def check_layers(stages: Sequence[StagePlan], *, any_rank: bool) -> None:
    """Raise ``InputError`` unless every stage has layers and a rank, and no layer stands twice.

    Args:
        any_rank: whether there may be more ranks than stages, because stages have replicas.
    """
    if not stages:
        raise InputError("the plan has no stages; give it at least one")
    whole("the number of stages", len(stages), 1, MOST_STAGES)
    for index, stage in enumerate(stages):
        if not stage.layers:
            raise InputError(f"stage {index} has no layers; give it one or drop the stage")
        if not any_rank and stage.rank >= len(stages):
            count = len(stages)
            raise InputError(
                f"stage {index} is on rank {stage.rank}, but {count_of(count, 'stage')} "
                f"without replicas are on at most {count_of(count, 'rank')}"
            )
        unknown = [
            key for key in stage.splits if not any(means(key, name) for name in stage.layers)
        ]
        if unknown:
            raise InputError(
                f"stage {index}: splits has {unknown[0]!r}, which is no layer of this stage"
            )
    counts = Counter(name for stage in stages for name in stage.layers)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    if repeated:
        raise InputError(f"layers {', '.join(repeated)} stand in more than one place")


def means(key: str, layer: str) -> bool:
    """Whether a key of ``splits`` means a layer, or modules inside it.

    >>> means("blocks.*.mlp.0", "blocks.3"), means("blocks.*", "blocks.3"), means("*", "a.b")
    (True, True, False)
    """
    if key == layer:
        return True
    wanted, given = key.split("."), layer.split(".")
    return len(wanted) >= len(given) and all(map(fnmatchcase, given, wanted))


def with_splits(
    stages: Sequence[StagePlan], tensor_ranks: int, splits: Mapping[str, str]
) -> tuple[StagePlan, ...]:
    """Stages with as many tensor ranks, each with the splits that mean its layers.

    Raises:
        InputError: one means no layer of any.
    """
    layers = [name for stage in stages for name in stage.layers]
    unused = [key for key in splits if not any(means(key, name) for name in layers)]
    if unused:
        raise InputError(
            f"splits has {unused[0]!r}, which means no layer, and nothing in one; the layers are "
            f"{', '.join(map(repr, layers[:8]))}{' …' * (len(layers) > 8)}"
        )
    return tuple(
        replace(
            stage,
            tensor_ranks=tensor_ranks,
            splits={
                key: how
                for key, how in splits.items()
                if any(means(key, name) for name in stage.layers)
            },
        )
        for stage in stages
    )


def check_groups(stages_of: Sequence[Sequence[int]], stages: Sequence[StagePlan]) -> None:
    """Raise ``InputError`` unless the stages of a rank have as many tensor ranks, and layers are
    split only where there are devices to split them over.

    Args:
        stages_of: the stages of every rank.
    """
    for rank, own in enumerate(stages_of):
        sizes = sorted({stages[stage].tensor_ranks for stage in own})
        if len(sizes) > 1:
            raise InputError(
                f"rank {rank} has stages of {' and '.join(map(str, sizes))} tensor ranks; all "
                "stages of a rank are on the same devices, so give them the same number"
            )
    split = next((stage for stage in stages if stage.splits and stage.tensor_ranks == 1), None)
    if split is not None:
        raise InputError(
            f"layer {next(iter(split.splits))!r} is split, but tensor_ranks of its stage is 1; "
            "take the splits out, or give the stage several devices"
        )


def check_placement(schedule: Schedule, stages: Sequence[StagePlan], *, has_replicas: bool) -> None:
    """Raise ``InputError`` unless a schedule has as many stages as its plan, each on the rank where
    the plan has it.

    Args:
        has_replicas: whether a stage names the first of several ranks.
    """
    if schedule.num_stages != len(stages):
        raise InputError(
            f"{schedule.name} on {schedule.num_ranks} ranks has {schedule.num_stages} stages, but "
            f"the plan has {len(stages)}"
        )
    for index, stage in enumerate(stages):
        ranks = schedule.ranks_of(index)
        if has_replicas:
            ranks = ranks[:1]
        if stage.rank not in ranks:
            raise InputError(
                f"stage {index} is on rank {stage.rank}, but {schedule.name} runs it on rank "
                f"{', '.join(map(str, ranks))}"
            )


def check_recompute(stages: Sequence[StagePlan], schedule: str, policy: Policy) -> None:
    """Raise ``InputError`` if a stage is to run forward twice where a backward goes through what
    the newest forward has just left: there is nothing older to make again."""
    again = [index for index, stage in enumerate(stages) if stage.recompute == "stage"]
    if again and policy.activations == "newest":
        raise InputError(
            f"stage {again[0]} is to run forward twice, but {schedule} goes back right behind a "
            'forward, through what it has left; leave recompute out, or take "layers"'
        )


def check_replicas(replicas: Sequence[int], num_microbatches: int) -> None:
    """Raise ``InputError`` unless every replica has a microbatch of each minibatch."""
    if num_microbatches < max(replicas):
        raise InputError(
            f"a stage has {max(replicas)} replicas, but a minibatch has only "
            f"{count_of(num_microbatches, 'microbatch', 'es')}; each replica needs one"
        )


def check_summing(
    summing: Summing, versions: Policy, num_ranks: int, stages: Sequence[StagePlan]
) -> None:
    """Raise ``InputError`` for a way to sum gradients that does not go with a plan."""
    size, kind = max(stage.tensor_ranks for stage in stages), sharing_ranks(stages)
    rates = summing.bytes_per_second
    if rates and len(rates) != num_ranks:
        raise InputError(
            f"summing: bytes_per_second has {len(rates)} numbers for {num_ranks} ranks; "
            "give one for each, or none"
        )
    if summing.levels and len(summing.levels[0]) != num_ranks:
        raise InputError(
            f"summing: levels give the groups of {len(summing.levels[0])} ranks, and there are "
            f"{num_ranks}; give one number for each"
        )
    if size > 1 and summing.stale:
        raise InputError(
            f"stale updates: the {size} {kind} ranks of a stage compute with weights of the same "
            "update, and servers that wait for nobody would give each of them another; take "
            f"stale=0, or {kind}_ranks=1"
        )
    if size > 1 and summing.reducer == "fully-sharded":
        share = "add terms of their gradients" if kind == "context" else "have a part of each"
        raise InputError(
            f"the reducer 'fully-sharded' gathers whole layers, and here {size} {kind} ranks "
            f"{share}; take the reducer 'sharded', or {kind}_ranks=1"
        )
    if (
        summing.reducer in {"sharded", "fully-sharded", "parameter-server"}
        and versions.asynchronous
    ):
        raise InputError(
            f"the reducer {summing.reducer!r} needs a flush before each update, and this "
            "schedule has none; take 'owners', or a synchronous schedule"
        )


def check_levels(levels: Sequence[Sequence[int]], hosts: Sequence[int]) -> None:
    """Raise ``InputError`` unless groups that sum first are on one host, or of whole hosts.

    Args:
        hosts: of each rank; empty where nobody says.
    """
    everybody = Counter(hosts)
    for numbers in levels if hosts else ():
        groups: dict[int, Counter[int]] = {}
        for number, host in zip(numbers, hosts, strict=True):
            groups.setdefault(number, Counter())[host] += 1
        for number, own in groups.items():
            parted = [host for host, count in own.items() if count < everybody[host]]
            if len(own) > 1 and parted:
                raise InputError(
                    f"summing: levels: group {number} has ranks of hosts "
                    f"{', '.join(map(str, sorted(own)))}, and not all of host {parted[0]}; what "
                    "sums first is a part of one host, or whole hosts: change levels, or hosts"
                )


def check_devices(devices: Sequence[Device], needed: int) -> None:
    """Raise ``InputError`` unless every rank and tensor rank has a device of its own, or nobody
    says which."""
    if devices and len(devices) != needed:
        raise InputError(
            f"{needed} devices are needed, but {len(devices)} are named; name one for each rank "
            "and tensor rank, or none"
        )
    names = Counter(device.name for device in devices)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise InputError(f"device {twice[0]!r} is given to more than one rank; name another one")


def check_cards(cards: Sequence[int], hosts: Sequence[int], num_ranks: int) -> None:
    """Raise ``InputError`` unless every rank has a host and a card, or nobody says which."""
    for name, numbers, least in (("cards", cards, -1), ("hosts", hosts, 0)):
        if numbers and (len(numbers) != num_ranks or min(numbers) < least):
            raise InputError(
                f"{name} are {list(numbers)[:8]}, and there are {count_of(num_ranks, 'rank')}; "
                f"give a number ≥ {least} for each, or leave {name} out"
            )
    if bool(cards) != bool(hosts):
        raise InputError("hosts and cards come together; give both, or none")
    host_of = dict(zip(cards, hosts, strict=True))
    apart = [c for c, host in zip(cards, hosts, strict=True) if c >= 0 and host_of[c] != host]
    if apart:
        raise InputError(f"ranks of two hosts share the card {apart[0]}; give each host its own")


def check_model(
    planned: Sequence[str], planned_fingerprint: str, names: Sequence[str], fingerprint: str
) -> None:
    """Raise ``ModelError`` unless a model has the layers and the fingerprint that a plan was
    made for."""
    if list(planned) != list(names):
        missing = [name for name in names if name not in planned]
        unknown = [name for name in planned if name not in names]
        detail = (
            f"not in the plan: {_some(missing)}; not in the model: {_some(unknown)}"
            if missing or unknown
            else "the order of the layers differs; .ordered(names) changes a captured model's"
        )
        raise ModelError(
            f"the plan was made for another model ({detail}); profile and plan this one"
        )
    if fingerprint != planned_fingerprint:
        raise ModelError(
            "the plan was made for another model: the layers have the same names but other "
            "parameter shapes or dtypes; profile and plan this one"
        )


def _some(names: Sequence[str]) -> str:
    """The first of some names, and how many there are besides."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none") + more
