// Small messages between ranks of a root comm, over its control plane: for what the library's parts
// on different ranks have to tell each other beside operations. No collective; a rank that does not
// drive its context receives nothing.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace sotto {

inline constexpr uint64_t kMaxServiceBytes = 4096;
// Channels are numbered from 0.
inline constexpr uint32_t kServiceChannels = 16;
// Says that one message was delivered. Has no bytes.
inline constexpr uint32_t kServiceDelivered = kServiceChannels;
// Messages to one rank that are not delivered yet.
inline constexpr uint32_t kServiceWindow = 32;

// The channels in use.
inline constexpr uint32_t kStandingChannel = 0;  // how far a rank's operations are (group/standing)
inline constexpr uint32_t kConnectChannel = 1;   // a rank waits for a connection (tcp/mesh); empty
inline constexpr uint32_t kTestChannel = 15;

class ServiceListener {
 public:
  virtual ~ServiceListener() = default;
  // A message of the listener's channel. Driver, from inside poll; may send and set listeners.
  virtual void on_service(int32_t from, std::string_view bytes) noexcept = 0;
};

struct ServiceMessage {
  int32_t source = 0;
  int32_t destination = 0;
  uint32_t channel = 0;
  std::string bytes;
};

// One rank's end, as all control planes have it: what it has sent, up to the word that it was
// delivered, and what has arrived for its listeners. How messages travel is the control plane's.
//
// Every rank has room for kServiceWindow messages of each other one. So neither end waits, and
// memory is bounded also where a rank does not listen.
class ServiceBox {
 public:
  ServiceBox(int32_t rank, int32_t size);

  // Whether this rank may send a message now; if so, it counts as sent. INVALID_ARGUMENT names the
  // rank, channel or length. BUSY: the window is full.
  Status admit(const ServiceMessage& message);
  // A message to this rank. PROTOCOL: what no rank of this library sends.
  Status arrived(ServiceMessage message);
  // At most one for each channel; nullptr: none, and what arrives for it is kept.
  void listen(uint32_t channel, ServiceListener* listener);
  // The next message that has a listener, in the order of arrival. The caller delivers it and sends
  // `delivered` to its source.
  std::optional<ServiceMessage> next();
  void deliver(const ServiceMessage& message) const;
  static ServiceMessage delivered(const ServiceMessage& message);

 private:
  const int32_t rank_;
  std::vector<uint32_t> sent_, waiting_;  // by rank: messages that are not delivered
  std::array<ServiceListener*, kServiceChannels> listeners_{};
  std::deque<ServiceMessage> arrived_;
};

}  // namespace sotto
