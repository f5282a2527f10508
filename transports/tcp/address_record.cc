#include "transports/tcp/address_record.h"

#include <algorithm>

#include "core/wire/bytes.h"

namespace sotto::tcp {
namespace {

constexpr uint32_t kMaxAddresses = 64;
constexpr uint32_t kMaxConnections = 64;

}  // namespace

void MeshLimits::take_smaller(const MeshLimits& other) {
  flow.eager_bytes = std::min(flow.eager_bytes, other.flow.eager_bytes);
  flow.credit_bytes = std::min(flow.credit_bytes, other.flow.credit_bytes);
  connections = std::min(connections, other.connections);
}

std::string AddressRecord::encode() const {
  wire::ByteWriter out;
  out.number(port);
  out.number(static_cast<uint8_t>(stays));
  out.number(limits.flow.eager_bytes);
  out.number(limits.flow.credit_bytes);
  out.number(limits.connections);
  out.number(static_cast<uint32_t>(addresses.size()));
  for (const Address& a : addresses) out.text(a.to_string());
  return out.take();
}

Result<AddressRecord> AddressRecord::decode(const std::string& text) {
  wire::ByteReader in({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  AddressRecord record;
  record.port = in.number<uint16_t>();
  record.stays = in.number<uint8_t>() != 0;
  record.limits.flow.eager_bytes = in.number<uint64_t>();
  record.limits.flow.credit_bytes = in.number<uint64_t>();
  record.limits.connections = std::clamp(in.number<uint32_t>(), 1u, kMaxConnections);
  const uint32_t count = std::min(in.number<uint32_t>(), kMaxAddresses);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    error_code failed;
    const Address address = asio::ip::make_address(std::string(in.text()), failed);
    if (failed) return error(Code::kProtocol, "malformed address of a data connection");
    record.addresses.push_back(address);
  }
  if (!in.finished() || record.addresses.empty())
    return error(Code::kProtocol, "malformed addresses of data connections");
  return record;
}

}  // namespace sotto::tcp
