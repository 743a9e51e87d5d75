// Collectives of the simulated device: processes exchange data through shared memory.
//
// A communicator is a file in shared memory with one channel for each pair of ranks. Every
// collective is a batch of sends and receives over these channels, followed by a local reduction
// in the order of the ranks, so that all ranks get the same bits.
//
// NPU_SIM_SHARED_DIR is the folder of the files, HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT are the
// limits in seconds, as for HCCL itself.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "stream.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace npu {

namespace {

constexpr size_t CHANNEL_BYTES = 1 << 16;

// One direction between two ranks: the sender fills it, the receiver empties it.
struct Channel {
  size_t filled;  // bytes in `data`
  char data[CHANNEL_BYTES];
};

struct Shared {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  uint32_t num_joined;
  std::atomic<uint32_t> is_initialized;
  Channel channels[1];  // n * n, by sender and receiver
};

struct Communicator {
  uint32_t size;
  uint32_t rank;
  std::string name;
  Shared* shared;
  size_t bytes;

  Channel& channel(uint32_t sender, uint32_t receiver) const {
    return shared->channels[sender * size + receiver];
  }
};

// One message to or from another rank.
struct Transfer {
  bool is_send;
  char* data;
  size_t bytes;
  uint32_t peer;
  size_t done = 0;
};

size_t element_size(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 0;
  }
}

// The types that HCCL reduces. float64 is not among them.
bool can_reduce(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32:
    case HCCL_DATA_TYPE_BFP16:
      return true;
    default:
      return false;
  }
}

timespec deadline(int64_t seconds) {
  timespec time{};
  clock_gettime(CLOCK_REALTIME, &time);
  time.tv_sec += seconds;
  return time;
}

// Move the bytes that fit into a channel. The caller holds the mutex.
bool progress(const Communicator& comm, Transfer& transfer) {
  const size_t left = transfer.bytes - transfer.done;
  if (transfer.is_send) {
    Channel& channel = comm.channel(comm.rank, transfer.peer);
    if (left == 0 || channel.filled != 0) {
      return false;
    }
    channel.filled = left < CHANNEL_BYTES ? left : CHANNEL_BYTES;
    memcpy(channel.data, transfer.data + transfer.done, channel.filled);
    transfer.done += channel.filled;
    return true;
  }
  Channel& channel = comm.channel(transfer.peer, comm.rank);
  if (left == 0 || channel.filled == 0) {
    return false;
  }
  // The counts of both sides must agree. A longer message is the caller's error.
  const size_t count = channel.filled < left ? channel.filled : left;
  memcpy(transfer.data + transfer.done, channel.data, count);
  transfer.done += count;
  channel.filled = 0;
  return true;
}

// A rank may appear in several transfers of a batch. Those of one direction run in order.
bool is_blocked(const std::vector<Transfer>& transfers, size_t index) {
  for (size_t i = 0; i < index; ++i) {
    const Transfer& earlier = transfers[i];
    if (earlier.peer == transfers[index].peer && earlier.is_send == transfers[index].is_send &&
        earlier.done < earlier.bytes) {
      return true;
    }
  }
  return false;
}

aclError run_transfers(const Communicator& comm, std::vector<Transfer> transfers) {
  static const int64_t limit_s = environment_number("HCCL_EXEC_TIMEOUT", 1836);
  const timespec end = deadline(limit_s);
  pthread_mutex_lock(&comm.shared->mutex);
  while (true) {
    bool has_moved = false;
    bool is_complete = true;
    for (size_t i = 0; i < transfers.size(); ++i) {
      has_moved |= !is_blocked(transfers, i) && progress(comm, transfers[i]);
      is_complete &= transfers[i].done == transfers[i].bytes;
    }
    if (has_moved) {
      pthread_cond_broadcast(&comm.shared->changed);
    }
    if (is_complete) {
      break;
    }
    if (!has_moved &&
        pthread_cond_timedwait(&comm.shared->changed, &comm.shared->mutex, &end) == ETIMEDOUT) {
      pthread_mutex_unlock(&comm.shared->mutex);
      fprintf(stderr, "%s: rank %u waited %ld s for other ranks (HCCL_EXEC_TIMEOUT)\n",
              comm.name.c_str(), comm.rank, static_cast<long>(limit_s));
      return ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
    }
  }
  pthread_mutex_unlock(&comm.shared->mutex);
  return ACL_SUCCESS;
}

// Reductions

float to_float(uint16_t bits, HcclDataType type) {
  if (type == HCCL_DATA_TYPE_BFP16) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value = 0;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  _Float16 half = 0;
  memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}

uint16_t from_float(float value, HcclDataType type) {
  uint16_t bits = 0;
  if (type == HCCL_DATA_TYPE_BFP16) {
    uint32_t wide = 0;
    memcpy(&wide, &value, sizeof wide);
    if (value != value) {
      return 0x7FC0;  // NaN, whose payload must not be rounded away
    }
    wide += 0x7FFF + ((wide >> 16) & 1);  // round to nearest, ties to even
    return static_cast<uint16_t>(wide >> 16);
  }
  const auto half = static_cast<_Float16>(value);
  memcpy(&bits, &half, sizeof bits);
  return bits;
}

template <typename T>
T combine(T a, T b, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_PROD:
      return a * b;
    case HCCL_REDUCE_MAX:
      return b > a || b != b ? b : a;
    case HCCL_REDUCE_MIN:
      return b < a || b != b ? b : a;
    default:
      return a + b;
  }
}

// Reduce n parts of `count` elements that lie one after another: [n, count] -> [count].
template <typename T>
void reduce_as(const char* parts, char* result, size_t count, uint32_t n, HcclReduceOp op) {
  const T* values = reinterpret_cast<const T*>(parts);
  T* output = reinterpret_cast<T*>(result);
  for (size_t i = 0; i < count; ++i) {
    T total = values[i];
    for (uint32_t part = 1; part < n; ++part) {
      total = combine<T>(total, values[part * count + i], op);
    }
    output[i] = total;
  }
}

// 16-bit floating-point numbers: reduce in float32 and round once.
void reduce_16_bit(
    const char* parts, char* result, size_t count, uint32_t n, HcclReduceOp op,
    HcclDataType type) {
  const auto* values = reinterpret_cast<const uint16_t*>(parts);
  auto* output = reinterpret_cast<uint16_t*>(result);
  for (size_t i = 0; i < count; ++i) {
    float total = to_float(values[i], type);
    for (uint32_t part = 1; part < n; ++part) {
      total = combine(total, to_float(values[part * count + i], type), op);
    }
    output[i] = from_float(total, type);
  }
}

void reduce(
    const std::vector<char>& parts, void* result, size_t count, uint32_t n, HcclReduceOp op,
    HcclDataType type) {
  const char* from = parts.data();
  auto* to = static_cast<char*>(result);
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return reduce_as<int8_t>(from, to, count, n, op);
    case HCCL_DATA_TYPE_INT16:
      return reduce_as<int16_t>(from, to, count, n, op);
    case HCCL_DATA_TYPE_INT32:
      return reduce_as<int32_t>(from, to, count, n, op);
    case HCCL_DATA_TYPE_INT64:
      return reduce_as<int64_t>(from, to, count, n, op);
    case HCCL_DATA_TYPE_FP32:
      return reduce_as<float>(from, to, count, n, op);
    default:
      return reduce_16_bit(from, to, count, n, op, type);
  }
}

// Collectives

// Send `sends[r]` to every rank r and receive `receives[r]` from it, this rank included.
struct Span {
  char* data;
  size_t bytes;
};

aclError exchange(
    const Communicator& comm, const std::vector<Span>& sends, const std::vector<Span>& receives) {
  std::vector<Transfer> transfers;
  for (uint32_t peer = 0; peer < comm.size; ++peer) {
    if (peer == comm.rank) {
      memmove(receives[peer].data, sends[peer].data, sends[peer].bytes);
      continue;
    }
    transfers.push_back({true, sends[peer].data, sends[peer].bytes, peer});
    transfers.push_back({false, receives[peer].data, receives[peer].bytes, peer});
  }
  return run_transfers(comm, std::move(transfers));
}

// Return n consecutive spans of equal size.
std::vector<Span> consecutive(void* data, size_t bytes, uint32_t n) {
  std::vector<Span> spans;
  for (uint32_t i = 0; i < n; ++i) {
    spans.push_back({static_cast<char*>(data) + i * bytes, bytes});
  }
  return spans;
}

std::vector<Span> repeated(void* data, size_t bytes, uint32_t n) {
  return std::vector<Span>(n, Span{static_cast<char*>(data), bytes});
}

// Return the spans that counts and displacements in elements describe.
std::vector<Span> described(
    const void* data, const void* counts, const void* displacements, size_t element,
    uint32_t n) {
  const auto* sizes = static_cast<const uint64_t*>(counts);
  const auto* starts = static_cast<const uint64_t*>(displacements);
  auto* first = static_cast<char*>(const_cast<void*>(data));
  std::vector<Span> spans;
  for (uint32_t i = 0; i < n; ++i) {
    spans.push_back({first + starts[i] * element, sizes[i] * element});
  }
  return spans;
}

HcclResult launch(aclrtStream stream, Task task) {
  stream_of_handle(stream)->push(std::move(task), /*waits_for_others=*/true);
  return HCCL_SUCCESS;
}

Communicator& communicator(HcclComm handle) { return *static_cast<Communicator*>(handle); }

// Communicators

std::string new_name() {
  static std::atomic<uint32_t> count{0};
  const char* folder = std::getenv("NPU_SIM_SHARED_DIR");
  return std::string(folder != nullptr ? folder : "/dev/shm") + "/npu-" +
         std::to_string(getpid()) + "-" + std::to_string(count++);
}

Shared* map_shared(const std::string& name, size_t bytes) {
  const int file = open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    return nullptr;
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

// The file is created with zeros, so `is_initialized` is 0 until rank 0 has set it.
void initialize(Shared* shared) {
  pthread_mutexattr_t mutex_attributes;
  pthread_mutexattr_init(&mutex_attributes);
  pthread_mutexattr_setpshared(&mutex_attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&shared->mutex, &mutex_attributes);
  pthread_condattr_t condition_attributes;
  pthread_condattr_init(&condition_attributes);
  pthread_condattr_setpshared(&condition_attributes, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&shared->changed, &condition_attributes);
  shared->is_initialized.store(1);
}

// Wait until all ranks have joined, then remove the name of the file.
HcclResult join(const Communicator& comm) {
  static const int64_t limit_s = environment_number("HCCL_CONNECT_TIMEOUT", 120);
  const timespec end = deadline(limit_s);
  Shared* shared = comm.shared;
  if (comm.rank == 0) {
    initialize(shared);
  }
  while (shared->is_initialized.load() == 0) {
    usleep(1000);
    if (deadline(0).tv_sec > end.tv_sec) {
      return HCCL_E_TIMEOUT;
    }
  }
  pthread_mutex_lock(&shared->mutex);
  ++shared->num_joined;
  pthread_cond_broadcast(&shared->changed);
  int error = 0;
  while (shared->num_joined < comm.size && error == 0) {
    error = pthread_cond_timedwait(&shared->changed, &shared->mutex, &end);
  }
  pthread_mutex_unlock(&shared->mutex);
  if (comm.rank == 0) {
    unlink(comm.name.c_str());
  }
  return error == 0 ? HCCL_SUCCESS : HCCL_E_TIMEOUT;
}

}  // namespace

}  // namespace npu

using npu::Communicator;
using npu::communicator;

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  snprintf(info->internal, sizeof info->internal, "%s", npu::new_name().c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(
    uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* handle) {
  auto* comm = new Communicator{size, rank, info->internal, nullptr, 0};
  comm->bytes = sizeof(npu::Shared) + sizeof(npu::Channel) * (size * size - 1);
  comm->shared = npu::map_shared(comm->name, comm->bytes);
  if (comm->shared == nullptr) {
    return HCCL_E_MEMORY;
  }
  *handle = comm;
  return npu::join(*comm);
}

HcclResult HcclCommInitRootInfoConfig(
    uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
    HcclComm* comm) {
  return HcclCommInitRootInfo(size, info, rank, comm);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  Communicator& comm = communicator(handle);
  munmap(comm.shared, comm.bytes);
  delete &comm;
  return HCCL_SUCCESS;
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", communicator(handle).name.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  *size = communicator(handle).size;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = communicator(handle).rank;
  return HCCL_SUCCESS;
}

// Errors are reported by the stream of a collective.
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult code) {
  return code == HCCL_SUCCESS ? "no error" : "error of the simulated HCCL";
}

HcclResult HcclAllGather(
    void* input, void* output, uint64_t count, HcclDataType type, HcclComm handle,
    aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  const size_t bytes = count * npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    return npu::exchange(comm, npu::repeated(input, bytes, comm.size),
                         npu::consecutive(output, bytes, comm.size));
  });
}

HcclResult HcclAllReduce(
    void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
    HcclComm handle, aclrtStream stream) {
  if (!npu::can_reduce(type)) {
    return HCCL_E_NOT_SUPPORT;
  }
  const Communicator& comm = communicator(handle);
  const size_t bytes = count * npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    std::vector<char> parts(bytes * comm.size);
    const aclError error = npu::exchange(comm, npu::repeated(input, bytes, comm.size),
                                         npu::consecutive(parts.data(), bytes, comm.size));
    npu::reduce(parts, output, count, comm.size, op, type);
    return error;
  });
}

// The other ranks send their values too, and drop what they receive.
HcclResult HcclReduce(
    void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
    HcclComm handle, aclrtStream stream) {
  if (!npu::can_reduce(type)) {
    return HCCL_E_NOT_SUPPORT;
  }
  const Communicator& comm = communicator(handle);
  const size_t bytes = count * npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    std::vector<char> parts(bytes * comm.size);
    const aclError error = npu::exchange(comm, npu::repeated(input, bytes, comm.size),
                                         npu::consecutive(parts.data(), bytes, comm.size));
    if (comm.rank == root) {
      npu::reduce(parts, output, count, comm.size, op, type);
    }
    return error;
  });
}

HcclResult HcclReduceScatter(
    void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
    HcclComm handle, aclrtStream stream) {
  if (!npu::can_reduce(type)) {
    return HCCL_E_NOT_SUPPORT;
  }
  const Communicator& comm = communicator(handle);
  const size_t bytes = count * npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    std::vector<char> parts(bytes * comm.size);
    const aclError error = npu::exchange(comm, npu::consecutive(input, bytes, comm.size),
                                         npu::consecutive(parts.data(), bytes, comm.size));
    npu::reduce(parts, output, count, comm.size, op, type);
    return error;
  });
}

HcclResult HcclBroadcast(
    void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
    aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  const size_t bytes = count * npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    std::vector<npu::Transfer> transfers;
    for (uint32_t peer = 0; peer < comm.size; ++peer) {
      const bool is_send = comm.rank == root;
      if (peer != comm.rank && (is_send || peer == root)) {
        transfers.push_back({is_send, static_cast<char*>(buffer), bytes, peer});
      }
    }
    return npu::run_transfers(comm, std::move(transfers));
  });
}

HcclResult HcclScatter(
    void* input, void* output, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
    aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  const size_t bytes = count * npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    const bool is_root = comm.rank == root;
    const auto sends = is_root ? npu::consecutive(input, bytes, comm.size)
                               : npu::repeated(nullptr, 0, comm.size);
    auto receives = npu::repeated(output, 0, comm.size);
    receives[root].bytes = bytes;
    return npu::exchange(comm, sends, receives);
  });
}

HcclResult HcclAlltoAll(
    const void* input, uint64_t send_count, HcclDataType type, const void* output,
    uint64_t receive_count, HcclDataType, HcclComm handle, aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  const size_t element = npu::element_size(type);
  return npu::launch(stream, [=, &comm] {
    auto* from = const_cast<void*>(input);
    auto* to = const_cast<void*>(output);
    return npu::exchange(comm, npu::consecutive(from, send_count * element, comm.size),
                         npu::consecutive(to, receive_count * element, comm.size));
  });
}

// The arrays of counts belong to the caller, so they are read before the task runs.
HcclResult HcclAlltoAllV(
    const void* input, const void* send_counts, const void* send_displacements, HcclDataType type,
    const void* output, const void* receive_counts, const void* receive_displacements,
    HcclDataType, HcclComm handle, aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  const size_t element = npu::element_size(type);
  const auto sends = npu::described(input, send_counts, send_displacements, element, comm.size);
  const auto receives =
      npu::described(output, receive_counts, receive_displacements, element, comm.size);
  return npu::launch(stream, [=, &comm] { return npu::exchange(comm, sends, receives); });
}

HcclResult HcclAllGatherV(
    void* input, uint64_t count, void* output, const void* counts, const void* displacements,
    HcclDataType type, HcclComm handle, aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  const size_t element = npu::element_size(type);
  const auto receives = npu::described(output, counts, displacements, element, comm.size);
  return npu::launch(stream, [=, &comm] {
    return npu::exchange(comm, npu::repeated(input, count * element, comm.size), receives);
  });
}

HcclResult HcclReduceScatterV(
    void* input, const void* counts, const void* displacements, void* output, uint64_t count,
    HcclDataType type, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  if (!npu::can_reduce(type)) {
    return HCCL_E_NOT_SUPPORT;
  }
  const Communicator& comm = communicator(handle);
  const size_t element = npu::element_size(type);
  const auto sends = npu::described(input, counts, displacements, element, comm.size);
  return npu::launch(stream, [=, &comm] {
    std::vector<char> parts(count * element * comm.size);
    const aclError error = npu::exchange(
        comm, sends, npu::consecutive(parts.data(), count * element, comm.size));
    npu::reduce(parts, output, count, comm.size, op, type);
    return error;
  });
}

HcclResult HcclBatchSendRecv(
    HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  std::vector<npu::Transfer> transfers;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t bytes = items[i].count * npu::element_size(items[i].dataType);
    const bool is_send = items[i].sendRecvType == HCCL_SEND;
    transfers.push_back({is_send, static_cast<char*>(items[i].buf), bytes, items[i].remoteRank});
  }
  return npu::launch(stream, [=, &comm] { return npu::run_transfers(comm, transfers); });
}

HcclResult HcclSend(
    void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle,
    aclrtStream stream) {
  HcclSendRecvItem item{HCCL_SEND, buffer, count, type, peer};
  return HcclBatchSendRecv(&item, 1, handle, stream);
}

HcclResult HcclRecv(
    void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle,
    aclrtStream stream) {
  HcclSendRecvItem item{HCCL_RECV, buffer, count, type, peer};
  return HcclBatchSendRecv(&item, 1, handle, stream);
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  const Communicator& comm = communicator(handle);
  return npu::launch(stream, [&comm] {
    char token = 0;
    std::vector<char> tokens(comm.size);
    return npu::exchange(comm, npu::repeated(&token, 1, comm.size),
                         npu::consecutive(tokens.data(), 1, comm.size));
  });
}

}  // extern "C"
