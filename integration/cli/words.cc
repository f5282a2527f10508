#include "integration/cli/words.h"

#include <cctype>
#include <utility>

namespace sotto_cli {
namespace {

constexpr char kNoQuote = '\0';

bool is_plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-./:=,+@%^").find(c) != std::string_view::npos;
}

}  // namespace

std::optional<std::vector<std::string>> split_words(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  bool in_word = false;
  char quote = kNoQuote;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote == kNoQuote && std::isspace(static_cast<unsigned char>(c)) != 0) {
      if (in_word) words.push_back(std::exchange(word, {}));
      in_word = false;
      continue;
    }
    in_word = true;
    if (c == quote) {
      quote = kNoQuote;
    } else if (quote == kNoQuote && (c == '\'' || c == '"')) {
      quote = c;
    } else if (c == '\\' && quote != '\'') {
      if (++i == text.size()) return std::nullopt;
      if (quote == '"' && text[i] != '"' && text[i] != '\\') word += '\\';
      word += text[i];
    } else {
      word += c;
    }
  }
  if (quote != kNoQuote) return std::nullopt;
  if (in_word) words.push_back(word);
  return words;
}

std::string join_words(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) {
    if (!line.empty()) line += ' ';
    bool plain = !word.empty();
    for (const char c : word) plain = plain && is_plain(c);
    if (plain) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

}  // namespace sotto_cli
