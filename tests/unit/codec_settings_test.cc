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
      {"{}", "codec.type: missing; write one of onebit|1bit|bf16|fp16|int8|int4"},
      {R"({"type": "int9"})", "codec.type: found \"int9\", allowed is one of onebit|"},
      {R"({"type": 8})", "codec.type: found 8"},
      {R"({"type": "int8", "blocks": 64})", "codec.blocks: unknown key; the nearest one is block"},
      {R"({"type": "int8", "scale": "l2"})", "codec.scale: a key of onebit; allowed here are"},
      {R"({"type": "int8", "block": 100})", "codec.block: found 100, allowed is 32, 64, 128"},
      {R"({"type": "int8", "block": 1024})", "codec.block: found 1024"},
      {R"({"type": "int4", "chunk_align": 64})", "codec.chunk_align: found 64, allowed is a mult"},
      {R"({"type": "int4", "residual": 1})", "codec.residual: found 1, allowed is true or false"},
      {R"({"type": "bf16", "block": 64})", "codec.block: a key of int8, int4"},
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
}

}  // namespace
}  // namespace sotto::test
