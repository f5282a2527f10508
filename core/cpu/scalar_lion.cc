// Lion.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_first_moment.h"

namespace sotto::scalar {

void lion(const KernelCall& call) { run_first_moment<LionElement>(call); }
void lion_narrow(const KernelCall& call) { run_narrow_first_moment<LionElement>(call); }

}  // namespace sotto::scalar
