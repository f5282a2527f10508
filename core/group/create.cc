// How a root comm comes to be: rendezvous, agreement, connections.
#include <cstring>

#include "core/base/hash.h"
#include "core/group/comm.h"
#include "core/group/launcher.h"

namespace sotto {
namespace {

// What every rank tells the others before data connections are made.
struct Hello {
  uint32_t version = 1;
  uint32_t reserved = 0;
  uint64_t segment_bytes = 0;
  char transport[16] = {};
};

struct Meeting {
  Backend* backend = nullptr;
  std::string transport;
  JoinRequest request;
};

Status check_rank(int32_t rank, int32_t size) {
  if (size < 1 || size > 65535)
    return invalid_argument("comm size is {}; allowed: 1 to 65535", size);
  if (rank < 0 || rank >= size)
    return invalid_argument("rank is {}; allowed: 0 to {}", rank, size - 1);
  return ok_status();
}

Result<Meeting> plan_meeting(Context& context, const CommConfig& config) {
  Meeting meeting;
  meeting.request.rank = config.rank;
  meeting.request.size = config.size;
  meeting.request.id = config.id;
  meeting.request.exchange = config.exchange;
  if (config.size == 0) {
    SOTTO_ASSIGN(const LaunchInfo info, launch_info(context.params(), context.environment()));
    meeting.request.rank = info.rank;
    meeting.request.size = info.size;
    meeting.request.address = info.address;
    if (info.size > 1 && !config.id && !config.exchange && info.address.empty()) {
      return invalid_argument(
          "{} started {} ranks, but no rendezvous is known: set SOTTO_RENDEZVOUS=tcp://host:port "
          "(an address of rank 0), "
          "or MASTER_ADDR and MASTER_PORT",
          info.launcher, info.size);
    }
  } else if (!config.id && !config.exchange) {
    meeting.request.address = context.params().rendezvous;
    if (config.size > 1 && meeting.request.address.empty()) {
      return invalid_argument(
          "rank {} of {}: no unique id, no all_gather callback and no SOTTO_RENDEZVOUS; one is "
          "needed",
          config.rank, config.size);
    }
  }
  SOTTO_TRY(check_rank(meeting.request.rank, meeting.request.size));
  meeting.transport = config.transport.empty() || config.transport == "auto"
                          ? context.params().transport
                          : config.transport;
  if (meeting.request.id.has_value()) {
    SOTTO_ASSIGN(meeting.backend, context.backend_for(*meeting.request.id));
    if (meeting.transport == "auto") meeting.transport = meeting.backend->name();
    if (meeting.transport != meeting.backend->name()) {
      return invalid_argument("the unique id belongs to transport \"{}\", but \"{}\" was asked for",
                              meeting.backend->name(), meeting.transport);
    }
    return meeting;
  }
  if (meeting.transport == "auto") meeting.transport = meeting.request.size == 1 ? "inproc" : "tcp";
  SOTTO_ASSIGN(meeting.backend, context.backend(meeting.transport));
  if (meeting.request.size == 1 && !meeting.request.exchange && meeting.request.address.empty()) {
    SOTTO_ASSIGN(meeting.request.id, meeting.backend->make_unique_id());
  }
  return meeting;
}

// Versions must be equal; the smallest segment size wins.
Result<uint64_t> agree(ControlPlane& control, const std::string& transport, uint64_t segment_bytes,
                       Driver& driver, Deadline deadline) {
  Hello mine;
  mine.segment_bytes = segment_bytes;
  transport.copy(mine.transport, sizeof mine.transport - 1);
  const std::string blob(reinterpret_cast<const char*>(&mine), sizeof mine);
  SOTTO_ASSIGN(const std::vector<std::string> all,
               control.all_gather("agreement", blob, driver, deadline));
  uint64_t segment = segment_bytes;
  for (size_t r = 0; r < all.size(); ++r) {
    Hello hello;
    if (all[r].size() != sizeof hello) {
      return error(
          Code::kProtocol,
          "rank {} sent {} bytes of set-up data, {} expected: its library has another version", r,
          all[r].size(), sizeof hello);
    }
    std::memcpy(&hello, all[r].data(), sizeof hello);
    if (hello.version != mine.version) {
      return error(Code::kProtocol, "rank {} speaks version {} of the set-up, rank {} version {}",
                   r, hello.version, control.rank(), mine.version);
    }
    if (std::memcmp(hello.transport, mine.transport, sizeof mine.transport) != 0) {
      return error(Code::kProtocol, "rank {} wants transport \"{:.15}\", rank {} \"{}\"", r,
                   hello.transport, control.rank(), transport);
    }
    segment = std::min(segment, hello.segment_bytes);
  }
  return segment;
}

Status connect(Context& context, const Meeting& meeting, RootComm& root, Driver& driver) {
  ControlPlane& control = *root.channel->control();
  SOTTO_ASSIGN(root.segment_bytes, agree(control, meeting.transport,
                                         static_cast<uint64_t>(context.params().segment_bytes),
                                         driver, meeting.request.deadline));
  SOTTO_ASSIGN(std::unique_ptr<Transport> transport,
               meeting.backend->connect(control, *root.channel, driver, meeting.request.deadline));
  root.channel->attach(std::move(transport));
  return ok_status();
}

}  // namespace

Result<std::shared_ptr<Comm>> Comm::create(const std::shared_ptr<Context>& context,
                                           CommConfig config) {
  auto root = std::make_shared<RootComm>();
  root->context = context;
  root->timeout_us = config.timeout_us == 0 ? context->params().timeout_us : config.timeout_us;
  SOTTO_ASSIGN(Meeting meeting, plan_meeting(*context, config));
  Engine& engine = *context->engine();
  meeting.request.deadline = Deadline::in_us(engine.clock(), root->timeout_us);
  root->transport = meeting.transport;
  SOTTO_TRY(engine.drive([&](Driver& driver) -> Status {
    SOTTO_ASSIGN(std::unique_ptr<ControlPlane> control,
                 meeting.backend->join(meeting.request, driver));
    root->channel = std::make_shared<Channel>(context->engine());
    root->channel->attach(std::move(control));
    const Status status = connect(*context, meeting, *root, driver);
    // The others wait for this rank: they learn why it does not come.
    if (!status.ok())
      root->channel->control()->fail(
          {status.code(), root->channel->control()->rank(), status.text()});
    return status;
  }));
  const ControlPlane& control = *root->channel->control();
  std::vector<int32_t> ranks(static_cast<size_t>(control.size()));
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<int32_t>(r);
  const int32_t rank = control.rank();
  const uint64_t token = control.token();
  return std::shared_ptr<Comm>(new Comm(std::move(root), std::move(ranks), rank, token));
}

}  // namespace sotto
