// What the other ranks need to make data connections to one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transports/framed/peer.h"
#include "transports/tcp/net.h"

namespace sotto::tcp {

// Of this rank; of a group the smallest of each counts.
struct MeshLimits {
  framed::FlowLimits flow;
  uint32_t connections = 1;  // to each peer
  void take_smaller(const MeshLimits& other);
};

struct AddressRecord {
  uint16_t port = 0;   // 0: nothing listens
  bool stays = false;  // it listens as long as the group lives, where that is needed
  MeshLimits limits;
  std::vector<Address> addresses;  // at least one

  std::string encode() const;
  // PROTOCOL: no such record.
  static Result<AddressRecord> decode(const std::string& text);
};

}  // namespace sotto::tcp
