// An ncclComm_t: made from the ranks' rendezvous or the caller's own, non-blocking, with deadlines.
//
// Threads: the driving thread.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "core/iface/rendezvous.h"
#include "transports/nccl/api.h"
#include "transports/nccl/nccl_backend.h"

namespace sotto::nccl {

class Communicator {
 public:
  // Collective over the control plane; the same on all ranks. `adopted`: this rank's communicator,
  // made by the caller, with the control plane's ranks; null: one is made, on the device that is
  // current on this thread. All ranks fail if one does, with its reason.
  static Result<std::unique_ptr<Communicator>> make(const NcclOptions& options, ncclComm_t adopted,
                                                    ControlPlane& control, Driver& driver,
                                                    Deadline deadline);
  // Aborts what was made here and is still open.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Api& api() const { return *api_; }
  ncclComm_t handle() const { return comm_; }
  int device() const { return device_; }
  bool open() const { return comm_ != nullptr; }

  // What has become of a call that NCCL may carry on in the background: IN_PROGRESS, OK or the
  // error.
  Status state(const char* call) const;
  // OK, or the asynchronous error.
  Status check() const;
  // Operations end, on this rank and by an error on the others. The handle is gone, the caller's
  // own too.
  void abort();
  // Orderly end, in which all ranks of a machine take part; an abort if the time is over. What is
  // the caller's stays.
  void close(Deadline deadline, const Clock& clock);

 private:
  Communicator(std::shared_ptr<const Api> api, bool adopted)
      : api_(std::move(api)), adopted_(adopted) {}
  Status adopt(ncclComm_t comm, const ControlPlane& control);
  Status finalize(Deadline deadline, const Clock& clock) const;
  Status init(const ncclUniqueId& id, const ControlPlane& control, Driver& driver,
              Deadline deadline);

  const std::shared_ptr<const Api> api_;
  const bool adopted_;
  ncclComm_t comm_ = nullptr;
  int device_ = 0;
};

}  // namespace sotto::nccl
