// Settings of codecs: errors that name what is wrong, and defaults.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/config/codec.h"

namespace sotto::test {
namespace {

TEST(CodecSettings, NamesWhatIsWrong) {
  const auto text = [](const char* json) { return parse_codec(json).status().text(); };
  const std::map<const char*, const char*> errors = {
      {"[", "no JSON"},
      {"[]", "found [], allowed is an object"},
      {"{}", "codec.type: missing; write one of onebit|1bit|bf16|fp16|int8|int4|topk"},
      {R"({"type": "int9"})", "codec.type: found \"int9\", allowed is one of onebit|"},
      {R"({"type": 8})", "codec.type: found 8"},
      {R"({"type": "int8", "blocks": 64})", "codec.blocks: unknown key; the nearest one is block"},
      {R"({"type": "int8", "scale": "l2"})", "codec.scale: a key of onebit; allowed here are"},
      {R"({"type": "int8", "block": 100})", "codec.block: found 100, allowed is 32, 64, 128"},
      {R"({"type": "int8", "block": 1024})", "codec.block: found 1024"},
      {R"({"type": "int4", "chunk_align": 64})", "codec.chunk_align: found 64, allowed is a mult"},
      {R"({"type": "int4", "residual": 1})", "codec.residual: found 1, allowed is true or false"},
      {R"({"type": "bf16", "block": 64})", "codec.block: a key of int8, int4, topk"},
      {R"({"type": "topk", "chunk_align": 8})", "codec.chunk_align: a key of onebit, bf16, fp16"},
      {R"({"type": "topk", "residual": true})", "codec.residual: a key of bf16, fp16, int8, int4"},
      {R"({"type": "topk", "k": 0})", "codec.k: found 0, allowed is a whole number in [1, 4096]"},
      {R"({"type": "topk", "k": 65, "block": 64})",
       "codec.k: found k 65 with block 64, allowed is k from 1 to block"},
      {R"({"type": "topk", "block": 4})", "codec.block: found 4, allowed is a whole number in [8"},
      {R"({"type": "topk", "block": 100})",
       "codec.block: found 100, allowed is a power of two from 8 to 4096"},
      {R"({"type": "topk", "bits": 3})", "codec.bits: found 3, allowed is 2, 4, 8, 32"},
      {R"({"type": "topk", "bits": 1})", "codec.bits: found 1, allowed is 2, 4, 8, 32"},
      {R"({"type": "topk", "error_decay": 1.5})", "codec.error_decay: found 1.5, allowed is a num"},
      {R"({"type": "topk", "index": "rice"})",
       "codec.index: found \"rice\", allowed is one of ef|p"},
      {R"({"type": "topk", "exchange": "ring"})", "allowed is one of gather|two_phase"},
      {R"({"type": "topk", "average": "all"})", "allowed is one of ranks|contributors"},
      {R"({"type": "topk", "alone": "encode"})", "allowed is one of identity"},
      {R"({"type": "topk", "shape": "tile"})", "allowed is one of flat"},
      {R"({"type": "topk", "levels": "tensor"})", "allowed is one of block"},
      {R"({"type": "topk", "k_server": 4})",
       "codec.k_server: found 4 with exchange gather, which has no servers"},
      {R"({"type": "topk", "k_server": 4097})", "codec.k_server: found 4097, allowed is a whole n"},
      {R"({"type": "topk", "k_server": 127, "exchange": "two_phase"})",
       "codec.k_server: found 127 with k 64 and block 4096, allowed is 0 or 128 to 4096"},
      {R"({"type": "topk", "block": 64, "k": 40, "k_server": 63, "exchange": "two_phase"})",
       "codec.k_server: found 63 with k 40 and block 64, allowed is 0 or 64 to 64"},
      {R"({"type": "topk", "median_clip": true, "exchange": "two_phase"})",
       "codec.median_clip: found true with exchange two_phase, allowed is false"},
      {R"({"type": "topk", "median_clip": 1})", "codec.median_clip: found 1, allowed is true or f"},
      {R"({"type": "topk", "blok": 8})", "codec.blok: unknown key; the nearest one is block"},
      {R"({"type": "onebit", "residual": false})", "codec.residual: a key of bf16, fp16"},
      {R"({"type": "onebit", "granularity": "group"})", "flat|tensor|bucket"},
      {R"({"type": "onebit", "bucket_elements": 9216})", "belongs to granularity bucket"},
      {R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8})", "8192"},
      {R"({"type": "onebit", "chunk_align": 12})", "multiple of 8"},
      {R"({"type": "onebit", "chunk_align": -8})", "codec.chunk_align: found -8"},
      {R"({"type": "onebit", "mode": "compat", "granularity": "bucket"})", "allowed is flat, tens"},
      {R"({"type": "onebit", "mode": "compat", "chunk_align": 8})", "remove the key"},
      {R"({"type": "onebit", "mode": "published"})", "allowed is one of strict|compat"},
  };
  for (const auto& [json, want] : errors)
    EXPECT_NE(text(json).find(want), std::string::npos) << json << ": " << text(json);
  EXPECT_EQ(text(R"({"type": "int8", "block": 64, "block": 128})"),
            "codec: the key block is there twice; leave one of them out");
  EXPECT_EQ(parse_codec(R"({"type": "1bit"})")->kind, CodecKind::kOnebit);
  EXPECT_EQ(parse_codec(R"({"type": "int8"})")->block, 256u);
  EXPECT_EQ(parse_codec(R"({"type": "int4"})")->block, 128u);
  EXPECT_TRUE(parse_codec(R"({"type": "int4"})")->residual);
  EXPECT_FALSE(parse_codec(R"({"type": "fp16"})")->residual);
  const CodecSettings all = parse_codec(R"({"type": "topk", "block": 256, "k": 8, "bits": 4,
      "index": "packed", "error_decay": 0.5, "exchange": "gather", "k_server": 0,
      "average": "contributors", "dense_below": 100, "alone": "identity", "median_clip": true,
      "shape": "flat", "levels": "block"})")
                                .take();
  EXPECT_TRUE(all.residual);
  EXPECT_FALSE(all.server_residual());
  EXPECT_EQ(all.sparse.block, 256u);
  EXPECT_EQ(all.sparse.k, 8u);
  EXPECT_EQ(all.sparse.bits, 4u);
  EXPECT_EQ(all.sparse.index, SparseIndex::kPacked);
  EXPECT_EQ(all.sparse.average, SparseAverage::kContributors);
  EXPECT_EQ(all.sparse.error_decay, 0.5);
  EXPECT_EQ(all.sparse.dense_below, 100u);
  EXPECT_TRUE(all.sparse.median_clip);
  EXPECT_FALSE(parse_codec(R"({"type": "topk"})")->sparse.median_clip);
  // Whatever one of them is, ranks notice that it differs.
  for (const char* json : {R"({"type": "topk", "block": 256, "k": 8})", R"({"type": "topk"})"})
    EXPECT_NE(parse_codec(json)->terms(), all.terms());
  EXPECT_NE(parse_codec(R"({"type": "topk", "median_clip": true})")->terms(),
            parse_codec(R"({"type": "topk"})")->terms());
  const CodecSettings served = *parse_codec(R"({"type": "topk", "exchange": "two_phase"})");
  EXPECT_TRUE(served.server_residual());
  EXPECT_EQ(served.tensor_align(), 4096u);
  EXPECT_EQ(served.sparse.k_server, 0u);
  EXPECT_NE(served.terms(), parse_codec(R"({"type": "topk"})")->terms());
  EXPECT_NE(parse_codec(R"({"type": "topk", "exchange": "two_phase", "k_server": 128})")->terms(),
            served.terms());
}

// Specification sparse-loco, 6.2: what ranks may have sent together, or all where that is shorter.
TEST(CodecSettings, ServersSendWhatTheirRanksSendTogether) {
  const SparseSettings s = parse_codec(R"({"type": "topk", "exchange": "two_phase"})")->sparse;
  for (const auto& [ranks, k] : std::map<uint64_t, uint32_t>{
           {1, 64}, {2, 128}, {4, 256}, {31, 1984}, {32, 4096}, {64, 4096}, {1000, 4096}})
    EXPECT_EQ(server_settings(s, ranks).k, k) << ranks;
  SparseSettings given = s;
  given.k_server = 300;
  given.error_decay = 0.5;
  given.average = SparseAverage::kContributors;
  const SparseSettings server = server_settings(given, 8);
  EXPECT_EQ(server.k, 300u);
  EXPECT_EQ(server.error_decay, 1);
  EXPECT_EQ(server.average, SparseAverage::kRanks);
}

}  // namespace
}  // namespace sotto::test
