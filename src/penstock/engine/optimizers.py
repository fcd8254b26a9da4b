"""Optimizers for asynchronous pipelines, whose gradients are old; and for half precision.

================================  ===============================================================
``nadamw``                        look ahead: Nesterov momentum with a high β1
``delay_corrected``               step less at first: PipeMare's learning rates around any optimizer
``RotatedAdam``                   Adam along the directions in which gradients really vary
================================  ===============================================================

``master_weights``, around any optimizer, is for models in bfloat16 or float16 (``masters``).

Whoever makes an optimizer gets the parameters of one stage. A pipeline's list says how old the
stage's gradients are (``delay``, in updates) and of how many stages it is one (``num_stages``). All
else that torch's optimizers take works too, and counts as having no delay::

    optimizer=lambda parameters: pk.optimizers.nadamw(parameters, rising=True)
    optimizer=pk.optimizers.delay_corrected(torch.optim.AdamW, anneal_updates=1000)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from penstock.base.errors import InputError
from penstock.base.values import expect, is_number, is_whole
from penstock.core.versions import rate_factor
from penstock.engine.masters import master_weights

__all__ = ["RotatedAdam", "delay_corrected", "master_weights", "nadamw"]

# How many steps a delay-corrected optimizer has made, in its parameter groups.
_UPDATES = "delay_corrected_updates"
# Adam's usual one, for stages without delay.
_LEAST_BETA1 = 0.9
# By how many roundings of its norm an entry of a rotated gradient may be off.
_NOISE = 8.0


def nadamw(
    parameters: ParamsT,
    lr: float = 3e-4,
    *,
    beta1: float = 0.99,
    beta2: float = 0.999,
    rising: bool = False,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
) -> torch.optim.NAdam:
    """NAdam with decoupled weight decay and a high β1, so that its look-ahead makes up for delay.

    Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization", arXiv
    2505.01099; the defaults are those of its authors' program. It is ``torch.optim.NAdam`` with
    torch's warm-up of the momentum.

    Args:
        parameters: those of one stage, as an optimizer factory gets them, or what torch takes.
        lr: the learning rate.
        beta1: how the first moment decays; with ``rising``, at the stage with the most delay.
        beta2: how the second moment decays.
        rising: let β1 rise with the stage's delay τ: 0.9 + (beta1 − 0.9)·min(τ/(p−1), 1) with p
            stages, so 0.9 at the last stage and ``beta1`` at the first one. The paper only says
            that it rises; this is our reading. Its authors' program divides by p instead, and so
            never quite reaches ``beta1``.
        weight_decay: what each update takes off the weights, as a part of ``lr``.
        eps: added to the root of the second moment.

    Raises:
        InputError: a number is out of its range.
    """
    if rising and is_number(beta1) and beta1 < _LEAST_BETA1:
        raise InputError(f"beta1 is {beta1}, but rises from 0.9; give more, or leave rising out")
    _check_numbers(lr, (beta1, beta2), eps, weight_decay)
    if rising:
        most = getattr(parameters, "num_stages", 1) - 1
        part = min(_delay_of(parameters) / most, 1.0) if most > 0 else 0.0
        beta1 = _LEAST_BETA1 + (beta1 - _LEAST_BETA1) * part
    betas = beta1, beta2
    return torch.optim.NAdam(parameters, lr, betas, eps, weight_decay, decoupled_weight_decay=True)


def delay_corrected(
    make: Callable[[Any], Optimizer], *, anneal_updates: int
) -> Callable[[Any], Optimizer]:
    """An optimizer factory whose optimizers step less while gradients are old and training young.

    At update k, counted from 0, all learning rates are multiplied by
    ``versions.rate_factor(τ, k, anneal_updates)`` with the stage's delay τ. Outside the step they
    are what they were, so schedulers, state dicts and people see their own. k is the number of
    steps made; it lies in the parameter groups as ``"delay_corrected_updates"``, so it is saved
    and loaded with the optimizer's state, and begins at 0 if that has none. Copies by
    ``copy.deepcopy`` go on correcting; pickled ones do not, since torch does not pickle hooks: save
    the state dict.

    Without delay, or with at most one update of it, nothing changes. ``versions.PipeMare(t1=…)``
    does the same; use one of the two.

    A step that raises does not count; the groups keep the smaller rates until the next step, or the
    next state dict.

    Args:
        make: from a stage's parameters to its optimizer.
        anneal_updates: K, after how many updates the learning rate is whole.

    Raises:
        InputError: ``make`` is not a function or ``anneal_updates`` no whole number ≥ 1; when the
            optimizer is made: it is none, or is corrected already.
    """
    example = "give a function, as lambda parameters: torch.optim.AdamW(parameters)"
    expect(make, Callable, "make", example)
    if not is_whole(anneal_updates) or anneal_updates < 1:
        raise InputError(f"anneal_updates is {anneal_updates!r}, but must be a whole number ≥ 1")

    def made(parameters: Any) -> Optimizer:
        delay = _delay_of(parameters)
        optimizer = make(parameters)
        expect(optimizer, Optimizer, "what make gave", example)
        if any(_UPDATES in group for group in optimizer.param_groups):
            raise InputError("the optimizer is delay-corrected already; wrap its factory only once")
        _Correction(delay, anneal_updates).attach(optimizer)
        return optimizer

    return made


class _Correction:
    """Lowers an optimizer's learning rates for the time of a step."""

    def __init__(self, delay: float, anneal_updates: int) -> None:
        self._delay = delay
        self._anneal_updates = anneal_updates
        self._lowered: list[tuple[dict[str, Any], Any, Any]] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Correct all steps of an optimizer from now on."""
        for group in optimizer.param_groups:
            group.setdefault(_UPDATES, 0)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        # A step that raised has left smaller rates, which must not be saved.
        optimizer.register_state_dict_pre_hook(lambda _: self._restore())
        # torch's own copies have no hooks. A strong reference would be a cycle, which keeps large
        # states alive until the collector comes.
        reference = weakref.ref(optimizer)
        vars(optimizer)["__deepcopy__"] = lambda memo: self._copy(reference(), memo)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        factor = rate_factor(self._delay, _updates(optimizer), self._anneal_updates)
        for group in optimizer.param_groups:
            lowered = group["lr"] * factor
            self._lowered.append((group, group["lr"], lowered))
            group["lr"] = lowered

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        updates = _updates(optimizer) + 1
        for group in optimizer.param_groups:
            group[_UPDATES] = updates

    def _restore(self) -> None:
        for group, whole, lowered in self._lowered:
            # What somebody else has set since stands.
            if group["lr"] is lowered:
                group["lr"] = whole
        self._lowered.clear()

    def _copy(self, optimizer: Optimizer | None, memo: dict[int, Any]) -> Optimizer:
        assert optimizer is not None  # it is being copied
        self._restore()
        copied = object.__new__(type(optimizer))
        copied.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
        _Correction(self._delay, self._anneal_updates).attach(copied)
        return copied


def _updates(optimizer: Optimizer) -> int:
    # Groups that were added or loaded later may have no number.
    return max(int(group.get(_UPDATES, 0)) for group in optimizer.param_groups)


class RotatedAdam(Optimizer):
    """Adam along the directions in which a matrix's gradients vary, instead of along its entries.

    Delay makes Adam swing where the loss is steep in directions that lie across the entries: each
    entry then has a share in steep and flat directions, and one step size for both. Here the second
    moment is kept in the eigenbases of the running means of GGᵀ and GᵀG, where steep and flat are
    apart: "Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation", arXiv
    2602.03515; the rotation is that of SOAP, Vyas et al., arXiv 2409.11321.

    The first moment stays in the space of the weights and is rotated when it is used, so it stays
    right when the bases turn. Parameters with more than two dimensions count as matrices whose
    columns are all dimensions but the first. Vectors (also in the shape of a matrix), and sides
    that are longer than ``max_dim``, are not rotated; where no side is, an update has the bits of
    ``torch.optim.AdamW`` on the CPU.

    The singular vectors of the first gradient that is not 0 are the first bases, and its update is
    made with them. Later bases come from one power iteration and QR each: that takes a fraction of
    an eigendecomposition's time, and each direction turns into its successor, so the second moment
    that was measured along it still fits. Directions are sorted by eigenvalue before, and their
    second moments with them. Besides Adam's moments, m×n weights keep two m×m and two n×n matrices.

    Adam would make a whole step along entries of the rotated gradient that are nothing but
    rounding. The denominator has a floor at that size; the papers have none.

    Args:
        params: as all of torch's optimizers take them; groups may have options of their own.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``; the means of GGᵀ and GᵀG decay as
            the second moment does.
        refresh_every: updates from one pair of bases to the next.
        max_dim: the longest side that is rotated. The default leaves vocabularies alone and takes
            the hidden sides of most models.
        one_sided: rotate only the shorter side (the rows if equal), in less time and memory.

    Raises:
        InputError: an option is out of its range, or, in a step, a gradient is sparse or complex.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh_every: int = 10,
        max_dim: int = 4096,
        one_sided: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        bases = {"refresh_every": refresh_every, "max_dim": max_dim, "one_sided": one_sided}
        super().__init__(params, {**options, **bases})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; an ``InputError`` if one is out of range."""
        options = {**self.defaults, **param_group}
        _check_numbers(options["lr"], options["betas"], options["eps"], options["weight_decay"])
        for name in ("refresh_every", "max_dim"):
            if not is_whole(options[name]) or options[name] < 1:
                raise InputError(f"{name} is {options[name]!r}, but must be a whole number ≥ 1")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, after ``closure``; give what it gives.

        Raises:
            InputError: a gradient is sparse or complex; no parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [(p, p.grad, group) for group in self.param_groups for p in group["params"]]
        for parameter, gradient, _ in todo:
            if gradient is not None and (gradient.layout != torch.strided or gradient.is_complex()):
                kind = "complex" if gradient.is_complex() else "sparse"
                raise InputError(
                    f"RotatedAdam cannot use the {kind} gradient of a parameter of shape "
                    f"{tuple(parameter.shape)}; give such parameters to another optimizer"
                )
        for parameter, gradient, group in todo:
            if gradient is not None:
                _update(parameter, gradient, self.state[parameter], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a state that ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        # torch has rounded it to the parameters' type; bases in half precision are none.
        loaded = [p for group in self.param_groups for p in group["params"]]
        saved = [place for group in state_dict["param_groups"] for place in group["params"]]
        for parameter, place in zip(loaded, saved, strict=True):
            for name, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor) and parameter.dtype != _precision(parameter):
                    self.state[parameter][name] = value.to(parameter.device)


def _update(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    beta1, beta2 = group["betas"]
    gradient = gradient.to(_precision(parameter))
    rotated = _sides(parameter, group)
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(gradient)
        state["exp_avg_sq"] = torch.zeros_like(gradient.flatten(1) if rotated else gradient)
    state["step"] += 1
    step_size = group["lr"] / (1 - beta1 ** state["step"])
    root_correction = (1 - beta2 ** state["step"]) ** 0.5
    if group["weight_decay"] != 0:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    if rotated:
        gradient = gradient.flatten(1)
        _follow(gradient, state, rotated, beta2, group["refresh_every"])
    square, bases = state["exp_avg_sq"], (state.get("left_basis"), state.get("right_basis"))
    gradient = _rotate(gradient, *bases)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = square.sqrt() / root_correction
    if not rotated:
        # In torch's order of operations, to have its bits.
        parameter.addcdiv_(mean, denominator.add_(group["eps"]), value=-step_size)
        return
    floor = _NOISE * torch.finfo(denominator.dtype).eps * denominator.norm()
    direction = _rotate(mean.flatten(1), *bases) / denominator.add_(floor).add_(group["eps"])
    back = _rotate(direction, *(None if basis is None else basis.mT for basis in bases))
    parameter.add_(back.reshape(parameter.shape), alpha=-step_size)


def _precision(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _sides(parameter: Tensor, group: dict[str, Any]) -> list[str]:
    """Which sides of a parameter are rotated: "left" are the rows, "right" the columns."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return []
    lengths = {"left": parameter.shape[0], "right": parameter[0].numel()}
    if min(lengths.values()) == 1:
        return []  # a vector in the shape of a matrix
    short = [side for side, length in lengths.items() if length <= group["max_dim"]]
    return [min(short, key=lengths.__getitem__)] if short and group["one_sided"] else short


def _follow(
    gradient: Tensor, state: dict[str, Any], sides: list[str], beta2: float, refresh_every: int
) -> None:
    """Add a gradient to the means of GGᵀ and GᵀG; make the bases, or renew them when it is time."""
    is_first = f"{sides[0]}_basis" not in state
    if is_first:
        # Models whose head begins at 0 send nothing back at first: no directions yet.
        if not bool(gradient.any()):
            return
        state.update(_first_bases(gradient, sides))
    for side in sides:
        product = gradient @ gradient.mT if side == "left" else gradient.mT @ gradient
        moment = state.setdefault(f"{side}_moment", torch.zeros_like(product))
        moment.lerp_(product, 1 - beta2)
        if not is_first and (state["step"] - 1) % refresh_every == 0:
            _refresh(side, state)


def _first_bases(gradient: Tensor, sides: list[str]) -> dict[str, Tensor]:
    if not bool(gradient.isfinite().all()):
        # The weights become as useless as with torch's optimizers, for the caller to see or undo.
        lengths = {"left": gradient.shape[0], "right": gradient.shape[1]}
        return {f"{side}_basis": torch.eye(lengths[side]).to(gradient) for side in sides}
    # More exact than the eigenvectors of GGᵀ, which lose small singular values. A side that is
    # rotated alone is the shorter one, so that even the thin factor of it is square.
    left, _, right = torch.linalg.svd(gradient, full_matrices=len(sides) == 2)
    bases = {"left": left, "right": right.mT}
    return {f"{side}_basis": bases[side] for side in sides}


def _refresh(side: str, state: dict[str, Any]) -> None:
    moment, basis = state[f"{side}_moment"], state[f"{side}_basis"]
    image = moment @ basis
    # Directions must stay in falling order, or each QR mixes those that have changed places.
    order = (basis * image).sum(0).argsort(descending=True, stable=True)
    state[f"{side}_basis"] = torch.linalg.qr(image[:, order]).Q
    along = 0 if side == "left" else 1
    state["exp_avg_sq"] = state["exp_avg_sq"].index_select(along, order)


def _rotate(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """leftᵀ · matrix · right; a basis that is not there is the identity."""
    if left is not None:
        matrix = left.mT @ matrix
    return matrix if right is None else matrix @ right


def _delay_of(parameters: Any) -> float:
    return float(getattr(parameters, "delay", 0.0))


def _check_numbers(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if not is_number(value) or not 0 <= value < float("inf"):
            raise InputError(f"{name} is {value!r}, but must be a number ≥ 0")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not is_number(beta) or not 0 <= beta < 1:
            raise InputError(f"{name} is {beta!r}, but must be a number ≥ 0 and below 1")
