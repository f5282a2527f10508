// sotto info: what the library is made of and how it is set up here.
#include "integration/cli/commands.h"
#include "integration/cli/render.h"
#include "sotto/sotto.h"

namespace sotto_cli {
namespace {

struct ContextDeleter {
  void operator()(sotto_context* context) const { sotto_context_destroy(context); }
};

Json context_report() {
  sotto_context_config config = SOTTO_CONTEXT_CONFIG_INIT;
  config.no_progress_thread = 1;
  sotto_context* raw = nullptr;
  if (sotto_context_create(&config, &raw) != SOTTO_OK) throw CommandError(sotto_last_error());
  const std::unique_ptr<sotto_context, ContextDeleter> context(raw);
  return Json::parse(read_report([&](char* buf, uint64_t cap, uint64_t* out_len) {
    return sotto_context_report(context.get(), nullptr, buf, cap, out_len);
  }));
}

std::string render(const Json& build, const Json& context) {
  std::vector<std::vector<std::string>> rows = {
      {"version", plain(build.at("version"))},   {"ABI", plain(build.at("abi"))},
      {"device", plain(context.at("device"))},   {"transports", plain(build.at("transports"))},
      {"codecs", plain(build.at("codecs"))},     {"optimizers", plain(build.at("optimizers"))},
      {"dtypes", plain(build.at("dtypes"))},     {"SIMD available", plain(build.at("simd"))},
      {"compiler", plain(build.at("compiler"))}, {"build type", plain(build.at("build_type"))},
  };
  rows.insert(rows.begin() + 3, {"other devices", plain(context.at("other_devices"))});
  if (build.contains("sanitizers")) rows.push_back({"sanitizers", plain(build.at("sanitizers"))});
  std::string text = table(rows, "") + "\nParameters in force (environment variables; * is set):\n";
  rows.clear();
  for (const Json& parameter : context.at("parameters")) {
    const bool set = parameter.at("source") == "env";
    const std::string value = plain(parameter.at("value"));
    rows.push_back({set ? "*" : "", plain(parameter.at("name")), value.empty() ? "-" : value,
                    plain(parameter.at("text"))});
  }
  return text + table(rows, "");
}

}  // namespace

int run_info(bool json) {
  const Json build = Json::parse(sotto_build_info());
  const Json context = context_report();
  const std::string text =
      json ? Json{{"build", build}, {"context", context}}.dump(2) + "\n" : render(build, context);
  print(text);
  return 0;
}

}  // namespace sotto_cli
