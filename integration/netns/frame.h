// What a TUN device hands over at once: an IP packet, or several of one TCP connection in one
// piece, which are cut only where they are needed apart (segmentation offload), and in front of
// it what the receiver's device has to know of that (OffloadHeader). It goes from device to device
// as it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace sotto_netns {

// struct virtio_net_hdr of <linux/virtio_net.h>, which C++ cannot include (a field is named class).
struct OffloadHeader {
  static constexpr uint8_t kNeedsChecksum = 1;         // flags
  static constexpr uint8_t kNotCut = 0, kTcpIpv4 = 1;  // gso_type

  uint8_t flags = 0;
  uint8_t gso_type = kNotCut;
  uint16_t hdr_len = 0;
  uint16_t gso_size = 0;    // payload of each packet
  uint16_t csum_start = 0;  // of the TCP header in the packet
  uint16_t csum_offset = 0;
};
static_assert(sizeof(OffloadHeader) == 10);

struct Frame {
  static constexpr size_t kHeader = sizeof(OffloadHeader);

  const uint8_t* data = nullptr;  // the header, then the packet
  size_t size = 0;
  uint64_t packets = 0;     // that pass the wire
  uint64_t wire_bytes = 0;  // of all of them, as tbf counts them on an Ethernet device

  const uint8_t* ip() const { return data + kHeader; }
  size_t ip_size() const { return size - kHeader; }
};

// Nothing: it is no frame. The frame keeps `data`.
std::optional<Frame> parse_frame(const uint8_t* data, size_t size);

}  // namespace sotto_netns
