// Counters per comm epoch and peer. Written by the driving thread, read by any.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/iface/transport.h"
#include "core/wire/frame.h"

namespace sotto::framed {

class PeerCounters {
 public:
  void message_sent(const wire::FrameHeader& h) { count(sent_, h); }
  void message_received(const wire::FrameHeader& h) { count(received_, h); }
  void service_sent(uint64_t bytes) { add(sent_.service, bytes); }
  void service_received(uint64_t bytes) { add(received_.service, bytes); }

  TransferCounters read() const {
    TransferCounters c;
    c.payload_bytes_sent = sent_.payload.load(std::memory_order_relaxed);
    c.header_bytes_sent = sent_.header.load(std::memory_order_relaxed);
    c.service_bytes_sent = sent_.service.load(std::memory_order_relaxed);
    c.messages_sent = sent_.messages.load(std::memory_order_relaxed);
    c.payload_bytes_received = received_.payload.load(std::memory_order_relaxed);
    c.header_bytes_received = received_.header.load(std::memory_order_relaxed);
    c.service_bytes_received = received_.service.load(std::memory_order_relaxed);
    c.messages_received = received_.messages.load(std::memory_order_relaxed);
    return c;
  }

 private:
  struct Direction {
    std::atomic<uint64_t> payload{0}, header{0}, service{0}, messages{0};
  };
  // With one writer the addition need not be atomic.
  static void add(std::atomic<uint64_t>& to, uint64_t n) {
    to.store(to.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  static void count(Direction& d, const wire::FrameHeader& h) {
    const bool payload = h.message_class == MessageClass::kPayload;
    add(d.payload, payload ? h.payload_bytes : 0);
    add(d.header, wire::frame_bytes(h.payload_bytes) - (payload ? h.payload_bytes : 0));
    add(d.messages, 1);
  }

  Direction sent_, received_;
};

// W entries of 64 bytes for each comm that has messages here; those of comm 0, which is none, stay.
class CounterTable {
 public:
  explicit CounterTable(int32_t peers) : peers_(static_cast<size_t>(peers)) {}

  PeerCounters& at(uint64_t comm, int32_t peer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& row = table_[comm];
    if (!row) row = std::make_unique<PeerCounters[]>(peers_);
    return row[static_cast<size_t>(peer)];
  }
  // What was read of it before is all there is. No reference of `at` is in use any more.
  void drop(uint64_t comm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm != 0) table_.erase(comm);
  }
  TransferCounters read(uint64_t comm, int32_t peer) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = table_.find(comm);
    if (found == table_.end() || peer < 0 || static_cast<size_t>(peer) >= peers_) return {};
    return found->second[static_cast<size_t>(peer)].read();
  }

 private:
  size_t peers_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<PeerCounters[]>> table_;
};

}  // namespace sotto::framed
