// Addresses and connecting.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "transports/tcp/asio.h"
#include "transports/tcp/reactor.h"

namespace sotto::tcp {

using Address = asio::ip::address;

// "127.0.0.1:80", "[::1]:80"; addresses of IPv4 behind an IPv6 socket are written as IPv4.
std::string endpoint_text(const Endpoint& endpoint);

// Where this rank listens: the address that sockets are bound to, and the published ones.
struct ListenPlace {
  Address bind;
  std::vector<Address> published;  // at least one
  uint16_t port = 0;               // of data connections; 0: any
  uint16_t published_port = 0;     // of data connections; 0: the one that is bound
};
// listen: empty = loopback, "any", an address, or the name of an interface. INVALID_ARGUMENT lists
// the interfaces.
Result<ListenPlace> listen_place(const std::string& listen);
// The place of a rank without a setting: the address of this machine on the route to the first of
// `others` that has one. With loopback or without any route: loopback.
ListenPlace place_towards(const std::vector<Endpoint>& others);
// Whether this machine has the address.
bool is_own_address(const Address& address);
// Of the addresses of one name (at least one) that of this machine: one that others reach before
// loopback. The first of all, if it has none of them.
Endpoint own_endpoint(const std::vector<Endpoint>& found);
// "lo 127.0.0.1, eth0 10.0.0.1", for messages.
std::string interface_list();
// Replaces the published addresses: TcpOptions::advertise. INVALID_ARGUMENT names the forms.
Status advertise(const std::string& text, ListenPlace& place);

// tcp://host:port, host a name, an IPv4 address or [IPv6]. Name resolution may block in the
// system's resolver. INVALID_ARGUMENT: no such form. TRANSPORT: the name is not known.
Result<std::vector<Endpoint>> resolve_url(const std::string& url, Reactor& reactor);

// Takes a connected socket; `name` is the peer's address.
using SocketFn = std::function<void(int fd, std::string name)>;

// An address that does not answer is left for the next one after this time.
inline constexpr int64_t kAttemptMs = 2000;

// Connects to the first of several addresses that answers. Destruction ends the attempt.
class Connector {
 public:
  using FailedFn = std::function<void(Status why)>;
  // retry: tries all addresses again, without end, after a pause. Else `failed` is called once,
  // with TRANSPORT.
  Connector(Reactor& reactor, std::vector<Endpoint> endpoints, bool retry, SocketFn connected,
            FailedFn failed);
  ~Connector();
  // The last failure of each address that was tried: "127.0.0.1:80: Connection refused, [::1]:80:
  // no answer"; empty before the first failure.
  std::string tried() const;
  // Which of the addresses is being tried, or has answered.
  size_t position() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace sotto::tcp
