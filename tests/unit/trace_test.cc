// The time line by itself; tests/conformance/trace_test.cc has those of runs.
#include "core/engine/trace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

std::string written(const Trace& trace, const std::string& prefix) {
  const Status status = trace.write();
  EXPECT_TRUE(status.ok()) << status.text();
  std::ostringstream text;
  text << std::ifstream(prefix + ".rank0.json").rdbuf();
  return text.str();
}

TEST(Trace, SpansHaveAnyLength) {
  const TempDir directory;
  Trace trace(directory.path() + "/a");
  trace.operation(0, 1, "all_reduce", 1, 2);
  trace.span("all", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  EXPECT_NE(written(trace, directory.path() + "/a").find("\"dur\": 18446744073709552"),
            std::string::npos);
}

TEST(Trace, SaysWhatItLeavesOut) {
  constexpr int kKept = 1 << 10;
  const TempDir directory;
  Trace trace(directory.path() + "/a", kKept);
  for (int i = 0; i < kKept + 3; ++i) trace.span("a", i, i + 1);
  for (int i = 0; i < kKept + 2; ++i)
    trace.operation(i == 0 ? 0 : 1, static_cast<uint64_t>(i), "b", i, i + 1);
  const std::string text = written(trace, directory.path() + "/a");
  EXPECT_NE(text.find("rank 0 (5 later events left out)"), std::string::npos)
      << text.substr(text.size() - 200);
}

}  // namespace
}  // namespace sotto::test
