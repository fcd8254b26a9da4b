// Every op of a device: entered into the ledger, and computed by the CPU's kernel on the same bytes.
#include "tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>
#include <functional>
#include <unordered_set>

namespace emulated {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

using Names = const std::unordered_set<std::string>;

// Ops whose result, or its size, the host must know.
Names kNeededByHost = {
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::bincount"};
Names kWithMasks = {"aten::index", "aten::index_put", "aten::_index_put_impl_"};

// One call of an op: its arguments become tensors of the CPU, its results tensors of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()), stack_(stack), begin_(stack.size() - schema_.arguments().size()), name_(schema_.name()) {
    if (!schema_.overload_name().empty()) name_ += "." + schema_.overload_name();
  }

  void run(const std::function<void()>& kernel) {
    const auto& arguments = schema_.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) take(arguments[i], stack_[begin_ + i]);
    if (!device_) device_ = current_device();
    for (size_t i = 0; i < arguments.size(); ++i) draw(arguments[i], stack_[begin_ + i]);

    auto& ledger = Ledger::get();
    const auto lane = current_lane(*device_);
    const bool is_needed = needs_host();
    if (is_needed) ledger.host_needs(lane, name_);
    if (!makes_view()) ledger.launch(lane, name_, uses_);
    {
      const AsPlainKernels guard;
      kernel();
    }
    for (auto& taken : taken_) adopt_size(taken);
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i)
      exchange_tensors(stack_[i], [&](const Tensor& tensor) { return give(tensor); });
    ledger.launch(lane, name_, given_, false);  // by the same kernel, or by none
    if (is_needed) ledger.wait_until_complete(ledger.recorded(lane));
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
    const bool writes = (argument.alias_info() && argument.alias_info()->isWrite()) || is_statistic(argument);
    const bool may_be_mask = argument.name() == "indices" && kWithMasks.count(schema_.name());
    is_fill_ |= argument.name() == "values" && value.isTensor() && value.toTensor().numel() == 1;
    exchange_tensors(value, [&](const Tensor& tensor) {
      if (may_be_mask && tensor.defined())
        is_masked_ |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      return take(tensor, writes);
    });
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      const auto device = value.toDevice();
      claim(device.has_index() ? device : Device(c10::kPrivateUse1, current_device()));
      value = Device(c10::kCPU);
    }
  }

  // The schema of batch norm does not say that running statistics are written.
  bool is_statistic(const c10::Argument& argument) const {
    if (schema_.name() != "aten::native_batch_norm") return false;
    const auto training = schema_.argumentIndexWithName("training");
    return stack_[begin_ + *training].toBool() &&
        (argument.name() == "running_mean" || argument.name() == "running_var");
  }

  Tensor take(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (tensor.dim() > 0 || writes) claim(tensor.device());
      return tensor;
    }
    claim(tensor.device());
    const bool is_own = writes && tensor.numel() == 0;
    const auto host = is_own ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : on_host(tensor);
    taken_.push_back({tensor, host, is_own});
    uses_.push_back(use_of(tensor, writes));
    return host;
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
    const Device device(c10::kPrivateUse1, *device_);
    TORCH_CHECK(generator.device() == device, name_, " on ", device, " is given a generator of ", generator.device());
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
      if (!taken.is_own && tensor.storage().is_alias_of(taken.host.storage()))
        return tensor_over(taken.original.storage(), tensor);
    }
    const auto result = on_device(tensor, *device_);
    given_.push_back(use_of(result, true));
    return result;
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t begin_;  // where the arguments are, until the kernel has taken them
  std::string name_;
  std::optional<Device> claimed_;
  std::optional<DeviceIndex> device_;
  std::vector<Taken> taken_;
  std::vector<Use> uses_, given_;
  bool is_masked_ = false, is_fill_ = false;
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}
void on_the_cpu(const char* op, torch::jit::Stack& stack) {
  on_the_cpu(c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), stack);
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run([&] { on_the_cpu(op, *stack); });
}

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const OnDevice guard(device && device->has_index() ? device->index() : current_device());
  return at::detail::empty_generic(sizes, allocator(), kDeviceKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  return empty_on(index, sizes, strides, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  impl->generic_set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return tensor;
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  Ledger::get().record_stream(use_of(tensor, false).block, Ledger::lane_of(stream));
}

// Convolutions pick a kernel by the kind of device, above the kernels that the CPU registers.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run([stack] { on_the_cpu("aten::convolution", *stack); });
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto begin = stack->end() - op.schema().arguments().size();
  const auto weight = begin[2].toTensor().sizes();
  const bool is_transposed = begin[6].toBool(), wants_bias = begin[9].toBoolList().get(2);
  const int64_t groups = begin[8].toInt();
  c10::IValue bias_sizes;
  if (wants_bias) bias_sizes = std::vector<int64_t>{is_transposed ? weight[1] * groups : weight[0]};
  Call(op, *stack).run([&] {
    stack->insert(stack->end() - 7, bias_sizes);
    on_the_cpu("aten::convolution_backward", *stack);
  });
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
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("dropout", dropout);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("dropout", dropout); }

}  // namespace

// Which kernel attention takes: the one that the CPU would, by the shapes.
int64_t attention_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const auto seen = [](const Tensor& tensor) { return on_host(tensor).requires_grad_(tensor.requires_grad()); };
  const auto seen_mask = mask ? std::optional<Tensor>(seen(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(
      seen(query), seen(key), seen(value), seen_mask, dropout, is_causal, scale, enable_gqa);
}

// Where the CPU has a kernel of its own, the device has it too, and no composition of other ops.
void take_kernels(const std::vector<std::string>& names) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::attention_kernel)
}  // namespace at::native
