// A configuration's text as one JSON object.
#pragma once

#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/config/filter.h"
#include "core/config/reader.h"
#include "core/config/source.h"

namespace sotto {

// "configuration: line 3, column 5", or "configuration" for a place that was not found.
std::string place_of(const TextPosition& position);

// text: what blank_comments has returned. INVALID_ARGUMENT with line and column for what is no
// JSON, no object, or has a key twice.
Result<Json> parse_document(const std::string& text);

// Any JSON; discarded if it is none. twice: the path of the first key that an object has twice, or
// empty. INVALID_ARGUMENT with `name`, what the text is: nested deeper than kMaxConfigDepth.
Result<Json> parse_plain(std::string_view text, std::string_view name, std::string* twice);

// read(JSON text) for a text that may be that JSON as one base64url word; errors then say so.
template <class Read>
auto from_source(std::string_view text, Read&& read) -> decltype(read(text)) {
  SOTTO_ASSIGN(const std::optional<std::string> decoded, decode_base64_config(text));
  if (!decoded) return read(text);
  auto out = read(std::string_view(*decoded));
  if (out.ok()) return out;
  // Line and column are those of the decoded text.
  constexpr std::string_view kPrefix = "configuration";
  return invalid_argument("{} (decoded from base64url){}", kPrefix,
                          std::string_view(out.status().text()).substr(kPrefix.size()));
}

}  // namespace sotto
