#include <fmt/core.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "tests/perf/net.h"

namespace sotto::perf {
namespace {

std::filesystem::path this_program() { return std::filesystem::read_symlink("/proc/self/exe"); }

// Where an installation has its scripts, else the source tree's.
std::filesystem::path scripts() {
  const std::filesystem::path installed = this_program().parent_path() / SOTTO_PERF_INSTALLED;
  return std::filesystem::exists(installed) ? installed.lexically_normal() : SOTTO_PERF_SCRIPTS;
}

// words: the first is the name that it is called by.
[[noreturn]] void become(const std::string& program, std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execvp(program.c_str(), argv.data());
  throw std::runtime_error(fmt::format("cannot start {}: {}", program, std::strerror(errno)));
}

}  // namespace

void run_script(const std::string& name, const std::vector<std::string>& arguments) {
  const std::filesystem::path script = scripts() / name;
  if (!std::filesystem::exists(script))
    throw std::runtime_error(fmt::format(
        "{} is not there: benchmarks of the Python package are part of the source tree alone, "
        "'net' of an installation too",
        script.string()));
  // The distribution's Python first: what setup.sh installs is what is used.
  const char* python = ::access("/usr/bin/python3", X_OK) == 0 ? "/usr/bin/python3" : "python3";
  std::vector<std::string> words = {python, "-B", script.string(), "--sotto-perf",
                                    this_program().string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  become(python, std::move(words));
}

void run_gpu(const std::string& name, const std::vector<std::string>& arguments) {
  const std::filesystem::path program = this_program().parent_path() / "sotto-perf-gpu";
  if (!std::filesystem::exists(program))
    throw std::runtime_error(
        "the benchmarks of CUDA devices are a program of their own, which is not beside this one: "
        "build the target sotto-perf-gpu, with the preset cuda for real devices");
  std::vector<std::string> words = {name + " gpu"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  become(program, std::move(words));
}

}  // namespace sotto::perf
