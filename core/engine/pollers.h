// The backends of an engine, and how it waits for all of their pollers at once.
//
// One poller is waited in: the blocking one, which serves sockets. The others end that wait: they
// forward what wakes them, or they name a descriptor that the blocking poller watches. What can do
// neither is polled at short intervals. Driver, but for wake.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"

namespace sotto {

class Pollers {
 public:
  Pollers() = default;
  ~Pollers();
  Pollers(const Pollers&) = delete;
  Pollers& operator=(const Pollers&) = delete;

  // The backend lives as long as the engine. The poller of the one added last with `blocking` is
  // waited in; before there is one, the first of all. True: it is waited in now.
  bool add(std::unique_ptr<Backend> backend, bool blocking);
  // Serves each once, without waiting. True if anything ran.
  bool serve();
  // Waits at most so long for something to do. Without pollers it returns at once.
  void wait(int64_t wait_us);
  // Ends a wait, or the next one. Threads: any.
  void wake();

 private:
  struct Served {
    std::unique_ptr<Backend> backend;
    bool tied = false;  // it ends a wait of the blocking poller
    Poller& poller() const { return backend->poller(); }
  };
  // A wait in `blocking` ends for the other one from now on; null: no wait does.
  void tie(Served& other, Poller* blocking);

  std::vector<Served> backends_;
  std::atomic<Poller*> blocking_{nullptr};
};

}  // namespace sotto
