// The custom calls of a lane: a message starts and ends inside an XLA program.
//
// start: copies a message's arrays into memory of the lane, queues it, and returns at once.
// done:  waits until the lane has exchanged the message, and copies its results out.
//
// A thread of the process takes the messages of a lane in order (lane_next), exchanges them with
// the other ranks, and reports their end (lane_finish). A token, float32 1.0, goes through every
// call: data alone orders the calls of a program. No Python ABI: one build serves every Python.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// What a lane remembers of a message; times in seconds of CLOCK_MONOTONIC.
struct Stamps {
  int64_t call;     // the program call in which the message was awaited, by number
  int64_t program;  // the program of this call
  int64_t bytes;
  double started;   // the program hands the message over
  double sent;      // its exchange begins
  double received;  // its exchange ends
  double awaited;   // the program asks for it
  double resumed;   // the program has waited
  double done;      // its results are copied
  char name[32];
};
constexpr size_t REMEMBERED = 8192;

struct Message {
  char* data;
  int32_t number;
  bool late;  // a later message may overtake it
  char kind[16], dtype[16];
  Stamps stamps;
};

struct Lane {
  std::mutex mutex;
  std::condition_variable queued, finished;
  std::deque<Message> queue;
  int32_t next = 0;                  // number of the next message
  std::unordered_set<int32_t> started;  // messages that no program has received
  std::unordered_map<int32_t, Message> results;
  int64_t call = 0, program = -1;      // the program call that runs, and its program
  std::deque<Stamps> ended;            // the last messages
  std::string error;                   // why the lane has ended
  bool ending = false;                 // no program follows those under way
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

template <size_t SIZE>
void write(char (&text)[SIZE], std::string_view value) {
  value.copy(text, SIZE - 1);
}

void write_token(ffi::RemainingRets& results) {
  *static_cast<float*>(results.get<ffi::AnyBuffer>(0).value()->untyped_data()) = 1.0f;
}

// (token, arrays...) -> (token, number of the message). The arrays lie one after the other; `bytes`
// has room for the result.
ffi::Error Start(ffi::RemainingArgs args, ffi::RemainingRets results, int64_t id, int64_t bytes,
                 std::string_view kind, std::string_view dtype, bool late, std::string_view name) {
  Lane* lane = lane_of(id);
  Message message{};
  message.late = late;
  message.stamps.bytes = bytes;
  message.stamps.started = now();
  write(message.kind, kind);
  write(message.dtype, dtype);
  write(message.stamps.name, name);
  // Freed memory stays in the process (fddp/runtime/freed_memory.py): the next step has it again.
  char* at = message.data = static_cast<char*>(malloc(bytes));
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

// Copies a message into row `row` of `count` of each result.
ffi::Error Receive(int64_t id, int32_t number, int64_t row, int64_t count,
                   ffi::RemainingRets& results) {
  Lane* lane = lane_of(id);
  Message message;
  double awaited = now();
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
  Stamps& stamps = message.stamps;
  stamps.awaited = awaited;
  stamps.resumed = now();
  const char* at = message.data;
  for (size_t i = 1; i < results.size(); ++i) {
    auto array = results.get<ffi::AnyBuffer>(i).value();
    size_t bytes = array->size_bytes() / count;
    memcpy(static_cast<char*>(array->untyped_data()) + row * bytes, at, bytes);
    at += bytes;
  }
  free(message.data);
  std::lock_guard<std::mutex> lock(lane->mutex);
  stamps.call = lane->call;
  stamps.program = lane->program;
  stamps.done = now();
  lane->ended.push_back(stamps);
  if (lane->ended.size() > REMEMBERED) lane->ended.pop_front();
  return ffi::Error::Success();
}

// (numbers, tokens...) -> (token, arrays...), whose rows lie one after the other in the messages.
ffi::Error Done(ffi::RemainingArgs args, ffi::RemainingRets results, int64_t id) {
  auto numbers = args.get<ffi::AnyBuffer>(0).value();
  int64_t count = numbers.element_count();
  write_token(results);
  for (int64_t row = 0; row < count; ++row) {
    ffi::Error error = Receive(id, static_cast<int32_t*>(numbers.untyped_data())[row], row, count,
                               results);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

// token -> token. A program of the lane begins.
ffi::Error Program(ffi::RemainingArgs, ffi::RemainingRets results, int64_t id, int64_t program) {
  Lane* lane = lane_of(id);
  std::lock_guard<std::mutex> lock(lane->mutex);
  lane->call += 1;
  lane->program = program;
  write_token(results);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(fddp_start, Start,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("lane")
                                  .Attr<int64_t>("bytes")
                                  .Attr<std::string_view>("kind")
                                  .Attr<std::string_view>("dtype")
                                  .Attr<bool>("late")
                                  .Attr<std::string_view>("name"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    fddp_done, Done, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("lane"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    fddp_program, Program,
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("lane").Attr<int64_t>("program"));

extern "C" {

// Takes the next message of a lane, and returns TAKEN. Returns CHOICE, with the message that the
// next program needs first, if later messages may overtake the next one: all ranks then take the
// message with the number `chosen`, which is -1 otherwise. Returns CLOSED if the lane is closed,
// and ENDS if it ends and no message is queued: a program under way may still start one.
int fddp_lane_next(int64_t id, int32_t chosen, Message* message) {
  enum { CLOSED, TAKEN, ENDS, CHOICE };
  Lane* lane = lane_of(id);
  std::unique_lock<std::mutex> lock(lane->mutex);
  auto& queue = lane->queue;
  auto is_late = [](const Message& message) { return message.late; };
  auto next = [&] {
    if (chosen < 0) return queue.begin();
    return std::find_if(queue.begin(), queue.end(),
                        [&](const Message& message) { return message.number == chosen; });
  };
  auto ready = [&] { return next() != queue.end() || lane->closed; };
  lane->queued.wait(lock, [&] { return ready() || lane->ending; });
  if (lane->ending) lane->queued.wait_for(lock, std::chrono::milliseconds(5), ready);
  if (lane->closed) return CLOSED;
  auto found = next();
  if (found == queue.end()) return ENDS;
  if (chosen < 0 && found->late) {
    *message = *(std::find_if_not(queue.begin(), queue.end(), is_late) - 1);
    return CHOICE;
  }
  *message = *found;
  queue.erase(found);
  message->stamps.sent = now();
  return TAKEN;
}

// The message has been exchanged; its results lie in its memory.
void fddp_lane_finish(int64_t id, Message* message) {
  Lane* lane = lane_of(id);
  {
    std::lock_guard<std::mutex> lock(lane->mutex);
    message->stamps.received = now();
    lane->results[message->number] = *message;
  }
  lane->finished.notify_all();
}

// Copies the stamps of the last messages, at most `room` of them, in order. Returns their number.
int64_t fddp_lane_stamps(int64_t id, Stamps* stamps, int64_t room) {
  Lane* lane = lane_of(id);
  std::lock_guard<std::mutex> lock(lane->mutex);
  int64_t count = std::min<int64_t>(room, lane->ended.size());
  std::copy(lane->ended.end() - count, lane->ended.end(), stamps);
  return count;
}

// No further program begins on a lane.
void fddp_lane_end(int64_t id) {
  Lane* lane = lane_of(id);
  {
    std::lock_guard<std::mutex> lock(lane->mutex);
    lane->ending = true;
  }
  lane->queued.notify_all();
}

// Closes a lane: every program that waits for it, or will, fails with these words.
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
