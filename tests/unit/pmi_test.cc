// PMI-1 against a server that the tests write.
#include "core/group/pmi.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <thread>
#include <vector>

#include "tests/support/reserved_port.h"
#include "tests/support/variables.h"

namespace sotto {
namespace {

using test::environment_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int64_t kLongUs = 30'000'000, kShortUs = 50'000;

// What the server reads, and says to that. It ends with the last line, or where the process has
// closed its end.
struct Line {
  std::string request, reply;
};
using Script = std::vector<Line>;

const Line kInit{"cmd=init pmi_version=1 pmi_subversion=1",
                 "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"};
const Line kMaxes{"cmd=get_maxes", "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"};
const Line kName{"cmd=get_my_kvsname", "cmd=my_kvsname kvsname=kvs_7_0"};
const Line kBarrier{"cmd=barrier_in", "cmd=barrier_out"};
const Line kPut{"cmd=put kvsname=kvs_7_0 key=sotto-0 value=id-0123",
                "cmd=put_result rc=0 msg=success"};
const Line kGet{"cmd=get kvsname=kvs_7_0 key=sotto-0",
                "cmd=get_result rc=0 msg=success value=id-0123"};
const Line kFinalize{"cmd=finalize", "cmd=finalize_ack"};

Script begin_and(std::vector<Line> more) {
  Script script{kInit, kMaxes, kName};
  script.insert(script.end(), more.begin(), more.end());
  return script;
}

class Server {
 public:
  // With a socket that a process was given.
  explicit Server(Script script) : script_(std::move(script)) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    client_ = ends[0];
    thread_ = std::thread([this, fd = ends[1]] { serve(fd); });
  }
  // At a port.
  Server(Script script, int listener) : script_(std::move(script)) {
    thread_ = std::thread([this, listener] { serve(accept(listener, nullptr, nullptr)); });
  }
  ~Server() { close(); }

  void close() {
    if (client_ >= 0) ::close(client_);
    client_ = -1;
    if (thread_.joinable()) thread_.join();
  }
  PmiServer place() const { return {.name = "PMI_FD=6", .fd = client_}; }
  // Once it has closed.
  const std::vector<std::string>& requests() const { return requests_; }

 private:
  void serve(int fd) {
    for (const Line& line : script_) {
      std::string request;
      for (char c = 0; read(fd, &c, 1) == 1 && c != '\n';) request += c;
      if (request.empty()) break;
      requests_.push_back(request);
      EXPECT_EQ(request, line.request);
      if (line.reply.empty()) break;
      const std::string reply = line.reply == "never" ? "" : line.reply + "\n";
      EXPECT_EQ(write(fd, reply.data(), reply.size()), static_cast<ssize_t>(reply.size()));
      if (!reply.empty()) continue;
      char c = 0;
      EXPECT_EQ(read(fd, &c, 1), 0);  // until the other end is closed
    }
    ::close(fd);
  }

  Script script_;
  int client_ = -1;
  std::vector<std::string> requests_;
  std::thread thread_;
};

Deadline in_us(int64_t us) { return Deadline::in_us(Clock::monotonic(), us); }

// Rank `rank` of 2, from the first line to what rank 0 has published.
Result<std::string> meet_at(const PmiServer& place, int32_t rank, int64_t us) {
  SOTTO_ASSIGN(const std::unique_ptr<ProcessManager> pmi,
               open_pmi(place, rank, 2, Clock::monotonic(), in_us(us)));
  return pmi->publish("sotto-0", rank == 0 ? "id-0123" : "", in_us(us));
}

// The text of a failure of rank 1.
std::string failure(Script script, Code code, int64_t us = kLongUs) {
  Server server(std::move(script));
  const Status status = meet_at(server.place(), 1, us).status();
  EXPECT_EQ(status.code(), code) << status.text();
  return status.text();
}

TEST(Pmi, RankZeroPutsAndTheOthersGet) {
  for (const int32_t rank : {0, 1}) {
    SCOPED_TRACE(rank);
    Server server(begin_and(rank == 0 ? Script{kPut, kBarrier, kFinalize}
                                      : Script{kBarrier, kGet, kFinalize}));
    const Result<std::string> text = meet_at(server.place(), rank, kLongUs);
    ASSERT_TRUE(text.ok()) << text.status().text();
    EXPECT_EQ(*text, "id-0123");
    server.close();
    EXPECT_EQ(server.requests().back(), "cmd=finalize");
  }
}

TEST(Pmi, RepliesMaySayMoreThanIsAskedFor) {
  Server server(begin_and({{"cmd=barrier_in", "cmd=barrier_out  rc=0 msg=success word"},
                           {kGet.request, "cmd=get_result value=id-0123 rc=0"},
                           kFinalize}));
  EXPECT_EQ(meet_at(server.place(), 1, kLongUs).take(), "id-0123");
}

TEST(Pmi, AWrongReplyIsNamedWithWhatWasExpected) {
  const auto with = [](const Line& line, const char* reply) { return Line{line.request, reply}; };
  struct Case {
    Script script;
    const char* expected;
  };
  const Case cases[] = {
      {{with(kInit, "nonsense")}, "was answered with \"nonsense\"; expected: cmd=response_to_init"},
      {{with(kInit, "cmd=response_to_init pmi_version=2 rc=0")}, "expected: pmi_version=1"},
      {{with(kInit, "cmd=response_to_init pmi_version=1 rc=-1")}, "expected: rc=0"},
      {{kInit, with(kMaxes, "cmd=maxes keylen_max=64")},
       "\"cmd=get_maxes\" was answered with \"cmd=maxes keylen_max=64\"; expected: "
       "vallen_max=NUMBER"},
      {{kInit, with(kMaxes, "cmd=maxes keylen_max=x vallen_max=1024")},
       "expected: keylen_max=NUMBER"},
      {{kInit, kMaxes, with(kName, "cmd=my_kvsname kvsname=")}, "expected: kvsname=NAME"},
      {begin_and({with(kBarrier, "cmd=barrier_in")}),
       "\"cmd=barrier_in\" was answered with \"cmd=barrier_in\"; expected: cmd=barrier_out"},
      {begin_and({with(kBarrier, "cmd=barrier_out rc=1")}), "expected: rc=0"},
      {begin_and({kBarrier, with(kGet, "cmd=get_result rc=-1 msg=key_sotto-0_not_found value=?")}),
       "msg=key_sotto-0_not_found value=?\"; expected: rc=0"},
      {begin_and({kBarrier, with(kGet, "cmd=get_result rc=0")}), "expected: value=TEXT"},
      {begin_and({with(kBarrier, "cmd=\x01\xff")}), "was answered with \"cmd=\\x01\\xff\""}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.expected);
    EXPECT_THAT(failure(c.script, Code::kProtocol),
                AllOf(StartsWith("PMI_FD=6: \"cmd="), HasSubstr(c.expected)));
  }
}

TEST(Pmi, ALineWithoutAnEndIsRefused) {
  EXPECT_THAT(failure({{kInit.request, std::string(20000, 'x')}}, Code::kProtocol),
              HasSubstr("a line of more than 8192 bytes came: \"xxx"));
}

TEST(Pmi, AServerThatClosesIsNamedWithWhatItWasAsked) {
  EXPECT_THAT(failure({{kInit.request, ""}}, Code::kTransport),
              HasSubstr("PMI_FD=6: \"cmd=init pmi_version=1 pmi_subversion=1\", whose answer is "
                        "cmd=response_to_init: the other end has closed the connection"));
  EXPECT_THAT(failure(begin_and({{kBarrier.request, ""}}), Code::kTransport),
              HasSubstr("\"cmd=barrier_in\", whose answer is cmd=barrier_out: the other end"));
}

TEST(Pmi, AServerThatNeverAnswersIsNotWaitedForForever) {
  EXPECT_EQ(failure({{kInit.request, "never"}}, Code::kTimeout, kShortUs),
            "PMI_FD=6: \"cmd=init pmi_version=1 pmi_subversion=1\", whose answer is "
            "cmd=response_to_init: nothing came within the time limit");
}

// It would not be asked again: the end of the process does not wait for it either.
TEST(Pmi, AfterAFailureTheServerIsLeftAlone) {
  Server server(begin_and({{kBarrier.request, "cmd=oops"}, kFinalize}));
  EXPECT_FALSE(meet_at(server.place(), 1, kLongUs).ok());
  server.close();
  EXPECT_EQ(server.requests().back(), "cmd=barrier_in");
}

TEST(Pmi, AServerOfShortValuesIsRefused) {
  for (const char* limits : {"keylen_max=64 vallen_max=7", "keylen_max=7 vallen_max=64"}) {
    Server server({kInit, {kMaxes.request, std::string("cmd=maxes ") + limits}, kName});
    const Status status = meet_at(server.place(), 0, kLongUs).status();
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_THAT(status.text(), AllOf(HasSubstr("keys of 8 bytes and values of 8 are needed"),
                                     HasSubstr("SOTTO_RENDEZVOUS")));
  }
  Server server({kInit,
                 {kMaxes.request, "cmd=maxes keylen_max=8 vallen_max=8"},
                 kName,
                 kPut,
                 kBarrier,
                 kFinalize});
  EXPECT_TRUE(meet_at(server.place(), 0, kLongUs).ok());
}

// The number may be that of another file by now.
TEST(Pmi, ADescriptorThatIsNone) {
  const int file = open("/dev/null", O_RDWR), lonely = socket(AF_INET, SOCK_STREAM, 0);
  const int closed = dup(file);
  close(closed);
  struct Case {
    int fd;
    const char* why;
  };
  for (const Case& c : {Case{closed, "(Bad file descriptor)"},
                        {file, "(Socket operation on non-socket)"},
                        {lonely, "(Transport endpoint is not connected)"}}) {
    const Status status = meet_at({.name = "PMI_FD=9", .fd = c.fd}, 1, kLongUs).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.text(), AllOf(StartsWith("PMI_FD=9: descriptor "), HasSubstr(c.why),
                                     HasSubstr("between the launcher and this one has closed it")));
  }
  close(file);
  close(lonely);
}

// ---- By PMI_PORT ----

class PmiPort : public testing::Test {
 protected:
  PmiPort() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size), 0);
    place_ = {.name = "PMI_PORT=here",
              .host = "127.0.0.1",
              .port = std::to_string(ntohs(at.sin_port)),
              .id = 1};
  }
  ~PmiPort() override { close(listener_); }

  Result<std::string> meet_after(const std::string& greeting, std::vector<Line> more = {}) {
    Script script{{"cmd=initack pmiid=1", greeting}};
    script.insert(script.end(), more.begin(), more.end());
    Server server(script, listener_);
    return meet_at(place_, 1, kLongUs);
  }

  int listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  PmiServer place_;
};

TEST_F(PmiPort, TheServerSaysRankAndSize) {
  const Result<std::string> text =
      meet_after("cmd=initack\ncmd=set size=2\ncmd=set rank=1\ncmd=set debug=0",
                 begin_and({kBarrier, kGet, kFinalize}));
  ASSERT_TRUE(text.ok()) << text.status().text();
  EXPECT_EQ(*text, "id-0123");
}

TEST_F(PmiPort, AServerOfAnotherJobIsNamed) {
  const Status size = meet_after("cmd=initack\ncmd=set size=8").status();
  EXPECT_EQ(size.code(), Code::kInvalidArgument);
  EXPECT_EQ(size.text(),
            "PMI_PORT=here: the server says size=8, the environment 2; it is that of another job");
  EXPECT_EQ(meet_after("cmd=initack\ncmd=set size=2\ncmd=set rank=0").status().text(),
            "PMI_PORT=here: the server says rank=0, the environment 1; it is that of another job");
  EXPECT_THAT(meet_after("cmd=initack\ncmd=set debug=0").status().text(),
              HasSubstr("answered with \"cmd=set debug=0\"; expected: cmd=set size=NUMBER"));
}

// Hydra kills a job one of whose connections is closed before the end, and the reason with it.
TEST_F(PmiPort, AfterAFailureTheConnectionStaysOpen) {
  std::thread client([this] { EXPECT_FALSE(meet_at(place_, 1, kLongUs).ok()); });
  const int fd = accept(listener_, nullptr, nullptr);
  constexpr char kReply[] = "cmd=initack\ncmd=set size=8\n";
  EXPECT_EQ(write(fd, kReply, sizeof kReply - 1), static_cast<ssize_t>(sizeof kReply - 1));
  client.join();
  char text[64];
  EXPECT_GT(recv(fd, text, sizeof text, 0), 0);  // cmd=initack
  EXPECT_EQ(recv(fd, text, sizeof text, MSG_DONTWAIT), -1);
  EXPECT_EQ(errno, EAGAIN);
  close(fd);
}

TEST_F(PmiPort, APortWhereNobodyListens) {
  const test::ReservedPort port;
  place_.port = std::to_string(port.number());
  const Status status = meet_at(place_, 1, kLongUs).status();
  EXPECT_EQ(status.code(), Code::kTransport);
  EXPECT_EQ(status.text(), "PMI_PORT=here: cannot connect: Connection refused");
}

// ---- The environment ----

TEST(PmiServer, OfTheEnvironment) {
  const PmiServer fd = pmi_server(environment_of({{"PMI_FD", "6"}, {"PMI_PORT", "x"}})).take();
  EXPECT_EQ(fd.fd, 6);
  EXPECT_EQ(fd.name, "PMI_FD=6");
  const PmiServer port =
      pmi_server(environment_of({{"PMI_PORT", "::1:4000"}, {"PMI_ID", "3"}})).take();
  EXPECT_EQ(port.fd, -1);
  EXPECT_EQ(port.host + " " + port.port, "::1 4000");
  EXPECT_EQ(port.id, 3);
}

TEST(PmiServer, BadVariablesAreNamed) {
  struct Case {
    std::map<std::string, std::string> variables;
    const char* text;
  };
  for (const Case& c :
       {Case{{}, "neither PMI_FD nor PMI_PORT"},
        {{{"PMI_FD", "six"}}, "PMI_FD is \"six\"; allowed: a whole number 0 to 2147483647"},
        {{{"PMI_FD", "-1"}}, "PMI_FD is \"-1\""},
        {{{"PMI_FD", ""}}, "PMI_FD is \"\""},
        {{{"PMI_PORT", "host"}}, "PMI_PORT is \"host\"; allowed: HOST:PORT"},
        {{{"PMI_PORT", ":1"}}, "PMI_PORT is \":1\"; allowed: HOST:PORT"},
        {{{"PMI_PORT", "host:0"}}, "PMI_PORT (its port) is \"0\""},
        {{{"PMI_PORT", "host:1"}}, "PMI_ID is \"\""}}) {
    SCOPED_TRACE(c.text);
    const Status status = pmi_server(environment_of(c.variables)).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.text(), HasSubstr(c.text));
  }
}

}  // namespace
}  // namespace sotto
