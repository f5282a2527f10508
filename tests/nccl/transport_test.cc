// The NCCL transport between real processes, through the C ABI, on the fake NCCL and the fake CUDA
// runtime: results, bytes, the ways of getting a communicator, and every way of losing one.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <signal.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "tests/nccl/device_floats.h"
#include "tests/nccl/process_rank.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

constexpr size_t kN = 40'000;
// Of what a time-out is to end.
constexpr int64_t kShortUs = 8'000'000;
const std::string kTransport = "SOTTO_TRANSPORT=nccl";

// A collective that is one of NCCL's own.
sotto_status all_gather(const Rank& r, const DeviceFloats& x, int size, size_t n) {
  const auto ranks = static_cast<size_t>(size);
  const DeviceFloats all(n * ranks, 0.0f);
  all.expect(0.0f, "zeros");  // it is there: its stream is not the call's
  const sotto_buffer in = x.buffer(n), out = all.buffer();
  const sotto_call call = x.call();
  return sotto_all_gather(r.comm, &in, &out, 1, &call, nullptr);
}

sotto_status broadcast(const Rank& r, const DeviceFloats& x, int root) {
  const sotto_buffer b = x.buffer();
  const sotto_call call = x.call();
  return sotto_broadcast(r.comm, &b, &b, 1, root, &call, nullptr);
}

// All ranks in another order, with a communicator of their own; the comm that is returned is the
// parent.
sotto_comm* turn_around(Rank& r, int rank) {
  sotto_comm* const parent = r.comm;
  OK(sotto_comm_split(parent, 0, -rank, &r.comm));
  return parent;
}

float sum_of_ranks(int size) { return static_cast<float>(size * (size + 1) / 2); }

// ---- Working ----

SOTTO_RANK_MAIN(nccl_collectives) {
  Rank r(self);
  ok(r.created, "sotto_comm_create");
  {
    DeviceFloats x(kN, static_cast<float>(self.rank + 1));
    OK(all_reduce(r, x));
    x.expect(sum_of_ranks(self.size), "all-reduce on the device");
    std::vector<float> host(kN, static_cast<float>(self.rank + 1));
    const sotto_buffer h = buffer(host);
    OK(sotto_all_reduce(r.comm, &h, &h, 1, nullptr, nullptr));
    require(host == std::vector<float>(kN, sum_of_ranks(self.size)), "all-reduce on the host");
    // Even and odd ranks at the same time.
    sotto_comm* half = nullptr;
    OK(sotto_comm_split(r.comm, self.rank % 2, self.rank, &half));
    DeviceFloats y(kN, 1.0f);
    const sotto_buffer b = y.buffer();
    const sotto_call call = y.call();
    OK(sotto_all_reduce(half, &b, &b, 1, &call, nullptr));
    y.expect(static_cast<float>((self.size + 1 - self.rank % 2) / 2), "all-reduce on a split");
    OK(sotto_comm_destroy(half));
    sotto_comm_counters counters = {};
    counters.struct_size = sizeof counters;
    OK(sotto_comm_get_counters(r.comm, &counters));
    require(counters.payload_bytes_sent == counters.payload_bytes_planned,
            "bytes sent are the bytes planned");
    const std::string routes = read_all([&](char* at, uint64_t cap, uint64_t* n) {
      return sotto_comm_report(r.comm, "routes", at, cap, n);
    });
    require(self.size == 1 || routes.find("nccl 2.") != std::string::npos, "routes: " + routes);
  }
  r.leave();
  require_nothing_left();
  return 0;
}

SOTTO_RANK_MAIN(nccl_lent) {
  ncclUniqueId id = {};
  if (self.rank == 0) {
    require(ncclGetUniqueId(&id) == ncclSuccess, "ncclGetUniqueId");
    publish(self.argument + "/nccl", &id, sizeof id);
  } else {
    require(await_published(self.argument + "/nccl", &id, sizeof id, 60'000), "no NCCL id");
  }
  ncclComm_t lent = nullptr;
  const int size = self.size - (std::getenv("TEST_WRONG_SIZE") != nullptr ? 1 : 0);
  if (self.rank < size)
    require(ncclCommInitRank(&lent, size, id, self.rank) == ncclSuccess, "ncclCommInitRank");
  Rank r(self, 60'000'000, lent);
  if (r.created != SOTTO_OK) {
    self.say(r.error);
    OK(sotto_context_destroy(r.context));
    if (lent != nullptr) require(ncclCommDestroy(lent) == ncclSuccess, "ncclCommDestroy");
    require_nothing_left();
    return 0;
  }
  {
    DeviceFloats x(kN, static_cast<float>(self.rank + 1));
    OK(all_reduce(r, x));
    x.expect(sum_of_ranks(self.size), "all-reduce");
  }
  r.leave();
  require(fake_nccl_live_comms() == 1, "the caller's communicator is the caller's to destroy");
  require(ncclCommDestroy(lent) == ncclSuccess, "ncclCommDestroy");
  return 0;
}

// Calls of CUDA that give memory or events, or make the host wait.
std::map<std::string, uint64_t> calls_of_a_first_time() {
  std::map<std::string, uint64_t> counts;
  for (const char* call :
       {"cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync", "cudaHostAlloc", "cudaFree",
        "cudaFreeAsync", "cudaFreeHost", "cudaEventCreateWithFlags"})
    counts[call] = fake_cuda::calls(call);
  counts["host waits"] = fake_cuda::host_waits();
  return counts;
}

SOTTO_RANK_MAIN(nccl_steady) {
  Rank r(self);
  ok(r.created, "sotto_comm_create");
  {
    DeviceFloats x(kN, 1.0f), all(kN * static_cast<size_t>(self.size), 0.0f);
    std::vector<float> host(kN, 1.0f);
    const sotto_buffer h = buffer(host), in = x.buffer(), out = all.buffer();
    x.expect(1.0f, "ones");
    all.expect(0.0f, "zeros");
    for (int i = 0; i < 12; ++i) {
      const auto before = calls_of_a_first_time();
      const sotto_call call = x.call();
      OK(all_reduce(r, x));
      OK(sotto_all_gather(r.comm, &in, &out, 1, &call, nullptr));
      OK(sotto_all_reduce(r.comm, &h, &h, 1, nullptr, nullptr));
      for (const auto& [name, count] : calls_of_a_first_time())
        require(i < 4 || count == before.at(name), name + " in round " + std::to_string(i));
      OK(sotto_barrier(r.comm, nullptr, nullptr));
    }
  }
  r.leave();
  return 0;
}

// ---- Not getting one ----

SOTTO_RANK_MAIN(nccl_refused) {
  if (const char* native = std::getenv("TEST_NATIVE_OF_RANK_1");
      native != nullptr && self.rank == 1)
    setenv("SOTTO_NCCL_NATIVE", native, 1);
  Rank r(self, kShortUs);
  self.say(std::string(sotto_status_name(r.created)) + ": " + r.error);
  OK(sotto_context_destroy(r.context));
  require_nothing_left();
  return 0;
}

// ---- Losing one ----

// Works until something fails; says what.
SOTTO_RANK_MAIN(nccl_loses) {
  const char* hang = std::getenv("TEST_HANG_RANK");
  const bool counts = std::getenv("TEST_COUNTS") != nullptr;
  const bool roots = std::getenv("TEST_ROOTS") != nullptr;
  const bool kinds = std::getenv("TEST_KINDS") != nullptr;
  const bool native = std::getenv("TEST_NATIVE") != nullptr;
  Rank r(self, kShortUs);
  ok(r.created, "sotto_comm_create");
  sotto_comm* parent = nullptr;
  if (std::getenv("TEST_SPLIT") != nullptr) parent = turn_around(r, self.rank);
  sotto_status status = SOTTO_OK;
  {
    DeviceFloats x(kN, 1.0f);
    for (int i = 0; i < 1000 && status == SOTTO_OK; ++i) {
      if (i == 5) {
        self.at("working");
        if (hang != nullptr && self.rank == std::atoi(hang)) fake_nccl_hang(0);
      }
      // A rank that calls with another count or root, or something else, once.
      const bool differs = i == 5 && self.rank == 1;
      const size_t n = differs && counts ? kN - 8 : kN;
      if (roots) {
        status = broadcast(r, x, differs ? 1 : 0);
      } else if (differs && kinds) {
        status = all_reduce(r, x);
      } else {
        status = native ? all_gather(r, x, self.size, n) : all_reduce(r, x, n);
      }
    }
  }
  const char* text = nullptr;
  require(sotto_comm_error(r.comm, &text) != SOTTO_OK, "the comm has failed");
  self.say(std::string(sotto_status_name(status)) + ": " + text);
  (void)sotto_comm_destroy(r.comm);  // says again why it has failed
  if (parent != nullptr) (void)sotto_comm_destroy(parent);
  OK(sotto_context_destroy(r.context));
  require_nothing_left();
  return 0;
}

SOTTO_RANK_MAIN(nccl_slow_split) {
  Rank r(self, kShortUs);
  ok(r.created, "sotto_comm_create");
  setenv("FAKE_NCCL_INIT_DELAY_MS", "20000", 1);
  sotto_comm* turned = nullptr;
  const sotto_status status = sotto_comm_split(r.comm, 0, -self.rank, &turned);
  self.say(std::string(sotto_status_name(status)) + ": " + sotto_last_error());
  require(turned == nullptr, "a split that failed");
  (void)sotto_comm_destroy(r.comm);
  OK(sotto_context_destroy(r.context));
  require_nothing_left();
  return 0;
}

// What became of a comm's whole life: made, used once, destroyed. Empty: nothing failed.
std::string live_once(const ProcessRank& place) {
  std::string text;
  Rank r(place, 30'000'000);
  if (r.created != SOTTO_OK) text = r.error;
  if (r.comm != nullptr) {
    DeviceFloats x(100, 1.0f);
    if (all_reduce(r, x) != SOTTO_OK || all_gather(r, x, place.size, 100) != SOTTO_OK ||
        broadcast(r, x, 1) != SOTTO_OK) {
      text = sotto_last_error();
    } else {
      sotto_comm* turned = nullptr;
      if (sotto_comm_split(r.comm, 0, -place.rank, &turned) == SOTTO_OK) {
        sotto_comm* const parent = std::exchange(r.comm, turned);
        if (all_gather(r, x, place.size, 100) != SOTTO_OK) text = sotto_last_error();
        (void)sotto_comm_destroy(std::exchange(r.comm, parent));
      } else {
        text = sotto_last_error();
      }
    }
    (void)sotto_comm_destroy(r.comm);
  }
  OK(sotto_context_destroy(r.context));
  return text;
}

// Each NCCL call of rank 0's life fails once, then none does.
SOTTO_RANK_MAIN(nccl_every_call_fails) {
  uint64_t reported = 0;
  std::set<std::string> names;
  for (uint64_t k = 0; k < 200; ++k) {
    const std::string folder = self.argument + "/" + std::to_string(k);
    std::filesystem::create_directories(folder);
    if (self.rank == 0) fake_nccl_fail_call(k, ncclSystemError);
    const std::string text = live_once({self.rank, self.size, folder, {}});
    require_nothing_left();
    char more = 1;
    if (self.rank != 0) {
      require(await_published(folder + "/more", &more, 1, 60'000), "word of rank 0");
      if (more == 1) continue;
      require(text.empty(), "no call has failed, but: " + text);
      return 0;
    }
    const std::string failed = fake_nccl_failed_call();
    more = failed.empty() ? 0 : 1;
    publish(folder + "/more", &more, 1);
    if (more == 0) {
      require(text.empty(), "no call has failed, but: " + text);
      require(k > 20 && reported > 18, "few calls were failed");
      for (const char* native : {"ncclAllReduce", "ncclAllGather", "ncclBroadcast"})
        require(names.contains(native), std::string(native) + " was not among them");
      return 0;
    }
    // Ends of communicators have nobody to tell; they are in the log. They are finalized first, and
    // destroyed in a group.
    const bool in_end = names.contains("ncclCommFinalize");
    const bool groups = failed == "ncclGroupStart" || failed == "ncclGroupEnd";
    names.insert(failed);
    const bool ends =
        failed == "ncclCommFinalize" || failed == "ncclCommDestroy" || (in_end && groups);
    require(ends == text.empty(), "call " + std::to_string(k) + ", " + failed + ": " + text);
    require(ends || text.find(failed) != std::string::npos,
            "the error of " + failed + " does not name it: " + text);
    reported += ends ? 0 : 1;
  }
  throw RankError("calls without end");
}

class NcclTransport : public testing::Test {
 protected:
  std::vector<std::string> say(const std::string& main, int size,
                               std::vector<std::string> environment) {
    environment.push_back(kTransport);
    Processes ranks(
        main, size,
        {.argument = meeting_place(), .environment = environment, .timeout_ms = 300'000});
    std::vector<std::string> all;
    for (int r = 0; r < size; ++r) all.push_back(ranks.message(r));
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
    return all;
  }
  // What rank 0 has printed.
  std::string run(const std::string& main, int size, std::vector<std::string> environment = {}) {
    environment.push_back(kTransport);
    Processes ranks(
        main, size,
        {.argument = meeting_place(), .environment = environment, .timeout_ms = 300'000});
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
    return ranks.output(0);
  }
  // Where no ranks have met before.
  std::string meeting_place() {
    std::filesystem::remove(directory_.path() + "/id");
    return directory_.path();
  }

  TempDir directory_;
};

const std::vector<std::string> kSlow = {"FAKE_NCCL_MAX_DELAY_US=500", "FAKE_CUDA_MAX_DELAY_US=200",
                                        "FAKE_NCCL_LAUNCH_DELAY_US=300",
                                        "FAKE_NCCL_INIT_DELAY_MS=30"};

TEST_F(NcclTransport, OneRank) { run("nccl_collectives", 1); }
TEST_F(NcclTransport, TwoRanks) { run("nccl_collectives", 2); }
TEST_F(NcclTransport, FourRanksWithDelays) { run("nccl_collectives", 4, kSlow); }
TEST_F(NcclTransport, TheOldestVersion) { run("nccl_collectives", 2, {"FAKE_NCCL_VERSION=21800"}); }
TEST_F(NcclTransport, TheLibraryIsFoundByItsPath) {
  EXPECT_THAT(run("nccl_collectives", 2, {"SOTTO_NCCL_LIBRARY=" SOTTO_FAKE_NCCL, "SOTTO_LOG=info"}),
              HasSubstr("/libnccl.so.2 (as SOTTO_NCCL_LIBRARY says)"));
}
// A framework's, before any that the system would find.
TEST_F(NcclTransport, TheLibraryIsTheOneThatTheProcessHasLoaded) {
  EXPECT_THAT(run("nccl_collectives", 2, {"SOTTO_LOG=info"}),
              HasSubstr("/libnccl.so.2 (loaded by this process before)"));
}

TEST_F(NcclTransport, OperationsThatHaveRunBeforeAllocateNothing) { run("nccl_steady", 2); }

TEST_F(NcclTransport, ACommunicatorOfTheCaller) { run("nccl_lent", 2); }
TEST_F(NcclTransport, ACommunicatorOfTheCallerOfAnotherSize) {
  const auto said = say("nccl_lent", 3, {"TEST_WRONG_SIZE=1"});
  for (const std::string& text : said) {
    EXPECT_THAT(text, HasSubstr("the caller's communicator is rank 0 of 2; rank 0 of 3 is needed"));
  }
}

TEST_F(NcclTransport, ALibraryThatIsNotThere) {
  for (const std::string& text : say("nccl_refused", 2, {"SOTTO_NCCL_LIBRARY=/nowhere/nccl.so"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("UNSUPPORTED"),
                            HasSubstr("rank 0: NCCL cannot be opened at "
                                      "SOTTO_NCCL_LIBRARY=/nowhere/nccl.so"),
                            HasSubstr("No such file")));
  }
}

TEST_F(NcclTransport, ALibraryThatIsTooOld) {
  for (const std::string& text : say("nccl_refused", 2, {"FAKE_NCCL_VERSION=21701"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("UNSUPPORTED"), HasSubstr("NCCL 2.17.1 at "),
                            HasSubstr("is too old; 2.18.0 or later is needed")));
  }
}

TEST_F(NcclTransport, ALibraryThatLacksFunctions) {
  const auto said = say("nccl_refused", 2, {"SOTTO_NCCL_LIBRARY=" SOTTO_INCOMPLETE_NCCL});
  for (const std::string& text : said) {
    EXPECT_THAT(text, AllOf(HasSubstr("UNSUPPORTED"), HasSubstr("rank 0: NCCL 2."),
                            HasSubstr("/libnccl_incomplete.so lacks "
                                      "ncclCommFinalize, ncclBroadcast")));
  }
}

// NCCL itself, where its wheel is: it is bound, and says itself that there is no GPU.
TEST_F(NcclTransport, TheRealLibraryWithoutAGpu) {
  const std::string library = SOTTO_NCCL_WHEEL "/lib/libnccl.so.2";
  if (!std::filesystem::exists(library)) GTEST_SKIP() << "there is no " << library;
  if (std::filesystem::exists("/dev/nvidia0")) GTEST_SKIP() << "there is a GPU";
  const auto said =
      say("nccl_refused", 1,
          {"SOTTO_NCCL_LIBRARY=" + library, "NCCL_SOCKET_IFNAME=lo", "SOTTO_LOG=info"});
  EXPECT_THAT(said[0],
              AllOf(HasSubstr("DEVICE"), HasSubstr("ncclCommInitRankConfig: unhandled cuda error"),
                    HasSubstr("NCCL says: ")));
}

TEST_F(NcclTransport, InitialisationThatDoesNotEnd) {
  for (const std::string& text : say("nccl_refused", 2, {"FAKE_NCCL_INIT_DELAY_MS=20000"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("TIMEOUT"), HasSubstr("ncclCommInitRankConfig of rank")));
  }
}

TEST_F(NcclTransport, ConnectionsThatAreNotMadeInTime) {
  for (const std::string& text : say("nccl_refused", 2, {"FAKE_NCCL_CONNECT_DELAY_MS=20000"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("TIMEOUT"),
                            AnyOf(HasSubstr("rank 0 has not been connected with rank 1 in time"),
                                  HasSubstr("rank 1 has not been connected with rank 0 in time"))));
  }
}

TEST_F(NcclTransport, TheCommunicatorOfASplitThatIsNotMadeInTime) {
  for (const std::string& text : say("nccl_slow_split", 2, {})) {
    EXPECT_THAT(text, AllOf(HasSubstr("TIMEOUT"), HasSubstr("ncclCommInitRankConfig of rank")));
  }
}

TEST_F(NcclTransport, ACommunicatorIsLentToNobodyElse) {
  Processes ranks("nccl_lent", 1,
                  {.argument = meeting_place(), .environment = {"SOTTO_TRANSPORT=tcp"}});
  EXPECT_THAT(ranks.message(0),
              HasSubstr("transport \"tcp\" has no communicators that could be lent to it"));
  ranks.wait_all();
}

TEST_F(NcclTransport, AKilledRankIsNamed) {
  Processes ranks(
      "nccl_loses", 3,
      {.argument = meeting_place(), .environment = {kTransport}, .stop_at = {"2:working"}});
  ranks.await(2, "working");
  ranks.kill(2, SIGKILL);
  for (const int r : {0, 1}) {
    EXPECT_THAT(ranks.message(r), AllOf(HasSubstr("PEER_LOST"), HasSubstr("rank 2")));
  }
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(NcclTransport, AnOperationThatHangsTimesOut) {
  for (const std::string& text : say("nccl_loses", 3, {"TEST_HANG_RANK=1"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("TIMEOUT"), HasSubstr("made no progress")));
  }
}

TEST_F(NcclTransport, DifferentCountsAreDescribed) {
  for (const std::string& text :
       say("nccl_loses", 2, {"TEST_COUNTS=1", "FAKE_NCCL_MISMATCH=hang"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("PROTOCOL"), HasSubstr("40000 elements"),
                            HasSubstr("39992 elements")));
  }
}

// In front of one of NCCL's own collectives too, which then hangs.
TEST_F(NcclTransport, DifferentCountsOfANativeCollectiveAreDescribed) {
  for (const std::string& text :
       say("nccl_loses", 3, {"TEST_NATIVE=1", "TEST_COUNTS=1", "FAKE_NCCL_MISMATCH=hang"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("PROTOCOL"), HasSubstr("all_gather"),
                            HasSubstr("40000 elements"), HasSubstr("39992 elements")));
  }
}

TEST_F(NcclTransport, ANativeCollectiveAndAnotherOneAreDescribed) {
  for (const std::string& text :
       say("nccl_loses", 3, {"TEST_NATIVE=1", "TEST_KINDS=1", "FAKE_NCCL_MISMATCH=hang"})) {
    EXPECT_THAT(text,
                AllOf(HasSubstr("PROTOCOL"), HasSubstr("all_gather"), HasSubstr("all_reduce")));
  }
}

TEST_F(NcclTransport, DifferentRootsOfANativeCollectiveAreDescribed) {
  for (const std::string& text :
       say("nccl_loses", 2, {"TEST_ROOTS=1", "FAKE_NCCL_MISMATCH=hang"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("PROTOCOL"), HasSubstr("root 0"), HasSubstr("root 1")));
  }
}

TEST_F(NcclTransport, ANativeCollectiveThatHangsTimesOut) {
  for (const char* on : {"TEST_ON=all", "TEST_SPLIT=1"}) {
    for (const std::string& text :
         say("nccl_loses", 3, {"TEST_NATIVE=1", "TEST_HANG_RANK=1", on})) {
      EXPECT_THAT(text, AllOf(HasSubstr("TIMEOUT"), HasSubstr("made no progress"))) << on;
    }
  }
}

TEST_F(NcclTransport, ARankKilledBetweenNativeCollectivesIsNamed) {
  for (const char* on : {"TEST_ON=all", "TEST_SPLIT=1"}) {
    Processes ranks("nccl_loses", 3,
                    {.argument = meeting_place(),
                     .environment = {kTransport, "TEST_NATIVE=1", on},
                     .stop_at = {"2:working"}});
    ranks.await(2, "working");
    ranks.kill(2, SIGKILL);
    for (const int r : {0, 1}) {
      EXPECT_THAT(ranks.message(r), AllOf(HasSubstr("PEER_LOST"), HasSubstr("rank 2"))) << on;
    }
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

TEST_F(NcclTransport, NativeCollectivesAreAllowedByAllRanksOrNone) {
  for (const std::string& text : say("nccl_refused", 2, {"TEST_NATIVE_OF_RANK_1=off"})) {
    EXPECT_THAT(text, AllOf(HasSubstr("INVALID_ARGUMENT"),
                            HasSubstr("SOTTO_NCCL_NATIVE of rank 1 is not that of rank 0")));
  }
}

TEST_F(NcclTransport, EveryCallCanFail) {
  run("nccl_every_call_fails", 2, {"SOTTO_NCCL_NATIVE=all"});
}

}  // namespace
}  // namespace sotto::test
