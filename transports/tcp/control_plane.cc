#include "transports/tcp/control_plane.h"

#include <algorithm>

namespace sotto::tcp {
namespace {

constexpr int64_t kBeatTickMs = 50;
// Ticks further apart than this: the process was stopped, or polls only now and then.
constexpr int64_t kSleptMs = 200;

}  // namespace

TcpControl::TcpControl(std::shared_ptr<Reactor> reactor, Membership membership,
                       int64_t heartbeat_ms)
    : reactor_owner_(std::move(reactor)),
      reactor_(*reactor_owner_),
      group_(std::move(membership)),
      heartbeat_ms_(heartbeat_ms),
      service_(reactor_, group_.rank, group_.size(), group_.coordinator,
               [this](int32_t rank, std::string payload) {
                 ControlLink* link = link_of(rank);
                 if (link != nullptr && !bye_[static_cast<size_t>(rank)])
                   link->send(wire::FrameKind::kService, std::move(payload));
               }),
      bye_(static_cast<size_t>(group_.size())),
      last_heartbeat_ns_(reactor_.now_ns()),
      last_tick_ns_(last_heartbeat_ns_),
      awake_since_ns_(last_heartbeat_ns_) {
  const auto size = static_cast<uint64_t>(group_.size());
  gather_.blobs.resize(size);
  lost_.resize(size);
  bridge_->control = this;
  for (const auto& link : group_.links) {
    if (!link) continue;
    link->set_owner(*this);
    // Members send one blob, the coordinator all of them.
    link->set_max_payload((coordinates() ? 1 : size) * (wire::kMaxBlobBytes + 64) +
                          4 * wire::kMaxTextBytes);
  }
  set_silence_limit(0);
}

TcpControl::~TcpControl() { bridge_->control = nullptr; }

ControlLink* TcpControl::link_of(int32_t rank) const {
  if (coordinates()) return group_.links[static_cast<size_t>(rank)].get();
  return rank == group_.coordinator && !group_.links.empty() ? group_.links[0].get() : nullptr;
}

std::string TcpControl::describe_rank(int32_t rank) const {
  return member_text(rank, group_.members[static_cast<size_t>(rank)]);
}

std::string TcpControl::coordinator_address() const {
  return coordinates() ? "" : group_.links[0]->name();
}

std::shared_ptr<const LinkBytes> TcpControl::link_bytes(int32_t rank) const {
  const ControlLink* link = link_of(rank);
  return link != nullptr ? link->bytes() : nullptr;
}

// ---- all-gather

Result<std::vector<std::string>> TcpControl::all_gather(std::string_view what,
                                                        std::string_view mine, Driver& driver,
                                                        Deadline deadline) {
  if (mine.size() > wire::kMaxBlobBytes) {
    // The other ranks wait for this blob: the group fails.
    const Status status =
        invalid_argument("rank {}: {} bytes for the exchange \"{}\"; at most {} are allowed",
                         rank(), mine.size(), what, wire::kMaxBlobBytes);
    fail({status.code(), rank(), status.text(), rank()});
    return status;
  }
  if (left_)
    return invalid_state("rank {} has left the group and cannot take part in \"{}\"", rank(), what);
  gathered_.reset();
  told_.waiting.clear();
  const uint64_t sequence = sequence_;
  if (coordinates()) {
    contribute(rank(), sequence, std::string(what), std::string(mine));
  } else if (!failure_) {
    group_.links[0]->send(wire::FrameKind::kGather,
                          wire::Gather{sequence, std::string(what), std::string(mine)}.encode());
  }
  const auto abandoned = [this] {
    return !coordinates() && bye_[static_cast<size_t>(group_.coordinator)];
  };
  const bool in_time =
      driver.run_until([&] { return failure_ || gathered_ || abandoned(); }, deadline);
  if (gathered_) return std::exchange(gathered_, std::nullopt).value();
  if (!failure_ && abandoned()) {
    return error(Code::kPeerLost, "exchange \"{}\": the coordinator, {}, has left the group", what,
                 describe_rank(group_.coordinator));
  }
  if (in_time) return failure_->status().with_prefix(fmt::format("exchange \"{}\"", what));
  const std::string missing = coordinates() ? missing_text() : told_.waiting;
  return error(
      Code::kTimeout, "rank {}: the exchange \"{}\" is not complete in time: {}", rank(), what,
      missing.empty()
          ? fmt::format("no answer from the coordinator, {}", describe_rank(group_.coordinator))
          : missing + " did not come");
}

std::string TcpControl::missing_text() const {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < size(); ++r) {
    if (!gather_.blobs[static_cast<size_t>(r)]) ranks.push_back(r);
  }
  return ranks.empty() ? ""
                       : fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", rank_list(ranks));
}

void TcpControl::contribute(int32_t from, uint64_t sequence, std::string what, std::string blob) {
  auto& place = gather_.blobs[static_cast<size_t>(from)];
  if (place || sequence != sequence_) {
    decide({Code::kProtocol, from,
            fmt::format("{} is at exchange {} (\"{}\"), the group is at {}", describe_rank(from),
                        sequence, what, sequence_)});
    return;
  }
  if (gather_.present == 0) {
    gather_.what = what;
    gather_.what_rank = from;
  } else if (gather_.what != what) {
    decide({Code::kProtocol, from,
            fmt::format(
                "ranks do not agree on exchange {}: rank {} came for \"{}\", rank {} for \"{}\"",
                sequence, gather_.what_rank, gather_.what, from, what)});
    return;
  }
  place = std::move(blob);
  if (++gather_.present == size()) complete_gather();
}

void TcpControl::complete_gather() {
  wire::Gathered all{sequence_++, {}};
  for (auto& blob : gather_.blobs) all.data.push_back(std::exchange(blob, std::nullopt).value());
  gather_.present = 0;
  reported_missing_.clear();
  if (size() > 1) {
    const std::string text = all.encode();
    for (const auto& link : group_.links) {
      if (link) link->send(wire::FrameKind::kGathered, text);
    }
  }
  gathered_ = std::move(all.data);
}

// ---- messages

Status TcpControl::on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) {
  switch (kind) {
    case wire::FrameKind::kGather:
      if (coordinates()) return on_gather(link, payload);
      break;
    case wire::FrameKind::kGathered:
      if (!coordinates()) return on_gathered(payload);
      break;
    case wire::FrameKind::kHeartbeat: return on_heartbeat(link, payload);
    case wire::FrameKind::kFailure: return on_failure_frame(link.rank, payload);
    case wire::FrameKind::kBye: on_bye(link); return {};
    case wire::FrameKind::kService: return service_.on_frame(link.rank, payload);
    default: break;
  }
  return error(Code::kProtocol, "{} frame from {} to rank {}", wire::kind_name(kind),
               describe_rank(link.rank), rank());
}

Status TcpControl::on_gather(ControlLink& link, wire::Bytes payload) {
  auto gather = wire::Gather::decode(payload);
  if (!gather.ok()) return gather.status();
  contribute(link.rank, gather->sequence, std::move(gather->what), std::move(gather->data));
  return {};
}

Status TcpControl::on_gathered(wire::Bytes payload) {
  auto all = wire::Gathered::decode(payload);
  if (!all.ok()) return all.status();
  if (all->sequence != sequence_ || all->data.size() != static_cast<size_t>(size())) {
    return error(Code::kProtocol,
                 "answer to exchange {} with {} parts; rank {} is at exchange {} of {} ranks",
                 all->sequence, all->data.size(), rank(), sequence_, size());
  }
  ++sequence_;
  gathered_ = std::move(all->data);
  return {};
}

Status TcpControl::on_heartbeat(ControlLink& link, wire::Bytes payload) {
  auto beat = wire::Heartbeat::decode(payload);
  if (!beat.ok()) return beat.status();
  if (coordinates()) {
    conclude();
    return {};
  }
  if (link.flushed()) {  // possibly an inquiry: the coordinator waits for a sign of life
    last_heartbeat_ns_ = reactor_.now_ns();
    link.send(wire::FrameKind::kHeartbeat, wire::Heartbeat{}.encode());
  }
  told_.waiting = std::move(beat->waiting);
  if (beat->silent_ms.size() == static_cast<size_t>(size())) {
    told_.silent_ms = std::move(beat->silent_ms);
    silent_at_ns_ = reactor_.now_ns();
  }
  return {};
}

void TcpControl::on_bye(ControlLink& link) {
  bye_[static_cast<size_t>(link.rank)] = true;
  if (!coordinates() && proposed_)
    adopt(*proposed_);  // the coordinator left before it received the proposal
  if (coordinates() && gather_.present > 0 && !gather_.blobs[static_cast<size_t>(link.rank)]) {
    decide({Code::kPeerLost, link.rank,
            fmt::format("{} has left the group during the exchange \"{}\"",
                        describe_rank(link.rank), gather_.what)});
  }
}

// ---- service messages

Status TcpControl::send_service(int32_t to, uint32_t channel, std::string_view bytes) {
  if (failure_) return failure_->status();
  if (!established_ || left_)
    return invalid_state(
        "rank {}: service messages are for groups that are set up and have not ended", rank());
  return service_.send({rank(), to, channel, std::string(bytes)});
}

void TcpControl::set_service_listener(uint32_t channel, ServiceListener* listener) {
  service_.listen(channel, listener);
}

// ---- signs of life

// Four heartbeats fit into the limit.
void TcpControl::set_silence_limit(int64_t limit_ms) {
  silence_limit_ms_ = limit_ms;
  if (limit_ms > 0) heartbeat_ms_ = std::min(heartbeat_ms_, limit_ms / 4);
  if (size() > 1)
    ticker_ = reactor_.every(std::min(kBeatTickMs, heartbeat_ms_), [this] { tick(); });
}

void TcpControl::established() {
  established_ = true;
  awake_since_ns_ = reactor_.now_ns();
}

void TcpControl::tick() {
  const int64_t now = reactor_.now_ns();
  if (ms_between(last_tick_ns_, now) > std::max(kSleptMs, silence_limit_ms_ / 2))
    awake_since_ns_ = now;
  last_tick_ns_ = now;
  check_decision(now);
  if (left_) return;
  check_silence(now);
  if (ms_between(last_heartbeat_ns_, now) >= heartbeat_ms_) {
    last_heartbeat_ns_ = now;
    send_heartbeats();
  } else if (coordinates() && gather_.present > 0) {
    report_missing();
  }
}

void TcpControl::send_heartbeats() {
  wire::Heartbeat beat;
  if (coordinates()) {
    if (gather_.present > 0) beat.waiting = missing_text();
    for (int32_t r = 0; r < size(); ++r)
      beat.silent_ms.push_back(static_cast<uint32_t>(silent_ms(r)));
  }
  const std::string text = beat.encode();
  for (const auto& link : group_.links) {
    // A peer that does not read must not make the queue grow.
    if (link && link->flushed()) link->send(wire::FrameKind::kHeartbeat, text);
  }
}

// Sends the ranks that have come the ones that the all-gather waits for.
void TcpControl::report_missing() {
  const std::string missing = missing_text();
  if (missing == reported_missing_) return;
  reported_missing_ = missing;
  const std::string text = wire::Heartbeat{missing, {}}.encode();
  for (const auto& link : group_.links) {
    const bool there = link && gather_.blobs[static_cast<size_t>(link->rank)].has_value();
    if (there && link->flushed()) link->send(wire::FrameKind::kHeartbeat, text);
  }
}

int64_t TcpControl::silent_ms(int32_t rank) const {
  if (rank == group_.rank) return 0;
  const int64_t now = reactor_.now_ns();
  if (const ControlLink* link = link_of(rank))
    return std::max<int64_t>(0, ms_between(link->last_heard_ns(), now));
  if (told_.silent_ms.empty()) return 0;
  return told_.silent_ms[static_cast<size_t>(rank)] + ms_between(silent_at_ns_, now);
}

// ---- end

void TcpControl::leave(Deadline deadline) {
  if (left_) return;
  if (inquiry_) decide(inquiry_->cause);
  if (decision_) adopt(*decision_);
  left_ = true;
  service_.stop();
  for (const auto& link : group_.links) {
    if (link) link->send(wire::FrameKind::kBye, "");
  }
  const auto told = [this] {
    return std::all_of(group_.links.begin(), group_.links.end(),
                       [](const auto& l) { return !l || l->delivered(); });
  };
  while (!told() && !deadline.passed(reactor_.clock()))
    reactor_.poll(std::min<int64_t>(1000, deadline.left_us(reactor_.clock())));
  for (const auto& link : group_.links) {
    if (link) link->close();
  }
  group_.server.reset();
}

}  // namespace sotto::tcp
