// Words of a command line that is given as one string, as --wrapper takes it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sotto_cli {

// Splits at white space. '...' takes everything literally, "..." and \x as a POSIX shell does;
// nothing is expanded. Nothing if a quote is left open or the text ends with a backslash.
std::optional<std::vector<std::string>> split_words(std::string_view text);

// The words as one line that a shell would read back as the same words.
std::string join_words(const std::vector<std::string>& words);

}  // namespace sotto_cli
