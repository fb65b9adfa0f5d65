// The custom calls of a lane: a message starts and ends inside an XLA program.
//
// start: copies a message's arrays into memory of the lane, queues it, and returns at once.
// done:  waits until the lane has exchanged the message, and copies its results out.
//
// A thread of the process takes the messages of a lane in order (lane_next), exchanges them with
// the other ranks, and reports their end (lane_finish). A token, float32 1.0, goes through every
// call: data alone orders the calls of a program. No Python ABI: one build serves every Python.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

struct Message {
  int32_t number;
  char* data;
  int64_t bytes;
  int64_t kind, dtype;
  double started;
};

struct Lane {
  std::mutex mutex;
  std::condition_variable queued, finished;
  std::deque<Message> queue;
  int32_t next = 0;                  // number of the next message
  std::unordered_set<int32_t> started;  // messages that no program has received
  std::unordered_map<int32_t, Message> results;
  std::multimap<int64_t, char*> idle;  // capacity -> memory
  std::string error;                   // why the lane has ended
  bool closed = false;
};

// Never destroyed: a thread may still wait here when the process ends.
std::mutex* lanes_mutex = new std::mutex;
std::unordered_map<int64_t, Lane*>* lanes = new std::unordered_map<int64_t, Lane*>;

Lane* lane_of(int64_t id) {
  std::lock_guard<std::mutex> lock(*lanes_mutex);
  Lane*& lane = (*lanes)[id];
  if (!lane) lane = new Lane;
  return lane;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t capacity_of(int64_t bytes) { return bytes / 64 * 64 + 64; }

char* take(Lane* lane, int64_t bytes) {
  int64_t capacity = capacity_of(bytes);
  auto found = lane->idle.find(capacity);
  if (found == lane->idle.end()) return static_cast<char*>(aligned_alloc(64, capacity));
  char* data = found->second;
  lane->idle.erase(found);
  return data;
}

void write_token(ffi::RemainingRets& results) {
  *static_cast<float*>(results.get<ffi::AnyBuffer>(0).value()->untyped_data()) = 1.0f;
}

// (token, arrays...) -> (token, number of the message). The arrays lie one after the other; `bytes`
// has room for the result.
ffi::Error Start(ffi::RemainingArgs args, ffi::RemainingRets results, int64_t id, int64_t bytes,
                 int64_t kind, int64_t dtype) {
  Lane* lane = lane_of(id);
  Message message{0, nullptr, bytes, kind, dtype, now()};
  {
    std::lock_guard<std::mutex> lock(lane->mutex);
    message.data = take(lane, bytes);
  }
  char* at = message.data;
  for (size_t i = 1; i < args.size(); ++i) {
    auto array = args.get<ffi::AnyBuffer>(i).value();
    memcpy(at, array.untyped_data(), array.size_bytes());
    at += array.size_bytes();
  }
  write_token(results);
  {
    std::lock_guard<std::mutex> lock(lane->mutex);
    message.number = lane->next;
    lane->next = (lane->next + 1) & 0x7fffffff;
    lane->started.insert(message.number);
    lane->queue.push_back(message);
  }
  *static_cast<int32_t*>(results.get<ffi::AnyBuffer>(1).value()->untyped_data()) = message.number;
  lane->queued.notify_one();
  return ffi::Error::Success();
}

// (number, tokens...) -> (token, arrays...), which lie one after the other in the message.
ffi::Error Done(ffi::RemainingArgs args, ffi::RemainingRets results, int64_t id) {
  Lane* lane = lane_of(id);
  auto number = *static_cast<int32_t*>(args.get<ffi::AnyBuffer>(0).value().untyped_data());
  Message message;
  {
    std::unique_lock<std::mutex> lock(lane->mutex);
    if (!lane->started.erase(number)) {
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                        "a program has received these sums already: a state with sums in flight "
                        "can be passed to one step only.");
    }
    lane->finished.wait(lock, [&] { return lane->results.count(number) || lane->closed; });
    auto exchanged = lane->results.find(number);
    if (exchanged == lane->results.end()) {
      return ffi::Error(ffi::ErrorCode::kAborted, lane->error);
    }
    message = exchanged->second;
    lane->results.erase(exchanged);
  }
  write_token(results);
  const char* at = message.data;
  for (size_t i = 1; i < results.size(); ++i) {
    auto array = results.get<ffi::AnyBuffer>(i).value();
    memcpy(array->untyped_data(), at, array->size_bytes());
    at += array->size_bytes();
  }
  std::lock_guard<std::mutex> lock(lane->mutex);
  lane->idle.emplace(capacity_of(message.bytes), message.data);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(fddp_start, Start,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("lane")
                                  .Attr<int64_t>("bytes")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("dtype"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(fddp_done, Done,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("lane"));

extern "C" {

// Waits for the next message of a lane. Returns 0 if the lane is closed, else 1.
int fddp_lane_next(int64_t id, int32_t* number, void** data, int64_t* bytes, int64_t* kind,
                   int64_t* dtype, double* started) {
  Lane* lane = lane_of(id);
  std::unique_lock<std::mutex> lock(lane->mutex);
  lane->queued.wait(lock, [&] { return !lane->queue.empty() || lane->closed; });
  if (lane->closed) return 0;
  Message message = lane->queue.front();
  lane->queue.pop_front();
  *number = message.number;
  *data = message.data;
  *bytes = message.bytes;
  *kind = message.kind;
  *dtype = message.dtype;
  *started = message.started;
  return 1;
}

// The message has been exchanged; its results lie in its memory.
void fddp_lane_finish(int64_t id, int32_t number, void* data, int64_t bytes) {
  Lane* lane = lane_of(id);
  {
    std::lock_guard<std::mutex> lock(lane->mutex);
    lane->results[number] = {number, static_cast<char*>(data), bytes, 0, 0, 0};
  }
  lane->finished.notify_all();
}

// Ends a lane: every program that waits for it, or will, fails with these words.
void fddp_lane_close(int64_t id, const char* error) {
  Lane* lane = lane_of(id);
  {
    std::lock_guard<std::mutex> lock(lane->mutex);
    lane->closed = true;
    lane->error = error;
  }
  lane->queued.notify_all();
  lane->finished.notify_all();
}
}
