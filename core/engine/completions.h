// What transports have reported of transfers and the engine has not looked at yet. Driver.
#pragma once

#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/iface/transport.h"

namespace sotto {

class Completions {
 public:
  void add(Transfer& transfer, Status status) {
    waiting_.push_back({&transfer, std::move(status)});
  }
  // Of an operation, the owner of its transfers, nothing is of interest any more.
  void drop(const void* owner) {
    for (auto* list : {&waiting_, &taken_}) {
      for (Completion& c : *list) {
        if (c.transfer != nullptr && c.transfer->owner == owner) c.transfer = nullptr;
      }
    }
  }
  // Calls look(transfer, status) for each, also for those that come meanwhile. True if there was
  // one.
  template <class Look>
  bool take(Look&& look) {
    if (waiting_.empty()) return false;
    while (!waiting_.empty()) {
      taken_.swap(waiting_);
      for (Completion& c : taken_) {
        if (c.transfer != nullptr) look(*c.transfer, std::move(c.status));
      }
      taken_.clear();
    }
    return true;
  }

 private:
  struct Completion {
    Transfer* transfer;  // null: dropped
    Status status;
  };
  std::vector<Completion> waiting_, taken_;
};

}  // namespace sotto
