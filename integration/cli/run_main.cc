// sotto-run: starts the ranks of a program on this machine.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "integration/cli/supervisor.h"
#include "integration/cli/words.h"

namespace {

using sotto_cli::RunOptions;

constexpr const char* kDescription =
    "Starts the ranks of a program on this machine and passes on what they print.\n\n"
    "Every rank gets SOTTO_RANK, SOTTO_WORLD_SIZE, SOTTO_LOCAL_RANK, SOTTO_LOCAL_SIZE and "
    "SOTTO_RENDEZVOUS, an empty\n"
    "standard input and a process group of its own. Lines are shown with the rank before them; on "
    "a terminal the\n"
    "standard output of rank 0 is left alone, so that it can draw a progress line. When a rank "
    "fails the others get\n"
    "a while to end by themselves, and the message of the first that failed is shown last.";

constexpr const char* kFooter =
    "Exit code: that of the first rank that failed (128 + number for a signal), else 0.\n"
    "124: time limit; 125: sotto-run itself failed; 126: program cannot be run; 127: program not "
    "found;\n"
    "128 + number: sotto-run was ended by a signal.\n\n"
    "Example: sotto-run -n 4 -- ./trainer --steps 100";

struct Parsed {
  RunOptions options;
  int exit_code = -1;  // >= 0: leave with it
};

int usage_error(const std::string& text) {
  std::fprintf(stderr, "sotto-run: %s\nTry sotto-run --help.\n", text.c_str());
  return sotto_cli::kExitOwnFailure;
}

int check(RunOptions& options, const std::string& wrapper) {
  if (options.command.empty())
    return usage_error("no program given: sotto-run -n RANKS -- PROGRAM [ARGUMENTS]");
  if (options.raw_rank >= options.ranks) {
    return usage_error("--raw-rank is " + std::to_string(options.raw_rank) + ", allowed 0 to " +
                       std::to_string(options.ranks - 1));
  }
  if (!options.rendezvous.empty() && options.rendezvous.rfind("tcp://", 0) != 0) {
    return usage_error("--rendezvous is '" + options.rendezvous + "', expected tcp://host:port");
  }
  const auto words = sotto_cli::split_words(wrapper);
  if (!words) return usage_error("--wrapper has an open quote: " + wrapper);
  options.wrapper = *words;
  return -1;
}

Parsed parse(int argc, char** argv) {
  Parsed parsed;
  RunOptions& options = parsed.options;
  if (isatty(STDOUT_FILENO) != 0) options.raw_rank = 0;

  std::string wrapper;
  CLI::App app(kDescription, "sotto-run");
  app.footer(kFooter);
  app.add_option("-n,--ranks", options.ranks, "Number of ranks")
      ->required()
      ->check(CLI::Range(1, 4096));
  app.add_option("--rendezvous", options.rendezvous,
                 "Where rank 0 listens, tcp://host:port (a free port of 127.0.0.1)");
  app.add_option("--wrapper", wrapper,
                 "Words put before every rank's command; may look at SOTTO_RANK");
  app.add_option("--timeout", options.timeout_s, "Seconds after which the run is ended (no limit)")
      ->check(CLI::Range(0.0, 1e8));
  app.add_option("--grace", options.grace_s, "Seconds that ranks get to end by themselves (10)")
      ->check(CLI::Range(0.0, 1e8));
  app.add_option("--raw-rank", options.raw_rank,
                 "Rank whose output is passed through untouched, -1: none (0 on a terminal)")
      ->check(CLI::Range(-1, 4095));
  app.prefix_command();  // everything from the program on is its own, whatever it looks like
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    parsed.exit_code = app.exit(e);
    return parsed;
  } catch (const CLI::ParseError& e) {
    parsed.exit_code = usage_error(e.what());
    return parsed;
  }
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().rfind('-', 0) == 0) {
    parsed.exit_code = usage_error("unknown option " + options.command.front());
    return parsed;
  }
  parsed.exit_code = check(options, wrapper);
  return parsed;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Parsed parsed = parse(argc, argv);
    if (parsed.exit_code >= 0) return parsed.exit_code;
    return sotto_cli::Supervisor(std::move(parsed.options)).run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "sotto-run: %s\n", e.what());
    return sotto_cli::kExitOwnFailure;
  }
}
