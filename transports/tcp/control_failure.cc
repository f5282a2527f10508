// Agreement of the ranks on one cause of failure, by the rules in control_plane.h.
#include <algorithm>

#include "core/base/log.h"
#include "transports/tcp/control_plane.h"

namespace sotto::tcp {
namespace {

// Longest time that a decision waits to be sent on data connections.
constexpr int64_t kSendMs = 200;

std::string encoded(const FailureCause& c) {
  return wire::Failure{static_cast<int32_t>(c.code), c.rank, c.text, c.reporter, c.waits}.encode();
}

// The same text on every rank.
FailureCause lost_coordinator(const Membership& group) {
  const int32_t rank = group.coordinator;
  const wire::Members::Member& member = group.members[static_cast<size_t>(rank)];
  return {Code::kPeerLost, rank,
          fmt::format("{} is lost: it does not answer",
                      member_text(rank, {member.pid, member.host, ""})),
          -1};
}

// Causes whose reason may be another rank or another connection.
bool is_symptom(const FailureCause& c) {
  return c.code == Code::kTimeout || c.code == Code::kPeerLost;
}

}  // namespace

bool TcpControl::connected(int32_t rank) const {
  return bridge_->route != nullptr && bridge_->route->connected(rank);
}

// ---- causes

FailureCause TcpControl::lost_rank(int32_t rank, const Status& why) const {
  return {why.code(), rank, fmt::format("{} is lost: {}", describe_rank(rank), why.text()),
          group_.rank};
}

FailureCause TcpControl::lost_connection(int32_t peer, const Status& why, bool damaged) const {
  return {why.code(), peer,
          fmt::format("the control connection between {} and {} is {}: rank {}: {}",
                      describe_rank(group_.rank), describe_rank(peer), damaged ? "damaged" : "lost",
                      group_.rank, why.text()),
          group_.rank};
}

// Of ranks without a sign of life, on the coordinator.
FailureCause TcpControl::silent_ranks(Code code, const std::vector<int32_t>& ranks) const {
  FailureCause cause{code, ranks.front(), {}, group_.rank};
  for (const int32_t r : ranks) {
    cause.text +=
        fmt::format("{}{} does not answer rank {}: silent for {} ms",
                    cause.text.empty() ? "" : ", ", describe_rank(r), group_.rank, silent_ms(r));
    if (silent_ms(r) > silent_ms(cause.rank)) cause.rank = r;
  }
  return cause;
}

// ---- proposals

void TcpControl::fail(const FailureCause& cause) {
  if (failure_ || proposed_) return;
  FailureCause own = cause;
  own.reporter = group_.rank;
  if (coordinates()) {
    consider(std::move(own));
  } else {
    propose(std::move(own));
  }
}

// A member's cause, which counts only if the coordinator decides so.
void TcpControl::propose(FailureCause cause) {
  const int32_t coordinator = group_.coordinator;
  if (left_ || bye_[static_cast<size_t>(coordinator)]) {  // no decision will come
    adopt(std::move(cause));
    return;
  }
  if (!group_.links[0]->open() && !connected(coordinator)) {
    adopt(lost_coordinator(group_));
    return;
  }
  proposed_ns_ = reactor_.now_ns();
  tell(coordinator, encoded(cause));
  proposed_ = std::move(cause);
}

void TcpControl::tell(int32_t rank, const std::string& payload) {
  if (bye_[static_cast<size_t>(rank)]) return;
  if (ControlLink* link = link_of(rank)) link->send(wire::FrameKind::kFailure, payload);
  if (bridge_->route != nullptr) bridge_->route->send_failure(rank, payload);
}

Status TcpControl::on_failure_frame(int32_t peer, wire::Bytes payload) {
  auto failure = wire::Failure::decode(payload);
  if (!failure.ok()) return failure.status();
  FailureCause cause{static_cast<Code>(failure->code), failure->rank, std::move(failure->text),
                     failure->reporter, std::move(failure->waits)};
  if (coordinates()) {
    if (cause.reporter < 0) cause.reporter = peer;
    consider(std::move(cause));
  } else if (peer == group_.coordinator) {
    adopt(std::move(cause));
  }
  return {};
}

// On the coordinator: a proposal of its own or of a member.
void TcpControl::consider(FailureCause cause) {
  if (failure_ || decision_) return;
  const FailureCause own = lost_coordinator(group_);
  if (cause.code == own.code && cause.text == own.text) {  // members went on without this rank
    decide(own);
  } else if (established_ && !left_ && is_symptom(cause)) {
    inquire(std::move(cause));
  } else {
    decide(std::move(cause));
  }
}

void TcpControl::inquire(FailureCause cause) {
  if (inquiry_ || decision_) return;  // the first one counts
  Inquiry inquiry{std::move(cause), reactor_.now_ns(), {}};
  for (int32_t r = 0; r < size(); ++r) {
    const ControlLink* link = link_of(r);
    // A lost connection concerns only its ends.
    const bool concerned = inquiry.cause.code == Code::kTimeout || r == inquiry.cause.rank;
    if (concerned && link != nullptr && link->open() && !bye_[static_cast<size_t>(r)])
      inquiry.asked.push_back(r);
  }
  inquiry_ = std::move(inquiry);
  last_heartbeat_ns_ = inquiry_->begin_ns;
  send_heartbeats();
  conclude();
}

// Decides as soon as the inquiry cannot find out more.
void TcpControl::conclude() {
  if (decision_) settle();
  if (!inquiry_ || decision_ || failure_) return;
  for (int32_t r = 0; r < size(); ++r) {
    const Status& why = lost_[static_cast<size_t>(r)];
    if (!why.ok() && !connected(r)) {
      decide(lost_rank(r, why));
      return;
    }
  }
  std::erase_if(inquiry_->asked,
                [this](int32_t r) { return link_of(r)->last_heard_ns() > inquiry_->begin_ns; });
  // With a broken control connection a rank is lost if its data connections end meanwhile, too.
  const bool broken =
      std::any_of(lost_.begin(), lost_.end(), [](const auto& s) { return !s.ok(); });
  const bool over = ms_between(inquiry_->begin_ns, reactor_.now_ns()) >= kInquiryMs;
  if (!over && (broken || !inquiry_->asked.empty())) return;
  if (inquiry_->asked.empty()) {
    decide(inquiry_->cause);
    return;
  }
  FailureCause cause = silent_ranks(inquiry_->cause.code, inquiry_->asked);
  cause.text += "; " + inquiry_->cause.text;
  decide(std::move(cause));
}

// ---- lost connections

void TcpControl::on_lost(ControlLink& link, const Status& why) {
  if (left_ || failure_ || decision_) return;
  const int32_t peer = link.rank;
  lost_[static_cast<size_t>(peer)] = why;
  // Wrong bytes arrived: a fault of the peer or the path, but the peer runs.
  const bool wrong = why.code() != Code::kPeerLost;
  if (link.unanswered() || !connected(peer)) {
    if (coordinates()) {
      decide(link.damaged() ? lost_connection(peer, why, true) : lost_rank(peer, why));
    } else {
      adopt(wrong ? lost_rank(peer, why) : lost_coordinator(group_));
    }
    return;
  }
  FailureCause cause =
      wrong && !link.damaged() ? lost_rank(peer, why) : lost_connection(peer, why, link.damaged());
  if (coordinates()) {
    is_symptom(cause) ? inquire(std::move(cause)) : decide(std::move(cause));
    conclude();
  } else if (!proposed_) {
    propose(std::move(cause));
  }
}

void TcpControl::on_disconnected(int32_t peer) {
  if (left_ || failure_ || lost_[static_cast<size_t>(peer)].ok()) return;
  if (coordinates()) {
    conclude();
  } else if (peer == group_.coordinator) {
    adopt(lost_coordinator(group_));
  }
}

// ---- decisions

// On the coordinator: sends the decision to all.
void TcpControl::decide(FailureCause cause) {
  if (failure_ || decision_) return;
  cause.text = cause.whole_text();
  cause.waits.clear();
  const std::string payload = encoded(cause);
  decision_ = std::move(cause);
  decided_ns_ = reactor_.now_ns();
  for (int32_t r = 0; r < size(); ++r) {
    if (r != group_.rank) tell(r, payload);
  }
  settle();
}

// Adopting the decision cancels operations, and half a message of theirs ends a data connection. So
// the decision is sent first: the peer's end of a control connection may be closed already.
void TcpControl::settle() {
  if (failure_) return;
  const bool late = ms_between(decided_ns_, reactor_.now_ns()) >= kSendMs;
  for (int32_t r = 0; !late && r < size(); ++r) {
    if (connected(r) && !bridge_->route->failure_sent(r)) return;
  }
  adopt(*decision_);
}

void TcpControl::adopt(FailureCause cause) {
  if (failure_) return;
  if (proposed_ && cause.text != proposed_->text && cause.text != proposed_->whole_text())
    log(LogLevel::kInfo, "rank {}: what it saw of the failure: {}", group_.rank,
        proposed_->whole_text());
  cause.text = cause.whole_text();
  cause.waits.clear();
  failure_ = std::move(cause);
  service_.stop();
  asio::post(reactor_.io(), [this, alive = std::weak_ptr<bool>(alive_)] {
    if (!alive.expired() && listener_ != nullptr) listener_->on_control_failure(*failure_);
  });
}

// Between two ticks all that has arrived is read, so a decision that is in time is not missed.
void TcpControl::check_decision(int64_t now_ns) {
  if (failure_) return;
  conclude();
  if (!proposed_ || failure_ || ms_between(proposed_ns_, now_ns) < kDecisionMs) return;
  if (!std::exchange(overdue_, true)) return;
  // A rank that aborts reports its own abort.
  const FailureCause cause =
      proposed_->code == Code::kAborted ? *proposed_ : lost_coordinator(group_);
  tell(group_.coordinator, encoded(cause));
  adopt(cause);
}

void TcpControl::check_silence(int64_t now_ns) {
  if (silence_limit_ms_ == 0 || !established_ || failure_ || decision_) return;
  const auto silent = [&](int32_t r) {
    const ControlLink* link = link_of(r);
    if (link == nullptr || !link->open() || bye_[static_cast<size_t>(r)]) return int64_t{0};
    return std::min(silent_ms(r), ms_between(awake_since_ns_, now_ns));
  };
  if (!coordinates()) {
    // Half as long again: the coordinator's decision comes first if only this connection is silent.
    if (silent(group_.coordinator) < silence_limit_ms_ + silence_limit_ms_ / 2) return;
    tell(group_.coordinator, encoded(lost_coordinator(group_)));
    adopt(lost_coordinator(group_));
    return;
  }
  std::vector<int32_t> accused;
  for (int32_t r = 0; r < size(); ++r) {
    if (silent(r) >= silence_limit_ms_) accused.push_back(r);
  }
  if (accused.empty()) return;
  FailureCause cause = silent_ranks(Code::kPeerLost, accused);
  cause.text += fmt::format("; SOTTO_SILENCE_LIMIT_MS is {}", silence_limit_ms_);
  decide(std::move(cause));
}

}  // namespace sotto::tcp
