// Communicators between some of the ranks, for native collectives, next to that of all ranks.
#include <system_error>
#include <thread>
#include <utility>

#include "transports/nccl/nccl_transport.h"

namespace sotto::nccl {

Result<std::string> NcclTransport::invite(bool first) { return communicator_->invite(first); }

// The root comm fails if this rank cannot join, since the other ranks wait for it.
Status NcclTransport::join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
                           Driver& driver, Deadline deadline) {
  if (failed_ || !communicator_->open()) return closed();
  Result<std::unique_ptr<Communicator>> made =
      communicator_->join(rank, invitations, control_, driver, deadline);
  if (!made.ok()) {
    if (!control_.failure()) fail(-1, made.status().with_prefix(fmt::format("rank {}", rank_)));
    return made.status();
  }
  joined_[comm] = std::move(*made);
  return ok_status();
}

void NcclTransport::leave(uint64_t comm) {
  const auto it = joined_.find(comm);
  if (it == joined_.end()) return;
  it->second->end();
  ending_.push_back(std::move(it->second));
  joined_.erase(it);
}

// For a comm that was not joined: that of all ranks.
const Communicator& NcclTransport::communicator_of(uint64_t comm) const {
  const auto it = joined_.find(comm);
  return it == joined_.end() ? *communicator_ : *it->second;
}

Status NcclTransport::check_communicators() const {
  SOTTO_TRY(communicator_->check());
  for (const auto& [comm, joined] : joined_) SOTTO_TRY(joined->check());
  return ok_status();
}

// Aborts all at once. An abort may wait for queued work, which may be behind the work of another
// communicator. NCCL has groups of aborts for this since 2.22; threads work with all versions.
void NcclTransport::abort_communicators() {
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
  communicator_->abort();
}

}  // namespace sotto::nccl
