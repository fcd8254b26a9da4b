"""A copy lies in memory as its original does, and has memory of its own."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.device.crossing import copy_of

BASE = torch.arange(120.0).view(2, 3, 4, 5)

VIEWS = {
    "dense": BASE,
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "permuted": BASE.permute(3, 1, 0, 2),
    "gaps": BASE[:, 1:2],
    "gaps and an offset": BASE[1:, ::2, :, 1:],
    "expanded": BASE[:, :1].expand(2, 3, 4, 5),
    "overlapping": BASE.flatten().unfold(0, 4, 2),
    "one element": BASE[0, 0, 0, 0],
    "nothing": BASE[:, :0],
    "complex": torch.complex(BASE, -BASE)[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_and_strides_are_those_of_the_original(name):
    original = VIEWS[name]
    copied = copy_of(original)
    assert torch.equal(copied, original)
    assert copied.stride() == original.stride()
    assert original.numel() == 0 or copied.data_ptr() != original.data_ptr()


@pytest.mark.parametrize("name", ["dense", "gaps", "permuted"])
def test_a_copy_may_be_overwritten_and_passes_gradients_on(name):
    source = torch.randn(2, 3, 4, 5, requires_grad=True)
    view = {"dense": source, "gaps": source[:, 1:2], "permuted": source.permute(3, 1, 0, 2)}[name]
    before = view.detach().clone()
    doubled = copy_of(view).mul_(2)
    assert torch.equal(view, before)
    seed = torch.randn(view.shape)
    (gradient,) = torch.autograd.grad(doubled, view, seed)
    assert torch.equal(gradient, 2 * seed)


def test_without_gradients_a_copy_is_no_view():
    with torch.inference_mode():
        inferred = BASE[:, 1:2] * 1
    for original in (BASE[:, 1:2], inferred):
        copied = copy_of(original)
        assert not copied.requires_grad
        assert not copied._is_view()
        assert not copied.is_inference()


def test_what_lies_far_apart_is_copied_densely():
    table = torch.empty(1 << 16, 1 << 8)  # 64 MiB that nobody touches
    assert copy_of(table[:, :16]).is_contiguous()
    assert copy_of(table[:, :32]).stride() == (1 << 8, 1)
    assert copy_of(table[: 1 << 10, :1]).stride() == (1 << 8, 1)


def test_sparse_tensors_are_cloned():
    sparse = torch.eye(3).to_sparse()
    copied = copy_of(sparse)
    assert copied is not sparse
    assert torch.equal(copied.to_dense(), torch.eye(3))
