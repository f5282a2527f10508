// sotto bench: starts the benchmark program.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "integration/cli/commands.h"

namespace sotto_cli {
namespace {

constexpr const char* kProgram = "sotto-perf";

// Empty if it is not beside this program.
std::string beside_this_program() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return "";
  const std::filesystem::path program = self.parent_path() / kProgram;
  return access(program.c_str(), X_OK) == 0 ? program.string() : "";
}

}  // namespace

int run_bench(const std::vector<std::string>& arguments) {
  const std::string beside = beside_this_program();
  const std::string program = beside.empty() ? kProgram : beside;
  std::vector<std::string> words = {"sotto bench"};  // its name in its help and errors
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(program.c_str(), argv.data());
  if (errno == ENOENT) {
    throw CommandError(
        "the benchmark program sotto-perf is neither beside sotto nor in PATH; builds and "
        "installations with SOTTO_BUILD_TOOLS=ON have it there");
  }
  throw CommandError("cannot start " + program + ": " + std::strerror(errno));
}

}  // namespace sotto_cli
