#include "transports/nccl/communicators.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace sotto::nccl {

const Communicator& Communicators::of(uint64_t comm) const {
  const auto it = joined_.find(comm);
  return it == joined_.end() ? *all_ : *it->second;
}

Status Communicators::join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
                           const ControlPlane& control, Driver& driver, Deadline deadline) {
  SOTTO_ASSIGN(joined_[comm], all_->join(rank, invitations, control, driver, deadline));
  return ok_status();
}

void Communicators::leave(uint64_t comm) {
  const auto it = joined_.find(comm);
  if (it == joined_.end()) return;
  it->second->end();
  ending_.push_back(std::move(it->second));
  joined_.erase(it);
}

void Communicators::reap() {
  std::erase_if(ending_, [](const auto& ending) { return ending->ended(); });
}

Status Communicators::check() const {
  SOTTO_TRY(all_->check());
  for (const auto& [comm, joined] : joined_) SOTTO_TRY(joined->check());
  return ok_status();
}

std::vector<Communicator*> Communicators::every() const {
  std::vector<Communicator*> all{all_.get()};
  for (const auto& [comm, joined] : joined_) all.push_back(joined.get());
  for (const auto& left : ending_) all.push_back(left.get());
  return all;
}

void Communicators::end(Deadline deadline) {
  deadline_ = deadline;
  for (Communicator* communicator : every()) communicator->end();
}

void Communicators::abort() {
  deadline_ = {};
  for (Communicator* communicator : every()) communicator->abort();
}

bool Communicators::over() const { return std::ranges::all_of(every(), &Communicator::over); }

bool Communicators::ended(const Clock& clock) {
  const auto left =
      std::ranges::count_if(every(), [](const Communicator* c) { return !c->ended(); });
  if (left == 0) return true;
  if (deadline_.passed(clock)) {
    log(LogLevel::kWarn, "nccl: {} communicators have not ended in time and are aborted", left);
    abort();
  }
  return false;
}

}  // namespace sotto::nccl
