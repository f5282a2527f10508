// What a prediction is asked for: one JSON object.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/config/outer.h"
#include "core/predict/formulas.h"

namespace sotto {

inline constexpr uint64_t kMaxPredictedRanks = 1024;
inline constexpr uint64_t kMaxPredictedParams = uint64_t{1} << 34;

// Nanoseconds per element that take the place of measured ones: of averages, by the name of the
// codec or "fp32", and of launches and updates, "outer".
using GivenRates = std::map<std::string, double, std::less<>>;

struct PredictRequest {
  std::optional<OuterConfig> config;  // nothing: methods alone
  std::vector<uint64_t> params;       // elements of each tensor
  uint64_t ranks = 1;
  LinkModel link;
  double step_seconds = 0;
  double contention = 0;
  uint64_t threads = 0;        // for kernels that are measured; 0: the caller's choice
  uint64_t segment_bytes = 0;  // largest message; 0: the transports' default
  GivenRates rates;

  uint64_t elements() const;
};

// json: as sotto_predict_report. INVALID_ARGUMENT names the key, what was found and what is
// allowed.
Result<PredictRequest> parse_predict_request(std::string_view json);

}  // namespace sotto
