// What is asked of libpmix, by a stand-in for it.
#include "core/group/pmix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tests/support/variables.h"

namespace sotto {
namespace {

using test::environment_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kNotFound = -46;

// The library's state, which is the process's.
struct Library {
  std::mutex mutex;
  std::condition_variable released;
  std::vector<std::string> calls;
  std::map<std::string, std::string> published;
  uint32_t rank = 0, size = 2;
  std::string failing;  // the call that returns an error
  std::string held;     // the call that does not return
  int holding = 0;
  uint16_t type = pmix::kString;  // of values that ranks have published
};
Library library;

int called(const std::string& name) {
  std::unique_lock lock(library.mutex);
  library.calls.push_back(name);
  if (library.held == name) {
    ++library.holding;
    library.released.wait(lock, [] { return library.held.empty(); });
    --library.holding;
    library.released.notify_all();
    return -1;
  }
  return library.failing == name ? -1 : 0;
}

int init(pmix::Proc* self, pmix::Info*, size_t) {
  std::strcpy(self->job, "job");
  self->rank = library.rank;
  return called("init");
}
int finalize(const pmix::Info*, size_t) { return called("finalize"); }
int put(uint8_t scope, const char* key, pmix::Value* value) {
  EXPECT_EQ(scope, pmix::kGlobal);
  EXPECT_EQ(value->type, pmix::kString);
  library.published[key] = value->data.string;
  return called("put");
}
int commit() { return called("commit"); }
int fence(const pmix::Proc* procs, size_t count, const pmix::Info* info, size_t infos) {
  EXPECT_TRUE(procs == nullptr && count == 0) << "all ranks";
  EXPECT_EQ(infos, 1u);
  EXPECT_STREQ(info->key, "pmix.collect");
  EXPECT_TRUE(info->value.type == pmix::kBool && info->value.data.flag);
  return called("fence");
}
int get(const pmix::Proc* proc, const char* key, const pmix::Info*, size_t, pmix::Value** value) {
  EXPECT_STREQ(proc->job, "job");
  if (const int failed = called("get " + std::string(key)); failed != 0) return failed;
  const bool size = std::strcmp(key, "pmix.job.size") == 0;
  EXPECT_EQ(proc->rank, size ? pmix::kAnyRank : 0);
  if (!size && library.published.count(key) == 0) return kNotFound;
  *value = static_cast<pmix::Value*>(std::calloc(1, sizeof(pmix::Value)));
  (*value)->type = size ? pmix::kUint32 : library.type;
  if (size) (*value)->data.number = library.size;
  if (!size && library.type == pmix::kString)
    (*value)->data.string = strdup(library.published[key].c_str());
  return 0;
}
const char* error_string(int status) { return status == kNotFound ? "NOT-FOUND" : "ERROR"; }

const pmix::Api kApi{"/lib/libpmix.so.2", init, finalize, put, commit, fence, get, error_string};
constexpr int64_t kLongUs = 30'000'000, kShortUs = 50'000;

class Pmix : public testing::Test {
 protected:
  Pmix() {
    library.calls.clear();
    library.published.clear();
    library.failing.clear();
    library.rank = 1;
    library.size = 2;
    library.type = pmix::kString;
  }

  static Result<std::string> meet(int32_t rank, int64_t us = kLongUs) {
    const Deadline deadline = Deadline::in_us(Clock::monotonic(), us);
    SOTTO_ASSIGN(const auto manager, pmix::open(kApi, "PMIx (PMIX_NAMESPACE=job)", rank, 2,
                                                Clock::monotonic(), deadline));
    return manager->publish("sotto-0", rank == 0 ? "id-0123" : "", deadline);
  }
};

TEST_F(Pmix, RankZeroPutsAndTheOthersGet) {
  library.rank = 0;
  EXPECT_EQ(meet(0).take(), "id-0123");
  EXPECT_THAT(library.calls,
              ElementsAre("init", "get pmix.job.size", "put", "commit", "fence", "finalize"));
  EXPECT_EQ(library.published["sotto-0"], "id-0123");
  library.calls.clear();
  library.rank = 1;
  EXPECT_EQ(meet(1).take(), "id-0123");
  EXPECT_THAT(library.calls,
              ElementsAre("init", "get pmix.job.size", "fence", "get sotto-0", "finalize"));
}

TEST_F(Pmix, AServerOfAnotherJobIsNamed) {
  library.size = 8;
  const Status size = meet(1).status();
  EXPECT_EQ(size.code(), Code::kInvalidArgument);
  EXPECT_EQ(size.text(),
            "PMIx (PMIX_NAMESPACE=job): the server says size=8, the environment 2; it is that of "
            "another job");
  library.rank = 3;
  EXPECT_THAT(meet(1).status().text(), HasSubstr("the server says rank=3, the environment 1"));
}

TEST_F(Pmix, ACallThatFailsIsNamed) {
  struct Case {
    const char* failing;
    const char* text;
    int32_t rank;
  };
  for (const Case& c : {Case{"init", "PMIx_Init of /lib/libpmix.so.2: ERROR (-1)", 1},
                        {"get pmix.job.size", "PMIx_Get(pmix.job.size) of", 1},
                        {"put", "PMIx_Put of", 0},
                        {"commit", "PMIx_Commit of", 0},
                        {"fence", "PMIx_Fence of", 1},
                        {"get sotto-0", "PMIx_Get(sotto-0) of", 1}}) {
    SCOPED_TRACE(c.failing);
    library.failing = c.failing;
    library.rank = static_cast<uint32_t>(c.rank);
    const Status status = meet(c.rank).status();
    EXPECT_EQ(status.code(), Code::kTransport);
    EXPECT_THAT(status.text(), AllOf(HasSubstr("PMIx (PMIX_NAMESPACE=job): "), HasSubstr(c.text)));
  }
}

TEST_F(Pmix, WhatRankZeroHasNotPublished) {
  EXPECT_THAT(meet(1).status().text(), HasSubstr("PMIx_Get(sotto-0) of /lib/libpmix.so.2: "
                                                 "NOT-FOUND (-46)"));
  library.published["sotto-0"] = "";
  library.type = pmix::kUint32;
  const Status status = meet(1).status();
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_THAT(status.text(), HasSubstr("brought a value of type 14; expected: 3"));
}

// The call goes on by itself, and what it holds stays there until it returns.
TEST_F(Pmix, ACallThatDoesNotReturnIsNotWaitedForForever) {
  struct Case {
    const char* held;
    const char* text;
  };
  for (const Case& c :
       {Case{"init", "PMIx_Init"}, {"fence", "PMIx_Fence"}, {"get sotto-0", "PMIx_Get"}}) {
    SCOPED_TRACE(c.held);
    library.published["sotto-0"] = "id-0123";
    library.calls.clear();
    library.held = c.held;
    const Status status = meet(1, kShortUs).status();
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_EQ(status.text(), "PMIx (PMIX_NAMESPACE=job): " + std::string(c.text) +
                                 " has not returned within the time limit");
    std::unique_lock lock(library.mutex);
    EXPECT_THAT(library.calls, testing::Not(testing::Contains("finalize")));
    library.held.clear();
    library.released.notify_all();
    library.released.wait(lock, [] { return library.holding == 0; });
  }
}

TEST(PmixLibrary, NoneOrAnotherOne) {
  const Status none = pmix::load("libno-pmix.so.2").status();
  EXPECT_EQ(none.code(), Code::kUnsupported);
  EXPECT_THAT(none.text(), AllOf(HasSubstr("libno-pmix.so.2"), HasSubstr("libpmix2"),
                                 HasSubstr("SOTTO_RENDEZVOUS")));
  const Status other = pmix::load("libm.so.6").status();
  EXPECT_EQ(other.code(), Code::kUnsupported);
  EXPECT_THAT(other.text(), HasSubstr("it lacks PMIx_Init, PMIx_Finalize, PMIx_Put, PMIx_Commit, "
                                      "PMIx_Fence, PMIx_Get, PMIx_Error_string"));
}

TEST(PmixServer, IsThatOfTheEnvironment) {
  EXPECT_EQ(pmix::server_name(environment_of({{"PMIX_NAMESPACE", "12.1"}})).take(),
            "PMIx (PMIX_NAMESPACE=12.1)");
  for (const auto& variables : {std::map<std::string, std::string>{}, {{"PMIX_NAMESPACE", ""}}}) {
    const Status status = pmix::server_name(environment_of(variables)).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.text(), HasSubstr("but not PMIX_NAMESPACE"));
  }
}

}  // namespace
}  // namespace sotto
