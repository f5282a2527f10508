// Time-outs of operations on a clock that the test advances: when they come, whom they accuse, and
// that waiting looks at no other clock. The transport only notes what it is given; a poller that is
// to wait advances the clock instead.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "core/engine/engine.h"
#include "core/plan/builder.h"
#include "tests/support/fake_clock.h"
#include "tests/support/lowering.h"

namespace sotto::test {
namespace {

// The host's memory.
class HostDevice final : public Device {
 public:
  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> alloc(uint64_t bytes) override { return std::calloc(bytes + 1, 1); }
  void free(void* memory, uint64_t) override { std::free(memory); }
  Status launch(uint32_t, const KernelCall&, std::span<const DiscardedRange>) override {
    return ok_status();
  }
  Status copy(uint32_t, void*, const void*, uint64_t, const uint32_t*, uint32_t) override {
    return ok_status();
  }
  Result<EventId> record(uint32_t) override { return EventId{1}; }
  Status wait(uint32_t, EventId) override { return ok_status(); }
  Result<bool> query(EventId) override { return true; }
  void release(EventId) override {}
  Result<EventId> record_stream(void*) override { return EventId{1}; }
  Status stream_after_event(void*, EventId) override { return ok_status(); }
  Result<BlockId> block_stream(void*) override { return BlockId{1}; }
  void unblock(BlockId) override {}
  uint64_t busy_ns() const override { return 0; }

 private:
  DeviceCaps caps_;
};

class NotingTransport final : public MessageTransport {
 public:
  const TransportCaps& caps() const override { return caps_; }
  uint64_t header_bytes(uint64_t) const override { return 0; }
  Status post_op(const OpDescriptor&) override { return ok_status(); }
  void ready(int32_t, const OpDescriptor&, uint32_t, uint64_t) override {}
  void complete(const OpDescriptor&) override { ++completed; }
  void cancel(const OpDescriptor&) override { ++cancelled; }
  void send(Transfer& transfer) override { transfers.push_back(&transfer); }
  void recv(Transfer& transfer) override { transfers.push_back(&transfer); }
  std::string route(int32_t) const override { return "noting"; }
  TransferCounters counters(uint64_t, int32_t) const override { return {}; }
  void close(Deadline) override {}

  std::vector<Transfer*> transfers;
  int completed = 0, cancelled = 0;

 private:
  TransportCaps caps_;
};

// Decides at once for what this rank proposes.
class ObedientControl final : public ControlPlane {
 public:
  explicit ObedientControl(int32_t size) : size_(size) {}
  int32_t rank() const override { return 0; }
  int32_t size() const override { return size_; }
  uint64_t token() const override { return 1; }
  Result<std::vector<std::string>> all_gather(std::string_view, std::string_view, Driver&,
                                              Deadline) override {
    return invalid_state("there is nobody");
  }
  void fail(const FailureCause& cause) override {
    if (!failure_) failure_ = cause;
  }
  const std::optional<FailureCause>& failure() const override { return failure_; }
  void set_listener(ControlListener*) override {}
  int64_t silent_ms(int32_t rank) const override { return 10 * rank; }
  void leave(Deadline) override {}

 private:
  int32_t size_;
  std::optional<FailureCause> failure_;
};

// Waiting costs no time but the clock's.
class SkippingBackend final : public Backend, private Poller {
 public:
  explicit SkippingBackend(FakeClock& clock) : clock_(clock) {}
  const char* name() const override { return "skipping"; }
  Poller& poller() override { return *this; }
  Result<UniqueId> make_unique_id(Reach) override { return invalid_state("no ids"); }
  bool knows(const UniqueId&) const override { return false; }
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest&, Driver&) override {
    return invalid_state("nobody to join");
  }
  Result<std::unique_ptr<Transport>> connect(ControlPlane&, const LinkPeers&, TransferSink&,
                                             Driver&, Deadline) override {
    return invalid_state("nobody to connect to");
  }

 private:
  bool poll(int64_t wait_us) override {
    clock_.advance_us(wait_us);
    return false;
  }
  void wake() override {}

  FakeClock& clock_;
};

constexpr int64_t kLimitUs = 5'000'000;

// What else there is to an operation.
struct Extras {
  bool input = false;  // what is sent arrives later
  std::vector<OpRef> after = {};
};

class EngineDeadline : public testing::Test {
 protected:
  // Rank 0 of `size`: receives and sends that never end by themselves.
  void connect(int32_t size) {
    EngineOptions options;
    options.clock = &clock_;
    options.progress_thread = false;
    engine_ = std::make_shared<Engine>(options);
    channel_ = engine_->make_channel();
    auto transport = std::make_unique<NotingTransport>();
    transport_ = transport.get();
    engine_->drive([&](Driver&) {
      auto control = std::make_unique<ObedientControl>(size);
      const std::vector<int32_t> peers = all_ranks(*control);
      channel_->attach(std::move(control));
      channel_->attach(std::move(transport), peers);
    });
    size_ = size;
    for (int32_t r = 0; r < size; ++r) ranks_->push_back(r);
  }
  // `receives` messages from, and one to, each of the peers.
  OpRef start(std::vector<int32_t> peers, uint32_t receives, int64_t timeout_us = kLimitUs,
              Extras extras = Extras()) {
    PlanBuilder builder;
    const uint32_t in = builder.bound(4096), out = builder.bound(4096);
    if (extras.input) builder.await({&out, 1});
    for (const int32_t peer : peers) {
      for (uint32_t r = 0; r < receives; ++r)
        builder.recv(peer, {in, 16 * (static_cast<uint64_t>(peer) * 8 + r), 16}, r);
      builder.send(peer, {out, 0, 16}, 0);
    }
    const DeviceCaps device;
    OpRequest request;
    request.plan =
        PreparedPlan::make(
            lower_for(builder.take(), device, transport_->caps(), Matching::kByKey, size_).take(),
            std::make_shared<HostDevice>())
            .take();
    request.run = request.plan->acquire().take();
    request.run->bases[in] = in_;
    request.run->bases[out] = out_;
    finish_binding(*request.run);
    request.run->descriptors[0].key = {1, ++number_};
    request.run->descriptors[0].signature.kind = OpKind::kAllGather;
    request.channel = channel_;
    request.ranks = ranks_;
    request.totals = std::make_shared<OpTotals>();
    request.timeout_us = timeout_us;
    request.after_ops = std::move(extras.after);
    const OpRef op = engine_->start(std::move(request), false).take();
    engine_->poll(0);
    return op;
  }
  // Messages number `index` that the transport was given, in the order of the calls.
  void arrive(size_t index) {
    engine_->drive(
        [&](Driver&) { channel_->on_transfer(*transport_->transfers.at(index), ok_status()); });
    engine_->poll(0);
  }
  void pass(int64_t us) {
    clock_.advance_us(us);
    engine_->poll(0);
  }

  FakeClock clock_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Channel> channel_;
  NotingTransport* transport_ = nullptr;
  std::shared_ptr<std::vector<int32_t>> ranks_ = std::make_shared<std::vector<int32_t>>();
  int32_t size_ = 0;
  uint64_t number_ = 0;
  std::byte in_[4096] = {}, out_[4096] = {};
};

TEST_F(EngineDeadline, ComesAfterTheLimitAndNotBefore) {
  connect(2);
  const OpRef op = start({1}, 1);
  pass(kLimitUs - 10'000);
  EXPECT_FALSE(op->done());
  pass(10'000);
  ASSERT_TRUE(op->done());
  EXPECT_EQ(op->status().code(), Code::kTimeout);
  EXPECT_EQ(op->status().text(),
            "rank 0: " + name_of({1, 1}) + " " + describe(OpSignature{.kind = OpKind::kAllGather}) +
                " made no progress for 5.0 s (limit 5.0 s); waiting for rank 1 (1 message from "
                "it, 1 to it, last heard from 10 ms ago)");
  EXPECT_EQ(channel_->cause().rank, 1);
  EXPECT_EQ(channel_->cause().reporter, 0);
  EXPECT_EQ(transport_->cancelled, 1);
  EXPECT_EQ(transport_->completed, 0);
}

TEST_F(EngineDeadline, NeverWithoutALimit) {
  connect(2);
  const OpRef op = start({1}, 1, -1);
  pass(int64_t{3600} * 1'000'000);
  EXPECT_FALSE(op->done());
  arrive(0);
  arrive(1);
  EXPECT_TRUE(op->status().ok());
  EXPECT_EQ(transport_->completed, 1);
}

TEST_F(EngineDeadline, CountsFromTheLastProgress) {
  connect(2);
  const OpRef op = start({1}, 1);
  pass(kLimitUs - 10'000);
  arrive(0);
  pass(kLimitUs - 10'000);
  EXPECT_FALSE(op->done());
  pass(10'000);
  EXPECT_EQ(op->status().code(), Code::kTimeout);
}

TEST_F(EngineDeadline, ProgressOfAnEarlierOperationIsThatOfALaterOne) {
  connect(2);
  const OpRef earlier = start({1}, 2, -1), later = start({1}, 1);
  pass(kLimitUs - 10'000);
  arrive(0);
  pass(kLimitUs - 10'000);
  EXPECT_FALSE(later->done());
  pass(10'000);
  EXPECT_EQ(later->status().code(), Code::kTimeout);
  EXPECT_EQ(earlier->status().text(), later->status().text());  // the channel fails as a whole
}

TEST_F(EngineDeadline, TimeWithoutAnInputOfThisRankDoesNotCount) {
  connect(2);
  const OpRef op = start({1}, 1, kLimitUs, {.input = true});
  ASSERT_EQ(transport_->transfers.size(), 1u);  // the receive
  pass(3 * kLimitUs);
  EXPECT_FALSE(op->done());
  ASSERT_TRUE(engine_->arrive(op, 0, 0, {}).ok());
  engine_->poll(0);
  ASSERT_EQ(transport_->transfers.size(), 2u);
  EXPECT_TRUE(transport_->transfers[1]->is_send);
  pass(kLimitUs - 10'000);
  EXPECT_FALSE(op->done());
  pass(10'000);
  EXPECT_EQ(op->status().code(), Code::kTimeout);
}

TEST_F(EngineDeadline, AnOperationAfterAnotherBeginsWithItsEnd) {
  connect(2);
  const OpRef first = start({1}, 1, -1), second = start({1}, 1, kLimitUs, {.after = {first}});
  EXPECT_EQ(transport_->transfers.size(), 2u);
  pass(3 * kLimitUs);
  EXPECT_FALSE(second->done());
  arrive(0);
  arrive(1);
  EXPECT_TRUE(first->done());
  engine_->poll(0);
  EXPECT_EQ(transport_->transfers.size(), 4u);
  pass(kLimitUs - 10'000);
  EXPECT_FALSE(second->done());
  arrive(2);
  arrive(3);
  EXPECT_TRUE(second->status().ok());
}

TEST_F(EngineDeadline, WhatHasNotBegunFailsWithItsChannel) {
  connect(2);
  const OpRef first = start({1}, 1),
              second = start({1}, 1, kLimitUs, {.input = true, .after = {first}});
  ASSERT_TRUE(engine_->arrive(second, 0, 0, {}).ok());
  pass(kLimitUs);
  EXPECT_EQ(first->status().code(), Code::kTimeout);
  EXPECT_EQ(second->status().text(), first->status().text());
  EXPECT_EQ(transport_->cancelled, 1);
  EXPECT_EQ(engine_->arrive(second, 0, 0, {}).code(), Code::kInvalidState);
}

TEST_F(EngineDeadline, AccusesThoseOfWhomNothingCame) {
  connect(4);
  const OpRef op = start({1, 2, 3}, 2);
  // In the order of the plan: two receives and a send of each peer.
  const auto receive_of = [&](int32_t peer) {
    size_t index = 0;
    while (transport_->transfers[index]->is_send || transport_->transfers[index]->peer != peer)
      ++index;
    return index;
  };
  arrive(receive_of(1));
  arrive(receive_of(3));
  pass(kLimitUs);
  EXPECT_EQ(channel_->cause().rank, 2);
  const std::string text = op->status().text();
  EXPECT_NE(text.find("waiting for rank 2 (2 messages from it, 1 to it, last heard from 20 ms"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("rank 1 ("), std::string::npos) << text;
  EXPECT_EQ(text.find("rank 3 ("), std::string::npos) << text;
}

TEST_F(EngineDeadline, NamesAllThatSomethingIsMissingOfIfEachHasSentSomething) {
  connect(3);
  const OpRef op = start({1, 2}, 2);
  for (const int32_t peer : {1, 2}) {
    for (size_t i = 0; i < transport_->transfers.size(); ++i) {
      if (transport_->transfers[i]->is_send || transport_->transfers[i]->peer != peer) continue;
      arrive(i);
      break;
    }
  }
  pass(kLimitUs);
  const std::string text = op->status().text();
  EXPECT_NE(text.find("waiting for rank 1 (1 message from it, 1 to it"), std::string::npos) << text;
  EXPECT_NE(text.find(", rank 2 (1 message from it, 1 to it"), std::string::npos) << text;
}

TEST_F(EngineDeadline, WaitingLooksAtTheEnginesClockAlone) {
  connect(2);
  engine_->drive(
      [&](Driver&) { engine_->add_backend(std::make_unique<SkippingBackend>(clock_), true); });
  const OpRef op = start({1}, 1);
  const int64_t before = clock_.now_ns();
  EXPECT_EQ(engine_->wait(op, 1'000'000).code(), Code::kInProgress);
  EXPECT_GE(clock_.now_ns() - before, 1'000'000'000);
  EXPECT_LT(clock_.now_ns() - before, 1'100'000'000);
  EXPECT_EQ(engine_->wait(op, -1).code(), Code::kTimeout);
  EXPECT_GE(clock_.now_ns() - before, 1000 * kLimitUs);
  EXPECT_LT(clock_.now_ns() - before, 1000 * kLimitUs + 100'000'000);
  EXPECT_FALSE(engine_->wait_until([] { return false; }, 3'600'000'000));
}

}  // namespace
}  // namespace sotto::test
