// A socket of the test in the place of a peer that connects to a rank, or of a coordinator that
// ranks connect to, byte for byte.
//
// Threads: one per object.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/wire/control.h"
#include "core/wire/frame.h"

namespace sotto::test {

struct ReceivedFrame {
  wire::FrameHeader header;
  std::string payload;
};

class UnknownPeer {
 public:
  // Connects to 127.0.0.1; throws RankError. A port without a listener is tried for a
  // minute.
  explicit UnknownPeer(uint16_t port);
  // A connected socket.
  struct Connected {
    int fd;
  };
  explicit UnknownPeer(Connected connected) : fd_(connected.fd) {}
  UnknownPeer(UnknownPeer&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  UnknownPeer& operator=(UnknownPeer&&) = delete;
  ~UnknownPeer() { hang_up(); }

  void send(const std::string& bytes) const;
  void hang_up();
  // Whole frames that come until the other side closes, or the time is over.
  std::vector<ReceivedFrame> receive_all(int64_t timeout_ms = 60'000);
  // The next frame; throws RankError when the connection ends or the time is over.
  ReceivedFrame next(int64_t timeout_ms = 60'000);
  bool closed() const { return closed_; }  // by the other side, as receive_all and next have found
  // The text of the failure frame that the other side ends with; "" if there is none.
  std::string refusal(int64_t timeout_ms = 60'000);

 private:
  bool receive_some(int64_t until_ns);
  bool cut(ReceivedFrame& out);

  int fd_ = -1;
  bool closed_ = false;
  std::string received_;
};

// Idle connections: sockets that send nothing.
class IdleCrowd {
 public:
  IdleCrowd(uint16_t port, int count);
  ~IdleCrowd();
  IdleCrowd(const IdleCrowd&) = delete;
  IdleCrowd& operator=(const IdleCrowd&) = delete;
  int open() const;  // connected, and not closed by the other side

 private:
  std::vector<int> fds_;
};

// A listening socket on 127.0.0.1.
class RogueListener {
 public:
  RogueListener();
  ~RogueListener();
  RogueListener(const RogueListener&) = delete;
  RogueListener& operator=(const RogueListener&) = delete;
  uint16_t port() const { return port_; }
  UnknownPeer accept(int64_t timeout_ms = 60'000) const;

 private:
  int fd_ = -1;
  uint16_t port_ = 0;
};

// A whole frame. announced: what the header says that the payload has.
std::string frame_of(wire::FrameHeader header, const std::string& payload);
std::string frame_of(wire::FrameKind kind, const std::string& payload, uint32_t segment = 0);
std::string header_of(wire::FrameKind kind, uint64_t announced);
// The same frame in another version of the format.
std::string in_version(uint16_t version, std::string frame);

// At least so many descriptors for this process: "" or why there cannot be so many.
std::string allow_descriptors(uint64_t wanted);

}  // namespace sotto::test
