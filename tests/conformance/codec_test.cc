// Every codec of the compressed all-reduce: telescoping at all sizes and world sizes, equal bits
// however it is run, wire volume, values that are not finite, what a call that does not commit
// leaves behind, state, and that buckets travel while others are encoded.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "core/codec/codec.h"
#include "core/config/codec.h"
#include "core/cpu/cpu_device.h"
#include "core/state/optim_state.h"
#include "tests/emulation/async_device/async_device.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"

namespace sotto::test {
namespace {

const std::vector<std::string> kWithResidual = {
    R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192, "chunk_align": 8})",
    R"({"type": "onebit", "scale": "l1", "granularity": "tensor"})",
    R"({"type": "bf16", "residual": true})",
    R"({"type": "fp16", "residual": true})",
    R"({"type": "int8"})",
    R"({"type": "int4", "block": 64, "chunk_align": 64})",
    R"({"type": "topk", "block": 256, "k": 16})",
    R"({"type": "topk", "block": 64, "k": 8, "exchange": "two_phase"})",
};
// With the error of one encoding, relative to the largest magnitude.
const std::map<std::string, double> kWithoutResidual = {
    {R"({"type": "bf16"})", 1 / 256.0},
    {R"({"type": "int8", "residual": false})", 1 / 254.0},
    {R"({"type": "int4", "residual": false})", 1 / 14.0},
};
const std::vector<std::string> kCodecs = [] {
  std::vector<std::string> all = kWithResidual;
  for (const auto& [json, error] : kWithoutResidual) all.push_back(json);
  return all;
}();

std::string name_of(const testing::TestParamInfo<std::string>& p) { return p.param; }

struct Tensors {
  explicit Tensors(const std::vector<uint64_t>& counts) {
    for (const uint64_t n : counts) {
      x.emplace_back(n);
      y.emplace_back(n, 42.0f);
    }
    for (size_t t = 0; t < counts.size(); ++t) {
      in.push_back(x[t].data());
      out.push_back(y[t].data());
    }
  }
  void fill(RandomBits* random) {
    std::normal_distribution<float> normal;
    for (auto& tensor : x) {
      for (float& v : tensor) v = normal(*random);
    }
  }
  static std::vector<float> flat(const std::vector<std::vector<float>>& tensors) {
    std::vector<float> all;
    for (const auto& t : tensors) all.insert(all.end(), t.begin(), t.end());
    return all;
  }
  std::vector<std::vector<float>> x, y;
  std::vector<void*> in, out;
};

Result<std::shared_ptr<Codec>> make_codec(const std::shared_ptr<Comm>& comm,
                                          const std::string& json,
                                          const std::vector<uint64_t>& counts) {
  return Codec::create(comm, json, counts, std::vector<Dtype>(counts.size(), Dtype::kF32));
}

Status reduce(Codec& codec, Tensors& t) {
  SOTTO_ASSIGN(const OpRef op, codec.all_reduce(t.in, t.out, {}));
  return codec.comm()->engine().wait(op, -1);
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}
std::vector<float> floats_of(const std::string& bytes) {
  std::vector<float> out(bytes.size() / 4);
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// I2: the results of a call are the same bytes everywhere.
Status expect_same(Comm& comm, const std::string& mine) {
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(mine));
  for (const std::string& other : all) {
    if (other != mine) return error(Code::kInternal, "results differ between ranks");
  }
  return ok_status();
}

// Sums over ranks of one vector of each, in double.
Result<std::vector<double>> total(Comm& comm, const std::vector<float>& mine) {
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(bytes_of(mine)));
  std::vector<double> sum(mine.size());
  for (const std::string& other : all) {
    const std::vector<float> values = floats_of(other);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  return sum;
}

// I5: sum y + mean(ew) + es = sum mean(x), element by element. The mean state is (mean(ew), es).
Status telescopes(const std::shared_ptr<Comm>& comm, const std::string& json,
                  const std::vector<uint64_t>& counts, int calls) {
  SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, counts));
  Tensors t(counts);
  RandomBits random(static_cast<uint32_t>(comm->rank()) + 1);
  std::vector<double> want, got;
  for (int call = 0; call < calls; ++call) {
    t.fill(&random);
    SOTTO_TRY(reduce(*codec, t));
    const std::vector<float> y = Tensors::flat(t.y);
    SOTTO_TRY(expect_same(*comm, bytes_of(y)));
    SOTTO_ASSIGN(const std::vector<double> sum, total(*comm, Tensors::flat(t.x)));
    want.resize(y.size());
    got.resize(y.size());
    for (size_t i = 0; i < y.size(); ++i) {
      want[i] += sum[i] / comm->size();
      got[i] += y[i];
    }
  }
  if (comm->size() > 1) {
    SOTTO_ASSIGN(const MeanErrorFeedback mean, codec->mean());
    for (size_t i = 0; i < got.size(); ++i) got[i] += double{mean.worker[i]} + mean.server[i];
  }
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::abs(got[i] - want[i]) > 3e-5)
      return error(Code::kInternal, "{}: element {} of {}: {} for {}", json, i, want.size(), got[i],
                   want[i]);
  }
  return ok_status();
}

class CodecTest : public ::testing::TestWithParam<std::string> {};

TEST_P(CodecTest, TelescopesWithResidual) {
  const Status status =
      run_world(world_of(GetParam(), 3), [](const std::shared_ptr<Comm>& comm) -> Status {
        for (const std::string& json : kWithResidual)
          SOTTO_TRY(telescopes(comm, json, {0, 1, 7, 8, 9, 1023, 1025, 20001}, 3));
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(CodecSizes, TelescopesAtEveryWorldSize) {
  for (const int32_t size : {1, 2, 4, 7, 8}) {
    const Status status =
        run_world(world_of("inproc", size), [](const std::shared_ptr<Comm>& comm) -> Status {
          for (const std::string& json : kWithResidual) {
            for (const uint64_t n : {0u, 1u, 9u, 1025u}) SOTTO_TRY(telescopes(comm, json, {n}, 2));
            SOTTO_TRY(telescopes(comm, json, {1023, 0, 20001, 7}, 2));
          }
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << size << ": " << status.text();
  }
}

TEST(CodecSizes, TelescopesAtAMillionElements) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_TRY(telescopes(
            comm, R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 200000})",
            {1000003}, 2));
        SOTTO_TRY(telescopes(comm, R"({"type": "fp16", "residual": true})", {1000003}, 2));
        return telescopes(comm, R"({"type": "int8"})", {1000003}, 2);
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Results and residuals of three calls, of all ranks, as text that can be compared.
Result<std::string> fingerprint(WorldOptions world, const std::string& json) {
  const std::vector<uint64_t> counts = {5000, 3, 0, 40001};
  std::mutex mutex;
  std::map<int32_t, std::string> by_rank;
  const Status ran = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, counts));
    Tensors t(counts);
    RandomBits random(static_cast<uint32_t>(comm->rank()) + 1);
    std::string all;
    for (int call = 0; call < 3; ++call) {
      t.fill(&random);
      SOTTO_TRY(reduce(*codec, t));
      all += bytes_of(Tensors::flat(t.y));
    }
    SOTTO_ASSIGN(const Codec::Snapshot s, codec->snapshot());
    all += bytes_of(s.residual.worker) + bytes_of(s.residual.server);
    std::lock_guard lock(mutex);
    by_rank[comm->rank()] = all;
    return ok_status();
  });
  SOTTO_TRY(ran);
  std::string text;
  for (const auto& [rank, bytes] : by_rank) text += bytes;
  return text;
}

TEST(CodecBits, AreEqualHoweverItIsRun) {
  for (const std::string& json : kCodecs) {
    SCOPED_TRACE(json);
    const Result<std::string> want = fingerprint(world_of("inproc", 3), json);
    ASSERT_TRUE(want.ok()) << want.status().text();
    const auto same = [&](const WorldOptions& world, const char* what) {
      const Result<std::string> got = fingerprint(world, json);
      ASSERT_TRUE(got.ok()) << what << ": " << got.status().text();
      EXPECT_TRUE(*got == *want) << what;
    };
    for (const char* kind : {"tcp", "device_memory", "ordered_async"})
      same(world_of(kind, 3), kind);
    WorldOptions small = world_of("inproc", 3);
    small.params.segment_bytes = 8192;
    same(small, "small segments");
    for (const SimdLevel level : {SimdLevel::kScalar, SimdLevel::kSse4}) {
      WorldOptions world = world_of("inproc", 3);
      world.device = [level](int32_t) { return std::make_shared<CpuDevice>(3, level); };
      same(world, "three threads, other kernels");
    }
  }
}

// Without residual a call is a function of its input; the error of a block is that of two
// encodings.
TEST(CodecBits, WithoutResidualCallsAreIndependentAndWithinTheBound) {
  const Status status =
      run_world(world_of("inproc", 4), [](const std::shared_ptr<Comm>& comm) -> Status {
        for (const auto& [json, step] : kWithoutResidual) {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, {3001}));
          Tensors t({3001});
          RandomBits random(static_cast<uint32_t>(comm->rank()) + 1);
          t.fill(&random);
          SOTTO_TRY(reduce(*codec, t));
          const std::vector<float> first = t.y[0];
          SOTTO_TRY(reduce(*codec, t));
          if (t.y[0] != first) return error(Code::kInternal, "{}: the second call differs", json);
          SOTTO_ASSIGN(const std::vector<double> sum, total(*comm, t.x[0]));
          float largest = 0;
          for (const float v : t.x[0]) largest = std::max(largest, std::fabs(v));
          SOTTO_ASSIGN(const std::vector<std::string> all,
                       comm->exchange(std::string(reinterpret_cast<char*>(&largest), 4)));
          for (const std::string& other : all) largest = std::max(largest, floats_of(other)[0]);
          for (size_t i = 0; i < first.size(); ++i) {
            const double off = std::abs(first[i] - sum[i] / comm->size());
            if (off > 2.1 * step * largest)
              return error(Code::kInternal, "{}: element {} is off by {}", json, i, off);
          }
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

uint64_t chunk_of(uint64_t n, uint64_t align, uint64_t ranks) {
  return align * ((n + align * ranks - 1) / (align * ranks));
}

TEST_P(CodecTest, BytesEqualTheFormulaAndThePlan) {
  const Status status =
      run_world(world_of(GetParam(), 4), [](const std::shared_ptr<Comm>& comm) -> Status {
        const uint64_t n = 30001;
        const std::map<std::string, uint64_t> chunk_bytes = {
            {R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 9000})",
             3 * chunk_of(9000, 512, 4) / 8 + chunk_of(3001, 512, 4) / 8},
            {R"({"type": "fp16"})", chunk_of(n, 512, 4) * 2},
            {R"({"type": "int8"})", chunk_of(n, 512, 4) / 256 * 260},
            {R"({"type": "int4", "residual": false})", chunk_of(n, 512, 4) / 128 * 68},
        };
        std::map<std::string, uint64_t> bytes;
        for (const auto& [json, chunk] : chunk_bytes) bytes[json] = 2 * 3 * chunk;
        // 7 blocks, and 1329 elements of which 21 are sent.
        bytes[R"({"type": "topk"})"] = 3 * (7 * 84 + (21 * 5 + 7) / 8 + (21 + 41 + 7) / 8 + 6 + 4);
        bytes[R"({"type": "topk", "dense_below": 30002})"] = 3 * 4 * n;
        // Two blocks each, of which servers send 256 elements, and 83 of the last one.
        bytes[R"({"type": "topk", "exchange": "two_phase"})"] =
            comm->rank() == 3 ? 6 * 84 + 3 * (260 + 42 + 21 + 21 + 4) : 5 * 84 + 32 + 3 * 2 * 260;
        for (const auto& [json, formula] : bytes) {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, {n}));
          Tensors t({n});
          SOTTO_TRY(comm->barrier());
          const CommCounters before = comm->counters();
          SOTTO_TRY(reduce(*codec, t));
          const CommCounters after = comm->counters();
          SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan, codec->plan({0}));
          const uint64_t sent = after.moved.payload_bytes_sent - before.moved.payload_bytes_sent;
          const uint64_t planned = after.payload_bytes_planned - before.payload_bytes_planned;
          if (sent != formula || planned != sent ||
              plan->plan().traffic.total.payload_bytes_sent != sent)
            return error(Code::kInternal, "{}: sent {}, planned {}, formula {}", json, sent,
                         planned, formula);
          const uint64_t header = after.moved.header_bytes_sent - before.moved.header_bytes_sent;
          if (header != after.header_bytes_planned - before.header_bytes_planned)
            return error(Code::kInternal, "{}: headers are not as planned", json);
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// A value that is not finite, anywhere: NONFINITE everywhere, nothing written, server residual
// exactly and worker residual to one rounding as before.
TEST_P(CodecTest, NonfiniteInputChangesNothingAnywhere) {
  const Status status =
      run_world(world_of(GetParam(), 3), [](const std::shared_ptr<Comm>& comm) -> Status {
        const uint64_t n = 25000;
        for (const std::string& json : kWithResidual) {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, {n}));
          Tensors t({n});
          RandomBits random(static_cast<uint32_t>(comm->rank()) + 7);
          t.fill(&random);
          SOTTO_TRY(reduce(*codec, t));
          for (const uint64_t at : {uint64_t{0}, n / 2, n - 1}) {
            SOTTO_ASSIGN(const Codec::Snapshot before, codec->snapshot());
            const std::vector<float> y = t.y[0];
            t.fill(&random);
            if (comm->rank() == 1) t.x[0][at] = at == 0 ? std::nanf("") : -INFINITY;
            const Status met = reduce(*codec, t);
            if (met.code() != Code::kNonfinite || met.text().find("rank 1") == std::string::npos)
              return error(Code::kInternal, "{}: status is {}", json, met.text());
            if (t.y[0] != y) return error(Code::kInternal, "{}: y was written", json);
            SOTTO_ASSIGN(const Codec::Snapshot after, codec->snapshot());
            if (after.residual.server != before.residual.server)
              return error(Code::kInternal, "{}: the server residual changed", json);
            for (uint64_t i = 0; i < n; ++i) {
              const double off = double{after.residual.worker[i]} - before.residual.worker[i];
              if (std::abs(off) > 2e-6)
                return error(Code::kInternal, "{}: worker residual {} is off by {}", json, i, off);
            }
          }
          t.fill(&random);
          SOTTO_TRY(reduce(*codec, t));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Sums that overflow at a server although every input is finite: NONFINITE, and the residual of
// the servers, which may be the cause, starts again, so that it cannot happen for ever.
TEST_P(CodecTest, SumsThatOverflowResetTheServers) {
  const Status status =
      run_world(world_of(GetParam(), 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        // The square of the first one is no float, the second one no bfloat16.
        for (const auto& [json, large] :
             {std::pair(kWithResidual[0], 1e30f), std::pair(kWithResidual[7], 3.4e38f)}) {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, {20000}));
          Tensors t({20000});
          RandomBits random(static_cast<uint32_t>(comm->rank()) + 7);
          t.fill(&random);
          SOTTO_TRY(reduce(*codec, t));
          SOTTO_ASSIGN(Codec::Snapshot s, codec->snapshot());
          const std::vector<float> worker = s.residual.worker;
          if (comm->rank() == 1) s.residual.server[3] = large;
          SOTTO_TRY(codec->restore(s, true));
          const std::vector<float> y = t.y[0];
          const Status met = reduce(*codec, t);
          if (met.code() != Code::kNonfinite ||
              met.text().find("sums at rank 1") == std::string::npos)
            return error(Code::kInternal, "{}: status is {}", json, met.text());
          if (t.y[0] != y) return error(Code::kInternal, "{}: y was written", json);
          SOTTO_ASSIGN(const Codec::Snapshot after, codec->snapshot());
          for (const float e : after.residual.server) {
            if (e != 0) return error(Code::kInternal, "{}: the server residual was kept", json);
          }
          for (size_t i = 0; i < worker.size(); ++i) {
            if (std::abs(after.residual.worker[i] - worker[i]) > 2e-6)
              return error(Code::kInternal, "{}: the worker residual changed", json);
          }
          SOTTO_TRY(reduce(*codec, t));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(CodecTest, ADifferentCodecIsAProtocolErrorEverywhere) {
  for (const auto& pair : std::vector<std::pair<std::string, std::string>>{
           {kWithResidual[4], kWithResidual[5]},
           {kWithResidual[4], R"({"type": "int8", "residual": false})"},
           {kWithResidual[0], kWithResidual[1]},
           {kWithResidual[2], kWithResidual[3]},
           {kWithResidual[6], R"({"type": "topk", "block": 256, "k": 17})"},
           {kWithResidual[6], R"({"type": "topk", "block": 256, "k": 16, "error_decay": 0.5})"},
           {kWithResidual[7], R"({"type": "topk", "block": 64, "k": 8})"},
           {kWithResidual[7],
            R"({"type": "topk", "block": 64, "k": 8, "exchange": "two_phase", "k_server": 32})"},
           {R"({"type": "onebit", "chunk_align": 24})",
            R"({"type": "onebit", "mode": "compat"})"}}) {
    const auto &mine = pair.first, &other = pair.second;
    std::atomic<int> protocol{0};
    const Status status =
        run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> codec,
                       make_codec(comm, comm->rank() == 2 ? other : mine, {3000}));
          Tensors t({3000});
          if (reduce(*codec, t).code() == Code::kProtocol) ++protocol;
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << status.text();
    EXPECT_EQ(protocol.load(), 3) << mine << " and " << other;
  }
}

TEST(CodecState, ContinuesBitForBitAndRefusesWhatDoesNotFit) {
  const Status status =
      run_world(world_of("inproc", 3), [](const std::shared_ptr<Comm>& comm) -> Status {
        for (const std::string& json : kCodecs) {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> one, make_codec(comm, json, {9001, 5}));
          SOTTO_ASSIGN(const std::shared_ptr<Codec> two, make_codec(comm, json, {9001, 5}));
          Tensors a({9001, 5}), b({9001, 5});
          RandomBits random(static_cast<uint32_t>(comm->rank()) + 7);
          for (int call = 0; call < 2; ++call) {
            a.fill(&random);
            SOTTO_TRY(reduce(*one, a));
          }
          SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*one, StateMode::kExact));
          SOTTO_TRY(import_state(*two, StateMode::kExact, blob));
          a.fill(&random);
          b.x = a.x;
          for (size_t t = 0; t < 2; ++t) b.in[t] = b.x[t].data();
          SOTTO_TRY(reduce(*one, a));
          SOTTO_TRY(reduce(*two, b));
          if (a.y != b.y) return error(Code::kInternal, "{}: the copy goes another way", json);
          SOTTO_ASSIGN(const std::shared_ptr<Codec> other,
                       make_codec(comm, R"({"type": "int8", "block": 32})", {9001, 5}));
          const Status refused = import_state(*other, StateMode::kExact, blob);
          if (refused.code() != Code::kInvalidArgument)
            return error(Code::kInternal, "{}: import gives {}", json, refused.text());
          SOTTO_TRY(import_state(*other, StateMode::kReset, blob));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// The mean state restores on another number of ranks, and in another codec: by I5 nothing is lost
// but the detail per rank.
TEST(CodecState, TheMeanRestoresOnAnotherWorldSize) {
  const std::vector<uint64_t> counts = {20001, 0, 7};
  for (const auto& [before, after] :
       std::vector<std::pair<int32_t, int32_t>>{{4, 3}, {2, 1}, {3, 4}}) {
    std::vector<std::byte> blob;
    std::vector<float> worker, server;
    Status status =
        run_world(world_of("inproc", before), [&](const std::shared_ptr<Comm>& comm) -> Status {
          SOTTO_ASSIGN(const std::shared_ptr<Codec> codec,
                       make_codec(comm, kWithResidual[0], counts));
          Tensors t(counts);
          RandomBits random(static_cast<uint32_t>(comm->rank()) + 7);
          t.fill(&random);
          SOTTO_TRY(reduce(*codec, t));
          SOTTO_ASSIGN(const std::vector<std::byte> mine, export_state(*codec, StateMode::kMean));
          SOTTO_TRY(expect_same(
              *comm, std::string(reinterpret_cast<const char*>(mine.data()), mine.size())));
          SOTTO_ASSIGN(const MeanErrorFeedback mean, codec->mean());
          if (comm->rank() != 0) return ok_status();
          blob = mine;
          worker = mean.worker;
          server = mean.server;
          return ok_status();
        });
    ASSERT_TRUE(status.ok()) << status.text();
    status = run_world(world_of("inproc", after), [&](const std::shared_ptr<Comm>& comm) -> Status {
      for (const std::string& json :
           {kWithResidual[0], kWithResidual[4], kWithResidual[6], kWithResidual[7]}) {
        SOTTO_ASSIGN(const std::shared_ptr<Codec> codec, make_codec(comm, json, counts));
        SOTTO_TRY(import_state(*codec, StateMode::kMean, blob));
        SOTTO_ASSIGN(const MeanErrorFeedback mean, codec->mean());
        for (size_t i = 0; i < worker.size(); ++i) {
          // Of top-k gathered there are no servers, so their errors are the workers'.
          const bool served = json != kWithResidual[6];
          const float moved = served ? 0.0f : server[i];
          if (std::abs(mean.worker[i] - (worker[i] + moved)) > 1e-6 ||
              mean.server[i] != server[i] - moved)
            return error(Code::kInternal, "element {} was not restored", i);
        }
        if (import_state(*codec, StateMode::kExact, blob).code() != Code::kInvalidArgument)
          return error(Code::kInternal, "a mean state was taken as an exact one");
      }
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << before << " -> " << after << ": " << status.text();
  }
}

TEST(CodecSettings, AllOfTheListsAreAllowed) {
  for (const std::string& json : kCodecs) EXPECT_TRUE(parse_codec(json).ok()) << json;
}

// Encoders of the last section do not execute before `open` is called: they stand behind an event
// of a third lane, which is held.
class SlowEncoder final : public Device {
 public:
  explicit SlowEncoder(uint32_t last_scale) : last_scale_(last_scale), inner_(options()) {
    caps_ = inner_.caps();
    caps_.lanes = 2;
    inner_.hold(2);
    (void)inner_.copy(2, &word_, &word_, 4, nullptr, 0);
    event_ = inner_.record(2).take();
  }
  ~SlowEncoder() override { open(); }
  void open() { inner_.resume(2); }

  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t bytes) override { return inner_.alloc(bytes); }
  void free(void* memory, uint64_t bytes) override { inner_.free(memory, bytes); }
  Status launch(uint32_t lane, const KernelCall& call,
                std::span<const DiscardedRange> discarded) override {
    if (call.id == KernelId::kOnebitEncode && call.pieces.front().scale == last_scale_)
      SOTTO_TRY(inner_.wait(lane, event_));
    return inner_.launch(lane, call, discarded);
  }
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override {
    return inner_.copy(lane, dst, src, bytes, predicate, expect);
  }
  Result<EventId> record(uint32_t lane) override { return inner_.record(lane); }
  Status wait(uint32_t lane, EventId event) override { return inner_.wait(lane, event); }
  Result<bool> query(EventId event) override { return inner_.query(event); }
  void release(EventId event) override { inner_.release(event); }
  Result<EventId> record_stream(void* s) override { return inner_.record_stream(s); }
  Status stream_after_event(void* s, EventId e) override { return inner_.stream_after_event(s, e); }
  Result<BlockId> block_stream(void* s) override { return inner_.block_stream(s); }
  void unblock(BlockId block) override { inner_.unblock(block); }
  Status unblock_behind(uint32_t lane, BlockId block) override {
    return inner_.unblock_behind(lane, block);
  }
  uint64_t busy_ns() const override { return inner_.busy_ns(); }

 private:
  static AsyncDeviceOptions options() {
    AsyncDeviceOptions o;
    o.lanes = 3;
    return o;
  }
  const uint32_t last_scale_;
  uint32_t word_ = 0;
  AsyncDevice inner_;
  DeviceCaps caps_;
  EventId event_ = 0;
};

// Section by section: all others have gone both ways while the last one is not even encoded.
TEST(CodecOverlap, EarlierBucketsArriveBeforeTheLastIsEncoded) {
  for (const char* kind : {"inproc", "ordered"}) {
    WorldOptions world = world_of(kind, 2);
    std::map<int32_t, std::shared_ptr<SlowEncoder>> devices;
    std::mutex mutex;
    world.device = [&](int32_t rank) -> std::shared_ptr<Device> {
      std::lock_guard lock(mutex);
      return devices[rank] = std::make_shared<SlowEncoder>(4);
    };
    const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
      const uint64_t n = 5 * 16384;
      SOTTO_ASSIGN(
          const std::shared_ptr<Codec> codec,
          make_codec(comm,
                     R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 16384})",
                     {n}));
      Tensors t({n});
      RandomBits random(static_cast<uint32_t>(comm->rank()) + 7);
      t.fill(&random);
      SOTTO_ASSIGN(const OpRef op, codec->all_reduce(t.in, t.out, {}));
      // Four sections, twice, each a chunk of 8192 bits from one peer. On a transport that matches
      // by order the second exchange of the fourth waits for the first of the fifth.
      const uint64_t sections = std::string(kind) == "ordered" ? 7 : 8;
      const uint64_t want = sections * 1024;
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (comm->counters().moved.payload_bytes_received < want) {
        if (std::chrono::steady_clock::now() > until)
          return error(Code::kInternal, "{} of {} bytes have arrived",
                       comm->counters().moved.payload_bytes_received, want);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (op->done()) return error(Code::kInternal, "the last section was encoded");
      devices.at(comm->rank())->open();
      return comm->engine().wait(op, -1);
    });
    EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, CodecTest, ::testing::ValuesIn(world_kinds()), name_of);

}  // namespace
}  // namespace sotto::test
