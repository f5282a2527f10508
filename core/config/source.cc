#include "core/config/source.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/base/text.h"

namespace sotto {
namespace {

// ---- base64url

constexpr int kNoDigit = -1;

int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '-' || c == '+') return 62;
  if (c == '_' || c == '/') return 63;
  return kNoDigit;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// The digits of one word, line breaks and padding left out; empty if it is something else.
std::string base64_digits(std::string_view word) {
  std::string digits;
  while (!word.empty() && word.back() == '=') word.remove_suffix(1);
  if (word.empty() || word.front() == '/' || word.front() == '+') return "";
  for (const char c : word) {
    if (c == '\r' || c == '\n') continue;
    if (base64_digit(c) == kNoDigit) return "";
    digits += c;
  }
  return digits;
}

// Empty if no bytes have these digits.
std::string decode(std::string_view digits) {
  std::string out;
  if (digits.size() % 4 == 1) return out;
  uint32_t bits = 0;
  int held = 0;
  for (const char c : digits) {
    bits = bits << 6 | static_cast<uint32_t>(base64_digit(c));
    held += 6;
    if (held < 8) continue;
    held -= 8;
    out += static_cast<char>(bits >> held & 0xff);
  }
  return out;
}

bool may_be_object(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (text.starts_with(kByteOrderMark)) return true;
  const std::string_view begin = trimmed(text);
  return begin.starts_with('{') || begin.starts_with('#') || begin.starts_with('/');
}

bool looks_like_file_name(std::string_view word) {
  return word.find_first_of("{}[]\"\n") == std::string_view::npos &&
         (word.ends_with(".json") || word.ends_with(".hjson"));
}

// ---- advice

bool is_structural(char c) {
  return std::string_view(" \t\r\n,:{}[]\"'").find(c) != std::string_view::npos;
}

bool is_word(std::string_view token) {
  return !token.empty() && std::all_of(token.begin(), token.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

struct Token {
  size_t begin = 0;
  std::string_view text;
};

// The run of characters around `offset` that a reader would take for one word.
Token token_at(std::string_view text, size_t offset) {
  if (offset >= text.size()) return {text.size(), {}};
  // The parser may have stopped right behind the word.
  if (is_structural(text[offset]) && offset > 0 && !is_structural(text[offset - 1])) --offset;
  size_t begin = offset, end = offset;
  while (begin > 0 && !is_structural(text[begin - 1])) --begin;
  while (end < text.size() && !is_structural(text[end])) ++end;
  return {begin, text.substr(begin, end - begin)};
}

// Where the string literal begins that ends at `end` (its closing quote).
size_t string_begin(std::string_view text, size_t end) {
  size_t begin = 0;
  for (size_t i = 0; i < end; ++i) {
    if (text[i] != '"') continue;
    begin = i++;
    while (i < end && text[i] != '"') i += text[i] == '\\' ? 2 : 1;
  }
  return begin;
}

SyntaxAdvice explain_placeholder(std::string_view text, const Token& token, size_t offset) {
  const auto advice = [](size_t at, std::string_view shown) {
    return SyntaxAdvice{
        at, fmt::format("{} looks like a template's placeholder: fill the template in first",
                        printable(shown, 40))};
  };
  for (const std::string_view mark : {"${", "{{", "{%", "<%", "$("}) {
    const size_t first = offset > 1 ? offset - 1 : 0;
    const size_t found = text.substr(0, std::min(offset + 2, text.size())).find(mark, first);
    if (found == std::string_view::npos) continue;
    const size_t end = std::min(text.find_first_of("\n,", found), text.size());
    return advice(found, trimmed(text.substr(found, end - found)));
  }
  if (!token.text.empty() && std::string_view("$<@%").find(token.text[0]) != std::string_view::npos)
    return advice(token.begin, token.text);
  return {};
}

// What Python and JavaScript call it, and JSON.
std::string explain_constant(std::string_view token) {
  constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"True", "true"}, {"False", "false"}, {"None", "null"},
      {"TRUE", "true"}, {"FALSE", "false"}, {"NULL", "null"},
      {"yes", "true"},  {"no", "false"},    {"undefined", "null"}};
  for (const auto& [word, json] : kWords) {
    if (token == word) return fmt::format("{} is no JSON; write {}", word, json);
  }
  for (const std::string_view word : {"NaN", "nan", "inf", "-inf", "Infinity", "-Infinity"}) {
    if (token == word) return fmt::format("{} is no number in JSON; write a finite number", word);
  }
  return "";
}

std::string explain_token(std::string_view token, std::string_view words) {
  if (token.empty()) return "";
  std::string text = explain_constant(token);
  if (!text.empty()) return text;
  const std::string shown = printable(token, 40);
  const bool behind_a_value = words.find("parsing object -") != std::string_view::npos ||
                              words.find("parsing array -") != std::string_view::npos;
  if (behind_a_value && nlohmann::json::accept(token))
    return fmt::format("a comma is missing before {}", shown);
  if (std::string_view("0123456789.+-").find(token[0]) != std::string_view::npos) {
    return fmt::format("{} is no number in JSON; write it like 0.5, 3e-5 or 1000", shown);
  }
  if (token[0] == '(') return "a Python tuple is no JSON; write a list: [...]";
  if (!is_word(token)) return "";
  if (words.find("object key") != std::string_view::npos)
    return fmt::format("the key {} is not in quotes; write \"{}\"", shown, shown);
  if (behind_a_value) return fmt::format("a comma is missing before {}", shown);
  return fmt::format("the text {} is not in quotes; write \"{}\"", shown, shown);
}

std::string explain_string(std::string_view literal, std::string_view words) {
  const std::string shown = printable(literal, 40);
  if (words.find("expected ':'") != std::string_view::npos)
    return fmt::format("a colon is missing before {}", shown);
  if (words.find("expected '}'") != std::string_view::npos ||
      words.find("expected ']'") != std::string_view::npos) {
    return fmt::format("a comma is missing before {}", shown);
  }
  return "";
}

}  // namespace

Result<std::optional<std::string>> decode_base64_config(std::string_view text) {
  const std::string_view word = trimmed(text);
  if (looks_like_file_name(word)) {
    return invalid_argument(
        "configuration: found {}, which looks like the name of a file; pass what the file holds",
        printable(word));
  }
  const std::string digits = base64_digits(word);
  if (digits.empty()) return std::optional<std::string>();
  std::string decoded = decode(digits);
  if (may_be_object(decoded)) return std::optional<std::string>(std::move(decoded));
  if (nlohmann::json::accept(word)) return std::optional<std::string>();  // a number, true, null
  return invalid_argument(
      "configuration: found {}, {}, neither JSON nor JSON in base64url; pass the text of a "
      "file, or its base64url",
      printable(word, 40), counted(word.size(), "character"));
}

SyntaxAdvice explain_syntax(std::string_view text, size_t offset, std::string_view words) {
  const auto says = [&](std::string_view part) {
    return words.find(part) != std::string_view::npos;
  };
  const char c = offset < text.size() ? text[offset] : '\0';
  const Token token = token_at(text, offset);
  if (const SyntaxAdvice advice = explain_placeholder(text, token, offset); !advice.text.empty())
    return advice;
  if (c == '\'' || (offset > 0 && offset < text.size() && text[offset - 1] == '\'')) {
    return {offset,
            "a text in single quotes is no JSON; write it in double quotes (a Python dictionary "
            "becomes JSON with json.dumps)"};
  }
  if (says("control character") && says("must be escaped"))
    return {offset, "the text before has no closing quote on its line"};
  if (says("unexpected end of input") || says("missing closing quote"))
    return {text.size(), "the text ends before everything is closed"};
  if (says("expected end of input"))
    return {token.begin, "text follows behind the end of the object"};
  if (says("unexpected string literal")) {
    const size_t begin = string_begin(text, offset);
    return {begin, explain_string(text.substr(begin, offset + 1 - begin), words)};
  }
  if (token.begin == text.find_first_not_of(" \t\r\n") && is_word(token.text)) {
    return {token.begin,
            fmt::format("the text begins with {}; a configuration is an object: {{...}}",
                        printable(token.text, 40))};
  }
  if (says("invalid") || (says("unexpected") && says("literal")))
    return {token.begin, explain_token(token.text, words)};
  return {};
}

}  // namespace sotto
