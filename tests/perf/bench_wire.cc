// Row 18: bytes on the wire. For every kind of plan: what the counters saw equals the plan exactly,
// the payload equals a closed formula, and the interface carried hardly more.
#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/codec/codec.h"
#include "core/optim/optimizer.h"
#include "tests/perf/benchmarks.h"
#include "tests/perf/wire_world.h"

namespace sotto::perf {
namespace {

using Counts = std::vector<uint64_t>;

constexpr uint64_t kElements = uint64_t{1} << 20;
constexpr double kTarget = 1.001;
constexpr uint32_t kOperations = 5;
constexpr uint32_t kAttempts = 5;

uint64_t sum_of(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

// The formulas: bytes that rank r of W sends for n elements. Written down from the description of
// the algorithms, not taken from the planner.

// Chunk r of n elements, borders on multiples of 16.
uint64_t chunk(uint64_t n, uint64_t W, uint64_t r) {
  const uint64_t units = (n + 15) / 16;
  const auto border = [&](uint64_t k) {
    return std::min(n, 16 * (k * (units / W) + std::min(k, units % W)));
  };
  return border(r + 1) - border(r);
}
// Every rank gets the others' parts of its chunk and gives them the sum.
uint64_t direct_all_reduce(uint64_t n, uint64_t W, uint64_t r, uint64_t element) {
  return element * (n - chunk(n, W, r) + (W - 1) * chunk(n, W, r));
}
uint64_t dense_all_reduce(uint64_t n, uint64_t W, uint64_t r, uint64_t element) {
  const uint64_t to_all = (W - 1) * n * element;
  return to_all <= 65536 ? to_all : direct_all_reduce(n, W, r, element);
}
// Elements of a compressed message come in units.
struct Unit {
  uint64_t elements, bytes;
};
constexpr Unit kBit{8, 1}, kHalf{1, 2}, kInt8{256, 256 + 4}, kInt4{128, 64 + 4};
// Two exchanges, chunks padded to multiples of 512.
uint64_t compressed_all_reduce(uint64_t n, uint64_t W, Unit unit) {
  const uint64_t chunk = 512 * ((n + 512 * W - 1) / (512 * W));
  return 2 * (W - 1) * chunk / unit.elements * unit.bytes;
}
// From rank 0.
uint64_t broadcast(uint64_t n, uint64_t W, uint64_t r, uint64_t element) {
  if (W > 2 && n * element > 256 * 1024) {
    const uint64_t own = chunk(n, W, r);
    return element * (r == 0 ? n - own + (W - 1) * own : (W - 2) * own);
  }
  uint64_t children = 0;  // ranks r + bit for bits below the lowest one of r
  for (uint64_t bit = 1; bit < W && (r & bit) == 0; bit *= 2) children += r + bit < W ? 1 : 0;
  return children * n * element;
}

// What rank r sends rank k of a tensor where the parts differ from pair to pair; as much comes
// back.
uint64_t uneven_part(uint64_t n, uint64_t W, uint64_t r, uint64_t k) {
  return n / W * ((r + k) % 3) / 2;
}

// What one rank does.
class Work {
 public:
  virtual ~Work() = default;
  // Not counted.
  virtual Status prepare() { return ok_status(); }
  virtual Status run() = 0;
  virtual uint64_t formula() const = 0;
};

class Collective final : public Work {
 public:
  Collective(std::shared_ptr<Comm> comm, OpKind kind, Dtype dtype, const Counts& counts)
      : comm_(std::move(comm)), kind_(kind), dtype_(dtype), counts_(counts) {
    const auto W = static_cast<uint64_t>(comm_->size());
    for (const uint64_t n : counts_) {
      const bool to_all = kind_ == OpKind::kAllToAll;
      const uint64_t in =
          to_all || kind_ == OpKind::kReduceScatter || kind_ == OpKind::kScatter ? n * W : n;
      const uint64_t out =
          to_all || kind_ == OpKind::kAllGather || kind_ == OpKind::kGather ? n * W : n;
      in_.emplace_back(in * dtype_bytes(dtype_));
      out_.emplace_back(out * dtype_bytes(dtype_));
    }
  }

  Status run() override {
    if (kind_ != OpKind::kSendRecv) return comm_->finish(comm_->start(call(), {}));
    // Around a ring.
    Call pair[] = {call(), call()};
    pair[0].request.is_send = true;
    pair[0].request.peer = (comm_->rank() + 1) % comm_->size();
    pair[1].request.peer = (comm_->rank() + comm_->size() - 1) % comm_->size();
    return comm_->finish(comm_->start_group(pair, {}));
  }

  uint64_t formula() const override {
    const uint64_t n = sum_of(counts_), element = dtype_bytes(dtype_);
    const auto W = static_cast<uint64_t>(comm_->size());
    const auto r = static_cast<uint64_t>(comm_->rank());
    switch (kind_) {
      case OpKind::kBroadcast: return broadcast(n, W, r, element);
      case OpKind::kAllGather:
      case OpKind::kAllToAll:
      case OpKind::kReduceScatter: return (W - 1) * n * element;
      case OpKind::kGather: return r == 0 ? 0 : n * element;
      case OpKind::kScatter: return r == 0 ? (W - 1) * n * element : 0;
      case OpKind::kAllToAllParts: return uneven_sent(W, r) * element;
      case OpKind::kAllReduce: return dense_all_reduce(n, W, r, element);
      case OpKind::kSendRecv: return n * element;
      default: return 0;  // a barrier
    }
  }

 private:
  uint64_t uneven_sent(uint64_t W, uint64_t r) const {
    uint64_t sent = 0;
    for (const uint64_t n : counts_) {
      for (uint64_t k = 0; k < W; ++k) sent += k == r ? 0 : uneven_part(n, W, r, k);
    }
    return sent;
  }
  void add_parts(CollectiveRequest* request) const {
    const auto W = static_cast<uint64_t>(comm_->size());
    for (const uint64_t n : counts_) {
      uint64_t at = 0;
      for (uint64_t k = 0; k < W; ++k) {
        const uint64_t part = uneven_part(n, W, static_cast<uint64_t>(comm_->rank()), k);
        request->in_parts.push_back({at, part});
        request->out_parts.push_back({at, part});
        at += part;
      }
    }
  }
  Call call() {
    Call c;
    c.request.kind = kind_;
    c.request.rank = comm_->rank();
    c.request.size = comm_->size();
    if (kind_ == OpKind::kBarrier) return c;
    c.request.counts = counts_;
    c.request.dtypes.assign(counts_.size(), dtype_);
    c.request.in_place.assign(counts_.size(), 0);
    if (kind_ == OpKind::kAllToAllParts) add_parts(&c.request);
    for (auto& data : in_) c.in.push_back(data.data());
    for (auto& data : out_) c.out.push_back(data.data());
    return c;
  }

  std::shared_ptr<Comm> comm_;
  OpKind kind_;
  Dtype dtype_;
  Counts counts_;
  std::vector<std::vector<std::byte>> in_, out_;
};

// Tensors of floats that differ between ranks.
std::vector<std::vector<float>> some_floats(const Counts& counts, int32_t rank) {
  std::vector<std::vector<float>> all;
  for (const uint64_t n : counts) {
    std::vector<float>& x = all.emplace_back(n);
    for (uint64_t i = 0; i < n; ++i)
      x[i] = static_cast<float>((i * 31 + static_cast<uint64_t>(rank) * 7) % 23) - 11;
  }
  return all;
}

class Compressed final : public Work {
 public:
  Compressed(std::shared_ptr<Comm> comm, const char* json, Unit unit, bool by_tensor,
             const Counts& counts)
      : comm_(std::move(comm)),
        json_(json),
        unit_(unit),
        by_tensor_(by_tensor),
        counts_(counts),
        x_(some_floats(counts, comm_->rank())),
        y_(x_) {}

  Status prepare() override {
    SOTTO_ASSIGN(codec_, Codec::create(comm_, json_, counts_,
                                       std::vector<Dtype>(counts_.size(), Dtype::kF32)));
    return ok_status();
  }
  Status run() override {
    std::vector<void*> in, out;
    for (auto& t : x_) in.push_back(t.data());
    for (auto& t : y_) out.push_back(t.data());
    return comm_->finish(codec_->all_reduce(in, out, {}));
  }
  uint64_t formula() const override {
    const auto W = static_cast<uint64_t>(comm_->size());
    if (!by_tensor_) return compressed_all_reduce(sum_of(counts_), W, unit_);
    uint64_t bytes = 0;
    for (const uint64_t n : counts_) bytes += compressed_all_reduce(n, W, unit_);
    return bytes;
  }

 private:
  std::shared_ptr<Comm> comm_;
  std::string json_;
  Unit unit_;
  bool by_tensor_;
  Counts counts_;
  std::vector<std::vector<float>> x_, y_;
  std::shared_ptr<Codec> codec_;
};

class Step final : public Work {
 public:
  // compressed: of a 1-bit type, the first step of that stage included.
  Step(std::shared_ptr<Comm> comm, const char* type, bool compressed, const Counts& counts)
      : comm_(std::move(comm)),
        type_(type),
        compressed_(compressed),
        counts_(counts),
        p_(some_floats(counts, 0)),
        g_(some_floats(counts, comm_->rank())) {}

  Status prepare() override {
    std::string more;
    if (type_.starts_with("OneBit"))
      more = fmt::format(R"(, "freeze_step": {})", compressed_ ? 1 : 1000);
    std::vector<ParamSpec> params;
    for (size_t t = 0; t < counts_.size(); ++t) {
      params.push_back({fmt::format("t{}", t), counts_[t], 0, p_[t].data(), g_[t].data(), nullptr});
    }
    SOTTO_ASSIGN(
        optimizer_,
        Optimizer::create(
            comm_,
            fmt::format(R"({{"optimizer": {{"type": "{}", "params": {{"lr": 0.001{}}}}}}})", type_,
                        more),
            std::move(params)));
    while (compressed_) {
      SOTTO_ASSIGN(const OptimInfo info, optimizer_->info());
      if (info.stage == 1) break;
      SOTTO_TRY(run());
    }
    return ok_status();
  }
  Status run() override { return comm_->finish(optimizer_->step({})); }
  uint64_t formula() const override {
    const auto W = static_cast<uint64_t>(comm_->size());
    const uint64_t n = sum_of(counts_);
    return compressed_ ? compressed_all_reduce(n, W, kBit)
                       : direct_all_reduce(n, W, static_cast<uint64_t>(comm_->rank()), 4);
  }

 private:
  std::shared_ptr<Comm> comm_;
  std::string type_;
  bool compressed_;
  Counts counts_;
  std::vector<std::vector<float>> p_, g_;
  std::shared_ptr<Optimizer> optimizer_;
};

struct Kind {
  const char* name;
  std::function<std::unique_ptr<Work>(std::shared_ptr<Comm>, const Counts&)> make;
};

Kind collective(const char* name, OpKind kind, Dtype dtype = Dtype::kF32) {
  return {name, [=](std::shared_ptr<Comm> comm, const Counts& counts) -> std::unique_ptr<Work> {
            return std::make_unique<Collective>(std::move(comm), kind, dtype, counts);
          }};
}
Kind compressed(const char* name, const char* json, Unit unit, bool by_tensor = false) {
  return {name, [=](std::shared_ptr<Comm> comm, const Counts& counts) -> std::unique_ptr<Work> {
            return std::make_unique<Compressed>(std::move(comm), json, unit, by_tensor, counts);
          }};
}
Kind step(const char* name, const char* type, bool compressed = false) {
  return {name, [=](std::shared_ptr<Comm> comm, const Counts& counts) -> std::unique_ptr<Work> {
            return std::make_unique<Step>(std::move(comm), type, compressed, counts);
          }};
}

std::vector<Kind> kinds() {
  return {collective("barrier", OpKind::kBarrier),
          collective("broadcast", OpKind::kBroadcast),
          collective("all_gather", OpKind::kAllGather),
          collective("reduce_scatter", OpKind::kReduceScatter),
          collective("gather", OpKind::kGather),
          collective("scatter", OpKind::kScatter),
          collective("all_to_all", OpKind::kAllToAll),
          collective("all_to_all parts", OpKind::kAllToAllParts),
          collective("all_reduce", OpKind::kAllReduce),
          collective("all_reduce of bf16", OpKind::kAllReduce, Dtype::kBF16),
          collective("send, recv", OpKind::kSendRecv),
          compressed("all_reduce 1bit", R"({"type": "1bit"})", kBit),
          compressed("all_reduce 1bit by tensor", R"({"type": "1bit", "granularity": "tensor"})",
                     kBit, true),
          compressed("all_reduce as bf16", R"({"type": "bf16"})", kHalf),
          compressed("all_reduce as int8", R"({"type": "int8", "block": 256})", kInt8),
          compressed("all_reduce as int4", R"({"type": "int4", "block": 128})", kInt4),
          step("step SGD", "SGD"),
          step("step Adam", "Adam"),
          step("step LAMB", "Lamb"),
          step("step 1-bit Adam warm-up", "OneBitAdam"),
          step("step 1-bit Adam", "OneBitAdam", true),
          step("step 1-bit LAMB warm-up", "OneBitLamb"),
          step("step 1-bit LAMB", "OneBitLamb", true)};
}

struct Tally {
  std::vector<CommCounters> ranks;
  uint64_t service = 0;
  InterfaceCount interface;
  uint64_t resent = 0;
};

Tally tally(const WireWorld& world, bool own_interface) {
  world.settle();
  Tally t;
  if (own_interface) {
    t.interface = loopback_sent();
    t.resent = resent_segments();
  }
  for (int32_t r = 0; r < world.size(); ++r) {
    t.ranks.push_back(world.comm(r)->counters());
    t.service += world.service_bytes(r);
  }
  return t;
}

// "" or how a rank's bytes differ.
std::string compare(int32_t rank, const CommCounters& before, const CommCounters& after,
                    uint64_t formula) {
  const uint64_t payload = after.moved.payload_bytes_sent - before.moved.payload_bytes_sent;
  const uint64_t header = after.moved.header_bytes_sent - before.moved.header_bytes_sent;
  const uint64_t planned = after.payload_bytes_planned - before.payload_bytes_planned;
  const uint64_t header_planned = after.header_bytes_planned - before.header_bytes_planned;
  if (payload == planned && header == header_planned && payload == formula) return "";
  return fmt::format(
      "rank {} sent {} payload and {} header bytes; planned {} and {}; formula: {} payload", rank,
      payload, header, planned, header_planned, formula);
}

void add_ranks(const Tally& before, const Tally& after, WireFigures* w) {
  for (size_t r = 0; r < before.ranks.size(); ++r) {
    const TransferCounters& a = before.ranks[r].moved;
    const TransferCounters& b = after.ranks[r].moved;
    w->payload_bytes += b.payload_bytes_sent - a.payload_bytes_sent;
    w->header_bytes += b.header_bytes_sent - a.header_bytes_sent;
  }
  w->service_bytes = after.service - before.service;
}

// "" or what the interface lacks.
std::string add_interface(const Tally& before, const Tally& after, Measurement* m) {
  WireFigures& w = *m->wire;
  w.interface_bytes = after.interface.bytes - before.interface.bytes;
  w.interface_packets = after.interface.packets - before.interface.packets;
  w.framing_bytes = w.interface_packets * header_bytes_per_packet();
  const uint64_t named = w.payload_bytes + w.header_bytes;
  const uint64_t carried = w.interface_bytes - w.framing_bytes;
  m->ratio = named > 0 ? static_cast<double>(carried) / static_cast<double>(named) : 1;
  if (carried >= named + w.service_bytes) return "";
  return fmt::format("the interface carried only {} bytes beside framing; counted are {} + {} + {}",
                     carried, w.payload_bytes, w.header_bytes, w.service_bytes);
}

// Counts some operations of all ranks.
Measurement count(const WireWorld& world, const std::vector<std::unique_ptr<Work>>& works,
                  bool own_interface) {
  Measurement m;
  WireFigures& w = m.wire.emplace();
  w.ranks = world.size();
  w.operations = kOperations;
  const Tally before = tally(world, own_interface);
  world.on_all([&](int32_t r) -> Status {
    for (uint32_t i = 0; i < kOperations; ++i) SOTTO_TRY(works[static_cast<size_t>(r)]->run());
    return ok_status();
  });
  const Tally after = tally(world, own_interface);
  for (int32_t r = 0; r < world.size() && m.info.error.empty(); ++r) {
    const auto at = static_cast<size_t>(r);
    m.info.error =
        compare(r, before.ranks[at], after.ranks[at], kOperations * works[at]->formula());
  }
  add_ranks(before, after, &w);
  if (own_interface) {
    const std::string lacks = add_interface(before, after, &m);
    if (m.info.error.empty()) m.info.error = lacks;
    w.resent_segments = after.resent - before.resent;
  }
  return m;
}

Measurement count_kind(const WireWorld& world, const Kind& kind, const Counts& counts,
                       const std::string& why_shared) {
  std::vector<std::unique_ptr<Work>> works;
  for (int32_t r = 0; r < world.size(); ++r) works.push_back(kind.make(world.comm(r), counts));
  world.on_all([&](int32_t r) { return works[static_cast<size_t>(r)]->prepare(); });
  Measurement m;
  // On a busy machine TCP takes a late acknowledgement for a loss and sends again.
  for (uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
    m = count(world, works, why_shared.empty());
    if (!m.info.error.empty() || m.wire->resent_segments == 0) break;
  }
  m.wire->skipped = why_shared;
  m.info.row = 18;
  m.info.benchmark = "wire_bytes";
  m.info.variant = fmt::format("{}, W = {}", kind.name, world.size());
  m.info.n = std::string(kind.name) == "barrier" ? 0 : sum_of(counts);
  m.info.target = m.info.n == kElements ? kTarget : 0;
  return m;
}

// The measurements of one size, for the parent process.
nlohmann::json to_json(const Measurement& m) {
  const WireFigures& w = *m.wire;
  return {m.info.variant,    m.info.n,          m.info.error,        m.ratio,
          w.ranks,           w.operations,      w.payload_bytes,     w.header_bytes,
          w.service_bytes,   w.interface_bytes, w.interface_packets, w.framing_bytes,
          w.resent_segments, w.skipped};
}
Measurement from_json(const nlohmann::json& j) {
  Measurement m;
  m.info.row = 18;
  m.info.benchmark = "wire_bytes";
  m.info.variant = j[0];
  m.info.n = j[1];
  m.info.target = m.info.n == kElements ? kTarget : 0;
  m.info.error = j[2];
  m.ratio = j[3];
  m.wire = WireFigures{j[4], j[5], j[6], j[7], j[8], j[9], j[10], j[11], j[12], j[13]};
  return m;
}

std::string count_all(const std::string& why_shared) {
  nlohmann::json all = nlohmann::json::array();
  for (const int32_t size : {2, 4}) {
    const WireWorld world(size);
    for (const Kind& kind : kinds()) {
      for (const Counts& counts :
           {Counts{kElements}, Counts{300'001}, Counts{7, 1025, 3, 40'009}, Counts{1}})
        all.push_back(to_json(count_kind(world, kind, counts, why_shared)));
    }
  }
  return all.dump();
}

}  // namespace

void wire_bytes(const Options& /*options*/, std::vector<Measurement>* out) {
  for (const nlohmann::json& j : nlohmann::json::parse(run_isolated(count_all)))
    out->push_back(from_json(j));
}

}  // namespace sotto::perf
