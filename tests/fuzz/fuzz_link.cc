// Any bytes on a control connection, in any portions: whole messages come out, or the connection
// ends with a text, and memory follows what has arrived, whatever a header announces.
#include <malloc.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "core/wire/control.h"
#include "transports/tcp/control_link.h"

namespace {

using namespace sotto;

constexpr uint64_t kMaxPayload = uint64_t{1} << 40;  // the link refuses nothing for its size
constexpr size_t kFixedBytes = size_t{1} << 20;

// A broken promise has to stop the fuzzer like a crash does.
void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

class Owner final : public tcp::ControlLinkOwner {
 public:
  uint64_t payload_bytes = 0;
  bool lost = false;

 private:
  Status on_message(tcp::ControlLink&, wire::FrameKind kind, wire::Bytes payload) override {
    payload_bytes += payload.size();
    switch (kind) {
      case wire::FrameKind::kJoin: return wire::Join::decode(payload).status();
      case wire::FrameKind::kMembers: return wire::Members::decode(payload).status();
      case wire::FrameKind::kGather: return wire::Gather::decode(payload).status();
      case wire::FrameKind::kGathered: return wire::Gathered::decode(payload).status();
      case wire::FrameKind::kFailure: return wire::Failure::decode(payload).status();
      case wire::FrameKind::kHeartbeat: return wire::Heartbeat::decode(payload).status();
      case wire::FrameKind::kService: return wire::Service::decode(payload).status();
      default: return {};
    }
  }
  void on_lost(tcp::ControlLink&, const Status& why) override {
    require(!lost, "a connection is lost once");
    require(!why.ok() && !why.text().empty(), "a connection is lost with a text");
    lost = true;
  }
};

// Heap in use; 0 under a sanitizer's allocator.
size_t heap_bytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

}  // namespace

// The first byte says how long the portions are in which the others arrive.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t portion = 1 + size_t{data[0]} * 97;
  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "a pair of sockets");
  auto reactor = tcp::Reactor::make({});
  require(reactor.ok(), "a reactor");
  Owner owner;
  auto link = tcp::ControlLink::make(**reactor, ends[0], "fuzzer", owner, kMaxPayload);
  require(link.ok(), "a link");
  const size_t before = heap_bytes();
  for (size_t at = 1; at < size && !owner.lost; at += portion) {
    const size_t bytes = std::min(portion, size - at);
    require(::send(ends[1], data + at, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes),
            "the socket takes a portion");
    for (int i = 0; i < 3; ++i) (*reactor)->poll(0);
    require(heap_bytes() <= before + kFixedBytes + 32 * size, "memory follows what has arrived");
  }
  require(owner.payload_bytes <= size, "no more comes out than went in");
  ::close(ends[1]);
  (*reactor)->poll(0);
  return 0;
}
