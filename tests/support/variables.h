// An environment of a test's own.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/base/params.h"

namespace sotto::test {

inline Environment environment_of(std::map<std::string, std::string> variables) {
  Environment environment;
  environment.names = [variables] {
    std::vector<std::string> names;
    for (const auto& [name, value] : variables) names.push_back(name);
    return names;
  };
  environment.get =
      [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
  return environment;
}

}  // namespace sotto::test
