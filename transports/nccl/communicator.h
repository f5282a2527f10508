// An ncclComm_t: of all ranks, made here or lent by the caller, or of some ranks. Non-blocking,
// with deadlines.
//
// Threads: the driving thread.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/nccl/api.h"
#include "transports/nccl/communicator_end.h"
#include "transports/nccl/live_graphs.h"
#include "transports/nccl/nccl_options.h"

namespace sotto::nccl {

class Communicator {
 public:
  // Collective over the control plane. `adopted`: this rank's communicator, lent by the caller,
  // with the ranks of the control plane. Null: makes one, on the current device of this thread. If
  // one rank fails all do, with its reason.
  static Result<std::unique_ptr<Communicator>> make(const NcclOptions& options, ncclComm_t adopted,
                                                    ControlPlane& control, Driver& driver,
                                                    Deadline deadline);
  // This rank's record for the ranks of another communicator (`first`: the first of them). It may
  // say why this rank cannot take part.
  std::string invite(bool first) const;
  // Makes a communicator of the ranks whose records these are, on the same device; this one is
  // `rank`. Collective. A failure of the control plane ends the wait.
  Result<std::unique_ptr<Communicator>> join(int32_t rank,
                                             const std::vector<std::string>& invitations,
                                             const ControlPlane& control, Driver& driver,
                                             Deadline deadline) const;
  // Aborts a communicator that was made here and is open. Waits for its end (CommunicatorEnd).
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Api& api() const { return *api_; }
  ncclComm_t handle() const { return comm_; }
  int device() const { return device_; }
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  bool open() const { return comm_ != nullptr; }
  // Those that have calls of it.
  const LiveGraphs& graphs() const { return graphs_; }

  // The state of a call that NCCL may carry on in the background: IN_PROGRESS, OK or the error.
  Status state(const char* call) const;
  // The same, from what the call has returned.
  Status queued(ncclResult_t result, const char* call) const;
  // OK, or the asynchronous error.
  Status check() const;
  // Begins to end all operations, on other ranks by an error. Also of a lent one.
  void abort();
  // Begins the orderly end, in which all ranks of a machine take part. A lent communicator stays.
  void end();
  // Whether what has begun is over. The handle was invalid from the start.
  bool over() const;
  // Or left to graphs: the device need not have executed what was queued, and NCCL may still queue
  // what it had in progress.
  bool ended() const;

 private:
  Communicator(std::shared_ptr<const Api> api, bool adopted, int32_t rank, int32_t size)
      : api_(std::move(api)), adopted_(adopted), rank_(rank), size_(size) {}
  Status adopt(ncclComm_t comm);
  Status init(const ncclUniqueId& id, const ControlPlane& control, Driver& driver,
              Deadline deadline);
  CommunicatorEnd& give_up_handle();

  const std::shared_ptr<const Api> api_;
  const bool adopted_;
  const int32_t rank_, size_;
  const LiveGraphs graphs_;
  ncclComm_t comm_ = nullptr;
  int device_ = 0;
  std::unique_ptr<CommunicatorEnd> end_;  // null: it has not begun, or it is the caller's
};

}  // namespace sotto::nccl
