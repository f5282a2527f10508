#include "transports/nccl/communicator.h"

#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "core/base/log.h"
#include "transports/nccl/cuda_calls.h"

namespace sotto::nccl {
namespace {

constexpr auto kFinalizePause = std::chrono::microseconds(20);
constexpr int64_t kAskUs = 1000;

// What every rank tells the others before the communicator is made.
struct Card {
  uint32_t code = 0;  // 0, or why this rank cannot
  int32_t version = 0;
  int32_t device = -1;
  uint32_t adopts = 0;
  uint32_t native = 0;
  char text[512] = {};
  ncclUniqueId id = {};  // rank 0's
};

// The structure of version 2.18, which every later one takes: nothing behind it is used.
ncclConfig_t config_218() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  constexpr size_t kAlignment = alignof(ncclConfig_t);
  constexpr size_t kEnd = offsetof(ncclConfig_t, trafficClass);
  config.size = (kEnd + kAlignment - 1) / kAlignment * kAlignment;
#endif
  config.version = NCCL_VERSION(2, 18, 0);
  config.blocking = 0;
  return config;
}

Status understand(const std::vector<std::string>& blobs, std::vector<Card>* cards) {
  for (size_t r = 0; r < blobs.size(); ++r) {
    if (blobs[r].size() != sizeof(Card))
      return error(Code::kProtocol, "rank {} has sent {} bytes to set up NCCL, {} expected", r,
                   blobs[r].size(), sizeof(Card));
    std::memcpy(&cards->emplace_back(), blobs[r].data(), sizeof(Card));
  }
  for (size_t r = 0; r < cards->size(); ++r) {
    const Card& card = (*cards)[r];
    if (card.code != 0)
      return Status(static_cast<Code>(card.code), fmt::format("rank {}: {}", r, card.text));
  }
  const Card& first = cards->front();
  for (size_t r = 0; r < cards->size(); ++r) {
    const Card& card = (*cards)[r];
    if (card.version != first.version) {
      return unsupported("rank {} has NCCL {}, rank 0 NCCL {}; all ranks need the same", r,
                         version_text(card.version), version_text(first.version));
    }
    if (card.native != first.native) {
      return invalid_argument("SOTTO_NCCL_NATIVE of rank {} is not that of rank 0", r);
    }
    if (card.adopts != first.adopts) {
      return invalid_argument(
          "rank {} gives a communicator of its own and rank {} does not; all ranks do, or none",
          card.adopts != 0 ? r : 0, card.adopts != 0 ? 0 : r);
    }
  }
  return ok_status();
}

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::make(const NcclOptions& options,
                                                         ncclComm_t adopted, ControlPlane& control,
                                                         Driver& driver, Deadline deadline) {
  Card mine;
  mine.adopts = adopted != nullptr ? 1 : 0;
  mine.native = options.native;
  std::unique_ptr<Communicator> made;
  const Status ready = [&]() -> Status {
    SOTTO_ASSIGN(std::shared_ptr<const Api> api, load(options.library));
    mine.version = api->version;
    made.reset(new Communicator(std::move(api), adopted != nullptr));
    if (adopted != nullptr) return made->adopt(adopted, control);
    SOTTO_TRY(cuda_status(cudaGetDevice(&made->device_), "cudaGetDevice"));
    if (control.rank() != 0) return ok_status();
    return made->api().status(made->api().GetUniqueId(&mine.id), "ncclGetUniqueId", nullptr);
  }();
  mine.code = static_cast<uint32_t>(ready.code());
  if (!ready.ok()) ready.text().copy(mine.text, sizeof mine.text - 1);
  if (made != nullptr) mine.device = made->device_;
  const std::string blob(reinterpret_cast<const char*>(&mine), sizeof mine);
  SOTTO_ASSIGN(const std::vector<std::string> blobs,
               control.all_gather("setting up NCCL", blob, driver, deadline));
  std::vector<Card> cards;
  SOTTO_TRY(understand(blobs, &cards));
  if (adopted == nullptr) SOTTO_TRY(made->init(cards[0].id, control, driver, deadline));
  return made;
}

Status Communicator::adopt(ncclComm_t comm, const ControlPlane& control) {
  int size = 0, rank = 0;
  SOTTO_TRY(api_->status(api_->CommCount(comm, &size), "ncclCommCount", comm));
  SOTTO_TRY(api_->status(api_->CommUserRank(comm, &rank), "ncclCommUserRank", comm));
  SOTTO_TRY(api_->status(api_->CommCuDevice(comm, &device_), "ncclCommCuDevice", comm));
  if (size != control.size() || rank != control.rank()) {
    return invalid_argument("the caller's communicator is rank {} of {}; rank {} of {} is needed",
                            rank, size, control.rank(), control.size());
  }
  comm_ = comm;
  return ok_status();
}

Status Communicator::init(const ncclUniqueId& id, const ControlPlane& control, Driver& driver,
                          Deadline deadline) {
  const OnDevice on(device_);
  SOTTO_TRY(on.status());
  ncclConfig_t config = config_218();
  const ncclResult_t begun =
      api_->CommInitRankConfig(&comm_, control.size(), id, control.rank(), &config);
  if (begun != ncclSuccess && begun != ncclInProgress) {
    const Status failed = api_->status(begun, "ncclCommInitRankConfig", nullptr);
    comm_ = nullptr;
    return failed;
  }
  ncclResult_t state = ncclInProgress;
  Status asked;
  const auto done = [&] {
    asked = api_->status(api_->CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
    return !asked.ok() || state != ncclInProgress || control.failure().has_value();
  };
  // NCCL tells nobody when it is done, so it is asked every millisecond.
  while (!done() && !deadline.passed(driver.clock()))
    driver.run_until(done, Deadline::in_us(driver.clock(), kAskUs));
  if (control.failure().has_value())
    asked = Status(control.failure()->code, control.failure()->text);
  if (asked.ok()) {
    asked = state == ncclInProgress
                ? error(Code::kTimeout, "ncclCommInitRankConfig of rank {} has not ended in time",
                        control.rank())
                : api_->status(state, "ncclCommInitRankConfig", comm_);
  }
  if (!asked.ok()) abort();
  return asked;
}

Communicator::~Communicator() {
  if (open() && !adopted_) abort();
}

Status Communicator::state(const char* call) const {
  // A status with a text of its own would be made at each look.
  static const Status* const in_progress = new Status(Code::kInProgress, "NCCL is in progress");
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_->CommGetAsyncError(comm_, &state);
  if (asked != ncclSuccess) return api_->status(asked, "ncclCommGetAsyncError", comm_);
  return state == ncclInProgress ? *in_progress : api_->status(state, call, comm_);
}

Status Communicator::check() const {
  const Status now = state("an operation of NCCL");
  return now.code() == Code::kInProgress ? ok_status() : now;
}

void Communicator::abort() {
  if (!open()) return;
  const OnDevice on(device_);
  const ncclResult_t aborted = api_->CommAbort(comm_);
  if (const Status status = api_->status(aborted, "ncclCommAbort", nullptr); !status.ok())
    log(LogLevel::kWarn, "{}", status.text());
  comm_ = nullptr;
}

Status Communicator::finalize(Deadline deadline, const Clock& clock) const {
  constexpr char kCall[] = "ncclCommFinalize";
  const ncclResult_t begun = api_->CommFinalize(comm_);
  if (begun != ncclInProgress) return api_->status(begun, kCall, comm_);
  for (;;) {
    const Status now = state(kCall);
    if (now.code() != Code::kInProgress) return now;
    if (deadline.passed(clock))
      return error(Code::kTimeout, "{} has not ended in the time that is left", kCall);
    std::this_thread::sleep_for(kFinalizePause);
  }
}

void Communicator::close(Deadline deadline, const Clock& clock) {
  if (!open()) return;
  if (adopted_) {
    comm_ = nullptr;
    return;
  }
  const OnDevice on(device_);
  if (const Status finalized = finalize(deadline, clock); !finalized.ok()) {
    log(LogLevel::kWarn, "{}; the communicator is aborted", finalized.text());
    abort();
    return;
  }
  const ncclResult_t destroyed = api_->CommDestroy(comm_);
  if (const Status status = api_->status(destroyed, "ncclCommDestroy", nullptr); !status.ok())
    log(LogLevel::kWarn, "{}", status.text());
  comm_ = nullptr;
}

}  // namespace sotto::nccl
