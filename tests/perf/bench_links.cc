// Row 17: all-reduces with every codec next to the float32 one, this process being one rank of a
// job. tests/perf/links.sh starts the ranks, each behind a link with the rate wanted.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "core/base/hash.h"
#include "core/cpu/cpu_device.h"
#include "core/group/codec.h"
#include "tests/perf/benchmarks.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::perf {
namespace {

// A token bucket gives a burst for free: a series of operations back to back, the first of which
// do not count.
constexpr uint32_t kDropped = 3, kCounted = 20;
constexpr const char* kTargetLink = "100mbit";
constexpr double kTarget = 1 / 0.97;  // of the ratio of bytes

struct Coded {
  const char* name;
  const char* json;
  double bound;  // of the error of one operation, inputs being in [-1, 1]
};
constexpr Coded kCodecs[] = {{"bf16", R"({"type": "bf16"})", 1.0 / 100},
                             {"int8", R"({"type": "int8", "block": 256})", 1.0 / 100},
                             {"int4", R"({"type": "int4", "block": 128})", 1.0 / 6}};

void must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}

std::shared_ptr<Comm> join(const Options& options) {
  ContextOptions context;
  context.environment = process_environment();
  Result<Params> params = Params::read(context.environment);
  must(params.status());
  context.params = params.take();
  context.params.transport = "tcp";
  context.device = std::make_shared<CpuDevice>(options.threads, options.simd);
  context.backends["tcp"] = {[](const Params& p) {
                               TcpOptions tcp;
                               tcp.listen = p.listen;
                               tcp.eager_bytes = static_cast<uint64_t>(p.eager_bytes);
                               tcp.rate_limit_mbit = p.rate_limit_mbit;
                               return make_tcp_backend(tcp);
                             },
                             true};
  Result<std::shared_ptr<Comm>> comm =
      Comm::create(std::make_shared<Context>(std::move(context)), CommConfig{});
  must(comm.status());
  if ((*comm)->size() < 2)
    throw std::runtime_error(
        "allreduce_codecs needs ranks that are processes: start it with tests/perf/links.sh, or "
        "sotto-run -n 2 -- sotto-perf allreduce_codecs");
  return comm.take();
}

class Ranks {
 public:
  explicit Ranks(const Options& options)
      : comm_(join(options)), in_(options.n), mean_(options.n), out_(options.n) {
    for (uint64_t i = 0; i < options.n; ++i) {
      const uint64_t code = i * 2654435761u + static_cast<uint64_t>(comm_->rank()) * 40503u;
      in_[i] = static_cast<float>(code % 65536) / 32768.0f - 1.0f;
    }
    for (const Coded& codec : kCodecs) {
      Result<std::shared_ptr<Codec>> made =
          Codec::create(comm_, codec.json, {options.n}, {Dtype::kF32});
      must(made.status());
      codecs_.push_back(made.take());
    }
  }
  bool first() const { return comm_->rank() == 0; }
  int32_t size() const { return comm_->size(); }

  void dense() {
    Call call;
    call.request.kind = OpKind::kAllReduce;
    call.request.reduce = ReduceOp::kMean;
    call.request.rank = comm_->rank();
    call.request.size = comm_->size();
    call.request.counts = {in_.size()};
    call.request.dtypes = {Dtype::kF32};
    call.request.in_place = {0};
    call.in = {in_.data()};
    call.out = {mean_.data()};
    must(comm_->finish(comm_->start(call, {})));
  }
  void compressed(size_t codec) {
    must(comm_->finish(codecs_[codec]->all_reduce({in_.data()}, {out_.data()}, {})));
  }

  // The largest of a number over ranks.
  double largest(double mine) const {
    double most = mine;
    for (const std::string& blob : exchange(&mine, sizeof mine)) {
      double theirs;
      std::memcpy(&theirs, blob.data(), sizeof theirs);
      most = std::max(most, theirs);
    }
    return most;
  }
  // Milliseconds of one operation on the slowest rank.
  template <class Operation>
  double series(const Operation& operation) const {
    for (uint32_t i = 0; i < kDropped; ++i) operation();
    must(comm_->barrier());
    const auto start = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < kCounted; ++i) operation();
    const std::chrono::duration<double, std::milli> passed =
        std::chrono::steady_clock::now() - start;
    return largest(passed.count() / kCounted);
  }
  // Payload bytes that this rank sends in one operation.
  template <class Operation>
  double bytes(const Operation& operation) const {
    const uint64_t before = comm_->counters().moved.payload_bytes_sent;
    operation();
    return static_cast<double>(comm_->counters().moved.payload_bytes_sent - before);
  }
  // "" or what is wrong with the codec's first result.
  std::string check(const Coded& codec) const {
    double worst = 0;
    for (uint64_t i = 0; i < out_.size(); ++i)
      worst = std::max(worst, std::abs(double{out_[i]} - double{mean_[i]}));
    worst = largest(worst);
    const uint64_t hash = hash64(out_.data(), out_.size() * 4);
    for (const std::string& blob : exchange(&hash, sizeof hash)) {
      if (std::memcmp(blob.data(), &hash, sizeof hash) != 0) return "results differ between ranks";
    }
    if (worst <= codec.bound) return "";
    return fmt::format("error {} of {}; at most {}", worst, codec.name, codec.bound);
  }

 private:
  std::vector<std::string> exchange(const void* mine, size_t bytes) const {
    Result<std::vector<std::string>> all =
        comm_->exchange(std::string(static_cast<const char*>(mine), bytes));
    must(all.status());
    return all.take();
  }

  std::shared_ptr<Comm> comm_;
  std::vector<float> in_, mean_, out_;
  std::vector<std::shared_ptr<Codec>> codecs_;
};

}  // namespace

void allreduce_codecs(const Options& options, std::vector<Measurement>* out) {
  Ranks ranks(options);
  const auto dense = [&] { ranks.dense(); };
  const double dense_bytes = ranks.bytes(dense);
  std::vector<Case> cases;
  for (size_t c = 0; c < std::size(kCodecs); ++c) {
    Case work;
    work.row = 17;
    work.benchmark = "allreduce";
    work.variant = fmt::format("{}, {}", kCodecs[c].name, options.link);
    work.yardstick_name = "our fp32";
    work.n = options.n;
    const double bytes = ranks.bytes([&] { ranks.compressed(c); });
    work.bytes_per_element = bytes / static_cast<double>(options.n);
    work.share = bytes / dense_bytes;
    work.target = options.link == kTargetLink ? kTarget : 0;
    work.error = ranks.check(kCodecs[c]);
    cases.push_back(work);
  }
  std::vector<double> yardstick;
  std::vector<std::vector<double>> ours(cases.size());
  for (uint32_t i = 0; i < options.pairs; ++i) {
    yardstick.push_back(ranks.series(dense));
    for (size_t c = 0; c < cases.size(); ++c)
      ours[c].push_back(ranks.series([&] { ranks.compressed(c); }));
  }
  for (size_t c = 0; c < cases.size() && ranks.first(); ++c)
    out->push_back(summarize(cases[c], ours[c], yardstick));
}

}  // namespace sotto::perf
