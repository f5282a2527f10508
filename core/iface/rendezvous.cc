#include "core/iface/rendezvous.h"

#include <numeric>

namespace sotto {

std::vector<int32_t> all_ranks(const ControlPlane& control) {
  std::vector<int32_t> ranks(static_cast<size_t>(control.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace sotto
