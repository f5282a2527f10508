// Words in error messages: near misses and safe quoting.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sotto {

// Insertions, deletions and replacements of one byte that turn a into b. Case counts.
size_t edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest distance to word, the first of several; empty if there are no
// candidates.
std::string_view nearest_word(std::string_view word, std::span<const std::string_view> candidates);

bool is_utf8(std::string_view text);

// The longest beginning of at most max_bytes bytes that does not end inside a UTF-8 character.
std::string_view cut_text(std::string_view text, size_t max_bytes) noexcept;

// The text with U+FFFD in place of each byte that is not UTF-8.
std::string valid_utf8(std::string_view text);

// The text fit for one line of a message: control characters and bytes that are not UTF-8 as \xNN,
// cut after max_bytes bytes of input with "..." behind.
std::string printable(std::string_view text, size_t max_bytes = 80);

// A count with its unit: "1 rank", "3 ranks".
std::string counted(uint64_t n, std::string_view unit);
template <std::signed_integral T>
std::string counted(T n, std::string_view unit) {
  return counted(static_cast<uint64_t>(n), unit);
}

// "1, 3, 5", and how many more there are than a text has room for.
std::string list_of_ranks(const std::vector<size_t>& ranks);

}  // namespace sotto
