// The other ranks of a control plane, played by a test: facts that it sets, and what was sent.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "tests/support/ranks.h"
#include "transports/tcp/control_peers.h"

namespace sotto::tcp {

inline wire::Bytes bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

class PlayedPeers final : public ControlPeers {
 public:
  struct Message {
    int32_t to;
    wire::FrameKind kind;
    std::string payload;
  };

  PlayedPeers(const Clock& clock, int32_t rank, int32_t size)
      : heard(static_cast<size_t>(size), clock.now_ns()), rank_(rank), size_(size) {
    for (int32_t r = 0; r < size; ++r) {
      members_.push_back({100 + static_cast<uint32_t>(r), "host", fmt::format("10.0.0.{}:1", r)});
      if (linked(r)) opened.insert(r);
    }
  }
  int32_t rank() const override { return rank_; }
  int32_t size() const override { return size_; }
  int32_t coordinator() const override { return 0; }
  const wire::Members::Member& member(int32_t rank) const override {
    return members_[static_cast<size_t>(rank)];
  }
  bool established() const override { return set_up; }
  bool left(int32_t rank) const override { return gone.contains(rank); }
  bool open(int32_t rank) const override { return opened.contains(rank); }
  std::optional<int64_t> heard_ns(int32_t rank) const override {
    if (!linked(rank)) return {};
    return heard[static_cast<size_t>(rank)];
  }
  void send(int32_t rank, wire::FrameKind kind, const std::string& payload) override {
    if (open(rank)) sent.push_back({rank, kind, payload});
  }
  bool send_sign(int32_t rank, const std::string& heartbeat) override {
    if (!linked(rank) || crowded.contains(rank)) return false;
    send(rank, wire::FrameKind::kHeartbeat, heartbeat);
    return true;
  }

  // The ranks to which frames of the kind were sent, and no longer any.
  std::vector<int32_t> take(wire::FrameKind kind) {
    std::vector<int32_t> to;
    for (const Message& m : sent) {
      if (m.kind == kind) to.push_back(m.to);
    }
    std::erase_if(sent, [&](const Message& m) { return m.kind == kind; });
    return to;
  }
  wire::Heartbeat last_heartbeat() const {
    return test::check(wire::Heartbeat::decode(bytes_of(sent.back().payload)));
  }

  bool set_up = true;
  std::set<int32_t> opened, gone, crowded;
  std::vector<int64_t> heard;
  std::vector<Message> sent;

 private:
  bool linked(int32_t rank) const { return rank != rank_ && (rank_ == 0 || rank == 0); }

  const int32_t rank_, size_;
  std::vector<wire::Members::Member> members_;
};

}  // namespace sotto::tcp
