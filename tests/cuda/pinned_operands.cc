#include "cuda/kernels/prepare.h"
#include "tests/cuda/pinned_new.h"

namespace sotto::test {
namespace {

Status pinned(const void* memory, const std::string& what) {
  if (memory == nullptr || is_pinned(memory)) return ok_status();
  return error(Code::kInternal, "{} is at {}, which is not pinned: a CUDA device cannot reach it",
               what, memory);
}

}  // namespace

Status pinned_operands(const KernelCall& call) {
  SOTTO_ASSIGN(const cuda::PreparedKernel prepared, cuda::prepare(call));
  SOTTO_TRY(pinned(call.predicate, "the predicate"));
  for (uint32_t k = 0; k < call.operands.size(); ++k) {
    const Operand& operand = call.operands[k];
    const std::string name = fmt::format("operand {}", k);
    SOTTO_TRY(pinned(operand.data, name));
    if (operand.data == nullptr || (prepared.lists >> k & 1) == 0) continue;
    for (uint32_t t = 0; t < prepared.list_tensors; ++t)
      SOTTO_TRY(pinned(operand.list<void>(t), fmt::format("tensor {} of {}", t, name)));
  }
  return ok_status();
}

}  // namespace sotto::test
