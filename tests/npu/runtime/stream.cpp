// Streams and events, see stream.h.
#include "stream.h"

#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

namespace npu {

namespace {

constexpr auto GRACE = std::chrono::milliseconds(200);

struct Registry {
  std::mutex mutex;
  std::deque<Stream*> streams;
  std::deque<Stream*> defaults;
};

// Never destroyed: threads of torch_npu use streams while the process exits.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

int64_t environment_number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoll(text) : otherwise;
}

bool is_deferred() {
  static const bool value = environment_number("NPU_SIM_DEFER", 0) != 0;
  return value;
}

uint64_t Stream::push(Task task, bool waits_for_others) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++pushed_;
  const bool is_idle = tasks_.empty() && !is_running_;
  if (is_idle && !waits_for_others && !is_deferred()) {
    const uint64_t ticket = pushed_;
    run(lock, std::move(task));
    return ticket;
  }
  tasks_.push_back(std::move(task));
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { serve(); }).detach();
  }
  changed_.notify_all();
  return pushed_;
}

void Stream::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      return !tasks_.empty() && !is_running_ && (!is_deferred() || done_ < released_);
    });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    run(lock, std::move(task));
  }
}

// Run a task without the lock; `is_running_` keeps the order.
void Stream::run(std::unique_lock<std::mutex>& lock, Task task) {
  is_running_ = true;
  lock.unlock();
  aclError error = task();
  if (environment_number("NPU_SIM_FAIL", 0) != 0) {
    error = ACL_ERROR_RT_AICORE_EXCEPTION;
  }
  lock.lock();
  is_running_ = false;
  ++done_;
  if (error_ == ACL_SUCCESS) {
    error_ = error;
  }
  changed_.notify_all();
}

uint64_t Stream::newest() {
  std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Stream::is_done(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

void Stream::release(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ticket > released_) {
    released_ = ticket;
    changed_.notify_all();
  }
}

aclError Stream::wait(uint64_t ticket) {
  release(ticket);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, GRACE, [&] { return done_ >= ticket; })) {
    if (is_deferred()) {
      lock.unlock();
      release_all_streams();
      lock.lock();
    }
  }
  return error_;
}

void release_all_streams() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (Stream* stream : registry().streams) {
    stream->release(stream->newest());
  }
}

Stream* create_stream(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto id = static_cast<int32_t>(registry().streams.size());
  registry().streams.push_back(new Stream(device, id));
  return registry().streams.back();
}

std::deque<Stream*> streams_of_device(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::deque<Stream*> streams;
  for (Stream* stream : registry().streams) {
    if (stream->device == device) {
      streams.push_back(stream);
    }
  }
  return streams;
}

namespace {

Stream* default_stream(int device) {
  auto& defaults = registry().defaults;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (Stream* stream : defaults) {
      if (stream->device == device) {
        return stream;
      }
    }
  }
  Stream* stream = create_stream(device);
  std::lock_guard<std::mutex> lock(registry().mutex);
  defaults.push_back(stream);
  return stream;
}

}  // namespace

Stream* stream_of_handle(aclrtStream handle) {
  return handle == nullptr ? default_stream(current_device()) : static_cast<Stream*>(handle);
}

}  // namespace npu

using npu::Event;
using npu::Stream;

extern "C" {

aclError aclrtCreateStream(aclrtStream* stream) {
  *stream = npu::create_stream(npu::current_device());
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}

// Streams stay registered: their events may still be in use.
aclError aclrtDestroyStream(aclrtStream handle) {
  Stream* stream = npu::stream_of_handle(handle);
  return stream->wait(stream->newest());
}

aclError aclrtDestroyStreamForce(aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeStream(aclrtStream handle) {
  Stream* stream = npu::stream_of_handle(handle);
  return stream->wait(stream->newest());
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t) {
  return aclrtSynchronizeStream(handle);
}

aclError aclrtSynchronizeDevice(void) {
  aclError first_error = ACL_SUCCESS;
  for (Stream* stream : npu::streams_of_device(npu::current_device())) {
    const aclError error = stream->wait(stream->newest());
    first_error = first_error == ACL_SUCCESS ? error : first_error;
  }
  return first_error;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Stream* stream = npu::stream_of_handle(handle);
  const bool is_done = stream->is_done(stream->newest());
  *status = is_done ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  *id = npu::stream_of_handle(handle)->id;
  return ACL_SUCCESS;
}

aclError aclrtDeviceGetStreamPriorityRange(int32_t* least, int32_t* greatest) {
  *least = 7;
  *greatest = 0;
  return ACL_SUCCESS;
}

// Settings without an effect on results.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) {
  return ACL_SUCCESS;
}

// The function runs in the thread of the stream.
aclError aclrtLaunchCallback(
    aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream stream) {
  npu::stream_of_handle(stream)->push([=] {
    function(data);
    return ACL_SUCCESS;
  });
  return ACL_SUCCESS;
}

aclError aclrtCreateEvent(aclrtEvent* event) {
  *event = new Event;
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  return aclrtCreateEvent(event);
}

// Events are never freed: a deferred task may still refer to them.
aclError aclrtDestroyEvent(aclrtEvent) { return ACL_SUCCESS; }

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = npu::stream_of_handle(stream_handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  event->stream = stream;
  event->time = npu::Clock::now();
  event->ticket = stream->newest();
  if (!stream->is_done(event->ticket)) {
    // The callee holds no lock of the event while it waits, and `mutex` protects the time.
    event->ticket = stream->push([event] {
      std::lock_guard<std::mutex> time_lock(event->mutex);
      event->time = npu::Clock::now();
      return ACL_SUCCESS;
    }, /*waits_for_others=*/true);
  }
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* producer = nullptr;
  uint64_t ticket = 0;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    producer = event->stream;
    ticket = event->ticket;
  }
  if (producer != nullptr && !producer->is_done(ticket)) {
    npu::stream_of_handle(stream_handle)->push([producer, ticket] {
      return producer->wait(ticket);
    }, /*waits_for_others=*/true);
  }
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = nullptr;
  uint64_t ticket = 0;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    stream = event->stream;
    ticket = event->ticket;
  }
  return stream == nullptr ? ACL_SUCCESS : stream->wait(ticket);
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t) {
  return aclrtSynchronizeEvent(event);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  auto* event = static_cast<Event*>(handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  const bool is_done = event->stream == nullptr || event->stream->is_done(event->ticket);
  *status = is_done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtGetEventId(aclrtEvent event, uint32_t* id) {
  *id = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(event));
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  const auto elapsed = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
  *ms = std::chrono::duration<float, std::milli>(elapsed).count();
  return ACL_SUCCESS;
}

}  // extern "C"
