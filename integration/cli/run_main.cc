// sotto-run: starts the ranks of a program, on this machine or on several.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "integration/cli/agent.h"
#include "integration/cli/hosts.h"
#include "integration/cli/options.h"
#include "integration/cli/output.h"
#include "integration/cli/supervisor.h"
#include "integration/cli/words.h"

namespace {

using sotto_cli::RunOptions;

constexpr const char* kDescription =
    "Starts the ranks of a program, on this machine (-n) or on several (--hosts), and passes on\n"
    "what they print.\n\n"
    "Every rank gets SOTTO_RANK, SOTTO_WORLD_SIZE, SOTTO_LOCAL_RANK, SOTTO_LOCAL_SIZE and "
    "SOTTO_RENDEZVOUS, an empty\n"
    "standard input and a process group of its own. Lines are shown with the rank before them; on "
    "a terminal the\n"
    "standard output of rank 0 is left alone, so that it can draw a progress line. When a rank "
    "fails the others get\n"
    "a while to end by themselves, and the message of the first that failed is shown last.\n\n"
    "With --hosts, ranks are numbered in the order of the list. A remote shell starts sotto-run on "
    "every host, which\n"
    "runs the ranks there, in the working directory of the same path, with the environment that a "
    "remote login gives\n"
    "and, of this one, the variables named by -x and all that begin with SOTTO_ but for "
    "SOTTO_HOST_ID and SOTTO_ADVERTISE.\n"
    "Rank 0 listens at a free port of the first host. When sotto-run, a remote shell or a "
    "connection ends, so do the ranks behind "
    "it.";

constexpr const char* kFooter =
    "Exit code: that of the first rank that failed (128 + number for a signal), else 0.\n"
    "124: time limit; 125: sotto-run itself or a host failed, or output could not be written;\n"
    "126: program cannot be run; 127: program not found;\n"
    "128 + number: sotto-run was ended by a signal.\n"
    "SIGUSR1 and SIGUSR2 are passed on to all ranks, and end nothing by themselves.\n\n"
    "Examples: sotto-run -n 4 -- ./trainer --steps 100\n"
    "          sotto-run --hosts node1:2,alice@node2:2 -x OMP_NUM_THREADS -- ./trainer --steps 100";

// Asks nothing: a terminal can answer one of many at best.
constexpr const char* kShell = "ssh -x -T -o BatchMode=yes";
constexpr const char* kOwnVariables[] = {"SOTTO_RANK", "SOTTO_WORLD_SIZE", "SOTTO_LOCAL_RANK",
                                         "SOTTO_LOCAL_SIZE", "SOTTO_RENDEZVOUS"};
constexpr const char* kOfOneMachine[] = {"SOTTO_HOST_ID", "SOTTO_ADVERTISE"};

struct Parsed {
  RunOptions options;
  int exit_code = -1;  // >= 0: leave with it
};

// Texts that become lists, and options whose absence matters.
struct Words {
  std::string wrapper, hosts, shell = kShell;
  std::vector<std::string> variables;  // NAME or NAME=VALUE
};

int usage_error(const std::string& text) {
  std::fprintf(stderr, "sotto-run: %s\nTry sotto-run --help.\n", text.c_str());
  return sotto_cli::kExitOwnFailure;
}

std::string_view name_of(std::string_view variable) {
  return variable.substr(0, variable.find('='));
}

bool has(const std::vector<std::string>& environment, std::string_view name) {
  return std::any_of(environment.begin(), environment.end(),
                     [&](const std::string& variable) { return name_of(variable) == name; });
}

template <class Names>
bool is_among(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Adds what -x names; returns the text of an error, or none.
std::string add_variables(const std::vector<std::string>& variables,
                          std::vector<std::string>& environment) {
  for (const std::string& variable : variables) {
    const std::string name(name_of(variable));
    if (name.empty()) return "-x '" + variable + "': expected NAME or NAME=VALUE";
    if (is_among(kOwnVariables, name)) return "-x " + name + ": sotto-run sets it for every rank";
    if (has(environment, name)) return "-x " + name + ": it is named twice";
    if (variable.size() > name.size()) {
      environment.push_back(variable);
      continue;
    }
    const char* const value = std::getenv(name.c_str());
    if (value == nullptr) return "-x " + name + ": it is not set here; expected NAME=VALUE then";
    environment.push_back(name + "=" + value);
  }
  return {};
}

// What is passed to ranks elsewhere without being named.
void add_sotto_variables(std::vector<std::string>& environment) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable = *entry;
    const std::string_view name = name_of(variable);
    if (name.substr(0, 6) == "SOTTO_" && !is_among(kOwnVariables, name) &&
        !is_among(kOfOneMachine, name) && !has(environment, name))
      environment.emplace_back(variable);
  }
}

int check_hosts(RunOptions& options, const Words& words) {
  try {
    options.hosts = sotto_cli::parse_hosts(words.hosts);
  } catch (const std::invalid_argument& e) {
    return usage_error(e.what());
  }
  const int32_t slots = sotto_cli::count_slots(options.hosts);
  if (options.ranks != 0 && options.ranks != slots) {
    return usage_error("-n is " + std::to_string(options.ranks) + ", but --hosts has " +
                       std::to_string(slots) + (slots == 1 ? " slot" : " slots") +
                       "; -n may be left out");
  }
  options.ranks = slots;
  const auto shell = sotto_cli::split_words(words.shell);
  if (!shell) return usage_error("--rsh has an open quote: " + words.shell);
  if (shell->empty()) return usage_error("--rsh is empty, expected a command");
  options.shell.words = *shell;
  if (options.shell.program.empty()) options.shell.program = sotto_cli::own_path();
  return -1;
}

int check(RunOptions& options, const Words& words, bool has_hosts) {
  if (has_hosts) {
    const int exit_code = check_hosts(options, words);
    if (exit_code >= 0) return exit_code;
  } else if (options.ranks == 0) {
    return usage_error("--ranks or --hosts is required");
  }
  if (options.command.empty())
    return usage_error("no program given: sotto-run -n RANKS -- PROGRAM [ARGUMENTS]");
  if (options.raw_rank >= options.ranks) {
    return usage_error("--raw-rank is " + std::to_string(options.raw_rank) + ", allowed 0 to " +
                       std::to_string(options.ranks - 1));
  }
  if (!options.rendezvous.empty() && options.rendezvous.rfind("tcp://", 0) != 0) {
    return usage_error("--rendezvous is '" + options.rendezvous + "', expected tcp://host:port");
  }
  const std::string wrong = add_variables(words.variables, options.environment);
  if (!wrong.empty()) return usage_error(wrong);
  if (has_hosts) add_sotto_variables(options.environment);
  const auto wrapper = sotto_cli::split_words(words.wrapper);
  if (!wrapper) return usage_error("--wrapper has an open quote: " + words.wrapper);
  options.wrapper = *wrapper;
  return -1;
}

void add_run_options(CLI::App& app, RunOptions& options, Words& words) {
  app.add_option("-n,--ranks", options.ranks, "Number of ranks; with --hosts that of all slots")
      ->transform(sotto_cli::whole_number_from(1, sotto_cli::kMostRanks));
  app.add_option("--rendezvous", options.rendezvous,
                 "Where rank 0 listens, tcp://host:port (a free port of 127.0.0.1, with --hosts of "
                 "the first host)");
  app.add_option("--wrapper", words.wrapper,
                 "Words put before every rank's command; may look at SOTTO_RANK");
  app.add_option("-x,--env", words.variables,
                 "Variable that all ranks get, NAME (its value here) or NAME=VALUE; may be "
                 "repeated")
      ->allow_extra_args(false);
  app.add_option("--timeout", options.timeout_s, "Seconds after which the run is ended (no limit)")
      ->transform(sotto_cli::number_from(0, 1e8));
  app.add_option("--grace", options.grace_s, "Seconds that ranks get to end by themselves (10)")
      ->transform(sotto_cli::number_from(0, 1e8));
}

// Returns --hosts.
CLI::Option* add_host_options(CLI::App& app, RunOptions& options, Words& words) {
  CLI::Option* const hosts = app.add_option(
      "--hosts", words.hosts,
      "Hosts and their numbers of ranks, HOST:SLOTS,.. with HOST as ssh takes it: name, USER@name, "
      "address, [IPv6 address]");
  app.add_option("--rsh", words.shell,
                 std::string("Remote shell, called with the host and one string for the shell "
                             "there (") +
                     kShell + ")")
      ->needs(hosts);
  app.add_option(
         "--remote-run", options.shell.program,
         "sotto-run on the hosts: a path, or a name that is in PATH there (the path of this "
         "one)")
      ->needs(hosts);
  app.add_option("--host-timeout", options.host_timeout_s,
                 "Seconds after which a host that does not answer has failed, and a host that does "
                 "not hear from sotto-run ends its ranks (60)")
      ->transform(sotto_cli::number_from(1, 1e6))
      ->needs(hosts);
  return hosts;
}

Parsed parse(int argc, char** argv) {
  Parsed parsed;
  RunOptions& options = parsed.options;
  Words words;
  CLI::App app(kDescription, "sotto-run");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("sotto-run " SOTTO_VERSION));
  add_run_options(app, options, words);
  const CLI::Option* const hosts = add_host_options(app, options, words);
  const CLI::Option* const raw_rank =
      app.add_option("--raw-rank", options.raw_rank,
                     "Rank whose output is passed through untouched, -1: none (0 on a terminal, "
                     "with --hosts none)")
          ->transform(sotto_cli::whole_number_from(-1, sotto_cli::kMostRanks - 1));
  app.prefix_command();  // everything from the program on is its own, whatever it looks like
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    std::ostringstream help;
    parsed.exit_code = app.exit(e, help);
    if (const int error = sotto_cli::write_all(STDOUT_FILENO, help.str()); error != 0) {
      std::fprintf(stderr, "sotto-run: %s\n",
                   sotto_cli::write_failure("standard output", error).c_str());
      parsed.exit_code = sotto_cli::kExitOwnFailure;
    }
    return parsed;
  } catch (const CLI::ParseError& e) {
    parsed.exit_code = usage_error(sotto_cli::usage_text(e));
    return parsed;
  }
  const bool has_hosts = hosts->count() != 0;
  if (raw_rank->count() == 0 && !has_hosts && isatty(STDOUT_FILENO) != 0) options.raw_rank = 0;
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().rfind('-', 0) == 0) {
    parsed.exit_code = usage_error("unknown option " + options.command.front());
    return parsed;
  }
  parsed.exit_code = check(options, words, has_hosts);
  return parsed;
}

}  // namespace

int main(int argc, char** argv) {
  sotto_cli::hold_standard_streams();
  try {
    if (argc == 2 && std::string_view(argv[1]) == "--agent") return sotto_cli::run_agent();
    Parsed parsed = parse(argc, argv);
    if (parsed.exit_code >= 0) return parsed.exit_code;
    return sotto_cli::Supervisor(std::move(parsed.options)).run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "sotto-run: %s\n", e.what());
    return sotto_cli::kExitOwnFailure;
  }
}
