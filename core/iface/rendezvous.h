// How ranks find each other, and the control plane that every root comm keeps beside its data
// connections: set-up exchange, first cause of failure, heartbeats.
//
// Threads: everything is called by the thread that drives the engine unless said otherwise.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/iface/transport.h"

namespace sotto {

using UniqueId = std::array<uint8_t, 128>;

// Lets blocking set-up code make progress on everything else meanwhile. Valid only on the thread
// that was given it.
class Driver {
 public:
  virtual ~Driver() = default;
  // Drives the whole context until done() is true (true) or the deadline has passed (false).
  virtual bool run_until(const std::function<bool()>& done, Deadline deadline) = 0;
  virtual const Clock& clock() const = 0;
};

struct FailureCause {
  Code code = Code::kOk;
  int32_t rank = -1;      // the accused: who failed or aborted; -1: not known
  std::string text;       // names rank, operation and cause
  int32_t reporter = -1;  // who saw it; -1: not known
  // TIMEOUT, while it is a proposal: whom the reporter waits for. Part of the text, unless another
  // rank turns out to be the cause.
  std::string waits = {};
  std::string whole_text() const { return waits.empty() ? text : text + "; " + waits; }
};

class ControlListener {
 public:
  virtual ~ControlListener() = default;
  // The root comm has failed; called once, on the driving thread.
  virtual void on_control_failure(const FailureCause& cause) noexcept = 0;
};

// One rank's end of the control plane.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;
  // A number that is the same on all ranks and differs between root comms.
  virtual uint64_t token() const = 0;

  // Gathers one blob (at most 1 MiB) of every rank, in rank order. Collective, called in the same
  // order everywhere; `what` names it in errors. TIMEOUT names the ranks that are missing.
  virtual Result<std::vector<std::string>> all_gather(std::string_view what, std::string_view mine,
                                                      Driver& driver, Deadline deadline) = 0;

  // Proposes `cause` as the comm's first cause on every rank, unless there is one already. The
  // cause that counts may be another one, and may become known later: failure() and the listener.
  virtual void fail(const FailureCause& cause) = 0;
  virtual const std::optional<FailureCause>& failure() const = 0;
  // The listener must outlive the control plane or be taken away (nullptr).
  virtual void set_listener(ControlListener* listener) = 0;

  // Milliseconds since anything was heard from a rank; 0 where that is not measured.
  virtual int64_t silent_ms(int32_t rank) const = 0;
  // A rank of which nothing is heard for so long fails the group, once established() was called; 0:
  // none does. The same on all ranks. Transports inside a process have no silent ranks.
  virtual void set_silence_limit(int64_t limit_ms) { (void)limit_ms; }
  // Set-up is over. Until then the first cause that is proposed counts, since a rank whose set-up
  // fails does not stay; from now on the control plane may ask the ranks for signs of life first.
  virtual void established() {}
  // Orderly end: the others do not take the closing connection for a failure.
  virtual void leave(Deadline deadline) = 0;
};

// All-gather that the caller supplies: writes `bytes` bytes of every rank in rank order to `out`.
using ExchangeFn = std::function<Status(const void* in, uint64_t bytes, void* out)>;

struct JoinRequest {
  int32_t rank = 0;
  int32_t size = 1;
  std::optional<UniqueId> id;  // made by make_unique_id of one of the ranks
  std::string address;         // tcp://host:port of rank 0, when there is no id
  ExchangeFn exchange;         // used instead of both if set
  Deadline deadline;
};

// One kind of transport in one context: its poller, its rendezvous and its connections.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  virtual Poller& poller() = 0;

  // Makes an id and starts listening for those who will use it.
  virtual Result<UniqueId> make_unique_id() = 0;
  // True if this backend can join with the id (made by its kind; inproc: in this process).
  virtual bool knows(const UniqueId& id) const = 0;
  // Meets the other ranks. Errors name who is missing, who came twice, which sizes differ.
  virtual Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request,
                                                     Driver& driver) = 0;
  // The next connect uses this rank's communicator of the transport's own library, which the caller
  // has made and lends (nccl: an ncclComm_t). UNSUPPORTED where there is no such thing.
  virtual Status adopt(void* native_comm) {
    (void)native_comm;
    return unsupported("transport \"{}\" has no communicators that could be lent to it", name());
  }
  // Connects every rank with every other. Collective over the control plane. The sink outlives the
  // transport.
  virtual Result<std::unique_ptr<Transport>> connect(ControlPlane& control, TransferSink& sink,
                                                     Driver& driver, Deadline deadline) = 0;
};

}  // namespace sotto
