// Streams and events of the simulated device. A stream is a queue of tasks that run in order.
//
// By default, tasks run as soon as possible in one thread per stream. With NPU_SIM_DEFER=1 a task
// runs only when the host or another stream waits for it, so that results which nobody waited for
// are missing. Both orders are legal on a real device. While NPU_SIM_FAIL=1 is set, tasks fail.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "acl/acl.h"

namespace npu {

using Task = std::function<aclError()>;
using Clock = std::chrono::steady_clock;

// Return the value of an environment variable as a number, or `otherwise` if it is not set.
int64_t environment_number(const char* name, int64_t otherwise);

bool is_deferred();

class Stream {
 public:
  Stream(int device, int32_t id) : device(device), id(id) {}

  const int device;
  const int32_t id;

  // Append a task and return its ticket. A task that waits for other processes must say so: all
  // other tasks of an idle stream run in the calling thread.
  uint64_t push(Task task, bool waits_for_others = false);

  // Return the ticket of the newest task.
  uint64_t newest();

  bool is_done(uint64_t ticket);

  // Wait until the task with this ticket has run. Return the first error of the stream's tasks,
  // as CANN reports asynchronous errors at the next synchronization.
  aclError wait(uint64_t ticket);

  // Let the tasks up to this ticket run (only needed if tasks are deferred).
  void release(uint64_t ticket);

 private:
  void serve();
  void run(std::unique_lock<std::mutex>& lock, Task task);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  uint64_t released_ = 0;
  bool has_thread_ = false;
  bool is_running_ = false;
  aclError error_ = ACL_SUCCESS;
};

struct Event {
  std::mutex mutex;
  Stream* stream = nullptr;  // null before the event is recorded
  uint64_t ticket = 0;
  Clock::time_point time;
};

// Let all tasks of all streams run. A wait that lasts longer than `GRACE` calls it: another process
// may wait for a deferred task of this one.
void release_all_streams();

Stream* create_stream(int device);

// Return the streams of a device, including its default stream.
std::deque<Stream*> streams_of_device(int device);

// Return the stream of a handle; the null handle is the default stream of the current device.
Stream* stream_of_handle(aclrtStream handle);

int current_device();

}  // namespace npu
