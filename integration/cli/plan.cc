// sotto plan: what outer steps would cost on a link, and which ones to take.
#include <cstdio>

#include "integration/cli/commands.h"
#include "integration/cli/render.h"
#include "sotto/sotto.h"

namespace sotto_cli {
namespace {

std::string request_of(const PlanArguments& a) {
  Json request;
  request["params"] = a.params.size() == 1 ? Json(a.params.front()) : Json(a.params);
  request["ranks"] = a.ranks;
  request["bandwidth_mbit"] = a.bandwidth_mbit;
  request["step_ms"] = a.step_ms;
  request["latency_ms"] = a.latency_ms;
  request["contention"] = a.contention;
  request["config"] = read_config_file(a.file);
  try {
    return request.dump();
  } catch (const Json::exception& e) {  // "[json.exception.type_error.316] invalid UTF-8 byte .."
    const std::string text = e.what();
    throw CommandError(a.file + ": " + text.substr(text.find("] ") + 2));
  }
}

std::string number(const Json& value, const char* format = "%.3g") {
  if (value.is_null()) return "-";
  char text[32];
  std::snprintf(text, sizeof text, format, value.get<double>());
  return text;
}

std::string milliseconds(const Json& value) {
  if (value.get<double>() < 1000) return number(value) + " ms";
  return number(value.get<double>() / 1000) + " s";
}

std::string rate_text(const Json& value) { return number(value, "%.6g"); }

std::string percent(const Json& value) { return number(value.get<double>() * 100) + " %"; }

// Bytes with a unit that leaves at most four digits in front of the point.
std::string bytes(const Json& value) {
  double amount = value.get<double>();
  const char* unit = " B";
  for (const char* larger : {" kB", " MB", " GB", " TB"}) {
    if (amount < 10000) break;
    amount /= 1000;
    unit = larger;
  }
  return number(amount, "%.4g") + unit;
}

std::vector<std::string> cells(const Json& row) {
  const std::string name = plain(row.at("method"));
  const std::string codec = plain(row.at("codec"));
  if (!row.at("can_run").get<bool>()) return {name, codec, "-"};
  return {name,
          codec,
          plain(row.at("period")),
          plain(row.at("delay")),
          plain(row.at("tau_min")),
          milliseconds(row.at("average_ms")),
          milliseconds(row.at("exposed_ms_per_period")),
          percent(row.at("exposed_share")),
          percent(row.at("efficiency")),
          bytes(row.at("payload_bytes_per_launch")),
          bytes(row.at("payload_bytes_per_step")),
          bytes(row.at("memory_bytes"))};
}

const std::vector<std::string> kTitles = {
    "method",  "codec",       "period",     "delay",           "tau_min",  "average",
    "exposed", "of the time", "efficiency", "sent per launch", "and step", "memory"};

std::string own(const Json& report) {
  const Json& row = report.at("configuration");
  if (row.is_null()) return "";
  if (!row.at("can_run").get<bool>())
    return "\nThis configuration cannot run here: " + plain(row.at("reason")) + "\n";
  std::string text = "\nThis configuration:\n" + table({kTitles, cells(row)}, "  ");
  const bool late = row.at("exposed_ms_per_period").get<double>() > 0;
  if (!late) return text + "  Its averages are hidden.\n";
  if (row.at("delay") == 0) return text + "  It waits for every average: its delay is 0.\n";
  text += "  A delay of " + counted(row.at("tau_min"), "step");
  if (row.at("period_min") > row.at("period"))
    text += " and a period of " + plain(row.at("period_min"));
  const Json& rate = row.at("bandwidth_mbit_that_hides");
  if (!rate.is_null()) text += ", or " + rate_text(rate) + " Mbit/s,";
  return text + " would hide its averages.\n";
}

std::string methods(const Json& report) {
  std::vector<std::vector<std::string>> rows = {kTitles};
  std::string refused;
  for (const Json& row : report.at("methods")) {
    rows.push_back(cells(row));
    if (!row.at("can_run").get<bool>())
      refused += "  " + plain(row.at("method")) + ": " + plain(row.at("reason")) + "\n";
  }
  return "\nEvery method, with the shortest delay that hides its averages:\n" + table(rows, "  ") +
         (refused.empty() ? "" : "\nNot here:\n" + refused);
}

std::string every_step(const Json& report) {
  std::vector<std::vector<std::string>> rows = {
      {"codec", "average", "step with it", "of the time", "sent per step"}};
  for (const Json& row : report.at("every_step")) {
    rows.push_back({plain(row.at("codec")), milliseconds(row.at("average_ms")),
                    milliseconds(row.at("step_ms")), percent(row.at("exposed_share")),
                    bytes(row.at("payload_bytes_per_step"))});
  }
  return "\nWithout outer steps, averages at every step that nothing hides:\n" + table(rows, "  ");
}

std::string take(const Json& report) {
  const Json& choice = report.at("take");
  const std::string what = choice.at("outer").is_null()
                               ? "gradients at every step, " + plain(choice.at("codec"))
                               : "\"sotto\": {\"outer\": " + choice.at("outer").dump() + "}";
  return "Take: " + what + "\n  " + plain(choice.at("why")) + "\n";
}

std::string render_plan(const Json& report) {
  const Json& link = report.at("link");
  std::string text = counted(report.at("params"), "parameter") + ", " +
                     counted(report.at("ranks"), "rank") + ", " +
                     rate_text(link.at("bandwidth_mbit")) + " Mbit/s of which " +
                     percent(link.at("efficiency")) + " carry messages, latency " +
                     milliseconds(link.at("latency_ms")) + ", steps of " +
                     milliseconds(report.at("step_ms")) + "\n";
  return text + take(report) + own(report) + methods(report) + every_step(report);
}

}  // namespace

int run_plan(const PlanArguments& arguments) {
  const std::string request = request_of(arguments);
  std::string text;
  try {
    text = read_report([&](char* buf, uint64_t cap, uint64_t* out_len) {
      return sotto_predict_report(request.c_str(), buf, cap, out_len);
    });
  } catch (const CommandError& e) {
    throw CommandError(arguments.file + ": " + e.what());
  }
  print(arguments.json ? text + "\n" : render_plan(Json::parse(text)));
  return 0;
}

}  // namespace sotto_cli
