#include "core/cpu/kernel_table.h"

namespace sotto {

const KernelTable& scalar_kernels() {
  static const KernelTable table{
#define SOTTO_KERNEL(type, function, family) scalar::function,
#include "core/kernels/kernels.def"
  };
  return table;
}

}  // namespace sotto
