// Streams of the user that come after operations of which the host still has a part to do. When the
// rest is the device's, threads that wait for that may order their streams by events, and blocked
// streams are unblocked by the device. Driver.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/base/status.h"
#include "core/engine/device_queues.h"
#include "core/engine/op.h"
#include "core/engine/scheduler.h"

namespace sotto {

// A stream that is to come after an operation, for a thread that waits until that is so.
struct StreamOrder {
  Op* op;
  void* stream;
  std::atomic<bool> done{false};  // the order is the thread's again
};

class StreamOrders {
 public:
  void add(StreamOrder& order) { orders_.push_back(&order); }
  void add_blocking(Op& op) { blocking_.push_back(&op); }
  // The operation has ended, with its blocks.
  void drop_blocking(const Op& op) { std::erase(blocking_, &op); }

  // True: orders are done, and their threads may look.
  bool settle() {
    std::erase_if(blocking_, [](Op* op) {
      const bool queued = Scheduler::only_device_left(*op);
      if (queued) DeviceQueues::unblock_behind(*op);
      return queued;
    });
    return std::erase_if(orders_, settled) != 0;
  }

 private:
  static bool settled(StreamOrder* order) {
    Op& op = *order->op;
    const bool ended = op.done();
    if (!ended && !Scheduler::only_device_left(op)) return false;
    order->done.store(true, std::memory_order_release);
    return true;
  }

  std::vector<StreamOrder*> orders_;
  std::vector<Op*> blocking_;
};

}  // namespace sotto
