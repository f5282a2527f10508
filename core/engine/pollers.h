// The backends of an engine, and how it waits for all of their pollers at once.
//
// A wait first polls for a moment, since a sleep and its end take longer than most messages. Then
// one poller is waited in: the blocking one, which serves sockets. The others end that wait: they
// forward what wakes them, or they name a descriptor that the blocking poller watches. What can do
// neither is polled at short intervals. Driver, but for wake.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"

namespace sotto {

class Pollers {
 public:
  // spin_us: microseconds that a wait polls before it sleeps.
  explicit Pollers(int64_t spin_us = 0) : spin_us_(spin_us) {}
  ~Pollers();
  Pollers(const Pollers&) = delete;
  Pollers& operator=(const Pollers&) = delete;

  // The backend lives as long as the engine. The poller of the one added last with `blocking` is
  // waited in; before there is one, the first of all. True: it is waited in now.
  bool add(std::unique_ptr<Backend> backend, bool blocking);
  // Serves each once, without waiting. True if anything ran or a wake has come.
  bool serve();
  // Serves what is due at the time of a pass. `idle`: the driver has nothing else to do; what
  // arrives by memory is looked at first then, since a look at sockets is a system call. True: as
  // serve.
  bool serve_due(int64_t now_ns, bool idle);
  // Waits at most so long for something to do. Without pollers it returns at once.
  void wait(int64_t wait_us);
  // Ends a wait, or the next one. Threads: any.
  void wake();

 private:
  struct Served {
    explicit Served(std::unique_ptr<Backend> of)
        : backend(std::move(of)), poller(&backend->poller()) {}
    std::unique_ptr<Backend> backend;
    Poller* poller;
    bool tied = false;  // it ends a wait of the blocking poller
  };
  // A wait in `blocking` ends for the other one from now on; null: no wait does.
  void tie(Served& other, Poller* blocking);
  // Polls for so long. True: there is something to do.
  bool spin(int64_t limit_us);
  // Looks into memory for something to do, and does it. False: there is nothing in memory; no
  // value: only serve can tell.
  std::optional<bool> look();

  const int64_t spin_us_;
  int64_t served_ns_ = 0;  // the pass that has served all
  std::vector<Served> backends_;
  std::atomic<Poller*> blocking_{nullptr};
};

}  // namespace sotto
