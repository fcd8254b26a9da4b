"""Ops on the emulated devices give the CPU's bits, on one device, with the CPU's random numbers."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("accelerator")

DEVICE = "emu:1"


def both(compute):
    """The tensors that ``compute(device)`` gives on the CPU and on a device, from one seed."""
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        given = compute(device)
        results.append([given] if isinstance(given, torch.Tensor) else list(given))
    return results


def matrix(device, rows=4, columns=6):
    return torch.randn(rows, columns, device=device)


def waves(device):
    return torch.view_as_complex(matrix(device).view(4, 3, 2))


def positive(device):
    values = matrix(device, 4, 4)
    return values @ values.t() + torch.eye(4, device=device)


def curvature(values):
    values.requires_grad_()
    slope = torch.autograd.grad(values.tanh().pow(2).sum(), values, create_graph=True)[0]
    return torch.autograd.grad(slope.sum(), values)[0]


COMPUTED = {
    "arithmetic": lambda d: matrix(d) * 2 + matrix(d)[0] / 3,
    "in place": lambda d: matrix(d).add_(1).mul_(matrix(d)).clamp_(0, 1),
    "views": lambda d: matrix(d).t()[1:5:2, 1:].unfold(1, 2, 1).flip(0).contiguous().view(-1),
    "write to views": lambda d: matrix(d).t().unfold(0, 2, 2).mul_(2),
    "complex": lambda d: torch.view_as_real(waves(d) * 1j),
    "conjugate": lambda d: [
        torch.view_as_real(waves(d).conj() * 2),
        torch.view_as_real(waves(d).conj().clone()),
        waves(d).conj().imag.clone(),
        torch.zeros(4, 3, device=d).copy_(waves(d).conj().imag),
    ],
    "factories": lambda d: [
        torch.arange(5, device=d),
        torch.linspace(0, 1, 7, device=d),
        torch.eye(3, device=d),
        torch.full((2,), 3.5, device=d),
        torch.tril_indices(3, 3, device=d),
        torch.zeros_like(matrix(d)),
    ],
    "random": lambda d: [
        torch.rand(5, device=d),
        torch.randint(9, (5,), device=d),
        torch.randperm(7, device=d),
        torch.bernoulli(torch.full((9,), 0.5, device=d)),
        torch.multinomial(matrix(d).exp(), 2),
        torch.empty(4, device=d).uniform_(),
        torch.normal(matrix(d), 1.0),
        torch.empty(3, device=d).exponential_(),
    ],
    "dropout": lambda d: [F.dropout(matrix(d), p) for p in (0.0, 0.1, 0.5, 0.9, 1.0)],
    "dropouts": lambda d: [
        F.alpha_dropout(matrix(d), 0.3, True),
        F.dropout1d(matrix(d), 0.3),
        F.rrelu(matrix(d), training=True),
    ],
    "sorting": lambda d: [
        *matrix(d).sort(-1),
        *matrix(d).topk(2),
        matrix(d).argmax(1),
        *matrix(d).max(0),
    ],
    "indices": lambda d: [
        matrix(d)[torch.tensor([2, 0], device=d)],
        matrix(d).index_select(1, torch.tensor([1], device=d)),
        matrix(d).gather(1, torch.zeros(4, 2, dtype=torch.long, device=d)),
        matrix(d)[matrix(d) > 0],
        matrix(d).index_put((torch.tensor([1], device=d),), torch.tensor(5.0, device=d)),
        matrix(d).scatter_add(0, torch.zeros(1, 6, dtype=torch.long, device=d), matrix(d)),
        matrix(d).nonzero(),
        torch.where(matrix(d) > 0, 1.0, matrix(d)),
    ],
    "reductions": lambda d: [
        matrix(d).sum(),
        matrix(d).mean(1),
        matrix(d).std(0),
        matrix(d).norm(),
        matrix(d).cumsum(1),
        matrix(d).logsumexp(1),
        matrix(d).softmax(1),
        (matrix(d) > 0).any(1),
        matrix(d).prod(),
    ],
    "products": lambda d: [
        matrix(d) @ matrix(d, 6, 3),
        torch.einsum("ij,kj->ik", matrix(d), matrix(d)),
        torch.bmm(matrix(d).view(2, 2, 6), matrix(d).view(2, 6, 2)),
        torch.outer(matrix(d)[0], matrix(d)[1]),
    ],
    "decompositions": lambda d: [
        *torch.linalg.qr(matrix(d)),
        torch.linalg.cholesky(positive(d)),
        *torch.linalg.svd(matrix(d)),
        torch.linalg.solve(positive(d), matrix(d)),
    ],
    "joining": lambda d: [
        torch.cat([matrix(d), matrix(d)]),
        torch.stack([matrix(d)] * 2),
        *matrix(d).split(2),
    ],
    "types": lambda d: [
        matrix(d).to(t) for t in (torch.float64, torch.bfloat16, torch.int32, torch.bool)
    ],
    "out": lambda d: [
        torch.add(matrix(d), 1, out=torch.empty(0, device=d)),
        torch.mm(matrix(d), matrix(d, 6, 2), out=torch.empty(2, 4, device=d).t()),
        torch.cumsum(matrix(d), 1, out=torch.empty(4, 6, device=d)),
    ],
    "foreach": lambda d: torch._foreach_add(
        [matrix(d), matrix(d)], [matrix(d), matrix(d)], alpha=2
    ),
    "norms of gradients": lambda d: [nn.utils.get_total_norm([matrix(d), matrix(d)])],
    "losses": lambda d: [
        F.cross_entropy(matrix(d), torch.tensor([0, 1, 5, 2], device=d), label_smoothing=0.1),
        F.mse_loss(matrix(d), matrix(d)),
        F.huber_loss(matrix(d), matrix(d)),
        F.binary_cross_entropy_with_logits(matrix(d), matrix(d).sigmoid()),
        F.kl_div(matrix(d), matrix(d).softmax(1), reduction="batchmean"),
    ],
    "pictures": lambda d: [
        F.interpolate(matrix(d).view(1, 1, 4, 6), scale_factor=2, mode="bilinear"),
        F.pad(matrix(d), (1, 2), value=3),
        F.pad(matrix(d)[None], (1, 2), "reflect"),
        F.pixel_shuffle(matrix(d).view(1, 4, 2, 3), 2),
        F.conv2d(
            matrix(d).view(1, 1, 4, 6).contiguous(memory_format=torch.channels_last),
            torch.ones(2, 1, 2, 2, device=d),
        ),
    ],
    "double backward": lambda d: curvature(matrix(d)),
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_the_cpu_s_bits(compute):
    expected, given = both(compute)
    assert len(expected) == len(given)
    for mine, theirs in zip(given, expected, strict=True):
        assert mine.device == torch.device(DEVICE)
        assert mine.dtype == theirs.dtype
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine.cpu(), theirs)


MIXED = {
    "two devices": lambda: torch.ones(2, device="emu:0") + torch.ones(2, device="emu:3"),
    "device and host": lambda: torch.ones(2, 2, device="emu:0") @ torch.ones(2, 2),
    "in place": lambda: torch.ones(2, device="emu:0").mul_(torch.ones(2, device="emu:3")),
    "into the host": lambda: torch.zeros((), device="cpu").add_(torch.ones((), device="emu:0")),
    "layer": lambda: nn.Linear(2, 2, device="emu:0")(torch.ones(2, 2, device="emu:3")),
    "convolution": lambda: nn.Conv1d(1, 1, 1, device="emu:0")(torch.ones(1, 1, 2, device="emu:3")),
    "list": lambda: torch.cat([torch.ones(2, device="emu:0"), torch.ones(2, device="emu:3")]),
    "foreach": lambda: torch._foreach_add(
        [torch.ones(2, device="emu:0")], [torch.ones(2, device="emu:3")]
    ),
    "indices": lambda: torch.ones(2, device="emu:0")[torch.tensor([1])],
    "normalization": lambda: nn.LayerNorm(2, device="emu:0")(torch.ones(2, 2, device="emu:3")),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_do_not_mix(mix):
    with pytest.raises(
        RuntimeError, match=r"aten::\w+.*is given tensors on .* and on .*; move one of them first"
    ) as caught:
        mix()
    assert "emu:0" in str(caught.value)


def test_scalars_of_the_host_are_allowed():
    assert (torch.ones(2, device=DEVICE) * torch.tensor(3.0)).tolist() == [3, 3]


def test_another_device_s_generator_is_refused():
    for generator in (torch.Generator("emu:2"), torch.Generator()):
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(3, device=DEVICE, generator=generator)


def test_every_device_draws_for_itself():
    torch.manual_seed(3)
    first, second, host = (
        torch.rand(4, device="emu:0"),
        torch.rand(4, device="emu:2"),
        torch.rand(4),
    )
    assert torch.equal(first.cpu(), host) and torch.equal(second.cpu(), host)
    generator = torch.Generator("emu:2").manual_seed(3)
    drawn = torch.rand(4, device="emu:2", generator=generator)
    assert torch.equal(drawn.cpu(), host)
    state = generator.get_state()
    again = torch.rand(4, device="emu:2", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(4, device="emu:2", generator=generator), again)
    assert not torch.equal(again, drawn)


def test_random_numbers_can_be_forked():
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[1], device_type="emu"):
        inside = torch.rand(4, device=DEVICE)
    assert torch.equal(torch.rand(4, device=DEVICE), inside)


def test_views_are_no_work_of_a_stream():
    numbers = torch.arange(6.0, device=DEVICE)
    with torch.Stream(DEVICE):
        views = [numbers[1:], numbers.view(2, 3).t(), numbers.unfold(0, 2, 1), numbers.detach()]
    assert [view.sum().item() for view in views] == [15, 15, 25, 15]


def test_a_module_moves_copies_and_loads():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
    twin = copy.deepcopy(net)
    assert all(parameter.device == torch.device(DEVICE) for parameter in twin.parameters())
    net[0].weight.data.zero_()
    assert twin[0].weight.abs().sum() > 0
    net.load_state_dict(twin.state_dict())
    assert torch.equal(net[0].weight, twin[0].weight)
    back = net.to("emu:3").cpu()
    assert torch.equal(back[0].weight, twin[0].weight.cpu())


def test_the_devices_are_those_of_any_other_maker():
    """Torch knows them no better: tensors do not take ``.data`` of another kind of device, and
    ``Module.to`` makes new parameters, so that ties are broken."""
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = weight = tied[0].weight
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = weight.detach().to(DEVICE)
    tied.to(DEVICE)
    assert len({id(weight), id(tied[0].weight), id(tied[1].weight)}) == 3


def test_weights_are_saved_and_read(tmp_path):
    weights = {"w": torch.randn(3, device=DEVICE)}
    safetensors.torch.save_file({"w": weights["w"].cpu()}, tmp_path / "weights")
    read = safetensors.torch.load_file(tmp_path / "weights")
    assert torch.equal(read["w"], weights["w"].cpu())
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert loaded["w"].device == torch.device(DEVICE)
    assert torch.equal(loaded["w"], weights["w"])


def test_a_tensor_prints():
    assert repr(torch.arange(3.0, device=DEVICE)) == f"tensor([0., 1., 2.], device='{DEVICE}')"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_draw_the_same_mask_again(use_reentrant):
    def gradient(recomputed):
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5)).to(DEVICE)
        inputs = torch.ones(3, 20, device=DEVICE, requires_grad=True)
        outputs = (
            checkpoint(layer, inputs, use_reentrant=use_reentrant) if recomputed else layer(inputs)
        )
        outputs.square().sum().backward()
        return inputs.grad.cpu()

    assert torch.equal(gradient(True), gradient(False))


def test_a_loader_pins_its_batches(accelerator):
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.cat([batch.to(DEVICE, non_blocking=True) for batch in batches]).tolist() == list(
        range(6)
    )


def test_events_measure_time():
    start, end = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    start.record()
    torch.randn(50, 50, device=DEVICE)
    end.record()
    torch.accelerator.synchronize(DEVICE)
    assert 0 < start.elapsed_time(end) < 10_000


def test_torch_knows_the_accelerator(accelerator):
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 4
    assert torch.accelerator.current_accelerator() == torch.device("emu")
    assert torch.get_device_module("emu") is torch.emu is accelerator
    with torch.device(DEVICE):
        assert torch.ones(2).device == torch.device(DEVICE)
    with accelerator.device(2):
        assert torch.ones(2, device="emu").device == torch.device("emu:2")
    with torch.accelerator.device_index(3):
        assert torch.ones(2, device="emu").device == torch.device("emu:3")
    stream = accelerator.Stream(device=2)
    with accelerator.stream(stream):
        assert accelerator.current_stream(2) == stream
    assert accelerator.current_stream(2) == accelerator.default_stream(2)


def test_a_stream_of_nobody_is_refused():
    unknown = torch.Stream(stream_id=10_000, device_index=1, device_type=20)
    with pytest.raises(RuntimeError, match="nobody made this stream"), unknown:
        pass


def test_all_kernels_of_the_cpu_are_there():
    """Else torch composes an op of others, and the bits differ."""
    mine, theirs = (
        {
            name
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if name.startswith("aten::")
        }
        for key in ("PrivateUse1", "CPU")
    )
    assert theirs - mine == {"aten::set_"}
    assert len(list(itertools.islice(mine, 500))) == 500
