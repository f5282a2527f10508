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

// Where this rank listens: what sockets are bound to, and what others are told.
struct ListenPlace {
  Address bind;
  std::vector<Address> published;  // at least one
  uint16_t port = 0;               // of data connections; 0: any
  uint16_t published_port = 0;     // of data connections; 0: the one that is bound
};
// listen: empty = loopback, "any", an address, or the name of an interface. INVALID_ARGUMENT names
// what there is.
Result<ListenPlace> listen_place(const std::string& listen);
// Where a rank listens that was not told: at the address of this machine from which the first of
// `others` that has a route is reached. With loopback or without any route: loopback.
ListenPlace place_towards(const std::vector<Endpoint>& others);
// Whether this machine has the address.
bool is_own_address(const Address& address);
// "lo 127.0.0.1, eth0 10.0.0.1", for messages.
std::string interface_list();
// Replaces what others are told: TcpOptions::advertise. INVALID_ARGUMENT names the forms.
Status advertise(const std::string& text, ListenPlace& place);

// tcp://host:port, host a name, an IPv4 address or [IPv6]. Name resolution may block in the
// system's resolver. INVALID_ARGUMENT: no such form. TRANSPORT: the name is not known.
Result<std::vector<Endpoint>> resolve_url(const std::string& url, Reactor& reactor);

// Takes a connected socket; `name` is the other side's address.
using SocketFn = std::function<void(int fd, std::string name)>;

// Connects to the first of several addresses that answers. Destroying it gives up.
class Connector {
 public:
  using FailedFn = std::function<void(Status why)>;
  // retry: begin again after a pause when no address has answered, for ever. Otherwise failed is
  // called once, TRANSPORT.
  Connector(Reactor& reactor, std::vector<Endpoint> endpoints, bool retry, SocketFn connected,
            FailedFn failed);
  ~Connector();
  // What became of the addresses that were tried, each one's last attempt: "127.0.0.1:80:
  // Connection refused, [::1]:80: no answer"; empty before the first has failed.
  std::string tried() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace sotto::tcp
