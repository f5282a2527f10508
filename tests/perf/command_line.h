// What the programs of benchmarks share: reading a command line, and writing results.
#pragma once

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>

#include "integration/cli/options.h"

namespace sotto::perf {

// Exit code for wrong arguments, and for results that cannot be written.
inline constexpr int kExitWrong = 2;

// What the user has typed: the name of the program, or the words that `sotto bench` starts it as.
inline std::string typed_name(char** argv) {
  return std::filesystem::path(argv[0]).filename().string();
}

inline int usage_error(const CLI::App& app, const std::string& text) {
  const char* const name = app.get_name().c_str();
  std::fprintf(stderr, "%s: %s\nTry %s --help.\n", name, text.c_str(), name);
  return kExitWrong;
}

// False, after a message, if standard output cannot be written.
inline bool print(const CLI::App& app, const std::string& text) {
  if (std::fputs(text.c_str(), stdout) != EOF && std::fflush(stdout) == 0) return true;
  std::fprintf(stderr, "%s: cannot write standard output: %s\n", app.get_name().c_str(),
               std::strerror(errno));
  return false;
}

// The exit code, if the program is not to go on.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    std::ostringstream help;
    const int exit_code = app.exit(e, help);
    return print(app, help.str()) ? exit_code : kExitWrong;
  } catch (const CLI::ParseError& e) {
    return usage_error(app, e.what());
  }
  return std::nullopt;
}

}  // namespace sotto::perf
