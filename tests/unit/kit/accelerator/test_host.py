"""Between host and device: what makes the host wait, and what it must not do before."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

DEVICE = "emu:1"


@pytest.fixture
def numbers(accelerator):
    numbers = torch.arange(6.0, device=DEVICE)
    accelerator.reset_host_counts(DEVICE)
    return numbers


READS = {
    "item": lambda numbers: numbers[2].item(),
    "float": lambda numbers: float(numbers.sum()),
    "condition": lambda numbers: bool(numbers[0] < 1),
    "tolist": lambda numbers: numbers.tolist(),
    "cpu": lambda numbers: numbers.cpu(),
    "copy to pageable memory": lambda numbers: torch.empty(6).copy_(numbers, non_blocking=True),
    "nonzero": lambda numbers: numbers.nonzero(),
    "mask": lambda numbers: numbers[numbers > 2],
    "masked_select": lambda numbers: numbers.masked_select(numbers > 2),
    "unique": lambda numbers: numbers.unique(),
    "equal": lambda numbers: torch.equal(numbers, numbers),
    "write by mask": lambda numbers: numbers.index_put_((numbers > 2,), numbers[:3].clone()),
    "repeats": lambda numbers: torch.repeat_interleave(numbers.long()),
    "tensor of a list": lambda numbers: torch.tensor([1.0, 2.0], device=DEVICE),
    "blocking copy": lambda numbers: torch.ones(6).to(DEVICE),
}
NO_READS = {
    "arithmetic": lambda numbers: (numbers * 2).sum(),
    "shape": lambda numbers: (numbers.shape, numbers[1:3].stride(), numbers.view(2, 3).device),
    "fill": lambda numbers: torch.full((3,), 2.0, device=DEVICE),
    "indices": lambda numbers: numbers[torch.arange(3, device=DEVICE)],
    "fill by mask": lambda numbers: numbers.__setitem__(numbers > 2, 0.0),
    "where": lambda numbers: torch.where(numbers > 2, numbers, 0.0),
    "copy from pageable memory": lambda numbers: torch.ones(6).to(DEVICE, non_blocking=True),
    "copy from pinned memory": lambda numbers: (
        torch.ones(6).pin_memory().to(DEVICE, non_blocking=True)
    ),
    "copy to pinned memory": lambda numbers: numbers.to("cpu", non_blocking=True),
    "copy between devices": lambda numbers: numbers.to("emu:2"),
    "optimizer": lambda numbers: torch.optim.SGD([numbers.clone().requires_grad_()], 0.1).step(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_value_that_the_host_needs_is_counted_and_refused(read, numbers, accelerator):
    read(numbers)
    assert accelerator.host_reads(DEVICE) >= 1
    assert accelerator.host_reads("emu:2") == 0
    accelerator.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="makes the host wait for the default stream of emu:1"):
        read(numbers)


@pytest.mark.parametrize("work", NO_READS.values(), ids=NO_READS)
def test_work_without_a_value_for_the_host(work, numbers, accelerator):
    accelerator.set_sync_debug_mode("error")
    work(numbers)
    assert accelerator.host_reads(DEVICE) == 0


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_the_host_has_read_is_over(read, numbers):
    read(numbers)
    with torch.Stream(DEVICE):
        numbers.fill_(1)


def test_waits_that_were_asked_for_are_counted_by_themselves(numbers, accelerator):
    stream = torch.accelerator.current_stream(DEVICE)
    stream.synchronize()
    stream.record_event().synchronize()
    torch.accelerator.synchronize(DEVICE)
    assert (accelerator.host_waits(DEVICE), accelerator.host_reads(DEVICE)) == (3, 0)
    assert accelerator.host_waits("emu:2") == 0
    accelerator.reset_host_counts(DEVICE)
    assert accelerator.host_waits(DEVICE) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_to_pinned_memory_arrives_when_the_host_has_waited(dtype, accelerator):
    there = torch.tensor([0, 1, 0], device=DEVICE).to(dtype)
    here = torch.zeros(3, dtype=dtype, pin_memory=True)
    here.copy_(there, non_blocking=True)
    there.fill_(1)  # behind the copy
    assert here.tolist() != [0, 1, 0]
    torch.accelerator.current_stream(DEVICE).synchronize()
    assert here.tolist() == [0, 1, 0]


def test_to_without_blocking_gives_pinned_memory(numbers):
    here = numbers.to("cpu", non_blocking=True)
    event = torch.accelerator.current_stream(DEVICE).record_event()
    assert here.is_pinned()
    assert here.isnan().all()
    event.synchronize()
    assert here.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_wait_for_another_stream_lets_nothing_arrive(numbers):
    here = numbers.to("cpu", non_blocking=True)
    torch.Stream(DEVICE).synchronize()
    assert here.isnan().all()
    torch.accelerator.synchronize(DEVICE)


def test_writing_before_a_copy_has_arrived_raises(numbers):
    here = numbers.to("cpu", non_blocking=True)
    here.zero_()
    with pytest.raises(RuntimeError, match="pinned memory was written before a copy to it had"):
        torch.accelerator.synchronize(DEVICE)


def test_overwriting_pinned_memory_before_it_was_copied_raises(numbers):
    here = torch.ones(6).pin_memory()
    numbers.copy_(here, non_blocking=True)
    here.numpy()[3] = 7
    with pytest.raises(RuntimeError, match=r"pinned memory was overwritten .* of emu:1\. Wait"):
        torch.accelerator.current_stream(DEVICE).synchronize()
    numbers.copy_(here, non_blocking=True)
    torch.accelerator.current_stream(DEVICE).synchronize()
    here.zero_()
    torch.accelerator.synchronize(DEVICE)


def test_overwriting_is_found_at_the_end_at_the_latest(numbers, accelerator):
    here = torch.ones(6).pin_memory()
    numbers.copy_(here, non_blocking=True)
    here.zero_()
    with pytest.raises(RuntimeError, match="overwritten"):
        accelerator.check()


def test_pageable_memory_may_be_overwritten_at_once(numbers, accelerator):
    here = torch.ones(6)
    numbers.copy_(here, non_blocking=True)
    here.zero_()
    assert numbers.tolist() == [1] * 6


def test_pinned_memory_passes_from_device_to_device_without_the_host(numbers):
    here = torch.zeros(6, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    torch.accelerator.current_stream("emu:2").wait_stream(torch.accelerator.current_stream(DEVICE))
    there = here.to("emu:2", non_blocking=True)
    assert here.isnan().all()  # the host has not waited
    assert there.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_the_host_wrote_too_early_is_not_passed_on(numbers):
    here = torch.zeros(6, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    here.fill_(3)
    with pytest.raises(RuntimeError, match="written before a copy to it had arrived"):
        numbers.copy_(here, non_blocking=True)


def test_pinned_memory_passes_to_no_stream_that_does_not_wait(numbers):
    here = torch.zeros(6, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    with pytest.raises(RuntimeError, match="copy from the host on the default stream of emu:2"):
        here.to("emu:2", non_blocking=True)
    with torch.Stream(DEVICE), pytest.raises(RuntimeError, match="race on cpu: copy to the host"):
        here.copy_(torch.ones(6, device=DEVICE), non_blocking=True)


def test_pinned_memory_may_be_used_again_on_its_stream(numbers):
    here = torch.ones(6).pin_memory()
    numbers.copy_(here, non_blocking=True)
    numbers.mul_(3)
    here.copy_(numbers, non_blocking=True)
    numbers.copy_(here, non_blocking=True)
    torch.accelerator.synchronize(DEVICE)
    assert here.tolist() == numbers.tolist() == [3] * 6


def test_a_copy_that_arrives_late_changes_no_graph_and_keeps_none(numbers, accelerator):
    weight = numbers.clone().requires_grad_()
    before = accelerator.memory_allocated(DEVICE)
    here = (weight.exp() * weight).to("cpu", non_blocking=True)
    function, version = here.grad_fn, here._version
    torch.accelerator.synchronize(DEVICE)
    assert (here.grad_fn, here._version) == (function, version)
    here.sum().backward()
    assert weight.grad[1].item() == pytest.approx(2 * 2.718281828)
    weight.grad = None
    here = (weight.exp() * weight).to("cpu", non_blocking=True)
    del here, function
    assert accelerator.memory_allocated(DEVICE) == before  # though nobody has waited


def test_a_fork_before_the_first_use_is_a_fresh_start_and_after_it_none(numbers, accelerator):
    child = os.fork()
    if child == 0:
        try:
            torch.ones(3, device=DEVICE)
        except RuntimeError as error:
            os._exit(7 if "before this process was forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_another_threads_wait_disturbs_no_stream_that_passes_pinned_memory_on(accelerator):
    """What has arrived for who waits must not be hidden again by who reads it just then."""
    there = torch.arange(1 << 20, device=DEVICE)
    here = torch.zeros(len(there), dtype=torch.long, pin_memory=True)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            here.copy_(there, non_blocking=True)
            waiting = pool.submit(torch.accelerator.synchronize, DEVICE)
            there.copy_(here, non_blocking=True)
            waiting.result()
            torch.accelerator.synchronize(DEVICE)
    assert torch.equal(here, torch.arange(1 << 20))
