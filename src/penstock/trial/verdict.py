"""``Proof``: the result of comparing a plan's training with an independent reference; ``Sides`` are
the two models that are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isclose, sqrt
from textwrap import fill

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from penstock.base.errors import InputError
from penstock.core.versions import PipeMare, Predict
from penstock.engine.model.spine import spine_fingerprint, spine_of
from penstock.engine.run.building import in_layers
from penstock.planning.plans import Plan
from penstock.trial.curvature import layers_of_stages
from penstock.trial.workload import Workload

_WIDTH = 80


@dataclass(frozen=True)
class Difference:
    """How far a parameter or buffer of the pipeline is from the reference's, at its worst entry.

    Attributes:
        name: the tensor's name in the model.
        absolute: the difference; infinite where only one of them is finite.
        ulps: the difference in units in the last place of the tensor's largest entry.
        share: the difference over the way that training has moved the tensor's most moved entry.
        allowed: whether the difference may be so large.
    """

    name: str
    absolute: float
    ulps: float
    share: float
    allowed: bool

    @property
    def words(self) -> str:
        """The difference as text."""
        if not self.absolute:
            return "0, to the bit"
        return f"{self.absolute:.2g} ({self.ulps:.3g} ulp)"


@dataclass(frozen=True)
class ProofRow:
    """The comparison of one stage.

    Attributes:
        layers: names of the stage's layers.
        delay: what the policy's formula says, in updates.
        recorded_delay: the mean that the run recorded in the steady state; ``None`` for a
            synchronous plan, which has none.
        versions: how many the stage holds by the policy's formula.
        held: how many each rank of the stage held in the run; empty for a synchronous plan, and
            for a stage whose weights did not change.
        differences: one for each parameter and buffer, in the model's order.
    """

    layers: tuple[str, ...]
    delay: float
    recorded_delay: float | None
    versions: int
    held: tuple[int, ...]
    differences: tuple[Difference, ...]

    @property
    def largest(self) -> Difference | None:
        """The largest difference, by units in the last place; ``None`` without any tensors."""
        return max(
            self.differences, key=lambda tensor: (not tensor.allowed, tensor.ulps), default=None
        )

    @property
    def as_planned(self) -> bool:
        """Whether delay and versions are what the formulas say."""
        timely = self.recorded_delay is None or isclose(self.recorded_delay, self.delay)
        return timely and set(self.held) <= {self.versions}


@dataclass(frozen=True)
class Proof:
    """The result of ``prove``.

    Attributes:
        plan: the plan that was run.
        reference: what it was compared with, in words.
        expected: how equal they should be, in words.
        losses: (pipeline's, reference's) of each minibatch.
        loss_tolerance: by how much losses may differ, relative to the largest.
        rows: one per stage.
        misread: (stage, microbatch) whose recorded delay is not the one that the replay made.
        num_before: how many minibatches came before a checkpoint, from which the others went on.
    """

    plan: Plan
    reference: str
    expected: str
    losses: tuple[tuple[float, float], ...]
    loss_tolerance: float
    rows: tuple[ProofRow, ...]
    misread: tuple[tuple[int, int], ...] = ()
    num_before: int = 0

    @property
    def equal(self) -> bool:
        """Whether everything is as it should be."""
        return not self.faults

    @property
    def exact(self) -> bool:
        """Whether losses, parameters and buffers are equal to the bit."""
        tensors = (tensor for row in self.rows for tensor in row.differences)
        return all(ours == theirs for ours, theirs in self.losses) and not any(
            tensor.absolute for tensor in tensors
        )

    @property
    def faults(self) -> tuple[str, ...]:
        """The deviations from what should be, a sentence each."""
        faults = []
        scale = max(abs(theirs) for _, theirs in self.losses)
        for number, (ours, theirs) in enumerate(self.losses):
            if not abs(ours - theirs) <= self.loss_tolerance * scale:
                faults.append(
                    f"the loss of minibatch {number} is the first that differs: {ours!r} instead "
                    f"of {theirs!r}"
                )
                break
        faults += self._wrong_weights()
        for stage, row in enumerate(self.rows):
            if not row.as_planned:
                faults.append(
                    f"stage {stage} has a delay of {_number(row.recorded_delay)} and holds "
                    f"{_several(row.held)} versions, but the formulas say {_number(row.delay)} and "
                    f"{row.versions}"
                )
        if self.misread:
            stage, k = self.misread[0]
            faults.append(f"stage {stage} is the first with another delay, at microbatch {k}")
        return tuple(faults)

    def _wrong_weights(self) -> list[str]:
        wrong = [
            (stage, tensor)
            for stage, row in enumerate(self.rows)
            for tensor in row.differences
            if not tensor.allowed
        ]
        if not wrong:
            return []
        stage, first = wrong[0]
        total = sum(len(row.differences) for row in self.rows)
        return [
            f"{len(wrong)} of {total} parameters and buffers differ, first {first.name!r} of stage "
            f"{stage}, by {first.absolute:.2g}, {first.ulps:.3g} units in its last place, "
            f"{first.share:.2g} of the way that training has moved it"
        ]

    @property
    def verdict(self) -> str:
        """Whether the plan is proven, in one sentence."""
        if not self.equal:
            doubt = "; train in float64 to rule out rounding" if self.loss_tolerance > 1e-7 else ""
            return f"NOT equal: {'; '.join(self.faults)}{doubt}."
        how = "equal to the bit" if self.exact else "equal up to rounding"
        delays = "; delays and versions held are what the formulas say"
        return (
            f"Proven: after {len(self.losses)} minibatches, losses and weights of {self._who} are "
            f"those of {self.reference}, {how}"
            f"{delays if self.plan.versions.asynchronous else ''}."
        )

    @property
    def _who(self) -> str:
        policy = self.plan.versions
        return self.plan.schedule + (f" with {policy.name}" if policy.asynchronous else "")

    def text(self) -> str:
        """The proof for people: a table with a row per stage, and the verdict."""
        columns: list[tuple[str, ...]] = [
            ("stage", "layers", "delay", "recorded", "versions", "held", "difference")
        ]
        columns += [
            (
                str(stage),
                _short(row.layers),
                _number(row.delay),
                _number(row.recorded_delay),
                str(row.versions),
                _several(row.held),
                row.largest.words if row.largest else "no weights",
            )
            for stage, row in enumerate(self.rows)
        ]
        if not self.plan.versions.asynchronous:
            columns = [(*row[:2], row[-1]) for row in columns]
        widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in columns)
        (first, _), (last, _) = self.losses[0], self.losses[-1]
        furthest = max(abs(ours - theirs) for ours, theirs in self.losses)
        saved = f", saved after {self.num_before} and resumed," if self.num_before else ""
        title = (
            f"{self._who}, {len(self.losses)} minibatches{saved or ','} against {self.reference}"
        )
        return "\n".join(
            [
                fill(f"{title}; expected: {self.expected}", _WIDTH),
                "",
                *lines,
                "",
                f"loss: {first:.4g} → {last:.4g}, largest difference {furthest:.2g}",
                fill(self.verdict, _WIDTH, break_long_words=False),
            ]
        )

    def numbers(self) -> dict[str, object]:
        """The proof for programs."""
        return {
            "equal": self.equal,
            "exact": self.exact,
            "verdict": self.verdict,
            "expected": self.expected,
            "reference": self.reference,
            "losses": [ours for ours, _ in self.losses],
            "reference_losses": [theirs for _, theirs in self.losses],
            "stages": [
                {
                    **{key: value for key, value in asdict(row).items() if key != "differences"},
                    "largest_difference": asdict(row.largest) if row.largest else None,
                }
                for row in self.rows
            ],
        }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _several(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(set(counts)))) or "–"


def _short(layers: tuple[str, ...]) -> str:
    if len(layers) == 1:
        return layers[0]
    return f"{len(layers)}: {layers[0]} … {layers[-1]}"


_LAST_PLACES = 16
"""The units in the last place by which a tensor may be off where sums have another order, however
little training has moved it."""


@dataclass(frozen=True)
class Sides:
    """Two models that begin equal, one for the pipeline and one for the reference.

    Attributes:
        plan: the plan of both.
        model: the pipeline's.
        twin: the reference's.
        initial: parameters and buffers before training, by name.
        names: names of each stage's parameters and buffers; those outside all layers count as the
            last stage's.
        rounding: why sums may have another order; empty where everything is equal to the bit.
    """

    plan: Plan
    model: nn.Module
    twin: nn.Module
    initial: dict[str, Tensor]
    names: tuple[tuple[str, ...], ...]
    rounding: str

    @classmethod
    def of(cls, workload: Workload, plan: Plan, float64: bool) -> Sides:
        """Build both models.

        Raises:
            InputError: they do not begin equal, or never can be.
            ModelError: the plan is for another model.
        """
        model, twin = (in_layers(workload.build_model(), plan) for _ in range(2))
        layers = layers_of_stages(model, plan)
        rounding = _rounding(plan, [layer.module for stage in layers for layer in stage])
        if float64:
            model, twin = model.double(), twin.double()
            plan = replace(plan, model=spine_fingerprint(spine_of(model)))
        initial = {name: value.detach().clone() for name, value in _tensors(model).items()}
        stage_of = {
            id(tensor): stage
            for stage, own in reversed(list(enumerate(layers)))
            for layer in own
            for tensor in (*layer.module.parameters(), *layer.module.buffers())
        }
        names: list[list[str]] = [[] for _ in layers]
        for name, tensor in _tensors(model).items():
            names[stage_of.get(id(tensor), -1)].append(name)
        sides = cls(plan, model, twin, initial, tuple(map(tuple, names)), rounding)
        sides._check_equal()
        return sides

    def _check_equal(self) -> None:
        for stage, names in enumerate(self.names):
            for name, apart in zip(names, self.differences(stage), strict=True):
                if apart.absolute:
                    raise InputError(
                        "build_model gives other weights at each call, so there is nothing to "
                        f"compare: first {name!r} of stage {stage}, by {apart.absolute:.2g}; call "
                        "torch.manual_seed in it"
                    )

    @property
    def expected(self) -> str:
        """How equal the two sides should be."""
        return (
            f"equal up to rounding, because {self.rounding}"
            if self.rounding
            else "equal to the bit"
        )

    def differences(self, stage: int) -> tuple[Difference, ...]:
        """The difference of each parameter and buffer of a stage, in the model's order."""
        ours, theirs = _tensors(self.model), _tensors(self.twin)
        return tuple(
            _difference(name, ours[name], theirs[name], self.initial[name], bool(self.rounding))
            for name in self.names[stage]
        )

    def has_moved(self, stage: int) -> bool:
        """Whether training has changed a parameter of a stage."""
        theirs = dict(self.twin.named_parameters())
        return any(
            name in theirs and not torch.equal(theirs[name].cpu(), self.initial[name].cpu())
            for name in self.names[stage]
        )


def _rounding(plan: Plan, modules: Sequence[nn.Module]) -> str:
    """Why sums have another order than the reference's, as the documents say."""
    placement, policy = plan.placement, plan.versions
    if placement.num_slices > 1:
        for module in modules:
            for part in module.modules():
                if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                    raise InputError(
                        "with slices of a sequence, dropout draws for each slice, which one device "
                        "cannot: make the workload's model without dropout to prove its plan"
                    )
        return "one device runs whole sequences, not slices"
    users = Counter(id(weight) for module in modules for weight in module.parameters())
    reasons = {
        "tensor ranks add what each of them has": plan.num_tensor_ranks > 1,
        "layers share weights, whose gradients are added": max(users.values(), default=1) > 1,
        "weights are predicted": isinstance(policy, Predict),
        "PipeMare's drift is a running mean": isinstance(policy, PipeMare)
        and policy.t2 is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _difference(
    name: str, ours: Tensor, theirs: Tensor, initial: Tensor, rounds: bool
) -> Difference:
    inexact = theirs.is_floating_point() or theirs.is_complex()
    ours, wanted, before = map(_plain, (ours, theirs, initial))
    absolute = _furthest(ours, wanted)
    if not absolute:
        return Difference(name, 0.0, 0.0, 0.0, allowed=True)
    moved = _furthest(wanted, before)
    precision = torch.finfo(theirs.dtype).eps if inexact else 1.0
    place = precision * (float(wanted.abs().max()) if inexact else 1.0)
    reach = sqrt(precision) * moved + _LAST_PLACES * place if inexact else 0.0
    return Difference(
        name,
        absolute,
        absolute / place if place else inf,
        absolute / moved if moved else inf,
        allowed=rounds and absolute <= reach < inf,
    )


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()  # some accelerators have no float64
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _furthest(left: Tensor, right: Tensor) -> float:
    """The largest difference of two entries; equal ones, infinite or NaN included, differ by 0."""
    equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs().masked_fill(equal, 0.0).nan_to_num(inf, posinf=inf)
    return float(apart.max()) if apart.numel() else 0.0
