// Sockets between processes of one host, for descriptors. Their names are in no file system: they
// are abstract, and end with the process. Nothing here waits.
//
// Processes see each other's names where they share a network namespace, also in different
// containers and as different users, which /proc/<pid>/fd would not let them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transports/shm/descriptor.h"

namespace sotto::shm {

// One message, whole or not at all.
struct UnixMessage {
  std::string bytes;
  std::vector<Descriptor> descriptors;
};

class UnixSocket {
 public:
  // TRANSPORT: the system's text.
  static Result<UnixSocket> listen(const std::string& name, int backlog);
  static Result<UnixSocket> connect(const std::string& name);
  // A process that has connected; nothing: there is none. TRANSPORT: it cannot be taken, as without
  // descriptors.
  Result<std::optional<UnixSocket>> accept() const;

  // descriptors: at most kMostDescriptors.
  Status send(const std::string& bytes, const std::vector<int>& descriptors) const;
  // TRANSPORT: no message is there, it has more than max_bytes, or there is no room for its
  // descriptors.
  Result<UnixMessage> receive(size_t max_bytes) const;
  // Of the process that listened or connected, as this one sees it; 0: it does not.
  int32_t peer_pid() const;

  static constexpr size_t kMostDescriptors = 2;

 private:
  explicit UnixSocket(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}

  Descriptor descriptor_;
};

}  // namespace sotto::shm
