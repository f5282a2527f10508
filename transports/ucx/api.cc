#include "transports/ucx/api.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/base/environment.h"
#include "core/base/log.h"
#include "transports/ucx/caps.h"

namespace sotto::ucx {
namespace {

constexpr char kSoname[] = "libucp.so.0";
constexpr unsigned kOldestMajor = 1, kOldestMinor = 13;

// UCX's sockets take a message in pieces of so many bytes: a frame of the usual size is one piece,
// with all headers around it.
constexpr char kPieceName[] = "UCX_TCP_RX_SEG_SIZE", kPiece[] = "132k";
static_assert(kCaps.segment_bytes == 128 * 1024);
// What waits in a socket delays small messages behind it. The kernel doubles the number.
constexpr char kBuffer[] = "128k";

struct Opened {
  void* handle;
  const char* how;
};

// A copy that this process has not loaded yet.
void* open_first(const char* path) {
  set_if_unset({{"UCX_HANDLE_ERRORS", "none"},
                {"UCX_ERROR_SIGNALS", ""},
                {"UCX_MEM_MMAP_HOOK_MODE", "none"},
                {kPieceName, kPiece},
                {"UCX_TCP_SNDBUF", kBuffer}});
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

Result<Opened> open(const std::string& path) {
  const char* const name = path.empty() ? kSoname : path.c_str();
  if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); handle != nullptr)
    return Opened{handle, "loaded by this process before"};
  void* const handle = open_first(name);
  if (handle == nullptr && !path.empty())
    return unsupported("UCX cannot be opened at SOTTO_UCX_LIBRARY={}: {}", path, dlerror());
  if (handle == nullptr) {
    return unsupported(
        "UCX was not found ({}); install it (libucx0), or set SOTTO_UCX_LIBRARY to the path of {}",
        dlerror(), kSoname);
  }
  return Opened{handle, path.empty() ? "where the system finds it" : "as SOTTO_UCX_LIBRARY says"};
}

std::string path_of(const void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return "an unknown file";
  return info.dli_fname;
}

}  // namespace

Status Api::failed(ucs_status_t status, const char* call) const {
  const char* const lanes = std::getenv("UCX_TLS");
  std::string limits = fmt::format("UCX_TLS is {}", lanes == nullptr ? "not set" : lanes);
  if (const char* const devices = std::getenv("UCX_NET_DEVICES"); devices != nullptr)
    limits += fmt::format(", UCX_NET_DEVICES is {}", devices);
  return error(Code::kTransport, "{} ({}): {} ({})", call, limits, ucs_status_string(status),
               static_cast<int>(status));
}

Result<std::shared_ptr<const Api>> load(const std::string& path) {
  SOTTO_ASSIGN(const Opened opened, open(path));
  auto api = std::make_shared<Api>();
  std::string missing;
#define SOTTO_UCX_LOOK_UP(name)                                                 \
  api->name = reinterpret_cast<decltype(&::name)>(dlsym(opened.handle, #name)); \
  if (api->name == nullptr) missing += missing.empty() ? #name : ", " #name;
  SOTTO_UCX_FUNCTIONS(SOTTO_UCX_LOOK_UP)
#undef SOTTO_UCX_LOOK_UP
  if (api->ucp_get_version == nullptr)
    return unsupported("{} is no UCX: it has no ucp_get_version", path.empty() ? kSoname : path);
  api->path = path_of(reinterpret_cast<const void*>(api->ucp_get_version));
  unsigned major = 0, minor = 0, release = 0;
  api->ucp_get_version(&major, &minor, &release);
  api->version = fmt::format("{}.{}.{}", major, minor, release);
  if (major != kOldestMajor || minor < kOldestMinor) {
    return unsupported("UCX {} at {} cannot be used; {}.{} or a later {}.x is needed", api->version,
                       api->path, kOldestMajor, kOldestMinor, kOldestMajor);
  }
  if (!missing.empty())
    return unsupported("UCX {} at {} lacks {}", api->version, api->path, missing);
  const char* const piece = std::getenv(kPieceName);
  if (piece != nullptr && std::string_view(piece) == kPiece)
    api->socket_bytes = kCaps.segment_bytes;
  log(LogLevel::kInfo, "UCX {} from {} ({})", api->version, api->path, opened.how);
  return std::shared_ptr<const Api>(std::move(api));
}

}  // namespace sotto::ucx
