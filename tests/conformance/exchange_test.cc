// All-to-all, gather and scatter against plain loops, on every kind and size of world.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

constexpr uint8_t kUntouched = 0xee;

// Byte i of what rank `from` has for rank `to` in tensor t; never kUntouched.
uint8_t value(int32_t from, int32_t to, size_t t, uint64_t i) {
  const uint64_t mixed = (i + 1) * 7919 + static_cast<uint64_t>(from) * 131 +
                         static_cast<uint64_t>(to) * 17 + t * 5 + i / 256;
  return static_cast<uint8_t>(mixed % 233);
}

using Bytes = std::vector<uint8_t>;

// The tensors of one call on one rank.
struct Tensors {
  std::vector<Bytes> in, out;
  void add(uint64_t in_bytes, uint64_t out_bytes) {
    in.emplace_back(in_bytes);
    out.emplace_back(out_bytes, kUntouched);
  }
  void attach(Call* call, bool in_place_in_out = false) {
    call->in.clear();
    call->out.clear();
    for (size_t t = 0; t < in.size(); ++t) {
      call->in.push_back(in_place_in_out ? out[t].data() : in[t].data());
      call->out.push_back(out[t].data());
    }
  }
};

Call make_call(const Comm& comm, OpKind kind, std::vector<Dtype> dtypes) {
  Call call;
  call.request.kind = kind;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.in_place.assign(dtypes.size(), 0);
  call.request.counts.assign(dtypes.size(), 0);
  call.request.dtypes = std::move(dtypes);
  return call;
}

// Prepares the call, runs it, and compares what was sent with what the plan says. (What has been
// received depends on how far the others are.)
Status run_counted(Comm& comm, Call call) {
  call.request.segment_bytes = comm.sizes().segment_bytes;
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan, comm.prepare({&call, 1}));
  const PeerTraffic planned = plan->plan().traffic.total;
  const TransferCounters before = comm.counters().moved;
  SOTTO_TRY(comm.finish(comm.start(std::move(call), {})));
  const TransferCounters after = comm.counters().moved;
  const uint64_t payload = after.payload_bytes_sent - before.payload_bytes_sent;
  const uint64_t header = after.header_bytes_sent - before.header_bytes_sent;
  const uint64_t planned_header = planned.header_bytes_sent + planned.metadata_bytes_sent;
  if (payload == planned.payload_bytes_sent && header == planned_header) return ok_status();
  return error(Code::kInternal, "sent {} and {}; planned {} and {}", payload, header,
               planned.payload_bytes_sent, planned_header);
}

class Exchange : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {
 protected:
  const std::string& kind() const { return std::get<0>(GetParam()); }
  WorldOptions world() const { return world_of(kind(), std::get<1>(GetParam())); }
  // Elements of a part; the worlds without delays take big ones too.
  std::vector<uint64_t> sizes() const {
    std::vector<uint64_t> all{0, 1, 7, 8, 9, 1023, 1025};
    if (kind() == "inproc" || kind() == "tcp") all.push_back(1000003 / 4);
    return all;
  }
};

Status check_part(const Bytes& out, uint64_t begin, uint64_t bytes, int32_t from, int32_t to,
                  size_t t) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (out[begin + i] != value(from, to, t, i)) {
      return error(Code::kInternal, "tensor {}, byte {} from rank {} is {}, want {}", t, i, from,
                   out[begin + i], value(from, to, t, i));
    }
  }
  return ok_status();
}

void fill_part(Bytes* in, uint64_t begin, uint64_t bytes, int32_t from, int32_t to, size_t t) {
  for (uint64_t i = 0; i < bytes; ++i) (*in)[begin + i] = value(from, to, t, i);
}

Status all_to_all(Comm& comm, const std::vector<uint64_t>& counts, std::vector<Dtype> dtypes,
                  bool in_place) {
  Call call = make_call(comm, OpKind::kAllToAll, std::move(dtypes));
  call.request.counts = counts;
  call.request.in_place.assign(counts.size(), in_place);
  Tensors tensors;
  const auto size = static_cast<uint64_t>(comm.size());
  for (size_t t = 0; t < counts.size(); ++t) {
    const uint64_t part = counts[t] * dtype_bytes(call.request.dtypes[t]);
    tensors.add(part * size, part * size);
    for (int32_t r = 0; r < comm.size(); ++r)
      fill_part(&tensors.in[t], static_cast<uint64_t>(r) * part, part, comm.rank(), r, t);
    if (in_place) tensors.out[t] = tensors.in[t];
  }
  tensors.attach(&call, in_place);
  const SmallVector<Dtype> types = call.request.dtypes;
  SOTTO_TRY(run_counted(comm, std::move(call)));
  for (size_t t = 0; t < counts.size(); ++t) {
    const uint64_t part = counts[t] * dtype_bytes(types[t]);
    for (int32_t r = 0; r < comm.size(); ++r) {
      SOTTO_TRY(check_part(tensors.out[t], static_cast<uint64_t>(r) * part, part, r, comm.rank(), t)
                    .with_prefix(fmt::format("{} elements, in place {}", counts[t], in_place)));
    }
  }
  return ok_status();
}

TEST_P(Exchange, AllToAllOfEqualParts) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (const bool in_place : {false, true}) {
      for (const uint64_t n : sizes()) SOTTO_TRY(all_to_all(*comm, {n}, {Dtype::kF32}, in_place));
      SOTTO_TRY(all_to_all(
          *comm, {5, 0, 20011, 17, 3000, 1},
          {Dtype::kU8, Dtype::kF32, Dtype::kF64, Dtype::kU8, Dtype::kBF16, Dtype::kF64}, in_place));
      SOTTO_TRY(all_to_all(*comm, {}, {}, in_place));
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Elements that rank `from` has for rank `to`: zeros, small numbers, and some of many segments.
uint64_t uneven_count(int32_t from, int32_t to, size_t t, bool symmetric) {
  if (symmetric && from > to) std::swap(from, to);
  const auto mixed = static_cast<uint64_t>(from * 7 + to * 3) + t;
  if (mixed % 4 == 0) return 0;
  return mixed % 5 == 0 ? 70001 + mixed : mixed * 13 % 1031;
}

// Parts from the last rank to the first, with gaps between them.
std::vector<Range> reversed_parts(const Comm& comm, size_t t, bool receives, bool symmetric) {
  std::vector<Range> parts(static_cast<size_t>(comm.size()));
  uint64_t at = 3;
  for (int32_t r = comm.size() - 1; r >= 0; --r) {
    const uint64_t count = receives ? uneven_count(r, comm.rank(), t, symmetric)
                                    : uneven_count(comm.rank(), r, t, symmetric);
    parts[static_cast<size_t>(r)] = {at, count};
    at += count + 2;
  }
  return parts;
}

struct Uneven {
  Call call;
  Tensors tensors;
};

Uneven make_uneven(const Comm& comm, std::vector<Dtype> dtypes, bool in_place) {
  Uneven u{make_call(comm, OpKind::kAllToAllParts, std::move(dtypes)), {}};
  CollectiveRequest& request = u.call.request;
  for (size_t t = 0; t < request.dtypes.size(); ++t) {
    const uint64_t element = dtype_bytes(request.dtypes[t]);
    const std::vector<Range> in = reversed_parts(comm, t, false, in_place);
    const std::vector<Range> out = reversed_parts(comm, t, true, in_place);
    u.tensors.add((in[0].end() + 2) * element, (out[0].end() + 2) * element);
    for (int32_t r = 0; r < comm.size(); ++r) {
      const Range& part = in[static_cast<size_t>(r)];
      fill_part(in_place ? &u.tensors.out[t] : &u.tensors.in[t], part.begin * element,
                part.count * element, comm.rank(), r, t);
    }
    request.in_parts.insert(request.in_parts.end(), in.begin(), in.end());
    request.out_parts.insert(request.out_parts.end(), out.begin(), out.end());
    request.in_place[t] = in_place;
  }
  u.tensors.attach(&u.call, in_place);
  return u;
}

Status check_uneven(const Comm& comm, const CollectiveRequest& request, const Tensors& tensors) {
  const auto size = static_cast<size_t>(comm.size());
  for (size_t t = 0; t < request.dtypes.size(); ++t) {
    const uint64_t element = dtype_bytes(request.dtypes[t]);
    uint64_t untouched = tensors.out[t].size();
    for (int32_t r = 0; r < comm.size(); ++r) {
      const Range& part = request.out_parts[t * size + static_cast<size_t>(r)];
      SOTTO_TRY(check_part(tensors.out[t], part.begin * element, part.count * element, r,
                           comm.rank(), t));
      untouched -= part.count * element;
    }
    const auto kept = std::count(tensors.out[t].begin(), tensors.out[t].end(), kUntouched);
    if (static_cast<uint64_t>(kept) != untouched) {
      return error(Code::kInternal, "tensor {}: {} bytes between parts were left alone, not {}", t,
                   kept, untouched);
    }
  }
  return ok_status();
}

TEST_P(Exchange, AllToAllOfUnevenParts) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (const bool in_place : {false, true}) {
      for (const std::vector<Dtype>& dtypes : {std::vector<Dtype>{Dtype::kF32},
                                               {Dtype::kU8, Dtype::kI64, Dtype::kU8, Dtype::kF16},
                                               {}}) {
        Uneven u = make_uneven(*comm, dtypes, in_place);
        const CollectiveRequest request = u.call.request;
        SOTTO_TRY(run_counted(*comm, std::move(u.call)));
        SOTTO_TRY(check_uneven(*comm, request, u.tensors));
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// One gather or scatter of tensors with `counts` elements per part.
Status rooted(Comm& comm, OpKind kind, int32_t root, const std::vector<uint64_t>& counts,
              const std::vector<Dtype>& dtypes, bool in_place) {
  Call call = make_call(comm, kind, dtypes);
  call.request.counts = counts;
  call.request.root = root;
  const bool is_root = comm.rank() == root;
  const bool gathers = kind == OpKind::kGather;
  const auto me = static_cast<uint64_t>(comm.rank());
  Tensors tensors;
  for (size_t t = 0; t < counts.size(); ++t) {
    const uint64_t part = counts[t] * dtype_bytes(dtypes[t]);
    const uint64_t whole = is_root ? part * static_cast<uint64_t>(comm.size()) : 0;
    tensors.add(gathers ? part : whole, gathers ? whole : part);
    Bytes& in = tensors.in[t];
    Bytes& out = tensors.out[t];
    uint8_t* from = in.data();
    uint8_t* to = out.data();
    if (gathers) {
      fill_part(&in, 0, part, comm.rank(), root, t);
      if (in_place && is_root && part != 0) {
        std::memcpy(out.data() + me * part, in.data(), part);
        from = out.data() + me * part;
      }
    } else if (is_root) {
      for (int32_t r = 0; r < comm.size(); ++r)
        fill_part(&in, static_cast<uint64_t>(r) * part, part, root, r, t);
      if (in_place && part != 0) to = in.data() + me * part;
    }
    call.request.in_place[t] = in_place && is_root && part != 0;
    call.in.push_back(from);
    call.out.push_back(to);
  }
  const SmallVector<void*> out = call.out;
  SOTTO_TRY(run_counted(comm, std::move(call)));
  for (size_t t = 0; t < counts.size(); ++t) {
    const uint64_t part = counts[t] * dtype_bytes(dtypes[t]);
    const auto* result = static_cast<const uint8_t*>(out[t]);
    if (!gathers) {
      SOTTO_TRY(check_part(Bytes(result, result + part), 0, part, root, comm.rank(), t));
    }
    for (int32_t r = 0; gathers && is_root && r < comm.size(); ++r)
      SOTTO_TRY(check_part(tensors.out[t], static_cast<uint64_t>(r) * part, part, r, root, t));
  }
  return ok_status();
}

TEST_P(Exchange, GatherAndScatterAtEveryRoot) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (const OpKind kind : {OpKind::kGather, OpKind::kScatter}) {
      for (int32_t root = 0; root < comm->size(); ++root) {
        const bool in_place = root % 2 != 0;
        for (const uint64_t n : sizes()) {
          if (n > 2000 && root > 1) continue;
          SOTTO_TRY(rooted(*comm, kind, root, {n}, {Dtype::kF32}, in_place)
                        .with_prefix(fmt::format("root {}, n {}", root, n)));
        }
        SOTTO_TRY(rooted(*comm, kind, root, {5, 0, 1023, 7},
                         {Dtype::kF64, Dtype::kU8, Dtype::kU8, Dtype::kF64}, in_place));
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Exchange, OnSubgroupsAndInGroups) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    SOTTO_ASSIGN(const std::shared_ptr<Comm> half, comm->split(comm->rank() % 2, -comm->rank()));
    SOTTO_TRY(all_to_all(*half, {257}, {Dtype::kI8}, false));
    SOTTO_TRY(rooted(*half, OpKind::kGather, half->size() - 1, {33}, {Dtype::kU64}, false));
    // An uneven all-to-all, an all-reduce and an uneven all-to-all again, as one operation.
    Uneven first = make_uneven(*comm, {Dtype::kF32, Dtype::kU8}, false);
    Uneven second = make_uneven(*comm, {Dtype::kF64}, true);
    std::vector<int32_t> ones(5, 1);
    Call reduce = make_call(*comm, OpKind::kAllReduce, {Dtype::kI32});
    reduce.request.counts = {ones.size()};
    reduce.request.in_place = {1};
    reduce.in = reduce.out = {ones.data()};
    const CollectiveRequest requests[] = {first.call.request, second.call.request};
    std::vector<Call> calls;
    calls.push_back(std::move(first.call));
    calls.push_back(std::move(reduce));
    calls.push_back(std::move(second.call));
    SOTTO_TRY(comm->finish(comm->start_group(calls, {})));
    SOTTO_TRY(check_uneven(*comm, requests[0], first.tensors));
    SOTTO_TRY(check_uneven(*comm, requests[1], second.tensors));
    if (ones != std::vector<int32_t>(5, comm->size())) return error(Code::kInternal, "sum");
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, Exchange,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         [](const auto& p) {
                           return std::get<0>(p.param) + "_" + std::to_string(std::get<1>(p.param));
                         });

// What a plan predicts, as closed formulas.
TEST(ExchangePlans, BytesAreThoseOfTheFormulas) {
  const Status status = run_world(world_of("tcp", 3), [](const auto& comm) -> Status {
    const auto total = [&](Call call) -> Result<PeerTraffic> {
      call.request.segment_bytes = comm->sizes().segment_bytes;
      SOTTO_ASSIGN(const auto plan, comm->prepare({&call, 1}));
      return plan->plan().traffic.total;
    };
    Call even = make_call(*comm, OpKind::kAllToAll, {Dtype::kF32, Dtype::kU8});
    even.request.counts = {100000, 7};
    SOTTO_ASSIGN(const PeerTraffic a, total(even));
    if (a.payload_bytes_sent != 2 * 400007 || a.metadata_bytes_sent != 0)
      return error(Code::kInternal, "all_to_all sends {}", a.payload_bytes_sent);
    SOTTO_ASSIGN(const PeerTraffic u, total(make_uneven(*comm, {Dtype::kF32}, false).call));
    uint64_t bytes = 0;
    for (int32_t r = 0; r < 3; ++r)
      bytes += r == comm->rank() ? 0 : 4 * uneven_count(comm->rank(), r, 0, false);
    if (u.payload_bytes_sent != bytes || u.metadata_bytes_sent != 2 * 16)
      return error(Code::kInternal, "parts: {} instead of {}", u.payload_bytes_sent, bytes);
    Call gather = make_call(*comm, OpKind::kGather, {Dtype::kF64});
    gather.request.counts = {50000};
    gather.request.root = 1;
    SOTTO_ASSIGN(const PeerTraffic g, total(gather));
    const bool root = comm->rank() == 1;
    if (g.payload_bytes_sent != (root ? 0 : 400000) ||
        g.payload_bytes_received != (root ? 800000 : 0))
      return error(Code::kInternal, "gather: {}, {}", g.payload_bytes_sent,
                   g.payload_bytes_received);
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// ---- ranks that do not agree ----

// One part of every pair is `usual` elements; rank 0 sends `sent` to rank 2, which expects
// `expected`. Returns what every rank was told, by the operation or, where it had completed, by the
// barrier behind it.
std::vector<std::string> told_after_mismatch(const std::string& kind, uint64_t sent,
                                             uint64_t expected) {
  constexpr uint64_t kUsual = 3;
  std::vector<std::string> told(3);
  const Status status = run_world(world_of(kind, 3), [&](const auto& comm) -> Status {
    const uint64_t room = 4 * (sent + expected + 3 * kUsual);
    Bytes in(room), out(room);
    Call call = make_call(*comm, OpKind::kAllToAllParts, {Dtype::kF32});
    uint64_t in_at = 0, out_at = 0;
    for (int32_t r = 0; r < 3; ++r) {
      const uint64_t to = comm->rank() == 0 && r == 2 ? sent : kUsual;
      const uint64_t from = comm->rank() == 2 && r == 0 ? expected : kUsual;
      call.request.in_parts.push_back({in_at, to});
      call.request.out_parts.push_back({out_at, from});
      in_at += to;
      out_at += from;
    }
    call.in = {in.data()};
    call.out = {out.data()};
    Status result = comm->finish(comm->start(std::move(call), {}));
    if (result.ok()) result = comm->barrier();
    told[static_cast<size_t>(comm->rank())] = result.text();
    return result.code() == Code::kProtocol
               ? ok_status()
               : error(Code::kInternal, "not PROTOCOL: {}", result.text());
  });
  EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
  return told;
}

TEST(ExchangeMismatch, CountsOfAPairAreNamedOnEveryRank) {
  const std::pair<uint64_t, uint64_t> cases[] = {{5, 7}, {0, 7}, {5, 0}, {500000, 3}, {0, 500000}};
  for (const char* kind : {"inproc", "tcp", "device_memory", "ordered"}) {
    for (const auto& [sent, expected] : cases) {
      const std::string want = fmt::format(
          "rank 0 of the comm sends {} elements of tensor 0 to rank 2, which expects {}", sent,
          expected);
      for (const std::string& text : told_after_mismatch(kind, sent, expected))
        EXPECT_NE(text.find(want), std::string::npos) << kind << ": " << text;
    }
  }
}

// Two ranks call something else: PROTOCOL on both, with the words of both calls. late: everything
// that rank 0 sends, the barrier after its call too, is there before rank 1 calls.
void expect_disagreement(const std::function<void(const Comm&, CollectiveRequest&)>& change,
                         const std::vector<std::string>& words, bool late = false) {
  for (const char* kind : {"inproc", "tcp"}) {
    const Status status = run_world(world_of(kind, 2), [&](const auto& comm) -> Status {
      if (late && comm->rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      Bytes in(64), out(64);
      Call call = make_call(*comm, OpKind::kAllToAll, {Dtype::kU8});
      call.request.counts = {8};
      change(*comm, call.request);
      call.in = {in.data()};
      call.out = {out.data()};
      Status result = comm->finish(comm->start(std::move(call), {}));
      if (result.ok()) result = comm->barrier();
      if (result.code() != Code::kProtocol)
        return error(Code::kInternal, "not PROTOCOL: {}", result.text());
      for (const std::string& word : words) {
        if (result.text().find(word) == std::string::npos)
          return error(Code::kInternal, "lacks '{}': {}", word, result.text());
      }
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
  }
}

TEST(ExchangeMismatch, OtherCallsAreNamed) {
  expect_disagreement(
      [](const Comm& comm, CollectiveRequest& r) {
        r.counts = {comm.rank() == 0 ? uint64_t{8} : uint64_t{9}};
      },
      {"all_to_all(uint8, 8 elements", "all_to_all(uint8, 9 elements"});
  expect_disagreement(
      [](const Comm& comm, CollectiveRequest& r) {
        if (comm.rank() == 0) return;
        r.kind = OpKind::kAllToAllParts;
        r.counts = {0};
        r.in_parts = r.out_parts = {{0, 8}, {8, 8}};
      },
      {"all_to_all(uint8, 8 elements", "all_to_all with parts(uint8"});
  expect_disagreement(
      [](const Comm& comm, CollectiveRequest& r) {
        r.kind = OpKind::kGather;
        r.root = comm.rank();
      },
      {"gather(root 0", "gather(root 1"});
  for (const bool late : {false, true}) {
    expect_disagreement(
        [](const Comm& comm, CollectiveRequest& r) {
          r.kind = comm.rank() == 0 ? OpKind::kScatter : OpKind::kGather;
        },
        {"scatter(root 0", "gather(root 0"}, late);
  }
}

}  // namespace
}  // namespace sotto::test
