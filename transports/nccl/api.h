// NCCL at run time: a table of the functions that the transport calls. Never linked, so that the
// library opens on machines without NCCL.
#pragma once

#include <nccl.h>

#include <memory>
#include <string>

#include "core/base/status.h"

namespace sotto::nccl {

// Every function that is used; all of them exist since version 2.18.
// clang-format off
#define SOTTO_NCCL_FUNCTIONS(F)                                  \
  F(GetVersion) F(GetUniqueId) F(GetErrorString) F(GetLastError) \
  F(CommInitRankConfig) F(CommFinalize) F(CommDestroy) F(CommAbort) \
  F(CommGetAsyncError) F(CommCount) F(CommUserRank) F(CommCuDevice) \
  F(GroupStart) F(GroupEnd) F(Send) F(Recv) \
  F(AllGather) F(Broadcast) F(ReduceScatter) F(AllReduce)
// clang-format on

struct Api {
#define SOTTO_NCCL_MEMBER(name) decltype(&nccl##name) name = nullptr;
  SOTTO_NCCL_FUNCTIONS(SOTTO_NCCL_MEMBER)
#undef SOTTO_NCCL_MEMBER
  int version = 0;   // NCCL's code: 22809 is 2.28.9
  std::string path;  // of the library that is bound
  // NCCL may register memory of captured operations with the other rank (NCCL_GRAPH_REGISTER).
  bool registers_captured = true;

  // OK, or TRANSPORT, PEER_LOST or DEVICE with the call, NCCL's text and its last warning.
  Status status(ncclResult_t result, const char* call, ncclComm_t comm) const;
};

// Opens the library at `path`. With an empty path: the one that the process has loaded (a
// framework's), else libnccl.so.2 where the system finds it. It stays loaded. UNSUPPORTED: there is
// none, or it is older than 2.18 or lacks functions, whose names the text has.
//
// NCCL reads its variables once. Where it was not loaded before, and the caller has not set it,
// NCCL_GRAPH_REGISTER is set to 0, for this process.
Result<std::shared_ptr<const Api>> load(const std::string& path);

// "2.28.9"
std::string version_text(int version);

}  // namespace sotto::nccl
