// One connection to a rank that listens at several addresses: finds which of them it is.
//
// The addresses are tried one after the other, and the one counts at which the rank greets back:
// the bridges of container engines have the same address on every host, so another process may have
// it here. A connection whose hello is not answered in kAttemptMs stays open while the next address
// is tried; the others close when one is answered.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transports/tcp/handshake.h"
#include "transports/tcp/net.h"

namespace sotto::tcp {

class Approach final : public HandshakeOwner {
 public:
  struct Events {
    // Whether it is the peer that answers; the address, for the text.
    std::function<Status(const wire::Hello& hello, const std::string& from)> check;
    // A system has answered, for the first time.
    std::function<void()> adopted;
    // The peer has: the end, unless the connection breaks.
    std::function<void(std::unique_ptr<Handshake> handshake)> greeted;
    // No address is the peer's, or the connection has broken.
    std::function<void(const Status& why)> failed;
  };
  // number: of the connection, as of a Handshake. endpoints: at least one.
  Approach(Reactor& reactor, const wire::Hello& own, int32_t peer, uint32_t number,
           std::vector<Endpoint> endpoints, Events events);
  Approach(const Approach&) = delete;
  Approach& operator=(const Approach&) = delete;

  int32_t peer() const { return peer_; }
  // The addresses and what came of each so far; empty when it has ended.
  std::string progress() const;

 private:
  void try_next();
  void adopt(int fd, std::string name);
  void settle(const Status& why);
  void note(const std::string& answers);
  bool waits() const;
  Status on_answer(Handshake& handshake, const wire::Hello& hello) override;
  void on_greeted(Handshake& /*handshake*/) override {}
  void on_handshake_broken(Handshake& handshake, const Status& why) override;

  Reactor& reactor_;
  const wire::Hello own_;
  const int32_t peer_;
  const uint32_t number_;
  const std::vector<Endpoint> endpoints_;
  const Events events_;
  size_t begun_ = 0;     // of the endpoints, those before the connector's
  bool done_ = false;    // greeted, or failed
  bool seeks_ = false;   // the connector is at work
  std::string answers_;  // of the endpoints that are not the peer's
  std::unique_ptr<Connector> connector_;
  std::vector<std::unique_ptr<Handshake>> greetings_;  // open: not answered yet
  Timers::Timer timer_;                                // to the next endpoint
};

}  // namespace sotto::tcp
