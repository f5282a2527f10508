// What outer settings cost on the model and the link of a request.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/outer/footprint.h"
#include "core/predict/formulas.h"
#include "core/predict/rates.h"
#include "core/predict/request.h"
#include "core/predict/target.h"

namespace sotto {

// Averages of all fragments, as this rank (0) makes them. Of the codec, if there is one.
struct AverageCosts {
  uint64_t dense_launch = 0;     // payload bytes of the first fragment without the codec
  uint64_t launch = 0;           // and with it
  uint64_t payload = 0;          // of all fragments
  uint64_t headers = 0;          // frames, scales, and what ranks tell each other
  std::vector<double> seconds;   // of each fragment: wire and kernels one after the other
  double wire = 0, kernels = 0;  // of all fragments
  double largest_bits = 0;       // that a fragment sends

  double total() const;
  double largest() const;
};

class CostModel {
 public:
  // The request lives longer.
  CostModel(const PredictRequest& request, std::shared_ptr<Device> device,
            const TransportCaps& transport);

  // method: of what the settings are, for names of rates. config: resolved for the request's ranks,
  // as in the following.
  Result<AverageCosts> averages(const std::string& method, const OuterConfig& config);
  // As OuterInfo::state_bytes in steady state.
  Result<uint64_t> state_bytes(const OuterConfig& config);
  // Launches and updates of all fragments, in seconds. Measured once per method.
  Result<double> boundary(const std::string& method, const OuterConfig& config);

  // Nanoseconds per element that were used, and whether they were measured here. Averages have the
  // codec's name; with other settings than those that have it the method's, too: "topk co2".
  struct Rate {
    double ns = 0;
    bool measured = false;
  };
  const std::map<std::string, Rate>& rates() const { return rates_; }

 private:
  // One fragment, with what its shape looks at.
  struct Fragment {
    OuterConfig config;
    CompressedLayout layout;
  };
  using Fragments = std::vector<std::unique_ptr<Fragment>>;

  Result<Fragments> cut(const OuterConfig& config) const;
  Result<OuterAverage> average(const OuterShape& shape, bool compressed);
  Result<double> average_rate(const std::string& method, const OuterConfig& config);
  bool codes(const OuterConfig& config) const { return config.codec && request_.ranks > 1; }

  const PredictRequest& request_;
  const PredictTarget target_;
  KernelRates kernels_;
  std::map<std::string, Rate> rates_;
  std::map<std::string, double> measured_;        // averages, by the settings of their codec
  std::map<std::string, OuterAverage> averages_;  // by what plans of averages depend on
};

// The name of a codec in reports; "fp32" for none.
std::string average_name(const OuterConfig& config);

}  // namespace sotto
