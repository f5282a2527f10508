// An ncclComm_t: made from the ranks' rendezvous or the caller's own, or between some of the ranks;
// non-blocking, with deadlines.
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
#include "transports/nccl/nccl_options.h"

namespace sotto::nccl {

class Communicator {
 public:
  // Collective over the control plane; the same on all ranks. `adopted`: this rank's communicator,
  // made by the caller, with the control plane's ranks; null: one is made, on the device that is
  // current on this thread. All ranks fail if one does, with its reason.
  static Result<std::unique_ptr<Communicator>> make(const NcclOptions& options, ncclComm_t adopted,
                                                    ControlPlane& control, Driver& driver,
                                                    Deadline deadline);
  // What the ranks of another one are to know of this rank (`first`: the first of them), which may
  // be why it cannot be made.
  std::string invite(bool first) const;
  // Another one, between the ranks that have invited, of which this one is `rank`; on the device of
  // this one, whose control plane ends the wait if it fails. Collective.
  Result<std::unique_ptr<Communicator>> join(int32_t rank,
                                             const std::vector<std::string>& invitations,
                                             const ControlPlane& control, Driver& driver,
                                             Deadline deadline) const;
  // Aborts what was made here and is still open.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Api& api() const { return *api_; }
  ncclComm_t handle() const { return comm_; }
  int device() const { return device_; }
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  bool open() const { return comm_ != nullptr; }

  // What has become of a call that NCCL may carry on in the background: IN_PROGRESS, OK or the
  // error.
  Status state(const char* call) const;
  // What a call has returned, which NCCL may carry on in the background.
  Status queued(ncclResult_t result, const char* call) const;
  // OK, or the asynchronous error.
  Status check() const;
  // Operations end, on this rank and by an error on the others. The handle is gone, the caller's
  // own too.
  void abort();
  // Begins its orderly end, in which all ranks of a machine take part. What is the caller's stays.
  void end();
  // Whether that is over; the handle is gone then.
  bool ended();

 private:
  Communicator(std::shared_ptr<const Api> api, bool adopted, int32_t rank, int32_t size)
      : api_(std::move(api)), adopted_(adopted), rank_(rank), size_(size) {}
  Status adopt(ncclComm_t comm);
  Status init(const ncclUniqueId& id, const ControlPlane& control, Driver& driver,
              Deadline deadline);
  void abort_after(const Status& status);

  const std::shared_ptr<const Api> api_;
  const bool adopted_;
  const int32_t rank_, size_;
  ncclComm_t comm_ = nullptr;
  int device_ = 0;
};

}  // namespace sotto::nccl
