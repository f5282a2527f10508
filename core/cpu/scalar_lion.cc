// Lion.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_first_moment.h"

namespace sotto::scalar {

void lion(const KernelCall& call) { run_first_moment<LionElement>(call); }
void lion_low_precision(const KernelCall& call) {
  run_low_precision_first_moment<LionElement>(call);
}

}  // namespace sotto::scalar
