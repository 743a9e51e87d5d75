// Devices, contexts, memory and copies of the simulated device. Device memory is host memory.
//
// NPU_SIM_DEVICES is the number of devices, NPU_SIM_MEMORY_BYTES the memory of each.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "acl/acl.h"
#include "stream.h"

namespace npu {

namespace {

constexpr size_t ALIGNMENT = 512;
constexpr int POISON = 0xFF;  // all bits set: NaN in every floating-point type
constexpr int64_t CORES = 24;  // of the AI and vector cores of a device

thread_local int device_of_thread = 0;

struct Block {
  size_t size;
  int device;
};

struct Memory {
  std::mutex mutex;
  std::map<char*, Block> blocks;  // by first byte
  std::map<int, size_t> used;  // bytes by device
};

Memory& memory() {
  static auto* instance = new Memory;
  return *instance;
}

std::map<int, int64_t>& settings() {
  static auto* instance = new std::map<int, int64_t>;
  return *instance;
}

size_t capacity() {
  static const auto bytes = static_cast<size_t>(
      environment_number("NPU_SIM_MEMORY_BYTES", int64_t{64} << 30));
  return bytes;
}

uint32_t device_count() {
  static const auto count = static_cast<uint32_t>(environment_number("NPU_SIM_DEVICES", 2));
  return count;
}

// Count bytes of a device, or return false if it has not enough memory.
bool reserve(size_t size, int device) {
  size_t& used = memory().used[device];
  if (used + size > capacity()) {
    return false;
  }
  used += size;
  return true;
}

// Physical memory that can be mapped to addresses: an anonymous file.
struct Physical {
  int file;
  size_t size;
  int device;
};

}  // namespace

int current_device() { return device_of_thread; }

}  // namespace npu

using npu::memory;

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = npu::device_count();
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || static_cast<uint32_t>(device) >= npu::device_count()) {
    return ACL_ERROR_RT_INVALID_DEVICEID;
  }
  npu::device_of_thread = device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtResetDeviceForce(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetDevice(int32_t* device) {
  *device = npu::device_of_thread;
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* is_active) {
  if (flags != nullptr) {
    *flags = 0;
  }
  *is_active = 1;
  return ACL_SUCCESS;
}

// A context is the number of its device plus one, as a pointer.
aclError aclrtCreateContext(aclrtContext* context, int32_t device) {
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(device) + 1);
  return ACL_SUCCESS;
}

aclError aclrtDestroyContext(aclrtContext) { return ACL_SUCCESS; }

aclError aclrtGetCurrentContext(aclrtContext* context) {
  return aclrtCreateContext(context, npu::device_of_thread);
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  npu::device_of_thread = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() { return "Ascend910B4"; }

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = npu::CORES;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) {
  *value = npu::CORES;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t* value) {
  *value = npu::CORES;
  return ACL_SUCCESS;
}

aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t* value) {
  *value = npu::CORES;
  return ACL_SUCCESS;
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType, uint32_t* value) {
  *value = npu::CORES;
  return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t, int32_t) {
  *can_access = 1;
  return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

aclError aclrtQueryDeviceStatus(int32_t, aclrtDeviceStatus* status) {
  *status = ACL_RT_DEVICE_STATUS_NORMAL;
  return ACL_SUCCESS;
}

// Settings of the process, such as deterministic operators. They have no effect on results.

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  npu::settings()[option] = value;
  return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *value = npu::settings()[option];
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}

// Device memory

aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const int device = npu::device_of_thread;
  if (!npu::reserve(size, device)) {
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  if (posix_memalign(pointer, npu::ALIGNMENT, size) != 0) {
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  if (npu::is_deferred()) {
    memset(*pointer, npu::POISON, size);
  }
  memory().blocks[static_cast<char*>(*pointer)] = {size, device};
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, size, policy);
}

aclError aclrtMallocWithCfg(
    void** pointer, size_t size, aclrtMemMallocPolicy policy, aclrtMallocConfig*) {
  return aclrtMalloc(pointer, size, policy);
}

aclError aclrtFree(void* pointer) {
  aclrtSynchronizeDevice();  // as on a real device, freeing waits for all tasks
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto block = memory().blocks.find(static_cast<char*>(pointer));
  if (block == memory().blocks.end()) {
    return pointer == nullptr ? ACL_SUCCESS : ACL_ERROR_RT_PARAM_INVALID;
  }
  memory().used[block->second.device] -= block->second.size;
  memory().blocks.erase(block);
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total_bytes = npu::capacity();
  *free_bytes = npu::capacity() - memory().used[npu::device_of_thread];
  return ACL_SUCCESS;
}

// Expandable segments: reserved addresses, and physical memory that is mapped to them

aclError aclrtReserveMemAddress(void** address, size_t size, size_t, void* expected, uint64_t) {
  *address = mmap(expected, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *address == MAP_FAILED ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}

// Addresses are never reused: their size is unknown here.
aclError aclrtReleaseMemAddress(void*) { return ACL_SUCCESS; }

aclError aclrtMallocPhysical(
    aclrtDrvMemHandle* handle, size_t size, const aclrtPhysicalMemProp* properties, uint64_t) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto device = static_cast<int>(properties->location.id);
  if (!npu::reserve(size, device)) {
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  const int file = memfd_create("npu-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) {
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  }
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new npu::Physical{file, size, device});
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = reinterpret_cast<npu::Physical*>(handle);
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().used[physical->device] -= physical->size;
  close(physical->file);
  delete physical;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(
    void* address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  auto* physical = reinterpret_cast<npu::Physical*>(handle);
  const int protection = PROT_READ | PROT_WRITE;
  void* mapped = mmap(
      address, size, protection, MAP_SHARED | MAP_FIXED, physical->file,
      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[static_cast<char*>(address)] = {size, physical->device};
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* address) {
  aclrtSynchronizeDevice();
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto block = memory().blocks.find(static_cast<char*>(address));
  if (block == memory().blocks.end()) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(address, block->second.size, PROT_NONE, flags, -1, 0);
  memory().blocks.erase(block);
  return ACL_SUCCESS;
}

// Host memory

aclError aclrtMallocHost(void** pointer, size_t size) {
  const size_t bytes = size == 0 ? npu::ALIGNMENT : size;
  return posix_memalign(pointer, npu::ALIGNMENT, bytes) == 0 ? ACL_SUCCESS
                                                             : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtMallocHostWithCfg(void** pointer, uint64_t size, aclrtMallocConfig*) {
  return aclrtMallocHost(pointer, size);
}

aclError aclrtFreeHost(void* pointer) {
  free(pointer);
  return ACL_SUCCESS;
}

aclError aclrtHostRegister(void* pointer, uint64_t, aclrtHostRegisterType, void** device_pointer) {
  *device_pointer = pointer;
  return ACL_SUCCESS;
}

aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *attributes = {};
  attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  auto block = memory().blocks.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (block != memory().blocks.begin()) {
    --block;
    if (static_cast<const char*>(pointer) < block->first + block->second.size) {
      attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
      attributes->location.id = static_cast<uint32_t>(block->second.device);
    }
  }
  return ACL_SUCCESS;
}

// Copies

aclError aclrtMemcpy(
    void* target, size_t target_size, const void* source, size_t count, aclrtMemcpyKind) {
  if (count > target_size) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  memcpy(target, source, count);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(
    void* target, size_t target_size, const void* source, size_t count, aclrtMemcpyKind kind,
    aclrtStream handle) {
  if (count > target_size) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  npu::Stream* stream = npu::stream_of_handle(handle);
  if (npu::is_deferred() && kind == ACL_MEMCPY_DEVICE_TO_HOST &&
      stream->is_done(stream->newest())) {
    memset(target, npu::POISON, count);  // until the copy is waited for
  }
  stream->push([=] {
    memmove(target, source, count);
    return ACL_SUCCESS;
  });
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsyncWithCondition(
    void* target, size_t target_size, const void* source, size_t count, aclrtMemcpyKind kind,
    aclrtStream stream) {
  return aclrtMemcpyAsync(target, target_size, source, count, kind, stream);
}

aclError aclrtMemset(void* target, size_t target_size, int32_t value, size_t count) {
  if (count > target_size) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  memset(target, value, count);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(
    void* target, size_t target_size, int32_t value, size_t count, aclrtStream handle) {
  if (count > target_size) {
    return ACL_ERROR_RT_PARAM_INVALID;
  }
  npu::stream_of_handle(handle)->push([=] {
    memset(target, value, count);
    return ACL_SUCCESS;
  });
  return ACL_SUCCESS;
}

}  // extern "C"
