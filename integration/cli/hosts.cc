#include "integration/cli/hosts.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string_view>

namespace sotto_cli {
namespace {

bool may_stand_in_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("-._%@:[]").find(c) != std::string_view::npos;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

Host parse_entry(const std::string& entry) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(
        fmt::format("--hosts: entry '{}': {}; expected HOST:SLOTS or USER@HOST:SLOTS, an IPv6 "
                    "address in brackets",
                    entry, why));
  };
  if (entry.empty()) refuse("it is empty");
  const size_t colon = entry.rfind(':');
  const size_t bracket = entry.rfind(']');
  if (colon == std::string::npos || (bracket != std::string::npos && colon < bracket))
    refuse("it has no slots");
  Host host;
  const char* const begin = entry.data() + colon + 1;
  const char* const end = entry.data() + entry.size();
  const auto [stop, failed] = std::from_chars(begin, end, host.slots);
  if (failed != std::errc() || stop != end || host.slots < 1 || host.slots > kMostRanks) {
    refuse(fmt::format("its slots are '{}', allowed is a whole number 1 to {}",
                       std::string_view(entry).substr(colon + 1), kMostRanks));
  }
  std::string target = entry.substr(0, colon);
  const size_t at = target.rfind('@');
  const std::string user = at == std::string::npos ? "" : target.substr(0, at + 1);
  host.name = target.substr(user.size());
  if (host.name.size() > 2 && host.name.front() == '[' && host.name.back() == ']') {
    host.name = host.name.substr(1, host.name.size() - 2);
  } else if (host.name.find_first_of(":[]") != std::string::npos) {
    refuse("an IPv6 address stands in brackets, a name has no colon or bracket");
  }
  host.target = user + host.name;
  if (host.name.empty() || user == "@") refuse("its name is empty");
  if (host.target.front() == '-' || host.name.front() == '-') refuse("a name begins with '-'");
  if (!std::all_of(host.target.begin(), host.target.end(), may_stand_in_name))
    refuse("a name has letters, digits, '-', '.' and '_'");
  return host;
}

}  // namespace

std::vector<Host> parse_hosts(const std::string& text) {
  std::vector<Host> hosts;
  int64_t sum = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    Host host = parse_entry(entry);
    for (const Host& other : hosts) {
      if (lower(other.name) == lower(host.name)) {
        throw std::invalid_argument(fmt::format(
            "--hosts: entry '{}': host {} stands in the list already", entry, host.name));
      }
    }
    sum += host.slots;
    if (sum > kMostRanks) {
      throw std::invalid_argument(fmt::format(
          "--hosts: up to entry '{}' there are {} ranks; allowed are {}", entry, sum, kMostRanks));
    }
    hosts.push_back(std::move(host));
    begin = end + 1;
  }
  return hosts;
}

int32_t count_slots(const std::vector<Host>& hosts) {
  int32_t sum = 0;
  for (const Host& host : hosts) sum += host.slots;
  return sum;
}

std::string working_directory() {
  struct stat here {
  }, named{};
  const char* const name = std::getenv("PWD");
  if (name != nullptr && name[0] == '/' && stat(name, &named) == 0 && stat(".", &here) == 0 &&
      named.st_dev == here.st_dev && named.st_ino == here.st_ino) {
    return name;
  }
  std::error_code failed;
  const std::filesystem::path path = std::filesystem::current_path(failed);
  if (failed) throw std::runtime_error("no working directory: " + failed.message());
  return path.string();
}

std::string own_path() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

}  // namespace sotto_cli
