"""``Costs``: how long ops take, and how long their results take to other ranks.

``Exchange`` is how long the copies of a stage take to sum their gradients, part by part. Each part
passes the same things one after another (a link, whoever adds, the link of a host, …), and each of
these works on one part at a time, in the order of the parts. In a workshop this is a flow shop:
were all P parts there at the beginning, the last one would be through after
Σ tₖ + (P − 1) · max tₖ, where part by part tₖ is what the k-th thing takes. But parts are made one
after another, by the last backward, so most of them pass while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.base.errors import InputError
from penstock.base.values import amount, is_number, items_of, shown, whole
from penstock.core.schedule.op import Kind, Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.core.schedule.residence import StageResidency

    Moment = TypeVar("Moment", float, NDArray[np.float64])


class Exchange(NamedTuple):
    """The exchange of a stage's copies before an update.

    Attributes:
        num_parts: of equal size.
        seconds: of one part on each thing that it passes, in order; at least one.
        once: seconds that come once besides, behind the last part: latencies.
    """

    num_parts: int
    seconds: tuple[float, ...]
    once: float = 0.0

    def checked(self, whose: str) -> Exchange:
        """This exchange with plain numbers.

        Raises:
            InputError: there is no part, nothing that parts pass, or a time is none.
        """
        count = whole(f"{whose}: num_parts", self.num_parts, 1)
        if not self.seconds:
            raise InputError(f"{whose}: seconds is empty; give one number per thing that is passed")
        seconds = tuple(amount(f"{whose}: seconds", each) for each in self.seconds)
        return Exchange(count, seconds, amount(f"{whose}: once", self.once))

    def made(self, begin: Moment, end: Moment) -> list[Moment]:
        """When the parts but the last are made, which leave while a copy's last backward runs:
        evenly during that. The last one leaves when the copy hands in.

        Args:
            begin, end: of that backward; of several copies, an entry each.
        """
        count = self.num_parts
        return [begin + (end - begin) * part / count for part in range(1, count)]

    def scaled(self, factor: float) -> Exchange:
        """This exchange with all times times ``factor``."""
        seconds = tuple(each * factor for each in self.seconds)
        return Exchange(self.num_parts, seconds, self.once * factor)


PerStage = float | Sequence[float]

_NO_SECONDS = ("exchanges", "cards", "hosts")
_COMPUTE = ("forward", "backward_input", "backward_weight", "backward", "recompute")


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) that each kind of op takes. A number holds for every stage; a sequence
    gives one number per stage.

    Attributes:
        forward: F.
        backward_input: I.
        backward_weight: W.
        hop: from the end of an op until its result is usable on another rank; entry s is the edge
            between stages s and s+1, in both directions.
        link: of a hop, how long it keeps the link busy, so that the next message from the same rank
            to the same rank waits; 0 where any number can travel at once.
        update: the optimizer's step of a stage, once per minibatch.
        recompute: R; by default as long as the forward that it repeats.
        backward: a full backward B; by default ``backward_input + backward_weight``.
        reduce: from the moment the last copy of a stage has handed in its gradients until their
            sum is there; overlaps with compute.
        exchanges: per stage, how the sum is exchanged part by part while the last backwards run,
            in the place of ``reduce``; ``None`` where ``reduce`` says how long it takes.
        cards: of each rank, the number of the network card through which it reaches other hosts;
            ranks of equal numbers share one, and −1 is no card. A message keeps the sender's card
            busy in one direction and the receiver's in the other, as long as the link; what parts
            of an exchange between hosts pass first are the cards of all of its ranks. By default
            nobody shares anything.
        hosts: of each rank, the number of its host; by default every card is one.

    Raises:
        InputError: a cost is no number, negative, or neither 0 nor between 1e-30 and 1e30.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    hop: PerStage = 0.0
    update: PerStage = 0.0
    recompute: PerStage | None = None
    reduce: PerStage = 0.0
    backward: PerStage | None = None
    link: PerStage = 0.0
    fetch: PerStage = 0.0
    leave: PerStage = 0.0
    fetch_state: PerStage = 0.0
    leave_state: PerStage = 0.0
    fetch_stash: PerStage = 0.0
    leave_stash: PerStage = 0.0
    exchanges: Sequence[Exchange | None] = ()
    cards: Sequence[int] = ()
    hosts: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._check_exchanges()
        self._check_places()
        for field in fields(self):
            if field.name in _NO_SECONDS:
                continue
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            numbers = [value] if is_number(value) else items_of(value)
            if numbers is None or not all(map(is_number, numbers)):
                raise InputError(
                    f"costs: {field.name} is {shown(value)}; give a number, or a list with one "
                    "per stage"
                )
            # Plain floats, whatever they came as: numpy's would be slower and print differently.
            plain = tuple(amount(f"costs: {field.name}", number) for number in numbers)
            object.__setattr__(self, field.name, plain[0] if is_number(value) else plain)

    def _check_places(self) -> None:
        for name in ("cards", "hosts"):
            if items_of(getattr(self, name)) is None:
                raise InputError(
                    f"costs: {name} is {shown(getattr(self, name))}; give a list with a number per "
                    "rank, or leave it out"
                )
        cards = tuple(whole("costs: cards", number, -1) for number in self.cards)
        object.__setattr__(self, "cards", cards)
        hosts = tuple(whole("costs: hosts", number, 0) for number in self.hosts)
        if hosts and len(hosts) != len(cards):
            raise InputError(
                f"costs: hosts has {len(hosts)} numbers, and cards has {len(cards)}; give one of "
                "each for every rank, or no hosts"
            )
        object.__setattr__(self, "hosts", hosts or cards)

    def _check_exchanges(self) -> None:
        exchanges = items_of(self.exchanges)
        if exchanges is None or not all(
            isinstance(exchange, Exchange | None) for exchange in exchanges
        ):
            raise InputError(
                f"costs: exchanges is {shown(self.exchanges)}; give an Exchange or None per stage"
            )
        checked = tuple(
            None if exchange is None else exchange.checked("costs: exchanges")
            for exchange in exchanges
        )
        object.__setattr__(self, "exchanges", checked)

    def check_stages(self, num_stages: int) -> None:
        """Raise ``InputError`` if a per-stage cost does not give ``num_stages`` numbers."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("cards", "hosts") or (field.name == "exchanges" and not value):
                continue
            # The last stage has no edge behind it, so its hop may be left out.
            edges = field.name in ("hop", "link")
            enough = {num_stages, num_stages - 1} if edges else {num_stages}
            if isinstance(value, tuple) and len(value) not in enough:
                raise InputError(
                    f"costs: {field.name} has {len(value)} numbers, but the schedule has "
                    f"{num_stages} stages; give one number, or one per stage"
                )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ``InputError`` if ``cards`` does not give one number per rank."""
        if self.cards and len(self.cards) != num_ranks:
            raise InputError(
                f"costs: cards has {len(self.cards)} numbers, but the schedule has {num_ranks} "
                "ranks; give the card of each, or none"
            )

    def duration(self, op: Op) -> float:
        """How long ``op`` keeps its rank busy. Communication takes none of the rank's time."""
        match op.kind:
            case Kind.FORWARD:
                taken = self.forward
            case Kind.RECOMPUTE:
                taken = self.forward if self.recompute is None else self.recompute
            case Kind.BACKWARD_INPUT:
                taken = self.backward_input
            case Kind.BACKWARD_WEIGHT:
                taken = self.backward_weight
            case Kind.BACKWARD if self.backward is not None:
                taken = self.backward
            case Kind.BACKWARD:
                return _at(self.backward_input, op.stage) + _at(self.backward_weight, op.stage)
            case Kind.UPDATE | Kind.LATE_UPDATE:
                taken = self.update
            case _:
                taken = 0.0
        return _at(taken, op.stage)

    def delay(self, needed: Op, op: Op) -> float:
        """How long the result of ``needed``, on another rank, takes to reach ``op``."""
        if op.kind is Kind.UPDATE:
            return _at(self.reduce, op.stage)
        return _at(self.hop, min(needed.stage, op.stage))

    @property
    def has_exchanges(self) -> bool:
        """Whether any stage sums its gradients part by part."""
        return any(self.exchanges)

    def exchange(self, stage: int) -> Exchange | None:
        """How the copies of a stage sum part by part; ``None`` if they do not."""
        return self.exchanges[stage] if self.exchanges else None

    @property
    def has_busy_links(self) -> bool:
        """Whether messages may have to wait for each other."""
        return bool(self.link if isinstance(self.link, float) else any(self.link))

    def occupies(self, first_stage: int) -> float:
        """How long a message keeps the link between a stage and the next one busy."""
        return _at(self.link, first_stage)

    def fetching(self, stay: StageResidency) -> float:
        """How long a stage takes to come into memory for a stay; the state for an update behind
        backwards comes while they run (``fetch_state``)."""
        weights, state = _at(self.fetch, stay.stage), _at(self.fetch_state, stay.stage)
        return (2 * weights + state) if stay.late else weights

    def weights_seconds(self, stage: int) -> float:
        """How long the weights of a stage take to come into memory."""
        return _at(self.fetch, stage)

    def state_seconds(self, stage: int) -> float:
        """How long the optimizer state of a stage takes to come into memory."""
        return _at(self.fetch_state, stage)

    def stash_seconds(self, op: Op) -> float:
        """How long what a microbatch keeps takes to leave, or to come back."""
        takes = self.leave_stash if op.kind is Kind.LEAVE_STASH else self.fetch_stash
        return _at(takes, op.stage)

    def leaving(self, stay: StageResidency) -> float:
        """How long it takes to write what a stay has changed."""
        weights, state = _at(self.leave, stay.stage), _at(self.leave_state, stay.stage)
        gradients = stay.backward and not stay.updates
        return weights * (stay.changes + gradients) + state * stay.changes

    def spread(self, stages_per_rank: float) -> Costs:
        """The costs of each stage where plain numbers are those of a whole rank's layers, so that
        schedules with one stage per rank and with several train the same model: an even share of
        the compute. Lists are per stage already, and a hop takes as long as before."""
        values = {name: getattr(self, name) for name in (*_COMPUTE, "update")}
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        shared: dict[str, Any] = {name: value / stages_per_rank for name, value in numbers.items()}
        return replace(self, **shared)

    def scaled(self, factor: float) -> Costs:
        """These costs with all durations times ``factor``."""
        exchanges = [exchange and exchange.scaled(factor) for exchange in self.exchanges]
        names = [field.name for field in fields(self)]
        return replace(self._multiplied(factor, names), exchanges=exchanges)

    def of_slices(self, num_slices: int) -> Costs:
        """The costs of one slice where these are those of a whole microbatch: an even share of the
        compute; a hop is paid per message, and an update once."""
        return self._multiplied(1 / num_slices, _COMPUTE)

    def with_longer_hops(self, seconds: float) -> Costs:
        """These costs with ``seconds`` added to every hop."""
        if isinstance(self.hop, float):
            return replace(self, hop=self.hop + seconds)
        return replace(self, hop=[hop + seconds for hop in self.hop])

    def _multiplied(self, factor: float, names: Iterable[str]) -> Costs:
        changed: dict[str, Any] = {}
        for name in names:
            if name in _NO_SECONDS:
                continue
            value: PerStage | None = getattr(self, name)
            if isinstance(value, float):
                changed[name] = value * factor
            elif value is not None:
                changed[name] = [cost * factor for cost in value]
        return replace(self, **changed)


def _at(value: PerStage, stage: int) -> float:
    return value if isinstance(value, int | float) else value[stage]
