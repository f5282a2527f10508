// UCX at run time: a table of the functions that the transport calls. Never linked, so that the
// library opens on machines without UCX.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "core/base/status.h"

namespace sotto::ucx {

// Every function that is used; all of them exist since version 1.13.
// clang-format off
#define SOTTO_UCX_FUNCTIONS(F)                                                              \
  F(ucp_get_version) F(ucp_config_read) F(ucp_config_release) F(ucp_init_version)          \
  F(ucp_cleanup) F(ucp_worker_create) F(ucp_worker_destroy) F(ucp_worker_get_address)      \
  F(ucp_worker_release_address) F(ucp_worker_get_efd) F(ucp_worker_arm)                    \
  F(ucp_worker_signal) F(ucp_worker_progress) F(ucp_worker_set_am_recv_handler)            \
  F(ucp_ep_create) F(ucp_ep_close_nbx) F(ucp_ep_print_info) F(ucp_am_send_nbx)             \
  F(ucp_am_recv_data_nbx) F(ucp_am_data_release) F(ucp_request_check_status)               \
  F(ucp_request_free) F(ucs_status_string)
// clang-format on

struct Api {
#define SOTTO_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  SOTTO_UCX_FUNCTIONS(SOTTO_UCX_MEMBER)
#undef SOTTO_UCX_MEMBER
  std::string version;  // "1.13.1"
  std::string path;     // of the library that is bound
  // Payloads up to this size pass UCX's sockets in one piece. 0: UCX is not set up so.
  uint64_t socket_bytes = 0;

  // TRANSPORT with the call, what UCX may use, and UCX's text.
  Status failed(ucs_status_t status, const char* call) const;
};

// Opens the library at `path`. With an empty path: the one that the process has loaded, else
// libucp.so.0 where the system finds it. It stays loaded. UNSUPPORTED: there is none, or it is
// older than 1.13 or lacks functions, whose names the text has.
//
// UCX reads variables when it is loaded. Where it was not loaded before, and the caller has not set
// them, UCX_HANDLE_ERRORS, UCX_ERROR_SIGNALS and UCX_MEM_MMAP_HOOK_MODE are set, for this process,
// so that it takes no signal of the process and patches no function of it, and UCX_TCP_RX_SEG_SIZE
// and UCX_TCP_SNDBUF, for its sockets.
Result<std::shared_ptr<const Api>> load(const std::string& path);

}  // namespace sotto::ucx
