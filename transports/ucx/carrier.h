// Active messages to one peer as a carrier of frames: one in flight in each direction, so that a
// peer has several. A payload travels from the sender's memory to its place, by a rendezvous of
// UCX's if it is long and does not pass a socket in one piece.
//
// UCX orders nothing: messages are numbered, and one that comes early waits. All others are taken
// where UCX has them, inside of its callback, in which the carrier cannot end.
//
// Threads: the driving thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transports/framed/carrier.h"
#include "transports/ucx/endpoint.h"

namespace sotto::ucx {

class MessageCarrier final : public framed::FrameCarrier, private Receiver {
 public:
  // peer: its name, for errors. own, peers: the numbers of this end and of the peer's.
  MessageCarrier(std::shared_ptr<Endpoint> endpoint, std::string peer, uint64_t own,
                 uint64_t peers);
  ~MessageCarrier() override;

  void start(framed::FrameOwner& owner, const std::string& peer, bool small_only) override;
  void flush() override;
  void close() override;
  const Transfer* sending() const override {
    return out_.request != nullptr ? out_.frame.message : nullptr;
  }
  void drop_out() override;
  void drop_in() override;
  bool open() const override { return open_; }
  bool can_send() const override { return open_ && endpoint_->usable(); }
  // The peer has said that it has the bye, and all frames before it, or has left by itself and
  // waits for none of them.
  bool delivered() const override {
    return !can_send() || (out_.request == nullptr && taken_.request == nullptr &&
                           (!out_.bye || taken_.came || in_.bye));
  }
  std::string address() const override { return open_ ? endpoint_->lanes() : "closed"; }

 private:
  struct Sending {
    framed::OutFrame frame;
    Head head;
    void* request = nullptr;
    uint64_t frames = 0;
    bool bye = false;
  };
  struct Receiving {
    std::vector<Arrived> waiting;
    uint64_t frames = 0;
    std::optional<wire::FrameHeader> frame;  // that arrives
    wire::TrailerBytes trailer{};            // of it
    uint8_t* place = nullptr;                // of its payload; null: discarded
    void* request = nullptr;
    bool bye = false;
  };
  // Why the carrier has to end, found inside of take.
  struct Broken {
    Status why;
    bool damaged = false;
  };
  // To a bye.
  struct Answer {
    Head head;  // of the own one
    void* request = nullptr;
    bool came = false;  // the peer's
  };

  bool take(Arrived arrived) override;
  bool due() const override;
  bool serve() override;

  bool receive();
  bool begin(const Arrived& arrived);
  bool finish_frame();
  bool settle(const Status& status);
  void say_taken();
  bool finish_send();
  bool takes_turn();
  bool send();
  void end_transfers();
  void release(const Arrived& arrived);
  void fail(const Status& why, bool damaged);

  std::shared_ptr<Endpoint> endpoint_;  // null: closed
  const std::shared_ptr<Worker> worker_;
  const uint64_t own_, peers_;
  framed::FrameOwner* owner_ = nullptr;  // until start
  std::string peer_;
  bool open_ = true;
  bool in_send_ = false;
  bool in_take_ = false;
  bool small_only_ = false;
  bool wants_turn_ = false;  // it was another carrier's
  bool more_ = false;        // stopped for the sake of other carriers
  Sending out_;
  Receiving in_;
  Answer taken_;
  Broken broken_;
};

}  // namespace sotto::ucx
