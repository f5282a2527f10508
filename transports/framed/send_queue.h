// The order of messages to one peer: small ones and metadata before bulk, then by priority, then
// first come, first served. A queue of pointers: payloads stay where they are.
//
// Bulk of operations in the background gets a share of the bytes while other bulk waits too, so
// that they go on however busy the wire is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/iface/transport.h"
#include "transports/framed/op_table.h"

namespace sotto::framed {

class SendQueue {
 public:
  // Largest message that overtakes bulk, which it hardly delays.
  static constexpr uint64_t kSmallBytes = 4096;

  // background_share: percent, below 100.
  explicit SendQueue(uint32_t background_share) : background_share_(background_share) {}

  void push(Transfer& t) {
    const bool small = t.message_class == MessageClass::kMetadata || t.bytes <= kSmallBytes;
    auto& lists = small ? small_ : bulk_;
    const int32_t priority = t.op->priority;
    auto at = std::find_if(lists.begin(), lists.end(),
                           [&](const PriorityList& b) { return b.priority <= priority; });
    if (at == lists.end() || at->priority != priority)
      at = lists.insert(at, PriorityList{priority, {}});
    at->list.push(t);
  }

  // The next message; null: none. pop_small: of those that overtake bulk.
  Transfer* pop_small() { return small_.empty() ? nullptr : pop_from(small_, small_.begin()); }
  Transfer* pop() {
    Transfer* const small = pop_small();
    if (small != nullptr || bulk_.empty()) return small;
    const auto background = std::ranges::find_if(
        bulk_, [](const PriorityList& b) { return in_background(b.priority); });
    if (background == bulk_.begin() || background == bulk_.end()) {
      due_ = 0;
      return pop_from(bulk_, bulk_.begin());
    }
    // due_ counts in hundredths of a byte.
    const uint64_t cost = background->list.head->bytes * (100 - background_share_);
    if (due_ >= cost) {
      due_ -= cost;
      return pop_from(bulk_, background);
    }
    Transfer* const urgent = pop_from(bulk_, bulk_.begin());
    due_ += urgent->bytes * background_share_;
    return urgent;
  }

  bool empty() const { return small_.empty() && bulk_.empty(); }

  void remove(const OpDescriptor& op) {
    for (auto* lists : {&small_, &bulk_}) {
      for (PriorityList& b : *lists) {
        while (b.list.take_first([&](const Transfer& t) { return t.op == &op; }) != nullptr) {
        }
      }
      std::erase_if(*lists, [](const PriorityList& b) { return b.list.empty(); });
    }
  }

 private:
  struct PriorityList {
    int32_t priority;
    TransferList list;  // never empty
  };

  static Transfer* pop_from(std::vector<PriorityList>& lists,
                            std::vector<PriorityList>::iterator from) {
    Transfer* t = from->list.take_first([](const Transfer&) { return true; });
    if (from->list.empty()) lists.erase(from);
    return t;
  }

  const uint32_t background_share_;
  uint64_t due_ = 0;                        // what background bulk has let pass and may catch up
  std::vector<PriorityList> small_, bulk_;  // highest priority first
};

}  // namespace sotto::framed
