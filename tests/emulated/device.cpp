// A device that every machine has: torch's PrivateUse1, whose memory is the host's and whose operators are the CPU's.
//
// A device pointer has a bit set that no valid address has: what reads device memory without going through an operator
// ends with a segmentation fault, as on an accelerator. An operator sees the same memory through CPU tensors, so that
// it computes the CPU's bits, and its tensors must all be on the device. What the device does is counted, and told to
// a listener: copies each way, waits of the host for the device, collectives. On request it refuses the types of numbers
// that an Ascend NPU lacks, or computes with slowly.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::IValue;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr uintptr_t kBit = uintptr_t(1) << 55;
constexpr size_t kHead = 64;  // before each block: its size; keeps the CPU's alignment
constexpr int kDevices = 8;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

std::atomic<int64_t> num_operators{0}, num_bytes{0}, peak_bytes{0};
void (*listener)(const char* kind, const char* name, int64_t bytes, int waits) = nullptr;
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId stream = 0;

void tell(const char* kind, const char* name, int64_t bytes, bool waits) {
  if (listener) listener(kind, name, bytes, waits);
}

std::atomic<bool> refuses{false}, converts{true};

void admit(at::ScalarType type, const char* name) {
  TORCH_CHECK(!refuses || !converts, name, " has an internal format on this device: allow_internal_format is on");
  TORCH_CHECK(
      !refuses || !(type == at::kDouble || at::isComplexType(type) || at::isFloat8Type(type)), name,
      " is not implemented for ", type, " on this device");
}

void* flip(const void* address) {  // between an address of the device and one of the host
  return address ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) ^ kBit) : nullptr;
}

// Memory

void release(void* block) {
  num_bytes -= *static_cast<int64_t*>(block);
  std::free(block);
}

c10::DataPtr allocate(size_t size) {
  c10::Device device(kDevice, current);
  if (size == 0) return {nullptr, device};
  void* block = std::aligned_alloc(kHead, (size + 2 * kHead - 1) / kHead * kHead);
  TORCH_CHECK(block, "out of memory");
  *static_cast<int64_t*>(block) = size;
  int64_t now = (num_bytes += size), peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {}
  return {flip(static_cast<char*>(block) + kHead), block, release, device};
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override { return ::allocate(size); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(flip(to), flip(from), size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = num_bytes;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak_bytes = num_bytes.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {(size_t(80) << 30) - num_bytes, size_t(80) << 30};
  }
};

struct OldMemory final : c10::Allocator {  // what torch.accelerator cannot ask
  c10::DataPtr allocate(size_t size) override { return ::allocate(size); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(flip(to), flip(from), size); }
};

Memory memory;
OldMemory old_memory;
REGISTER_ALLOCATOR(kDevice, &memory);

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned_blocks;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = std::aligned_alloc(kHead, (size + kHead) / kHead * kHead);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_blocks[reinterpret_cast<uintptr_t>(block)] = size;
    return {block, block, [](void* address) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned_blocks.erase(reinterpret_cast<uintptr_t>(address));
      std::free(address);
    }, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned_blocks.upper_bound(address);
  return after != pinned_blocks.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

// Devices, streams and events: what is queued is done at once

using Time = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(kDevice, current);
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, stream); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, device, next++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    c10::Stream before(c10::Stream::UNSAFE, c10::Device(kDevice, current), stream);
    stream = to.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Time;
    *static_cast<Time*>(*event) = std::chrono::steady_clock::now();
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Time*>(end) - *static_cast<Time*>(start)).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Time*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { tell("sync", "event", 0, true); }
  void synchronizeStream(const c10::Stream&) const override { tell("sync", "stream", 0, true); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell("sync", "device", 0, true); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = kKeys;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<Generator>(c10::DeviceIndex(0));
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  at::Device getDeviceFromPtr(void*) const override { return c10::Device(kDevice, current); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocate(size);
    if (auto kept = std::min(storage.nbytes(), size)) std::memcpy(flip(data.get()), flip(storage.data()), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

Hooks hooks;

// Tensors

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  admit(dtype.value_or(at::kFloat), "a tensor");
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(kDevice, current));
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, dtype.value_or(at::kFloat));
}

Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  admit(dtype.value_or(at::kFloat), "a tensor");
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(kDevice, current));
  return at::detail::empty_generic(size, &memory, kKeys, dtype.value_or(at::kFloat), format);
}

Tensor with_storage(const c10::Storage& storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

// The tensors of one operator as the CPU sees them: the same memory, one CPU storage for each of the device's.
class Views {
 public:
  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
    device_ = tensor.device();
    auto& host = host_[tensor.storage().unsafeGetStorageImpl()];
    if (!host) {
      auto* kept = new c10::Storage(tensor.storage());
      c10::DataPtr data(flip(kept->data()), kept, [](void* each) { delete static_cast<c10::Storage*>(each); }, c10::kCPU);
      host = c10::Storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(data), nullptr, false);
      device_storage_.emplace(host.unsafeGetStorageImpl(), *kept);
    }
    auto seen = with_storage(host, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) seen.unsafeGetTensorImpl()->set_wrapped_number(true);
    return seen;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    auto found = tensor.has_storage() ? device_storage_.find(tensor.storage().unsafeGetStorageImpl()) : device_storage_.end();
    if (found != device_storage_.end()) return with_storage(found->second, kKeys, tensor);
    auto result = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, device_, {});
    Views().to_host(result).copy_(tensor.resolve_conj().resolve_neg());
    return result;
  }

  void set_device(c10::Device device) { device_ = device; }
  c10::Device device() const { return device_.value_or(c10::Device(kDevice, current)); }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_, device_storage_;
  std::optional<c10::Device> device_;
};

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Views views;
  if (self.numel() && self.is_cpu()) {
    tell("to device", "copy", self.nbytes(), !(non_blocking && is_pinned(self.storage().data())));
  } else if (self.numel() && to.is_cpu()) {
    tell("to host", "copy", self.nbytes(), !(non_blocking && is_pinned(to.storage().data())));
  }
  views.to_host(to).copy_(views.to_host(self));
  return to;
}

at::Scalar local_scalar(const Tensor& self) {
  tell("to host", "item", self.nbytes(), true);
  return at::_local_scalar_dense(Views().to_host(self));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }

void make_room(const Tensor& tensor) {
  auto need = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  if (tensor.storage().nbytes() < need) hooks.resizePrivateUse1Bytes(tensor.storage(), need);
}

const Tensor& resized(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  make_room(self);
  return self;
}

Tensor copy_and_resize(const Tensor& self, const Tensor& to) { return copy_from(self, resized(to, self.sizes(), {}), false); }

Tensor& set_storage_at(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() || size.empty()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  make_room(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Operators

const std::unordered_set<std::string> kWait = {
    "aten::equal", "aten::masked_select", "aten::nonzero", "aten::repeat_interleave", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::_linalg_check_errors"};
const std::unordered_set<std::string> kIndex = {  // which take indices of the host too, and copy them
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put"};
// What CUDA adds up by atomics, unless algorithms must be deterministic: in any order, so that the last bits differ. Where
// it is only warned, its attention does so; here all do, as it is not warned in a run's forward passes.
const std::unordered_set<std::string> kAnyOrder = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::index_add", "aten::index_add_",
    "aten::scatter_add", "aten::scatter_add_", "aten::_index_put_impl_"};
// What it refuses where algorithms are to be deterministic.
const std::unordered_set<std::string> kInNoOrder = {
    "aten::_upsample_bicubic2d_aa_backward", "aten::_upsample_bilinear2d_aa_backward", "aten::upsample_bicubic2d_backward",
    "aten::upsample_bilinear2d_backward", "aten::replication_pad3d_backward", "aten::reflection_pad2d_backward",
    "aten::avg_pool3d_backward", "aten::grid_sampler_2d_backward", "aten::histc", "aten::cumsum", "aten::cumsum_"};

void disturb(const IValue& value) {
  thread_local std::mt19937 random{std::random_device{}()};
  if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_floating_point()) return;
  Tensor sums = value.toTensor();
  if (sums.numel()) sums.mul_(1 + (1 + random() % 7) * (sums.itemsize() < 4 ? 0x1p-7 : 0x1p-20));
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto first = stack->size() - schema.arguments().size();
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  Views views;
  std::optional<c10::Device> common;
  std::optional<size_t> stranger;  // an argument that is elsewhere
  int64_t bytes = 0;
  std::vector<std::pair<size_t, Tensor>> fresh;  // outputs that have no memory yet

  auto check = [&](const Tensor& tensor, size_t i) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kDevice) {
      if (common && *common != tensor.device()) stranger = i;
      common = tensor.device();
      bytes += tensor.nbytes();
    } else if (tensor.dim() > 0) {
      if (kIndex.count(name) && i == 1) {
        tell("to device", "index", tensor.nbytes(), true);
      } else {
        stranger = i;
      }
    }
  };
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& value = given[i];
    auto& place = (*stack)[first + i];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      check(tensor, i);
      const auto& argument = schema.arguments()[i];
      if (argument.is_out() && tensor.numel() == 0) {
        fresh.emplace_back(i, at::empty({0}, at::TensorOptions().dtype(tensor.dtype())));
        place = fresh.back().second;
      } else {
        place = views.to_host(tensor);
      }
    } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
      // Lists of tensors, of optional ones, and of lists, as collectives have.
      if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& tensor : value.toTensorList()) {
          check(tensor, i);
          list.push_back(views.to_host(tensor));
        }
        place = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
          if (tensor) check(*tensor, i);
          list.push_back(tensor ? std::optional<Tensor>(views.to_host(*tensor)) : tensor);
        }
        place = list;
      } else if (!value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
        c10::List<c10::List<Tensor>> lists;
        for (const IValue& inner : value.toListRef()) {
          c10::List<Tensor> list;
          for (const Tensor& tensor : inner.toTensorList()) {
            check(tensor, i);
            list.push_back(views.to_host(tensor));
          }
          lists.push_back(list);
        }
        place = lists;
      }
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      auto device = value.toDevice();
      views.set_device(device.has_index() ? device : c10::Device(kDevice, current));
      place = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(
      !stranger || !common, "Expected all tensors to be on the same device, but argument ",
      stranger ? schema.arguments()[*stranger].name() : "", " of ", name, " is not on ", *common);

  const bool is_collective = name.rfind("c10d::", 0) == 0;
  num_operators++;
  if (is_collective) tell("collective", name.c_str(), bytes, false);
  if (kWait.count(name)) tell("to host", name.c_str(), bytes, true);
  const bool adds = kAnyOrder.count(name) && (name != "aten::_index_put_impl_" || given[3].toBool());
  if (kInNoOrder.count(name) && !(name == "aten::cumsum" && !given[0].toTensor().is_floating_point())) {
    at::globalContext().alertNotDeterministic(name);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto& context = at::globalContext();
  if (adds && !(context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly())) {
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) disturb((*stack)[i]);
  }

  for (auto& [i, tensor] : fresh) {
    const Tensor& out = given[i].toTensor();
    resized(out, tensor.sizes(), {});
    if (tensor.numel()) Views().to_host(out).copy_(tensor);
  }
  const auto& returns = schema.returns();
  const auto start = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& place = (*stack)[start + i];
    const auto* alias = returns[i].alias_info();
    if (place.isTensor() && alias && alias->isWrite()) {
      for (size_t j = 0; j < given.size(); ++j) {
        const auto* other = schema.arguments()[j].alias_info();
        if (other && given[j].isTensor() && other->beforeSets() == alias->beforeSets()) place = given[j];
      }
    } else if (place.isTensor()) {
      if (common && place.toTensor().defined()) admit(place.toTensor().scalar_type(), name.c_str());
      place = views.to_device(place.toTensor());
    } else if (place.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : place.toTensorList()) list.push_back(views.to_device(tensor));
      place = list;
    }
  }
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  Views views;
  num_operators++;
  auto b = bias ? std::optional<Tensor>(views.to_host(*bias)) : bias;
  TORCH_CHECK(x.device() == weight.device(), "Expected x and weight on one device, got ", x.device(), " and ", weight.device());
  return views.to_device(at::convolution_symint(
      views.to_host(x), views.to_host(weight), b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  Views views;
  num_operators++;
  std::vector<c10::SymInt> channels = {grad.sym_size(1)};
  auto [a, b, c] = at::convolution_backward_symint(
      views.to_host(grad), views.to_host(x), views.to_host(weight), at::OptionalSymIntArrayRef(channels), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  return {views.to_device(a), views.to_device(b), views.to_device(c)};
}

// Accelerators count integers, a CPU floats.
Tensor histogram(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Views views;
  num_operators++;
  return views.to_device(at::histc(views.to_host(x).to(at::kFloat), bins, low, high).to(x.scalar_type()));
}

int64_t attention_choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  Views views;
  auto m = mask ? std::optional<Tensor>(views.to_host(*mask)) : mask;
  return at::_fused_sdp_choice(
      views.to_host(query), views.to_host(key), views.to_host(value), m, dropout, is_causal, scale, enable_gqa);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("resize_", resized);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("histc", histogram);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // A kernel that torch composes would come before the fallback, and have other bits than the CPU's own.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

// Under autocast products are of lower precision, as on other accelerators.
using at::autocast::CastPolicy;
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

// A copy resolves these bits itself; torch's own way to resolve them is a copy, and would not end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Collectives: those of the group's CPU backend, on the same memory.
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("c10d::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      m.impl(name.name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    }
  }
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

extern "C" {
void emulated_start() { at::RegisterPrivateUse1HooksInterface(&hooks); }
void emulated_refuse_types() { refuses = true; }
void emulated_convert(int on) { converts = on; }
void emulated_listen(void (*to)(const char*, const char*, int64_t, int)) { listener = to; }
void emulated_use_old_allocator() { c10::SetAllocator(kDevice, &old_memory, 100); }
int64_t emulated_operators() { return num_operators; }
int64_t emulated_bytes() { return num_bytes; }
int64_t emulated_peak() { return peak_bytes; }
void emulated_reset_peak() { peak_bytes = num_bytes.load(); }
}
