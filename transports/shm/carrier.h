// Two rings to one peer as a carrier of frames.
//
// Threads: the driving thread.
#pragma once

#include <memory>
#include <string>

#include "transports/framed/carrier.h"
#include "transports/framed/frame_reader.h"
#include "transports/framed/frame_writer.h"
#include "transports/shm/bell.h"
#include "transports/shm/poller.h"
#include "transports/shm/ring.h"
#include "transports/shm/segment.h"

namespace sotto::shm {

// What two ranks have of each other after the set-up.
struct PeerRings {
  Segment segment;  // has both rings
  RingMemory out, in;
  Bell bell;        // the peer's
  int32_t pid = 0;  // of the peer, as this process sees it; 0: not seen
};

class RingCarrier final : public framed::FrameCarrier, private Served {
 public:
  RingCarrier(std::shared_ptr<ShmPoller> poller, PeerRings rings);
  ~RingCarrier() override;

  void start(framed::FrameOwner& owner, const std::string& peer, bool small_only) override;
  void flush() override;
  void close() override;
  const Transfer* sending() const override {
    return writer_.busy() ? writer_.frame().message : nullptr;
  }
  void drop_out() override;
  void drop_in() override { reader_.discard(); }
  bool open() const override { return open_; }
  bool can_send() const override { return open_ && !out_dead_; }
  // The peer reads the ring also when this process has ended.
  bool delivered() const override { return !can_send() || !writer_.busy(); }
  std::string address() const override;

 private:
  bool serve() override;
  bool has_work() const override;
  bool arm() override;
  void disarm() override;
  bool receive();
  bool parse();
  bool settle(const Status& status);
  bool send();
  void fail(const Status& why, bool damaged);

  const std::shared_ptr<ShmPoller> poller_;
  const PeerRings rings_;
  RingWriter out_;
  RingReader in_;
  framed::FrameWriter writer_{wire::TrailerOf::kHeader};
  framed::FrameReader reader_{"", wire::TrailerOf::kHeader};
  framed::FrameOwner* owner_ = nullptr;  // until start
  std::string peer_;
  bool open_ = true;
  bool out_dead_ = false;  // half of a dropped frame has left
  bool in_send_ = false;
  bool more_ = false;  // stopped for the sake of other carriers
};

}  // namespace sotto::shm
