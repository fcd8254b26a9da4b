// Copies: within a device, between devices, and between a device and the host.
#include "tensors.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>
#include <cstring>

namespace emulated {
namespace {

using at::Tensor;

// As CUDA does it: on the source's stream, which waits for the destination's
// first; the destination's waits for it afterwards.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto& ledger = Ledger::get();
  const auto source = current_lane(from.device().index()), destination = current_lane(to.device().index());
  ledger.wait(source, ledger.recorded(destination));
  ledger.launch(source, "copy", {use_of(from, false), use_of(to, true)});
  ledger.wait(destination, ledger.recorded(source));
  on_host(to).copy_(on_host(from));
}

// The same memory without the autograd graph that the tensor may belong to, which a wait must neither keep nor change.
Tensor memory_of(const Tensor& tensor) { return tensor_over(tensor.storage(), tensor); }

bool same_bytes(const Tensor& left, const Tensor& right) {
  const AsPlainKernels guard;
  const auto a = left.contiguous(), b = right.contiguous();
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

void poison(const Tensor& tensor) {
  const AsPlainKernels guard;
  const auto dtype = tensor.scalar_type();
  if (at::isFloatingType(dtype) || at::isComplexType(dtype)) tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  else tensor.fill_(dtype == at::kBool ? 1 : 0x7F);
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& ledger = Ledger::get();
  const auto lane = current_lane(to.device().index());
  auto* pinned = ledger.pinned_block(from.const_data_ptr());
  std::vector<Use> uses{use_of(to, true)};
  if (pinned) uses.push_back({pinned, extent_of(from), false});
  if (!non_blocking) ledger.host_needs(lane, "copy from the host");
  const auto position = ledger.launch(lane, "copy from the host", uses);
  Tensor as_read;
  const auto read = [&] {
    on_host(to).copy_(from);
    as_read = memory_of(from).clone(at::MemoryFormat::Contiguous);
  };
  pinned ? ledger.with_pending_shown(pinned, read) : read();
  if (!non_blocking) return ledger.wait_until_complete(ledger.recorded(lane));
  if (pinned) {  // the hardware may read as late as the host waits
    const auto changed = [memory = memory_of(from), as_read]() -> std::string {
      return same_bytes(memory, as_read) ? "" : "pinned memory was overwritten before it was copied";
    };
    ledger.add_pending({lane, position, pinned, extent_of(from), changed, [] {}, [] {}});
  }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& ledger = Ledger::get();
  const auto lane = current_lane(from.device().index());
  auto* pinned = ledger.pinned_block(to.const_data_ptr());
  std::vector<Use> uses{use_of(from, false)};
  if (pinned) uses.push_back({pinned, extent_of(to), true});
  const bool is_late = non_blocking && pinned;
  if (!is_late) ledger.host_needs(lane, "copy to the host");
  const auto position = ledger.launch(lane, "copy to the host", uses);
  if (pinned) ledger.settle(pinned, extent_of(to));
  if (!is_late) {
    to.copy_(on_host(from));
    return ledger.wait_until_complete(ledger.recorded(lane));
  }
  // The host sees the values when it has waited, and something striking before.
  const auto memory = memory_of(to), arriving = at::empty(to.sizes(), to.options().pinned_memory(false));
  arriving.copy_(on_host(from));
  poison(memory);
  const auto poisoned = memory.clone(at::MemoryFormat::Contiguous);
  const auto arrive = [memory, arriving, poisoned]() -> std::string {
    const AsPlainKernels guard;
    const bool untouched = same_bytes(memory, poisoned);
    memory.copy_(arriving);
    return untouched ? "" : "pinned memory was written before a copy to it had arrived";
  };
  const auto show = [arrive] {
    const auto complaint = arrive();
    TORCH_CHECK(complaint.empty(), "race on the host: ", complaint);
  };
  ledger.add_pending({lane, position, pinned, extent_of(to), arrive, show, [memory] { poison(memory); }});
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const AsPlainKernels guard;
  if (!is_ours(from)) {
    copy_to_device(from, to, non_blocking);
  } else if (!is_ours(to)) {
    copy_to_host(from, to, non_blocking);
  } else if (from.device() != to.device()) {
    copy_between_devices(from, to);
  } else {
    Ledger::get().launch(current_lane(to.device().index()), "copy", {use_of(from, false), use_of(to, true)});
    on_host(to).copy_(on_host(from));
  }
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_copy_from", copy_from); }
// Else these bits are resolved by a copy, which comes here again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace emulated
