#include "core/optim/snapshot.h"

#include <algorithm>
#include <cstring>

#include "core/base/text.h"

namespace sotto {

uint64_t OptimSnapshot::number(std::string_view name) const {
  const auto it = std::find_if(numbers_.begin(), numbers_.end(),
                               [&](const Number& n) { return n.name == name; });
  return it == numbers_.end() ? 0 : it->value;
}

void OptimSnapshot::set(Number number) {
  std::erase_if(numbers_, [&](const Number& n) { return n.name == number.name; });
  numbers_.push_back(std::move(number));
}

bool OptimSnapshot::has_numbers(std::string_view group) const {
  return std::any_of(numbers_.begin(), numbers_.end(), [&](const Number& n) {
    return n.name.size() > group.size() && n.name.starts_with(group) && n.name[group.size()] == '.';
  });
}

const OptimSnapshot::Array* OptimSnapshot::find(std::string_view name) const {
  const auto it =
      std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& a) { return a.name == name; });
  return it == arrays_.end() ? nullptr : &*it;
}

// The vector of error feedback that is stored; null: the name is of something else.
std::vector<float>* OptimSnapshot::errors(std::string_view array) {
  if (residual && array == kWorkerError) return &residual->worker;
  if (residual && array == kServerError) return &residual->server;
  if (mean && array == kMeanWorkerError) return &mean->worker;
  if (mean && array == kMeanServerError) return &mean->server;
  return nullptr;
}

uint64_t OptimSnapshot::bytes(std::string_view array) const {
  const std::vector<float>* stored = const_cast<OptimSnapshot*>(this)->errors(array);
  if (stored != nullptr && !stored->empty()) return stored->size() * sizeof(float);
  const Array* found = find(array);
  return found == nullptr ? 0 : found->bytes;
}

std::span<std::byte> OptimSnapshot::bytes_here(std::string_view array) {
  if (std::vector<float>* stored = errors(array))
    return std::as_writable_bytes(std::span<float>(*stored));
  auto* found = const_cast<Array*>(find(array));
  return found == nullptr ? std::span<std::byte>() : std::span<std::byte>(found->values);
}

void OptimSnapshot::put_outside(std::string_view array, uint64_t bytes) {
  remove(array);
  arrays_.push_back({std::string(array), bytes, {}});
}

void OptimSnapshot::append(std::string_view array, std::span<const std::byte> values) {
  if (std::vector<float>* stored = errors(array)) {
    const size_t first = stored->size();
    stored->resize(first + values.size() / sizeof(float));
    if (!values.empty()) std::memcpy(stored->data() + first, values.data(), values.size());
    return remove(array);
  }
  if (find(array) == nullptr) arrays_.push_back({std::string(array), 0, {}});
  auto* into = const_cast<Array*>(find(array));
  into->values.insert(into->values.end(), values.begin(), values.end());
  into->bytes = into->values.size();
}

void OptimSnapshot::remove(std::string_view array) {
  std::erase_if(arrays_, [&](const Array& a) { return a.name == array; });
}

Status check_values(const char* what, uint64_t bytes, uint64_t want, uint64_t element_bytes) {
  if (bytes == want * element_bytes) return ok_status();
  return invalid_argument("the state has {} of {}, this optimizer {}",
                          counted(bytes / element_bytes, "value"), what, want);
}

}  // namespace sotto
