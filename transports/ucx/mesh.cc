#include "transports/ucx/mesh.h"

#include <algorithm>
#include <vector>

#include "core/base/text.h"

namespace sotto::ucx {
namespace {

// After so many ticks a rank asks for an endpoint.
constexpr int kAskTicks = 2;

}  // namespace

Mesh::Mesh(std::shared_ptr<Worker> worker, ControlPlane& control, const LinkPeers& peers)
    : control_(control) {
  for (const int32_t peer : peers.all) {
    if (peer == control.rank()) continue;
    Pair& pair = pairs_[peer];
    pair.taken = std::make_shared<Endpoint>(worker, control.rank(), peer);
    pair.endpoint = pair.taken;
    pair.lazy = std::ranges::count(peers.lazy, peer) != 0;
  }
}

Mesh::~Mesh() {
  if (listens_) control_.set_service_listener(kConnectChannel, nullptr);
}

Status Mesh::connect(const std::vector<std::string>& addresses, Driver& driver, Deadline deadline) {
  for (auto& [peer, pair] : pairs_) {
    pair.taken->set_address(addresses[static_cast<size_t>(peer)]);
    if (!pair.lazy) pair.taken->use();
  }
  Status failed;
  const auto done = [&] {
    if (control_.failure()) failed = control_.failure()->status();
    bool connected = true;
    for (const auto& [peer, pair] : pairs_) {
      if (failed.ok()) failed = pair.taken->lost();
      connected &= pair.lazy || pair.taken->connected();
    }
    return connected || !failed.ok();
  };
  const bool met = driver.run_until(done, deadline);
  return met || !failed.ok() ? failed : too_late();
}

Status Mesh::too_late() const {
  std::vector<size_t> ranks;
  for (const auto& [peer, pair] : pairs_) {
    if (!pair.lazy && !pair.taken->connected()) ranks.push_back(static_cast<size_t>(peer));
  }
  return error(Code::kTimeout, "UCX has not connected rank {} with {}", control_.rank(),
               list_of_ranks(ranks));
}

void Mesh::listen() {
  if (std::ranges::none_of(pairs_, [](const auto& pair) { return pair.second.lazy; })) return;
  listens_ = true;
  control_.set_service_listener(kConnectChannel, this);
}

void Mesh::tick() {
  if (!listens_) return;
  for (auto& [peer, pair] : pairs_) {
    const std::shared_ptr<Endpoint> endpoint = pair.lazy ? pair.endpoint.lock() : nullptr;
    if (endpoint == nullptr || !endpoint->waits_for_greeting() || pair.waited > kAskTicks) continue;
    if (++pair.waited <= kAskTicks) continue;
    // It is asked once, unless the control plane cannot take it now.
    if (!control_.send_service(peer, kConnectChannel, "").ok()) pair.waited = 0;
  }
}

void Mesh::on_service(int32_t from, std::string_view /*bytes*/) noexcept {
  const auto found = pairs_.find(from);
  if (found == pairs_.end()) return;
  if (const auto endpoint = found->second.endpoint.lock()) endpoint->use();
}

}  // namespace sotto::ucx
