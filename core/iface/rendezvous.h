// The rendezvous of ranks, and the control plane of a root comm: set-up exchanges, the first cause
// of failure, heartbeats. The control plane has connections of its own beside the data.
//
// Threads: the thread that drives the engine, unless said otherwise.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/transports.h"
#include "core/iface/service.h"
#include "core/iface/transport.h"

namespace sotto {

using UniqueId = std::array<uint8_t, 128>;

// Drives the context while set-up code blocks. Valid only on the thread that received it.
class Driver {
 public:
  virtual ~Driver() = default;
  // Drives the whole context until done() is true. False: the deadline has passed.
  virtual bool run_until(const std::function<bool()>& done, Deadline deadline) = 0;
  virtual const Clock& clock() const = 0;
};

struct FailureCause {
  Code code = Code::kOk;
  int32_t rank = -1;      // the accused: the rank that failed or aborted; -1: not known
  std::string text;       // rank, operation and cause
  int32_t reporter = -1;  // the rank that saw it; -1: not known
  // Of a TIMEOUT that is proposed: the ranks that the reporter waits for. The decision adds it to
  // the text, unless another rank turns out to be the cause.
  std::string waits = {};
  std::string whole_text() const { return waits.empty() ? text : text + "; " + waits; }
  Status status() const { return Status(code, text); }
};

class ControlListener {
 public:
  virtual ~ControlListener() = default;
  // The root comm has failed. Called once, on the driving thread.
  virtual void on_control_failure(const FailureCause& cause) noexcept = 0;
};

// One rank's end of the control plane.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;
  // Equal on all ranks, different between root comms.
  virtual uint64_t token() const = 0;

  // Gathers one blob (at most 1 MiB) of every rank, in rank order. Collective: all ranks make their
  // calls in the same order. `what` names the call in errors. TIMEOUT names the missing ranks.
  virtual Result<std::vector<std::string>> all_gather(std::string_view what, std::string_view mine,
                                                      Driver& driver, Deadline deadline) = 0;

  // Proposes `cause` as the comm's first cause on every rank, unless there is one already. The
  // decision may be another cause and may come later: failure() and the listener have it.
  virtual void fail(const FailureCause& cause) = 0;
  virtual const std::optional<FailureCause>& failure() const = 0;
  // The listener outlives the control plane, or is replaced by nullptr before its own end.
  virtual void set_listener(ControlListener* listener) = 0;

  // Sends a message of at most kMaxServiceBytes to the listener of the channel on another rank.
  // Messages of a pair of ranks and a channel arrive in order, while the group is healthy and both
  // stay. Only once established() was called: then all ranks are known to have this version of the
  // set-up. Errors are this rank's alone: those of ServiceBox::admit (BUSY: the rank has yet to
  // take earlier ones), the group's failure, INVALID_STATE outside of established() and leave().
  // Does not block.
  virtual Status send_service(int32_t rank, uint32_t channel, std::string_view bytes) {
    (void)channel, (void)bytes;
    return unsupported("rank {} cannot be sent service messages by this control plane", rank);
  }
  // The listener outlives the control plane, or is replaced by nullptr before its own end. What
  // came before it is delivered to it.
  virtual void set_service_listener(uint32_t channel, ServiceListener* listener) {
    (void)channel, (void)listener;
  }

  // Time since the last sign of life of a rank, in milliseconds; 0 where that is not measured.
  virtual int64_t silent_ms(int32_t rank) const = 0;
  // Longest time without a sign of life: after it a rank fails the group, once established() was
  // called. 0: no limit. Equal on all ranks. Transports inside a process measure nothing.
  virtual void set_silence_limit(int64_t limit_ms) { (void)limit_ms; }
  // Set-up is over: from now on the control plane may ask ranks for signs of life before it
  // decides. Before that the first proposal counts, since a rank whose set-up fails does not stay.
  virtual void established() {}
  // Orderly end: to the other ranks the closing connection is no failure.
  virtual void leave(Deadline deadline) = 0;
};

// Its ranks, ascending.
std::vector<int32_t> all_ranks(const ControlPlane& control);

// The caller's all-gather: writes `bytes` bytes of every rank, in rank order, to `out`.
using ExchangeFn = std::function<Status(const void* in, uint64_t bytes, void* out)>;

struct JoinRequest {
  int32_t rank = 0;
  int32_t size = 1;
  std::optional<UniqueId> id;  // from make_unique_id of one rank
  std::string address;         // tcp://host:port of rank 0; used without an id
  ExchangeFn exchange;         // if set, used instead of both
  // How far apart the launcher says ranks are. Reach::kNetwork: no rank listens on loopback alone,
  // whatever an address means on its machine.
  Reach reach = Reach::kHost;
  Deadline deadline;
};

// The ranks that a transport connects one with, itself perhaps among them.
struct LinkPeers {
  std::span<const int32_t> all;  // ascending
  // Of these, the ones that operations may never need. A transport whose connections cost
  // descriptors makes theirs when they are first used. For both ranks of a pair, or for none.
  std::span<const int32_t> lazy = {};
};

// One transport in one context: its poller, its rendezvous and its connections.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual Poller& poller() = 0;

  // A transport whose comms have the rendezvous of another one leaves these three as they are: both
  // requests are UNSUPPORTED.
  //
  // Makes an id and listens for the ranks that join with it, which are so far apart at most.
  virtual Result<UniqueId> make_unique_id(Reach reach);
  // True if this backend can join with the id: one of its own kind; inproc: of this process.
  virtual bool knows(const UniqueId& id) const;
  // The rendezvous with the other ranks. Errors name ranks that are missing or came twice, and
  // sizes that differ.
  virtual Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver);
  // Lends the next connect this rank's communicator of the transport's own library (nccl: an
  // ncclComm_t). UNSUPPORTED: the transport has no such library.
  virtual Status adopt(void* native_comm) {
    (void)native_comm;
    return unsupported("transport \"{}\" has no communicators that could be lent to it", name());
  }
  // Where this rank is, in a number that is equal for ranks which the transport can connect and
  // never 0: inproc: the process. Transports for ranks anywhere have the same for all.
  virtual uint64_t place() const { return 1; }
  // Connects this rank with `peers`, for whom it is one of theirs. Collective over the control
  // plane, also for ranks that connect with none. The sink outlives the transport. UNSUPPORTED: the
  // transport takes all ranks or none.
  virtual Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                                     TransferSink& sink, Driver& driver,
                                                     Deadline deadline) = 0;
};

}  // namespace sotto
