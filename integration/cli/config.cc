// sotto config: what a DeepSpeed configuration file will do.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>

#include "integration/cli/commands.h"
#include "integration/cli/render.h"
#include "sotto/sotto.h"

namespace sotto_cli {
namespace {

std::string read_file(const std::string& name) {
  if (name == "-") return {std::istreambuf_iterator<char>(std::cin), {}};
  std::ifstream file(name, std::ios::binary);
  if (!file) throw CommandError("cannot open " + name);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad() || text.empty()) throw CommandError(name + " is empty or cannot be read");
  return text;
}

std::string members(const Json& object, const std::string& title) {
  if (!object.is_object()) return "";
  std::vector<std::vector<std::string>> rows;
  for (const auto& [key, value] : object.items()) rows.push_back({key, plain(value)});
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
  if (s.at("lr").is_null()) return text + "  not computed: this scheduler is not built\n";
  std::vector<std::vector<std::string>> rows;
  for (const Json& sample : s.at("lr"))
    rows.push_back({"update " + plain(sample.at("update")), plain(sample.at("groups"))});
  return text + table(rows, "  ");
}

std::string stages(const Json& report) {
  if (report.at("stages").empty()) return "";
  std::vector<std::vector<std::string>> rows = {
      {"stage", "updates", "payload bytes sent per rank and update"}};
  for (const Json& stage : report.at("stages")) {
    const Json& bytes = stage.at("payload_bytes_per_update");
    std::string amount = plain(bytes);
    if (bytes.is_object()) {
      amount.clear();
      for (const auto& [key, value] : bytes.items())
        amount += (amount.empty() ? "" : ", ") + key + " " + plain(value);
    }
    const Json& last = stage.at("last_update");
    rows.push_back(
        {plain(stage.at("name")),
         plain(stage.at("first_update")) + " to " + (last.is_null() ? "the end" : plain(last)),
         bytes.is_null() ? "- (needs --world-size and --params)" : amount});
  }
  return "\n" + table(rows, "");
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
  text += members(report.at("batch"), "Batch") + stages(report);
  text += members(report.at("memory_bytes"), "Memory per rank, bytes") +
          members(report.at("sotto"), "sotto") + keys(report);
  return text + lines(report.at("warnings"), "Warnings") + lines(report.at("notes"), "Notes");
}

}  // namespace

int run_config(const ConfigArguments& arguments) {
  const std::string config = read_file(arguments.file);
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
  std::fputs(arguments.json ? (text + "\n").c_str() : render(report).c_str(), stdout);
  return report.at("can_run").get<bool>() ? 0 : 1;
}

}  // namespace sotto_cli
