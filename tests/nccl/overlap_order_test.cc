// Buckets of an overlap and collectives that ranks, which are processes, do not mark and call in
// one order: PROTOCOL, whichever bucket it is, although NCCL would wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/nccl/device_floats.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr size_t kN = 5000, kBuckets = 4;
constexpr int64_t kLimitUs = 20'000'000;

// Rank 0 calls an all-reduce in front of bucket TEST_AT, all others behind the last one.
SOTTO_RANK_MAIN(nccl_overlap_order) {
  const uint64_t at =
      self.rank == 0 ? std::strtoull(std::getenv("TEST_AT"), nullptr, 10) : kBuckets;
  Rank r(self, kLimitUs);
  ok(r.created, "sotto_comm_create");
  {
    DeviceFloats x(kBuckets * kN, 1), sum(100, 1);
    std::vector<sotto_buffer> gradients(kBuckets, x.buffer(kN));
    for (size_t i = 0; i < kBuckets; ++i)
      gradients[i].data = static_cast<float*>(gradients[i].data) + i * kN;
    sotto_overlap* overlap = nullptr;
    OK(sotto_overlap_create(r.comm, R"({"bucket_bytes": 20000, "order": "registered"})",
                            gradients.data(), kBuckets, &overlap));
    const sotto_call call = x.call();
    sotto_op *op = nullptr, *other = nullptr;
    OK(sotto_overlap_begin(overlap, &call, &op));
    const sotto_buffer b = sum.buffer();
    sotto_status status = SOTTO_OK;
    for (uint64_t i = 0; i <= kBuckets && status == SOTTO_OK; ++i) {
      if (i == at) status = sotto_all_reduce(r.comm, &b, &b, 1, &call, &other);
      if (i < kBuckets && status == SOTTO_OK)
        status = sotto_overlap_ready(overlap, &i, nullptr, 1, call.stream);
    }
    if (status == SOTTO_OK) (void)sotto_overlap_finish(overlap);
    for (sotto_op* each : {op, other}) {
      if (each == nullptr) continue;
      (void)sotto_op_wait(each, -1);
      OK(sotto_op_release(each));
    }
    const char* text = nullptr;
    const sotto_status failed = sotto_comm_error(r.comm, &text);
    self.say(std::string(sotto_status_name(failed)) + ": " + (failed == SOTTO_OK ? "" : text));
    OK(sotto_overlap_destroy(overlap));
  }
  (void)sotto_comm_destroy(r.comm);  // says again why it has failed
  OK(sotto_context_destroy(r.context));
  return 0;
}

class NcclOverlapOrder : public testing::TestWithParam<size_t> {};

TEST_P(NcclOverlapOrder, IsTheSameOnAllRanks) {
  for (const int size : {2, 3}) {
    const TempDir directory;
    Processes ranks("nccl_overlap_order", size,
                    {.argument = directory.path(),
                     .environment = {"SOTTO_TRANSPORT=nccl", "FAKE_NCCL_MISMATCH=hang",
                                     "TEST_AT=" + std::to_string(GetParam())}});
    for (int rank = 0; rank < size; ++rank) {
      const std::string text = ranks.message(rank);
      if (GetParam() == kBuckets) {
        EXPECT_EQ(text, "OK: ");
      } else {
        EXPECT_THAT(text, AllOf(HasSubstr("PROTOCOL"), HasSubstr("20000 elements"),
                                HasSubstr("100 elements")));
      }
    }
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

INSTANTIATE_TEST_SUITE_P(Bucket, NcclOverlapOrder, testing::Range<size_t>(0, kBuckets + 1),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace sotto::test
