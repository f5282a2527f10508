#include "transports/inproc/inproc_backend.h"

#include <algorithm>
#include <cstring>

#include "core/iface/unique_id.h"
#include "transports/inproc/control.h"
#include "transports/inproc/hub.h"
#include "transports/inproc/inproc_transport.h"
#include "transports/inproc/mailbox.h"

namespace sotto {
namespace inproc {
namespace {

// Unused ids whose hubs are kept alive. Beyond that the oldest settled one is forgotten.
constexpr size_t kKeptHubs = 64;

// A rank's record in the caller's exchange. Within one process, so in native layout.
struct MemberRecord {
  uint64_t process_token;
  uint64_t hub_token;  // of rank 0
  int32_t rank;
  int32_t size;
};
static_assert(sizeof(MemberRecord) == 24);

class InprocBackend final : public Backend {
 public:
  explicit InprocBackend(const Clock& clock) : mailbox_(std::make_shared<Mailbox>(clock)) {}
  // Other ranks may still hold the mailbox, and wake it.
  ~InprocBackend() override { mailbox_->forward_wakes(nullptr); }

  const char* name() const override { return "inproc"; }
  Poller& poller() override { return *mailbox_; }
  Result<UniqueId> make_unique_id(Reach reach) override;
  bool knows(const UniqueId& id) const override;
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver) override;
  uint64_t place() const override { return process_token(); }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override;

 private:
  Result<std::shared_ptr<Hub>> find_hub(const JoinRequest& request);
  Result<std::shared_ptr<Hub>> hub_by_id(const UniqueId& id) const;
  Result<std::shared_ptr<Hub>> hub_by_exchange(const JoinRequest& request);

  const std::shared_ptr<Mailbox> mailbox_;
  std::vector<std::shared_ptr<Hub>> made_;  // keeps ids valid until all ranks have joined
};

Status check_place(const JoinRequest& request) {
  if (request.size < 1)
    return invalid_argument("rendezvous: a group of {} ranks; at least 1 is needed", request.size);
  if (request.rank < 0 || request.rank >= request.size) {
    return invalid_argument("rendezvous: rank {} in a group of {}; 0 to {} are allowed",
                            request.rank, request.size, request.size - 1);
  }
  return ok_status();
}

Result<UniqueId> InprocBackend::make_unique_id(Reach /*reach*/) {
  std::erase_if(made_, [](const auto& hub) { return hub->all_here(); });
  if (made_.size() >= kKeptHubs) {
    const auto stale =
        std::find_if(made_.begin(), made_.end(), [](const auto& hub) { return hub->settled(); });
    if (stale != made_.end()) made_.erase(stale);
  }
  made_.push_back(Hub::make());
  UniqueIdFields fields;
  fields.kind = IdKind::kInproc;
  fields.token = made_.back()->token();
  fields.process_token = process_token();
  return encode_unique_id(fields);
}

bool InprocBackend::knows(const UniqueId& id) const {
  const auto fields = decode_unique_id(id);
  return fields.ok() && fields->kind == IdKind::kInproc && fields->process_token == process_token();
}

Result<std::shared_ptr<Hub>> InprocBackend::hub_by_id(const UniqueId& id) const {
  SOTTO_ASSIGN(const UniqueIdFields fields, decode_unique_id(id));
  if (fields.kind != IdKind::kInproc) {
    return unsupported("inproc: the unique id was made by another transport (kind {})",
                       static_cast<int>(fields.kind));
  }
  if (fields.process_token != process_token()) {
    return unsupported(
        "inproc: the unique id was made in another process; this transport joins threads of one "
        "process");
  }
  auto hub = Hub::find(fields.token);
  if (!hub) {
    return invalid_argument(
        "inproc: the unique id is no longer valid: its group has ended, or the context that made "
        "it "
        "was destroyed");
  }
  return hub;
}

Result<std::shared_ptr<Hub>> InprocBackend::hub_by_exchange(const JoinRequest& request) {
  SOTTO_TRY(check_place(request));
  std::shared_ptr<Hub> mine = request.rank == 0 ? Hub::make() : nullptr;
  const MemberRecord record{process_token(), mine ? mine->token() : 0, request.rank, request.size};
  std::vector<MemberRecord> records(static_cast<size_t>(request.size));
  SOTTO_TRY(request.exchange(&record, sizeof record, records.data())
                .with_prefix("rendezvous: the caller's exchange"));
  for (int32_t i = 0; i < request.size; ++i) {
    const MemberRecord& r = records[static_cast<size_t>(i)];
    if (r.process_token != record.process_token) {
      return unsupported(
          "inproc: rank {} is in another process than rank {}; this transport joins threads of one "
          "process",
          i, request.rank);
    }
    if (r.rank != i || r.size != request.size) {
      return invalid_argument(
          "rendezvous: the caller's exchange gave rank {} of {} at place {} of {}", r.rank, r.size,
          i, request.size);
    }
  }
  if (mine) {
    made_.push_back(mine);  // for the other ranks, also after rank 0 has given up
    return mine;
  }
  auto hub = Hub::find(records[0].hub_token);
  if (!hub) return error(Code::kPeerLost, "rendezvous: rank 0 is gone");
  return hub;
}

Result<std::shared_ptr<Hub>> InprocBackend::find_hub(const JoinRequest& request) {
  if (request.exchange) return hub_by_exchange(request);
  if (request.id) return hub_by_id(*request.id);
  if (!request.address.empty()) {
    return unsupported(
        "inproc: ranks that are threads of one process meet by unique id or exchange, not at {}",
        request.address);
  }
  if (request.size == 1) return Hub::make();
  return invalid_argument("inproc: neither unique id nor exchange is given for a group of {} ranks",
                          request.size);
}

Result<std::unique_ptr<ControlPlane>> InprocBackend::join(const JoinRequest& request,
                                                          Driver& driver) {
  SOTTO_ASSIGN(const std::shared_ptr<Hub> hub, find_hub(request));
  if (Status wrong = check_place(request); !wrong.ok()) {
    hub->refuse(wrong);
    return wrong;
  }
  SOTTO_TRY(hub->arrive(request.rank, request.size, mailbox_));
  driver.run_until([&] { return hub->settled(); }, request.deadline);
  SOTTO_TRY(hub->conclude(request.rank));
  std::erase_if(made_, [](const auto& made) { return made->all_here(); });
  return std::unique_ptr<ControlPlane>(
      std::make_unique<InprocControl>(hub, mailbox_, request.rank, request.size));
}

// The ranks of a group that another backend has joined share a hub of their own.
Result<std::unique_ptr<Transport>> InprocBackend::connect(ControlPlane& control, const LinkPeers&,
                                                          TransferSink& sink, Driver& driver,
                                                          Deadline deadline) {
  auto* mine = dynamic_cast<InprocControl*>(&control);
  if (mine != nullptr && !mine->take_transport())
    return invalid_state("inproc: the group is connected already");
  const std::shared_ptr<Hub> hub =
      mine != nullptr ? mine->hub() : Hub::of_group(control.token(), control.size());
  auto transport =
      std::make_unique<InprocTransport>(hub, mailbox_, control.rank(), control.size(), sink);
  // A barrier: every inbox has its owner before the first send.
  auto connected = control.all_gather("connecting the inproc transport", "", driver, deadline);
  if (!connected.ok()) return connected.status();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace
}  // namespace inproc

Result<std::unique_ptr<Backend>> make_inproc_backend(const Clock& clock) {
  return std::unique_ptr<Backend>(std::make_unique<inproc::InprocBackend>(clock));
}

}  // namespace sotto
