#include "transports/nccl/connect_peers.h"

#include <string>
#include <vector>

#include "cuda/calls/cuda_calls.h"
#include "transports/nccl/ask_until.h"

namespace sotto::nccl {
namespace {

// Messages of no bytes to every other rank and back: what is sent of them is their header.
std::vector<Transfer> empty_messages(const Communicator& all, const OpDescriptor& of) {
  std::vector<Transfer> messages;
  for (int32_t peer = 0; peer < all.size(); ++peer) {
    if (peer == all.rank()) continue;
    for (const bool is_send : {true, false}) {
      Transfer& message = messages.emplace_back();
      message.op = &of;
      message.peer = peer;
      message.is_send = is_send;
    }
  }
  return messages;
}

// "rank 1", "ranks 1, 4"
std::string missing_ranks(const HeaderExchange& headers) {
  std::string ranks;
  size_t missing = 0;
  for (const PeerHeader& header : headers.all()) {
    if (header.seen) continue;
    ranks += fmt::format("{}{}", missing == 0 ? "" : ", ", header.peer);
    ++missing;
  }
  return (missing == 1 ? "rank " : "ranks ") + ranks;
}

// IN_PROGRESS: the device has not executed the group.
Status advance(InFlightGroups& groups, MessageGroup& group) {
  if (!group.queued()) SOTTO_TRY(groups.launch(group));
  const cudaError_t state = cudaEventQuery(group.event());
  if (state != cudaErrorNotReady)
    return cuda_status(state, "cudaEventQuery behind the first group of nccl");
  forget_cuda_error(state);
  return Status(Code::kInProgress, "the group executes");
}

}  // namespace

Status connect_peers(InFlightGroups& groups, const Communicator& all, cudaStream_t stream,
                     const ControlPlane& control, Driver& driver, Deadline deadline) {
  if (all.size() == 1) return ok_status();
  const OnDevice on(all.device());
  SOTTO_TRY(on.status());
  OpDescriptor setup;
  setup.signature.kind = OpKind::kCommCreate;
  std::vector<Transfer> messages = empty_messages(all, setup);
  std::vector<Transfer*> places;
  for (Transfer& message : messages) places.push_back(&message);
  MessageGroup& group = groups.begin(stream, true, nullptr);
  SOTTO_TRY(groups.prepare(group, places));
  group.forget_transfers();
  Status now;
  const auto done = [&] {
    now = advance(groups, group);
    if (now.code() == Code::kInProgress && group.queued()) {
      if (const Status failed = all.check(); !failed.ok()) now = failed;
    }
    return now.code() != Code::kInProgress || control.failure().has_value();
  };
  ask_until(done, driver, deadline);
  if (control.failure().has_value()) return control.failure()->status();
  if (const PeerHeader* differs = group.headers().check(); differs != nullptr)
    return differs->meant;
  if (now.code() == Code::kInProgress) {
    return error(Code::kTimeout, "nccl: rank {} has not been connected with {} in time", all.rank(),
                 missing_ranks(group.headers()));
  }
  SOTTO_TRY(now);
  if (!group.headers().all_seen()) return missing_group_header();
  groups.release(group);
  groups.pop_oldest();
  groups.complete(setup.key);
  return ok_status();
}

}  // namespace sotto::nccl
