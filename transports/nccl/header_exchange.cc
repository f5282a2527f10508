#include "transports/nccl/header_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sotto::nccl {

Status HeaderExchange::add(int32_t peer, std::span<Transfer* const> group, GraphUse use) {
  const auto same = [&](const PeerHeader& h) { return h.peer == peer; };
  if (std::any_of(headers_.begin(), headers_.end(), same)) return ok_status();
  if (memory_ == nullptr) {
    SOTTO_ASSIGN(memory_, pool_.take(bytes(size_)));
  }
  std::byte* const both = memory_ + 2 * sizeof(GroupHeader) * headers_.size();
  headers_.push_back(
      {peer, make_group_header(group, peer, use), both, both + sizeof(GroupHeader), {}, false});
  write(headers_.back());
  return ok_status();
}

void HeaderExchange::write(const PeerHeader& header) {
  std::memcpy(header.out, &header.mine, sizeof(GroupHeader));
  std::memset(header.in, 0, sizeof(GroupHeader));
}

void HeaderExchange::renew(std::span<Transfer* const> group) {
  for (PeerHeader& header : headers_) {
    header.mine = make_group_header(group, header.peer, header.mine.use);
    write(header);
    header.seen = false;
    header.meant = ok_status();
  }
}

const PeerHeader* HeaderExchange::check() {
  for (PeerHeader& header : headers_) {
    GroupHeader theirs;
    if (!header.seen && has_arrived(header.in, &theirs)) {
      header.seen = true;
      header.meant = compare(header.mine, rank_, theirs, header.peer);
    }
    if (!header.meant.ok()) return &header;
  }
  return nullptr;
}

bool HeaderExchange::all_seen() const {
  return std::all_of(headers_.begin(), headers_.end(), [](const PeerHeader& h) { return h.seen; });
}

void HeaderExchange::count(Counters& counters, bool sent) const {
  for (const PeerHeader& header : headers_) counters.count_header(header.peer, sent);
}

void HeaderExchange::release() {
  headers_.clear();
  if (memory_ != nullptr) pool_.give_back(std::exchange(memory_, nullptr));
}

}  // namespace sotto::nccl
