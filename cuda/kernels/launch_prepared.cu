#include <cstring>

#include "cuda/kernels/families.h"

namespace sotto::cuda {
namespace {

using Family = cudaError_t (*)(cudaStream_t, KernelId, uint32_t, const Params&);

// By number.
constexpr Family kFamilies[] = {
#define SOTTO_KERNEL(type, function, family) launch_##family,
#include "core/kernels/kernels.def"
};

Family family_of(KernelId id) {
  return id < KernelId::kCount ? kFamilies[static_cast<size_t>(id)] : nullptr;
}

template <class T>
const T* table_at(const void* tables, uint64_t offset) {
  return reinterpret_cast<const T*>(static_cast<const std::byte*>(tables) + offset);
}

void set_condition(const Condition& condition, Params* params) {
  params->predicate = condition.predicate;
  params->expect = condition.expect;
  params->paired_ran = condition.paired_ran;
}

}  // namespace

std::vector<const void*>& launched_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

cudaError_t launch_prepared(cudaStream_t stream, const PreparedKernel& prepared, const void* tables,
                            const Operands& operands, const Condition& condition) {
  if (prepared.blocks == 0) return cudaSuccess;
  const Family family = family_of(prepared.id);
  if (family == nullptr) return cudaErrorInvalidValue;
  Params params{};
  for (uint32_t k = 0; k < prepared.operands; ++k) params.operands[k].data = operands.data[k];
  if (tables != nullptr) {
    params.pieces = table_at<Piece>(tables, prepared.offsets.pieces);
    params.runs = table_at<Run>(tables, prepared.offsets.runs);
    params.work = table_at<Work>(tables, prepared.offsets.work);
    params.ranges = table_at<NormRange>(tables, prepared.offsets.ranges);
    params.sections = table_at<uint64_t>(tables, prepared.offsets.sections);
  }
  params.bytes = prepared.bytes;
  set_condition(condition, &params);
  std::memcpy(params.args, prepared.args, sizeof params.args);
  return family(stream, prepared.id, prepared.blocks, params);
}

cudaError_t launch_copy(cudaStream_t stream, void* dst, const void* src, uint64_t bytes,
                        const Condition& condition) {
  if (bytes == 0) return cudaSuccess;
  Params params{};
  params.operands[0].data = dst;
  params.operands[1].data = const_cast<void*>(src);
  params.bytes = bytes;
  set_condition(condition, &params);
  return launch_copy_bytes(stream, byte_blocks(bytes), params);
}

cudaError_t launch_count_up(cudaStream_t stream, uint32_t* word) {
  Params params{};
  params.operands[0].data = word;
  return launch_count(stream, params);
}

}  // namespace sotto::cuda
