// The endpoints of one rank to its peers: those that are made in the set-up, and those that are
// made when they are first used (LinkPeers::lazy).
//
// Of these the lower rank connects when it sends or expects a message. The higher one waits: for
// each of its messages there is one of the lower rank. Where it has waited for some ticks it asks
// (kConnectChannel): operations may differ, and then the messages that have to show it need a way.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/ucx/endpoint.h"

namespace sotto::ucx {

class Mesh final : private ServiceListener {
 public:
  // Greetings are taken from now on. control: outlives the mesh.
  Mesh(std::shared_ptr<Worker> worker, ControlPlane& control, const LinkPeers& peers);
  ~Mesh() override;

  // addresses: of the workers, by rank. Connects all that are not lazy. TIMEOUT with the ranks that
  // are missing, PEER_LOST, TRANSPORT; the cause of the group's failure, if another rank tells one
  // meanwhile.
  Status connect(const std::vector<std::string>& addresses, Driver& driver, Deadline deadline);
  // For the carriers of a peer, which own it from now on.
  std::shared_ptr<Endpoint> take(int32_t peer) { return std::move(pairs_.at(peer).taken); }
  // Behind the set-up: other ranks may ask for connections.
  void listen();
  // Every FramedTransport::kTickMs.
  void tick();

 private:
  struct Pair {
    std::shared_ptr<Endpoint> taken;  // until take
    std::weak_ptr<Endpoint> endpoint;
    bool lazy = false;
    int waited = 0;  // ticks, for a greeting
  };

  // A higher rank waits for this one.
  void on_service(int32_t from, std::string_view bytes) noexcept override;
  Status too_late() const;

  ControlPlane& control_;
  std::map<int32_t, Pair> pairs_;
  bool listens_ = false;
};

}  // namespace sotto::ucx
