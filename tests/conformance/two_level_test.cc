// An all-reduce on two levels in one plan, of the emitters that plain collectives are built of: to
// the first rank of every group, between these, and back. On every kind of world.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/base/hash.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"

namespace sotto::test {
namespace {

// Groups of neighbours, `width` of each.
std::vector<RankGroup> groups_of(int32_t size, int32_t width) {
  std::vector<RankGroup> groups;
  for (int32_t r = 0; r < size; ++r) {
    if (r % width == 0) groups.emplace_back();
    groups.back().push_back(r);
  }
  return groups;
}

Result<LogicalPlan> two_level(const Comm& comm, const std::vector<RankGroup>& groups,
                              uint64_t count, Dtype dtype) {
  PlanBuilder b;
  const uint64_t bytes[] = {count * dtype_bytes(dtype)};
  const uint32_t in = b.bound_list(bytes);
  const uint32_t out = b.bound_list(bytes);
  CollectiveRequest request;
  request.counts = {count};
  request.dtypes = {dtype};
  request.segment_bytes = comm.sizes().segment_bytes;
  const auto level = [&](const std::vector<RankGroup>& ranks, OpKind kind, bool in_place) {
    return b.within(ranks, comm.rank(), [&](int32_t rank, int32_t size) {
      CollectiveRequest of_group = request;
      of_group.kind = kind;
      of_group.rank = rank;
      of_group.size = size;
      of_group.in_place = {static_cast<uint8_t>(in_place)};
      return emit_collective(b, of_group, {in_place ? out : in, out});
    });
  };
  RankGroup leaders;
  for (const RankGroup& group : groups) leaders.push_back(group[0]);
  SOTTO_TRY(level(groups, OpKind::kReduce, false));
  SOTTO_TRY(level({leaders}, OpKind::kAllReduce, true));
  SOTTO_TRY(level(groups, OpKind::kBroadcast, true));
  return b.take();
}

// Runs the plan as an operation, and compares what was sent with what it says.
template <class T>
Status run_two_level(Comm& comm, const std::vector<RankGroup>& groups, const std::vector<T>& in,
                     std::vector<T>& out, Dtype dtype) {
  SOTTO_ASSIGN(LogicalPlan logical, two_level(comm, groups, in.size(), dtype));
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan,
               comm.prepare(std::move(logical), comm.context()->device()));
  OpSignature signature;
  signature.kind = OpKind::kAllReduce;
  signature.count = in.size();
  const PeerTraffic planned = plan->plan().traffic.total;
  const TransferCounters before = comm.counters().moved;
  const auto bind = [&](Run& run) {
    run.bases[0] = const_cast<T*>(in.data());
    run.bases[1] = out.data();
  };
  SOTTO_TRY(comm.finish(comm.launch(plan, signature, bind, nullptr, {})));
  const TransferCounters after = comm.counters().moved;
  const uint64_t payload = after.payload_bytes_sent - before.payload_bytes_sent;
  const uint64_t header = after.header_bytes_sent - before.header_bytes_sent;
  if (payload == planned.payload_bytes_sent &&
      header == planned.header_bytes_sent + planned.metadata_bytes_sent)
    return ok_status();
  return error(Code::kInternal, "sent {} and {}; planned {} and {}", payload, header,
               planned.payload_bytes_sent, planned.header_bytes_sent);
}

std::vector<float> floats_of(int32_t rank, uint64_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank) + 7);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

// The sum in the order of the two levels: of each group in rank order, then of these.
std::vector<float> reference(const std::vector<RankGroup>& groups, uint64_t count) {
  std::vector<float> sum;
  for (const RankGroup& group : groups) {
    std::vector<float> part;
    for (const int32_t rank : group) {
      const std::vector<float> values = floats_of(rank, count);
      if (part.empty()) part.assign(count, 0.0f);
      for (uint64_t i = 0; i < count; ++i)
        part[i] = rank == group[0] ? values[i] : part[i] + values[i];
    }
    if (sum.empty()) {
      sum = part;
      continue;
    }
    for (uint64_t i = 0; i < count; ++i) sum[i] += part[i];
  }
  return sum;
}

class TwoLevels : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {};

TEST_P(TwoLevels, AllRanksHaveTheSumInTheOrderOfTheLevels) {
  const auto& [kind, size] = GetParam();
  std::vector<uint64_t> counts = {1, 1000, 70'001};
  if (kind == "inproc" || kind == "tcp") counts.push_back(1'000'003);
  const Status status = run_world(world_of(kind, size), [&](const std::shared_ptr<Comm>& comm) {
    for (const int32_t width : {2, 3}) {
      const std::vector<RankGroup> groups = groups_of(comm->size(), width);
      for (const uint64_t count : counts) {
        const std::vector<float> mine = floats_of(comm->rank(), count);
        const std::vector<float> expected = reference(groups, count);
        for (int again = 0; again < 2; ++again) {
          std::vector<float> out(count, -1.0f);
          SOTTO_TRY(run_two_level(*comm, groups, mine, out, Dtype::kF32));
          if (out != expected)
            return error(Code::kInternal, "{} elements in groups of {}: wrong sum", count, width);
        }
      }
    }
    // The comm's numbers and rounds are those of all ranks.
    return comm->barrier();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_TRUE(take_ordered_violations().empty());
}

// Ranks of no group have an operation without messages, and the next one fits.
TEST_P(TwoLevels, RanksOfNoGroupTakePartInTheOperationAlone) {
  const auto& [kind, size] = GetParam();
  const Status status = run_world(world_of(kind, size), [&](const std::shared_ptr<Comm>& comm) {
    std::vector<RankGroup> groups = groups_of(comm->size() - 1, 2);
    for (RankGroup& group : groups) std::ranges::reverse(group);
    const bool idle = comm->rank() == comm->size() - 1;
    std::vector<uint32_t> mine(500, 1u << comm->rank()), out(500, 77);
    SOTTO_TRY(run_two_level(*comm, groups, mine, out, Dtype::kU32));
    const uint32_t expected = idle ? 77 : (1u << (comm->size() - 1)) - 1;
    if (out != std::vector<uint32_t>(500, expected))
      return error(Code::kInternal, "{} instead of {}", out[0], expected);
    if (idle && comm->counters().moved.messages_sent != 0)
      return error(Code::kInternal, "a rank of no group has sent something");
    return comm->barrier();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_TRUE(take_ordered_violations().empty());
}

INSTANTIATE_TEST_SUITE_P(Worlds, TwoLevels,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(4, 5)),
                         [](const auto& instance) {
                           return std::get<0>(instance.param) + "_" +
                                  std::to_string(std::get<1>(instance.param));
                         });

}  // namespace
}  // namespace sotto::test
