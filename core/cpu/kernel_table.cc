#include "core/cpu/kernel_table.h"

namespace sotto {
namespace {

KernelTable make_scalar_kernels() {
  KernelTable t{};
  kernel_entry(t, KernelId::kFill) = scalar::fill;
  kernel_entry(t, KernelId::kPack) = scalar::pack;
  kernel_entry(t, KernelId::kUnpack) = scalar::unpack;
  kernel_entry(t, KernelId::kConvert) = scalar::convert;
  kernel_entry(t, KernelId::kAccumulate) = scalar::accumulate;
  kernel_entry(t, KernelId::kReduce) = scalar::reduce;
  kernel_entry(t, KernelId::kOnebitEncode) = scalar::onebit_encode;
  kernel_entry(t, KernelId::kOnebitEncodeUndo) = scalar::onebit_encode_undo;
  kernel_entry(t, KernelId::kOnebitLambEncode) = scalar::onebit_lamb_encode;
  kernel_entry(t, KernelId::kOnebitLambEncodeUndo) = scalar::onebit_lamb_encode_undo;
  kernel_entry(t, KernelId::kNormFinish) = scalar::norm_finish;
  kernel_entry(t, KernelId::kOnebitServer) = scalar::onebit_server;
  kernel_entry(t, KernelId::kOnebitDecode) = scalar::onebit_decode;
  kernel_entry(t, KernelId::kQuantEncode) = scalar::quant_encode;
  kernel_entry(t, KernelId::kQuantEncodeUndo) = scalar::quant_encode_undo;
  kernel_entry(t, KernelId::kQuantServer) = scalar::quant_server;
  kernel_entry(t, KernelId::kQuantDecode) = scalar::quant_decode;
  kernel_entry(t, KernelId::kGate) = scalar::gate;
  kernel_entry(t, KernelId::kSumSquares) = scalar::sum_squares;
  kernel_entry(t, KernelId::kNormMessage) = scalar::norm_message;
  kernel_entry(t, KernelId::kClipCoefficient) = scalar::clip_coefficient;
  kernel_entry(t, KernelId::kAdam) = scalar::adam;
  kernel_entry(t, KernelId::kAdamNarrow) = scalar::adam_narrow;
  kernel_entry(t, KernelId::kLambMoments) = scalar::lamb_moments;
  kernel_entry(t, KernelId::kLambScalars) = scalar::lamb_scalars;
  kernel_entry(t, KernelId::kLambUpdate) = scalar::lamb_update;
  kernel_entry(t, KernelId::kFreezeVariance) = scalar::freeze_variance;
  kernel_entry(t, KernelId::kCountValid) = scalar::count_valid;
  kernel_entry(t, KernelId::kOnebitLambScaling) = scalar::onebit_lamb_scaling;
  kernel_entry(t, KernelId::kOnebitLambFactor) = scalar::onebit_lamb_factor;
  kernel_entry(t, KernelId::kOnebitLambScalars) = scalar::onebit_lamb_scalars;
  kernel_entry(t, KernelId::kMomentumUpdate) = scalar::momentum_update;
  kernel_entry(t, KernelId::kMomentumFromBits) = scalar::momentum_from_bits;
  kernel_entry(t, KernelId::kStepSizes) = scalar::step_sizes;
  kernel_entry(t, KernelId::kSgd) = scalar::sgd;
  kernel_entry(t, KernelId::kSgdNarrow) = scalar::sgd_narrow;
  kernel_entry(t, KernelId::kFrozenAdam) = scalar::frozen_adam;
  kernel_entry(t, KernelId::kZeroOneLocal) = scalar::zeroone_local;
  kernel_entry(t, KernelId::kZeroOneEncode) = scalar::zeroone_encode;
  kernel_entry(t, KernelId::kZeroOneEncodeUndo) = scalar::zeroone_encode_undo;
  kernel_entry(t, KernelId::kZeroOneSync) = scalar::zeroone_sync;
  kernel_entry(t, KernelId::kZeroOneInPlaceLocal) = scalar::zeroone_in_place_local;
  kernel_entry(t, KernelId::kZeroOneInPlaceSum) = scalar::zeroone_in_place_sum;
  kernel_entry(t, KernelId::kZeroOneInPlaceSync) = scalar::zeroone_in_place_sync;
  return t;
}

}  // namespace

const KernelTable& scalar_kernels() {
  static const KernelTable table = make_scalar_kernels();
  return table;
}

}  // namespace sotto
