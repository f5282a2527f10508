// Shared memory inside a host: the suite, and pairs that cannot have it.
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/log.h"
#include "tests/conformance/transport_suite.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/joined_backend.h"
#include "transports/shm/shm_backend.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

Result<shm::Segment> refuse_memory(const shm::Descriptor& /*memory*/, uint64_t /*bytes*/) {
  return error(Code::kTransport, "the test forbids it");
}

TransportCase over(const char* name, uint64_t ring_bytes,
                   const std::function<void(ShmOptions&)>& change = {}) {
  return {name,
          [=](const Clock& clock) -> Result<std::unique_ptr<Backend>> {
            TcpOptions tcp;
            tcp.clock = &clock;
            tcp.heartbeat_ms = 50;
            SOTTO_ASSIGN(std::unique_ptr<Backend> rendezvous, make_tcp_backend(tcp));
            ShmOptions options;
            options.clock = &clock;
            options.handover.ring_bytes = ring_bytes;
            if (change) change(options);
            SOTTO_ASSIGN(std::unique_ptr<Backend> transport, make_shm_backend(options));
            return std::unique_ptr<Backend>(
                std::make_unique<JoinedBackend>(std::move(rendezvous), std::move(transport)));
          },
          true, true};
}

// With the smallest ring every message is longer than the ring somewhere.
INSTANTIATE_TEST_SUITE_P(Shm, TransportSuite,
                         testing::Values(over("shm", 524288), over("shm_small_ring", 16384)),
                         case_name);

// Rank 1 cannot map what others send: pairs in which it is the higher rank have no shared memory,
// and both ranks know.
TEST(ShmSetUp, APairThatCannotMapTheMemoryIsNotLinked) {
  std::vector<std::string> said;
  set_log(
      [](void* user, int32_t /*level*/, const char* text) {
        static std::mutex mutex;
        const std::lock_guard lock(mutex);
        static_cast<std::vector<std::string>*>(user)->emplace_back(text);
      },
      &said);
  const TransportCase works = over("shm", 65536, [](ShmOptions& options) { options.named = true; });
  const TransportCase cannot =
      over("shm", 65536, [](ShmOptions& options) { options.handover.map = refuse_memory; });
  IdBoard board(3);
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(rank == 1 ? cannot : works, rank, 3);
                        kit.join(board.share(kit));
                        kit.connect();
                        std::set<int32_t> reached;
                        for (const int32_t peer : {0, 1, 2}) {
                          if (kit.transport->reaches(peer)) reached.insert(peer);
                        }
                        using Ranks = std::set<int32_t>;
                        const Ranks expected =
                            rank == 0 ? Ranks{0, 2} : (rank == 1 ? Ranks{1, 2} : Ranks{0, 1, 2});
                        EXPECT_EQ(reached, expected) << "rank " << rank;
                        kit.finish();
                        board.wait();
                      }),
            "");
  set_log(nullptr, nullptr);
  EXPECT_EQ(said, std::vector<std::string>{
                      "ranks 0 and 1 of one host have no shared memory and use the network: the "
                      "test forbids it"});
}

// The same in a comm: that pair goes by TCP, and results are those of any other comm.
TEST(ShmSetUp, APairWithoutSharedMemoryGoesByTcp) {
  set_log([](void*, int32_t, const char*) {}, nullptr);
  WorldOptions world = world_of("shm", 3);
  world.wrap_backends = [](int32_t rank, BackendFactories* backends) {
    if (rank != 1) return;
    backends->at("shm").make = [](const Params& params) {
      ShmOptions options = shm_options(params, shm::Params());
      options.handover.map = refuse_memory;
      return make_shm_backend(options);
    };
  };
  const Status status = run_world(world, [](const std::shared_ptr<Comm>& comm) -> Status {
    std::vector<float> data(200'000, static_cast<float>(1 << comm->rank()));
    SOTTO_TRY(all_reduce(comm, data));
    if (data != std::vector<float>(data.size(), 7.0f)) return error(Code::kInternal, "wrong sum");
    const auto report = nlohmann::json::parse(comm->report_json("routes"));
    for (const auto& peer : report["peers"]) {
      const std::string route = peer["route"];
      const bool near = comm->rank() + peer["rank"].get<int32_t>() != 1;  // not ranks 0 and 1
      if (!route.starts_with(near ? "shm pid " : "tcp "))
        return error(Code::kInternal, "rank {}: {}", comm->rank(), route);
    }
    return ok_status();
  });
  set_log(nullptr, nullptr);
  EXPECT_EQ(status.text(), "");
}

}  // namespace
}  // namespace sotto::test
