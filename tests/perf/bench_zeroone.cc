// Row 25: what 0/1 Adam sends over the whole schedule of BERT-Large (specification 6.5). The bytes
// of a step of each kind are counted on ranks that run a small schedule over TCP; the schedule that
// the optimizer itself follows says how many of each kind the run has.
#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>

#include "core/optim/algorithms/zeroone_schedule.h"
#include "core/optim/optimizer.h"
#include "tests/perf/benchmarks.h"
#include "tests/perf/wire_world.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kElements = uint64_t{1} << 20;
constexpr uint64_t kTensor = 300'001;  // the last one has the rest
constexpr double kTarget = 0.51;
constexpr size_t kKinds = 4;  // of ZeroOneUpdate

// Published: 152 511 updates, the others are the defaults.
constexpr uint64_t kUpdates = 152'511;
IntervalParams bert_large() {
  IntervalParams params;
  params.var_freeze_step = 12'500;
  return params;
}
// Has every kind of step twice or more in few updates.
constexpr uint64_t kSmallUpdates = 16;
IntervalParams small() {
  IntervalParams params;
  params.var_freeze_step = 6;
  params.var_update_scaler = 2;
  params.local_step_scaler = 4;
  params.local_step_clipper = 4;
  return params;
}

struct Kinds {
  uint64_t offset = 0;
  std::array<uint64_t, kKinds> steps{};
  std::array<uint64_t, kKinds> payload{};  // bytes of one step, all ranks
  std::array<uint64_t, kKinds> headers{};
};

// Calls f(kind) for every update of a schedule. offset: state step before the first.
template <class F>
void for_each_update(const IntervalParams& params, uint64_t offset, uint64_t updates, F&& f) {
  ZeroOneSchedule schedule(params);
  for (uint64_t t = offset + 1; t <= offset + updates; ++t) {
    f(static_cast<size_t>(schedule.kind(t, true)));
    schedule.advance(t);
  }
}

// One rank with its parameters and gradients.
struct Rank {
  Rank(std::shared_ptr<Comm> with, const IntervalParams& params)
      : comm(std::move(with)), p(kElements, 0.5f), g(kElements) {
    for (uint64_t i = 0; i < kElements; ++i)
      g[i] = static_cast<float>((i * 31 + static_cast<uint64_t>(comm->rank()) * 7) % 23) - 11;
    json = fmt::format(
        R"({{"optimizer": {{"type": "ZeroOneAdam", "params": {{"lr": 0.001,
            "var_freeze_step": {}, "var_update_scaler": {}, "local_step_scaler": {},
            "local_step_clipper": {}}}}}, "communication_data_type": "fp16"}})",
        params.var_freeze_step, params.var_update_scaler, params.local_step_scaler,
        params.local_step_clipper);
  }
  Status create() {
    std::vector<ParamSpec> specs;
    for (uint64_t at = 0; at < kElements; at += kTensor) {
      specs.push_back({fmt::format("t{}", specs.size()), std::min(kTensor, kElements - at), 0,
                       p.data() + at, g.data() + at, nullptr});
    }
    SOTTO_ASSIGN(optimizer, Optimizer::create(comm, json, std::move(specs)));
    return ok_status();
  }
  Status step() const { return comm->finish(optimizer->step({})); }

  std::shared_ptr<Comm> comm;
  std::vector<float> p, g;
  std::string json;
  std::shared_ptr<Optimizer> optimizer;
};

struct Sent {
  uint64_t payload = 0, headers = 0, planned = 0;
};

Sent sent(const WireWorld& world) {
  Sent all;
  for (int32_t r = 0; r < world.size(); ++r) {
    const CommCounters c = world.comm(r)->counters();
    all.payload += c.moved.payload_bytes_sent;
    all.headers += c.moved.header_bytes_sent;
    all.planned += c.payload_bytes_planned + c.header_bytes_planned;
  }
  return all;
}

// Runs the small schedule. Every step has to send what its plan says, and all of a kind as much.
std::string count_kinds(int32_t size, Kinds* out) {
  const WireWorld world(size);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t r = 0; r < size; ++r)
    ranks.push_back(std::make_unique<Rank>(world.comm(r), small()));
  world.on_all([&](int32_t r) { return ranks[static_cast<size_t>(r)]->create(); });
  const Result<OptimInfo> info = ranks[0]->optimizer->info();
  if (!info.ok()) return info.status().text();
  out->offset = info->state_step;
  std::string error;
  for_each_update(small(), out->offset, kSmallUpdates, [&](size_t kind) {
    const Sent before = sent(world);
    world.on_all([&](int32_t r) { return ranks[static_cast<size_t>(r)]->step(); });
    const Sent after = sent(world);
    const uint64_t payload = after.payload - before.payload;
    const uint64_t headers = after.headers - before.headers;
    if (payload + headers != after.planned - before.planned)
      error = fmt::format("a step of kind {} sent {} bytes, planned {}", kind, payload + headers,
                          after.planned - before.planned);
    if (out->steps[kind]++ == 0) {
      out->payload[kind] = payload;
      out->headers[kind] = headers;
    } else if (payload != out->payload[kind] || headers != out->headers[kind]) {
      error = fmt::format("steps of kind {} sent {} + {} and {} + {} bytes", kind,
                          out->payload[kind], out->headers[kind], payload, headers);
    }
  });
  for (const uint64_t steps : out->steps) {
    if (steps < 2) error = "the small schedule lacks a kind of step";
  }
  return error;
}

std::string count_all(const std::string& /*why_shared*/) {
  nlohmann::json all = nlohmann::json::array();
  for (const int32_t size : {2, 4}) {
    Kinds kinds;
    const std::string error = count_kinds(size, &kinds);
    all.push_back({size, error, kinds.offset, kinds.payload, kinds.headers});
  }
  return all.dump();
}

}  // namespace

void zeroone_bits(const Options& /*options*/, std::vector<Measurement>* out) {
  for (const nlohmann::json& j : nlohmann::json::parse(run_isolated(count_all))) {
    const int32_t ranks = j[0];
    Kinds kinds{j[2], {}, j[3], j[4]};
    for_each_update(bert_large(), kinds.offset, kUpdates,
                    [&](size_t kind) { ++kinds.steps[kind]; });
    Measurement m;
    m.info.row = 25;
    m.info.benchmark = "zeroone_bits";
    m.info.variant = fmt::format("BERT-Large, W = {}", ranks);
    m.info.n = kElements;
    m.info.target = kTarget;
    m.info.error = j[1];
    ScheduleFigures& s = m.schedule.emplace();
    s.ranks = ranks;
    s.variance = kinds.steps[static_cast<size_t>(ZeroOneUpdate::kVariance)];
    s.compressed = kinds.steps[static_cast<size_t>(ZeroOneUpdate::kCompressed)];
    s.sync = kinds.steps[static_cast<size_t>(ZeroOneUpdate::kSync)];
    s.local = kinds.steps[static_cast<size_t>(ZeroOneUpdate::kLocal)];
    for (size_t k = 0; k < kKinds; ++k) {
      s.payload_bytes += kinds.steps[k] * kinds.payload[k];
      s.header_bytes += kinds.steps[k] * kinds.headers[k];
    }
    // All ranks together send 2 (W-1) times the vector where one sends 2 (W-1) / W.
    const double vectors = 2.0 * (ranks - 1) * static_cast<double>(kUpdates * kElements);
    m.ratio = 8 * static_cast<double>(s.payload_bytes + s.header_bytes) / vectors;
    out->push_back(m);
  }
}

}  // namespace sotto::perf
