// Casts and blockwise integers: the reference.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_quant.h"

namespace sotto::scalar {

void quant_encode(const KernelCall& call) { run_quant_encode<ScalarQuant>(call); }
void quant_server(const KernelCall& call) { run_quant_server<ScalarQuant>(call); }
void quant_decode(const KernelCall& call) { run_quant_decode<ScalarQuant>(call); }

void quant_encode_undo(const KernelCall& call) {
  const auto& o = call.of<kernels::QuantEncodeUndo>();
  if (!call.paired_ran) return;
  const auto& a = call.arguments<QuantArgs>();
  float* e = o.e.flat<float>();
  const uint8_t* payload = o.payload.flat<const uint8_t>();
  const uint64_t block = codec_has_blocks(a.kind) ? a.block : kMaxQuantBlock;
  float values[kMaxQuantBlock];
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float* x = o.x.list<const float>(p.tensor) + p.offset;
    for (uint64_t first = 0; first < p.count;) {
      const uint64_t flat = p.flat + first;
      const uint64_t n = std::min(p.count - first, block - flat % block);
      decode_run<ScalarQuant>(a, payload, flat - a.base, n, values, false);
      for (uint64_t i = 0; i < n; ++i) {
        e[flat + i] = quant_undo(e[flat + i], values[i], x[first + i]);
      }
      first += n;
    }
  }
}

}  // namespace sotto::scalar
