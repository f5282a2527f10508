// Selections of blocks: the reference.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_sparse.h"

namespace sotto::scalar {

void sparse_encode(const KernelCall& call) { run_sparse_encode<ScalarSparse>(call); }
void sparse_mean(const KernelCall& call) { run_sparse_mean<ScalarSparse>(call); }

void sparse_encode_undo(const KernelCall& call) {
  const auto& o = call.of<kernels::SparseEncodeUndo>();
  if (!call.paired_ran) return;
  const auto& a = call.arguments<SparseArgs>();
  const auto* payload = o.payload.flat<const uint8_t>();
  const auto* weight = o.weight.flat<const float>();
  const bool counts = weight == nullptr || *weight != 0.0f;
  const auto rho = static_cast<float>(a.settings.error_decay);
  uint16_t indices[kMaxSparseBlock];
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor || is_sent_dense(p)) continue;
    const float* x = o.x.list<const float>(p.tensor) + p.offset;
    for_each_sparse_block(a, p, [&](const SparseBlock& b, uint64_t first, uint64_t at) {
      float* e = o.e.flat<float>() + p.flat + first;
      if (counts && read_indices(b, payload + at, indices)) {
        const SparseValues values(b, payload + at);
        for (uint32_t j = 0; j < b.k; ++j) e[indices[j]] += values[j];
      }
      for (uint32_t i = 0; i < b.m; ++i) e[i] = sparse_undo(e[i], x[first + i], rho);
    });
  }
}

}  // namespace sotto::scalar
