#include "core/group/standing.h"

#include <cstring>

namespace sotto {
namespace {

enum class Saying : uint64_t { kQuestion, kAnswer };

// All ranks are of one version of the set-up, and so of one layout.
struct Record {
  Saying saying = Saying::kQuestion;
  uint64_t epoch = 0;
  uint64_t completed = 0;
  uint64_t in_flight = 0;
};

constexpr int64_t kAskAgainNs = 1'000'000'000;

std::string_view bytes_of(const Record& record) {
  return {reinterpret_cast<const char*>(&record), sizeof record};
}

}  // namespace

void Standing::attach(ControlPlane& control, const Clock& clock) {
  control_ = &control;
  clock_ = &clock;
  control.set_service_listener(kStandingChannel, this);
}

void Standing::detach() {
  if (control_ != nullptr) control_->set_service_listener(kStandingChannel, nullptr);
  control_ = nullptr;
}

void Standing::add(uint64_t epoch, std::shared_ptr<const OpTotals> totals) {
  std::lock_guard lock(mutex_);
  totals_[epoch] = std::move(totals);
}

void Standing::remove(uint64_t epoch) {
  peers_.erase(peers_.lower_bound({epoch, INT32_MIN}), peers_.upper_bound({epoch, INT32_MAX}));
  std::lock_guard lock(mutex_);
  totals_.erase(epoch);
}

std::optional<RankStanding> Standing::ask(uint64_t epoch, int32_t rank) {
  Peer& peer = peers_[{epoch, rank}];
  if (control_ == nullptr) return peer.last;
  const int64_t now = clock_->now_ns();
  if (peer.asked_ns != 0 && now - peer.asked_ns < kAskAgainNs) return peer.last;
  // Where asking fails, the last answer is all there is.
  const Record question{Saying::kQuestion, epoch};
  if (control_->send_service(rank, kStandingChannel, bytes_of(question)).ok()) peer.asked_ns = now;
  return peer.last;
}

void Standing::on_service(int32_t from, std::string_view bytes) noexcept {
  Record record;
  if (bytes.size() != sizeof record || control_ == nullptr) return;
  std::memcpy(&record, bytes.data(), sizeof record);
  if (record.saying == Saying::kAnswer) {
    const auto asked = peers_.find({record.epoch, from});
    if (asked == peers_.end()) return;  // the comm has ended here
    asked->second = {0, RankStanding{record.completed, record.in_flight, clock_->now_ns()}};
    return;
  }
  std::shared_ptr<const OpTotals> totals;
  {
    std::lock_guard lock(mutex_);
    if (const auto it = totals_.find(record.epoch); it != totals_.end()) totals = it->second;
  }
  if (totals == nullptr) return;  // the comm has ended here, or not begun
  const Record answer{Saying::kAnswer, record.epoch, totals->completed.load(),
                      totals->in_flight.load()};
  // Without an answer it asks again.
  (void)control_->send_service(from, kStandingChannel, bytes_of(answer));
}

}  // namespace sotto
