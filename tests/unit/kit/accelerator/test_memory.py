"""Memory of the emulated devices: what is counted, who may have it next, when it is pinned."""

from __future__ import annotations

import pytest
import torch

DEVICE = "emu:1"


def test_bytes_are_counted_by_device(accelerator):
    before = [torch.accelerator.memory_allocated(index) for index in range(4)]
    first, second = torch.empty(1000, device="emu:1"), torch.empty(10, device="emu:3")
    after = [torch.accelerator.memory_allocated(index) for index in range(4)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 4000, 0, 40]
    view = first[:10]
    del first, second
    assert [torch.accelerator.memory_allocated(index) for index in range(4)] == [
        before[0], before[1] + 4000, *before[2:]
    ]  # fmt: skip
    del view
    assert torch.accelerator.memory_allocated(1) == before[1] == accelerator.memory_allocated(1)


def test_the_peak_is_kept_until_it_is_reset(accelerator):
    before = torch.accelerator.memory_allocated(DEVICE)
    torch.empty(1000, device=DEVICE)
    assert torch.accelerator.max_memory_allocated(DEVICE) == before + 4000
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    assert accelerator.max_memory_allocated(DEVICE) == before


def test_out_of_memory(accelerator):
    before = torch.accelerator.memory_stats(DEVICE)["num_ooms"]
    accelerator.set_memory_limit(accelerator.memory_allocated(DEVICE) + 1000, DEVICE)
    kept = torch.empty(200, device=DEVICE)
    assert torch.accelerator.get_memory_info(DEVICE)[0] == 200
    with pytest.raises(torch.OutOfMemoryError, match="emu:1 is out of memory: 204 bytes wanted"):
        torch.empty(51, device=DEVICE)
    torch.empty(51, device="emu:2")
    assert torch.accelerator.memory_stats(DEVICE)["num_ooms"] == before + 1
    del kept
    torch.empty(250, device=DEVICE)


def test_what_nobody_wrote_is_nothing_good(accelerator):
    assert torch.empty(5, device=DEVICE).isnan().all()
    assert torch.empty(5, dtype=torch.bfloat16, pin_memory=True).isnan().all()


def test_a_tensor_that_dies_under_another_stream_s_op(side, main):
    ready = torch.ones(6, device=DEVICE)
    side.wait_stream(main)
    with side:
        doubled = ready * 2
    del ready
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3, device=DEVICE)  # any allocation may be given that memory
    assert "aten::zero_ on the default stream of emu:1 writes memory that may be that of" in str(
        caught.value
    )
    assert f"died under aten::mul.Tensor on stream {side.stream_id} of emu:1" in str(caught.value)
    assert "record_stream" in str(caught.value)
    del doubled


def test_record_stream_keeps_memory_from_the_next_owner(side, main):
    ready = torch.ones(6, device=DEVICE)
    side.wait_stream(main)
    with side:
        ready * 2
    ready.record_stream(side)
    del ready
    torch.zeros(6, device=DEVICE)


def test_record_stream_speaks_for_that_stream_only(side, main):
    ready, third = torch.ones(6, device=DEVICE), torch.Stream(DEVICE)
    for stream in (side, third):
        stream.wait_stream(main)
        with stream:
            ready * 2
    ready.record_stream(third)
    del ready
    with pytest.raises(RuntimeError, match=rf"died under .* on stream {side.stream_id}"):
        torch.zeros(6, device=DEVICE)


def test_record_stream_speaks_for_what_that_stream_is_behind(side, main):
    ready, third = torch.ones(6, device=DEVICE), torch.Stream(DEVICE)
    side.wait_stream(main)
    with side:
        ready * 2
    third.wait_stream(side)
    ready.record_stream(third)
    del ready
    torch.zeros(6, device=DEVICE)


def test_a_wait_before_the_memory_is_written_again_is_early_enough(side, main):
    ready = torch.ones(6, device=DEVICE)
    side.wait_stream(main)
    with side:
        ready * 2
    del ready
    again = torch.empty(6, device=DEVICE)
    main.wait_stream(side)
    again.zero_()
    torch.zeros(6, device=DEVICE)


def test_memory_goes_back_to_the_stream_that_it_came_from(side, main):
    with side:
        doubled = torch.ones(6, device=DEVICE) * 2
    main.wait_stream(side)
    doubled + 1
    del doubled
    torch.zeros(6, device=DEVICE)  # from the pool of another stream
    with side, pytest.raises(RuntimeError, match=r"died under aten::add.Tensor on the default"):
        torch.zeros(6, device=DEVICE)


def test_storages_grow_and_are_emptied(accelerator):
    before = accelerator.memory_allocated(DEVICE)
    tensor = torch.arange(4.0, device=DEVICE)
    tensor.resize_(100)
    assert accelerator.memory_allocated(DEVICE) == before + 400
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    tensor.untyped_storage().resize_(0)
    assert accelerator.memory_allocated(DEVICE) == before


def test_pinned_memory_is_known_as_such(accelerator):
    pageable = torch.ones(4, 4)
    pinned = pageable.pin_memory()
    assert [tensor.is_pinned() for tensor in (pageable, pinned, pinned[1:, 2])] == [
        False, True, True
    ]  # fmt: skip
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert pinned.device == torch.device("cpu")
    assert torch.equal(pinned, pageable)
    assert not torch.ones(2, device=DEVICE).is_pinned()


def test_an_activation_dies_behind_the_backward_that_reads_it(side, main):
    """What autograd keeps is recorded on the streams that its threads use."""
    weight = torch.ones(6, device=DEVICE, requires_grad=True)
    side.wait_stream(main)
    with side:
        (weight.exp() * weight).sum().backward()
    main.wait_stream(side)
    torch.zeros(6, device=DEVICE)
    assert weight.grad[0].item() == pytest.approx(2 * 2.718281828)
