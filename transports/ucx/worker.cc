#include "transports/ucx/worker.h"

#include <algorithm>
#include <cstring>

#include "core/base/log.h"

namespace sotto::ucx {
namespace {

// Calls of ucp_worker_progress in one pass.
constexpr int kMostSteps = 64;
// How long UCX may take to end what was cancelled or closed.
constexpr int64_t kEndUs = 1'000'000;

}  // namespace

Result<std::shared_ptr<UcpContext>> UcpContext::make(std::shared_ptr<const Api> api) {
  auto made = std::make_shared<UcpContext>(std::move(api));
  const Api& calls = made->api();
  ucp_config_t* config = nullptr;
  if (const ucs_status_t got = calls.ucp_config_read(nullptr, nullptr, &config); got != UCS_OK)
    return calls.failed(got, "ucp_config_read");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  const ucs_status_t got =
      calls.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &made->context_);
  calls.ucp_config_release(config);
  if (got != UCS_OK) return calls.failed(got, "ucp_init");
  return made;
}

UcpContext::~UcpContext() {
  if (context_ != nullptr) api_->ucp_cleanup(context_);
}

Result<std::shared_ptr<Worker>> Worker::make(std::shared_ptr<UcpContext> context,
                                             std::shared_ptr<UcxPoller> poller) {
  auto worker = std::make_shared<Worker>(std::move(context), std::move(poller));
  SOTTO_TRY(worker->open());
  return worker;
}

Status Worker::open() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  if (const ucs_status_t got = api().ucp_worker_create(context_->handle(), &params, &worker_);
      got != UCS_OK) {
    return api().failed(got, "ucp_worker_create");
  }
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = on_message;
  handler.arg = this;
  if (const ucs_status_t got = api().ucp_worker_set_am_recv_handler(worker_, &handler);
      got != UCS_OK) {
    return api().failed(got, "ucp_worker_set_am_recv_handler");
  }
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  if (const ucs_status_t got = api().ucp_worker_get_address(worker_, &address, &bytes);
      got != UCS_OK) {
    return api().failed(got, "ucp_worker_get_address");
  }
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api().ucp_worker_release_address(worker_, address);
  int descriptor = -1;
  if (const ucs_status_t got = api().ucp_worker_get_efd(worker_, &descriptor); got != UCS_OK)
    return api().failed(got, "ucp_worker_get_efd");
  descriptor_ = descriptor;
  return poller_->add(*this);
}

Worker::~Worker() {
  if (descriptor_ >= 0) poller_->remove(*this);
  if (worker_ != nullptr) api().ucp_worker_destroy(worker_);
}

// ---- Receivers

void Worker::add(uint64_t number, Receiver& receiver) {
  receivers_.emplace(number, &receiver);
  served_.push_back(&receiver);
}

void Worker::remove(uint64_t number) {
  const auto found = receivers_.find(number);
  if (found == receivers_.end()) return;
  std::ranges::replace(served_, found->second, static_cast<Receiver*>(nullptr));
  if (!serving_) std::erase(served_, nullptr);
  receivers_.erase(found);
}

// What nobody waits for any more is refused, which frees its sender.
ucs_status_t Worker::on_message(void* self, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param) {
  Arrived arrived;
  if (header_bytes != sizeof arrived.head) return UCS_OK;
  std::memcpy(&arrived.head, header, sizeof arrived.head);
  Worker& worker = *static_cast<Worker*>(self);
  const auto found = worker.receivers_.find(arrived.head.to);
  if (found == worker.receivers_.end()) return UCS_OK;
  arrived.rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  arrived.bytes = bytes;
  arrived.data = bytes > 0 ? data : nullptr;
  arrived.held =
      bytes > 0 && (param->recv_attr & (UCP_AM_RECV_ATTR_FLAG_DATA | UCP_AM_RECV_ATTR_FLAG_RNDV));
  return found->second->take(std::move(arrived)) ? UCS_INPROGRESS : UCS_OK;
}

void Worker::on_lost(void* self, ucp_ep_h endpoint, ucs_status_t status) {
  const auto& endpoints = static_cast<Worker*>(self)->endpoints_;
  const auto found = endpoints.find(endpoint);
  if (found != endpoints.end()) found->second->lost(status);
}

// ---- Requests

void* Worker::receive(void* data, void* place, uint64_t bytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return api().ucp_am_recv_data_nbx(worker_, data, place, bytes, &param);
}

bool Worker::ended(void* request) const {
  return request == nullptr || UCS_PTR_IS_ERR(request) ||
         api().ucp_request_check_status(request) != UCS_INPROGRESS;
}

ucs_status_t Worker::look_at(void*& request) const {
  if (!ended(request)) return UCS_INPROGRESS;
  if (request == nullptr) return UCS_OK;
  const ucs_status_t status =
      UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : api().ucp_request_check_status(request);
  if (!UCS_PTR_IS_ERR(request)) api().ucp_request_free(request);
  request = nullptr;
  return status;
}

void Worker::settle(void*& request) {
  const Deadline end = Deadline::in_us(poller_->clock(), kEndUs);
  const bool outer = std::exchange(settling_, true);
  while (look_at(request) == UCS_INPROGRESS) {
    if (end.passed(poller_->clock())) {
      log(LogLevel::kError,
          "UCX has not ended a transfer {} s after its endpoint was closed by force, and may still "
          "access the memory of it",
          kEndUs / 1'000'000);
      break;
    }
    progress();
  }
  settling_ = outer;
}

// ---- Polling

bool Worker::arm() {
  if (std::ranges::any_of(served_, [](const Receiver* receiver) { return receiver->due(); }))
    return false;
  return api().ucp_worker_arm(worker_) != UCS_ERR_BUSY;
}

bool Worker::pass() {
  if (serving_) return false;
  serving_ = true;
  bool moved = false;
  for (int step = 0; step < kMostSteps && progress(); ++step) moved = true;
  for (size_t i = 0; i < served_.size(); ++i) {
    if (served_[i] != nullptr) moved |= served_[i]->serve();
  }
  serving_ = false;
  std::erase(served_, nullptr);
  return moved;
}

}  // namespace sotto::ucx
