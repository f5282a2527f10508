// One suite for every backend that matches messages by key. A transport instantiates it in a file
// of its own:
//
//   INSTANTIATE_TEST_SUITE_P(Inproc, TransportSuite,
//                            testing::Values(TransportCase{"inproc", [](const Clock& c) {...}}),
//                            case_name);
//
// All ranks are threads of the test, each with a backend of its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"
#include "core/iface/transport.h"
#include "tests/support/poll_driver.h"
#include "tests/support/ranks.h"
#include "tests/support/transfers.h"

namespace sotto::test {

struct TransportCase {
  std::string name;
  std::function<Result<std::unique_ptr<Backend>>(const Clock&)> make;
  bool joins_by_exchange = true;
  // Any process may connect, so a wrong one is refused alone, and the ranks wait on.
  bool refuses_alone = false;
};
// Else gtest prints the bytes of every case, whichever runs.
inline void PrintTo(const TransportCase& which, std::ostream* out) { *out << which.name; }
inline std::string case_name(const testing::TestParamInfo<TransportCase>& info) {
  return info.param.name;
}

class TransportSuite : public testing::TestWithParam<TransportCase> {};

class RecordingListener final : public ControlListener {
 public:
  void on_control_failure(const FailureCause& cause) noexcept override { causes.push_back(cause); }
  std::vector<FailureCause> causes;
};

// Everything one rank owns. Members end in the right order: transport, control, backend.
class RankKit {
 public:
  RankKit(const TransportCase& which, int32_t rank_number, int32_t ranks)
      : rank(rank_number),
        size(ranks),
        backend(check(which.make(Clock::monotonic()), "make backend")),
        driver(backend->poller()) {}
  ~RankKit() {
    if (control) control->set_listener(nullptr);
  }

  void join(const UniqueId& id, int64_t timeout_us = 45'000'000) {
    JoinRequest request;
    request.rank = rank;
    request.size = size;
    request.id = id;
    request.deadline = in(timeout_us);
    control = check(backend->join(request, driver), "join");
    control->set_listener(&listener);
  }
  void connect(std::span<const int32_t> lazy = {}) {
    transport = check(connected(45'000'000, lazy), "connect");
    messages = transport->as_message_transport();
    queue = transport->as_queue_transport();
  }
  Result<std::unique_ptr<Transport>> connected(int64_t timeout_us,
                                               std::span<const int32_t> lazy = {}) {
    return backend->connect(*control, {all_ranks(*control), lazy}, sink, driver, in(timeout_us));
  }
  void barrier() {
    check(control->all_gather("test barrier", "", driver, in(45'000'000)), "barrier");
  }
  // Leaves as a comm does that is destroyed: everything has been received.
  void finish() {
    barrier();
    transport->close(in(5'000'000));
    control->leave(in(5'000'000));
    require(sink.failures.empty(), sink.failures.empty() ? "" : sink.failures[0].status.text());
    require(listener.causes.empty(), listener.causes.empty() ? "" : listener.causes[0].text);
  }
  bool drive(const std::function<bool()>& done, int64_t timeout_us = 45'000'000) {
    return driver.run_until(done, in(timeout_us));
  }
  // Waits until the sink has heard of `count` transfers in all.
  void await_transfers(size_t count) {
    const bool came = drive([&] { return sink.done.size() >= count || !sink.failures.empty(); });
    require(sink.failures.empty(), sink.failures.empty() ? "" : sink.failures[0].status.text());
    require(came, fmt::format("only {} of {} transfers were completed", sink.done.size(), count));
    for (const auto& d : sink.done) check(d.status, "transfer");
  }
  void start(Transfer& t) { t.is_send ? messages->send(t) : messages->recv(t); }
  Deadline in(int64_t us) const { return Deadline::in_us(Clock::monotonic(), us); }

  const int32_t rank;
  const int32_t size;
  std::unique_ptr<Backend> backend;
  PollDriver driver;
  RecordingSink sink;
  RecordingListener listener;
  std::unique_ptr<ControlPlane> control;
  std::unique_ptr<Transport> transport;
  MessageTransport* messages = nullptr;  // transport, if it is of the kind
  QueueTransport* queue = nullptr;       // likewise
};

// Rank 0's unique id for everybody.
class IdBoard {
 public:
  explicit IdBoard(int size) : barrier_(size) {}
  UniqueId share(RankKit& kit) {
    if (kit.rank == 0) id_ = check(kit.backend->make_unique_id(Reach::kHost), "make_unique_id");
    barrier_.wait();
    return id_;
  }
  void wait() { barrier_.wait(); }

 private:
  RankBarrier barrier_;
  UniqueId id_{};
};

// Runs body on every rank of a joined and connected group. "" or the first failure.
[[nodiscard]] inline std::string run_group(const TransportCase& which, int size,
                                           const std::function<void(RankKit&)>& body) {
  IdBoard board(size);
  return run_ranks(size, [&](int rank) {
    RankKit kit(which, rank, size);
    kit.join(board.share(kit));
    kit.connect();
    body(kit);
    board.wait();  // no rank leaves while others still look at what happened
  });
}

// Bytes that name their message.
inline void fill_message(std::vector<uint8_t>& data, uint32_t source, uint32_t destination,
                         uint32_t round, uint32_t segment) {
  uint32_t state = source * 0x9e3779b9u ^ destination * 0x85ebca6bu ^ round * 0xc2b2ae35u ^
                   segment * 0x27d4eb2fu;
  for (uint8_t& byte : data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
}

struct TestMessage {
  uint64_t op;
  uint32_t source, destination, round, segment;
  uint64_t bytes;
};

// Runs the messages on all ranks: each rank posts its operations and starts its transfers in an
// order drawn from the seed, then checks what came.
inline void run_messages(RankKit& kit, const std::vector<TestMessage>& messages, uint64_t ops,
                         uint64_t seed, uint64_t comm = 7) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(kit.rank));
  std::deque<TestOp> my_ops;
  for (uint64_t i = 0; i < ops; ++i) my_ops.emplace_back(comm, i);
  std::deque<std::vector<uint8_t>> memory;
  std::vector<std::pair<const TestMessage*, Transfer*>> mine;
  for (const TestMessage& m : messages) {
    for (const bool is_send : {true, false}) {
      if (static_cast<uint32_t>(kit.rank) != (is_send ? m.source : m.destination)) continue;
      auto& data = memory.emplace_back(m.bytes);
      if (is_send) fill_message(data, m.source, m.destination, m.round, m.segment);
      const auto peer = static_cast<int32_t>(is_send ? m.destination : m.source);
      mine.emplace_back(&m,
                        &my_ops[m.op].add(is_send, peer, m.round, m.segment, data.data(), m.bytes));
    }
  }
  const size_t before = kit.sink.done.size();
  for (TestOp& op : my_ops) check(kit.transport->post_op(op.descriptor), "post_op");
  std::vector<Transfer*> order;
  for (auto& [m, t] : mine) order.push_back(t);
  std::shuffle(order.begin(), order.end(), random);
  for (Transfer* t : order) {
    kit.start(*t);
    if (random() % 8 == 0) kit.backend->poller().poll(0);
  }
  for (TestOp& op : my_ops) {
    for (int32_t peer = 0; peer < kit.size; ++peer) {
      uint32_t last = 0;
      uint64_t largest = 0;
      bool any = false;
      for (const Transfer& t : op.transfers) {
        if (t.is_send || t.peer != peer) continue;
        any = true;
        last = std::max(last, t.round);
        largest = std::max(largest, t.bytes);
      }
      if (any) kit.messages->ready(peer, op.descriptor, last, largest);
    }
  }
  kit.await_transfers(before + mine.size());
  for (TestOp& op : my_ops) kit.transport->complete(op.descriptor);
  for (const auto& [m, t] : mine) {
    if (t->is_send) continue;
    std::vector<uint8_t> expected(m->bytes);
    fill_message(expected, m->source, m->destination, m->round, m->segment);
    require(m->bytes == 0 || std::memcmp(expected.data(), t->data, m->bytes) == 0,
            fmt::format("message {} -> {}, round {}, segment {}: wrong bytes", m->source,
                        m->destination, m->round, m->segment));
  }
}

}  // namespace sotto::test
