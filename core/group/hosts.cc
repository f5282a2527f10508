#include "core/group/hosts.h"

#include <map>

#include "core/base/hash.h"

namespace sotto {

uint64_t host_number(std::string_view host_id, std::string_view name, std::string_view boot) {
  // A host that has been named is none of those that have not.
  constexpr uint64_t kNamed = 1;
  const uint64_t number = host_id.empty()
                              ? hash64(boot.data(), boot.size(), hash64(name.data(), name.size()))
                              : hash64(host_id.data(), host_id.size(), kNamed);
  return number == 0 ? 1 : number;
}

std::vector<int32_t> host_indices(std::span<const uint64_t> numbers) {
  std::map<uint64_t, int32_t> index_of;
  std::vector<int32_t> indices;
  for (const uint64_t number : numbers)
    indices.push_back(
        index_of.try_emplace(number, static_cast<int32_t>(index_of.size())).first->second);
  return indices;
}

}  // namespace sotto
