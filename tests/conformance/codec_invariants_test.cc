// Invariants I3, I4, I6, I7 and I8 of the 1-bit all-reduce (specification 1.8) at every
// granularity, call after call.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/codec/codec.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

const std::vector<uint64_t> kCounts = {1000, 0, 20001, 7, 9000};
constexpr uint64_t kElements = 30008;
constexpr uint64_t kBucket = 8192;

struct Form {
  const char* name;
  const char* json;
  bool l1;
  std::vector<uint64_t> instances;  // elements of each, in order
};

std::vector<Form> forms() {
  const std::vector<uint64_t> flat = {kElements}, tensors = {1000, 20001, 7, 9000},
                              buckets = {kBucket, kBucket, kBucket, kElements - 3 * kBucket};
  return {
      {"flat", R"({"type": "onebit"})", false, flat},
      {"flat_l1", R"({"type": "onebit", "scale": "l1"})", true, flat},
      {"tensor", R"({"type": "onebit", "granularity": "tensor"})", false, tensors},
      {"tensor_l1", R"({"type": "onebit", "granularity": "tensor", "scale": "l1"})", true, tensors},
      {"bucket", R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192})", false,
       buckets},
      {"bucket_l1",
       R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192, "scale": "l1"})",
       true, buckets},
  };
}

struct Call {
  std::vector<float> y;
  ErrorFeedback after;
};

Result<std::shared_ptr<Codec>> make(const std::shared_ptr<Comm>& comm, const Form& form) {
  return Codec::create(comm, form.json, kCounts, std::vector<Dtype>(kCounts.size(), Dtype::kF32));
}

// x: all tensors, one after the other.
Result<Call> all_reduce(Codec& codec, std::vector<float> x) {
  Call call;
  call.y.resize(x.size());
  std::vector<void*> in, out;
  uint64_t at = 0;
  for (const uint64_t count : kCounts) {
    in.push_back(x.data() + at);
    out.push_back(call.y.data() + at);
    at += count;
  }
  SOTTO_ASSIGN(const OpRef op, codec.all_reduce(in, out, {}));
  SOTTO_TRY(codec.comm()->engine().wait(op, -1));
  SOTTO_ASSIGN(const Codec::Snapshot s, codec.snapshot());
  call.after = s.residual;
  return call;
}

std::vector<float> inputs(int32_t rank, int call, float factor) {
  std::mt19937 random(static_cast<uint32_t>(100 * call + rank));
  std::normal_distribution<float> normal;
  std::vector<float> x(kElements);
  for (uint64_t i = 0; i < kElements; ++i)
    x[i] = factor * (normal(random) + 0.1f * static_cast<float>(i % 5));
  return x;
}

class CodecInvariants : public ::testing::TestWithParam<Form> {};

// I4, I6: of what each worker encodes, c = x + e. I3: a chunk of the result has one magnitude.
TEST_P(CodecInvariants, NormsOfWhatIsSentAndOfWhatIsOwed) {
  const Form& form = GetParam();
  const Status status =
      run_world(world_of("inproc", 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_ASSIGN(const auto codec, make(comm, form));
        std::vector<float> e(kElements, 0.0f);
        for (int k = 0; k < 4; ++k) {
          const std::vector<float> x = inputs(comm->rank(), k, 1);
          SOTTO_ASSIGN(const Call call, all_reduce(*codec, x));
          uint64_t at = 0;
          for (const uint64_t count : form.instances) {
            double sum = 0, squares = 0, sent = 0, owed = 0;
            for (uint64_t i = at; i < at + count; ++i) {
              const double c = double{x[i]} + e[i], left = call.after.worker[i];
              sum += std::abs(c);
              squares += c * c;
              sent += (c - left) * (c - left);
              owed += left * left;
            }
            const uint64_t chunk = 512 * ((count + 3 * 512 - 1) / (3 * 512));
            for (uint64_t i = 0; i < count; ++i) {
              if (std::abs(call.y[at + i]) != std::abs(call.y[at + i / chunk * chunk]))
                return error(Code::kInternal, "call {}: another magnitude at {}", k, at + i);
            }
            at += count;
            const double rho = sum / std::sqrt(static_cast<double>(count) * squares);
            const double want_sent = form.l1 ? rho * rho * squares : squares;
            const double want_owed = form.l1 ? (1 - rho * rho) * squares : 2 * (1 - rho) * squares;
            if (std::abs(sent - want_sent) > 4e-6 * squares)
              return error(Code::kInternal, "call {}: sent {}, want {}", k, sent, want_sent);
            if (std::abs(owed - want_owed) > 4e-6 * squares)
              return error(Code::kInternal, "call {}: owed {}, want {}", k, owed, want_owed);
          }
          e = call.after.worker;
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// I7: a power of two times the input is that power times everything.
TEST_P(CodecInvariants, PowersOfTwoScaleEverything) {
  const Form& form = GetParam();
  const Status status =
      run_world(world_of("inproc", 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
        for (const float factor : {0x1p-20f, 0x1p7f}) {
          SOTTO_ASSIGN(const auto plain, make(comm, form));
          SOTTO_ASSIGN(const auto scaled, make(comm, form));
          for (int k = 0; k < 3; ++k) {
            SOTTO_ASSIGN(const Call a, all_reduce(*plain, inputs(comm->rank(), k, 1)));
            SOTTO_ASSIGN(const Call b, all_reduce(*scaled, inputs(comm->rank(), k, factor)));
            const auto equal = [&](const std::vector<float>& p, const std::vector<float>& q) {
              for (size_t i = 0; i < p.size(); ++i) {
                if (p[i] * factor != q[i]) return false;
              }
              return p.size() == q.size();
            };
            if (!equal(a.y, b.y) || !equal(a.after.worker, b.after.worker) ||
                !equal(a.after.server, b.after.server))
              return error(Code::kInternal, "call {} times {}", k, factor);
          }
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// I8: one magnitude per rank and instance, equal signs: nothing is lost.
TEST_P(CodecInvariants, EqualMagnitudesAndSignsAreLossless) {
  const Form& form = GetParam();
  const Status status =
      run_world(world_of("inproc", 4), [&](const std::shared_ptr<Comm>& comm) -> Status {
        SOTTO_ASSIGN(const auto codec, make(comm, form));
        for (int k = 0; k < 3; ++k) {
          std::vector<float> x(kElements), want(kElements);
          for (uint64_t i = 0; i < kElements; ++i) {
            const float sign = (i * 7 + static_cast<uint64_t>(k)) % 3 == 0 ? -1.0f : 1.0f;
            x[i] = sign * 0.25f * static_cast<float>(comm->rank() + 1);
            want[i] = sign * 0.625f;
          }
          SOTTO_ASSIGN(const Call call, all_reduce(*codec, x));
          if (call.y != want) return error(Code::kInternal, "call {}: not the mean", k);
          for (const auto* errors : {&call.after.worker, &call.after.server}) {
            for (const float value : *errors) {
              if (value != 0.0f) return error(Code::kInternal, "call {}: error {}", k, value);
            }
          }
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Forms, CodecInvariants, ::testing::ValuesIn(forms()),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace sotto::test
