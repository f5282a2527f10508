// A frame carrier in memory: two ends, and a test that brings the frames across one at a time.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "transports/framed/carrier.h"

namespace sotto::test {

class MemoryCarrier final : public framed::FrameCarrier {
 public:
  explicit MemoryCarrier(std::string address) : address_(std::move(address)) {}
  // The ends of one carrier live equally long.
  static void join(MemoryCarrier& one, MemoryCarrier& two) {
    one.other_ = &two;
    two.other_ = &one;
  }

  // Takes the owner's next frame and shows its header to the other end. False: there is none, or
  // the owner has not asked for a flush.
  bool begin() {
    if (!flush_wanted_ || !can_send() || begun_) return false;
    framed::OutFrame frame;
    flush_wanted_ = owner_->next_frame(frame);
    if (!flush_wanted_) return false;
    begun_ = frame;
    sent.push_back(frame.header);
    other_->arrive(frame.header);
    return true;
  }
  // Brings the payload across and completes the frame; nothing if it was dropped.
  void finish() {
    if (!begun_) return;
    const framed::OutFrame frame = *std::exchange(begun_, std::nullopt);
    const uint64_t bytes = frame.header.payload_bytes;
    if (other_->place != nullptr && bytes > 0) std::memcpy(other_->place, frame.payload, bytes);
    owner_->on_sent(frame);
    if (!other_->open()) return;
    if (Status status = other_->owner_->on_frame(frame.header); !status.ok()) other_->fail(status);
  }
  bool step() {
    if (!begin()) return false;
    finish();
    return true;
  }
  // Ends the carrier at this end alone.
  void fail(Status why, bool damaged = false) {
    open_ = false;
    owner_->on_broken(std::move(why), damaged);
  }

  void start(framed::FrameOwner& owner, const std::string& peer, bool small_only) override {
    owner_ = &owner;
    peer_name = peer;
    for_small_only = small_only;
    flush_wanted_ = true;
  }
  void flush() override { flush_wanted_ = true; }
  void close() override { open_ = false; }
  const Transfer* sending() const override { return begun_ ? begun_->message : nullptr; }
  void drop_out() override {
    if (std::exchange(begun_, std::nullopt)) half_sent_ = true;
  }
  void drop_in() override { place = nullptr; }
  bool open() const override { return open_; }
  bool can_send() const override { return open_ && !half_sent_; }
  bool delivered() const override { return !begun_; }
  std::string address() const override { return address_; }

  std::vector<wire::FrameHeader> sent;
  std::string peer_name;
  bool for_small_only = false;
  uint8_t* place = nullptr;  // of the payload that arrives

 private:
  void arrive(const wire::FrameHeader& header) {
    place = nullptr;
    if (!open_) return;
    const auto where = owner_->on_header(header);
    if (!where.ok()) return fail(where.status());
    place = *where;
  }

  const std::string address_;
  MemoryCarrier* other_ = nullptr;
  framed::FrameOwner* owner_ = nullptr;
  std::optional<framed::OutFrame> begun_;  // header across, payload not
  bool flush_wanted_ = false;
  bool half_sent_ = false;
  bool open_ = true;
};

}  // namespace sotto::test
