// How a collective uses that some ranks share a host: with two levels, messages inside hosts and
// messages between them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace sotto {

enum class Hierarchy : uint8_t {
  kFlat = 1,     // one level: hosts make no difference
  kSharded = 2,  // every rank of a host exchanges its share with ranks of other hosts
  kLeader = 3,   // the first rank of every host exchanges everything for all of them
  kAuto = 4,     // kSharded if there are several hosts with several ranks each, as many on all
};
inline constexpr std::string_view kHierarchies = "flat|sharded|leader|auto";

constexpr std::string_view hierarchy_name(Hierarchy h) {
  switch (h) {
    case Hierarchy::kFlat: return "flat";
    case Hierarchy::kSharded: return "sharded";
    case Hierarchy::kLeader: return "leader";
    case Hierarchy::kAuto: return "auto";
  }
  return "?";
}
constexpr std::optional<Hierarchy> hierarchy_of(std::string_view name) {
  for (const Hierarchy h :
       {Hierarchy::kFlat, Hierarchy::kSharded, Hierarchy::kLeader, Hierarchy::kAuto}) {
    if (name == hierarchy_name(h)) return h;
  }
  return std::nullopt;
}

}  // namespace sotto
