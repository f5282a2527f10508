#include "transports/ucx/endpoint.h"

#include <cstdio>
#include <cstdlib>
#include <set>

namespace sotto::ucx {

Endpoint::Endpoint(std::shared_ptr<Worker> worker, int32_t rank, int32_t peer)
    : worker_(std::move(worker)),
      rank_(rank),
      peer_(peer),
      greeting_{.to = number_for(rank, kCarriers)} {
  worker_->add(number_for(peer_, kCarriers), *this);
}

Endpoint::~Endpoint() {
  drop();
  worker_->remove(number_for(peer_, kCarriers));
}

void Endpoint::use() {
  if (!std::exchange(used_, true) && begins()) make();
}

void Endpoint::make() {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address_.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = Worker::on_lost;
  params.err_handler.arg = worker_.get();
  const Api& api = worker_->api();
  if (const ucs_status_t got = api.ucp_ep_create(worker_->handle(), &params, &endpoint_);
      got != UCS_OK) {
    endpoint_ = nullptr;
    lost_ = api.failed(got, "ucp_ep_create")
                .with_prefix(fmt::format("rank {} has no way to rank {}", rank_, peer_));
    return;
  }
  worker_->add(endpoint_, *this);
  request_ = send(greeting_, nullptr, 0);
}

bool Endpoint::take(Arrived /*arrived*/) {
  greeted_ = news_ = true;
  return false;
}

// True: messages can go.
bool Endpoint::serve() {
  const ucs_status_t greeting = worker_->look_at(request_);
  if (greeting != UCS_OK && greeting != UCS_INPROGRESS) lost(greeting);
  if (!due()) return false;
  news_ = false;
  used_ = true;
  if (endpoint_ == nullptr && usable()) make();
  return true;
}

void Endpoint::lost(ucs_status_t why) {
  if (lost_.ok()) lost_ = lost_text(why);
}

// Not in UCX's orderly way, which waits for what the peer has to do.
void Endpoint::drop() {
  closed_ = true;
  const ucp_ep_h endpoint = std::exchange(endpoint_, nullptr);
  if (endpoint == nullptr) return;
  worker_->remove(endpoint);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  void* request = worker_->api().ucp_ep_close_nbx(endpoint, &param);
  worker_->settle(request);
  worker_->settle(request_);
}

Status Endpoint::lost_text(ucs_status_t why) const {
  return error(Code::kPeerLost, "UCX has lost rank {}: {}", peer_,
               worker_->api().ucs_status_string(why));
}

void* Endpoint::send(const Head& head, const void* data, uint64_t bytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  if (in_one_piece(bytes)) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
  }
  return worker_->api().ucp_am_send_nbx(endpoint_, kMessageId, &head, sizeof head, data, bytes,
                                        &param);
}

bool Endpoint::turn_of(const MessageCarrier* carrier) {
  if (!over_socket()) return true;
  if (turn_ == nullptr) turn_ = carrier;
  return turn_ == carrier;
}

bool Endpoint::in_one_piece(uint64_t bytes) {
  return bytes > 0 && bytes <= worker_->api().socket_bytes && over_socket();
}

bool Endpoint::over_socket() {
  if (!over_socket_) {
    const std::string all = lanes();
    over_socket_ = worker_->api().socket_bytes > 0 && all.starts_with("tcp/") &&
                   all.find(' ') == std::string::npos;
  }
  return *over_socket_;
}

std::string Endpoint::lanes() const {
  if (endpoint_ == nullptr && !closed_) return "(connects when it is first used)";
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
