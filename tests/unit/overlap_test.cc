// Buckets and marks of an overlap, and its settings.
#include <gtest/gtest.h>

#include <vector>

#include "core/config/overlap_section.h"
#include "core/overlap/buckets.h"
#include "core/overlap/marks.h"
#include "core/overlap/work.h"
#include "core/plan/builder.h"
#include "tests/support/lowering.h"

namespace sotto::test {
namespace {

std::vector<OverlapTensor> floats(const std::vector<uint64_t>& counts) {
  std::vector<OverlapTensor> out;
  for (const uint64_t count : counts) out.push_back({count, Dtype::kF32, nullptr});
  return out;
}

std::vector<OverlapBucket> cut(const std::vector<OverlapTensor>& tensors,
                               const OverlapConfig& config) {
  return cut_buckets(tensors, launch_order(tensors.size(), config.order), config);
}

using Lists = std::vector<std::vector<uint32_t>>;

Lists lists_of(const std::vector<OverlapTensor>& tensors, const OverlapConfig& config) {
  Lists out;
  for (const OverlapBucket& bucket : cut(tensors, config)) out.push_back(bucket.tensors);
  return out;
}

TEST(OverlapBuckets, EndWithTheGradientThatFillsThem) {
  OverlapConfig config;
  config.first_bucket_bytes = 40;
  config.bucket_bytes = 100;
  const std::vector<OverlapTensor> tensors = floats({10, 20, 5, 5, 10, 3});
  EXPECT_EQ(lists_of(tensors, config), (Lists{{5, 4}, {3, 2, 1}, {0}}));
  config.order = OverlapOrder::kRegistered;
  EXPECT_EQ(lists_of(tensors, config), (Lists{{0}, {1, 2}, {3, 4, 5}}));
  const std::vector<OverlapBucket> buckets = cut(tensors, config);
  EXPECT_EQ(buckets[0].bytes, 40u);
  EXPECT_EQ(buckets[1].bytes, 100u);
  EXPECT_EQ(buckets[2].bytes, 72u);
}

TEST(OverlapBuckets, HaveTypesTogetherAndEmptyGradients) {
  OverlapConfig config;
  config.order = OverlapOrder::kRegistered;
  const std::vector<OverlapTensor> tensors{{4, Dtype::kF32, nullptr},
                                           {4, Dtype::kF16, nullptr},
                                           {0, Dtype::kF32, nullptr},
                                           {4, Dtype::kF16, nullptr}};
  const Lists lists = lists_of(tensors, config);
  ASSERT_EQ(lists.size(), 1u);
  std::vector<Dtype> types;
  for (const uint32_t t : lists[0]) types.push_back(tensors[t].dtype);
  EXPECT_EQ(types[0], types[1]);
  EXPECT_EQ(types[2], types[3]);
  EXPECT_NE(types[1], types[2]);
}

class Marks : public ::testing::Test {
 protected:
  std::vector<OverlapBucket> buckets{{{0, 1}, 8}, {{2}, 4}};
  RoundMarks marks{buckets, 3};
};

TEST_F(Marks, CompleteBuckets) {
  const uint64_t all[] = {0, 1, 2};
  EXPECT_EQ(marks.missing(), 3u);
  ASSERT_TRUE(marks.claim(all, 1).ok());
  EXPECT_EQ(marks.missing(), 0u);
  EXPECT_EQ(marks.mark(1), std::nullopt);
  EXPECT_EQ(marks.mark(2), std::optional<uint32_t>(1));
  EXPECT_EQ(marks.mark(0), std::optional<uint32_t>(0));
  marks.reset();
  EXPECT_EQ(marks.missing_ones(), (std::vector<uint64_t>{0, 1, 2}));
}

TEST_F(Marks, RememberTheirOrder) {
  const uint64_t first[] = {2}, wrong[] = {1, 2}, then[] = {1, 0};
  ASSERT_TRUE(marks.claim(first, 1).ok());
  EXPECT_FALSE(marks.claim(wrong, 1).ok());
  ASSERT_TRUE(marks.claim(then, 1).ok());
  EXPECT_EQ(marks.order(), (std::vector<uint32_t>{2, 1, 0}));
  marks.give_up(then);
  EXPECT_EQ(marks.order(), (std::vector<uint32_t>{2}));
  marks.reset();
  EXPECT_TRUE(marks.order().empty());
}

TEST_F(Marks, RefuseAllOrNothing) {
  const uint64_t out_of_range[] = {0, 3};
  EXPECT_EQ(marks.claim(out_of_range, 5).text(), "indices[1] is 3; allowed: 0 to 2");
  const uint64_t twice[] = {1, 2, 1};
  EXPECT_EQ(marks.claim(twice, 5).text(), "indices[2]: gradient 1 is named twice");
  const uint64_t one[] = {1};
  ASSERT_TRUE(marks.claim(one, 5).ok());
  const uint64_t again[] = {0, 1};
  EXPECT_EQ(marks.claim(again, 5).text(),
            "indices[1]: gradient 1 has been marked before in round 5");
  EXPECT_EQ(marks.missing_ones(), (std::vector<uint64_t>{0, 2}));
  marks.give_up(one);
  EXPECT_EQ(marks.missing(), 3u);
}

// Early is what needs gradients, and none of the last bucket; padding needs none at all.
TEST(RoundTraffic, CountsWhatIsEarly) {
  DeviceCaps device;
  device.host_memory = true;
  TransportCaps transport;
  for (const size_t buckets : {1u, 2u}) {
    PlanBuilder b;
    const uint32_t first = b.bound(64), last = b.bound(64), padding = b.scratch(64);
    b.fill({padding, 0, 64}, 0);
    if (buckets == 2) b.await({&first, 1});
    b.await({&last, 1});
    b.send(1, {padding, 0, 8}, 0);
    if (buckets == 2) b.send(1, {first, 0, 16}, 1);
    b.send(1, {last, 0, 32}, 2);
    const auto plan = lower_for(b.take(), device, transport, Matching::kByKey, 2);
    ASSERT_TRUE(plan.ok()) << plan.status().text();
    EXPECT_EQ(RoundTraffic::of(**plan, buckets).early_payload_bytes, buckets == 2 ? 16u : 0u);
  }
}

TEST(OverlapSettings, HaveDefaults) {
  const Result<OverlapConfig> c = parse_overlap("{}");
  ASSERT_TRUE(c.ok()) << c.status().text();
  EXPECT_EQ(c->first_bucket_bytes, 1048576u);
  EXPECT_EQ(c->bucket_bytes, 26214400u);
  EXPECT_EQ(c->order, OverlapOrder::kReversed);
  EXPECT_EQ(c->unused, OverlapUnused::kError);
  EXPECT_FALSE(c->wire.has_value());
}

TEST(OverlapSettings, AreRead) {
  const Result<OverlapConfig> c = parse_overlap(
      R"({"first_bucket_bytes": 5, "bucket_bytes": 7e3, "order": "Registered", "unused": "zero", "wire": "bf16"})");
  ASSERT_TRUE(c.ok()) << c.status().text();
  EXPECT_EQ(c->first_bucket_bytes, 5u);
  EXPECT_EQ(parse_overlap(R"({"bucket_bytes": 5000})")->first_bucket_bytes, 5000u);
  EXPECT_EQ(c->bucket_bytes, 7000u);
  EXPECT_EQ(c->order, OverlapOrder::kRegistered);
  EXPECT_EQ(c->unused, OverlapUnused::kZero);
  EXPECT_EQ(c->wire, Dtype::kBF16);
}

TEST(OverlapSettings, WithMistakesAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"[]", "overlap: found [], allowed is an object"},
      {"{", "overlap: the description is no JSON"},
      {R"({"wire": "fp16", "wire": "fp16"})",
       "overlap: the key wire is there twice; leave one of them out"},
      {R"({"bucket_byte": 1})",
       "overlap.bucket_byte: unknown key; the nearest one is bucket_bytes, allowed are "
       "first_bucket_bytes, bucket_bytes, order, unused, codec, wire"},
      {R"({"bucket_bytes": 0})", "overlap.bucket_bytes: found 0, allowed is a whole number >= 1"},
      {R"({"order": "random"})",
       "overlap.order: found \"random\", allowed is one of reversed|registered|observed"},
      {R"({"unused": true})", "overlap.unused: found true, allowed is one of error|zero"},
      {R"({"codec": "int9"})",
       "overlap.codec.type: found \"int9\", allowed is one of "
       "onebit|1bit|bf16|fp16|int8|int4|topk"},
      {R"({"codec": {"type": "int8", "block": 33}})",
       "overlap.codec.block: found 33, allowed is 32, 64, 128, 256, 512"},
      {R"({"codec": {"type": "onebit", "mode": "compat"}})",
       "overlap.codec.mode: found compat, which is the 1-bit optimizers' published arithmetic; "
       "allowed here is strict"},
      {R"({"codec": "int8", "wire": "fp16"})",
       "overlap.wire: the codec says what gradients are on the wire; leave one of them out"},
      {R"({"wire": "int8"})", "overlap.wire: found \"int8\", allowed is one of fp32|fp16|bf16"},
  };
  for (const auto& [json, text] : cases) {
    const Result<OverlapConfig> c = parse_overlap(json);
    EXPECT_EQ(c.status().code(), Code::kInvalidArgument) << json;
    EXPECT_EQ(c.status().text(), text) << json;
  }
}

}  // namespace
}  // namespace sotto::test
