// The endpoints of one rank to its peers, and how they come to be.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "core/iface/rendezvous.h"
#include "transports/ucx/endpoint.h"

namespace sotto::ucx {

// Of a pair of ranks, over one endpoint. The first is for small messages, the others for as many
// long ones as may be under way.
inline constexpr uint64_t kCarriers = 4;

// The number of a carrier for a rank, on the worker of another.
constexpr uint64_t number_for(int32_t rank, uint64_t carrier) {
  return static_cast<uint64_t>(rank) * kCarriers + carrier;
}

// Of a pair the lower rank connects and greets, and the higher one answers: where both connect at
// once, UCX 1.13 may take one endpoint for two.
class Mesh {
 public:
  Mesh(std::shared_ptr<Worker> worker, int32_t rank) : worker_(std::move(worker)), rank_(rank) {}

  // address: of the peer's worker.
  void add(int32_t peer, std::string address) { pairs_[peer].address = std::move(address); }
  // Connects them all. TIMEOUT with the ranks that are missing, PEER_LOST, TRANSPORT; the cause of
  // the group's failure, if another rank tells one meanwhile.
  Status connect(const ControlPlane& control, Driver& driver, Deadline deadline);
  const std::shared_ptr<Endpoint>& with(int32_t peer) const { return pairs_.at(peer).endpoint; }

 private:
  struct Pair {
    std::string address;
    std::shared_ptr<Endpoint> endpoint;
    Head greeting;
    void* request = nullptr;
    bool connected = false;
  };

  Status advance(int32_t peer, Pair& pair);
  Status make_endpoint(int32_t peer, Pair& pair);
  void end_greeting(Pair& pair);
  Status too_late() const;

  const std::shared_ptr<Worker> worker_;
  const int32_t rank_;
  std::map<int32_t, Pair> pairs_;
};

}  // namespace sotto::ucx
