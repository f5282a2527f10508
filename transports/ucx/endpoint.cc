#include "transports/ucx/endpoint.h"

#include <cstdio>
#include <cstdlib>
#include <set>

namespace sotto::ucx {

Result<std::shared_ptr<Endpoint>> Endpoint::make(std::shared_ptr<Worker> worker,
                                                 std::string_view address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = Worker::on_lost;
  params.err_handler.arg = worker.get();
  ucp_ep_h endpoint = nullptr;
  const Api& api = worker->api();
  if (const ucs_status_t got = api.ucp_ep_create(worker->handle(), &params, &endpoint);
      got != UCS_OK) {
    return api.failed(got, "ucp_ep_create");
  }
  return std::make_shared<Endpoint>(std::move(worker), endpoint);
}

Endpoint::Endpoint(std::shared_ptr<Worker> worker, ucp_ep_h endpoint)
    : worker_(std::move(worker)), endpoint_(endpoint) {
  worker_->add(endpoint, *this);
}

// Not in UCX's orderly way, which waits for what the peer has to do.
void Endpoint::drop() {
  const ucp_ep_h endpoint = std::exchange(endpoint_, nullptr);
  if (endpoint == nullptr) return;
  worker_->remove(endpoint);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = worker_->api().ucp_ep_close_nbx(endpoint, &param);
  worker_->settle(request);
}

Status Endpoint::lost_text(const std::string& peer, ucs_status_t why) const {
  return error(Code::kPeerLost, "UCX has lost {}: {}", peer, worker_->api().ucs_status_string(why));
}

void* Endpoint::send(const Head& head, const void* data, uint64_t bytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return worker_->api().ucp_am_send_nbx(endpoint_, kMessageId, &head, sizeof head, data, bytes,
                                        &param);
}

std::string Endpoint::lanes() const {
  char* text = nullptr;
  size_t bytes = 0;
  std::FILE* const out = endpoint_ == nullptr ? nullptr : ::open_memstream(&text, &bytes);
  if (out == nullptr) return "?";
  worker_->api().ucp_ep_print_info(endpoint_, out);
  (void)std::fclose(out);
  // Of lines as "#   lane[0]:  2:tcp/eth0.0 md[2] -> ...".
  std::set<std::string> found;
  std::string_view rest(text, bytes);
  while (!rest.empty()) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    const size_t lane = line.find("lane[");
    if (lane == std::string_view::npos) continue;
    const size_t slash = line.find('/', lane);
    if (slash == std::string_view::npos) continue;
    const size_t begin = line.find_last_of(": ", slash) + 1;
    const size_t end = std::min(line.find_first_of(". ", slash), line.size());
    found.emplace(line.substr(begin, end - begin));
  }
  std::free(text);
  std::string lanes;
  for (const std::string& one : found) lanes += (lanes.empty() ? "" : " ") + one;
  return lanes.empty() ? "?" : lanes;
}

}  // namespace sotto::ucx
