// What launchers say of ranks, and where these meet.
#include "core/group/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <string>
#include <thread>

#include "tests/support/variables.h"

namespace sotto {
namespace {

using test::environment_of;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}};
const Variables kMpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"PMI_FD", "6"}};
const Variables kSlurm{{"SLURM_PROCID", "1"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_JOB_NODELIST", "n[1-2]"},
                       {"SLURM_JOB_ID", "1"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

LaunchInfo info_of(const Variables& variables, const std::string& rendezvous = "") {
  Params params;
  params.rendezvous = rendezvous;
  return launch_info(params, environment_of(variables)).take();
}

Result<MeetingPlace> place_of(const Variables& variables) {
  return meeting_place(info_of(variables), environment_of(variables));
}

TEST(Launcher, TheFirstCompletePairCounts) {
  const Variables all = with(with(kOpenMpi, kMpich), kSlurm);
  EXPECT_EQ(info_of(all).launcher, Launcher::kOpenMpi);
  EXPECT_EQ(info_of(with(kMpich, kSlurm)).launcher, Launcher::kMpich);
  EXPECT_EQ(info_of(with(kSlurm, {{"RANK", "0"}})).launcher, Launcher::kSlurm);
  EXPECT_EQ(info_of(with(all, {{"RANK", "0"}, {"WORLD_SIZE", "2"}})).launcher, Launcher::kTorchrun);
  EXPECT_EQ(info_of({}).launcher, Launcher::kNone);
}

// mpiexec in a job of mpirun: the variables of both are there.
TEST(Launcher, MpichsConnectionTellsThatOpenMpisVariablesAreInherited) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Variables both = with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "9"}});
  both = with(with(both, kMpich), {{"PMI_FD", std::to_string(ends[0])}});
  EXPECT_EQ(info_of(both).launcher, Launcher::kMpich);
  EXPECT_EQ(info_of(both).size, 4);
  Variables no_rank = both;
  no_rank.erase("PMI_RANK");
  EXPECT_EQ(info_of(no_rank).launcher, Launcher::kOpenMpi);
  for (const int end : ends) ::close(end);
  EXPECT_EQ(info_of(both).launcher, Launcher::kOpenMpi);
}

// In this order: SOTTO_RENDEZVOUS, MASTER_ADDR with MASTER_PORT, the launcher's own.
TEST(Launcher, AnAddressThatIsSetWins) {
  const Variables master{{"MASTER_ADDR", "m"}, {"MASTER_PORT", "5"}};
  for (const Variables& variables : {kOpenMpi, kMpich, kSlurm}) {
    EXPECT_EQ(info_of(with(variables, master), "tcp://a:1").address, "tcp://a:1");
    EXPECT_EQ(info_of(with(variables, master)).address, "tcp://m:6");
    EXPECT_EQ(info_of(variables).address, "");
  }
}

// Ports of other programs' meetings are no concern of a rank that meets no one.
TEST(Launcher, OneRankNeedsNoAddress) {
  for (const char* port : {"65535", "0", "x"}) {
    const Variables master{{"MASTER_ADDR", "m"}, {"MASTER_PORT", port}};
    EXPECT_EQ(info_of(with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, master)).address, "");
    EXPECT_EQ(info_of(master).size, 1);
    const Status status =
        launch_info({}, environment_of(with({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, master)))
            .status();
    EXPECT_THAT(status.text(), HasSubstr(fmt::format("MASTER_PORT is \"{}\"", port)));
  }
}

TEST(Launcher, MpichsRanksMeetThroughPmi) {
  const MeetingPlace place = place_of(kMpich).take();
  EXPECT_EQ(place.address, "");
  EXPECT_EQ(place.manager->name, "PMI_FD=6");
  EXPECT_EQ(place.reach, Reach::kNetwork);
  EXPECT_EQ(place_of(with(kMpich, {{"MPI_LOCALNRANKS", "4"}})).take().reach, Reach::kHost);
  EXPECT_EQ(place_of(with(kMpich, {{"MPI_LOCALNRANKS", "2"}})).take().reach, Reach::kNetwork);
  EXPECT_THAT(place_of(with(kMpich, {{"PMI_FD", "x"}})).status().text(),
              HasSubstr("PMI_FD is \"x\""));
}

TEST(Launcher, SlurmsRanksMeetAtTheFirstHost) {
  const MeetingPlace place = place_of(kSlurm).take();
  EXPECT_EQ(place.address, "tcp://n1:20016");
  EXPECT_FALSE(place.manager.has_value());
  EXPECT_EQ(place.reach, Reach::kNetwork);
  EXPECT_EQ(place_of(with(kSlurm, {{"SLURM_JOB_NODELIST", "n1"}})).take().reach, Reach::kHost);
}

TEST(Launcher, OpenMpisRanksNeedItsServer) {
  EXPECT_THAT(place_of(kOpenMpi).status().text(), HasSubstr("but not PMIX_NAMESPACE"));
}

TEST(Launcher, WithoutAPlaceTheVariablesAreNamed) {
  const Status status = place_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}}).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.text(), HasSubstr("the environment says 2 ranks (RANK=1, WORLD_SIZE=2)"));
}

// mpiexec -pmi-port sets neither rank nor size: each process would be a world of its own.
TEST(Launcher, APortOfPmiWithoutARank) {
  const Environment environment = environment_of({{"PMI_PORT", "a:1"}, {"PMI_ID", "0"}});
  const Status status = launch_info({}, environment).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.text(), HasSubstr("PMI_PORT is set, but not PMI_RANK and PMI_SIZE"));
}

// ---- Meeting through a process manager ----

// What rank 0 has published, for all ranks of a test.
struct Board {
  std::map<std::string, std::string> texts;
  int opened = 0;
  Status failure;
};

class OnBoard final : public ProcessManager {
 public:
  explicit OnBoard(Board& board) : board_(board) {}
  Result<std::string> publish(const std::string& key, const std::string& mine, Deadline) override {
    SOTTO_TRY(board_.failure);
    if (!mine.empty()) board_.texts[key] = mine;
    return board_.texts[key];
  }

 private:
  Board& board_;
};

// Managers stay open until the process ends, by name: each test has names of its own.
ManagerPlace place_at(const std::string& name, Board& board) {
  return {name, [&board](Deadline) -> Result<std::unique_ptr<ProcessManager>> {
            ++board.opened;
            return std::unique_ptr<ProcessManager>(std::make_unique<OnBoard>(board));
          }};
}

Result<UniqueId> nobody_asks() { return invalid_state("not rank 0"); }

TEST(Meeting, AllRanksHaveTheIdsOfRankZero) {
  Board board;
  UniqueId id{};
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<uint8_t>(i * 37);
  const auto make = [&]() -> Result<UniqueId> {
    ++id[0];
    return id;
  };
  const ManagerPlace zero = place_at("ids of rank 0", board), one = place_at("ids, rank 1", board);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(meet(zero, 0, make, {}).take(), id);
    EXPECT_EQ(meet(one, 1, nobody_asks, {}).take(), id);
  }
  EXPECT_EQ(board.opened, 2);
  EXPECT_EQ(board.texts.size(), 3u);
  for (const auto& [key, text] : board.texts)
    EXPECT_EQ(text.find_first_of(" =\n"), std::string::npos);
}

TEST(Meeting, WhatFailsOnRankZeroIsToldToTheOthers) {
  Board board;
  const auto fails = [] {
    return Result<UniqueId>(error(Code::kTransport, "no descriptors left"));
  };
  EXPECT_EQ(meet(place_at("failing rank 0", board), 0, fails, {}).status().text(),
            "no descriptors left");
  EXPECT_EQ(meet(place_at("failing, rank 1", board), 1, nobody_asks, {}).status().text(),
            "rank 0 has no place to meet: no descriptors left");
  EXPECT_LE(board.texts["sotto-0"].size(), 350u);
}

TEST(Meeting, WhatIsNoIdIsNamed) {
  for (const char* text : {"", "i", "id-", "id-00", "id-0", "id-xx", "hello", "no-0"}) {
    SCOPED_TRACE(text);
    Board board;
    board.texts["sotto-0"] = text;
    const Status status =
        meet(place_at(std::string("no id: ") + text, board), 1, nobody_asks, {}).status();
    EXPECT_EQ(status.code(), Code::kProtocol);
    EXPECT_THAT(status.text(), HasSubstr("under the key sotto-0; expected: the unique id"));
  }
}

TEST(Meeting, AManagerThatHasFailedIsNotUsedAgain) {
  Board board;
  board.failure = error(Code::kTimeout, "nothing came");
  const ManagerPlace place = place_at("failed once", board);
  const Status first = meet(place, 1, nobody_asks, {}).status();
  EXPECT_EQ(first.code(), Code::kTimeout);
  EXPECT_EQ(first.text(), "rank 1: nothing came");
  board.failure = ok_status();
  const Status second = meet(place, 1, nobody_asks, {}).status();
  EXPECT_EQ(second.code(), Code::kInvalidState);
  EXPECT_EQ(second.text(),
            "rank 1: failed once is not used again after its first failure: nothing came");
}

TEST(Meeting, OneThreadMeetsAtATime) {
  Board board;
  const ManagerPlace inner = place_at("inner", board);
  Status refused;
  const auto make = [&]() -> Result<UniqueId> {
    std::thread([&] { refused = meet(inner, 1, nobody_asks, {}).status(); }).join();
    return UniqueId{};
  };
  EXPECT_TRUE(meet(place_at("outer", board), 0, make, {}).ok());
  EXPECT_EQ(refused.code(), Code::kInvalidState);
  EXPECT_THAT(refused.text(), HasSubstr("another thread of this process is making a comm"));
}

}  // namespace
}  // namespace sotto
