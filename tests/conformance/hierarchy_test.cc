// Collectives and averages of optimizers on two levels, against sums in the order of the levels: of
// each host in rank order, then of the hosts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <type_traits>

#include "core/plan/flat_reduce.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"

namespace sotto::test {
namespace {

using Hosts = std::vector<int32_t>;

WorldOptions world_on(const std::string& kind, const Hosts& hosts, const std::string& hierarchy) {
  WorldOptions world = world_of(kind, static_cast<int32_t>(hosts.size()));
  world.rank_params = [hosts, hierarchy](int32_t rank, Params* params) {
    params->host_id = fmt::format("host {}", hosts[static_cast<size_t>(rank)]);
    params->hierarchy = hierarchy;
  };
  return world;
}

std::vector<RankGroup> groups_of(const Hosts& hosts) {
  std::vector<RankGroup> groups(static_cast<size_t>(std::ranges::max(hosts)) + 1);
  for (size_t r = 0; r < hosts.size(); ++r)
    groups[static_cast<size_t>(hosts[r])].push_back(static_cast<int32_t>(r));
  return groups;
}

// ---- types ----

struct Bf16 {
  using Sum = float;
  static constexpr Dtype kDtype = Dtype::kBF16;
  uint16_t bits = 0;
  static Bf16 of(float x) { return {f32_to_bf16(x)}; }
  float value() const { return bf16_to_f32(bits); }
  bool operator==(const Bf16&) const = default;
};
template <class T>
struct Number {
  using Sum = T;
  static constexpr Dtype kDtype = std::is_same_v<T, float>     ? Dtype::kF32
                                  : std::is_same_v<T, int32_t> ? Dtype::kI32
                                                               : Dtype::kU8;
  T number = 0;
  static Number of(T x) { return {x}; }
  T value() const { return number; }
  bool operator==(const Number&) const = default;
};

// Sums and products of integers wrap around.
template <class Sum>
Sum combine(Sum a, Sum b, ReduceOp op) {
  if (op == ReduceOp::kMin) return std::min(a, b);
  if (op == ReduceOp::kMax) return std::max(a, b);
  if constexpr (std::is_integral_v<Sum>) {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<Sum>(op == ReduceOp::kProd ? x * y : op == ReduceOp::kBitOr ? x | y : x + y);
  } else {
    return op == ReduceOp::kProd ? a * b : a + b;
  }
}

// One level, rounded to the type at its end. A mean of integers is one of their exact sum.
template <class T>
std::vector<T> level(const std::vector<std::span<const T>>& rows, ReduceOp op) {
  using Sum = typename T::Sum;
  using Mean = std::conditional_t<std::is_integral_v<Sum>, int64_t, Sum>;
  std::vector<T> out;
  for (size_t i = 0; i < rows[0].size(); ++i) {
    if (op == ReduceOp::kMean) {
      Mean acc = rows[0][i].value();
      for (size_t r = 1; r < rows.size(); ++r) acc += rows[r][i].value();
      out.push_back(T::of(static_cast<Sum>(acc / static_cast<Mean>(rows.size()))));
    } else {
      Sum acc = rows[0][i].value();
      for (size_t r = 1; r < rows.size(); ++r) acc = combine(acc, rows[r][i].value(), op);
      out.push_back(T::of(acc));
    }
  }
  return out;
}

// Elements [first, first + count) of what every rank has.
template <class T>
std::vector<T> two_levels(const std::vector<RankGroup>& hosts,
                          const std::vector<std::vector<T>>& by_rank, ReduceOp op, uint64_t first,
                          uint64_t count) {
  std::vector<std::vector<T>> sums;
  for (const RankGroup& host : hosts) {
    std::vector<std::span<const T>> rows;
    for (const int32_t rank : host)
      rows.push_back(std::span(by_rank[static_cast<size_t>(rank)]).subspan(first, count));
    sums.push_back(level(rows, op));
  }
  return level(std::vector<std::span<const T>>(sums.begin(), sums.end()), op);
}

template <class T>
std::vector<T> values_of(int32_t rank, size_t tensor, uint64_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank) * 31 + static_cast<uint32_t>(tensor) + 7);
  std::vector<T> values;
  for (uint64_t i = 0; i < count; ++i) {
    if constexpr (std::is_integral_v<typename T::Sum>) {
      values.push_back(T::of(static_cast<typename T::Sum>(random())));
    } else {
      const auto x = static_cast<float>(static_cast<int32_t>(random())) * 1e-7f;
      values.push_back(T::of(x));
    }
  }
  return values;
}

// ---- calls ----

// One collective of several tensors, and what it has to bring.
template <class T>
class Work {
 public:
  Work(const Comm& comm, const std::vector<RankGroup>& hosts, OpKind kind, ReduceOp op,
       int32_t root, bool in_place, const std::vector<uint64_t>& counts)
      : comm_(comm), hosts_(hosts), in_place_(in_place) {
    CollectiveRequest& r = call_.request;
    r.kind = kind;
    r.reduce = op;
    r.rank = comm.rank();
    r.size = comm.size();
    r.root = root;
    r.counts = counts;
    r.dtypes.assign(counts.size(), T::kDtype);
    r.in_place.assign(counts.size(), in_place ? 1 : 0);
    const auto ranks = static_cast<uint64_t>(r.size), me = static_cast<uint64_t>(r.rank);
    for (size_t t = 0; t < counts.size(); ++t) {
      in_count_.push_back(counts[t] * (kind == OpKind::kReduceScatter ? ranks : 1));
      const uint64_t out_count = counts[t] * (kind == OpKind::kAllGather ? ranks : 1);
      std::vector<T> mine = values_of<T>(r.rank, t, in_count_[t]);
      out_.emplace_back(out_count, T());
      // What is not given is left alone.
      if (kind == OpKind::kBroadcast && r.rank != root) mine.clear();
      in_.push_back(std::move(mine));
      if (!in_place) continue;
      if (kind == OpKind::kAllGather) {
        std::ranges::copy(in_[t], out_[t].begin() + static_cast<int64_t>(me * counts[t]));
      } else if (kind != OpKind::kReduceScatter && !in_[t].empty()) {
        out_[t] = in_[t];
      }
    }
    for (size_t t = 0; t < counts.size(); ++t) {
      T* in = in_[t].data();
      T* out = out_[t].data();
      if (in_place && kind == OpKind::kReduceScatter) out = in + me * counts[t];
      if (in_place && kind == OpKind::kAllGather) in = out + me * counts[t];
      if (in_place && kind != OpKind::kReduceScatter && kind != OpKind::kAllGather) in = out;
      if (kind == OpKind::kReduce && r.rank != root) in = in_[t].data(), out = nullptr;
      call_.in.push_back(in);
      call_.out.push_back(out);
    }
  }

  Call& call() { return call_; }

  Status check() const {
    const CollectiveRequest& r = call_.request;
    if (r.kind == OpKind::kReduce && r.rank != r.root) return ok_status();
    for (size_t t = 0; t < r.counts.size(); ++t) {
      const std::vector<T> expected = expected_of(t);
      const T* const out = static_cast<const T*>(call_.out[t]);
      for (uint64_t i = 0; i < expected.size(); ++i) {
        if (std::memcmp(&out[i], &expected[i], sizeof(T)) != 0)
          return error(Code::kInternal, "kind {}, reduce {}, in place {}: tensor {} [{}] is wrong",
                       static_cast<int>(r.kind), static_cast<int>(r.reduce), in_place_, t, i);
      }
    }
    return ok_status();
  }

 private:
  std::vector<T> expected_of(size_t t) const {
    const CollectiveRequest& r = call_.request;
    std::vector<std::vector<T>> by_rank;
    for (int32_t rank = 0; rank < r.size; ++rank)
      by_rank.push_back(values_of<T>(rank, t, in_count_[t]));
    if (r.kind == OpKind::kBroadcast) return by_rank[static_cast<size_t>(r.root)];
    if (r.kind == OpKind::kAllGather) {
      std::vector<T> all;
      for (const std::vector<T>& values : by_rank)
        all.insert(all.end(), values.begin(), values.end());
      return all;
    }
    const bool scatters = r.kind == OpKind::kReduceScatter;
    const uint64_t first = scatters ? static_cast<uint64_t>(r.rank) * r.counts[t] : 0;
    return two_levels(hosts_, by_rank, r.reduce, first, r.counts[t]);
  }

  const Comm& comm_;
  const std::vector<RankGroup>& hosts_;
  const bool in_place_;
  Call call_;
  std::vector<uint64_t> in_count_;
  std::vector<std::vector<T>> in_, out_;
};

// Payload bytes to each peer so far.
std::vector<uint64_t> sent_by_peer(const Comm& comm) {
  std::vector<uint64_t> sent(static_cast<size_t>(comm.size()));
  const auto report = nlohmann::json::parse(comm.report_json("counters"));
  for (const auto& peer : report["peers"])
    sent[peer["rank"].get<size_t>()] = peer["payload_bytes_sent"].get<uint64_t>();
  return sent;
}

// Runs it, and compares the result, and what every pair has moved with the plan.
template <class T>
Status run_work(Comm& comm, Work<T> work) {
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan, comm.prepare({&work.call(), 1}));
  std::vector<uint64_t> planned = sent_by_peer(comm);
  for (size_t r = 0; r < planned.size(); ++r)
    planned[r] += plan->plan().traffic.peers[r].payload_bytes_sent;
  SOTTO_TRY(comm.finish(comm.start(work.call(), {})));
  if (sent_by_peer(comm) != planned)
    return error(Code::kInternal, "kind {}: other bytes than planned",
                 static_cast<int>(work.call().request.kind));
  return work.check();
}

// parts: of reduce-scatters and all-gathers, which have as many as ranks.
template <class T>
Status run_kinds(Comm& comm, const std::vector<RankGroup>& hosts, ReduceOp op,
                 const std::vector<uint64_t>& counts, const std::vector<uint64_t>& parts) {
  for (const bool in_place : {false, true}) {
    const auto run = [&](OpKind kind, int32_t root = 0) {
      const bool of_parts = kind == OpKind::kReduceScatter || kind == OpKind::kAllGather;
      return run_work(comm,
                      Work<T>(comm, hosts, kind, op, root, in_place, of_parts ? parts : counts));
    };
    SOTTO_TRY(run(OpKind::kAllReduce));
    SOTTO_TRY(run(OpKind::kReduceScatter));
    SOTTO_TRY(run(OpKind::kAllGather));
    const int32_t root = in_place ? 0 : comm.size() - 1;
    SOTTO_TRY(run(OpKind::kBroadcast, root));
    SOTTO_TRY(run(OpKind::kReduce, root));
  }
  return ok_status();
}

using F32 = Number<float>;
using I32 = Number<int32_t>;
using U8 = Number<uint8_t>;

Status all_kinds(Comm& comm, const std::vector<RankGroup>& hosts, bool large) {
  const std::vector<uint64_t> mixed{5, 0, 1000, 17, 301};
  SOTTO_TRY(run_kinds<F32>(comm, hosts, ReduceOp::kSum, mixed, mixed));
  SOTTO_TRY(run_kinds<I32>(comm, hosts, ReduceOp::kMin, {1}, {1}));
  SOTTO_TRY(run_kinds<U8>(comm, hosts, ReduceOp::kBitOr, mixed, mixed));
  if (large) {
    SOTTO_TRY(run_kinds<F32>(comm, hosts, ReduceOp::kSum, {70'001, 31}, {11'003, 3}));
    SOTTO_TRY(run_kinds<Bf16>(comm, hosts, ReduceOp::kMean, {1, 50'011}, {7'001}));
  }
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kProd, ReduceOp::kMean})
    SOTTO_TRY(run_work(comm, Work<I32>(comm, hosts, OpKind::kAllReduce, op, 0, false, {333})));
  // A group: operations with plans of two levels and of one.
  Work<F32> sum(comm, hosts, OpKind::kAllReduce, ReduceOp::kSum, 0, true, {900});
  Work<Bf16> all(comm, hosts, OpKind::kAllGather, ReduceOp::kSum, 0, false, {90});
  std::vector<Call> calls{sum.call(), all.call()};
  SOTTO_TRY(comm.finish(comm.start_group(calls, {})));
  SOTTO_TRY(sum.check());
  return all.check();
}

// ---- averages of optimizers ----

// A mean of tensors into one flat buffer; one element of rank 1 may be infinite. All ranks together
// raise the flags exactly then.
template <class T>
Status run_flat(Comm& comm, const std::vector<RankGroup>& hosts, const Levels& levels,
                bool in_place, bool infinite) {
  const std::vector<uint64_t> counts{3, 20'000, 1, 4'001};
  const std::vector<uint32_t> tensors{0, 1, 2, 3};
  const FlatLayout layout = FlatLayout::concatenated(counts, tensors);
  PlanBuilder b;
  FlatReduceRequest r;
  r.rank = comm.rank();
  r.size = comm.size();
  r.layout = &layout;
  r.dtype = T::kDtype;
  r.segment_bytes = comm.sizes().segment_bytes;
  r.held = comm.sizes().held;
  r.levels = &levels;
  r.in_place = in_place;
  std::vector<uint64_t> bytes;
  for (const uint64_t count : counts) bytes.push_back(count * sizeof(T));
  r.in_list = b.bound_list(bytes);
  r.out_flat = b.bound(flat_reduce_bytes(r));
  r.flags = b.bound(4);
  uint64_t at = 0;
  for (const uint32_t t : tensors) {
    if (in_place) b.alias(r.in_list + t, r.out_flat, at);
    at += bytes[t];
  }
  emit_flat_all_reduce(b, r);
  std::vector<std::vector<T>> by_rank(static_cast<size_t>(comm.size()));
  for (int32_t rank = 0; rank < comm.size(); ++rank) {
    std::vector<T>& all = by_rank[static_cast<size_t>(rank)];
    for (const uint32_t t : tensors) {
      const std::vector<T> values = values_of<T>(rank, t, counts[t]);
      all.insert(all.end(), values.begin(), values.end());
    }
    if (infinite && rank == 1) all[20'001] = T::of(HUGE_VALF);
  }
  std::vector<T> mine = by_rank[static_cast<size_t>(comm.rank())];
  std::vector<T> out = in_place ? mine : std::vector<T>(mine.size());
  uint32_t flags = 0;
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan,
               comm.prepare(b.take(), comm.context()->device()));
  OpSignature signature;
  signature.kind = OpKind::kAllReduce;
  const auto bind = [&](Run& run) {
    uint64_t first = 0;
    for (const uint32_t t : tensors) {
      run.bases[r.in_list + t] = mine.data() + first;
      first += counts[t];
    }
    run.bases[r.out_flat] = out.data();
    run.bases[r.flags] = &flags;
  };
  SOTTO_TRY(comm.finish(comm.launch(plan, signature, bind, nullptr, {})));
  if (out != two_levels(hosts, by_rank, ReduceOp::kMean, 0, out.size()))
    return error(Code::kInternal, "a mean of {} elements, in place {}, is wrong", out.size(),
                 in_place);
  SOTTO_ASSIGN(const std::vector<std::string> said, comm.exchange(flags != 0 ? "1" : "0"));
  if (std::ranges::count(said, "1") != (infinite ? 1 : 0))
    return error(Code::kInternal, "flags of {} ranks", std::ranges::count(said, "1"));
  return ok_status();
}

struct TestedWorld {
  const char* kind;
  Hosts hosts;
  bool large = false;  // more than fits into a message
};

class OnHosts : public testing::TestWithParam<TestedWorld> {};

TEST_P(OnHosts, ResultsAreThoseOfTheLevels) {
  const TestedWorld& w = GetParam();
  const std::vector<RankGroup> hosts = groups_of(w.hosts);
  for (const std::string hierarchy : {"sharded", "leader"}) {
    SCOPED_TRACE(hierarchy);
    const Status status =
        run_world(world_on(w.kind, w.hosts, hierarchy), [&](const std::shared_ptr<Comm>& comm) {
          SOTTO_TRY(all_kinds(*comm, hosts, w.large));
          SOTTO_ASSIGN(const Levels levels, make_levels(*hierarchy_of(hierarchy), comm->hosts()));
          if (levels.hosts != hosts) return error(Code::kInternal, "other hosts");
          for (const bool in_place : {false, true}) {
            SOTTO_TRY(run_flat<F32>(*comm, hosts, levels, in_place, false));
            SOTTO_TRY(run_flat<Bf16>(*comm, hosts, levels, in_place, true));
          }
          return comm->barrier();
        });
    EXPECT_TRUE(status.ok()) << status.text();
  }
  EXPECT_TRUE(take_ordered_violations().empty());
}

INSTANTIATE_TEST_SUITE_P(, OnHosts,
                         testing::Values(TestedWorld{"inproc", {0, 0, 0, 0}},
                                         TestedWorld{"inproc", {0, 1, 0, 1}, true},
                                         TestedWorld{"inproc", {0, 1, 2, 3}},
                                         TestedWorld{"tcp", {0, 0, 0, 1, 1, 1}, true},
                                         TestedWorld{"tcp", {0, 1, 2, 2, 0, 1}, true},
                                         TestedWorld{"ordered_async", {0, 1, 1, 0, 1, 0}},
                                         TestedWorld{"device_memory", {0, 1, 2, 2, 0, 1}}),
                         [](const auto& instance) {
                           std::string name = std::string(instance.param.kind) + "_";
                           for (const int32_t host : instance.param.hosts)
                             name += std::to_string(host);
                           return name;
                         });

// ---- comms ----

nlohmann::json routes(const Comm& comm) {
  return nlohmann::json::parse(comm.report_json("routes"));
}

// Of hosts with two ranks each the split of ranks 0 to 2 has one with two and one with one.
TEST(Hierarchy, SplitsOfUnevenHostsHaveOneLevel) {
  const Status status =
      run_world(world_on("inproc", {0, 0, 1, 1}, "sharded"), [](const std::shared_ptr<Comm>& comm) {
        if (routes(*comm)["hierarchy"] != "sharded" || routes(*comm).contains("hierarchy_refused"))
          return error(Code::kInternal, "root: {}", routes(*comm).dump());
        if (routes(*comm->duplicate())["hierarchy"] != "sharded")
          return error(Code::kInternal, "a duplicate has other levels");
        SOTTO_ASSIGN(const std::shared_ptr<Comm> part, comm->split(comm->rank() / 3, 0));
        if (comm->rank() == 3) return comm->barrier();
        const auto report = routes(*part);
        const std::string why = report.value("hierarchy_refused", "");
        if (report["hierarchy"] != "flat" || why.find("all hosts need equally many") == why.npos)
          return error(Code::kInternal, "split: {}", report.dump());
        const std::vector<RankGroup> all{{0, 1, 2}};
        SOTTO_TRY(run_kinds<I32>(*part, all, ReduceOp::kSum, {100}, {100}));
        return comm->barrier();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(Hierarchy, AutoIsShardedWhereHostsAreEven) {
  for (const bool even : {true, false}) {
    const Status status =
        run_world(world_on("inproc", even ? Hosts{0, 1, 1, 0} : Hosts{0, 1, 1, 1}, "auto"),
                  [&](const std::shared_ptr<Comm>& comm) {
                    if (routes(*comm)["hierarchy"] == (even ? "sharded" : "flat"))
                      return ok_status();
                    return error(Code::kInternal, "{}", routes(*comm).dump());
                  });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

Status create_only(const WorldOptions& world) {
  return run_world(world, [](const std::shared_ptr<Comm>&) { return ok_status(); });
}

TEST(Hierarchy, UnevenHostsAreRefusedByName) {
  for (const std::string hierarchy : {"sharded", "leader"}) {
    const Status status = create_only(world_on("tcp", {0, 1, 1}, hierarchy));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.text().find("hierarchy \"" + hierarchy +
                                 "\": the host of rank 0 has 1 rank of the comm, that of rank 1 "
                                 "has 2; all hosts need equally many, or hierarchy \"flat\""),
              std::string::npos)
        << status.text();
  }
}

TEST(Hierarchy, RanksHaveToAgree) {
  WorldOptions world = world_of("tcp", 2);
  world.rank_params = [](int32_t rank, Params* params) {
    params->hierarchy = rank == 0 ? "sharded" : "leader";
  };
  const Status status = create_only(world);
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_NE(status.text().find("rank 1 has SOTTO_HIERARCHY=leader, rank 0 has sharded"),
            std::string::npos)
      << status.text();
}

}  // namespace
}  // namespace sotto::test
