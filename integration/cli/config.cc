// sotto config: what a DeepSpeed configuration file will do.
#include <cstdio>

#include "integration/cli/commands.h"
#include "integration/cli/render.h"
#include "sotto/sotto.h"

namespace sotto_cli {
namespace {

// "name value, name value" of an object, else the value.
std::string on_one_line(const Json& value) {
  if (!value.is_object()) return plain(value);
  std::string text;
  for (const auto& [key, item] : value.items())
    text += (text.empty() ? "" : ", ") + key + " " + plain(item);
  return text;
}

std::string members(const Json& object, const std::string& title) {
  if (!object.is_object()) return "";
  std::vector<std::vector<std::string>> rows;
  for (const auto& [key, value] : object.items()) rows.push_back({key, on_one_line(value)});
  return "\n" + title + ":\n" + table(rows, "  ");
}

std::string lines(const Json& list, const std::string& title) {
  if (list.empty()) return "";
  std::string text = "\n" + title + ":\n";
  for (const Json& line : list) text += "  " + plain(line) + "\n";
  return text;
}

std::string optimizer(const Json& report) {
  const Json& o = report.at("optimizer");
  if (o.is_null()) return "\nOptimizer: none\n";
  std::string text = members(o.at("params"), "Optimizer " + plain(o.at("type")));
  int group = 0;
  for (const Json& params : o.at("param_groups")) {
    text += members(params, "Parameter group " + std::to_string(group++));
  }
  return text;
}

std::string schedule(const Json& report) {
  const Json& s = report.at("schedule");
  std::string text = "\nLearning rate (scheduler: " + plain(s.at("type")) + "):\n";
  std::vector<std::vector<std::string>> rows;
  for (const Json& sample : s.at("lr")) {
    const Json& update = sample.at("update");
    std::string remark;
    if (update == s.at("peak_update")) remark = "(peak)";
    if (update == s.at("end_update")) remark = "(end)";
    if (sample.contains("betas")) {
      remark += (remark.empty() ? "betas " : " betas ") + plain(sample.at("betas"));
    }
    rows.push_back({"update " + plain(update), plain(sample.at("groups")), remark});
  }
  return text + table(rows, "  ");
}

std::string loss_scale(const Json& report) {
  const Json& scale = report.at("loss_scale");
  return scale.is_null() ? "" : members(scale, "Loss scale");
}

std::string stages(const Json& report) {
  if (report.at("stages").empty()) return "";
  std::vector<std::vector<std::string>> rows = {
      {"stage", "updates", "payload bytes sent per rank and update"}};
  for (const Json& stage : report.at("stages")) {
    const Json& bytes = stage.at("payload_bytes_per_update");
    const std::string amount = report.at("world_size").is_null() || report.at("n_params").is_null()
                                   ? "- (needs --world-size and --params)"
                                   : on_one_line(bytes);
    const Json& last = stage.at("last_update");
    rows.push_back(
        {plain(stage.at("name")),
         plain(stage.at("first_update")) + " to " + (last.is_null() ? "the end" : plain(last)),
         amount});
  }
  std::string text = "\n" + table(rows, "");
  for (const Json& stage : report.at("stages")) {
    if (!stage.contains("updates")) continue;
    text += "  updates of stage " + plain(stage.at("name")) + ": " +
            on_one_line(stage.at("updates")) + "\n";
  }
  return text;
}

// Bytes, and bytes per parameter of the model.
std::string memory(const Json& report) {
  const Json& bytes = report.at("memory_bytes");
  if (!bytes.is_object()) return "";
  const double n = report.at("n_params").get<double>();
  std::vector<std::vector<std::string>> rows = {{"", "bytes", "per parameter"}};
  for (const auto& [key, value] : bytes.items()) {
    char each[32];
    std::snprintf(each, sizeof each, "%.3g", value.get<double>() / n);
    rows.push_back({key == "state" ? "held by the library" : key, plain(value), each});
  }
  return "\nMemory per rank:\n" + table(rows, "  ");
}

std::string left_to_host(const Json& report) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& key : report.at("keys")) {
    if (key.at("disposition") != "host") continue;
    rows.push_back({plain(key.at("key")), plain(key.at("reason"))});
  }
  return rows.empty() ? "" : "\nLeft to the host framework:\n" + table(rows, "  ");
}

std::string keys(const Json& report) {
  std::vector<std::vector<std::string>> rows = {{"key", "value", "here", "why"}};
  for (const Json& key : report.at("keys")) {
    rows.push_back({plain(key.at("key")), plain(key.at("value")), plain(key.at("disposition")),
                    plain(key.at("reason"))});
  }
  return rows.size() == 1 ? "" : "\n" + table(rows, "");
}

std::string render(const Json& report) {
  std::string text = report.at("can_run").get<bool>() ? "This configuration can run here.\n"
                                                      : "This configuration cannot run here.\n";
  text += lines(report.at("reasons"), "What stands in the way");
  text += optimizer(report) + schedule(report);
  text += "\nGradient clipping: " +
          (report.at("gradient_clipping") == 0.0 ? "off" : plain(report.at("gradient_clipping"))) +
          "\n";
  text += loss_scale(report) + members(report.at("batch"), "Batch") + stages(report);
  text += members(report.at("run"), "Whole run") + memory(report);
  text += members(report.at("sotto"), "sotto") + members(report.at("outer"), "Outer steps") +
          members(report.at("overlap"), "Overlap") + left_to_host(report) + keys(report);
  return text + lines(report.at("warnings"), "Warnings") + lines(report.at("notes"), "Notes");
}

}  // namespace

int run_config(const ConfigArguments& arguments) {
  const std::string config = read_config_file(arguments.file);
  std::string text;
  try {
    text = read_report([&](char* buf, uint64_t cap, uint64_t* out_len) {
      return sotto_config_report(config.c_str(), arguments.world_size, arguments.n_params, buf, cap,
                                 out_len);
    });
  } catch (const CommandError& e) {
    throw CommandError(arguments.file + ": " + e.what());
  }
  const Json report = Json::parse(text);
  print(arguments.json ? text + "\n" : render(report));
  if (report.at("can_run").get<bool>()) return 0;
  std::string reasons;
  for (const Json& reason : report.at("reasons"))
    reasons += (reasons.empty() ? "" : "; ") + plain(reason);
  throw CommandError(arguments.file + ": cannot run here: " + reasons);
}

}  // namespace sotto_cli
