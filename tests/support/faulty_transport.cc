#include "tests/support/faulty_transport.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <optional>
#include <random>

#include "tests/support/overlay_poller.h"

namespace sotto::test {
namespace {

class FaultyTransport final : public MessageTransport, private TransferSink, private OverlaySource {
 public:
  FaultyTransport(std::shared_ptr<OverlayPoller> poller, TransferSink& sink, int32_t rank,
                  const FaultScript& script, std::shared_ptr<FaultState> state)
      : poller_(std::move(poller)),
        sink_(sink),
        script_(script),
        state_(std::move(state)),
        random_(script.seed * 131 + static_cast<uint64_t>(rank)) {
    poller_->add(this);
  }
  ~FaultyTransport() override {
    poller_->remove(this);
    base_.reset();
  }
  TransferSink& inner_sink() { return *this; }
  void attach(std::unique_ptr<Transport> base) {
    base_ = std::move(base);
    messages_ = base_->as_message_transport();
  }

  const TransportCaps& caps() const override { return base_->caps(); }
  uint64_t header_bytes(uint64_t bytes) const override { return base_->header_bytes(bytes); }
  Status post_op(const OpDescriptor& op) override { return base_->post_op(op); }
  void ready(int32_t peer, const OpDescriptor& op, uint32_t last_round, uint64_t largest) override {
    messages_->ready(peer, op, last_round, largest);
  }
  void complete(const OpDescriptor& op) override { base_->complete(op); }
  void cancel(const OpDescriptor& op) override;
  void send(Transfer& t) override;
  void recv(Transfer& t) override { messages_->recv(t); }
  std::string route(int32_t peer) const override { return base_->route(peer); }
  TransferCounters counters(uint64_t comm, int32_t peer) const override {
    return base_->counters(comm, peer);
  }
  void leave(uint64_t comm) override { base_->leave(comm); }
  void close(Deadline deadline) override { base_->close(deadline); }

 private:
  struct HeldSend {
    Transfer* transfer;
    uint32_t polls;
  };
  struct HeldCompletion {
    Transfer* transfer;
    Status status;
    uint32_t polls;
  };
  // Goes to the wrapped transport in place of the engine's transfer.
  struct Damaged {
    Transfer copy;
    Transfer* original;
    std::vector<uint8_t> data;
  };

  void on_transfer(Transfer& transfer, Status status) noexcept override;
  void on_failure(int32_t peer, Status status) noexcept override { sink_.on_failure(peer, status); }
  bool run() override;
  void forward(Transfer& t);
  void damage(Transfer& t, FaultKind kind);
  // Counts the next send.
  std::optional<FaultKind> fault_of_next() const {
    if (!state_->counts) return std::nullopt;
    const uint64_t number = state_->sends++;
    for (const auto& fault : script_.faults) {
      if (fault.which == number) return fault.kind;
    }
    return std::nullopt;
  }
  uint32_t draw() { return static_cast<uint32_t>(random_() % (script_.max_delay_polls + 1)); }

  const std::shared_ptr<OverlayPoller> poller_;
  TransferSink& sink_;
  const FaultScript script_;
  const std::shared_ptr<FaultState> state_;
  std::mt19937_64 random_;
  std::unique_ptr<Transport> base_;
  MessageTransport* messages_ = nullptr;  // base_
  std::vector<HeldSend> sends_;
  std::vector<HeldCompletion> completions_;
  std::list<Damaged> damaged_;
};

void FaultyTransport::send(Transfer& t) {
  const uint32_t polls = draw();
  if (polls == 0) {
    forward(t);
    return;
  }
  sends_.push_back({&t, polls});
  poller_->wake();
}

void FaultyTransport::forward(Transfer& t) {
  const auto kind = fault_of_next();
  if (!kind) {
    messages_->send(t);
    return;
  }
  ++state_->faults;
  switch (*kind) {
    case FaultKind::kDrop: break;
    case FaultKind::kLosePeer:
      sink_.on_failure(t.peer, error(Code::kPeerLost, "injected: rank {} is lost", t.peer));
      break;
    case FaultKind::kFlipBit:
    case FaultKind::kTruncate: damage(t, *kind); break;
  }
}

void FaultyTransport::damage(Transfer& t, FaultKind kind) {
  if (t.bytes == 0) {
    --state_->faults;
    messages_->send(t);
    return;
  }
  Damaged& d = damaged_.emplace_back();
  d.original = &t;
  d.data.assign(static_cast<const uint8_t*>(t.data), static_cast<const uint8_t*>(t.data) + t.bytes);
  if (kind == FaultKind::kFlipBit) {
    d.data[random_() % d.data.size()] ^= static_cast<uint8_t>(1u << (random_() % 8));
  } else {
    d.data.pop_back();
  }
  d.copy = t;
  d.copy.data = d.data.data();
  d.copy.bytes = d.data.size();
  messages_->send(d.copy);
}

void FaultyTransport::on_transfer(Transfer& transfer, Status status) noexcept {
  Transfer* t = &transfer;
  const auto it = std::find_if(damaged_.begin(), damaged_.end(),
                               [&](const Damaged& d) { return &d.copy == t; });
  if (it != damaged_.end()) {
    t = it->original;
    damaged_.erase(it);
  }
  const uint32_t polls = draw();
  if (polls == 0) {
    sink_.on_transfer(*t, status);
    return;
  }
  completions_.push_back({t, status, polls});
  poller_->wake();
}

// Takes what is due out of a list, the rest stays.
template <class Held>
std::vector<Held> take_due(std::vector<Held>& held, std::mt19937_64& random) {
  std::vector<Held> due;
  for (Held& h : held) {
    if (--h.polls == 0) due.push_back(h);
  }
  std::erase_if(held, [](const Held& h) { return h.polls == 0; });
  std::shuffle(due.begin(), due.end(), random);
  return due;
}

bool FaultyTransport::run() {
  if (sends_.empty() && completions_.empty()) return false;
  const auto sends = take_due(sends_, random_);
  for (const HeldSend& h : sends) forward(*h.transfer);
  const auto completions = take_due(completions_, random_);
  for (const HeldCompletion& h : completions) sink_.on_transfer(*h.transfer, h.status);
  if (!sends_.empty() || !completions_.empty()) poller_->wake();
  return !sends.empty() || !completions.empty();
}

void FaultyTransport::cancel(const OpDescriptor& op) {
  std::erase_if(sends_, [&](const HeldSend& h) { return h.transfer->op == &op; });
  std::erase_if(completions_, [&](const HeldCompletion& h) { return h.transfer->op == &op; });
  base_->cancel(op);
  damaged_.remove_if([&](const Damaged& d) { return d.copy.op == &op; });
}

class FaultyBackend final : public Backend {
 public:
  FaultyBackend(std::unique_ptr<Backend> base, const FaultScript& script,
                std::shared_ptr<FaultState> state)
      : base_(std::move(base)),
        poller_(std::make_shared<OverlayPoller>(base_->poller())),
        script_(script),
        state_(state ? std::move(state) : std::make_shared<FaultState>()) {}
  const char* name() const override { return base_->name(); }
  Poller& poller() override { return *poller_; }
  Result<UniqueId> make_unique_id(Reach reach) override { return base_->make_unique_id(reach); }
  bool knows(const UniqueId& id) const override { return base_->knows(id); }
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver) override {
    return base_->join(request, driver);
  }
  uint64_t place() const override { return base_->place(); }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    auto faulty = std::make_unique<FaultyTransport>(poller_, sink, control.rank(), script_, state_);
    auto base = base_->connect(control, peers, faulty->inner_sink(), driver, deadline);
    if (!base.ok()) return base.status();
    faulty->attach(base.take());
    return std::unique_ptr<Transport>(std::move(faulty));
  }

 private:
  const std::unique_ptr<Backend> base_;
  const std::shared_ptr<OverlayPoller> poller_;
  const FaultScript script_;
  const std::shared_ptr<FaultState> state_;
};

}  // namespace

std::unique_ptr<Backend> make_faulty_backend(std::unique_ptr<Backend> base,
                                             const FaultScript& script,
                                             std::shared_ptr<FaultState> state) {
  return std::make_unique<FaultyBackend>(std::move(base), script, std::move(state));
}

void make_faulty(BackendFactory* factory, const FaultScript& script,
                 std::shared_ptr<FaultState> state) {
  factory->make = [make = factory->make, script, state = std::move(state)](
                      const Params& params) -> Result<std::unique_ptr<Backend>> {
    SOTTO_ASSIGN(std::unique_ptr<Backend> base, make(params));
    return make_faulty_backend(std::move(base), script, state);
  };
}

}  // namespace sotto::test
