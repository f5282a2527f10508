#include "transports/tcp/net.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

namespace sotto::tcp {
namespace {

constexpr int64_t kFirstPauseMs = 10, kLongestPauseMs = 200;

struct Interface {
  std::string name;
  Address address;
};

// Addresses of interfaces that are up, IPv4 first; no link-local IPv6, which means nothing to
// others.
std::vector<Interface> interfaces() {
  std::vector<Interface> v4, v6;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    if (i->ifa_addr->sa_family == AF_INET) {
      sockaddr_in in;
      std::memcpy(&in, i->ifa_addr, sizeof in);
      v4.push_back({i->ifa_name, asio::ip::address_v4(ntohl(in.sin_addr.s_addr))});
    } else if (i->ifa_addr->sa_family == AF_INET6) {
      sockaddr_in6 in;
      std::memcpy(&in, i->ifa_addr, sizeof in);
      asio::ip::address_v6::bytes_type bytes;
      std::memcpy(bytes.data(), &in.sin6_addr, bytes.size());
      const asio::ip::address_v6 address(bytes);
      if (!address.is_link_local()) v6.push_back({i->ifa_name, address});
    }
  }
  ::freeifaddrs(list);
  v4.insert(v4.end(), v6.begin(), v6.end());
  return v4;
}

ListenPlace any_place() {
  ListenPlace place;
  place.bind = asio::ip::address_v4::any();
  for (const Interface& i : interfaces()) {
    if (i.address.is_loopback()) continue;
    if (i.address.is_v6()) place.bind = asio::ip::address_v6::any();  // serves both
    place.published.push_back(i.address);
  }
  if (place.published.empty()) place.published.push_back(asio::ip::address_v4::loopback());
  return place;
}

Address unmapped(const Address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

// An IPv6 address of one link, with its zone or without.
bool is_of_one_link(std::string_view address) {
  error_code failed;
  const auto parsed =
      asio::ip::make_address_v6(std::string(address.substr(0, address.find('%'))), failed);
  return !failed && parsed.is_link_local();
}
constexpr std::string_view kOneLink =
    "is an IPv6 address of one link, whose zone means something else on every host; name another "
    "address";

}  // namespace

std::string endpoint_text(const Endpoint& endpoint) {
  const Address address = unmapped(endpoint.address());
  return address.is_v6() ? fmt::format("[{}]:{}", address.to_string(), endpoint.port())
                         : fmt::format("{}:{}", address.to_string(), endpoint.port());
}

std::string interface_list() {
  std::string text;
  for (const Interface& i : interfaces())
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", i.name, i.address.to_string());
  return text;
}

bool is_own_address(const Address& address) {
  const std::vector<Interface> all = interfaces();
  return std::any_of(all.begin(), all.end(),
                     [&](const Interface& i) { return i.address == unmapped(address); });
}

Endpoint own_endpoint(const std::vector<Endpoint>& found) {
  const auto own = [](bool loopback) {
    return [loopback](const Endpoint& e) {
      return e.address().is_loopback() == loopback && (loopback || is_own_address(e.address()));
    };
  };
  for (const bool loopback : {false, true}) {
    const auto at = std::find_if(found.begin(), found.end(), own(loopback));
    if (at != found.end()) return *at;
  }
  return found.front();
}

ListenPlace place_towards(const std::vector<Endpoint>& others) {
  const auto at = [](const Address& address) { return ListenPlace{address, {address}, 0, 0}; };
  for (const Endpoint& to : others) {
    // Connecting a datagram socket looks up the route, and sends nothing.
    asio::io_context io;
    asio::ip::udp::socket socket(io);
    error_code failed;
    socket.connect({to.address(), to.port()}, failed);
    if (failed) continue;
    const Address own = socket.local_endpoint(failed).address();
    if (!failed) return at(unmapped(own));
  }
  return at(asio::ip::address_v4::loopback());
}

Result<ListenPlace> listen_place(const std::string& listen) {
  if (listen.empty()) {
    const Address loopback = asio::ip::address_v4::loopback();
    return ListenPlace{loopback, {loopback}, 0, 0};
  }
  if (listen == "any") return any_place();
  std::string names;
  for (const Interface& i : interfaces()) {
    if (i.name == listen) return ListenPlace{i.address, {i.address}, 0, 0};
    if (names.find(i.name) == std::string::npos) names += (names.empty() ? "" : ", ") + i.name;
  }
  if (is_of_one_link(listen)) return invalid_argument("SOTTO_LISTEN: {} {}", listen, kOneLink);
  error_code failed;
  const Address address = asio::ip::make_address(listen, failed);
  if (failed) {
    return invalid_argument(
        "SOTTO_LISTEN is \"{}\"; allowed are any, an address, or an interface of this machine ({})",
        listen, names);
  }
  return ListenPlace{address, {address}, 0, 0};
}

Status advertise(const std::string& text, ListenPlace& place) {
  if (text.empty()) return {};
  const auto address_of = [](std::string name) {
    if (name.size() > 2 && name.front() == '[' && name.back() == ']')
      name = name.substr(1, name.size() - 2);
    error_code failed;
    const Address address = asio::ip::make_address(name, failed);
    return failed ? std::optional<Address>() : address;
  };
  std::optional<Address> address = address_of(text);
  uint16_t port = 0;
  bool valid = address.has_value();
  if (const size_t colon = text.rfind(':'); !valid && colon != std::string::npos) {
    const std::string host = text.substr(0, colon);
    const char* end = text.data() + text.size();
    const auto [stop, failed] = std::from_chars(text.data() + colon + 1, end, port);
    if (!host.empty()) address = address_of(host);
    // The end of an IPv6 address without brackets is ambiguous.
    const bool clear = host.find(':') == std::string::npos || host.front() == '[';
    valid = (host.empty() || address) && clear && failed == std::errc() && stop == end && port != 0;
  }
  if (!valid || (address && address->is_unspecified())) {
    return invalid_argument(
        "SOTTO_ADVERTISE is \"{}\"; allowed are an address, address:port or :port, with IPv6 in "
        "brackets and a port from 1 to 65535",
        text);
  }
  if (address && address->is_v6() && address->to_v6().is_link_local())
    return invalid_argument("SOTTO_ADVERTISE: {} {}", text, kOneLink);
  if (address) place.published = {*address};
  place.published_port = port;
  return {};
}

Result<std::vector<Endpoint>> resolve_url(const std::string& url, Reactor& reactor) {
  const std::string_view prefix = "tcp://";
  const size_t colon = url.rfind(':');
  uint16_t port = 0;
  std::string host;
  bool valid = url.compare(0, prefix.size(), prefix) == 0 && colon != std::string::npos &&
               colon > prefix.size();
  if (valid) {
    host = url.substr(prefix.size(), colon - prefix.size());
    const char* end = url.data() + url.size();
    const auto [stop, failed] = std::from_chars(url.data() + colon + 1, end, port);
    valid = failed == std::errc() && stop == end && port != 0;
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    } else {
      valid = valid && host.find_first_of(":[]/") == std::string::npos;
    }
  }
  if (!valid) {
    return invalid_argument(
        "rendezvous address \"{}\"; it has to be tcp://host:port with a port from 1 to 65535", url);
  }
  if (is_of_one_link(host))
    return invalid_argument("rendezvous address {}: {} {}", url, host, kOneLink);
  asio::ip::tcp::resolver resolver(reactor.io());
  error_code failed;
  const auto found = resolver.resolve(host, std::to_string(port),
                                      asio::ip::tcp::resolver::numeric_service, failed);
  if (failed)
    return error(Code::kTransport, "rendezvous address {}: cannot resolve {}: {}", url, host,
                 failed.message());
  std::vector<Endpoint> endpoints;
  for (const auto& entry : found) {
    if (std::find(endpoints.begin(), endpoints.end(), entry.endpoint()) == endpoints.end()) {
      endpoints.push_back(entry.endpoint());
    }
  }
  std::stable_partition(endpoints.begin(), endpoints.end(),
                        [](const Endpoint& e) { return e.address().is_v4(); });
  return endpoints;
}

// ---- connecting

struct Connector::State {
  State(Reactor& r, std::vector<Endpoint> e, bool again, SocketFn c, FailedFn f)
      : reactor(r),
        endpoints(std::move(e)),
        retry(again),
        connected(std::move(c)),
        failed(std::move(f)),
        socket(r.io()) {}
  Reactor& reactor;
  std::vector<Endpoint> endpoints;
  bool retry;
  SocketFn connected;
  FailedFn failed;
  asio::ip::tcp::socket socket;
  Timers::Timer timer;  // ends the attempt, or the pause behind it
  size_t next = 0;
  uint64_t attempt = 0;  // tells an answer that belongs to an aborted attempt
  bool stopped = false;
  int64_t pause_ms = kFirstPauseMs;
  std::vector<std::string> answers;  // of each endpoint's last attempt

  std::string tried() const {
    std::string text;
    for (const std::string& answer : answers)
      text += (text.empty() || answer.empty() ? "" : ", ") + answer;
    return text;
  }

  static void start(const std::shared_ptr<State>& self) {
    const Endpoint to = self->endpoints[self->next];
    const uint64_t attempt = ++self->attempt;
    error_code ignored;
    self->socket.close(ignored);
    // Without descriptors async_connect says so.
    if (self->socket.open(to.protocol(), ignored); !ignored)
      ::fcntl(self->socket.native_handle(), F_SETFD, FD_CLOEXEC);
    self->socket.async_connect(
        to, [weak = std::weak_ptr<State>(self), to, attempt](const error_code& outcome) {
          const std::shared_ptr<State> state = weak.lock();
          if (!state || state->stopped || state->attempt != attempt) return;
          if (outcome) {
            refused(state, to, outcome.message());
          } else {
            done(state, to);
          }
        });
    if (!self->retry && self->next + 1 == self->endpoints.size()) {
      self->timer.reset();
      return;  // the last chance: as long as the system tries
    }
    self->timer = self->reactor.after(kAttemptMs, [weak = std::weak_ptr<State>(self), to] {
      if (const std::shared_ptr<State> state = weak.lock()) refused(state, to, "no answer");
    });
  }

  static void done(const std::shared_ptr<State>& self, const Endpoint& to) {
    self->stopped = true;
    self->timer.reset();
    error_code ignored;
    const int fd = self->socket.release(ignored);
    if (!ignored) self->connected(fd, endpoint_text(to));
  }

  static void refused(const std::shared_ptr<State>& self, const Endpoint& to,
                      const std::string& why) {
    self->answers.resize(self->endpoints.size());
    self->answers[self->next] = fmt::format("{}: {}", endpoint_text(to), why);
    if (++self->next < self->endpoints.size()) {
      start(self);
      return;
    }
    self->next = 0;
    if (!self->retry) {
      self->stopped = true;
      self->failed(error(Code::kTransport, "cannot connect to {}", self->tried()));
      return;
    }
    ++self->attempt;
    self->timer = self->reactor.after(self->pause_ms, [weak = std::weak_ptr<State>(self)] {
      if (const std::shared_ptr<State> state = weak.lock()) start(state);
    });
    self->pause_ms = std::min(self->pause_ms * 2, kLongestPauseMs);
  }
};

Connector::Connector(Reactor& reactor, std::vector<Endpoint> endpoints, bool retry,
                     SocketFn connected, FailedFn failed)
    : state_(std::make_shared<State>(reactor, std::move(endpoints), retry, std::move(connected),
                                     std::move(failed))) {
  State::start(state_);
}

Connector::~Connector() { state_->stopped = true; }

std::string Connector::tried() const { return state_->tried(); }

size_t Connector::position() const { return state_->next; }

}  // namespace sotto::tcp
