// A stream of the fake runtime: a host thread with a queue. A marker is a position in a queue.
//
// Threads: any.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "tests/emulation/cuda/hardware_queue.h"
#include "tests/emulation/cuda/kernel_registry.h"
#include "tests/emulation/cuda/ref.h"

namespace sotto::fake_cuda {

class Marker {
 public:
  bool done() const;
  void wait();  // for done
  void complete();
  std::chrono::steady_clock::time_point at() const { return at_; }  // when it was done
  uint32_t stream() const { return stream_; }                       // number
  uint64_t record() const { return record_; }                       // of the stream, from 0

 private:
  friend class Stream;
  std::atomic<int> done_{0};
  std::chrono::steady_clock::time_point at_;
  uint32_t stream_ = 0;
  uint64_t record_ = 0;
};

class Stream {
 public:
  // queue: what it shares with other streams; null: nothing.
  Stream(uint32_t number, int device, unsigned flags, int priority, uint64_t seed,
         std::shared_ptr<HardwareQueue> queue);
  // Waits until the queue is empty.
  ~Stream();

  uint32_t number() const { return number_; }  // as in Wait
  int device() const { return device_; }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }

  // Queues work: it may be delayed and made to fail.
  void push(Job job);
  // Queues what is neither delayed nor made to fail.
  void push_always(Job job);
  // The same for what waits: it is in the way of its hardware queue until it has ended.
  void push_wait(Job job);
  // A position after all that is queued now.
  Ref<Marker> mark();
  // The same for an event, which counts it.
  Ref<Marker> record();
  uint64_t records();  // how many
  // Work queued from now on starts after the marker is done.
  void wait_for(Ref<Marker> marker);
  void drain();
  bool idle();
  // As idle, but the caller is not ordered behind what the stream has done.
  bool busy();
  bool waits();  // the stream is in what push_wait has queued
  // The thread is a stream's, or runs a host function.
  static bool on_stream_thread();

 private:
  enum class Kind : uint8_t {
    kWork,    // may be delayed and fail
    kMarker,  // neither
    kWait,    // neither, and holds up its hardware queue
  };
  struct Entry {
    Job job;
    Kind kind = Kind::kMarker;
    std::unique_ptr<char> edge;  // what the submission happened before
    uint64_t place = 0;          // in the hardware queue
  };
  void enqueue(Job job, Kind kind);
  void execute(Entry& entry);
  void run();

  const uint32_t number_;
  const int device_;
  const unsigned flags_;
  const int priority_;
  const std::shared_ptr<HardwareQueue> hardware_;  // null: its own
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Entry> queue_;
  bool stop_ = false;
  bool busy_ = false;
  bool waits_ = false;
  uint64_t records_ = 0;  // under mutex_
  std::mt19937_64 random_;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace sotto::fake_cuda
