#include "transports/nccl/communicator.h"

#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/base/text.h"
#include "cuda/calls/cuda_calls.h"
#include "transports/nccl/ask_until.h"

namespace sotto::nccl {
namespace {

constexpr char kInit[] = "ncclCommInitRankConfig";

// A rank's part in making a communicator, as all ranks have it.
struct InitRecord {
  uint32_t code = 0;  // 0: ready; else why this rank cannot
  int32_t version = 0;
  int32_t device = -1;
  uint32_t adopts = 0;
  uint32_t native = 0;
  char text[512] = {};
  ncclUniqueId id = {};  // rank 0's
};

Status new_id(const Api& api, ncclUniqueId* id) {
  return api.status(api.GetUniqueId(id), "ncclGetUniqueId", nullptr);
}

// ready: OK, or why this rank cannot.
std::string blob_of(InitRecord record, const Status& ready) {
  record.code = static_cast<uint32_t>(ready.code());
  if (!ready.ok()) ready.text().copy(record.text, sizeof record.text - 1);
  return std::string(reinterpret_cast<const char*>(&record), sizeof record);
}

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

Status understand(const std::vector<std::string>& blobs, std::vector<InitRecord>* records) {
  for (size_t r = 0; r < blobs.size(); ++r) {
    if (blobs[r].size() != sizeof(InitRecord))
      return error(Code::kProtocol, "rank {} has sent {} to set up NCCL, {} expected", r,
                   counted(blobs[r].size(), "byte"), sizeof(InitRecord));
    InitRecord& record = records->emplace_back();
    std::memcpy(&record, blobs[r].data(), sizeof(InitRecord));
    record.text[sizeof record.text - 1] = 0;  // another rank's bytes may have no end
  }
  for (size_t r = 0; r < records->size(); ++r) {
    const InitRecord& record = (*records)[r];
    if (record.code != 0)
      return Status(static_cast<Code>(record.code), fmt::format("rank {}: {}", r, record.text));
  }
  const InitRecord& first = records->front();
  for (size_t r = 0; r < records->size(); ++r) {
    const InitRecord& record = (*records)[r];
    if (record.version != first.version) {
      return unsupported("rank {} has NCCL {}, rank 0 NCCL {}; all ranks need the same", r,
                         version_text(record.version), version_text(first.version));
    }
    if (record.native != first.native) {
      return invalid_argument("SOTTO_NCCL_NATIVE of rank {} is not that of rank 0", r);
    }
    if (record.adopts != first.adopts) {
      return invalid_argument(
          "rank {} gives a communicator of its own and rank {} does not; all ranks do, or none",
          record.adopts != 0 ? r : 0, record.adopts != 0 ? 0 : r);
    }
  }
  return ok_status();
}

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::make(const NcclOptions& options,
                                                         ncclComm_t adopted, ControlPlane& control,
                                                         Driver& driver, Deadline deadline) {
  InitRecord mine;
  mine.adopts = adopted != nullptr ? 1 : 0;
  mine.native = options.native;
  std::unique_ptr<Communicator> made;
  const Status ready = [&]() -> Status {
    SOTTO_ASSIGN(std::shared_ptr<const Api> api, load(options.library));
    mine.version = api->version;
    made.reset(
        new Communicator(std::move(api), adopted != nullptr, control.rank(), control.size()));
    if (adopted != nullptr) return made->adopt(adopted);
    SOTTO_TRY(cuda_status(cudaGetDevice(&made->device_), "cudaGetDevice"));
    return control.rank() == 0 ? new_id(made->api(), &mine.id) : ok_status();
  }();
  if (made != nullptr) mine.device = made->device_;
  SOTTO_ASSIGN(const std::vector<std::string> blobs,
               control.all_gather("setting up NCCL", blob_of(mine, ready), driver, deadline));
  std::vector<InitRecord> records;
  SOTTO_TRY(understand(blobs, &records));
  if (adopted != nullptr) return made;
  SOTTO_TRY(made->init(records[0].id, control, driver, deadline));
  return made;
}

std::string Communicator::invite(bool first) const {
  InitRecord mine;
  mine.version = api_->version;
  mine.device = device_;
  const OnDevice on(device_);
  return blob_of(mine, first ? new_id(*api_, &mine.id) : ok_status());
}

Result<std::unique_ptr<Communicator>> Communicator::join(
    int32_t rank, const std::vector<std::string>& invitations, const ControlPlane& control,
    Driver& driver, Deadline deadline) const {
  std::vector<InitRecord> records;
  SOTTO_TRY(understand(invitations, &records));
  std::unique_ptr<Communicator> made(
      new Communicator(api_, false, rank, static_cast<int32_t>(records.size())));
  made->device_ = device_;
  SOTTO_TRY(made->init(records[0].id, control, driver, deadline));
  return made;
}

Status Communicator::adopt(ncclComm_t comm) {
  int size = 0, rank = 0;
  SOTTO_TRY(api_->status(api_->CommCount(comm, &size), "ncclCommCount", comm));
  SOTTO_TRY(api_->status(api_->CommUserRank(comm, &rank), "ncclCommUserRank", comm));
  SOTTO_TRY(api_->status(api_->CommCuDevice(comm, &device_), "ncclCommCuDevice", comm));
  if (size != size_ || rank != rank_) {
    return invalid_argument("the caller's communicator is rank {} of {}; rank {} of {} is needed",
                            rank, size, rank_, size_);
  }
  comm_ = comm;
  return ok_status();
}

Status Communicator::init(const ncclUniqueId& id, const ControlPlane& control, Driver& driver,
                          Deadline deadline) {
  const OnDevice on(device_);
  SOTTO_TRY(on.status());
  ncclConfig_t config = config_218();
  const ncclResult_t begun = api_->CommInitRankConfig(&comm_, size_, id, rank_, &config);
  if (begun != ncclSuccess && begun != ncclInProgress) {
    comm_ = nullptr;
    return api_->status(begun, kInit, nullptr);
  }
  Status now;
  const auto done = [&] {
    now = state(kInit);
    return now.code() != Code::kInProgress || control.failure().has_value();
  };
  ask_until(done, driver, deadline);
  if (control.failure().has_value()) now = Status(control.failure()->code, control.failure()->text);
  if (now.code() == Code::kInProgress)
    now = error(Code::kTimeout, "{} of rank {} has not ended in time", kInit, rank_);
  if (now.ok()) return now;
  abort();
  ask_until(
      [this] { return ended(); }, driver,
      Deadline::in_us(driver.clock(), std::chrono::microseconds(CommunicatorEnd::kLimit).count()));
  return now;
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

Status Communicator::queued(ncclResult_t result, const char* call) const {
  return result == ncclInProgress ? ok_status() : api_->status(result, call, comm_);
}

Status Communicator::check() const {
  const Status now = state("an operation of NCCL");
  return now.code() == Code::kInProgress ? ok_status() : now;
}

CommunicatorEnd& Communicator::give_up_handle() {
  end_ = std::make_unique<CommunicatorEnd>(api_, std::exchange(comm_, nullptr), device_, graphs_);
  return *end_;
}

void Communicator::abort() {
  if (open()) {
    give_up_handle().abort();
  } else if (end_ != nullptr) {
    end_->abort();
  }
}

void Communicator::end() {
  if (!open()) return;
  if (adopted_) {
    comm_ = nullptr;
  } else {
    give_up_handle().begin();
  }
}

bool Communicator::over() const { return !open() && (end_ == nullptr || end_->over()); }

bool Communicator::ended() const { return over() || (end_ != nullptr && end_->left_to_graphs()); }

}  // namespace sotto::nccl
