// One rank of the benchmarks of overlap. tests/perf/net/overlap.py and overlap_bucket.py start it
// and tell it what to do.
#include <fmt/core.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "core/base/hash.h"
#include "tests/perf/capi_rank.h"
#include "tests/perf/control.h"
#include "tests/perf/net.h"

namespace sotto::perf {
namespace {

using Json = nlohmann::ordered_json;
using SteadyClock = std::chrono::steady_clock;

constexpr uint64_t kChanged = 4096;  // elements that an inner step changes
constexpr size_t kInCache = 4096;    // floats that arithmetic works on

int64_t since(SteadyClock::time_point start) {
  return std::chrono::nanoseconds(SteadyClock::now() - start).count();
}

// What an inner step computes: a processor's arithmetic in its cache, or, as with a GPU, nothing
// that the processor would do.
class InnerStep {
 public:
  InnerStep() : work_(kInCache, 1.0f) {}
  // passes: of arithmetic; 0: sleeps for `ns`.
  void set(uint64_t passes, int64_t ns) { passes_ = passes, ns_ = ns; }
  void run() {
    if (passes_ == 0) {
      timespec time{ns_ / 1'000'000'000, ns_ % 1'000'000'000};
      while (::clock_nanosleep(CLOCK_MONOTONIC, 0, &time, &time) != 0) {
      }
      return;
    }
    for (uint64_t p = 0; p < passes_; ++p) {
      for (float& x : work_) x = x * 0.999f + 0.001f;
      __asm__ volatile("" : : "r"(work_.data()) : "memory");
    }
  }

 private:
  std::vector<float> work_;
  uint64_t passes_ = 0;
  int64_t ns_ = 0;
};

// An overlap of gradients of equal counts, and the rounds that a backward pass makes of it.
class Buckets {
 public:
  // Every gradient is a bucket. json: of sotto_overlap_create, without bucket sizes.
  Buckets(sotto_comm* comm, int32_t rank, uint64_t n, uint64_t gradients, Json json) : values_(n) {
    const uint64_t count = (n + gradients - 1) / gradients;
    for (uint64_t begin = 0; begin < n; begin += count) {
      like_.push_back({values_.data() + begin, std::min(count, n - begin), SOTTO_FLOAT32,
                       SOTTO_DEVICE_CPU, 0, 0});
    }
    json["first_bucket_bytes"] = json["bucket_bytes"] = 4 * count;
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t hash = (i + 1) * 2654435761u + 40503u * static_cast<uint64_t>(rank);
      values_[i] = 1e-3f * static_cast<float>(hash % 2048) - 1.0f;
    }
    must(sotto_overlap_create(comm, json.dump().c_str(), like_.data(), like_.size(), &overlap_),
         "overlap");
  }
  ~Buckets() { sotto_overlap_destroy(overlap_); }
  Buckets(const Buckets&) = delete;
  Buckets& operator=(const Buckets&) = delete;

  // compute: what comes before each gradient; nullptr: they are all there.
  void round(InnerStep* compute) {
    sotto_op* op = nullptr;
    must(sotto_overlap_begin(overlap_, nullptr, &op), "round");
    for (uint64_t i = like_.size(); i-- > 0;) {
      if (compute != nullptr) compute->run();
      must(sotto_overlap_ready(overlap_, &i, nullptr, 1, nullptr), "gradient");
    }
    must(sotto_overlap_finish(overlap_), "end of a round");
    must(sotto_op_wait(op, -1), "averages");
    must(sotto_op_release(op), "operation");
  }
  sotto_overlap_info info() const {
    sotto_overlap_info info = SOTTO_OVERLAP_INFO_INIT;
    must(sotto_overlap_get_info(overlap_, &info), "info");
    return info;
  }
  Json digest() const {
    return {{"digest", fmt::format("{:016x}", hash64(values_.data(), values_.size() * 4))}};
  }

 private:
  std::vector<float> values_;
  std::vector<sotto_buffer> like_;
  sotto_overlap* overlap_ = nullptr;
};

class Rank {
 public:
  Rank() {
    self_.context = new_context();
    const sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;  // from the environment
    must(sotto_comm_create(self_.context, &config, &self_.comm), "comm");
    must(sotto_comm_rank(self_.comm, &self_.rank), "rank");
  }
  ~Rank() {
    for (const auto& [name, outer] : outers_) sotto_outer_destroy(outer);
    buckets_.reset();
    sotto_comm_destroy(self_.comm);
    sotto_context_destroy(self_.context);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  int32_t rank() const { return self_.rank; }

  Json predict(const std::string& json) const {
    std::string text(1 << 20, '\0');
    uint64_t length = 0;
    must(sotto_predict_report(json.c_str(), text.data(), text.size(), &length), "prediction");
    text.resize(length);
    const Json report = Json::parse(text);
    return {{"configuration", report.at("configuration")}, {"rates", report.at("rates")}};
  }

  // An outer optimizer with n parameters of its own.
  Json create(const std::string& name, uint64_t n, const std::string& json) {
    std::vector<float>& values = values_[name];
    values.resize(n);
    for (uint64_t i = 0; i < n; ++i)
      values[i] = 1e-3f * static_cast<float>((i * 2654435761u) % 2048) - 1.0f;
    sotto_param param = SOTTO_PARAM_INIT;
    param.name = "w";
    param.param = {values.data(), n, SOTTO_FLOAT32, SOTTO_DEVICE_CPU, 0, 0};
    must(sotto_outer_create(self_.comm, json.c_str(), &param, 1, &outers_[name]), "outer");
    return Json::object();
  }

  // How many passes of arithmetic take `ns` while all ranks work; without arithmetic: none.
  Json calibrate(int64_t ns, bool arithmetic) {
    uint64_t passes = arithmetic ? 64 : 0;
    step_.set(passes, ns);
    for (int round = 0; arithmetic && round < 6; ++round) {
      barrier();
      const auto start = SteadyClock::now();
      step_.run();
      const double share = static_cast<double>(ns) / static_cast<double>(since(start));
      passes = std::max<uint64_t>(
          1, static_cast<uint64_t>(std::llround(static_cast<double>(passes) * share)));
      step_.set(passes, ns);
    }
    return {{"passes", passes}};
  }

  // Inner steps alone.
  Json compute(uint64_t steps) {
    barrier();
    const auto start = SteadyClock::now();
    for (uint64_t i = 0; i < steps; ++i) step_.run();
    return {{"ns", since(start)}};
  }

  // Inner and outer steps, the first `dropped` of which do not count: the pause before them has
  // hidden an average. Exposed and network time: of the averages that were consumed.
  Json run(const std::string& name, uint64_t dropped, uint64_t steps) {
    sotto_outer* const outer = outers_.at(name);
    int64_t computed = 0, exposed = 0, network = 0;
    uint64_t averages = 0;
    barrier();
    for (uint64_t i = 0; i < dropped; ++i) inner_and_outer(name);
    uint64_t consumed = info(outer).round;
    const auto start = SteadyClock::now();
    for (uint64_t i = 0; i < steps; ++i) {
      computed += inner_and_outer(name);
      const sotto_outer_info now = info(outer);
      if (now.round == consumed) continue;
      consumed = now.round;
      exposed += now.exposed_ns;
      network += now.network_ns;
      ++averages;
    }
    const int64_t ns = since(start);
    const double contention = info(outer).contention;
    return {{"ns", ns},
            {"compute_ns", computed},
            {"exposed_ns", exposed},
            {"network_ns", network},
            {"averages", averages},
            {"contention", std::isnan(contention) ? Json(nullptr) : Json(contention)},
            {"state_bytes", info(outer).state_bytes},
            {"payload", info(outer).payload_bytes_next_launch}};
  }

  Json create_buckets(uint64_t n, uint64_t gradients, const std::string& json) {
    buckets_ = std::make_unique<Buckets>(self_.comm, self_.rank, n, gradients, Json::parse(json));
    return {{"buckets", buckets_->info().buckets}};
  }

  // Rounds whose gradients come one after the other, an inner step before each, or at once.
  // Exposed time: of each round.
  Json rounds(uint64_t count, bool overlapped) {
    std::vector<int64_t> exposed;
    barrier();
    const auto start = SteadyClock::now();
    for (uint64_t i = 0; i < count; ++i) {
      buckets_->round(overlapped ? &step_ : nullptr);
      exposed.push_back(buckets_->info().exposed_ns);
    }
    return {{"ns", since(start)},
            {"exposed_ns", exposed},
            {"payload", buckets_->info().payload_bytes_per_round},
            {"early", buckets_->info().early_payload_bytes_per_round}};
  }
  Json digest() const { return buckets_->digest(); }

  // Consumes what is under way; live parameters are the anchor then, on all ranks.
  Json finish(const std::string& name) {
    must(sotto_outer_flush(outers_.at(name), nullptr, nullptr), "flush");
    const std::vector<float>& values = values_.at(name);
    return {{"digest", fmt::format("{:016x}", hash64(values.data(), values.size() * 4))}};
  }

 private:
  // Nanoseconds that the inner step has computed.
  int64_t inner_and_outer(const std::string& name) {
    std::vector<float>& values = values_.at(name);
    const auto start = SteadyClock::now();
    step_.run();
    const int64_t ns = since(start);
    for (uint64_t e = 0; e < std::min<uint64_t>(kChanged, values.size()); ++e)
      values[e] += 1e-4f * static_cast<float>(1 + rank());
    must(sotto_outer_step(outers_.at(name), nullptr, nullptr), "outer step");
    return ns;
  }
  void barrier() const { must(sotto_barrier(self_.comm, nullptr, nullptr), "barrier"); }
  static sotto_outer_info info(const sotto_outer* outer) {
    sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
    must(sotto_outer_get_info(outer, &info), "info");
    return info;
  }

  CapiRank self_;
  InnerStep step_;
  std::map<std::string, std::vector<float>> values_;
  std::map<std::string, sotto_outer*> outers_;
  std::unique_ptr<Buckets> buckets_;
};

Json obey(Rank* rank, const std::string& line) {
  std::istringstream words(line);
  std::string command, name;
  uint64_t number = 0, more = 0;
  words >> command;
  const auto rest = [&words] {
    std::string text;
    std::getline(words >> std::ws, text);
    return text;
  };
  if (command == "predict") return rank->predict(rest());
  if (command == "create" && words >> name >> number) return rank->create(name, number, rest());
  if (command == "calibrate" && words >> number >> name)
    return rank->calibrate(static_cast<int64_t>(number), name == "arithmetic");
  if (command == "buckets" && words >> number >> more)
    return rank->create_buckets(number, more, rest());
  if (command == "rounds" && words >> name >> number)
    return rank->rounds(number, name == "overlapped");
  if (command == "digest") return rank->digest();
  if (command == "compute" && words >> number) return rank->compute(number);
  if (command == "run" && words >> name >> number >> more) return rank->run(name, number, more);
  if (command == "finish" && words >> name) return rank->finish(name);
  refuse_command(line);
}

}  // namespace

int run_overlap_rank(const std::string& path) {
  return run_told_rank(path, [] {
    const auto rank = std::make_shared<Rank>();
    return ToldRank{rank->rank(),
                    [rank](const std::string& line) { return obey(rank.get(), line).dump(); }};
  });
}

}  // namespace sotto::perf
