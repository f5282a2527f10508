#include "core/config/overlap.h"

namespace sotto {

std::string_view overlap_order_name(OverlapOrder order) {
  switch (order) {
    case OverlapOrder::kReversed: return "reversed";
    case OverlapOrder::kRegistered: return "registered";
    case OverlapOrder::kObserved: break;
  }
  return "observed";
}

std::string_view overlap_unused_name(OverlapUnused unused) {
  return unused == OverlapUnused::kError ? "error" : "zero";
}

}  // namespace sotto
