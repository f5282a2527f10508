#include "core/group/pmi.h"

#include <unistd.h>

#include <map>
#include <optional>
#include <string_view>

#include "core/base/text.h"
#include "core/group/line_socket.h"
#include "core/group/variables.h"

namespace sotto {
namespace {

// The end of a process waits no longer for the server.
constexpr int64_t kFinalizeUs = 2'000'000;

struct Reply {
  std::string line;
  std::map<std::string, std::string> words = {};

  std::string word(const std::string& name) const {
    const auto found = words.find(name);
    return found == words.end() ? "" : found->second;
  }
};

Reply reply_of(std::string line) {
  Reply reply{std::move(line)};
  std::string_view rest = reply.line;
  while (!rest.empty()) {
    const std::string_view word = rest.substr(0, rest.find(' '));
    rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    const size_t equals = word.find('=');
    if (equals == std::string_view::npos) continue;
    reply.words.emplace(word.substr(0, equals), word.substr(equals + 1));
  }
  return reply;
}

class Pmi final : public ProcessManager {
 public:
  Pmi(std::string name, LineSocket socket, int32_t rank, const Clock& clock)
      : name_(std::move(name)), socket_(std::move(socket)), rank_(rank), clock_(clock) {}
  // Hydra takes a connection that is closed without a word for a process that has failed, and kills
  // the job. After a failure it stays open, so that the caller can say what went wrong.
  ~Pmi() override {
    if (getpid() != owner_) return;
    const bool said =
        ready_ && ask("cmd=finalize", "finalize_ack", Deadline::in_us(clock_, kFinalizeUs)).ok();
    if (!said) socket_.leave_open();
  }

  // By PMI_PORT a process says who it is, and is told its rank and size.
  Status introduce(int64_t id, int32_t size, Deadline deadline) {
    SOTTO_TRY(ask(fmt::format("cmd=initack pmiid={}", id), "initack", deadline).status());
    SOTTO_TRY(check_equal("size", size, deadline));
    SOTTO_TRY(check_equal("rank", rank_, deadline));
    return next("cmd=initack", "set", deadline).status();  // debug=...
  }

  Status begin(Deadline deadline) {
    SOTTO_ASSIGN(const Reply init,
                 ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init", deadline));
    if (init.word("pmi_version") != "1") return unexpected(init, "cmd=init", "pmi_version=1");
    SOTTO_ASSIGN(const Reply limits, ask("cmd=get_maxes", "maxes", deadline));
    SOTTO_ASSIGN(most_key_, limit(limits, "keylen_max"));
    SOTTO_ASSIGN(most_value_, limit(limits, "vallen_max"));
    SOTTO_ASSIGN(const Reply space, ask("cmd=get_my_kvsname", "my_kvsname", deadline));
    kvsname_ = space.word("kvsname");
    if (kvsname_.empty()) return unexpected(space, "cmd=get_my_kvsname", "kvsname=NAME");
    ready_ = true;
    return ok_status();
  }

  Result<std::string> publish(const std::string& key, const std::string& mine,
                              Deadline deadline) override {
    ready_ = false;  // until this dialogue has ended well
    const std::string place = fmt::format("kvsname={} key={}", kvsname_, key);
    if (rank_ == 0) {
      SOTTO_TRY(check_lengths(key, mine));
      SOTTO_TRY(
          ask(fmt::format("cmd=put {} value={}", place, mine), "put_result", deadline).status());
    }
    SOTTO_TRY(ask("cmd=barrier_in", "barrier_out", deadline).status());
    std::string text = mine;
    if (rank_ != 0) {
      SOTTO_ASSIGN(const Reply found, ask("cmd=get " + place, "get_result", deadline));
      text = found.word("value");
      if (text.empty()) return unexpected(found, "cmd=get " + place, "value=TEXT");
    }
    ready_ = true;
    return text;
  }

 private:
  // A request, and its reply: cmd=`command`, and rc=0 where the server says how it went.
  Result<Reply> ask(const std::string& request, const char* command, Deadline deadline) {
    if (Status sent = socket_.send(request + "\n", clock_, deadline); !sent.ok())
      return sent.with_prefix(fmt::format("{}: \"{}\"", name_, shown(request)));
    return next(request, command, deadline);
  }

  Result<Reply> next(const std::string& request, const char* command, Deadline deadline) {
    Result<std::string> line = socket_.line(clock_, deadline);
    if (!line.ok()) {
      return line.status().with_prefix(
          fmt::format("{}: \"{}\", whose answer is cmd={}", name_, shown(request), command));
    }
    Reply reply = reply_of(line.take());
    if (reply.word("cmd") != command)
      return unexpected(reply, request, fmt::format("cmd={}", command));
    const std::string result = reply.word("rc");
    if (!result.empty() && result != "0") return unexpected(reply, request, "rc=0");
    return reply;
  }

  Status unexpected(const Reply& reply, const std::string& request,
                    const std::string& expected) const {
    return error(Code::kProtocol, "{}: \"{}\" was answered with \"{}\"; expected: {}", name_,
                 shown(request), printable(reply.line, 200), expected);
  }

  Result<size_t> limit(const Reply& reply, const char* name) const {
    const Result<int64_t> number = number_of(name, reply.word(name), 1, INT32_MAX);
    if (!number.ok()) return unexpected(reply, "cmd=get_maxes", fmt::format("{}=NUMBER", name));
    return static_cast<size_t>(*number);
  }

  Status check_equal(const char* name, int32_t own, Deadline deadline) {
    SOTTO_ASSIGN(const Reply told, next("cmd=initack", "set", deadline));
    if (told.word(name) == std::to_string(own)) return ok_status();
    if (told.word(name).empty())
      return unexpected(told, "cmd=initack", fmt::format("cmd=set {}=NUMBER", name));
    return invalid_argument(
        "{}: the server says {}={}, the environment {}; it is that of another job", name_, name,
        printable(told.word(name)), own);
  }

  // Lengths count the end of the text, as in C.
  Status check_lengths(const std::string& key, const std::string& value) const {
    if (key.size() < most_key_ && value.size() < most_value_) return ok_status();
    return unsupported(
        "{}: keys of {} bytes and values of {} are needed, the server takes keylen_max={} and "
        "vallen_max={}; set SOTTO_RENDEZVOUS",
        name_, key.size() + 1, value.size() + 1, most_key_, most_value_);
  }

  static std::string shown(const std::string& request) { return printable(request, 60); }

  const std::string name_;
  LineSocket socket_;
  const int32_t rank_;
  const Clock& clock_;
  const pid_t owner_ = getpid();
  bool ready_ = false;  // for a request
  size_t most_key_ = 0, most_value_ = 0;
  std::string kvsname_;
};

}  // namespace

Result<PmiServer> pmi_server(const Environment& environment) {
  const auto fd = environment.get("PMI_FD"), port = environment.get("PMI_PORT");
  if (fd.has_value()) {
    SOTTO_ASSIGN(const int64_t number, number_of("PMI_FD", *fd, 0, INT32_MAX));
    return PmiServer{.name = "PMI_FD=" + *fd, .fd = static_cast<int>(number)};
  }
  if (!port.has_value()) {
    return invalid_argument(
        "PMI_RANK and PMI_SIZE are set, but neither PMI_FD nor PMI_PORT, at which ranks could "
        "meet; set SOTTO_RENDEZVOUS=tcp://host:port (an address of rank 0)");
  }
  const size_t colon = port->rfind(':');
  if (colon == std::string::npos || colon == 0)
    return invalid_argument("environment variable PMI_PORT is \"{}\"; allowed: HOST:PORT",
                            printable(*port));
  PmiServer server{.name = "PMI_PORT=" + printable(*port)};
  server.host = port->substr(0, colon);
  server.port = port->substr(colon + 1);
  SOTTO_TRY(number_of("PMI_PORT (its port)", server.port, 1, 65535).status());
  SOTTO_ASSIGN(server.id,
               number_of("PMI_ID", environment.get("PMI_ID").value_or(""), 0, INT32_MAX));
  return server;
}

bool has_pmi_connection(const Environment& environment) {
  const auto fd = environment.get("PMI_FD");
  if (!fd.has_value()) return false;
  const Result<int64_t> number = number_of("PMI_FD", *fd, 0, INT32_MAX);
  return number.ok() && LineSocket::lent(static_cast<int>(*number)).ok();
}

Result<std::unique_ptr<ProcessManager>> open_pmi(const PmiServer& server, int32_t rank,
                                                 int32_t size, const Clock& clock,
                                                 Deadline deadline) {
  Result<LineSocket> socket = server.fd >= 0
                                  ? LineSocket::lent(server.fd)
                                  : LineSocket::connect(server.host, server.port, clock, deadline);
  if (!socket.ok()) return socket.status().with_prefix(server.name);
  auto pmi = std::make_unique<Pmi>(server.name, socket.take(), rank, clock);
  if (server.fd < 0) SOTTO_TRY(pmi->introduce(server.id, size, deadline));
  SOTTO_TRY(pmi->begin(deadline));
  return std::unique_ptr<ProcessManager>(std::move(pmi));
}

}  // namespace sotto
