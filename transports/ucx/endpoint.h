// A UCX endpoint: the way to the worker of one peer. Several carriers share it.
//
// Threads: the driving thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "transports/ucx/worker.h"

namespace sotto::ucx {

class Endpoint final : private LossListener {
 public:
  // address: of the peer's worker. TRANSPORT: UCX has no way to it.
  static Result<std::shared_ptr<Endpoint>> make(std::shared_ptr<Worker> worker,
                                                std::string_view address);
  Endpoint(std::shared_ptr<Worker> worker, ucp_ep_h endpoint);  // for make
  // What the peer has not answered may be lost.
  ~Endpoint() override { drop(); }
  Endpoint(const Endpoint&) = delete;

  const std::shared_ptr<Worker>& worker() const { return worker_; }
  bool usable() const { return endpoint_ != nullptr && lost_ == UCS_OK; }
  // UCX has lost the peer: why; OK: it has not.
  ucs_status_t why_lost() const { return lost_; }
  // PEER_LOST, with the name of the peer.
  Status lost_text(const std::string& peer, ucs_status_t why) const;

  // Sends one message. head and data stay where they are until the request has ended
  // (Worker::look_at). Null: it has.
  void* send(const Head& head, const void* data, uint64_t bytes);
  // Ends all transfers, whose requests then have to be settled. Nothing can be sent any more.
  void drop();

  // UCX's transports and devices: "tcp/eth0"; "?" where it does not tell.
  std::string lanes() const;

 private:
  void lost(ucs_status_t why) override { lost_ = why; }

  const std::shared_ptr<Worker> worker_;
  ucp_ep_h endpoint_;  // null: closed
  ucs_status_t lost_ = UCS_OK;
};

}  // namespace sotto::ucx
