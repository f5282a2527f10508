#include "integration/netns/frame.h"

#include <cstring>

namespace sotto_netns {
namespace {

constexpr uint64_t kEthernetHeader = 14;
constexpr size_t kTcpHeader = 20;
constexpr size_t kTcpDataOffset = 12;  // its high half counts words of 4 bytes

}  // namespace

std::optional<Frame> parse_frame(const uint8_t* data, size_t size) {
  if (size < Frame::kHeader) return std::nullopt;
  Frame frame{data, size, 1, size - Frame::kHeader + kEthernetHeader};
  OffloadHeader header;
  std::memcpy(&header, data, sizeof header);
  if (header.gso_type == OffloadHeader::kNotCut) return frame;
  // Every packet of it gets a copy of the IP and TCP headers and gso_size bytes of what follows.
  const size_t tcp = header.csum_start;
  if (header.gso_size == 0 || tcp + kTcpHeader > frame.ip_size()) return std::nullopt;
  const size_t headers = tcp + size_t{4} * (frame.ip()[tcp + kTcpDataOffset] >> 4);
  if (headers >= frame.ip_size()) return std::nullopt;
  frame.packets = (frame.ip_size() - headers + header.gso_size - 1) / header.gso_size;
  frame.wire_bytes = frame.ip_size() - headers + frame.packets * (headers + kEthernetHeader);
  return frame;
}

}  // namespace sotto_netns
