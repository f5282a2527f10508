// An eventfd that ends the wait of a rank: its own, or that of a peer.
//
// Threads: any.
#pragma once

#include "core/base/status.h"
#include "transports/shm/descriptor.h"

namespace sotto::shm {

class Bell {
 public:
  // TRANSPORT: no descriptors left.
  static Result<Bell> make();
  // A peer's.
  explicit Bell(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}

  void ring() const;
  // It is silent until the next ring.
  void silence() const;
  // Waits at most so long for a ring.
  void wait(int64_t wait_us) const;
  int descriptor() const { return descriptor_.get(); }

 private:
  Descriptor descriptor_;
};

}  // namespace sotto::shm
