// Ranks that are threads of the test, below the transport: a control plane between them, and what a
// rank has.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/iface/rendezvous.h"
#include "tests/support/poll_driver.h"
#include "tests/support/ranks.h"
#include "transports/nccl/communicators.h"
#include "transports/nccl/poller.h"

namespace sotto::test {

struct ControlRoom {
  explicit ControlRoom(int size) : barrier(size), blobs(static_cast<size_t>(size)) {}
  RankBarrier barrier;
  std::mutex mutex;
  std::vector<std::string> blobs;
};

class RoomControl final : public ControlPlane {
 public:
  RoomControl(ControlRoom& room, int32_t rank) : room_(room), rank_(rank) {}
  int32_t rank() const override { return rank_; }
  int32_t size() const override { return static_cast<int32_t>(room_.blobs.size()); }
  uint64_t token() const override { return 1; }
  Result<std::vector<std::string>> all_gather(std::string_view, std::string_view mine, Driver&,
                                              Deadline) override {
    {
      std::lock_guard lock(room_.mutex);
      room_.blobs[static_cast<size_t>(rank_)] = mine;
    }
    room_.barrier.wait();
    auto all = room_.blobs;
    room_.barrier.wait();
    return all;
  }
  void fail(const FailureCause&) override {}
  const std::optional<FailureCause>& failure() const override { return failure_; }
  void set_listener(ControlListener*) override {}
  int64_t silent_ms(int32_t) const override { return 0; }
  void leave(Deadline) override {}

 private:
  ControlRoom& room_;
  const int32_t rank_;
  std::optional<FailureCause> failure_;
};

struct NcclRank {
  NcclRank(ControlRoom& room, int32_t rank) : control(room, rank) {}

  static Deadline in(int64_t us) { return Deadline::in_us(Clock::monotonic(), us); }
  // All ranks, in their order.
  Status join(uint64_t comm) {
    const auto invitations = check(
        control.all_gather("", communicators.invite(control.rank() == 0), driver, in(60'000'000)));
    return communicators.join(comm, control.rank(), invitations, control, driver, in(60'000'000));
  }
  // What has begun of the ends of the communicators.
  void await_end() {
    driver.run_until([this] { return communicators.ended(Clock::monotonic()); }, in(60'000'000));
    require(communicators.ended(Clock::monotonic()), "the communicators have ended");
  }
  void abort() {
    communicators.abort();
    await_end();
  }
  void barrier() { check(control.all_gather("", "", driver, {}).status()); }

  RoomControl control;
  nccl::NcclPoller poller;
  PollDriver driver{poller};
  nccl::Communicators communicators{
      check(nccl::Communicator::make({}, nullptr, control, driver, in(60'000'000)))};
};

}  // namespace sotto::test
