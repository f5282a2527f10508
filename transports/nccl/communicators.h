// The communicators of a root comm: that of all ranks, and those between some of the ranks, for
// native collectives.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/nccl/communicator.h"

namespace sotto::nccl {

class Communicators {
 public:
  explicit Communicators(std::unique_ptr<Communicator> all) : all_(std::move(all)) {}

  // Of all ranks. The others are on its device.
  const Communicator& all() const { return *all_; }
  // That of a comm which was joined, else that of all ranks. `comm` is an epoch.
  const Communicator& of(uint64_t comm) const;

  // As Communicator has them.
  std::string invite(bool first) const { return all_->invite(first); }
  Status join(uint64_t comm, int32_t rank, const std::vector<std::string>& invitations,
              const ControlPlane& control, Driver& driver, Deadline deadline);
  // Begins the end of the comm's communicator. Nothing if it was not joined.
  void leave(uint64_t comm);
  // Forgets those of comms that were left, as far as they have ended.
  void reap();

  // OK, or the asynchronous error of one that was not left.
  Status check() const;
  // Begins the end of all of them: in an orderly way, from the deadline on by aborts.
  void end(Deadline deadline);
  // Begins to abort all of them, also those that are ending.
  void abort();
  // Whether what has begun is over.
  bool over() const;
  // Or left to graphs, as Communicator has it; to be asked again until it is.
  bool ended(const Clock& clock);

 private:
  std::vector<Communicator*> every() const;

  const std::unique_ptr<Communicator> all_;
  std::map<uint64_t, std::unique_ptr<Communicator>> joined_;  // by epoch
  std::vector<std::unique_ptr<Communicator>> ending_;         // of comms that were left
  Deadline deadline_;                                         // of an orderly end
};

}  // namespace sotto::nccl
