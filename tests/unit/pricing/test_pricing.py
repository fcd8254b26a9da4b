"""Seconds of kernels and collectives, checked by hand."""

import dataclasses

import pytest
from msgspec.structs import replace

from penstock.base.errors import InputError
from penstock.core import catalogue
from penstock.core.catalogue import Curve, Efficiency, Figure
from penstock.core.pricing import (
    CollectiveRing,
    Kernel,
    KernelPace,
    all_reduce_seconds,
    at_the_pace,
    dispatch_seconds,
    gather_seconds,
    hop_seconds,
    kernel_seconds,
    seconds_of_each,
)

LAUNCH = 1e-6
DEVICE = replace(
    catalogue.device_named("a100"),
    flops_per_second={"fp32": Figure(1e12), "bf16": Figure(4e12)},
    memory_bytes_per_second=Figure(1e9),
    efficiency=Efficiency(
        matmul=Curve(points=((1e-9, 0.5),)),
        batched_matmul=Figure(0.5),
        memory=Figure(0.5),
        launch_seconds=Figure(LAUNCH),
        attention={"torch": (Figure(0.4), Figure(0.2))},
    ),
)
HOST = catalogue.host_named("dgx-a100")


def pace(software="eager", device=DEVICE, **arithmetic):
    return KernelPace(device, catalogue.software_named(software), arithmetic)


def matmul(dtype="fp32", **fields):
    return Kernel("matmul", "mm", dtype, 1e10, {0: 8}, {1: 8}, **fields)


def moving(reads, writes, kind="pointwise"):
    return Kernel(kind, "add", "fp32", 0.0, reads, writes)


def test_a_product_takes_its_flops_at_the_share_of_its_peak():
    assert kernel_seconds(matmul(), pace()) == pytest.approx(1e10 / (1e12 * 0.5) + LAUNCH)
    assert kernel_seconds(matmul("bf16"), pace()) == pytest.approx(1e10 / (4e12 * 0.5) + LAUNCH)
    batched = dataclasses.replace(matmul(), kind="batched-matmul")
    assert kernel_seconds(batched, pace()) == pytest.approx(1e10 / (1e12 * 0.25) + LAUNCH)


def test_another_arithmetic_has_another_peak():
    assert kernel_seconds(matmul(), pace(fp32="bf16")) == pytest.approx(1e10 / 2e12 + LAUNCH)


@pytest.mark.parametrize(
    ("software", "backward", "times"),
    [("compiled", False, 2.5), ("compiled", True, 1.25), ("megatron-core", False, 0)],
)
def test_operands_of_a_narrowed_product_are_scaled_and_cast(software, backward, times):
    device = replace(DEVICE, flops_per_second={"bf16": Figure(4e12), "fp8": Figure(8e12)})
    product = dataclasses.replace(matmul("bf16"), reads={0: 3_000_000, 1: 1_000_000})
    product = dataclasses.replace(product, backward=backward)
    seconds = kernel_seconds(product, pace(software, device, bf16="fp8"))
    computing = max(1e10 / (8e12 * 0.5), product.num_bytes / 0.5e9)
    assert seconds == pytest.approx(computing + times * 4_000_000 / 0.5e9 + LAUNCH)


def test_a_product_takes_at_least_its_bytes():
    narrow = dataclasses.replace(matmul(), reads={0: 10**9})
    assert kernel_seconds(narrow, pace()) == pytest.approx((1e9 + 8) / 0.5e9 + LAUNCH)


def test_attention_backward_has_a_share_of_its_own():
    forward = dataclasses.replace(matmul(), kind="attention")
    assert kernel_seconds(forward, pace()) == pytest.approx(1e10 / 0.4e12 + LAUNCH)
    backward = dataclasses.replace(forward, backward=True)
    assert kernel_seconds(backward, pace()) == pytest.approx(1e10 / 0.2e12 + LAUNCH)


def test_a_device_may_have_curves_of_its_own_and_others_for_backwards():
    of = {"attention": 0.25, "attention-backward": 0.125}
    curves = {kind: Curve(points=((1.0, share),)) for kind, share in of.items()}
    memory = {kind: Curve(points=((1.0, of.get(kind, 0.1)),)) for kind in ("copy", "few-rows")}
    own = replace(DEVICE.efficiency, compute_by_kind=curves, memory_by_kind=memory)
    device = replace(DEVICE, efficiency=own)
    forward = dataclasses.replace(matmul(), kind="attention")
    backward = dataclasses.replace(forward, backward=True)
    assert kernel_seconds(forward, pace(device=device)) == pytest.approx(1e10 / 0.25e12 + LAUNCH)
    assert kernel_seconds(backward, pace(device=device)) == pytest.approx(1e10 / 0.125e12 + LAUNCH)
    narrow = dataclasses.replace(matmul(), reads={0: 10**9})
    assert kernel_seconds(narrow, pace(device=device)) == pytest.approx((1e9 + 8) / 0.1e9 + LAUNCH)


def test_sums_of_gradients_have_no_node_of_the_graph():
    own = replace(DEVICE.efficiency, backward_op_seconds=Figure(3e-6))
    host = pace(device=replace(DEVICE, kind="cpu", efficiency=own))
    added = dataclasses.replace(moving({0: 8}, {1: 8}), backward=True)
    multiplied = dataclasses.replace(added, name="mul")
    assert [dispatch_seconds(kernel, host) for kernel in (added, multiplied)] == [0.0, 3e-6]


def test_software_that_fuses_reads_and_writes_once():
    first, second = moving({0: 10**6}, {1: 10**6}), moving({1: 10**6}, {2: 10**6})
    apart = seconds_of_each([first, second], pace())
    together = seconds_of_each([first, second, matmul()], pace("compiled"))
    assert sum(apart) == pytest.approx(2 * (2e6 / 0.5e9 + LAUNCH))
    assert together[:2] == [pytest.approx(2e6 / 0.5e9 + LAUNCH), 0.0]


def test_what_somebody_reads_later_is_written_by_a_run():
    kernels = [moving({0: 100}, {1: 10**6}), moving({1: 10**6}, {2: 10**6}), matmul()]
    kernels.append(moving({1: 10**6}, {3: 8}))
    seconds = seconds_of_each(kernels, pace("compiled"))
    assert seconds[0] == pytest.approx((100 + 10**6) / 0.5e9 + LAUNCH)


def test_only_a_compiler_fuses_normalisations():
    kernels = [moving({0: 10**6}, {1: 10**6}), moving({1: 10**6}, {2: 10**6}, "normalisation")]
    assert seconds_of_each(kernels, pace("megatron-core"))[1] > 0
    assert seconds_of_each(kernels, pace("compiled"))[1] == 0


def test_the_host_decides_where_it_is_slower_and_only_there():
    busy, host = [1.0, 1.0, 5.0], [2.0, 1.5, 1.0]
    assert at_the_pace(busy, host, [0, 0, 1], pace()) == [2.0, 1.5, 5.0]


def test_a_sum_over_one_rank_takes_no_time():
    assert all_reduce_seconds(1e9, CollectiveRing(HOST, 1, 1)) == 0


def test_a_sum_moves_twice_what_a_gather_does():
    ring = CollectiveRing(HOST, 8, 8)
    reduced, gathered = all_reduce_seconds(1e10, ring), gather_seconds(1e10, ring)
    assert reduced == pytest.approx(2 * gathered, rel=0.01)
    # nccl-tests on eight A100: 229 GB/s of bus bandwidth for a gigabyte.
    assert 2 * 7 / 8 * 1e10 / reduced == pytest.approx(229e9, rel=0.03)


def test_a_ring_over_hosts_is_as_fast_as_their_cards_together():
    inside, across = CollectiveRing(HOST, 8, 8), CollectiveRing(HOST, 16, 8)
    alone = CollectiveRing(HOST, 16, 1, rings_per_host=8)
    assert inside.bytes_per_second > across.bytes_per_second > alone.bytes_per_second
    assert across.bytes_per_second == pytest.approx(8 * alone.bytes_per_second)


def test_one_card_for_all_is_shared_by_rings():
    shared = catalogue.host_named("cluster-b")
    one, eight = CollectiveRing(shared, 4, 1), CollectiveRing(shared, 4, 1, rings_per_host=8)
    assert one.bytes_per_second == pytest.approx(8 * eight.bytes_per_second)


def test_a_hop_that_leaves_the_host_is_slower():
    assert hop_seconds(1e8, HOST, leaves_host=True) > hop_seconds(1e8, HOST, leaves_host=False)


def test_a_product_without_a_peak_is_priced_by_its_bytes_only_where_these_decide():
    device = replace(DEVICE, flops_per_second={"bf16": Figure(4e12)})
    angles = dataclasses.replace(matmul(), flops=50.0, reads={1: 60}, writes={2: 40})
    moving = 100 / (1e9 * 0.5)
    assert kernel_seconds(angles, pace(device=device)) == pytest.approx(moving + LAUNCH)
    with pytest.raises(InputError, match="multiplies fp32"):
        kernel_seconds(matmul(), pace(device=device))
