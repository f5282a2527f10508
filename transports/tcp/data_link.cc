#include "transports/tcp/data_link.h"

#include <algorithm>
#include <cstring>

namespace sotto::tcp {
namespace {

// Time that the control plane has to name the failure that a lost connection is often an echo of.
constexpr int64_t kGraceNs = 200'000'000;
// Wait for a READY after which a message is announced.
constexpr int64_t kAnnounceNs = 100'000'000;
// Time after which open receives of small messages get a READY, like those of large ones.
constexpr int64_t kRemindNs = 500'000'000;
// Transfer::scratch[0] of a send: the flags of its frame.
constexpr size_t kFlagsSlot = 0;
// Largest payload of a failure frame: two texts and some numbers.
constexpr uint64_t kMaxFailureBytes = 2 * wire::kMaxTextBytes + 64;

bool names(const Transfer& t, uint32_t round, uint32_t segment) {
  return t.round == round && t.segment == segment;
}

}  // namespace

void FrameRing::push(const wire::FrameHeader& frame) {
  if (count_ == frames_.size()) {
    std::rotate(frames_.begin(), frames_.begin() + static_cast<ptrdiff_t>(first_), frames_.end());
    first_ = 0;
    frames_.resize(std::max<size_t>(16, 2 * frames_.size()));
  }
  frames_[(first_ + count_++) % frames_.size()] = frame;
}

void FrameRing::pop() {
  first_ = (first_ + 1) % frames_.size();
  --count_;
}

DataLink::DataLink(TransportCore& core, int32_t peer,
                   std::vector<std::unique_ptr<FrameStream>> streams, std::string name)
    : core_(core),
      peer_(peer),
      name_(std::move(name)),
      service_counters_(core.counters.at(0, peer)),
      credit_(core.limits.credit_bytes) {
  for (auto& stream : streams) {
    Connection connection;
    connection.stream = std::move(stream);
    connections_.push_back(std::move(connection));
  }
  if (connections_.size() > 1) {
    connections_[0].small_only = true;
    connections_[0].stream->carries_little();
  }
  for (const Connection& connection : connections_) {
    connection.stream->set_owner(*this, name_);
    connection.stream->resume();
  }
}

DataLink::Connection& DataLink::connection_of(const FrameStream& stream) {
  return *std::find_if(connections_.begin(), connections_.end(), [&](const Connection& connection) {
    return connection.stream.get() == &stream;
  });
}

void DataLink::flush() {
  for (const Connection& connection : connections_) connection.stream->flush();
}

bool DataLink::any_open() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return connection.stream->open(); });
}

bool DataLink::can_send() const {
  return std::any_of(connections_.begin(), connections_.end(),
                     [](const Connection& connection) { return connection.stream->can_send(); });
}

bool DataLink::failure_sent() const { return failures_.empty() || !can_send(); }

bool DataLink::delivered() const {
  // A connection with half a message of a cancelled operation cannot send.
  if (!can_send()) return true;
  return queue_.empty() && service_.empty() && (failures_.empty() || failure_sending_) &&
         std::all_of(connections_.begin(), connections_.end(), [](const Connection& connection) {
           return !connection.stream->can_send() ||
                  (!connection.bye_due && connection.stream->delivered());
         });
}

void DataLink::close() {
  for (const Connection& connection : connections_) connection.stream->close();
}

Flow& DataLink::flow(const OpKey& op) {
  Flow& f = core_.ops.flow(op, peer_);
  if (f.counters == nullptr) f.counters = &core_.counters.at(op.comm, peer_);
  return f;
}

// ---- sending

void DataLink::send(Transfer& t) {
  Flow& f = flow(t.op->key);
  if (admit(f, t)) {
    queue_.push(t);
    flush();
  } else {
    if (f.waiting.empty()) {
      f.waiting_since_ns = core_.reactor.now_ns();
      ++waiting_flows_;
    }
    f.waiting.push(t);
  }
  fail_if_needed();
}

// Whether a message may be sent: after a READY, or on credit, which it then takes.
bool DataLink::admit(const Flow& f, Transfer& t) {
  t.scratch[kFlagsSlot] = 0;
  if (f.peer_ready && t.round <= *f.peer_ready) return true;
  const uint64_t cost = wire::frame_bytes(t.bytes);
  if (t.bytes > core_.limits.eager_bytes || cost > credit_) return false;
  credit_ -= cost;
  t.scratch[kFlagsSlot] = wire::kFlagCredited;
  return true;
}

void DataLink::release_waiting(Flow& f) {
  if (f.waiting.empty()) return;
  while (Transfer* t = f.waiting.take_first([&](Transfer& w) { return admit(f, w); }))
    queue_.push(*t);
  if (f.waiting.empty()) --waiting_flows_;
}

void DataLink::release_all_waiting() {
  if (waiting_flows_ == 0) return;
  // By priority, then by time of waiting.
  for (Flow* f = core_.ops.flows_of(peer_); f != nullptr; f = f->next_of_peer) {
    if (!f->waiting.empty()) release_order_.push_back(f);
  }
  const auto urgency = [](const Flow* f) { return f->waiting.head->op->priority; };
  std::stable_sort(release_order_.begin(), release_order_.end(),
                   [&](const Flow* a, const Flow* b) { return urgency(a) > urgency(b); });
  for (Flow* f : release_order_) release_waiting(*f);
  release_order_.clear();
}

void DataLink::send_control(const wire::FrameHeader& frame) {
  service_.push(frame);
  flush();
}

bool DataLink::next_frame(FrameStream& stream, OutFrame& out) {
  out = OutFrame{};
  if (!failures_.empty() && !failure_sending_) {
    failure_sending_ = true;
    out.header.kind = wire::FrameKind::kFailure;
    out.header.payload_bytes = failures_.front().size();
    out.payload = reinterpret_cast<const uint8_t*>(failures_.front().data());
    return true;
  }
  if (!service_.empty()) {
    out.header = service_.front();
    service_.pop();
    return true;
  }
  Connection& connection = connection_of(stream);
  Transfer* t = connection.small_only ? queue_.pop_small() : queue_.pop();
  if (t == nullptr) {
    out.header.kind = wire::FrameKind::kBye;
    return std::exchange(connection.bye_due, false);
  }
  out.header.kind = wire::FrameKind::kData;
  out.header.message_class = t->message_class;
  out.header.flags = static_cast<uint32_t>(t->scratch[kFlagsSlot]);
  out.header.key = t->op->key;
  out.header.signature = t->op->signature;
  out.header.round = t->round;
  out.header.segment = t->segment;
  out.header.payload_bytes = t->bytes;
  out.payload = static_cast<const uint8_t*>(t->data);
  out.cookie = t;
  return true;
}

void DataLink::on_sent(FrameStream& /*stream*/, const OutFrame& out) {
  if (out.cookie == nullptr) {
    service_counters_.service_sent(wire::frame_bytes(out.header.payload_bytes));
    if (out.header.kind == wire::FrameKind::kFailure) {
      failures_.pop_front();
      failure_sending_ = false;
    }
    return;
  }
  auto& t = *static_cast<Transfer*>(out.cookie);
  if (const Flow* f = core_.ops.find(out.header.key, peer_)) f->counters->message_sent(out.header);
  core_.sink.on_transfer(t, {});
}

// ---- receiving

void DataLink::recv(Transfer& t) {
  Flow& f = flow(t.op->key);
  ++f.receives_open;
  // Nothing is delivered after a failure: a later operation would take messages of a peer that does
  // not agree with this rank.
  for (Unexpected** at = &f.unexpected; !failed_ && *at != nullptr; at = &(*at)->next) {
    if ((*at)->round != t.round || (*at)->segment != t.segment) continue;
    Unexpected* message = *at;
    *at = message->next;
    deliver(f, t, *message);
    return;
  }
  f.receives.push(t);
  fail_if_needed();
}

// Gives a receive its message, which came before it.
void DataLink::deliver(Flow& f, Transfer& t, Unexpected& message) {
  const uint64_t bytes = message.bytes;
  const bool fits = bytes == t.bytes;
  if (fits && bytes > 0) std::memcpy(t.data, message.data(), bytes);
  const uint64_t cost = message.cost;
  core_.ops.free_unexpected(&message);
  return_credit(cost);
  if (!fits) {
    fail(error(Code::kProtocol, "{}, round {}, segment {}: {} sent {} bytes, rank {} expects {}",
               wire::describe(t.op->key), t.round, t.segment, name_, bytes, core_.rank, t.bytes));
    return;
  }
  complete(f, t);
}

void DataLink::complete(Flow& f, Transfer& t) {
  --f.receives_open;
  core_.sink.on_transfer(t, {});
}

void DataLink::ready(const OpPosting& op, uint32_t last_round, uint64_t largest) {
  Flow& f = flow(op.key);
  f.own_ready = std::max(f.own_ready.value_or(0), last_round);
  f.own_ready_ns = core_.reactor.now_ns();
  if (largest > core_.limits.eager_bytes || sender_may_be_dry()) send_ready(f);
}

void DataLink::send_ready(Flow& f) {
  if (f.receives_open == 0 || !f.own_ready ||
      (f.own_ready_sent && *f.own_ready_sent >= *f.own_ready))
    return;
  f.own_ready_sent = f.own_ready;
  wire::FrameHeader frame;
  frame.kind = wire::FrameKind::kReady;
  frame.key = f.op->key;
  frame.signature = f.op->posting->signature;
  frame.round = *f.own_ready;
  send_control(frame);
}

Status DataLink::agree(const OpKey& op, const OpSignature& own, const OpSignature& theirs) const {
  if (own == theirs) return {};
  return Status(Code::kProtocol, describe_mismatch(op, core_.rank, own, peer_, theirs));
}

void DataLink::check_posted(Flow& f) {
  if (!f.peer_signature) return;
  if (Status status = agree(f.op->key, f.op->posting->signature, *f.peer_signature); !status.ok())
    fail(std::move(status));
}

// The flow of a frame; null: a late frame of an operation that is complete here.
Result<Flow*> DataLink::flow_of_frame(const wire::FrameHeader& h) {
  Flow* known = core_.ops.find(h.key, peer_);
  OpState* op = known != nullptr ? known->op : core_.ops.find_op(h.key);
  if (op == nullptr) {
    if (core_.ops.done(h.key)) {
      if (const auto own = core_.ops.recent(h.key)) SOTTO_TRY(agree(h.key, *own, h.signature));
      return nullptr;
    }
    if (core_.ops.unposted() >= OpTable::kMaxUnposted) {
      return error(Code::kProtocol, "{} is ahead of rank {} by more than {} operations", name_,
                   core_.rank, OpTable::kMaxUnposted);
    }
  }
  if (op != nullptr && op->posting != nullptr)
    SOTTO_TRY(agree(h.key, op->posting->signature, h.signature));
  Flow& f = known != nullptr ? *known : flow(h.key);
  if (f.peer_signature && !(*f.peer_signature == h.signature)) {
    return error(Code::kProtocol, "{} calls {} both {} and {}", name_, wire::describe(h.key),
                 describe(*f.peer_signature), describe(h.signature));
  }
  f.peer_signature = h.signature;
  return &f;
}

Result<PayloadPlace> DataLink::on_header(FrameStream& stream, const wire::FrameHeader& h) {
  if (h.kind == wire::FrameKind::kData) {
    SOTTO_ASSIGN(void* const place, begin_message(connection_of(stream), h));
    return PayloadPlace{static_cast<uint8_t*>(place), h.payload_bytes};
  }
  if (h.kind == wire::FrameKind::kFailure && core_.failures != nullptr &&
      h.payload_bytes <= kMaxFailureBytes) {
    std::string& inbox = connection_of(stream).inbox;
    inbox.resize(h.payload_bytes);
    return PayloadPlace{reinterpret_cast<uint8_t*>(inbox.data()), inbox.size()};
  }
  if (h.kind > wire::FrameKind::kAnnounce && h.kind != wire::FrameKind::kBye) {
    return error(Code::kProtocol, "{} on the data connection from {}", describe(h), name_);
  }
  return PayloadPlace{};
}

Status DataLink::take_credit(const wire::FrameHeader& h) {
  if ((h.flags & wire::kFlagCredited) == 0) return {};
  const uint64_t cost = wire::frame_bytes(h.payload_bytes);
  if (h.payload_bytes > core_.limits.eager_bytes ||
      cost > core_.limits.credit_bytes - credit_out_) {
    return error(Code::kProtocol,
                 "{} exceeds its credit: {} of {} bytes are in use and it sent a {}", name_,
                 credit_out_, core_.limits.credit_bytes, describe(h));
  }
  const bool was_dry = sender_may_be_dry();
  credit_out_ += cost;
  if (was_dry || !sender_may_be_dry()) return {};
  for (Flow* f = core_.ops.flows_of(peer_); f != nullptr; f = f->next_of_peer) send_ready(*f);
  return {};
}

void DataLink::return_credit(uint64_t cost) {
  credit_consumed_ += cost;
  if (credit_consumed_ < core_.limits.credit_bytes / 4) return;
  wire::FrameHeader frame;
  frame.kind = wire::FrameKind::kCredit;
  frame.key.number = credit_consumed_;
  credit_out_ -= credit_consumed_;
  credit_consumed_ = 0;
  send_control(frame);
}

Result<void*> DataLink::begin_message(Connection& connection, const wire::FrameHeader& h) {
  SOTTO_ASSIGN(Flow* const f, flow_of_frame(h));
  if (f == nullptr)
    return error(Code::kProtocol, "{} sent a {}, which is complete on rank {}", name_, describe(h),
                 core_.rank);
  SOTTO_TRY(take_credit(h));
  connection.flow = f;
  return place_message(connection, h);
}

Result<void*> DataLink::place_message(Connection& connection, const wire::FrameHeader& h) {
  Flow& f = *connection.flow;
  connection.transfer =
      f.receives.take_first([&](const Transfer& t) { return names(t, h.round, h.segment); });
  if (connection.transfer != nullptr) {
    if (connection.transfer->bytes == h.payload_bytes) return connection.transfer->data;
    const uint64_t expected = connection.transfer->bytes;
    f.receives.push(*std::exchange(connection.transfer, nullptr));
    return error(Code::kProtocol, "{} sent a {}; rank {} expects {} bytes", name_, describe(h),
                 core_.rank, expected);
  }
  if ((h.flags & wire::kFlagCredited) == 0) {
    return error(Code::kProtocol, "{} sent a {}, for which rank {} has no receive", name_,
                 describe(h), core_.rank);
  }
  for (const Unexpected* u = f.unexpected; u != nullptr; u = u->next) {
    if (u->round == h.round && u->segment == h.segment) {
      return error(Code::kProtocol, "{} sent a {} twice", name_, describe(h));
    }
  }
  connection.unexpected = core_.ops.make_unexpected(h.payload_bytes);
  connection.unexpected->round = h.round;
  connection.unexpected->segment = h.segment;
  connection.unexpected->cost = wire::frame_bytes(h.payload_bytes);
  return connection.unexpected->data();
}

Status DataLink::on_frame(FrameStream& stream, const wire::FrameHeader& h) {
  if (h.kind == wire::FrameKind::kData) return end_message(connection_of(stream), h);
  service_counters_.service_received(wire::frame_bytes(h.payload_bytes));
  switch (h.kind) {
    case wire::FrameKind::kReady: return on_ready(h);
    case wire::FrameKind::kCredit: return on_credit(h);
    case wire::FrameKind::kAnnounce: return on_announce(h);
    case wire::FrameKind::kFailure: {
      const std::string& inbox = connection_of(stream).inbox;
      return core_.failures->on_failure_frame(
          peer_, wire::Bytes(reinterpret_cast<const uint8_t*>(inbox.data()), inbox.size()));
    }
    default: connection_of(stream).bye_received = true; return {};
  }
}

Status DataLink::end_message(Connection& connection, const wire::FrameHeader& h) {
  Flow* f = std::exchange(connection.flow, nullptr);
  Transfer* t = std::exchange(connection.transfer, nullptr);
  Unexpected* message = std::exchange(connection.unexpected, nullptr);
  if (f == nullptr) return {};  // cancelled while it arrived
  f->counters->message_received(h);
  if (t != nullptr) {
    if ((h.flags & wire::kFlagCredited) != 0) return_credit(wire::frame_bytes(h.payload_bytes));
    complete(*f, *t);
    return {};
  }
  // The receive may have been posted while the message arrived.
  t = f->receives.take_first([&](const Transfer& r) { return names(r, h.round, h.segment); });
  if (t != nullptr) {
    deliver(*f, *t, *message);
  } else {
    message->next = std::exchange(f->unexpected, message);
  }
  return {};
}

Status DataLink::on_ready(const wire::FrameHeader& h) {
  SOTTO_ASSIGN(Flow* const f, flow_of_frame(h));
  if (f == nullptr) return {};  // all was sent on credit before
  f->peer_ready = std::max(f->peer_ready.value_or(0), h.round);
  release_waiting(*f);
  flush();
  return {};
}

Status DataLink::on_credit(const wire::FrameHeader& h) {
  if (h.key.number > core_.limits.credit_bytes - credit_) {
    return error(Code::kProtocol, "{} gives back {} bytes of credit; {} of {} are in use", name_,
                 h.key.number, core_.limits.credit_bytes - credit_, core_.limits.credit_bytes);
  }
  credit_ += h.key.number;
  release_all_waiting();
  flush();
  return {};
}

Status DataLink::on_announce(const wire::FrameHeader& h) {
  SOTTO_ASSIGN(Flow* const f, flow_of_frame(h));
  if (f == nullptr) {
    return error(Code::kProtocol,
                 "{} waits to send a message of {}, {}, which is complete on rank {}", name_,
                 wire::describe(h.key), describe(h.signature), core_.rank);
  }
  if (f->op->posting != nullptr) send_ready(*f);
  return {};
}

// ---- end and failure

void DataLink::cancel(OpState& op) {
  for (Flow* f = op.flows; f != nullptr; f = f->next_of_op) {
    if (f->peer != peer_) continue;
    if (!f->waiting.empty()) --waiting_flows_;
    for (Connection& connection : connections_) {
      if (connection.flow == f) drop_incoming(connection);
    }
  }
  if (op.posting == nullptr) return;
  queue_.remove(*op.posting);
  for (const Connection& connection : connections_) {
    const auto* sending = static_cast<const Transfer*>(connection.stream->sending());
    if (sending != nullptr && sending->op == op.posting) connection.stream->drop_out(sending);
  }
}

// Reads over the rest of the message that is arriving.
void DataLink::drop_incoming(Connection& connection) {
  connection.stream->discard_in();
  if (connection.unexpected != nullptr) core_.ops.free_unexpected(connection.unexpected);
  connection.flow = nullptr;
  connection.transfer = nullptr;
  connection.unexpected = nullptr;
}

void DataLink::retire(const OpState& op) {
  const auto arriving =
      std::find_if(connections_.begin(), connections_.end(), [&](const Connection& connection) {
        return connection.flow != nullptr && connection.flow->op == &op;
      });
  if (arriving == connections_.end()) return;
  drop_incoming(*arriving);
  fail(error(Code::kProtocol, "{} sends a message of {}, {}, that rank {} did not expect", name_,
             wire::describe(op.key), describe(op.posting->signature), core_.rank));
}

// On every connection, behind everything else.
void DataLink::send_bye() {
  if (std::exchange(bye_sent_, true)) return;
  for (Connection& connection : connections_) connection.bye_due = true;
  flush();
}

void DataLink::send_failure(std::string payload) {
  if (bye_sent_) return;
  failures_.push_back(std::move(payload));
  flush();
}

// The text names both ends, since each of them sees another error.
Status DataLink::connection_status(Code code, std::string_view what, const Status& why) const {
  return error(code, "the connection between {} and {} {}: rank {}: {}", core_.name, name_, what,
               core_.rank, why.text());
}

void DataLink::fail(Status why) {
  if (std::exchange(failed_, true)) return;
  core_.sink.on_failure(peer_, std::move(why));
}

void DataLink::on_broken(FrameStream& stream, Status why) {
  if (!any_open() && core_.failures != nullptr) core_.failures->on_disconnected(peer_);
  if (bye_sent_ || failed_) return;
  if (why.code() != Code::kPeerLost) {
    fail(stream.damaged() ? connection_status(why.code(), "is damaged", why) : std::move(why));
    return;
  }
  if (connection_of(stream).bye_received) {
    fail_if_needed();
    return;
  }
  lost_ = connection_status(why.code(), "is lost", why);
  lost_ns_ = core_.reactor.now_ns();
}

// After an orderly end of the peer: fails if an operation here still needs it.
void DataLink::fail_if_needed() {
  if (!connections_[0].bye_received || any_open() || failed_) return;
  for (Flow* f = core_.ops.flows_of(peer_); f != nullptr; f = f->next_of_peer) {
    if (f->receives_open == 0 && f->waiting.empty() && queue_.empty()) continue;
    fail(error(Code::kPeerLost, "{} has left the group; rank {} still needs it in {}", name_,
               core_.rank, wire::describe(f->op->key)));
    return;
  }
}

void DataLink::tick(int64_t now_ns) {
  if (lost_ && now_ns - lost_ns_ >= kGraceNs) fail(*lost_);
  for (Flow* f = core_.ops.flows_of(peer_); f != nullptr; f = f->next_of_peer) {
    // The peer may be in an operation without messages to this rank: READY shows it the signature.
    if (now_ns - f->own_ready_ns >= kRemindNs) send_ready(*f);
    if (f->waiting.empty() || f->announced || now_ns - f->waiting_since_ns < kAnnounceNs) continue;
    f->announced = true;
    wire::FrameHeader frame;
    frame.kind = wire::FrameKind::kAnnounce;
    frame.key = f->op->key;
    frame.signature = f->waiting.head->op->signature;
    frame.round = f->waiting.head->round;
    frame.segment = f->waiting.head->segment;
    send_control(frame);
  }
}

}  // namespace sotto::tcp
