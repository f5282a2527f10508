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
      if (counts && read_indices<ScalarSparse>(b, payload + at, indices)) {
        const SparseValues values(b, payload + at);
        for (uint32_t j = 0; j < b.k; ++j) e[indices[j]] += values[j];
      }
      for (uint32_t i = 0; i < b.m; ++i) e[i] = sparse_undo(e[i], x[first + i], rho);
    });
  }
}

void sparse_squares(const KernelCall& call) {
  const auto& o = call.of<kernels::SparseSquares>();
  const auto& a = call.arguments<SparseArgs>();
  const auto* rows = o.rows.flat<const uint8_t>();
  uint16_t indices[kMaxSparseBlock];
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor || is_sent_dense(p)) continue;
    for_each_sparse_block(a, p, [&](const SparseBlock& b, uint64_t first, uint64_t at) {
      double* squares =
          o.squares.flat<double>() + sparse_block_number(a.settings, p, first) * a.world;
      for (uint32_t r = 0; r < a.world; ++r) {
        const uint8_t* row = rows + r * a.row_bytes + at;
        squares[r] = read_indices<ScalarSparse>(b, row, indices)
                         ? sum_of_squares(b, SparseValues(b, row))
                         : 0;
      }
    });
  }
}

void sparse_median(const KernelCall& call) {
  const auto& o = call.of<kernels::SparseMedian>();
  const auto& a = call.arguments<SparseMedianArgs>();
  const auto* squares = o.squares.flat<const double>();
  const auto* weights = o.weights.flat<const uint8_t>();
  for (const NormRange& range : std::span(a.ranges, a.n)) {
    float* norms = o.factors.flat<float>() + uint64_t{range.tensor} * a.world;
    for (uint32_t r = 0; r < a.world; ++r)
      norms[r] = norm_of_squares(squares + range.first_block * a.world + r, range.blocks, a.world);
    clip_to_median(norms, a.world,
                   [&](uint32_t r) { return takes_part(weights, a.weight_bytes, r); });
  }
}

}  // namespace sotto::scalar
