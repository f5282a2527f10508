// Stands between two TCP sockets of this machine and harms what passes: below every checksum.
//
// Put it before a rank by giving its peers port() instead of the rank's own port; redirected() does
// that for a unique id. Chunks are cut at random places and delayed, so that frames arrive in
// pieces.
//
// Threads: any. Each connection has two threads of its own, which end with the object.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/iface/rendezvous.h"

namespace sotto::test {

struct ProxyFault {
  enum class Kind : uint8_t {
    kFlip,     // one bit of byte `at`
    kSwallow,  // `count` bytes from `at` on are left out
    kClose,    // after `at` bytes both sides are closed
    kReset,    // the same, abruptly
    kStall,    // after `at` bytes nothing passes any more, the connection stays open
  };
  Kind kind = Kind::kFlip;
  bool to_target = true;  // direction: from the one who connects to the target, or back
  uint64_t at = 0;        // bytes of that direction of that connection, from 0
  uint64_t count = 1;
  int32_t connection = 0;  // in the order of connecting; -1: all
};

struct ProxyOptions {
  uint16_t target_port = 0;  // on 127.0.0.1
  uint64_t seed = 1;
  int64_t max_delay_us = 0;  // per chunk
  uint64_t max_chunk = 65536;
  std::vector<ProxyFault> faults = {};
};

class FaultyProxy {
 public:
  explicit FaultyProxy(const ProxyOptions& options);
  ~FaultyProxy();
  FaultyProxy(const FaultyProxy&) = delete;
  FaultyProxy& operator=(const FaultyProxy&) = delete;

  // A fault now, besides those of the options, on a connection in the order of connecting (-1:
  // all): kFlip harms the next bytes of the direction, kSwallow leaves out `count` of them; the
  // others take both directions.
  void strike(const ProxyFault& fault);

  uint16_t port() const { return port_; }
  uint64_t faults() const { return faults_; }              // that have happened
  uint64_t bytes_passed() const { return bytes_passed_; }  // both directions
  int32_t connections() const { return connections_; }

 private:
  struct Connection;
  void accept_main() noexcept;
  void pump_main(Connection& connection, int32_t index, bool to_target) noexcept;
  enum class Verdict : uint8_t { kPass, kClose, kReset, kStall };
  Verdict harm(std::vector<uint8_t>& chunk, uint64_t position, int32_t index, bool to_target,
               uint64_t* bit);
  void harm_now(std::vector<uint8_t>& chunk, int32_t index, bool to_target, uint64_t random);

  const ProxyOptions options_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> faults_{0};
  std::atomic<uint64_t> bytes_passed_{0};
  std::atomic<int32_t> connections_{0};
  std::mutex mutex_;                 // guards all_, strikes_
  std::vector<ProxyFault> strikes_;  // kFlip, kSwallow: until there are bytes
  std::vector<std::unique_ptr<Connection>> all_;
  std::thread acceptor_;
};

// The same id with another port, on the loopback address.
UniqueId redirected(const UniqueId& id, uint16_t port);

}  // namespace sotto::test
