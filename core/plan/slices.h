// Slices of an operation's messages, as Slicing says.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

#include "core/plan/plan.h"

namespace sotto {

// Which slice a message belongs to.
class MessageSlices {
 public:
  // Deals out the messages of `steps`: those between two ranks in one direction and round in their
  // order, by their bytes, so that both ranks put a message in the same slice.
  MessageSlices(const Slicing& slicing, std::span<const Step> steps);

  // One: nothing is kept back.
  uint32_t count() const { return count_; }
  uint32_t of(const MessageStep& message) const;

 private:
  using Direction = std::tuple<uint32_t, int32_t, bool>;  // round, peer, whether it is sent
  static Direction direction(const MessageStep& m) { return {m.issue_round, m.peer, m.is_send}; }

  uint32_t count_ = 1;
  std::map<Direction, std::vector<uint32_t>> slices_;  // by segment
};

// Plan::slice_steps. Orders and groups are there.
std::vector<uint32_t> steps_by_slice(const Plan& plan);

}  // namespace sotto
