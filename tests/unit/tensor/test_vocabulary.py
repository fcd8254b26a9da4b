"""Losses of logits of which each member has its part of the classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.engine.following.dims import ShardedDim
from penstock.engine.tensor.group import ShardSpec
from penstock.engine.tensor.seen_whole import ShardedValue
from penstock.engine.tensor.vocabulary import ClassSharing, gathers_logits
from tests.kit.groups import together

CLASSES = 7


def drawn(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(shape, seed=0):
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(seed))


def sharded(part, group, dim=-1):
    lengths = tuple(group.tell(part.shape[dim]))
    divided = ShardedDim(dim % part.dim(), sum(lengths), 1, lengths)
    asked = []
    return ShardedValue(part, divided, ClassSharing(group, asked.append)), asked


def on_members(size, loss, logits, target, dim=-1):
    """The loss and the whole gradient that members make, and what they had to gather logits for."""
    cut = ShardSpec(dim % logits.dim())

    def run(group):
        part = cut.part(logits, size, group.index).requires_grad_()
        seen, asked = sharded(part, group, dim)
        value = loss(seen, target)
        value.sum().backward()
        return value.detach(), part.grad, asked

    made = together(size, run)
    for value, _, _ in made:
        torch.testing.assert_close(value, made[0][0], rtol=0, atol=0, equal_nan=True)
    return made[0][0], cut.joined([gradient for _, gradient, _ in made]), made[0][2]


def on_one_device(loss, logits, target):
    own = logits.clone().requires_grad_()
    value = loss(own, target)
    value.sum().backward()
    return value.detach(), own.grad


def assert_alike(size, loss, logits, target, dim=-1, asked=()):
    value, gradient, gathered = on_members(size, loss, logits, target, dim)
    expected, whole = on_one_device(loss, logits, target)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert gathered == [*asked]


@given(
    size=st.integers(1, 4),
    positions=st.integers(1, 5),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    is_weighted=st.booleans(),
    ignored=st.sampled_from([-100, 3]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_cross_entropy_is_that_of_one_device(
    size, positions, reduction, smoothing, is_weighted, ignored, seed
):
    weight = drawn((CLASSES,), seed + 1).abs() if is_weighted else None
    target = labels((positions,), seed)
    if seed % 2:
        target[0] = ignored

    def loss(logits, target):
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignored, reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip

    assert_alike(size, loss, 5 * drawn((positions, CLASSES), seed), target)


def shifted(logits, target):
    """As models of transformers compute it."""
    logits = logits.float().double()
    padded = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), padded.view(-1), reduction="sum") / 8


def masked(logits, target):
    mask = target != 2
    return nn.CrossEntropyLoss(label_smoothing=0.2)(logits[mask], target[mask])


FOLLOWED = {
    "flattened": lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
    "classes second": lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target),
    "permuted": lambda logits, target: F.cross_entropy(logits.permute(0, 2, 1), target=target),
    "reshaped": lambda logits, target: F.cross_entropy(
        torch.reshape(logits, (-1, logits.size(-1))), target.reshape(-1)
    ),
    "without the last": lambda logits, target: F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1)
    ),
    "of all before": lambda logits, target: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, CLASSES), target[..., 1:].reshape(-1)
    ),
    "capped": lambda logits, target: F.cross_entropy(
        (30 * torch.tanh(logits / 30)).flatten(0, 1), target.flatten()
    ),
    "shifted": shifted,
    "masked": masked,
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_losses_as_people_write_them_need_no_whole_logits(name):
    assert_alike(2, FOLLOWED[name], drawn((3, 4, CLASSES)), labels((3, 4)))
    assert gathers_logits(FOLLOWED[name], drawn((3, 4, CLASSES)), labels((3, 4))) == ""


GATHERED = {
    "log_softmax": lambda logits, target: F.nll_loss(
        logits.flatten(0, 1).log_softmax(-1), target.flatten()
    ),
    "cross_entropy": lambda logits, target: F.cross_entropy(
        logits.flatten(0, 1), F.one_hot(target, CLASSES).flatten(0, 1).double()
    ),
    "__getitem__": lambda logits, target: F.cross_entropy(
        logits[..., 1:].flatten(0, 1), target.flatten().clamp(max=CLASSES - 2)
    ),
    "view": lambda logits, target: F.mse_loss(logits.view(3, -1), logits.detach().view(3, -1) + 1),
}


@pytest.mark.parametrize("name", GATHERED)
def test_any_other_loss_gathers_and_is_right_too(name):
    logits, target = drawn((3, 4, CLASSES)), labels((3, 4))
    value, gradient, gathered = on_members(3, GATHERED[name], logits, target)
    expected, whole = on_one_device(GATHERED[name], logits, target)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12)
    assert gathered[0] == name
    assert gathers_logits(GATHERED[name], logits, target) == name


def test_no_member_keeps_or_makes_anything_as_large_as_all_logits():
    logits, target = drawn((64, 4 * CLASSES)), labels((64,))
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            largest.extend(one.numel() for one in [made] if isinstance(one, torch.Tensor))
            return made

    def run(group):
        part = ShardSpec(1).part(logits, 4, group.index).requires_grad_()
        seen, _ = sharded(part, group)
        kept = []
        with (
            Watch(),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
            ),
        ):
            F.cross_entropy(seen, target).backward()
        return max(kept)

    assert together(4, run) == [64 * CLASSES] * 4
    assert max(largest) == 64 * CLASSES


def test_a_label_that_is_no_class_is_refused_as_torch_does():
    def run(group):
        seen, _ = sharded(ShardSpec(1).part(drawn((2, CLASSES)), 2, group.index), group)
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            F.cross_entropy(seen, torch.tensor([1, 7]))

    together(2, run)


def test_what_is_asked_of_logits_is_answered_for_all_of_them():
    def run(group):
        seen, asked = sharded(ShardSpec(1).part(drawn((2, CLASSES)), 2, group.index), group)
        assert (tuple(seen.shape), seen.size(-1), seen.dim(), len(seen)) == ((2, 7), 7, 2, 2)
        assert seen.dtype == torch.float64 and seen.device.type == "cpu"
        assert asked == []
        assert torch.equal(seen.argmax(-1), drawn((2, CLASSES)).argmax(-1))
        assert asked == ["argmax"]

    together(2, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_as_precisely_as_on_one_device(dtype):
    logits, target = drawn((32, CLASSES)).to(dtype), labels((32,))
    value, gradient, _ = on_members(2, F.cross_entropy, logits, target)
    expected, whole = on_one_device(F.cross_entropy, logits, target)
    assert (value.dtype, gradient.dtype) == (expected.dtype, whole.dtype)
    exact, precise = on_one_device(F.cross_entropy, logits.double(), target)
    slack = torch.finfo(dtype).eps
    assert abs(value.double() - exact) <= abs(expected.double() - exact) + slack * exact.abs()
    assert (gradient.double() - precise).abs().max() <= 2 * slack


def test_autocast_computes_it_in_float32():
    def loss(logits, target):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(logits, target)

    value, _, _ = on_members(2, loss, drawn((8, CLASSES)).bfloat16(), labels((8,)))
    expected, _ = on_one_device(loss, drawn((8, CLASSES)).bfloat16(), labels((8,)))
    assert value.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
