// The order of messages to one peer: small ones and metadata before bulk, then by priority, then
// first come, first served. A queue of pointers: payloads stay where they are.
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
  Transfer* pop_small() { return pop_from(small_); }
  Transfer* pop() {
    Transfer* t = pop_small();
    return t != nullptr ? t : pop_from(bulk_);
  }

  bool empty() const { return small_.empty() && bulk_.empty(); }

  void remove(const OpPosting& op) {
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

  static Transfer* pop_from(std::vector<PriorityList>& lists) {
    if (lists.empty()) return nullptr;
    Transfer* t = lists.front().list.take_first([](const Transfer&) { return true; });
    if (lists.front().list.empty()) lists.erase(lists.begin());
    return t;
  }

  std::vector<PriorityList> small_, bulk_;  // highest priority first
};

}  // namespace sotto::framed
