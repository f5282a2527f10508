#include "integration/cli/render.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>

#include "integration/cli/commands.h"
#include "integration/cli/output.h"
#include "sotto/sotto.h"

namespace sotto_cli {
namespace {

// A word that can hold at least "{}", and is no likely name of a file: base64url of an
// object begins with "e".
bool is_base64_word(const std::string& word) {
  return word.size() >= 16 && word.front() == 'e' &&
         std::all_of(word.begin(), word.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '=';
         });
}

std::string read_all(std::FILE* file, const std::string& name) {
  std::string text;
  char part[65536];
  size_t n = 0;
  while ((n = std::fread(part, 1, sizeof part, file)) != 0) text.append(part, n);
  if (std::ferror(file) != 0)
    throw CommandError("cannot read " + name + ": " + std::strerror(errno));
  if (text.empty()) throw CommandError(name + " is empty");
  // The library takes texts that end with it.
  const size_t zero = text.find('\0');
  if (zero != std::string::npos)
    throw CommandError(name + ": byte " + std::to_string(zero) + " is 0, which no JSON has");
  return text;
}

}  // namespace

std::string read_config_file(const std::string& name) {
  if (name == "-") return read_all(stdin, "standard input");
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(name.c_str(), "rb"),
                                                             std::fclose);
  if (file != nullptr) return read_all(file.get(), name);
  if (is_base64_word(name)) return name;
  throw CommandError("cannot open " + (name.empty() ? "''" : name) + ": " + std::strerror(errno));
}

std::string read_report(const std::function<int32_t(char*, uint64_t, uint64_t*)>& call) {
  std::string text;
  uint64_t length = 0;
  // Twice: for the size, then for the text. What grew in between is asked for again.
  for (;;) {
    const uint64_t cap = text.size();
    if (call(cap == 0 ? nullptr : text.data(), cap, &length) != SOTTO_OK)
      throw CommandError(sotto_last_error());
    if (cap > length) break;
    text.resize(length + 1);
  }
  text.resize(length);
  return text;
}

void print(const std::string& text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error != 0) throw CommandError(write_failure("standard output", error));
}

std::string counted(const Json& n, const std::string& unit) {
  return plain(n) + " " + unit + (n == 1 ? "" : "s");
}

std::string plain(const Json& value) {
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return value.dump();
  std::string text;
  for (const Json& item : value) text += (text.empty() ? "" : ", ") + plain(item);
  return text.empty() ? "-" : text;
}

std::string table(const std::vector<std::vector<std::string>>& rows, const std::string& indent) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i + 1 < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = indent;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace sotto_cli
