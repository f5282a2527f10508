#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "tests/perf/net.h"

namespace sotto::perf {

void run_net(const std::vector<std::string>& arguments) {
  const std::filesystem::path script = SOTTO_PERF_NET_SCRIPT;
  if (!std::filesystem::exists(script))
    throw std::runtime_error(
        fmt::format("the network benchmarks need the source tree that this program was built from: "
                    "{} is not there",
                    script.string()));
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  // The distribution's Python first: what setup.sh installs is what is used.
  const char* python = ::access("/usr/bin/python3", X_OK) == 0 ? "/usr/bin/python3" : "python3";
  std::vector<std::string> words = {python, "-B", script.string(), "--sotto-perf", self.string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execvp(python, argv.data());
  throw std::runtime_error(fmt::format("cannot start {}: {}", python, std::strerror(errno)));
}

}  // namespace sotto::perf
