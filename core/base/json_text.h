// JSON as text.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace sotto {

// On one line, or with that many columns a level. U+FFFD stands for what is not UTF-8: texts of
// other programs, of the system and of users may hold anything.
template <class Json>
std::string dump_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace sotto
