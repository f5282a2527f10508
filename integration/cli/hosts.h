// The machines of a run, as --hosts names them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sotto_cli {

inline constexpr int32_t kMostRanks = 4096;

struct Host {
  std::string target;  // what the remote shell is given: NAME or USER@NAME
  std::string name;    // without user and brackets
  int32_t slots = 0;   // ranks there, at least 1
};

// "a:2,alice@b:4,[fd00::1]:2". Throws std::invalid_argument, with a text that names the entry, for
// an empty list or entry, a name that is empty, begins with "-" or holds what names do not have, a
// host without slots or with 0 or more than 4096 of them, more than 4096 in all, a host named
// twice.
std::vector<Host> parse_hosts(const std::string& text);

int32_t count_slots(const std::vector<Host>& hosts);

// The working directory by the name that the user knows it by: PWD where that is right. Throws
// std::runtime_error if there is none.
std::string working_directory();

// The path of this program.
std::string own_path();

}  // namespace sotto_cli
