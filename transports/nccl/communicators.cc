#include "transports/nccl/communicators.h"

#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/log.h"

namespace sotto::nccl {
namespace {

constexpr auto kEndPause = std::chrono::microseconds(20);

}  // namespace

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

void Communicators::end(const Clock& clock, Deadline deadline) {
  std::vector<Communicator*> ending{all_.get()};
  for (const auto& [comm, joined] : joined_) ending.push_back(joined.get());
  for (Communicator* communicator : ending) communicator->end();
  for (const auto& before : ending_) ending.push_back(before.get());
  const auto ended = [](Communicator* communicator) { return communicator->ended(); };
  while (std::erase_if(ending, ended), !ending.empty() && !deadline.passed(clock))
    std::this_thread::sleep_for(kEndPause);
  if (ending.empty()) return;
  log(LogLevel::kWarn, "nccl: {} communicators have not ended in time and are aborted",
      ending.size());
  abort();
}

// All at once. An abort may wait for queued work, which may be behind the work of another
// communicator. NCCL has groups of aborts for this since 2.22; threads work with all versions.
void Communicators::abort() {
  std::vector<Communicator*> others;
  for (const auto& ending : ending_) others.push_back(ending.get());
  for (const auto& [comm, joined] : joined_) others.push_back(joined.get());
  std::vector<std::jthread> threads;
  for (Communicator* other : others) {
    if (!other->open()) continue;
    try {
      threads.emplace_back([other] { other->abort(); });
    } catch (const std::system_error&) {  // there are no more threads
      other->abort();
    }
  }
  all_->abort();
}

}  // namespace sotto::nccl
