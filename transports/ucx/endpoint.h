// A UCX endpoint: the way to the worker of one peer. Several carriers share it. UCX makes it when
// it is first used.
//
// Of a pair of ranks the lower one connects and greets, and the higher one connects when it has
// been greeted, and greets back: where both connect at once, UCX 1.13 may take one endpoint for
// two.
//
// Threads: the driving thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "transports/ucx/worker.h"

namespace sotto::ucx {

class MessageCarrier;

class Endpoint final : private Receiver, private LossListener {
 public:
  // Greetings arrive from now on.
  Endpoint(std::shared_ptr<Worker> worker, int32_t rank, int32_t peer);
  // What the peer has not answered may be lost.
  ~Endpoint() override;
  Endpoint(const Endpoint&) = delete;

  const std::shared_ptr<Worker>& worker() const { return worker_; }
  // Of the peer's worker, before the first use. A greeting that has come is answered.
  void set_address(std::string address) { address_ = std::move(address); }
  // Something is to be sent, or expected.
  void use();
  // Messages can be sent, perhaps later.
  bool usable() const { return used_ && !closed_ && lost_.ok(); }
  // UCX takes messages.
  bool made() const { return endpoint_ != nullptr && lost_.ok(); }
  // The peer's end is there too.
  bool connected() const { return made() && greeted_; }
  // It is used, and the peer has yet to connect.
  bool waits_for_greeting() const { return usable() && !begins() && !greeted_; }
  // Why nothing can be sent: TRANSPORT: UCX has no way to the peer; PEER_LOST: it has lost it.
  const Status& lost() const { return lost_; }
  // PEER_LOST, with the name of the peer.
  Status lost_text(ucs_status_t why) const;

  // Sends one message, once made. head and data stay where they are until the request has ended
  // (Worker::look_at). Null: it has.
  void* send(const Head& head, const void* data, uint64_t bytes);
  // A payload of this size passes a socket of UCX's in one piece. It is sent so: a rendezvous would
  // cost messages, and saves no copy there. Its receive is posted, or it has credit.
  bool in_one_piece(uint64_t bytes);
  // Over a socket one carrier at a time sends such payloads, until its turn ends: more of them
  // would wait in UCX, and small messages behind them.
  bool turn_of(const MessageCarrier* carrier);
  bool turn_is_free() const { return turn_ == nullptr; }
  void end_turn(const MessageCarrier* carrier) {
    if (turn_ == carrier) turn_ = nullptr;
  }
  // Ends all transfers, whose requests then have to be settled. Nothing can be sent any more.
  void drop();

  // UCX's transports and devices: "tcp/eth0"; "?" where it does not tell.
  std::string lanes() const;

 private:
  bool begins() const { return rank_ < peer_; }
  bool over_socket();
  void make();

  bool take(Arrived arrived) override;
  bool due() const override { return news_ && !address_.empty(); }
  bool serve() override;
  void lost(ucs_status_t why) override;

  const std::shared_ptr<Worker> worker_;
  const int32_t rank_, peer_;
  const Head greeting_;
  std::string address_;
  ucp_ep_h endpoint_ = nullptr;  // null: not made, or closed
  void* request_ = nullptr;      // of the greeting
  bool used_ = false, greeted_ = false, closed_ = false;
  bool news_ = false;                     // a greeting has come that was not looked at
  std::optional<bool> over_socket_;       // one of UCX's sockets is the only way
  const MessageCarrier* turn_ = nullptr;  // whose it is; null: anyone's
  Status lost_;
};

}  // namespace sotto::ucx
