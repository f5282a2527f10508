#include "transports/nccl/api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string_view>

#include "core/base/environment.h"
#include "core/base/log.h"

namespace sotto::nccl {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
constexpr int kOldest = NCCL_VERSION(2, 18, 0);

constexpr char kGraphRegister[] = "NCCL_GRAPH_REGISTER";

struct Opened {
  void* handle;
  const char* how;
};

// A copy that this process has not loaded yet.
void* open_first(const char* path) {
  set_if_unset({{kGraphRegister, "0"}});
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

Result<Opened> open(const std::string& path) {
  if (!path.empty()) {
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle == nullptr) handle = open_first(path.c_str());
    if (handle != nullptr) return Opened{handle, "as SOTTO_NCCL_LIBRARY says"};
    return unsupported("NCCL cannot be opened at SOTTO_NCCL_LIBRARY={}: {}", path, dlerror());
  }
  if (void* handle = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); handle != nullptr)
    return Opened{handle, "loaded by this process before"};
  // A framework may contain NCCL instead of loading it.
  if (dlsym(RTLD_DEFAULT, "ncclGetUniqueId") != nullptr)
    return Opened{RTLD_DEFAULT, "part of this process"};
  if (void* handle = open_first(kSoname); handle != nullptr)
    return Opened{handle, "where the system finds it"};
  return unsupported(
      "NCCL was not found ({}); install it, load a framework that has it, or set "
      "SOTTO_NCCL_LIBRARY to the path of {}",
      dlerror(), kSoname);
}

std::string path_of(const void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return "an unknown file";
  return info.dli_fname;
}

}  // namespace

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Status Api::status(ncclResult_t result, const char* call, ncclComm_t comm) const {
  if (result == ncclSuccess) return ok_status();
  const char* last = GetLastError(comm);
  const Code code = result == ncclRemoteError          ? Code::kPeerLost
                    : result == ncclUnhandledCudaError ? Code::kDevice
                                                       : Code::kTransport;
  return Status(
      code, fmt::format("{}: {} ({}){}{}", call, GetErrorString(result), static_cast<int>(result),
                        last && *last ? "; NCCL says: " : "", last && *last ? last : ""));
}

Result<std::shared_ptr<const Api>> load(const std::string& path) {
  SOTTO_ASSIGN(const Opened opened, open(path));
  auto api = std::make_shared<Api>();
  api->GetVersion =
      reinterpret_cast<decltype(&ncclGetVersion)>(dlsym(opened.handle, "ncclGetVersion"));
  if (api->GetVersion == nullptr)
    return unsupported("{} is no NCCL: it has no ncclGetVersion", path.empty() ? kSoname : path);
  api->path = path_of(reinterpret_cast<const void*>(api->GetVersion));
  if (const ncclResult_t got = api->GetVersion(&api->version); got != ncclSuccess) {
    return error(Code::kTransport, "ncclGetVersion of {} fails with {}", api->path,
                 static_cast<int>(got));
  }
  if (api->version < kOldest) {
    return unsupported("NCCL {} at {} is too old; {} or later is needed",
                       version_text(api->version), api->path, version_text(kOldest));
  }
  const char* const registers = std::getenv(kGraphRegister);
  api->registers_captured = registers == nullptr || std::string_view(registers) != "0";
  std::string missing;
#define SOTTO_NCCL_LOOK_UP(name)                                                           \
  api->name = reinterpret_cast<decltype(&nccl##name)>(dlsym(opened.handle, "nccl" #name)); \
  if (api->name == nullptr) missing += missing.empty() ? "nccl" #name : ", nccl" #name;
  SOTTO_NCCL_FUNCTIONS(SOTTO_NCCL_LOOK_UP)
#undef SOTTO_NCCL_LOOK_UP
  if (!missing.empty()) {
    return unsupported("NCCL {} at {} lacks {}", version_text(api->version), api->path, missing);
  }
  log(LogLevel::kInfo, "NCCL {} from {} ({})", version_text(api->version), api->path, opened.how);
  return std::shared_ptr<const Api>(std::move(api));
}

}  // namespace sotto::nccl
