#include "transports/tcp/failure_agreement.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace sotto::tcp {
namespace {

std::string encoded(const FailureCause& c) {
  return wire::Failure{static_cast<int32_t>(c.code), c.rank, c.text, c.reporter, c.waits}.encode();
}

// Causes whose reason may be another rank or another connection.
bool is_symptom(const FailureCause& c) {
  return c.code == Code::kTimeout || c.code == Code::kPeerLost;
}

}  // namespace

FailureAgreement::FailureAgreement(ControlPeers& peers, SignsOfLife& signs, const Clock& clock,
                                   std::function<void()> failed)
    : peers_(peers),
      signs_(signs),
      clock_(clock),
      failed_(std::move(failed)),
      lost_(static_cast<size_t>(peers.size())) {
  bridge_->agreement = this;
}

bool FailureAgreement::connected(int32_t rank) const {
  return bridge_->route != nullptr && bridge_->route->connected(rank);
}

// ---- causes

// The same text on every rank.
FailureCause FailureAgreement::lost_coordinator() const {
  const int32_t rank = peers_.coordinator();
  const wire::Members::Member& member = peers_.member(rank);
  return {Code::kPeerLost, rank,
          fmt::format("{} is lost: it does not answer",
                      member_text(rank, {member.pid, member.host, ""})),
          -1};
}

FailureCause FailureAgreement::lost_rank(int32_t rank, const Status& why) const {
  return {why.code(), rank, fmt::format("{} is lost: {}", peers_.describe(rank), why.text()),
          peers_.rank()};
}

FailureCause FailureAgreement::lost_connection(int32_t peer, const LostConnection& lost) const {
  return {lost.why.code(), peer,
          fmt::format("the control connection between {} and {} is {}: rank {}: {}",
                      peers_.describe(peers_.rank()), peers_.describe(peer),
                      lost.damaged ? "damaged" : "lost", peers_.rank(), lost.why.text()),
          peers_.rank()};
}

// Of ranks without a sign of life, on the coordinator.
FailureCause FailureAgreement::silent_ranks(Code code, const std::vector<int32_t>& ranks) const {
  FailureCause cause{code, ranks.front(), {}, peers_.rank()};
  for (const int32_t r : ranks) {
    cause.text += fmt::format("{}{} does not answer rank {}: silent for {} ms",
                              cause.text.empty() ? "" : ", ", peers_.describe(r), peers_.rank(),
                              signs_.silent_ms(r));
    if (signs_.silent_ms(r) > signs_.silent_ms(cause.rank)) cause.rank = r;
  }
  return cause;
}

// ---- proposals

void FailureAgreement::fail(FailureCause cause) {
  if (failure_ || proposed_) return;
  cause.reporter = peers_.rank();
  if (peers_.coordinates()) {
    consider(std::move(cause));
  } else {
    propose(std::move(cause));
  }
}

// A member's cause, which counts only if the coordinator decides so.
void FailureAgreement::propose(FailureCause cause) {
  const int32_t coordinator = peers_.coordinator();
  if (peers_.left(peers_.rank()) || peers_.left(coordinator)) {  // no decision will come
    adopt(std::move(cause));
    return;
  }
  if (!peers_.open(coordinator) && !connected(coordinator)) {
    adopt(lost_coordinator());
    return;
  }
  proposed_ns_ = clock_.now_ns();
  tell(coordinator, encoded(cause));
  proposed_ = std::move(cause);
}

void FailureAgreement::tell(int32_t rank, const std::string& payload) {
  if (peers_.left(rank)) return;
  peers_.send(rank, wire::FrameKind::kFailure, payload);
  if (bridge_->route != nullptr) bridge_->route->send_failure(rank, payload);
}

Status FailureAgreement::on_frame(int32_t peer, wire::Bytes payload) {
  auto failure = wire::Failure::decode(payload);
  if (!failure.ok()) return failure.status();
  FailureCause cause{static_cast<Code>(failure->code), failure->rank, std::move(failure->text),
                     failure->reporter, std::move(failure->waits)};
  if (peers_.coordinates()) {
    if (cause.reporter < 0) cause.reporter = peer;
    consider(std::move(cause));
  } else if (peer == peers_.coordinator()) {
    adopt(std::move(cause));
  }
  return {};
}

// A proposal of the coordinator's own or of a member.
void FailureAgreement::consider(FailureCause cause) {
  if (failure_ || decision_) return;
  const FailureCause own = lost_coordinator();
  if (cause.code == own.code && cause.text == own.text) {  // members went on without this rank
    decide(own);
  } else if (peers_.established() && !peers_.left(peers_.rank()) && is_symptom(cause)) {
    inquire(std::move(cause));
  } else {
    decide(std::move(cause));
  }
}

// ---- inquiries

void FailureAgreement::inquire(FailureCause cause) {
  if (inquiry_ || decision_) return;  // the first one counts
  Inquiry inquiry{std::move(cause), clock_.now_ns(), {}};
  for (int32_t r = 0; r < peers_.size(); ++r) {
    // A lost connection concerns only its ends.
    const bool concerned = inquiry.cause.code == Code::kTimeout || r == inquiry.cause.rank;
    if (concerned && peers_.open(r) && !peers_.left(r)) inquiry.asked.push_back(r);
  }
  inquiry_ = std::move(inquiry);
  signs_.ask();
  conclude();
}

// Decides as soon as the inquiry cannot find out more.
void FailureAgreement::conclude() {
  if (decision_) settle();
  if (!inquiry_ || decision_ || failure_) return;
  for (int32_t r = 0; r < peers_.size(); ++r) {
    const Status& why = lost_[static_cast<size_t>(r)];
    if (!why.ok() && !connected(r)) {
      decide(lost_rank(r, why));
      return;
    }
  }
  std::erase_if(inquiry_->asked,
                [this](int32_t r) { return peers_.heard_ns(r) > inquiry_->begin_ns; });
  // With a broken control connection a rank is lost if its data connections end meanwhile, too.
  const bool broken =
      std::any_of(lost_.begin(), lost_.end(), [](const auto& s) { return !s.ok(); });
  const bool over = ms_between(inquiry_->begin_ns, clock_.now_ns()) >= kInquiryMs;
  if (!over && (broken || !inquiry_->asked.empty())) return;
  if (inquiry_->asked.empty()) {
    decide(inquiry_->cause);
    return;
  }
  FailureCause cause = silent_ranks(inquiry_->cause.code, inquiry_->asked);
  cause.text += "; " + inquiry_->cause.text;
  decide(std::move(cause));
}

void FailureAgreement::on_sign() {
  if (peers_.coordinates()) conclude();
}

// ---- lost connections

void FailureAgreement::on_lost(int32_t peer, const LostConnection& lost) {
  if (peers_.left(peers_.rank()) || failure_ || decision_) return;
  lost_[static_cast<size_t>(peer)] = lost.why;
  // Wrong bytes arrived: a fault of the peer or the path, but the peer runs.
  const bool wrong = lost.why.code() != Code::kPeerLost;
  if (lost.unanswered || !connected(peer)) {
    if (peers_.coordinates()) {
      decide(lost.damaged ? lost_connection(peer, lost) : lost_rank(peer, lost.why));
    } else {
      adopt(wrong ? lost_rank(peer, lost.why) : lost_coordinator());
    }
    return;
  }
  FailureCause cause =
      wrong && !lost.damaged ? lost_rank(peer, lost.why) : lost_connection(peer, lost);
  if (peers_.coordinates()) {
    is_symptom(cause) ? inquire(std::move(cause)) : decide(std::move(cause));
    conclude();
  } else if (!proposed_) {
    propose(std::move(cause));
  }
}

void FailureAgreement::on_disconnected(int32_t peer) {
  if (peers_.left(peers_.rank()) || failure_ || lost_[static_cast<size_t>(peer)].ok()) return;
  if (peers_.coordinates()) {
    conclude();
  } else if (peer == peers_.coordinator()) {
    adopt(lost_coordinator());
  }
}

// The coordinator left before it received the proposal.
void FailureAgreement::on_left(int32_t /*peer*/) {
  if (!peers_.coordinates() && proposed_) adopt(*proposed_);
}

// ---- decisions

// Sends the decision to all.
void FailureAgreement::decide(FailureCause cause) {
  if (failure_ || decision_) return;
  cause.text = cause.whole_text();
  cause.waits.clear();
  const std::string payload = encoded(cause);
  decision_ = std::move(cause);
  decided_ns_ = clock_.now_ns();
  for (int32_t r = 0; r < peers_.size(); ++r) {
    if (r != peers_.rank()) tell(r, payload);
  }
  settle();
}

// Adopting the decision cancels operations, and half a message of theirs ends a data connection. So
// the decision is sent first: the peer's end of a control connection may be closed already.
void FailureAgreement::settle() {
  if (failure_) return;
  const bool late = ms_between(decided_ns_, clock_.now_ns()) >= kSendMs;
  for (int32_t r = 0; !late && r < peers_.size(); ++r) {
    if (connected(r) && !bridge_->route->failure_sent(r)) return;
  }
  adopt(*decision_);
}

void FailureAgreement::adopt(FailureCause cause) {
  if (failure_) return;
  if (proposed_ && cause.text != proposed_->text && cause.text != proposed_->whole_text())
    log(LogLevel::kInfo, "rank {}: what it saw of the failure: {}", peers_.rank(),
        proposed_->whole_text());
  cause.text = cause.whole_text();
  cause.waits.clear();
  failure_ = std::move(cause);
  failed_();
}

void FailureAgreement::conclude_at_once() {
  if (inquiry_) decide(inquiry_->cause);
  if (decision_) adopt(*decision_);
}

// ---- what has become late

void FailureAgreement::tick() {
  check_decision();
  if (!peers_.left(peers_.rank())) check_silence();
}

// Between two ticks all that has arrived is read, so a decision that is in time is not missed.
void FailureAgreement::check_decision() {
  if (failure_) return;
  conclude();
  if (!proposed_ || failure_ || ms_between(proposed_ns_, clock_.now_ns()) < kDecisionMs) return;
  if (!std::exchange(overdue_, true)) return;
  // A rank that aborts reports its own abort.
  adopt_alone(proposed_->code == Code::kAborted ? *proposed_ : lost_coordinator());
}

void FailureAgreement::check_silence() {
  if (failure_ || decision_) return;
  const std::vector<int32_t> ranks = signs_.overdue();
  if (ranks.empty()) return;
  if (!peers_.coordinates()) {
    adopt_alone(lost_coordinator());
    return;
  }
  FailureCause cause = silent_ranks(Code::kPeerLost, ranks);
  cause.text += fmt::format("; SOTTO_SILENCE_LIMIT_MS is {}", signs_.limit_ms());
  decide(std::move(cause));
}

// On a member whose coordinator does not answer, and may yet hear of it.
void FailureAgreement::adopt_alone(FailureCause cause) {
  tell(peers_.coordinator(), encoded(cause));
  adopt(std::move(cause));
}

}  // namespace sotto::tcp
