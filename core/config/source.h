// The forms in which a configuration arrives, and what is wrong with a text that is no JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/base/status.h"

namespace sotto {

// DeepSpeed takes a configuration on a command line as one base64url word: the JSON that the word
// stands for, or nothing if the text is not such a word. Padding may be missing, lines may be
// broken, + and / count as - and _. INVALID_ARGUMENT for a text that is neither a word for JSON nor
// can be JSON itself: another word, or the name of a file.
Result<std::optional<std::string>> decode_base64_config(std::string_view text);

struct SyntaxAdvice {
  size_t offset = 0;  // where the fault begins
  std::string text;   // what it is and what to write instead; empty: not recognised
};

// Recognises what else people write: unquoted keys, Python dictionaries, templates, missing commas.
// text: what the parser saw. offset: where it stopped. words: its own description.
SyntaxAdvice explain_syntax(std::string_view text, size_t offset, std::string_view words);

}  // namespace sotto
