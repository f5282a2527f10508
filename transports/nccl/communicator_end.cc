#include "transports/nccl/communicator_end.h"

#include <optional>
#include <system_error>
#include <utility>

#include "core/base/log.h"
#include "cuda/calls/blocked_streams.h"
#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {
namespace {

// Between looks at whether NCCL has finalized a communicator, of which it does not tell.
constexpr auto kPause = std::chrono::microseconds(50);

// The first in which the end of a communicator is a job of the group that is open.
constexpr int kEndsWithGroups = 22200;
const std::atomic<bool> kNever{false};

void warn(const Status& status, const char* consequence) {
  if (!status.ok()) log(LogLevel::kWarn, "{}{}", status.text(), consequence);
}

}  // namespace

CommunicatorEnd::CommunicatorEnd(std::shared_ptr<const Api> api, ncclComm_t comm, int device,
                                 LiveGraphs graphs, std::chrono::milliseconds limit)
    : state_(new State{std::move(api), comm, device, std::move(graphs)}), limit_(limit) {}

CommunicatorEnd::~CommunicatorEnd() {
  if (!thread_.joinable()) return;
  bool left = left_to_graphs();
  for (; !over() && !left && std::chrono::steady_clock::now() < left_behind_at_;
       left = left_to_graphs())
    std::this_thread::sleep_for(kPause);
  if (over()) {
    thread_.join();
    return;
  }
  if (left) {
    log(LogLevel::kInfo,
        "nccl: a communicator on cuda:{} ends when the CUDA graphs with its operations are "
        "destroyed",
        state_->device);
  } else {
    log(LogLevel::kError,
        "nccl: a communicator on cuda:{} has not ended after {} ms and is left behind",
        state_->device, limit_.count());
  }
  thread_.detach();
}

void CommunicatorEnd::begin() {
  if (!thread_.joinable() && !over()) start();
}

void CommunicatorEnd::abort() {
  if (!state_->abort.exchange(true)) {
    left_behind_at_ = std::chrono::steady_clock::now() + limit_;
    state_->graphs.wake();
  }
  begin();
}

void CommunicatorEnd::start() {
  left_behind_at_ = std::chrono::steady_clock::now() + limit_;
  try {
    thread_ = std::thread([state = state_] { run(*state); });
  } catch (const std::system_error&) {  // there are no more threads
    if (!state_->graphs.any() && !BlockedStreams::of(state_->device).any()) return run(*state_);
    log(LogLevel::kError,
        "nccl: there is no thread to end a communicator on cuda:{} when the CUDA graphs with its "
        "operations are destroyed and no stream is blocked; it is left behind",
        state_->device);
  }
}

void CommunicatorEnd::run(State& state) noexcept {
  const Api& api = *state.api;
  const OnDevice on(state.device);
  state.graphs.wait_for_none(state.abort);
  if (!state.abort && finalize(state)) {
    give_back(state, api.CommDestroy, "ncclCommDestroy");
  } else {
    give_back(state, api.CommAbort, "ncclCommAbort");
  }
  state.over.store(true, std::memory_order_release);
}

// Destroys or aborts it. In a group the call returns when what is under way is told to end, and the
// end of the group frees.
void CommunicatorEnd::give_back(const State& state, ncclResult_t (*call)(ncclComm_t),
                                const char* name) {
  const Api& api = *state.api;
  const auto begins = [&] {
    const Status begun = api.status(api.GroupStart(), "ncclGroupStart", nullptr);
    warn(begun, "");
    return begun.ok();
  };
  if (api.version < kEndsWithGroups || !begins()) {
    std::optional<NoneBlocked> frees(std::in_place, state.device, kPatience);
    if (state.graphs.any()) frees.reset();  // NCCL waits for them first
    warn(api.status(call(state.comm), name, nullptr), "");
    return;
  }
  warn(api.status(call(state.comm), name, nullptr), "");
  state.graphs.wait_for_none(kNever);
  const NoneBlocked frees(state.device);
  warn(api.status(api.GroupEnd(), "ncclGroupEnd", nullptr), "");
}

// True: it can be destroyed.
bool CommunicatorEnd::finalize(const State& state) {
  constexpr char kConsequence[] = "; the communicator is aborted";
  const Api& api = *state.api;
  const auto in_progress = [&](ncclResult_t* now) {
    const ncclResult_t asked = api.CommGetAsyncError(state.comm, now);
    if (asked != ncclSuccess) *now = asked;
    return *now == ncclInProgress;
  };
  ncclResult_t now = ncclSuccess;
  // What has failed, or still makes something, cannot be ended in order.
  if (in_progress(&now) || now != ncclSuccess) return false;
  const ncclResult_t begun = api.CommFinalize(state.comm);
  if (begun != ncclSuccess && begun != ncclInProgress) {
    warn(api.status(begun, "ncclCommFinalize", state.comm), kConsequence);
    return false;
  }
  while (in_progress(&now)) {
    if (state.abort) return false;
    std::this_thread::sleep_for(kPause);
  }
  warn(api.status(now, "ncclCommFinalize", state.comm), kConsequence);
  return now == ncclSuccess;
}

}  // namespace sotto::nccl
