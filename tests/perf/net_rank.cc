// One rank of the network benchmarks. tests/perf/net/sides.py starts it, describes what it is told,
// and compares its results with those of other libraries.
#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "core/base/hash.h"
#include "core/base/transports.h"
#include "core/codec/codec.h"
#include "tests/perf/control.h"
#include "tests/perf/net.h"
#include "tests/perf/timed_device.h"
#include "tests/support/calls.h"
#include "transports/shm/shm_backend.h"
#include "transports/tcp/tcp_backend.h"
#if SOTTO_WITH_UCX
#include "transports/ucx/ucx_backend.h"
#endif

namespace sotto::perf {
namespace {

using Json = nlohmann::ordered_json;
using SteadyClock = std::chrono::steady_clock;

constexpr const char* kDense = "fp32";
// Without the hierarchy, which is that of collectives.
const std::map<std::string, const char*> kCodecs = {
    {"1bit", R"("type": "onebit")"},
    {"int4", R"("type": "int4", "block": 128)"},
    {"int8", R"("type": "int8", "block": 256)"},
    {"bf16", R"("type": "bf16")"},
    {"topk", R"("type": "topk")"},
};

void must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}

std::shared_ptr<Comm> join(const std::shared_ptr<TimedDevice>& device, const Params& params,
                           const tcp::Params& own_tcp, const shm::Params& own_shm,
                           const Environment& environment) {
  ContextOptions context;
  context.environment = environment;
  context.params = params;
  if (params.transport == kAutoTransport) context.params.transport = "tcp";
  context.device = device;
  context.backends["tcp"] = {
      [own_tcp](const Params& common) { return make_tcp_backend(tcp_options(common, own_tcp)); },
      transport_row("tcp")};
  context.backends["shm"] = {
      [own_shm](const Params& common) { return make_shm_backend(shm_options(common, own_shm)); },
      transport_row("shm")};
#if SOTTO_WITH_UCX
  context.backends["ucx"] = {
      [](const Params& common) { return make_ucx_backend(ucx_options(common, ucx::Params())); },
      transport_row("ucx")};
#endif
  Result<std::shared_ptr<Comm>> comm =
      Comm::create(std::make_shared<Context>(std::move(context)), CommConfig{});
  must(comm.status());
  return comm.take();
}

// Element i of the input of rank r, in [-1, 1): a multiple of 2^-15, so that sums over up to 256
// ranks are exact in float32. All sides use the same numbers.
float input(uint64_t i, uint64_t r) {
  uint32_t code = static_cast<uint32_t>(i * 2654435761u + r * 2246822519u);
  code = (code ^ code >> 15) * 3266489917u;
  return static_cast<float>(code >> 16) / 32768.0f - 1.0f;
}

class Rank {
 public:
  Rank() {
    const Environment environment = process_environment();
    ParamReader reader(environment);
    const auto params = reader.read<Params>();
    const auto own_tcp = reader.read<tcp::Params>();
    const auto own_shm = reader.read<shm::Params>();
    must(reader.status());
    Result<SimdLevel> simd = simd_level_from_name(params.simd);
    must(simd.status());
    device_ = std::make_shared<TimedDevice>(*simd);
    comm_ = join(device_, params, own_tcp, own_shm, environment);
  }
  int32_t rank() const { return comm_->rank(); }

  // Makes memory for n elements and codecs without residuals.
  Json size(uint64_t n) {
    codecs_.clear();
    in_.resize(n);
    out_.assign(n, 0);
    in_.shrink_to_fit();
    out_.shrink_to_fit();
    for (uint64_t i = 0; i < n; ++i) in_[i] = input(i, static_cast<uint64_t>(rank()));
    return Json::object();
  }

  // One operation, and how its result differs from the mean: the largest difference, and the root
  // of the mean square relative to that of the mean itself.
  Json check(const std::string& method) {
    codecs_.erase(method);  // without the residual of earlier operations
    run(method);
    double worst = 0, squares = 0, of_mean = 0;
    for (uint64_t i = 0; i < out_.size(); ++i) {
      double mean = 0;
      for (int32_t r = 0; r < comm_->size(); ++r)
        mean += double{input(i, static_cast<uint64_t>(r))};
      mean /= comm_->size();
      const double off = double{out_[i]} - mean;
      worst = std::isfinite(off) ? std::max(worst, std::abs(off)) : HUGE_VAL;
      squares += off * off;
      of_mean += mean * mean;
    }
    Json reply;
    reply["checksum"] = fmt::format("{:016x}", hash64(out_.data(), out_.size() * 4));
    // JSON has no infinity.
    reply["error_max"] = std::min(worst, 1e30);
    reply["error_rms"] = of_mean == 0 ? 0 : std::min(std::sqrt(squares / of_mean), 1e30);
    return reply;
  }

  // `dropped` operations, a barrier, and `counted` operations back to back, which are timed.
  Json series(const std::string& method, uint32_t dropped, uint32_t counted) {
    for (uint32_t i = 0; i < dropped; ++i) run(method);
    must(comm_->barrier());
    const CommCounters before = comm_->counters();
    const uint64_t encode = cpu_ns(kEncoders), server = cpu_ns(kServers),
                   decode = cpu_ns(kDecoders);
    const SteadyClock::time_point start = SteadyClock::now();
    for (uint32_t i = 0; i < counted; ++i) run(method);
    const std::chrono::nanoseconds passed = SteadyClock::now() - start;
    const CommCounters after = comm_->counters();
    Json reply;
    reply["ns"] = passed.count();
    add_bytes(&reply, before, after);
    reply["kernel_ns"] = after.kernel_ns - before.kernel_ns;
    reply["encode_ns"] = cpu_ns(kEncoders) - encode;
    reply["server_ns"] = cpu_ns(kServers) - server;
    reply["decode_ns"] = cpu_ns(kDecoders) - decode;
    return reply;
  }

  // Operations with a pause, in which the rank sleeps, and a barrier before each; the time of each.
  Json singles(const std::string& method, uint32_t counted, uint32_t pause_us) {
    std::vector<int64_t> all;
    Json reply = Json::object();
    for (uint32_t i = 0; i < counted; ++i) {
      if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
      must(comm_->barrier());
      const CommCounters before = comm_->counters();
      const SteadyClock::time_point start = SteadyClock::now();
      run(method);
      const std::chrono::nanoseconds passed = SteadyClock::now() - start;
      all.push_back(passed.count());
      add_bytes(&reply, before, comm_->counters());
    }
    reply["ns"] = all;
    return reply;
  }

  // 4 bytes while a large all-reduce is under way.
  Json urgent(uint32_t after_us) {
    must(comm_->barrier());
    CallOptions options;
    const SteadyClock::time_point start = SteadyClock::now();
    const Result<OpRef> bulk = comm_->start(dense(&in_, &out_, kBulkTag), options);
    must(bulk.status());
    ::usleep(after_us);
    std::vector<float> one{1.0f};
    options.priority = 1;
    const SteadyClock::time_point small = SteadyClock::now();
    must(comm_->finish(comm_->start(dense(&one, &one, kUrgentTag), options)));
    const SteadyClock::time_point end = SteadyClock::now();
    must(comm_->finish(bulk));
    return {{"ns", (end - small).count()}, {"bulk_ns", (SteadyClock::now() - start).count()}};
  }

 private:
  // What was sent and planned between two looks, on top of what the reply has.
  static void add_bytes(Json* reply, const CommCounters& before, const CommCounters& after) {
    const auto add = [&](const char* key, uint64_t from, uint64_t to) {
      (*reply)[key] = reply->value(key, uint64_t{0}) + to - from;
    };
    add("payload", before.moved.payload_bytes_sent, after.moved.payload_bytes_sent);
    add("payload_planned", before.payload_bytes_planned, after.payload_bytes_planned);
    add("header", before.moved.header_bytes_sent, after.moved.header_bytes_sent);
    add("header_planned", before.header_bytes_planned, after.header_bytes_planned);
  }

  static constexpr KernelId kEncoders[] = {KernelId::kOnebitEncode, KernelId::kQuantEncode,
                                           KernelId::kSparseEncode};
  static constexpr KernelId kServers[] = {KernelId::kOnebitServer, KernelId::kQuantServer};
  static constexpr KernelId kDecoders[] = {KernelId::kOnebitDecode, KernelId::kQuantDecode,
                                           KernelId::kSparseMean};
  static constexpr uint64_t kBulkTag = 1, kUrgentTag = 2;

  Call dense(std::vector<float>* in, std::vector<float>* out, uint64_t tag = 0) const {
    Call call = test::all_reduce_of(*comm_, in->data(), out->data(), in->size());
    call.request.reduce = ReduceOp::kMean;
    call.tag = tag;
    return call;
  }

  void run(const std::string& method) {
    if (method == kDense) {
      must(comm_->run(dense(&in_, &out_)));
      return;
    }
    CallOptions options;
    options.waits = true;
    must(comm_->finish(codec(method)->all_reduce({in_.data()}, {out_.data()}, options)));
  }

  const std::shared_ptr<Codec>& codec(const std::string& method) {
    std::shared_ptr<Codec>& codec = codecs_[method];
    if (codec == nullptr) {
      const auto json = kCodecs.find(method);
      if (json == kCodecs.end()) throw std::runtime_error("no method '" + method + "'");
      std::string levels;  // one is the default, and topk has no others
      if (comm_->levels().kind != Hierarchy::kFlat) {
        levels = fmt::format(R"(, "hierarchy": "{}")", hierarchy_name(comm_->levels().kind));
      }
      const std::string settings = fmt::format("{{{}{}}}", json->second, levels);
      Result<std::shared_ptr<Codec>> made =
          Codec::create(comm_, settings, {in_.size()}, {Dtype::kF32});
      must(made.status());
      codec = made.take();
    }
    return codec;
  }

  uint64_t cpu_ns(std::span<const KernelId> kernels) const {
    uint64_t sum = 0;
    for (const KernelId id : kernels) sum += device_->cpu_ns(id);
    return sum;
  }

  std::shared_ptr<TimedDevice> device_;
  std::shared_ptr<Comm> comm_;
  std::vector<float> in_, out_;
  std::map<std::string, std::shared_ptr<Codec>> codecs_;
};

Json obey(Rank* rank, const std::string& line) {
  std::istringstream words(line);
  std::string command, method;
  words >> command;
  if (command == "size") {
    uint64_t n = 0;
    if (words >> n && n > 0) return rank->size(n);
  } else if (command == "check") {
    if (words >> method) return rank->check(method);
  } else if (command == "series") {
    uint32_t dropped = 0, counted = 0;
    if (words >> method >> dropped >> counted && counted > 0)
      return rank->series(method, dropped, counted);
  } else if (command == "urgent") {
    uint32_t after_us = 0;
    if (words >> after_us) return rank->urgent(after_us);
  } else if (command == "singles") {
    uint32_t counted = 0, pause_us = 0;
    if (words >> method >> counted && counted > 0) {
      if (!(words >> pause_us)) pause_us = 0;
      return rank->singles(method, counted, pause_us);
    }
  }
  refuse_command(line);
}

}  // namespace

int run_net_rank(const std::string& path) {
  return run_told_rank(path, [] {
    const auto rank = std::make_shared<Rank>();
    return ToldRank{rank->rank(),
                    [rank](const std::string& line) { return obey(rank.get(), line).dump(); }};
  });
}

}  // namespace sotto::perf
