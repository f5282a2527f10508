#include "transports/ucx/mesh.h"

#include <vector>

#include "core/base/text.h"

namespace sotto::ucx {

Status Mesh::connect(const ControlPlane& control, Driver& driver, Deadline deadline) {
  Status failed;
  const auto done = [&] {
    if (failed.ok() && control.failure()) failed = control.failure()->status();
    size_t missing = 0;
    for (auto& [peer, pair] : pairs_) {
      if (failed.ok()) failed = advance(peer, pair);
      missing += pair.connected ? 0 : 1;
    }
    return missing == 0 || !failed.ok();
  };
  const bool met = driver.run_until(done, deadline);
  if (!met && failed.ok()) failed = too_late();
  for (auto& [peer, pair] : pairs_) end_greeting(pair);
  return failed;
}

Status Mesh::advance(int32_t peer, Pair& pair) {
  const bool greeted = worker_->greeted(number_for(peer, 0));
  if (pair.endpoint == nullptr) {
    if (rank_ > peer && !greeted) return ok_status();
    SOTTO_TRY(make_endpoint(peer, pair));
  }
  if (const ucs_status_t lost = pair.endpoint->why_lost(); lost != UCS_OK)
    return pair.endpoint->lost_text(fmt::format("rank {}", peer), lost);
  pair.connected = greeted && worker_->look_at(pair.request) == UCS_OK;
  return ok_status();
}

Status Mesh::make_endpoint(int32_t peer, Pair& pair) {
  Result<std::shared_ptr<Endpoint>> made = Endpoint::make(worker_, pair.address);
  if (!made.ok())
    return made.status().with_prefix(fmt::format("rank {} has no way to rank {}", rank_, peer));
  pair.endpoint = *std::move(made);
  pair.greeting = {.to = number_for(rank_, 0), .number = kGreeting};
  pair.request = pair.endpoint->send(pair.greeting, nullptr, 0);
  return ok_status();
}

void Mesh::end_greeting(Pair& pair) {
  if (pair.request == nullptr) return;
  pair.endpoint->drop();
  worker_->settle(pair.request);
}

Status Mesh::too_late() const {
  std::vector<size_t> ranks;
  for (const auto& [peer, pair] : pairs_) {
    if (!pair.connected) ranks.push_back(static_cast<size_t>(peer));
  }
  return error(Code::kTimeout, "UCX has not connected rank {} with {}", rank_,
               list_of_ranks(ranks));
}

}  // namespace sotto::ucx
