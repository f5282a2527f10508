// The process manager of a launcher, which hands a text of rank 0 to all ranks of its job. Ranks
// that have no address meet with a unique id that rank 0 publishes there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/iface/rendezvous.h"

namespace sotto {

// A connection to it. Threads: one at a time.
class ProcessManager {
 public:
  virtual ~ProcessManager() = default;
  // The text of rank 0: `mine` there; other ranks' does not count. Letters, digits and "-" pass
  // through all managers. Collective: ends when all ranks have called, each by its deadline.
  virtual Result<std::string> publish(const std::string& key, const std::string& mine,
                                      Deadline deadline) = 0;
};

// How this process gets at its manager.
struct ManagerPlace {
  std::string name;  // for messages, and differs between managers: "PMI_FD=6"
  std::function<Result<std::unique_ptr<ProcessManager>>(Deadline)> open;
};

// The unique id of rank 0, where `make` is called. If that fails, all ranks fail with its text.
// Collective. A manager is opened once, and closed when the process exits; after an error it is not
// used again. INVALID_STATE: that, or another thread of this process is meeting; TIMEOUT;
// PROTOCOL: what was published is no id.
Result<UniqueId> meet(const ManagerPlace& place, int32_t rank,
                      const std::function<Result<UniqueId>()>& make, Deadline deadline);

}  // namespace sotto
