// The stand-alone 1-bit all-reduce: vectors 13.1 and 13.2, invariants I2, I5,
// non-finite input, wire volume.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/codec/codec.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"

namespace sotto::test {
namespace {

Status reduce(Codec& codec, std::vector<float>& x, std::vector<float>& y) {
  SOTTO_ASSIGN(const OpRef op, codec.all_reduce({x.data()}, {y.data()}, {}));
  return codec.comm()->engine().wait(op, -1);
}

Status expect_near(const char* what, float got, double want) {
  if (std::abs(got - want) <= 2e-6 * std::abs(want) + 2e-7) return ok_status();
  return error(Code::kInternal, "{} is {:.9g}, want {:.9g}", what, got, want);
}

class OnebitCodecTest : public ::testing::TestWithParam<std::string> {};

TEST_P(OnebitCodecTest, Vector131) {
  const Status status =
      run_world(world_of(GetParam(), 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_ASSIGN(
            const std::shared_ptr<Codec> codec,
            Codec::create(comm, R"({"type": "1bit", "chunk_align": 8})", {16}, {Dtype::kF32}));
        std::vector<float> x(16), y(16);
        for (size_t i = 0; i < 16; ++i)
          x[i] = comm->rank() == 0 ? (i < 8 ? 2.0f : -2.0f) : (i % 2 == 0 ? 1.0f : -1.0f);
        const double even[3][2] = {
            {1.118034, -1.118034}, {1.3333657, 1.3333657}, {1.8893286, -1.8893286}};
        const double odd[3][2] = {
            {1.118034, -1.118034}, {-1.3333657, -1.3333657}, {1.8893286, -1.8893286}};
        const double server[3][4] = {{0.381966, -0.618034, 0.618034, -0.381966},
                                     {0.5486003, 1.2153317, -1.2153317, -0.5486003},
                                     {0.1592716, -0.1739970, 0.1739970, -0.1592716}};
        for (int call = 0; call < 3; ++call) {
          SOTTO_TRY(reduce(*codec, x, y));
          for (size_t i = 0; i < 16; ++i) {
            SOTTO_TRY(expect_near("y", y[i], (i % 2 == 0 ? even : odd)[call][i / 8]));
          }
          SOTTO_ASSIGN(const Codec::Snapshot s, codec->snapshot());
          for (size_t i = 0; i < 8; ++i) {
            SOTTO_TRY(expect_near("es", s.residual.server[i],
                                  server[call][comm->rank() * 2 + static_cast<int>(i % 2)]));
          }
          for (float e : s.residual.worker) {
            if (e != 0.0f) return error(Code::kInternal, "worker error is {}, want exactly 0", e);
          }
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(OnebitCodecTest, Vector132) {
  const Status status =
      run_world(world_of(GetParam(), 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_ASSIGN(
            const std::shared_ptr<Codec> codec,
            Codec::create(comm, R"({"type": "1bit", "chunk_align": 8})", {5}, {Dtype::kF32}));
        std::vector<float> x = comm->rank() == 0 ? std::vector<float>{1, -2, 3, -4, 0}
                                                 : std::vector<float>{2, 2, -1, -1, 1};
        std::vector<float> y(5);
        SOTTO_TRY(reduce(*codec, x, y));
        const double sign1[] = {1, -1, 1, -1, 1};
        const double sign2[] = {-1, 1, -1, -1, -1};
        const double worker[2][5] = {{-1.4494898, 0.4494898, 0.5505102, -1.5505102, -2.4494898},
                                     {0.5167603, 0.5167603, 0.4832397, 0.4832397, -0.4832397}};
        const double server[] = {0.412879, 1.0703607, -1.0703607, -0.412879, 0.412879, 0, 0, 0};
        SOTTO_ASSIGN(const Codec::Snapshot s, codec->snapshot());
        for (size_t i = 0; i < 5; ++i) {
          SOTTO_TRY(expect_near("y 1", y[i], 1.5534858 * sign1[i]));
          SOTTO_TRY(expect_near("ew", s.residual.worker[i], worker[comm->rank()][i]));
        }
        for (size_t i = 0; i < 8; ++i) {
          SOTTO_TRY(expect_near("es", s.residual.server[i], comm->rank() == 0 ? server[i] : 0.0));
        }
        SOTTO_TRY(reduce(*codec, x, y));
        for (size_t i = 0; i < 5; ++i) SOTTO_TRY(expect_near("y 2", y[i], 1.3072019 * sign2[i]));
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// The same in mode compat: padding has error feedback and counts in the scales.
TEST_P(OnebitCodecTest, Vector132Compat) {
  const Status status =
      run_world(world_of(GetParam(), 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_ASSIGN(
            const std::shared_ptr<Codec> codec,
            Codec::create(comm, R"({"type": "onebit", "mode": "compat"})", {5}, {Dtype::kF32}));
        const bool first = comm->rank() == 0;
        std::vector<float> x =
            first ? std::vector<float>{1, -2, 3, -4, 0} : std::vector<float>{2, 2, -1, -1, 1};
        std::vector<float> y(5);
        SOTTO_TRY(reduce(*codec, x, y));
        const double sign1[] = {1, -1, 1, -1, 1};
        const double sign2[] = {1, 1, -1, -1, -1};
        const double worker[] = {-0.3693064, -0.6306936, 1.6306936, -2.6306936, -1.3693064};
        const double server[] = {0.1377391, 0.6914171, -0.6914171, -0.1377391,
                                 0.1377391, 0.1377391, 0.1377391,  0.1377391};
        SOTTO_ASSIGN(const Codec::Snapshot s, codec->snapshot());
        if (s.residual.worker.size() != 16)
          return error(Code::kInternal, "{} worker errors", s.residual.worker.size());
        for (size_t i = 0; i < 5; ++i) SOTTO_TRY(expect_near("y 1", y[i], 0.9614922 * sign1[i]));
        for (size_t i = 0; i < 16; ++i) {
          const float e = s.residual.worker[i];
          if (first) SOTTO_TRY(expect_near("ew", e, worker[std::min<size_t>(i, 4)]));
          if (!first && i >= 5) SOTTO_TRY(expect_near("ew", e, -0.8291562));
        }
        // Chunk 1 is padding: the same value everywhere is sent without an error.
        for (size_t i = 0; i < 8; ++i)
          SOTTO_TRY(expect_near("es", s.residual.server[i], first ? server[i] : 0.0));
        SOTTO_TRY(reduce(*codec, x, y));
        for (size_t i = 0; i < 5; ++i) SOTTO_TRY(expect_near("y 2", y[i], 1.5119597 * sign2[i]));
        // A saved codec goes on bit for bit, padding included.
        SOTTO_ASSIGN(const Codec::Snapshot saved, codec->snapshot());
        std::vector<float> want(5), got(5);
        SOTTO_TRY(reduce(*codec, x, want));
        SOTTO_TRY(codec->restore(saved, true));
        SOTTO_TRY(reduce(*codec, x, got));
        return got == want ? ok_status() : error(Code::kInternal, "restored: another result");
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Telescoping (I5) and equal results on all ranks (I2), over odd sizes and several
// tensors.
Status telescoping(const std::shared_ptr<Comm>& comm, const char* json,
                   const std::vector<uint64_t>& counts) {
  SOTTO_ASSIGN(const std::shared_ptr<Codec> codec,
               Codec::create(comm, json, counts, std::vector<Dtype>(counts.size(), Dtype::kF32)));
  RandomBits random(static_cast<uint32_t>(comm->rank()) + 1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> x, y;
  std::vector<void*> in, out;
  uint64_t n = 0;
  for (uint64_t count : counts) {
    x.emplace_back(count);
    y.emplace_back(count);
    n += count;
  }
  for (size_t t = 0; t < counts.size(); ++t) {
    in.push_back(x[t].data());
    out.push_back(y[t].data());
  }
  std::vector<double> sum_x(n), sum_y(n);
  for (int call = 0; call < 6; ++call) {
    uint64_t at = 0;
    for (auto& tensor : x) {
      for (float& value : tensor) sum_x[at++] += value = normal(random);
    }
    SOTTO_ASSIGN(const OpRef op, codec->all_reduce(in, out, {}));
    SOTTO_TRY(comm->engine().wait(op, -1));
    at = 0;
    std::string bytes;
    for (const auto& tensor : y) {
      for (float value : tensor) sum_y[at++] += value;
      bytes.append(reinterpret_cast<const char*>(tensor.data()), tensor.size() * 4);
    }
    SOTTO_ASSIGN(const std::vector<std::string> all, comm->exchange(bytes));
    for (const std::string& other : all) {
      if (other != bytes)
        return error(Code::kInternal, "results differ between ranks in call {}", call);
    }
  }
  // Everybody contributes sum_x + ... ; the sum over ranks needs one more exchange of doubles.
  SOTTO_ASSIGN(const Codec::Snapshot s, codec->snapshot());
  std::vector<double> local(n);
  for (uint64_t i = 0; i < n; ++i) local[i] = (sum_x[i] - s.residual.worker[i]) / comm->size();
  std::vector<float> server(s.residual.server);
  SOTTO_ASSIGN(const std::vector<std::string> all_local,
               comm->exchange(std::string(reinterpret_cast<const char*>(local.data()), n * 8)));
  SOTTO_ASSIGN(
      const std::vector<std::string> all_server,
      comm->exchange(std::string(reinterpret_cast<const char*>(server.data()), server.size() * 4)));
  const bool flat = std::string_view(json).find("tensor") == std::string_view::npos;
  for (uint64_t i = 0; flat && i < n; ++i) {
    double want = 0;
    for (const std::string& blob : all_local) {
      double v;
      std::memcpy(&v, blob.data() + i * 8, 8);
      want += v;
    }
    float es;
    std::memcpy(&es, all_server[i / server.size()].data() + (i % server.size()) * 4, 4);
    if (std::abs(sum_y[i] + es - want) > 2e-5) {
      return error(Code::kInternal, "element {}: sum y + es = {}, sum mean(x) - mean(ew) = {}", i,
                   sum_y[i] + es, want);
    }
  }
  return ok_status();
}

TEST_P(OnebitCodecTest, TelescopesAtOddSizes) {
  for (int32_t size : {2, 3, 4}) {
    const Status status =
        run_world(world_of(GetParam(), size), [](const std::shared_ptr<Comm>& comm) -> Status {
          SOTTO_TRY(telescoping(comm, R"({"type": "1bit"})", {1}));
          SOTTO_TRY(telescoping(comm, R"({"type": "1bit", "chunk_align": 8})", {7, 0, 1025, 9}));
          SOTTO_TRY(telescoping(comm, R"({"type": "1bit", "scale": "l1"})", {70001}));
          SOTTO_TRY(telescoping(comm, R"({"type": "onebit", "mode": "compat"})", {7, 0, 1025, 9}));
          SOTTO_TRY(telescoping(
              comm, R"({"type": "onebit", "mode": "compat", "granularity": "tensor"})", {7, 1025}));
          return telescoping(comm, R"({"type": "1bit", "granularity": "tensor", "chunk_align": 8})",
                             {7, 9000, 1025, 3, 30001});
        });
    EXPECT_TRUE(status.ok()) << size << ": " << status.text();
  }
}

TEST_P(OnebitCodecTest, NonfiniteInputChangesNothingAnywhere) {
  const Status status =
      run_world(world_of(GetParam(), 3), [](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_ASSIGN(
            const std::shared_ptr<Codec> codec,
            Codec::create(comm, R"({"type": "1bit", "chunk_align": 8})", {1000}, {Dtype::kF32}));
        std::vector<float> x(1000), y(1000, 42.0f);
        for (size_t i = 0; i < x.size(); ++i)
          x[i] = static_cast<float>(i % 17) - 8 + static_cast<float>(comm->rank());
        SOTTO_TRY(reduce(*codec, x, y));
        SOTTO_ASSIGN(const Codec::Snapshot before, codec->snapshot());
        const std::vector<float> y_before = y;
        if (comm->rank() == 1) x[501] = std::numeric_limits<float>::quiet_NaN();
        const Status met = reduce(*codec, x, y);
        if (met.code() != Code::kNonfinite)
          return error(Code::kInternal, "status is {}", code_name(met.code()));
        if (met.text().find("rank 1") == std::string::npos)
          return error(Code::kInternal, "text: {}", met.text());
        if (y != y_before) return error(Code::kInternal, "y was written");
        SOTTO_ASSIGN(const Codec::Snapshot after, codec->snapshot());
        if (after.residual.server != before.residual.server)
          return error(Code::kInternal, "server residual changed");
        for (size_t i = 0; i < x.size(); ++i) {
          const float e = before.residual.worker[i];
          const float x_finite = std::isfinite(x[i]) ? x[i] : 0.0f;
          const float c = x_finite + e;
          if (after.residual.worker[i] != c - x_finite)
            return error(Code::kInternal, "worker residual {} changed", i);
        }
        x[501] = 1.0f;
        return reduce(*codec, x, y);
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(OnebitCodecTest, BytesEqualTheFormulaAndThePlan) {
  const Status status =
      run_world(world_of(GetParam(), 4), [](const std::shared_ptr<Comm>& comm) -> Status {
        const uint64_t n = 300001;
        SOTTO_ASSIGN(const std::shared_ptr<Codec> codec,
                     Codec::create(comm, R"({"type": "1bit"})", {n}, {Dtype::kF32}));
        std::vector<float> x(n, 1.0f), y(n);
        SOTTO_TRY(comm->barrier());
        const CommCounters before = comm->counters();
        SOTTO_TRY(reduce(*codec, x, y));
        const CommCounters after = comm->counters();
        const uint64_t chunk = 512 * ((n + 4 * 512 - 1) / (4 * 512));
        const uint64_t want = 2 * 3 * chunk / 8;
        const uint64_t sent = after.moved.payload_bytes_sent - before.moved.payload_bytes_sent;
        const uint64_t planned = after.payload_bytes_planned - before.payload_bytes_planned;
        if (sent != want || planned != want)
          return error(Code::kInternal, "sent {}, planned {}, formula {}", sent, planned, want);
        const uint64_t header = after.moved.header_bytes_sent - before.moved.header_bytes_sent;
        const uint64_t header_planned = after.header_bytes_planned - before.header_bytes_planned;
        if (header != header_planned)
          return error(Code::kInternal, "header bytes {}, planned {}", header, header_planned);
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OnebitCodecTest, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace sotto::test
