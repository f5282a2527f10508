// PMIx: how Open MPI's mpirun talks with ranks. libpmix is opened when it is needed, never linked,
// and no header of it is needed: what is used of its ABI, the same in versions 2 to 5, stands here.
// Calls of an MPI library in the same process are counted together with these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/base/params.h"
#include "core/base/status.h"
#include "core/group/process_manager.h"

namespace sotto::pmix {

struct Proc {
  char job[256];  // namespace
  uint32_t rank;
};
inline constexpr uint32_t kAnyRank = UINT32_MAX - 1;  // PMIX_RANK_WILDCARD

struct Value {
  uint16_t type;
  union {
    bool flag;
    char* string;
    uint32_t number;
    uint64_t room[3];
  } data;
};
inline constexpr uint16_t kBool = 1, kString = 3, kUint32 = 14;

struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};

struct Api {
  std::string path;
  int (*init)(Proc* self, Info* info, size_t count) = nullptr;
  int (*finalize)(const Info* info, size_t count) = nullptr;
  int (*put)(uint8_t scope, const char* key, Value* value) = nullptr;
  int (*commit)() = nullptr;
  int (*fence)(const Proc* procs, size_t count, const Info* info, size_t infos) = nullptr;
  // The value is the caller's: free(), a string in it too.
  int (*get)(const Proc* proc, const char* key, const Info* info, size_t count,
             Value** value) = nullptr;
  const char* (*error_string)(int status) = nullptr;
};
inline constexpr uint8_t kGlobal = 3;  // the scope of what all ranks see

inline constexpr char kLibrary[] = "libpmix.so.2";
// UNSUPPORTED: there is no such library, or it lacks functions, whose names the text has.
Result<Api> load(const char* library = kLibrary);

// "PMIx (PMIX_NAMESPACE=1217921025)". INVALID_ARGUMENT: the variables of a PMIx server are missing.
Result<std::string> server_name(const Environment& environment);

// rank, size: as the environment has them. TIMEOUT: a call did not return in time; it is left to
// itself, on a thread of its own. TRANSPORT: a call failed; INVALID_ARGUMENT: the server has
// another rank or size. The clock lives longer.
Result<std::unique_ptr<ProcessManager>> open(const Api& api, std::string name, int32_t rank,
                                             int32_t size, const Clock& clock, Deadline deadline);

}  // namespace sotto::pmix
