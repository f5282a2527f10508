// The kernel table: every computation that a plan may contain, named by id, with its operands,
// arguments and exact arithmetic. A device supplies the kernels (core/cpu for the CPU); builders
// and optimizers are written once, as sequences of these. Nobody above this file asks which device
// runs them.
//
// Common rules
//  - float32 element arithmetic, one rounding per written operation, no fused multiply-add,
//  subnormals kept. The order
//    of operations is the one written here; every device, SIMD target, thread count and segment
//    size gives the same bits.
//  - sgn(x) = +1 if x >= 0 else -1 (so -0 is +). Bits are packed most significant first: element i
//  of a bit array is
//    byte i / 8, bit 7 - i % 8. Bit 1 means +scale.
//  - Bulk kernels work on pieces (below). Distinct pieces of one call never overlap in their
//  outputs, are sorted by
//    `block` where block sums are made, and a norm block never spans two calls. A call may
//    therefore be cut between norm blocks, over threads or into several calls, without changing a
//    bit.
//  - Norms: blocks of kNormBlock elements; inside a block, lane (position % 64) adds fl(x*x) (l1:
//  |x|) in float32 in
//    ascending position; lanes are folded by halves 32, 16, .. 1 (lane j += lane j + h); the
//    block's sum is a float32. Blocks are then added in float64 in ascending order. Elements that
//    take no part (masked, padding) add nothing; every block that a piece touches, a padding piece
//    too, gets its sum (or maximum), so the arrays have room for all of them.
//  - Where a kernel writes bits, norm blocks start at multiples of 8 bits (chunks do): calls and
//  threads share no byte.
//  - A NaN is a NaN: its sign and payload are not specified, except in results of kReduce.
//  - A kernel with a predicate runs only if *predicate == expect when the device reaches it.
//  - "list" operands are arrays of pointers, one per tensor, indexed by Piece::tensor. "flat"
//  operands are contiguous
//    and indexed by Piece::flat minus the base given in the arguments. An optional operand may be
//    null.
//  - "source" operands are lists of float32, float16 or bfloat16, as `source` in the arguments
//  says. Elements of 16 bits are widened, which is exact; then everything is float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/codec.h"
#include "core/base/dtype.h"
#include "core/base/host_device.h"
#include "core/base/narrow_state.h"

namespace sotto {

inline constexpr uint64_t kNormBlock = 8192;  // elements
inline constexpr uint64_t kNormLanes = 64;
inline constexpr uint32_t kNoTensor = 0xffffffffu;
inline constexpr uint64_t kStateBlocksPerNormBlock = kNormBlock / kStateBlock;

enum class ReduceOp : uint8_t { kSum = 1, kMean = 2, kMin = 3, kMax = 4, kProd = 5, kBitOr = 6 };

// A run of consecutive elements of one tensor, inside one chunk of one compression instance.
struct Piece {
  uint64_t flat = 0;    // index of the first element in the flat space of the buffer
  uint64_t offset = 0;  // index of the first element in its tensor
  uint64_t target =
      0;  // index in the output tensor; differs from offset in reduce-scatter and all-gather only
  uint64_t count = 0;  // elements
  uint64_t block =
      0;              // norm block that holds the first element: index into the array of block sums
  uint32_t lane = 0;  // position of the first element in that block, 0 .. kNormBlock - 1
  uint32_t tensor =
      0;  // index into list operands; kNoTensor: padding (bits become 1, nothing else is touched)
  uint32_t scale = 0;  // compression instance: index of the worker scale and the server scale
  uint32_t chunk = 0;  // server that owns the elements
  uint32_t group = 0;  // parameter group: index into GroupScalars
  // Where the scale of the elements stands: for a server the index in one message of its section,
  // else the index in the message area, of the scale that `chunk` sends.
  uint32_t message = 0;
};

// A scale message, one per rank: float32 scale of every instance of a section, then one uint32 of
// flags. The messages of all ranks lie one after the other; those of all sections are the message
// area.
inline constexpr uint32_t kFlagNonfinite = 1;
constexpr uint64_t scale_message_bytes(uint64_t instances) { return 4 * instances + 4; }

// Numbers of one parameter group in one step; written by the host before the step starts, read by
// kernels.
struct GroupScalars {
  double lr = 0;         // learning rate of this step
  double lamb_lr = 0;    // LAMB: lr, times sqrt(1 - b2^t) / (1 - b1^t) with bias correction
  double max_coeff = 0;  // LAMB trust ratio bounds
  double min_coeff = 0;
  double coeff_beta = 0;  // 1-bit LAMB
  double factor_max = 0;
  double factor_min = 0;
  double factor_threshold = 0;
  float b1 = 0, one_minus_b1 = 0, b2 = 0, one_minus_b2 = 0;
  float eps = 0;
  float weight_decay = 0;  // 0: none
  float c1 = 1, c2 = 1;    // Adam bias corrections 1 - b1^t, 1 - b2^t (1 without)
  float lr_sum = 0;  // 0/1 Adam: learning rates since the last synchronisation, this one's too
  float anchor_decay = 1;  // 0/1 Adam: product of 1 - lr * wd over the same steps
  uint32_t eps_inside_sqrt = 0;
  uint32_t decoupled =
      1;  // Adam: 1 = weight decay in the update (AdamW), 0 = added to the gradient (L2)
};

// Per-tensor numbers of 1-bit LAMB that live across steps.
struct TensorState {
  double c_avg = 0;  // moving average of the trust ratio
  double last_factor = 1;
  double scaling_coeff = 1;
};

// Per-tensor numbers of one step: written by the scalar kernels, read by the update and by reports.
struct TensorStep {
  float step_size = 0;  // what the update is multiplied with
  uint32_t reserved = 0;
  double trust_ratio = 0;  // LAMB: clamped ratio; 1-bit LAMB compressed: c_avg * factor
  double factor = 1;       // 1-bit LAMB compressed
};

// A norm over a range of blocks: of an instance, of a server's chunk of it, or of a tensor.
struct NormRange {
  uint64_t first_block = 0;
  uint64_t blocks = 0;
  uint64_t count = 0;   // elements when nothing is masked
  uint32_t group = 0;   // per-tensor ranges: parameter group
  uint32_t tensor = 0;  // per-tensor ranges: index into TensorState and TensorStep
};

enum class KernelId : uint16_t {
  // bytes[0..n) = value.  [0] w flat bytes.  FillArgs
  kFill,
  // flat <- tensors.  [0] r list  [1] w flat.  PackArgs
  kPack,
  // tensors[target] <- flat.  [0] r flat  [1] w list.  PackArgs
  kUnpack,
  // y = narrow(widen(x) * factor): the product in float32, one rounding to a 16-bit `to` (nearest
  // even; a NaN stays one). `from` and `to` are float32, float16 or bfloat16.
  // [0] r x (list)  [1] w y (list).  ConvertArgs
  kConvert,
  // Gradients of one more micro-batch: sum = (sum + x) * factor, or x * factor if it is the first.
  // [0] r x (source)  [1] rw sum (list float32)  [2] r factor (double, rounded to float32;
  // optional:
  // 1).  AccumulateArgs
  kAccumulate,
  // Reduction over ranks in ascending rank order: acc = x_0; acc = acc op x_1; ... Floats of 16
  // bits: acc is float32 and is
  // rounded once at the end. mean: the sum / world at the end (integers: towards 0). min and max:
  // NaN if any rank has one; of +0
  // and -0 the first met stays. A NaN result is the positive quiet NaN without payload. Sums and
  // products of integers wrap around. bit_or: integers only.
  // [0] r own (list or flat)  [1] r rows: row s at s * row_stride elements, row `own_rank` unused
  // [2] w out (list at
  // `target`, or flat)  [3] rw flags, optional: uint32 |= kFlagNonfinite if a result is not finite.
  // ReduceArgs
  kReduce,

  // 1-bit encoder (specification 1.1 steps 1-4), residual deferred: c holds what was encoded, S_old
  // its scale.
  //   x' = isfinite(x) ? x : 0 (and flags |= kFlagNonfinite);  e = c - (c >= 0 ? S_old : -S_old);
  //   c = x' + e;
  //   bit = c >= 0; block sum += c*c (l1: |c|).   Masked: c = 0, bit 1.   Padding: bit 1.
  // [0] r x (source)  [1] rw c (flat)  [2] r S_old (float32 per instance)  [3] w bits (bit
  // piece.flat - bits_base)
  // [4] w block sums (float32)  [5] r valid bits (flat, base 0), optional  [6] rw flags (uint32)
  // [7] r coefficient (float32, x counts times it), optional.  EncodeArgs
  kOnebitEncode,
  // Takes an encoding back. call.paired_ran (this range was encoded): c = isfinite(c) ? c - x' : 0,
  // else c = e as above, and the result does not depend on [0], which a device does not read then:
  // the caller's stream may not have written it yet. Masked: c = 0. Operands and arguments of
  // kOnebitEncode; [3], [4] and [6] are not touched.
  kOnebitEncodeUndo,
  // Encoder of 1-bit LAMB: x = ((b1*m + (1-b1)*g') * s), g' = g * clip (clip null: g), s =
  // float(scaling_coeff); then as
  // kOnebitEncode. m comes from floats ([1]) or from bits ([2], [3]): m = bit ? M : -M, M = R / s,
  // R number
  // `message` of [3]. Masked elements have m = 0.
  // identity = 1 (one rank): nothing is encoded; [4] receives x / s (0 where masked; a result that
  // is not finite raises the
  // flag and is stored as 0); [5] - [7] are null.
  // [0] r g (source)  [1] r m (flat), optional  [2] r old bits (flat, base 0), optional  [3] r old
  // scale messages, optional
  // [4] rw c (flat)  [5] r S_old  [6] w bits  [7] w block sums  [8] r valid, optional  [9] rw flags
  // [10] r GroupScalars[]  [11] r TensorState[]  [12] r clip coefficient (float32), optional.
  // EncodeArgs
  kOnebitLambEncode,
  // As kOnebitEncodeUndo, x as in kOnebitLambEncode, whose operands and arguments it has.
  kOnebitLambEncodeUndo,
  // Scales from block sums: l2: float(sqrt(sum / n)), l1: float(sum / n); 0 if n = 0. A scale that
  // is not finite raises
  // the flag and is 0 in both outputs. Writes the scales and this rank's scale message with the
  // flags.
  // [0] r block sums  [1] r valid count per range (uint64)  [2] w scales (float32 per range)  [3] w
  // message
  // [4] rw flags.  NormArgs
  kNormFinish,
  // Server (specification 1.1 steps 5-8, order of 1.6): t_r = fl(S_r * fl(1/W)); a = sum of +-t_r
  // in groups of 8 ranks;
  //   a = a + (c - (c >= 0 ? R_old : -R_old));  c = a;  bit = a >= 0;  block sum += a*a (l1: |a|).
  //   Masked: c = 0, bit 1.
  // Piece::flat counts from the start of this rank's chunk.
  // [0] r rows of bits: row r at r * row_bytes  [1] r scale messages of all ranks for the section
  // [2] r c (flat)  [3] r R_old  [4] w bits  [5] w block sums  [6] r valid (bit piece.flat +
  // valid_base), optional  [7] w the new c (flat), which may be [2].  ServerArgs
  kOnebitServer,
  // y = bit ? R : -R, 0 where masked (step 10).  R is number `message` of [1].
  // [0] r bits (flat, base 0)  [1] r message area  [2] w y (list float32 at `target`)  [3] r
  // valid, optional.
  kOnebitDecode,
  // Encoder of casts and of blocks. x' = isfinite(x) ? x : 0 (and flags |= kFlagNonfinite);
  // c = x' + e (without residual: x'; padding: 0); code and value v of c as below; e = c - v.
  //   bf16, fp16: c rounded to nearest even; if that is not finite: flag, code 0.
  //   int8 (L = 127), int4 (L = 7), by blocks of the flat space: a = max |c|; a block with a <
  //   2^-120 has scale and codes 0, so has one where fl(s*L) is not finite, which raises the flag;
  //   else s = fl(a * fl(1/L)), code q = c * fl(L/a) rounded to nearest even, within +-L,
  //   v = fl(q*s). A unit is the codes and then s.
  // A call has whole blocks; where a block has several pieces they lie one after the other.
  // [0] r x (list float32)  [1] rw e (flat), null without residual  [2] w payload (unit of flat
  // element QuantArgs::base first)  [3] rw flags.  QuantArgs
  kQuantEncode,
  // Takes an encoding back if call.paired_ran: c = e + v; e = isfinite(c) ? c - x' : 0.
  // [0] r x (list)  [1] rw e (flat)  [2] r payload  [3] not touched.  QuantArgs
  kQuantEncodeUndo,
  // Server of the same: t_r = fl(v_r * fl(1/W)) (int8, int4: fl(q_r * fl(s_r * fl(1/W)))), added in
  // groups of 8 ranks as in kOnebitServer; c = sum + e; then as in kQuantEncode. A sum that is not
  // finite raises the flag and counts as 0. Rows may hold any bytes; padding in them is not read.
  // [0] r rows of payloads: row r at r * row_bytes, flat counts from the start of this rank's chunk
  // [1] r e (flat), null without residual  [2] w the new e (flat), null likewise  [3] w payload
  // [4] rw flags.  QuantArgs
  kQuantServer,
  // y = v. Any bytes may be decoded; a scale that is not finite counts as 0.
  // [0] r payload (of flat element 0 first)  [1] w y (list float32 at `target`).  QuantArgs
  kQuantDecode,
  // Decision that all ranks take alike. word = prior == kCommit (or no prior) and no message
  // carries a flag ? kCommit :
  // (prior not kCommit ? prior : fail_word).
  // [0] r scale messages of all ranks, of one section or (GateArgs::sections) the message area
  // [1] r prior word (uint32), optional  [2] w word.  GateArgs
  kGate,

  // Block sums of x*x.  [0] r x (source)  [1] w block sums.  SourceArgs
  kSumSquares,
  // Norm of this rank's gradient: norm = sqrt(float64 sum of all blocks); message {double norm;
  // uint32 flags; uint32 0},
  // flags |= kFlagNonfinite if norm is not finite.  [0] r block sums  [1] r flags, optional  [2] w
  // message. BlocksArgs
  kNormMessage,
  // norm = mean of the norms of `world` messages (added in rank order, then divided), times
  // unscale;
  // coefficient = (clip / (norm + 1e-6) if that is < 1 else 1; clip = 0: 1) times unscale, rounded
  // to float32 once. word = prior not kCommit ? prior : (any flag ? fail_word : kCommit).
  // [0] r messages (16 bytes each)  [1] w coefficient (float32)  [2] w norm (double)  [3] w word
  // [4] r unscale (double), optional: 1  [5] r prior word, optional: kCommit.  ClipArgs
  kClipCoefficient,

  // Adam and AdamW (specification section 3). g' = g * clip, 0 where masked; decoupled = 0: g' = g'
  // + wd*p (if wd != 0);
  //   m = b1*m + (1-b1)*g';  v = b2*v + ((1-b2)*g')*g';  u = (m*fl(1/c1)) / (sqrt(v*fl(1/c2)) +
  //   eps);  decoupled: u = u + wd*p
  //   (if wd != 0);  p = p - float(lr)*u.
  // [0] r g (source)  [1] rw m (flat)  [2] rw v (flat)  [3] rw p (list)  [4] r GroupScalars[]
  // [5] r clip, optional  [6] r valid, optional.  SourceArgs
  kAdam,
  // kAdam with m and v of another type (base/narrow_state.h). Their old values are widened; p
  // moves by the new ones as float32, which are then rounded with rounding_bits of the state step,
  // Piece::block and the position in that norm block. Blocks and positions are those of tensors:
  // pieces are in a tensor's own order, and a call has all of a norm block's elements one after
  // the other. fp8: a norm block has kStateBlocksPerNormBlock exponent bytes in [8] and [9].
  // [0] - [6] as in kAdam, m and v of uint16 (bf16) or uint8 (fp8)  [7] r state step (uint64)
  // [8] rw exponents of m (uint8), fp8 alone  [9] rw exponents of v, likewise.  NarrowArgs
  kAdamNarrow,
  // LAMB pass 1 (section 4; warm-up of section 7): m and v as in kAdam (no weight decay in g');
  //   den = eps_inside_sqrt ? sqrt(v + eps) : sqrt(v) + eps;  u = m / den, then u = u + wd*p if wd
  //   != 0;
  //   block sums of p*p and u*u (masked elements count in both: weight decay moves them). u is kept
  //   for kLambUpdate; it may lie exactly where a g of float32 lies (g is then gone).
  // [0] r g (source)  [1] rw m  [2] rw v  [3] r p (list)  [4] w block sums of p  [5] w block
  // sums of u
  // [6] r GroupScalars[]  [7] r clip, optional  [8] r valid, optional  [9] w u (list).  SourceArgs
  kLambMoments,
  // Per tensor: wn, un = norms; c = 1; if both are not 0: c = wn/un, bounded above by max_coeff,
  // then below by min_coeff.
  // average = 1 and c != 1: c_avg = coeff_beta*c_avg + (1-coeff_beta)*c.  step_size = float(lamb_lr
  // * c).
  // [0] r block sums of p  [1] r block sums of u  [2] r GroupScalars[]  [3] rw TensorState[]  [4] w
  // TensorStep[]. TensorArgs
  kLambScalars,
  // LAMB pass 2: p = p - step_size * u, u from kLambMoments.
  // [0] r u (list)  [1] rw p (list)  [2] r TensorStep[].
  kLambUpdate,

  // Switch to the compressed stage: vf = v; den = sqrt(v) + eps; mask_zero_variance: valid bit
  // cleared where v == 0;
  // block sums of m*m (per tensor; 0 for elements that are masked now).
  // [0] r m, optional with [5]  [1] r v  [2] w vf, optional  [3] w den, optional  [4] rw valid,
  // optional  [5] w block sums  [6] r GroupScalars[].  FreezeArgs
  kFreezeVariance,
  // counts[i] += valid elements of pieces with `block` == i (Piece::block is an index into counts
  // here, so a call is never
  // cut); valid null: all.
  // [0] r valid, optional  [1] rw counts (uint64, zero before).
  kCountValid,
  // s_l = ||m_l|| / sqrt(count_l); united = mean of s_l over tensors with count and s_l not 0;
  // scaling_coeff = united / s_l,
  // 1 for the others; last_factor = 1. debias > 0: c_avg = c_avg / debias.
  // [0] r block sums  [1] r counts per tensor (uint64)  [2] rw TensorState[].  ScalingArgs
  kOnebitLambScaling,
  // Pass A of the compressed step (section 7.4), M as in kOnebitLambEncode with the messages named:
  //   m = new momentum, o = old momentum (floats, or bits and messages; 0 where masked);
  //   gr = (m - b1*o) / (1-b1);  vf = b2*vf + ((1-b2)*gr)*gr;  u0 = m/den;  u = u0 + wd*p (wd !=
  //   0);
  //   block sums of u0*u0 and u*u (0 in groups with wd = 0); block maximum of den / (sqrt(vf) +
  //   eps). Masked: vf as it is,
  //   no part in the maximum (an all-masked block has maximum 0), u0 = 0, u = wd*p.
  // [0] r new m (flat), optional  [1] r new bits, optional  [2] r new messages, optional  [3] r old
  // m, optional
  // [4] r old bits, optional  [5] r old messages, optional  [6] rw vf  [7] r den  [8] r p (list)
  // [9] r valid, optional
  // [10] w block sums u0  [11] w block sums u  [12] w block maxima (float32)  [13] r GroupScalars[]
  // [14] r TensorState[].
  kOnebitLambFactor,
  // Per tensor: factor = max of block maxima; wd != 0: q = min(1, ||u0|| / ||u||) (1 if ||u|| = 0),
  // factor = factor*q +
  // (1-q); then min factor_max, max factor_min, min last*(1+threshold), max last*(1-threshold);
  // last_factor = factor;
  // step_size = float(lr * (c_avg * factor)).  A tensor without valid elements (maximum 0) keeps
  // its factor at last_factor.
  // [0] r block sums u0  [1] r block sums u  [2] r block maxima  [3] r GroupScalars[]  [4] rw
  // TensorState[]
  // [5] w TensorStep[].  TensorArgs
  kOnebitLambScalars,
  // Pass B: p = p - step_size * u, u0 = m/den, u = u0 + wd*p (wd != 0); u0 = 0 where masked.
  // [0] r m (flat), optional  [1] r bits, optional  [2] r messages, optional  [3] r den  [4] rw p
  // (list)
  // [5] r valid, optional  [6] r GroupScalars[]  [7] r TensorStep[]  [8] r TensorState[].
  kMomentumUpdate,
  // m as floats from bits: m = bit ? M : -M, M = R / float(scaling_coeff); 0 where masked.
  // [0] r bits  [1] r messages  [2] r TensorState[]  [3] w m (flat)  [4] r valid, optional.
  kMomentumFromBits,

  // step_size = float(lr) of every tensor; trust_ratio and factor 1.
  // [0] r GroupScalars[]  [1] w TensorStep[].  TensorArgs
  kStepSizes,

  // SGD. g' = g * clip, 0 where masked; g' = g' + wd*p (wd != 0). With momentum: m = b1*m +
  // (1-b1)*g', (1-b1) standing for 1 - dampening (1 in the first step), direction m, or g' + b1*m
  // with Nesterov's momentum; else direction g'. p = p - float(lr)*direction.
  // [0] r g (source)  [1] rw m (flat), optional  [2] rw p (list)  [3] r GroupScalars[]
  // [4] r clip, optional  [5] r valid, optional.  SgdArgs
  kSgd,
  // kSgd with m of another type, as in kAdamNarrow.
  // [0] - [5] as in kSgd, m of uint16 or uint8 and not optional  [6] r state step (uint64)
  // [7] rw exponents of m (uint8), fp8 alone.  NarrowArgs
  kSgdNarrow,

  // 0/1 Adam, averaged gradient with the variance as it is (specification 6.3): g' = g * clip, or
  // +-R from bits; 0 where masked. m = b1*m + (1-b1)*g';  u = m / (sqrt(v) + eps) [+ wd*p];
  // p = p - float(lr)*u.
  // [0] r g (source), optional  [1] r bits, optional  [2] r messages, optional  [3] rw m (flat)
  // [4] r v (flat)  [5] rw p (list)  [6] r GroupScalars[]  [7] r clip, optional  [8] r valid,
  // optional.  SourceArgs
  kFrozenAdam,
  // 0/1 Adam between synchronisations (6.4): m = b1*m + (1-b1)*g';  b = b - float(lr)*m;
  // p = anchor_decay*anchor + b / den.  Masked: m = b = 0, p = anchor_decay*anchor.
  // [0] r g (source)  [1] rw m (flat)  [2] rw b (flat)  [3] r den (flat)  [4] r anchor (flat)
  // [5] w p (list)  [6] r GroupScalars[]  [7] r clip, optional  [8] r valid, optional.
  // SourceArgs
  kZeroOneLocal,
  // Encoder of a synchronisation: x = b - float(lr)*(b1*m + (1-b1)*g'), x = b without [0]; then as
  // kOnebitEncode.
  // identity = 1 (one rank): nothing is encoded; [3] receives x (0 where masked; not finite: flag
  // and 0), [4] - [6] are null.
  // [0] r g (source), optional  [1] r m (flat)  [2] r b (flat)  [3] rw c (flat)  [4] r S_old  [5] w
  // bits
  // [6] w block sums  [7] r valid, optional  [8] rw flags  [9] r GroupScalars[]  [10] r clip,
  // optional.  EncodeArgs
  kZeroOneEncode,
  // As kOnebitEncodeUndo, x as in kZeroOneEncode, whose operands and arguments it has.
  kZeroOneEncodeUndo,
  // Synchronisation: x as floats ([0]) or +-R from bits, 0 where masked; anchor = p =
  // anchor_decay*anchor + x / den;  m = -x / lr_sum (as it is if lr_sum is 0; 0 where masked);
  // b = 0.
  // [0] r x (flat), optional  [1] r bits, optional  [2] r messages, optional  [3] rw m (flat)
  // [4] w b (flat)  [5] r den (flat)  [6] rw anchor (flat)  [7] w p (list)  [8] r GroupScalars[]
  // [9] r valid, optional.
  kZeroOneSync,

  // 0/1 Adam as published (6.4, mode compat): parameters are updated in place.
  // Between synchronisations: m = b1*m + (1-b1)*g';  step = float(lr)*(m / den [+ wd*p]);
  // p = p - step;  b = b - step.  Nobody is masked.
  // [0] r g (source)  [1] rw m (flat)  [2] rw b (flat)  [3] r den (flat)  [4] rw p (list)
  // [5] r GroupScalars[]  [6] r clip, optional.  SourceArgs
  kZeroOneInPlaceLocal,
  // What a synchronisation averages: x = b * den, with b as kZeroOneInPlaceLocal would leave it, or
  // as it
  // is without [0]. A value that is not finite raises the flag.
  // [0] r g (source), optional  [1] r m (flat)  [2] r b (flat)  [3] r den (flat)  [4] r p (list)
  // [5] r GroupScalars[]  [6] r clip, optional  [7] w x (list)  [8] rw flags, optional.
  // SourceArgs
  kZeroOneInPlaceSum,
  // The synchronisation: m, p, b as kZeroOneInPlaceLocal would leave them, or as they are without
  // [0];
  // x from floats, or +-R from bits, 0 where masked;  p = (p - b) + x / den;  m = -x / lr_sum (as
  // it is if lr_sum is 0);  b = 0.
  // [0] r g (source), optional  [1] rw m (flat)  [2] rw b (flat)  [3] r den (flat)  [4] rw p (list)
  // [5] r GroupScalars[]  [6] r clip, optional  [7] r x (list), optional  [8] r bits, optional
  // [9] r messages, optional  [10] r valid, optional.  SourceArgs
  kZeroOneInPlaceSync,
  kCount,
};

// Words of kGate and kClipCoefficient; also values of predicates.
inline constexpr uint32_t kCommit = 1;  // every rank commits
inline constexpr uint32_t kSkipNonfinite =
    2;  // a worker met a non-finite value: nothing is written
inline constexpr uint32_t kSkipServer =
    3;  // a server met a sum that is not finite: nothing is written, server residuals become 0
inline constexpr uint32_t kSkipGivenUp = 4;  // messages may not have arrived: nothing is written

struct FillArgs {
  uint8_t value;
};
struct PackArgs {
  uint64_t flat_base;
  uint32_t element_bytes;
};
struct SourceArgs {
  Dtype source = Dtype::kF32;
};
struct ConvertArgs {
  Dtype from, to;
  float factor;
};
struct AccumulateArgs {
  Dtype source = Dtype::kF32;
  bool first = false;
};
struct ReduceArgs {
  uint64_t row_stride;  // elements
  uint64_t row_base;    // flat index of element 0 of a row
  uint64_t own_base;    // flat index of element 0 of a flat `own`
  uint64_t out_base;    // flat index of element 0 of a flat `out`
  Dtype dtype;
  uint32_t world;
  uint32_t own_rank;
  ReduceOp op;
  bool own_flat;
  bool out_flat;
};
struct EncodeArgs {
  uint64_t bits_base;  // flat index of bit 0 of `bits`
  ScaleKind scale;
  bool identity;
  Dtype source = Dtype::kF32;
};
struct NormArgs {
  const NormRange* ranges;  // owned by the plan; one per instance
  uint64_t n;
  ScaleKind scale;
};
struct ServerArgs {
  uint64_t row_bytes;
  uint64_t valid_base;
  uint64_t instances;
  uint32_t world;
  ScaleKind scale;
};
struct QuantArgs {
  uint64_t base;       // encoder and undo: flat index of the payload's first element
  uint64_t row_bytes;  // server
  uint32_t block;      // int8 and int4: elements per scale
  uint32_t world;      // server
  CodecKind kind;
};
struct GateArgs {
  uint64_t message_bytes;  // of one message; the flags are its last 4 bytes
  uint32_t world;
  uint32_t fail_word;
  const uint64_t* sections = nullptr;  // owned by the plan: message_bytes of every section
  uint64_t n_sections = 0;             // 0: one, of message_bytes
};
struct BlocksArgs {
  uint64_t blocks;
};
struct ClipArgs {
  double clip;
  uint32_t world;
  uint32_t fail_word;
};
struct TensorArgs {
  const NormRange* ranges;  // one per tensor
  uint64_t n;
  bool average;
};
struct FreezeArgs {
  bool mask_zero_variance;
};
struct ScalingArgs {
  const NormRange* ranges;  // one per tensor
  uint64_t n;
  double debias;  // 0: off
};
struct NoArgs {};  // where none are named
struct SgdArgs {
  bool nesterov;
  Dtype source = Dtype::kF32;
};
struct NarrowArgs {
  Dtype source = Dtype::kF32;
  StateType state = StateType::kBf16;  // or kFp8
  bool nesterov = false;               // SGD
};

// A bound operand: flat memory, or (list) an array of tensor pointers, in memory that the device
// reads.
struct Operand {
  void* data = nullptr;
  template <class T>
  SOTTO_HOST_DEVICE T* flat() const {
    return static_cast<T*>(data);
  }
  template <class T>
  SOTTO_HOST_DEVICE T* list(uint32_t tensor) const {
    return static_cast<T*>(static_cast<void* const*>(data)[tensor]);
  }
};

class CallTables;  // device.h

struct KernelCall {
  // Constant: the same at every launch of a step.
  KernelId id = KernelId::kFill;
  std::span<const Piece> pieces;
  const void* args = nullptr;  // the struct named at the id
  uint64_t bytes = 0;          // kFill: length of operand 0
  // Of one launch.
  std::span<const Operand> operands;
  const uint32_t* predicate = nullptr;
  uint32_t expect = 0;
  bool paired_ran = false;  // undo kernels only
  // Where the device has the constant part, if it has made tables of it.
  const CallTables* tables = nullptr;
  uint32_t call = 0;

  template <class T>
  const T& arguments() const {
    return *static_cast<const T*>(args);
  }
};

const char* kernel_name(KernelId id);

}  // namespace sotto
