// Every op of a device: entered into the ledger, and computed by the CPU's kernel on the same bytes.
#include "tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>
#include <unordered_set>

namespace emulated {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

// Ops whose result, or its size, the host must know.
const std::unordered_set<std::string> kNeededByHost = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount"};
const std::unordered_set<std::string> kWithMasks = {"aten::index", "aten::index_put", "aten::_index_put_impl_"};
// Their schemas do not say that running statistics are written.
const std::unordered_set<std::string> kBatchNorms = {"aten::native_batch_norm", "aten::_native_batch_norm_legit"};

// One call of an op: its arguments become tensors of the CPU, its results tensors of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), stack_(stack), name_(schema_.name() + (schema_.overload_name().empty() ? "" : "." + schema_.overload_name())) {}

  void run(const c10::OperatorHandle& op) {
    const auto begin = stack_.size() - schema_.arguments().size();
    for (size_t i = 0; i < schema_.arguments().size(); ++i) take(schema_.arguments()[i], stack_[begin + i]);
    if (!device_) device_ = current_device();
    for (size_t i = 0; i < schema_.arguments().size(); ++i) draw(schema_.arguments()[i], stack_[begin + i]);

    auto& ledger = Ledger::get();
    const auto lane = current_lane(*device_);
    const bool is_needed = needs_host();
    if (is_needed) ledger.host_needs(lane, name_);
    if (!makes_view()) ledger.launch(lane, name_, uses_);
    {
      const AsPlainKernels guard;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (auto& taken : taken_) adopt_size(taken);
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i)
      exchange_tensors(stack_[i], [&](const Tensor& tensor) { return give(tensor); });
    ledger.launch(lane, name_, given_);
    if (is_needed) ledger.complete(ledger.recorded(lane));
  }

 private:
  struct Taken {
    Tensor original, host;
    bool is_own;  // an output that is to be sized by the kernel: not yet the device's memory
  };

  template <typename Exchange>
  static void exchange_tensors(c10::IValue& value, Exchange exchange) {
    if (value.isTensor()) {
      value = exchange(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(exchange(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(exchange(*tensor)) : tensor);
      value = list;
    }
  }

  void take(const c10::Argument& argument, c10::IValue& value) {
    const bool writes = (argument.alias_info() && argument.alias_info()->isWrite()) ||
        (kBatchNorms.count(schema_.name()) && (argument.name() == "running_mean" || argument.name() == "running_var"));
    const bool is_mask = argument.name() == "indices" && kWithMasks.count(schema_.name());
    is_fill_ |= argument.name() == "values" && value.isTensor() && value.toTensor().numel() == 1;
    exchange_tensors(value, [&](const Tensor& tensor) {
      if (is_mask && tensor.defined()) is_masked_ |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      return take(tensor, writes);
    });
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      claim(Device(c10::kPrivateUse1, value.toDevice().has_index() ? value.toDevice().index() : current_device()));
      value = Device(c10::kCPU);
    }
  }

  Tensor take(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (tensor.dim() > 0 || writes) claim(tensor.device());
      return tensor;
    }
    claim(tensor.device());
    const bool is_own = writes && tensor.numel() == 0;
    taken_.push_back({tensor, is_own ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : on_host(tensor), is_own});
    uses_.push_back(use_of(tensor, writes));
    return taken_.back().host;
  }

  void claim(Device device) {
    TORCH_CHECK(!claimed_ || *claimed_ == device, name_, " is given tensors on ", *claimed_, " and on ", device,
        "; move one of them first");
    claimed_ = device;
    if (device.is_privateuseone()) device_ = device.index();
  }

  // Random numbers are the device's own, not those of the CPU's default generator.
  void draw(const c10::Argument& argument, c10::IValue& value) {
    if (argument.name() != "generator") return;
    if (value.isNone()) value = at::detail::getPrivateUse1Hooks().getDefaultGenerator(*device_);
    const auto generator = value.toGenerator();
    TORCH_CHECK(generator.device() == Device(c10::kPrivateUse1, *device_), name_, " on ", Device(c10::kPrivateUse1, *device_),
        " is given a generator of ", generator.device());
    value = cpu_generator(generator);
  }

  bool needs_host() const {
    return kNeededByHost.count(schema_.name()) || (is_masked_ && !is_fill_) || is_sized_by_repeats();
  }
  bool is_sized_by_repeats() const {
    return schema_.name() == "aten::repeat_interleave" && schema_.overload_name() == "Tensor" && stack_.back().isNone();
  }
  bool makes_view() const {
    const auto& returns = schema_.returns();
    return !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  }

  // A kernel may give its output another size.
  void adopt_size(const Taken& taken) {
    const auto& host = taken.host;
    auto* original = taken.original.unsafeGetTensorImpl();
    if (host.sizes() == taken.original.sizes()) return;
    if (taken.is_own) {
      const auto end = extent_of(host).end;
      if (end > taken.original.storage().nbytes()) resize_storage(taken.original.storage(), end);
      original->set_sizes_and_strides(host.sizes(), host.strides(), 0);
      on_host(taken.original).copy_(host);
      given_.push_back(use_of(taken.original, true));
    } else {
      original->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  Tensor give(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (const auto& taken : taken_) {
      if (tensor.is_same(taken.host)) return taken.original;
      if (!taken.is_own && tensor.storage().is_alias_of(taken.host.storage())) return tensor_over(taken.original.storage(), tensor);
    }
    if (!tensor.device().is_cpu()) return tensor;
    const auto result = empty_on(*device_, tensor.sizes(), tensor.strides(), tensor.scalar_type());
    on_host(result).copy_(tensor);
    given_.push_back(use_of(result, true));
    return result;
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const std::string name_;
  std::optional<Device> claimed_;
  std::optional<DeviceIndex> device_;
  std::vector<Taken> taken_;
  std::vector<Use> uses_, given_;
  bool is_masked_ = false, is_fill_ = false;
};

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(op); }

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const OnDevice guard(device && device->has_index() ? device->index() : current_device());
  return at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_on(device && device->has_index() ? device->index() : current_device(), sizes, strides, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  impl->generic_set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return tensor;
}

// Lets `.data = ` and `Module.to` keep parameters, and what is tied to them, when they change the device.
bool can_take_data(const Tensor& self, const Tensor& from) {
  return self.layout() == c10::kStrided && from.layout() == c10::kStrided;
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  Ledger::get().record_stream(block_of(tensor.storage().data_ptr()), Ledger::lane_of(stream));
}

// Convolutions pick a kernel by the kind of device, above the kernels that run by themselves.
DeviceIndex enter_convolution(const std::string& name, std::initializer_list<Tensor> tensors) {
  std::vector<Use> uses;
  const auto device = tensors.begin()->device();
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    TORCH_CHECK(tensor.device() == device, name, " is given tensors on ", device, " and on ", tensor.device(), "; move one of them first");
    uses.push_back(use_of(tensor, false));
  }
  Ledger::get().launch(current_lane(device.index()), name, uses);
  return device.index();
}

Tensor from_host(DeviceIndex device, const std::string& name, const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto result = empty_on(device, tensor.sizes(), tensor.strides(), tensor.scalar_type());
  on_host(result).copy_(tensor);
  Ledger::get().launch(current_lane(device), name, {use_of(result, true)});
  return result;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  const auto device = enter_convolution("aten::convolution", {input, weight, bias.value_or(Tensor())});
  const AsPlainKernels guard;
  return from_host(device, "aten::convolution", at::convolution(on_host(input), on_host(weight),
      bias ? std::optional<Tensor>(on_host(*bias)) : std::nullopt, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  const std::string name = "aten::convolution_backward";
  const auto device = enter_convolution(name, {gradient, input, weight});
  const AsPlainKernels guard;
  const std::vector<int64_t> bias_sizes = {transposed ? weight.size(1) * groups : weight.size(0)};
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(on_host(gradient), on_host(input), on_host(weight),
      wanted[2] ? at::OptionalIntArrayRef(bias_sizes) : std::nullopt, stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {from_host(device, name, of_input), from_host(device, name, of_weight), from_host(device, name, of_bias)};
}

// Other accelerators fuse dropout; the CPU's numbers come from a mask that is divided first.
Tensor dropout(const Tensor& input, double probability, bool train) {
  if (probability == 0 || !train || input.numel() == 0) return input;
  if (probability == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(at::empty_like(input).bernoulli_(1 - probability).div_(1 - probability));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, c10::IntArrayRef)>(at::native::view));
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_has_compatible_shallow_copy_type", can_take_data);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("dropout", dropout);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }
}  // namespace

// Which kernel attention takes: the one that the CPU would, by the shapes.
int64_t attention_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const auto seen = [](const Tensor& tensor) { return on_host(tensor).requires_grad_(tensor.requires_grad()); };
  return at::_fused_sdp_choice(seen(query), seen(key), seen(value), mask ? std::optional<Tensor>(seen(*mask)) : std::nullopt,
      dropout, is_causal, scale, enable_gqa);
}

// Where the CPU has a kernel of its own, the device has it too, and no composition of other ops.
void take_kernels(const std::vector<std::string>& names) {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::attention_kernel)
}  // namespace at::native
