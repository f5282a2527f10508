#include "core/engine/links.h"

namespace sotto {

void LinkTable::add(std::unique_ptr<Transport> transport, std::span<const int32_t> peers,
                    const std::shared_ptr<OrderedIssue>& lane_groups) {
  const auto number = static_cast<uint8_t>(links_.size());
  for (const int32_t peer : peers) link_of_[static_cast<size_t>(peer)] = number;
  Link& link = links_.emplace_back();
  link.messages = transport->as_message_transport();
  link.queue = transport->as_queue_transport();
  link.transport = std::move(transport);
  link.groups = link.stream_ordered() ? lane_groups : std::make_shared<OrderedIssue>();
}

TransferCounters LinkTable::counters(uint64_t comm, int32_t rank) const {
  TransferCounters sum;
  for (const Link& link : links_) sum += link.transport->counters(comm, rank);
  return sum;
}

void LinkTable::leave(uint64_t comm) {
  for (const Link& link : links_) link.transport->leave(comm);
}

}  // namespace sotto
