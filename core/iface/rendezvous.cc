#include "core/iface/rendezvous.h"

#include <numeric>

namespace sotto {
namespace {

Status no_rendezvous(const Backend& backend) {
  return unsupported("transport \"{}\" has no rendezvous of its own", backend.name());
}

}  // namespace

std::vector<int32_t> all_ranks(const ControlPlane& control) {
  std::vector<int32_t> ranks(static_cast<size_t>(control.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Result<UniqueId> Backend::make_unique_id(Reach /*reach*/) { return no_rendezvous(*this); }

bool Backend::knows(const UniqueId& /*id*/) const { return false; }

Result<std::unique_ptr<ControlPlane>> Backend::join(const JoinRequest& /*request*/,
                                                    Driver& /*driver*/) {
  return no_rendezvous(*this);
}

}  // namespace sotto
