#include "core/base/host.h"

#include <sys/utsname.h>

#include <fstream>

namespace sotto {

std::string host_name() {
  utsname name;
  return ::uname(&name) == 0 ? name.nodename : "unknown host";
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace sotto
