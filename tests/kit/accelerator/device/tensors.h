// Tensors as the ledger and the CPU's kernels see them: bytes of a block.
#pragma once
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

namespace emulated {

constexpr c10::DispatchKeySet kDeviceKey(c10::DispatchKey::PrivateUse1);

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

inline Extent extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {static_cast<size_t>(tensor.storage_offset()) * tensor.element_size(),
          static_cast<size_t>(last + 1) * tensor.element_size()};
}

inline Use use_of(const at::Tensor& tensor, bool writes) {
  auto* block = block_of(tensor.storage().data_ptr());
  TORCH_INTERNAL_ASSERT(block, "memory of ", tensor.device(), " that its allocator does not know");
  return {block, extent_of(tensor), writes};
}

// A tensor over memory that exists; of the CPU where the storage says so.
inline at::Tensor tensor_over(const c10::Storage& storage, const at::Tensor& like) {
  const auto key = storage.device_type() == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

inline at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto host = tensor_over(block_of(tensor.storage().data_ptr())->on_host, tensor);
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

inline at::Tensor empty_on(
    c10::DeviceIndex device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  const OnDevice guard(device);
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kDeviceKey, dtype);
}

// A result of the CPU, in memory of a device.
inline at::Tensor on_device(const at::Tensor& host, c10::DeviceIndex device) {
  const auto strides = host.strides();
  const bool overlaps = std::find(strides.begin(), strides.end(), 0) != strides.end();
  const auto dense = overlaps ? host.contiguous() : host;
  const auto result = empty_on(device, dense.sizes(), dense.strides(), dense.scalar_type());
  on_host(result).copy_(dense);
  return result;
}

// Kernels of the CPU run below autograd, and cast nothing by themselves.
struct AsPlainKernels {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::DispatchKeySet(c10::DispatchKey::AutocastCPU)};
};

}  // namespace emulated
