#include "core/base/environment.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace sotto {

void set_if_unset(std::initializer_list<std::pair<const char*, const char*>> variables) {
  // What a list has held somebody may be reading for good, as what the process was started with.
  struct Lists {
    std::mutex mutex;
    std::deque<std::string> texts;
    std::deque<std::vector<char*>> lists;
  };
  static Lists& kept = *new Lists;
  const std::lock_guard lock(kept.mutex);
  std::vector<char*> list;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) list.push_back(*one);
  const auto before = list.size();
  for (const auto& [name, value] : variables) {
    if (std::getenv(name) == nullptr)
      list.push_back(kept.texts.emplace_back(std::string(name) + "=" + value).data());
  }
  if (list.size() == before) return;
  list.push_back(nullptr);
  std::atomic_ref<char**>(environ).store(kept.lists.emplace_back(std::move(list)).data());
}

}  // namespace sotto
