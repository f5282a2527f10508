// Messages between ranks that are threads of one process: by key, with one copy and no other bytes.
//
// Without frames header_bytes is 0 and READY costs nothing. Metadata messages count as header
// bytes, as on every transport.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/iface/transport.h"
#include "transports/inproc/hub.h"
#include "transports/inproc/mailbox.h"

namespace sotto::inproc {

class InprocTransport final : public MessageTransport, private MailboxSource {
 public:
  InprocTransport(std::shared_ptr<Hub> hub, std::shared_ptr<Mailbox> mailbox, int32_t rank,
                  int32_t size, TransferSink& sink);
  // Takes back all transfers. For peers that wait for one this rank is lost.
  ~InprocTransport() override;

  const TransportCaps& caps() const override;
  uint64_t header_bytes(uint64_t) const override { return 0; }
  Status post_op(const OpDescriptor& op) override;
  void ready(int32_t peer, const OpDescriptor& op, uint32_t last_round, uint64_t largest) override;
  void complete(const OpDescriptor& op) override;
  void cancel(const OpDescriptor& op) override;
  void send(Transfer& transfer) override;
  void recv(Transfer& transfer) override;
  std::string route(int32_t peer) const override;
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void leave(uint64_t comm) override;
  void close(Deadline deadline) override;

 private:
  void run() override;
  void run_failure();
  void run_done();
  void run_ready();
  void run_closings(uint32_t seen);
  bool accept(Transfer& transfer);
  void copy(Transfer& recv, Transfer& send);
  void mismatch(int32_t peer, const Status& status);
  void count(const Transfer& transfer);
  void drop(const OpKey* key);  // null: everything
  void drop_received(const OpKey* key);
  void drop_sent(const OpKey* key);
  void forget(const Transfer& transfer) { --open_[static_cast<size_t>(transfer.peer)]; }

  const std::shared_ptr<Hub> hub_;
  const std::shared_ptr<Mailbox> mailbox_;
  const int32_t rank_;
  const int32_t size_;
  TransferSink& sink_;
  Inbox& inbox_;
  std::vector<uint64_t> open_;  // per peer: transfers handed over and not completed; driving thread
  std::vector<bool> told_closed_;  // per peer: its end was reported
  uint32_t seen_closings_ = 0;
  bool closed_ = false;

  mutable std::mutex counters_mutex_;
  std::unordered_map<uint64_t, std::vector<TransferCounters>>
      counters_;  // by comm epoch, then peer
};

}  // namespace sotto::inproc
