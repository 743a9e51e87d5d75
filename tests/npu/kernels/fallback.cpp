// Operators of the simulated device: each aten operator runs the CPU kernel on the same memory.
//
// torch_npu keeps the operators that allocate memory or create views. Loading this library replaces
// all other aten kernels of the device. An operator first waits for the tasks on its stream. With
// NPU_SIM_DEFER=1 its new outputs are written by a task on the stream, so that a reader that does
// not wait for the stream sees NaN.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/matmul.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "torch_npu/csrc/aten/NPUGeneratorImpl.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace {

using at::Tensor;
using c10::IValue;

// Operators of torch_npu that allocate, view or describe memory and launch no kernel.
const std::set<std::string> KEPT = {
    "empty.memory_format",
    "empty_strided",
    "empty_like",
    "new_empty_strided",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "alias",
    "detach",
    "lift",
    "lift_fresh",
    "view_as_real",
    "view_as_complex",
    "set_",
    "set_.source_Tensor",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "resize_",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "_to_copy",
    "_has_compatible_shallow_copy_type",
};

// Operators that refuse float64: matrix products and reductions.
const std::set<std::string> WITHOUT_FLOAT64 = {
    "aten::matmul", "aten::linear", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm",
    "aten::sum", "aten::mean",
    "aten::linalg_vector_norm", "aten::cumsum", "aten::_softmax", "aten::_log_softmax",
};

// Types that no operator of the device accepts. Memory of these types can be copied.
bool is_unsupported(at::ScalarType type) {
  return c10::isBarebonesUnsignedType(type) || c10::isFloat8Type(type);
}

bool is_deferred() {
  const char* text = std::getenv("NPU_SIM_DEFER");
  return text != nullptr && text[0] != '\0' && text[0] != '0';
}

bool is_on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

// Return a CPU tensor over the memory of a device tensor.
Tensor on_host(const Tensor& tensor) {
  if (!is_on_device(tensor)) {
    return tensor;
  }
  const auto& storage = tensor.storage();
  at::DataPtr memory(storage.mutable_data(), nullptr, [](void*) {}, at::kCPU);
  at::Storage host(
      at::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), nullptr, false);
  Tensor result = at::empty({0}, tensor.options().device(at::kCPU));
  result.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(host));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    result._set_conj(true);
  }
  if (tensor.is_neg()) {
    result._set_neg(true);
  }
  return result;
}

void check(aclError error) {
  TORCH_CHECK(error == ACL_SUCCESS, "the simulated device failed with error ", error);
}

void wait_for_stream() {
  check(aclrtSynchronizeStream(c10_npu::getCurrentNPUStream().stream()));
}

// Copies

// Copy the bytes of contiguous tensors of one type between host and device.
void copy_bytes(const Tensor& target, const Tensor& source, bool non_blocking) {
  const auto stream = c10_npu::getCurrentNPUStream().stream();
  const Tensor& host = is_on_device(target) ? source : target;
  const auto kind = is_on_device(target) ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
  check(aclrtMemcpyAsync(
      target.mutable_data_ptr(), target.nbytes(), source.const_data_ptr(), source.nbytes(), kind,
      stream));
  // Copies from and to pageable memory are synchronous.
  if (!non_blocking || !host.is_pinned()) {
    check(aclrtSynchronizeStream(stream));
  }
}

bool can_copy_bytes(const Tensor& target, const Tensor& source) {
  return target.scalar_type() == source.scalar_type() && target.sizes() == source.sizes() &&
      target.is_contiguous() && source.is_contiguous() && !source.is_conj() && !source.is_neg();
}

Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  if (target.device().type() == source.device().type()) {
    wait_for_stream();
    on_host(target).copy_(on_host(source));
  } else if (can_copy_bytes(target, source)) {
    copy_bytes(target, source, non_blocking);
  } else if (is_on_device(target)) {
    // Move the bytes, then convert and arrange them on the device.
    const Tensor plain = source.contiguous().resolve_conj().resolve_neg();
    Tensor moved = at::empty(plain.sizes(), plain.options().device(target.device()));
    copy_bytes(moved, plain, false);
    on_host(target).copy_(on_host(moved));
  } else {
    wait_for_stream();
    target.copy_(on_host(source));
  }
  return target;
}

at::Scalar local_scalar(const Tensor& tensor) {
  wait_for_stream();
  return on_host(tensor).item();
}

// New outputs

void write(const Tensor& output, const Tensor& host) {
  if (!is_deferred() || host.numel() == 0 || !host.is_non_overlapping_and_dense()) {
    on_host(output).copy_(host);
    return;
  }
  const auto stream = c10_npu::getCurrentNPUStream().stream();
  memset(output.mutable_data_ptr(), 0xFF, host.nbytes());
  auto* values = new Tensor(host);
  check(aclrtMemcpyAsync(
      output.mutable_data_ptr(), host.nbytes(), host.const_data_ptr(), host.nbytes(),
      ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
  check(aclrtLaunchCallback(
      [](void* data) { delete static_cast<Tensor*>(data); }, values, ACL_CALLBACK_NO_BLOCK,
      stream));
}

// Return a new tensor of the device with the values.
Tensor new_output(const Tensor& host, at::Device device) {
  Tensor output = at::empty_strided(host.sizes(), host.strides(), host.options().device(device));
  write(output, host);
  return output;
}

// Random numbers

// Let the CPU kernel draw from a state that depends on the seed and the offset of the device's
// generator, and advance that offset. The CPU's own generator does not change.
class RandomState {
 public:
  explicit RandomState(const at::Generator& device) {
    auto* generator = at::check_generator<at_npu::NPUGeneratorImpl>(device);
    std::lock_guard<std::mutex> lock(generator->mutex_);
    const auto [seed, offset] = generator->philox_engine_inputs(OFFSETS_PER_CALL);
    saved_ = cpu_.get_state();
    cpu_.set_current_seed(seed * 0x9E3779B97F4A7C15 + offset);
  }
  RandomState(const RandomState&) = delete;
  RandomState& operator=(const RandomState&) = delete;
  ~RandomState() { cpu_.set_state(saved_); }

 private:
  static constexpr uint64_t OFFSETS_PER_CALL = 4;
  at::Generator cpu_ = at::globalContext().defaultGenerator(at::kCPU);
  Tensor saved_;
};

// The arguments of one call, moved to the host and back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), first_(stack.size() - op.schema().arguments().size()) {
    originals_.assign(stack.begin() + static_cast<std::ptrdiff_t>(first_), stack.end());
  }

  void run() {
    for (size_t i = 0; i < originals_.size(); ++i) {
      stack_[first_ + i] = moved_to_host(originals_[i]);
    }
    moved_.assign(stack_.begin() + static_cast<std::ptrdiff_t>(first_), stack_.end());
    const c10::DeviceGuard guard(device());
    refuse_unsupported();
    wait_for_stream();
    std::unique_ptr<RandomState> random;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      random = std::make_unique<RandomState>(generator());
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      stack_[i] = moved_to_device(stack_[i]);
    }
  }

 private:
  void see(const Tensor& tensor) {
    if (is_on_device(tensor) && !device_) {
      device_ = tensor.device();
    }
    has_float64_ |= is_on_device(tensor) && tensor.scalar_type() == at::kDouble;
    has_unsupported_ |= is_on_device(tensor) && is_unsupported(tensor.scalar_type());
  }

  IValue moved_to_host(const IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
      return on_host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (const Tensor& tensor : value.toTensorVector()) {
        see(tensor);
        moved.push_back(on_host(tensor));
      }
      return moved;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> moved;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        see(tensor.value_or(Tensor()));
        moved.push_back(tensor ? std::optional<Tensor>(on_host(*tensor)) : std::nullopt);
      }
      return moved;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      device_ = device_.value_or(value.toDevice());
      return at::Device(at::kCPU);
    }
    if (value.isGenerator()) {
      generator_ = value.toGenerator();
      return IValue();
    }
    return value;
  }

  at::Device device() const {
    return device_ ? *device_ : c10_npu::getCurrentNPUStream().device();
  }

  at::Generator generator() const {
    return generator_ ? *generator_ : at_npu::detail::getDefaultNPUGenerator(device().index());
  }

  void refuse_unsupported() const {
    const bool is_refused = has_float64_ && WITHOUT_FLOAT64.count(op_.schema().name()) != 0;
    TORCH_CHECK(!is_refused, op_.schema().name(), ": float64 is not supported on this device");
    TORCH_CHECK(
        !has_unsupported_, op_.schema().name(), ": unsigned and 8-bit floating-point types are not "
        "supported on this device");
  }

  IValue moved_to_device(const IValue& value) {
    if (value.isTensor()) {
      return result(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (const Tensor& tensor : value.toTensorVector()) {
        moved.push_back(result(tensor));
      }
      return moved;
    }
    return value;
  }

  // Return an argument that the operator returns, or a new tensor with the values.
  Tensor result(const Tensor& host) {
    if (!host.defined()) {
      return host;
    }
    for (size_t i = 0; i < moved_.size(); ++i) {
      if (moved_[i].isTensor() && moved_[i].toTensor().defined() &&
          moved_[i].toTensor().unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) {
        return updated(originals_[i].toTensor(), host);
      }
    }
    return new_output(host, device());
  }

  // An operator may have resized its output, which then has memory of the host.
  static Tensor updated(Tensor original, const Tensor& host) {
    if (is_on_device(original) && original.sizes() != host.sizes()) {
      original.resize_(host.sizes());
      on_host(original).copy_(host);
    }
    return original;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const size_t first_;
  std::vector<IValue> originals_;
  std::vector<IValue> moved_;
  std::optional<at::Device> device_;
  std::optional<at::Generator> generator_;
  bool has_float64_ = false;
  bool has_unsupported_ = false;
};

// torch_npu differentiates matmul as a whole, with an operator that the CPU lacks.
std::tuple<Tensor, Tensor> matmul_backward(
    const Tensor& gradient, const Tensor& left, const Tensor& right, std::array<bool, 2> mask) {
  wait_for_stream();
  // Give vectors the dimension that matmul removes from its result.
  const bool is_row = left.dim() == 1;
  const bool is_column = right.dim() == 1;
  const Tensor a = is_row ? on_host(left).unsqueeze(0) : on_host(left);
  const Tensor b = is_column ? on_host(right).unsqueeze(1) : on_host(right);
  Tensor outer = on_host(gradient);
  outer = is_column ? outer.unsqueeze(-1) : outer;
  outer = is_row ? outer.unsqueeze(-2) : outer;
  Tensor left_gradient;
  Tensor right_gradient;
  if (mask[0]) {
    const Tensor host = at::sum_to(at::matmul(outer, b.transpose(-2, -1)), a.sizes());
    left_gradient = new_output(host.reshape(left.sizes()), left.device());
  }
  if (mask[1]) {
    const Tensor host = at::sum_to(at::matmul(a.transpose(-2, -1), outer), b.sizes());
    right_gradient = new_output(host.reshape(right.sizes()), right.device());
  }
  return {left_gradient, right_gradient};
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

// Views must share the memory of the device, so the kernels of torch_npu stay.
bool is_view(const c10::OperatorName& name) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op) {
    return false;
  }
  for (const c10::Argument& result : op->schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

// Return the aten operators with a kernel for the key, with their overload names. Views are excluded.
std::set<std::string> operators(c10::DispatchKey key) {
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
    if (name.name.rfind("aten::", 0) == 0 && !is_view(name)) {
      const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
      names.insert(name.name.substr(6) + overload);
    }
  }
  return names;
}

// Return the operators whose kernels are replaced: all of the device, and all of the CPU.
std::set<std::string> replaced_operators() {
  std::set<std::string> names = operators(c10::DispatchKey::PrivateUse1);
  for (const std::string& name : operators(c10::DispatchKey::CPU)) {
    names.insert(name);
  }
  for (const std::string& name : KEPT) {
    names.erase(name);
  }
  for (const char* own : {"copy_", "_local_scalar_dense", "matmul_backward"}) {
    names.erase(own);
  }
  return names;
}

torch::Library* library() {
  auto* lib = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const std::string& name : replaced_operators()) {
    lib->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  lib->impl("copy_", &copy_);
  lib->impl("_local_scalar_dense", &local_scalar);
  lib->impl("matmul_backward", &matmul_backward);
  return lib;
}

const torch::Library* const LIBRARY = library();  // never destroyed: the process may exit first

}  // namespace
