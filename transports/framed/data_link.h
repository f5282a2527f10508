// The way to one peer: its carriers, what is sent on them, what arrives, and how it ends. A message
// carries its match key, so any carrier may bring it.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transports/framed/carrier.h"
#include "transports/framed/flow_control.h"
#include "transports/framed/peer.h"
#include "transports/framed/receives.h"
#include "transports/framed/sender.h"

namespace sotto::framed {

// What a data link is made of.
struct PeerCarriers {
  std::vector<std::unique_ptr<FrameCarrier>> carriers;  // empty: this rank itself, or not linked
  std::string name;                                     // of the peer, for errors
};

class DataLink {
 public:
  // At least one carrier; all are started.
  DataLink(TransportCore& core, int32_t peer, PeerCarriers carriers);

  void send(Transfer& transfer);
  void recv(Transfer& transfer);
  void ready(const OpDescriptor& op, uint32_t last_round, uint64_t largest) {
    flow_control_.ready(op, last_round, largest);
  }
  // The operation is posted here: its flow is compared with the descriptor.
  void check_posted(const Flow& flow) { peer_.check_posted(flow); }
  void cancel(OpState& op);
  // The operation is complete. PROTOCOL if a message of it is arriving.
  void complete(const OpState& op);
  void send_bye() { sender_.send_bye(); }
  // Sends a failure frame before all that waits.
  void send_failure(std::string payload) { sender_.send_failure(std::move(payload)); }
  // All failure frames were handed to the network, or never will be.
  bool failure_sent() const { return sender_.failure_sent(); }
  // At least one carrier is open.
  bool connected() const { return sender_.any_open(); }
  // Reports a loss for which the control plane has named no other cause. Announces operations that
  // have waited long.
  void tick(int64_t now_ns);
  bool delivered() const { return sender_.delivered(); }
  void close() { sender_.close(); }
  // Of the first carrier.
  std::string address() const { return sender_.carrier(0).address(); }

 private:
  // One carrier, and what arrives on it.
  class Connection final : public FrameOwner {
   public:
    Connection(DataLink& link, size_t number) : link_(link), number_(number) {}
    // Reads over the rest of the message that is arriving.
    void drop_arrival();
    Arrival arrival;
    bool bye_received = false;  // the last frame of the peer

   private:
    Result<uint8_t*> on_header(const wire::FrameHeader& header) override;
    Status on_frame(const wire::FrameHeader& header) override;
    bool next_frame(OutFrame& out) override { return link_.sender_.next(number_, out); }
    void on_sent(const OutFrame& out) override;
    void on_broken(Status why, bool damaged) override;

    DataLink& link_;
    const size_t number_;
    std::string failure_;  // payload of a failure frame
  };

  void use();
  Status on_service(const wire::FrameHeader& header);
  void lost(const Connection& connection, Status why, bool damaged);
  void fail_if_needed();
  Status connection_status(Code code, std::string_view what, const Status& why) const;

  Peer peer_;
  std::vector<std::unique_ptr<Connection>> connections_;  // by number of the carrier
  Sender sender_;
  FlowControl flow_control_{peer_, sender_};
  Receives receives_{peer_, flow_control_};
  PeerCounters& service_counters_;
  bool used_ = false;           // there was a message: carriers know that they are needed
  std::optional<Status> lost_;  // PEER_LOST, held back for a moment
  int64_t lost_ns_ = 0;
};

}  // namespace sotto::framed
