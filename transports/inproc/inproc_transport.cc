#include "transports/inproc/inproc_transport.h"

#include <cstring>

#include "core/base/text.h"

namespace sotto::inproc {
namespace {

// Bytes copied in one poll, so that kernels and other transports get their turn: some 200 us.
constexpr uint64_t kCopyBudget = uint64_t{1} << 20;

Status size_error(const Transfer& t, int32_t self, uint64_t sent, uint64_t expected) {
  const int32_t source = t.is_send ? self : t.peer;
  const int32_t destination = t.is_send ? t.peer : self;
  return error(Code::kProtocol,
               "operation {} of comm {:x}, round {}, segment {}: rank {} sends {}, rank {} "
               "expects {}",
               t.op->key.number, t.op->key.comm, t.round, t.segment, source, counted(sent, "byte"),
               destination, counted(expected, "byte"));
}

bool concerns(const Transfer& t, const OpKey* key) { return key == nullptr || t.op->key == *key; }

}  // namespace

InprocTransport::InprocTransport(std::shared_ptr<Hub> hub, std::shared_ptr<Mailbox> mailbox,
                                 int32_t rank, int32_t size, TransferSink& sink)
    : hub_(std::move(hub)),
      mailbox_(std::move(mailbox)),
      rank_(rank),
      size_(size),
      sink_(sink),
      inbox_(hub_->inbox(rank)),
      open_(static_cast<size_t>(size)),
      told_closed_(static_cast<size_t>(size)) {
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.mailbox = mailbox_;
  }
  mailbox_->add(this);
}

InprocTransport::~InprocTransport() {
  mailbox_->remove(this);
  close(Deadline());
  drop(nullptr);
}

const TransportCaps& InprocTransport::caps() const {
  static const TransportCaps caps{.name = "inproc"};
  return caps;
}

Status InprocTransport::post_op(const OpDescriptor& op) {
  Status wrong;
  int32_t peer = -1;
  {
    std::lock_guard lock(inbox_.mutex);
    OpEntry& entry = inbox_.ops.get(op.key);
    if (entry.posted) {
      return error(Code::kInternal, "{} of comm {:x} is posted twice", name_of(op.key),
                   op.key.comm);
    }
    if (entry.heard_from >= 0 && !(entry.heard == op.signature)) {
      peer = entry.heard_from;
      wrong = Status(Code::kProtocol,
                     describe_mismatch(op.key, rank_, op.signature, peer, entry.heard));
    }
    entry.posted = true;
    entry.signature = op.signature;
    entry.heard_from = -1;
  }
  if (!wrong.ok()) mismatch(peer, wrong);
  return ok_status();
}

// No sender waits for READY here. It shows the peer a mismatch early.
void InprocTransport::ready(int32_t peer, const OpDescriptor& op, uint32_t, uint64_t) {
  {
    std::lock_guard lock(inbox_.mutex);
    // A peer that has sent all its messages may have completed the operation. It would then keep
    // the entry without end.
    const OpEntry* entry = inbox_.ops.find(op.key);
    if (entry == nullptr || entry->open_recvs[static_cast<size_t>(peer)] == 0) return;
  }
  Status wrong;
  {
    Inbox& theirs = hub_->inbox(peer);
    std::lock_guard lock(theirs.mutex);
    wrong = theirs.check_signature(op, rank_);
  }
  if (!wrong.ok()) mismatch(peer, wrong);
}

void InprocTransport::complete(const OpDescriptor& op) {
  std::lock_guard lock(inbox_.mutex);
  OpEntry* entry = inbox_.ops.find(op.key);
  if (entry == nullptr) return;
  entry->posted = false;
  inbox_.ops.drop_if_idle(*entry);
}

void InprocTransport::cancel(const OpDescriptor& op) {
  drop(&op.key);
  complete(op);
}

bool InprocTransport::accept(Transfer& t) {
  if (t.peer < 0 || t.peer >= size_) {
    sink_.on_transfer(t, error(Code::kInternal, "message to or from rank {} of {}", t.peer, size_));
    return false;
  }
  ++open_[static_cast<size_t>(t.peer)];
  return true;
}

void InprocTransport::send(Transfer& t) {
  if (!accept(t)) return;
  t.scratch[0] = static_cast<uint64_t>(rank_);
  Inbox& theirs = hub_->inbox(t.peer);
  Status wrong;
  bool gone = false;
  bool paired = false;
  {
    std::lock_guard lock(theirs.mutex);
    gone = theirs.closed_as != 0;
    wrong = theirs.check_signature(*t.op, rank_);
    if (Transfer* recv = theirs.waiting.match(t, rank_)) {
      recv->scratch[0] = reinterpret_cast<uint64_t>(&t);
      theirs.ready.push(recv);
      paired = true;
    } else {
      theirs.waiting.insert(&t, rank_);
      ++theirs.ops.get(t.op->key).waiting_sends;
    }
  }
  if (paired) theirs.mailbox->wake();
  if (!wrong.ok()) mismatch(t.peer, wrong);
  if (gone) {
    sink_.on_failure(t.peer, error(Code::kPeerLost,
                                   "rank {} has closed its connections; rank {} still sends to it",
                                   t.peer, rank_));
  }
}

void InprocTransport::recv(Transfer& t) {
  if (!accept(t)) return;
  Transfer* send = nullptr;
  {
    std::lock_guard lock(inbox_.mutex);
    OpEntry& entry = inbox_.ops.get(t.op->key);
    ++entry.open_recvs[static_cast<size_t>(t.peer)];
    send = inbox_.waiting.match(t, t.peer);
    if (send == nullptr) {
      inbox_.waiting.insert(&t, t.peer);
    } else {
      --entry.waiting_sends;
      inbox_.copying = send;
    }
  }
  if (send != nullptr) {
    copy(t, *send);
  } else {
    seen_closings_ = 0;  // the peer may be gone already: look again
    if (hub_->closings.load(std::memory_order_acquire) != 0) mailbox_->wake();
  }
}

// inbox_.copying is `send`, so its owner cannot take it back before this is done.
void InprocTransport::copy(Transfer& recv, Transfer& send) {
  const uint64_t sent = send.bytes;
  const bool fits = sent == recv.bytes;
  if (fits && sent != 0) std::memcpy(recv.data, send.data, sent);
  send.scratch[2] = fits ? 0 : 1;
  send.scratch[3] = recv.bytes;
  Inbox& theirs = hub_->inbox(recv.peer);
  {
    std::lock_guard lock(inbox_.mutex);
    if (OpEntry* entry = inbox_.ops.find(recv.op->key))
      --entry->open_recvs[static_cast<size_t>(recv.peer)];
    {
      std::lock_guard done_lock(theirs.done_mutex);
      theirs.done.push(&send);
    }
    inbox_.copying = nullptr;
  }
  inbox_.copy_done.notify_all();
  theirs.mailbox->wake();
  if (fits) count(recv);
  forget(recv);
  sink_.on_transfer(recv, fits ? ok_status() : size_error(recv, rank_, sent, recv.bytes));
}

// Reported to both ranks, each in its own poll.
void InprocTransport::mismatch(int32_t peer, const Status& status) {
  for (const auto& [inbox, other] :
       {std::pair{&inbox_, peer}, std::pair{&hub_->inbox(peer), rank_}}) {
    {
      std::lock_guard lock(inbox->mutex);
      inbox->report(other, status);
    }
    inbox->mailbox->wake();
  }
}

void InprocTransport::run() {
  // Read first: what a peer finished before it closed is in the lists below.
  const uint32_t closings = hub_->closings.load(std::memory_order_acquire);
  run_failure();
  run_done();
  run_ready();
  run_closings(closings);
}

void InprocTransport::run_failure() {
  std::optional<Status> failure;
  int32_t peer = -1;
  {
    std::lock_guard lock(inbox_.mutex);
    failure.swap(inbox_.failure);
    peer = inbox_.failed_peer;
  }
  if (failure) sink_.on_failure(peer, *failure);
}

void InprocTransport::run_done() {
  Transfer* done = nullptr;
  {
    std::lock_guard lock(inbox_.done_mutex);
    done = inbox_.done.take_all();
  }
  while (done != nullptr) {
    Transfer* t = done;
    done = t->next;
    const bool fits = t->scratch[2] == 0;
    if (fits) count(*t);
    forget(*t);
    sink_.on_transfer(*t, fits ? ok_status() : size_error(*t, rank_, t->bytes, t->scratch[3]));
  }
}

void InprocTransport::run_ready() {
  uint64_t copied = 0;
  while (copied < kCopyBudget) {
    Transfer* recv = nullptr;
    Transfer* send = nullptr;
    {
      std::lock_guard lock(inbox_.mutex);
      recv = inbox_.ready.pop();
      if (recv == nullptr) return;
      send = send_of(*recv);
      inbox_.copying = send;
    }
    copied += recv->bytes;
    copy(*recv, *send);
  }
  mailbox_->wake();  // the rest in the next poll
}

void InprocTransport::run_closings(uint32_t closings) {
  if (closings == seen_closings_ || closed_) return;
  seen_closings_ = closings;
  for (int32_t peer = 0; peer < size_; ++peer) {
    const auto p = static_cast<size_t>(peer);
    if (told_closed_[p] || open_[p] == 0 || peer == rank_) continue;
    {
      std::lock_guard lock(hub_->inbox(peer).mutex);
      const uint32_t closed_as = hub_->inbox(peer).closed_as;
      if (closed_as == 0 || closed_as > closings) continue;  // later ones: run again
    }
    {
      std::lock_guard lock(inbox_.mutex);
      if (!inbox_.ready.empty()) {  // perhaps complete, only not copied yet
        seen_closings_ = 0;
        continue;
      }
    }
    told_closed_[p] = true;
    sink_.on_failure(peer, error(Code::kPeerLost,
                                 "rank {} has closed its connections; rank {} still has {} with it",
                                 peer, rank_, counted(open_[p], "message")));
  }
}

void InprocTransport::count(const Transfer& t) {
  std::lock_guard lock(counters_mutex_);
  auto& of_comm = counters_[t.op->key.comm];
  if (of_comm.empty()) of_comm.resize(static_cast<size_t>(size_));
  of_comm[static_cast<size_t>(t.peer)].add(t);
}

void InprocTransport::drop(const OpKey* key) {
  drop_received(key);
  for (int32_t peer = 0; peer < size_; ++peer) {
    Inbox& theirs = hub_->inbox(peer);
    std::unique_lock lock(theirs.mutex);
    theirs.copy_done.wait(lock, [&] {
      const Transfer* t = theirs.copying;
      return t == nullptr || source_of(*t) != rank_ || !concerns(*t, key);
    });
    const auto is_mine = [&](const Transfer& t) {
      return t.is_send && source_of(t) == rank_ && concerns(t, key);
    };
    theirs.waiting.remove_if([&](Transfer& t) {
      if (!is_mine(t)) return false;
      forget(t);
      OpEntry& entry = theirs.ops.get(t.op->key);
      --entry.waiting_sends;
      theirs.ops.drop_if_idle(entry);
      return true;
    });
    theirs.ready.remove_if([&](Transfer& recv) {
      if (!is_mine(*send_of(recv))) return false;
      forget(*send_of(recv));
      theirs.waiting.insert(&recv, rank_);  // its owner takes it back
      return true;
    });
  }
  std::lock_guard lock(inbox_.done_mutex);
  inbox_.done.remove_if([&](const Transfer& t) {
    if (!concerns(t, key)) return false;
    forget(t);
    return true;
  });
}

void InprocTransport::drop_received(const OpKey* key) {
  std::lock_guard lock(inbox_.mutex);
  inbox_.waiting.remove_if([&](const Transfer& t) {
    if (t.is_send || !concerns(t, key)) return false;
    forget(t);
    return true;
  });
  inbox_.ready.remove_if([&](const Transfer& recv) {
    if (!concerns(recv, key)) return false;
    forget(recv);
    Transfer* send = send_of(recv);
    inbox_.waiting.insert(send, source_of(*send));  // its owner takes it back
    ++inbox_.ops.get(send->op->key).waiting_sends;
    return true;
  });
}

std::string InprocTransport::route(int32_t peer) const {
  return peer == rank_ ? "inproc self" : "inproc thread of the same process";
}

TransferCounters InprocTransport::counters(uint64_t comm, int32_t peer) const {
  std::lock_guard lock(counters_mutex_);
  const auto it = counters_.find(comm);
  if (it == counters_.end() || peer < 0 || peer >= size_) return {};
  return it->second[static_cast<size_t>(peer)];
}

void InprocTransport::leave(uint64_t comm) {
  std::lock_guard lock(counters_mutex_);
  counters_.erase(comm);
}

void InprocTransport::close(Deadline) {
  if (closed_) return;
  closed_ = true;
  {
    std::lock_guard lock(inbox_.mutex);
    inbox_.closed_as = hub_->closings.fetch_add(1, std::memory_order_acq_rel) + 1;
  }
  for (int32_t peer = 0; peer < size_; ++peer) {
    Inbox& theirs = hub_->inbox(peer);
    std::lock_guard lock(theirs.mutex);
    if (theirs.mailbox) theirs.mailbox->wake();  // none: that rank has not connected yet
  }
}

}  // namespace sotto::inproc
