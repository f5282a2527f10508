#include "transports/shm/segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

namespace sotto::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status system_error(const char* call) {
  return error(Code::kTransport, "{}: {}", call, std::strerror(errno));
}

// A signal interrupts it, and what was taken is given back: with a profiler's timer a long one
// would never end. So signals wait.
int take_pages(int fd, uint64_t bytes) {
  sigset_t all, before;
  ::sigfillset(&all);
  const bool held = ::pthread_sigmask(SIG_SETMASK, &all, &before) == 0;
  int failed;
  do {
    failed = ::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (failed == EINTR);
  if (held) ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return failed;
}

}  // namespace

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

// All pages are taken now: later the system could only end the process where it has none.
Result<Descriptor> Segment::make(uint64_t bytes) {
  // Beyond it the system sends SIGXFSZ, which ends processes.
  rlimit most{};
  if (::getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < bytes) {
    return error(Code::kTransport, "{} bytes of shared memory are more than RLIMIT_FSIZE, {}",
                 bytes, static_cast<uint64_t>(most.rlim_cur));
  }
  Descriptor memory(::memfd_create("sotto", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) return system_error("memfd_create");
  if (const int failed = take_pages(memory.get(), bytes); failed != 0)
    return error(Code::kTransport, "fallocate of {} bytes of shared memory: {}", bytes,
                 std::strerror(failed));
  if (::fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) return system_error("sealing of a memfd");
  return memory;
}

Result<Segment> Segment::map(const Descriptor& memory, uint64_t bytes) {
  const int seals = ::fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0) return system_error("seals of shared memory");
  if ((seals & kSeals) != kSeals)
    return error(Code::kTransport, "the shared memory could be resized: it has seals {:#x}", seals);
  struct stat found {};
  if (::fstat(memory.get(), &found) != 0) return system_error("fstat of shared memory");
  if (static_cast<uint64_t>(found.st_size) != bytes) {
    return error(Code::kTransport, "the shared memory has {} bytes, {} expected", found.st_size,
                 bytes);
  }
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (data == MAP_FAILED) return system_error("mmap of shared memory");
  return Segment(static_cast<uint8_t*>(data), bytes);
}

}  // namespace sotto::shm
