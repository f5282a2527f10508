// sotto_predict_report
#include "core/predict/report.h"

#include <string>
#include <utility>

#include "capi/src/backends.h"
#include "capi/src/convert.h"
#include "capi/src/guard.h"
#include "capi/src/handles.h"

using namespace sotto;        // NOLINT: the definition below is the border itself
using namespace sotto::capi;  // NOLINT

namespace {

// The text of a call that has asked for its length alone: the next one gets it, and not one of
// other measurements with another length.
struct Kept {
  std::string json, text;
};
thread_local Kept t_kept;

Result<std::string> made(const char* json) {
  if (!t_kept.text.empty() && t_kept.json == json) return std::exchange(t_kept, {}).text;
  SOTTO_ASSIGN(const PredictRequest request, parse_predict_request(json));
  const Environment environment = process_environment();
  ParamReader reader(environment);
  const auto params = reader.read<Params>();
  SOTTO_TRY(reader.status());
  SOTTO_ASSIGN(std::shared_ptr<Device> device,
               make_host_device(params, environment, static_cast<uint32_t>(request.threads)));
  return predict_report(request, std::move(device), network_caps(params));
}

Status report(const char* json, char* buf, uint64_t cap, uint64_t* out_len) {
  SOTTO_TRY(check_pointer(json, "json"));
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  SOTTO_ASSIGN(std::string text, made(json));
  SOTTO_TRY(write_text(text, buf, cap, out_len));
  if (buf == nullptr || cap <= text.size()) t_kept = {json, std::move(text)};
  return ok_status();
}

}  // namespace

extern "C" sotto_status sotto_predict_report(const char* json, char* buf, uint64_t cap,
                                             uint64_t* out_len) {
  return guarded("sotto_predict_report", [&] { return report(json, buf, cap, out_len); });
}
