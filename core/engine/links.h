// The transports of a root comm, and which of them each rank is reached by.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/engine/ordered_issue.h"
#include "core/iface/transport.h"

namespace sotto {

// A transport and what waits for it. One of the two pointers is null.
struct Link {
  std::unique_ptr<Transport> transport;
  MessageTransport* messages = nullptr;
  QueueTransport* queue = nullptr;
  // Of `queue`. Links whose messages are calls of lanes share the context's: so ranks that make
  // their calls in one order, on whatever root comms, issue all groups in one order.
  std::shared_ptr<OrderedIssue> groups;

  // Messages are calls of device lanes (TransportCaps::stream_ordered).
  bool stream_ordered() const { return queue != nullptr && queue->caps().stream_ordered; }
};

// Links are numbered from 0 in the order of add, the same on all ranks of the root comm. Driver,
// but for what is const, which any thread may call once all links are there.
class LinkTable {
 public:
  explicit LinkTable(int32_t ranks) : link_of_(static_cast<size_t>(ranks)) {}

  // `peers`: ranks of the root comm that it reaches from now on. `lane_groups`: the context's.
  void add(std::unique_ptr<Transport> transport, std::span<const int32_t> peers,
           const std::shared_ptr<OrderedIssue>& lane_groups);

  bool empty() const { return links_.empty(); }
  std::vector<Link>& all() { return links_; }
  const std::vector<Link>& all() const { return links_; }
  Link& operator[](uint8_t link) { return links_[link]; }
  // Of a rank in the root comm.
  uint8_t link_of(int32_t rank) const { return link_of_[static_cast<size_t>(rank)]; }
  const Link& to(int32_t rank) const { return links_[link_of(rank)]; }
  // Of a comm with a rank, by all links together.
  TransferCounters counters(uint64_t comm, int32_t rank) const;
  void leave(uint64_t comm);

 private:
  std::vector<Link> links_;
  std::vector<uint8_t> link_of_;  // by rank in the root comm
};

}  // namespace sotto
