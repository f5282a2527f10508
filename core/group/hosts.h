// Which ranks are on one host.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace sotto {

// A number that is equal for ranks of one host and never 0. `host_id`, if not empty, is what the
// host is known by: SOTTO_HOST_ID. Else it is name and boot id: containers may have the same name
// on different machines, and different names are different hosts even on one machine.
uint64_t host_number(std::string_view host_id, std::string_view name, std::string_view boot);

// Hosts of ranks by their numbers: for every rank the index of its host, from 0 in the order of the
// lowest rank of each.
std::vector<int32_t> host_indices(std::span<const uint64_t> numbers);

}  // namespace sotto
