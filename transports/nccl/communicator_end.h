// The end of an ncclComm_t. NCCL's calls for it give memory back, which may wait until the device
// stands still, and so for operations of other comms. Those go on only with the thread that
// drives. So the end has a thread of its own, as long as it takes. Several at once are what NCCL's
// groups of aborts are since version 2.22: one may wait for what another one ends.
//
// While graphs have calls of the communicator NCCL cannot end it. Then the thread is left to wait
// for that, and nobody waits for the thread.
//
// While streams of the device are blocked (BlockedStreams) nothing is given back: NCCL would wait
// for them with a lock of the context that their operations need. What an aborted communicator has
// on the device is told to end before that, by versions from 2.22 on.
//
// Threads: one at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "transports/nccl/api.h"
#include "transports/nccl/live_graphs.h"

namespace sotto::nccl {

class CommunicatorEnd {
 public:
  // How long an end may take before its thread is left behind.
  static constexpr std::chrono::milliseconds kLimit{10'000};
  // How long an end by an older NCCL than 2.22 waits for streams that are blocked.
  static constexpr std::chrono::milliseconds kPatience{1'000};

  // The communicator is the end's, which has not begun. `limit`: as kLimit.
  CommunicatorEnd(std::shared_ptr<const Api> api, ncclComm_t comm, int device, LiveGraphs graphs,
                  std::chrono::milliseconds limit = kLimit);
  // Waits until it is over or left to graphs, if it has begun, but no longer than the limit after
  // abort().
  ~CommunicatorEnd();
  CommunicatorEnd(const CommunicatorEnd&) = delete;
  CommunicatorEnd& operator=(const CommunicatorEnd&) = delete;

  // Begins the orderly end, in which all ranks of a machine take part. What has failed is aborted.
  void begin();
  // Begins an abort, also in place of an orderly end that has begun.
  void abort();
  // The handle is invalid.
  bool over() const { return state_->over.load(std::memory_order_acquire); }
  // Graphs keep it from being over. An abort tells the device at once nevertheless.
  bool left_to_graphs() const { return !over() && state_->graphs.any(); }

 private:
  // Of the thread too, which may live longer.
  struct State {
    std::shared_ptr<const Api> api;
    ncclComm_t comm;
    int device;
    LiveGraphs graphs;
    std::atomic<bool> abort{false};
    std::atomic<bool> over{false};
  };
  static void run(State& state) noexcept;
  static bool finalize(const State& state);
  static void give_back(const State& state, ncclResult_t (*call)(ncclComm_t), const char* name);
  void start();

  const std::shared_ptr<State> state_;
  const std::chrono::milliseconds limit_;
  std::chrono::steady_clock::time_point left_behind_at_;
  std::thread thread_;
};

}  // namespace sotto::nccl
