// Collectives that are exactly one of the transport's own. The plan has the messages that a direct
// exchange would have, so that counters, signatures and orders are those of every collective; what
// moves them is the transport's call, between links that it chooses itself.
#pragma once

#include <cstdint>
#include <vector>

#include "core/plan/section.h"

namespace sotto {

// More tensors than this go as packed messages: a call for each would cost more than it saves.
inline constexpr size_t kNativeTensors = 64;

// What a transport needs for this to be native; 0: it never is.
NativeCollectives native_needs(OpKind kind, ReduceOp reduce, Dtype dtype);

// Whether the section is what native collectives do, one for each tensor, and the request permits
// them.
bool is_native(const Section& s, const std::vector<uint32_t>& tensors);
void emit_native(Section& s, const std::vector<uint32_t>& tensors);

}  // namespace sotto
