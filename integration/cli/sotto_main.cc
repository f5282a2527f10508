// sotto: looks at the library and at configuration files, and starts the benchmarks.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "integration/cli/commands.h"
#include "integration/cli/options.h"
#include "integration/cli/output.h"
#include "integration/cli/render.h"
#include "sotto/sotto.h"

namespace {

using sotto_cli::ConfigArguments;
using sotto_cli::PlanArguments;

constexpr int kUsageError = 2;

CLI::App* add_plan(CLI::App* app, PlanArguments* arguments) {
  CLI::App* plan = app->add_subcommand(
      "plan", "What outer steps (CO2, DiLoCo, ...) would cost on a link, and which ones to take");
  plan->add_option("FILE", arguments->file,
                   "The file with \"sotto\": {\"outer\": {...}}, or that object; as for config")
      ->required();
  plan->add_option("--ranks", arguments->ranks, "Ranks that average")
      ->required()
      ->transform(sotto_cli::whole_number_from(1, 1024));
  plan->add_option("--bandwidth", arguments->bandwidth_mbit,
                   "Of a rank's link, in each direction: 100mbit, 2.5gbit")
      ->required()
      ->transform(sotto_cli::quantity_in(sotto_cli::kRates, sotto_cli::Least::kAboveZero));
  plan->add_option("--latency", arguments->latency_ms, "One way: 0.1ms, 25ms")
      ->required()
      ->transform(sotto_cli::quantity_in(sotto_cli::kTimes, sotto_cli::Least::kZero));
  plan->add_option("--step-time", arguments->step_ms, "An inner step: 80ms, 1.2s")
      ->required()
      ->transform(sotto_cli::quantity_in(sotto_cli::kTimes, sotto_cli::Least::kAboveZero));
  plan->add_option("--params", arguments->params,
                   "Parameters of the model, or of each of its tensors, separated by commas "
                   "(fragments are made of tensors)")
      ->required()
      ->delimiter(',')
      ->allow_extra_args(false)
      ->transform(sotto_cli::whole_number_from(0));
  plan->add_option("--contention", arguments->contention,
                   "How much longer a step is beside an average, as a share")
      ->transform(sotto_cli::number_from(0, 1000))
      ->capture_default_str();
  plan->add_flag("--json", arguments->json, "As JSON");
  plan->footer(
      "Codecs and outer steps are timed on this machine. Exit code: 0, 1 with the error on "
      "standard "
      "error, 2 for wrong arguments.");
  return plan;
}

// CLI11 misses a command before it sees a word that is none.
std::string what_is_wrong(const CLI::App& app, const CLI::ParseError& error) {
  std::string text = sotto_cli::usage_text(error);
  if (!app.get_subcommands().empty()) return text;
  const std::vector<std::string> unknown = app.remaining();
  if (!unknown.empty())
    text = (unknown[0][0] == '-' ? "unknown option " : "unknown command ") + unknown[0];
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return text + "; commands are " + names;
}

int dispatch(int argc, char** argv) {
  CLI::App app(
      "Looks at the Sotto library: what it is, what a configuration will do, how fast it is.",
      "sotto");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("sotto ") + sotto_version_string());

  bool info_json = false;
  CLI::App* info =
      app.add_subcommand("info", "Version, ABI, devices, transports, SIMD, parameters in force");
  info->add_flag("--json", info_json, "As JSON");

  ConfigArguments arguments;
  CLI::App* config =
      app.add_subcommand("config", "What a DeepSpeed configuration file will do here, key by key");
  config
      ->add_option("FILE", arguments.file,
                   "The file; - is standard input; or the JSON as one base64url word, as DeepSpeed "
                   "takes it")
      ->required();
  config
      ->add_option("--world-size", arguments.world_size,
                   "Data-parallel ranks, for batch sizes and bytes")
      ->transform(sotto_cli::whole_number_from(1, 1 << 20));
  config
      ->add_option("--params", arguments.n_params, "Parameters of the model, for memory and bytes")
      ->transform(sotto_cli::whole_number_from(0));
  config->add_flag("--json", arguments.json, "As JSON");
  config->footer(
      "Exit code: 0 if the configuration can run here, else 1 with the error on standard error; 2 "
      "for wrong arguments.");

  PlanArguments plan_arguments;
  const CLI::App* plan = add_plan(&app, &plan_arguments);

  CLI::App* bench =
      app.add_subcommand("bench",
                         "Benchmarks; all further arguments go to sotto-perf. bench "
                         "net: over links of a given rate, next to other libraries; bench "
                         "overlap: outer steps that hide their averages");
  bench->prefix_command();
  bench->set_help_flag();  // --help is sotto-perf's

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    std::ostringstream text;
    const int exit_code = app.exit(e, text);
    sotto_cli::print(text.str());
    return exit_code;
  } catch (const CLI::ParseError& e) {
    std::fprintf(stderr, "sotto: %s\nTry sotto --help.\n", what_is_wrong(app, e).c_str());
    return kUsageError;
  }
  if (info->parsed()) return sotto_cli::run_info(info_json);
  if (config->parsed()) return sotto_cli::run_config(arguments);
  if (plan->parsed()) return sotto_cli::run_plan(plan_arguments);
  return sotto_cli::run_bench(bench->remaining());
}

}  // namespace

int main(int argc, char** argv) {
  sotto_cli::hold_standard_streams();
  try {
    return dispatch(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "sotto: %s\n", e.what());
    return 1;
  }
}
