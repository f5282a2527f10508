#include "core/iface/kernels.h"

namespace sotto {

const char* kernel_name(KernelId id) {
  switch (id) {
    case KernelId::kFill: return "fill";
    case KernelId::kPack: return "pack";
    case KernelId::kConvert: return "convert";
    case KernelId::kAccumulate: return "accumulate";
    case KernelId::kUnpack: return "unpack";
    case KernelId::kReduce: return "reduce";
    case KernelId::kOnebitEncode: return "onebit_encode";
    case KernelId::kOnebitEncodeUndo: return "onebit_encode_undo";
    case KernelId::kOnebitLambEncode: return "onebit_lamb_encode";
    case KernelId::kOnebitLambEncodeUndo: return "onebit_lamb_encode_undo";
    case KernelId::kNormFinish: return "norm_finish";
    case KernelId::kOnebitServer: return "onebit_server";
    case KernelId::kOnebitDecode: return "onebit_decode";
    case KernelId::kQuantEncode: return "quant_encode";
    case KernelId::kQuantEncodeUndo: return "quant_encode_undo";
    case KernelId::kQuantServer: return "quant_server";
    case KernelId::kQuantDecode: return "quant_decode";
    case KernelId::kGate: return "gate";
    case KernelId::kSumSquares: return "sum_squares";
    case KernelId::kNormMessage: return "norm_message";
    case KernelId::kClipCoefficient: return "clip_coefficient";
    case KernelId::kAdam: return "adam";
    case KernelId::kAdamNarrow: return "adam_narrow";
    case KernelId::kLambMoments: return "lamb_moments";
    case KernelId::kLambScalars: return "lamb_scalars";
    case KernelId::kLambUpdate: return "lamb_update";
    case KernelId::kFreezeVariance: return "freeze_variance";
    case KernelId::kCountValid: return "count_valid";
    case KernelId::kOnebitLambScaling: return "onebit_lamb_scaling";
    case KernelId::kOnebitLambFactor: return "onebit_lamb_factor";
    case KernelId::kOnebitLambScalars: return "onebit_lamb_scalars";
    case KernelId::kMomentumUpdate: return "momentum_update";
    case KernelId::kStepSizes: return "step_sizes";
    case KernelId::kSgd: return "sgd";
    case KernelId::kSgdNarrow: return "sgd_narrow";
    case KernelId::kFrozenAdam: return "frozen_adam";
    case KernelId::kZeroOneLocal: return "zeroone_local";
    case KernelId::kZeroOneEncode: return "zeroone_encode";
    case KernelId::kZeroOneEncodeUndo: return "zeroone_encode_undo";
    case KernelId::kZeroOneSync: return "zeroone_sync";
    case KernelId::kZeroOneInPlaceLocal: return "zeroone_in_place_local";
    case KernelId::kZeroOneInPlaceSum: return "zeroone_in_place_sum";
    case KernelId::kZeroOneInPlaceSync: return "zeroone_in_place_sync";
    case KernelId::kMomentumFromBits: return "momentum_from_bits";
    case KernelId::kCount: break;
  }
  return "unknown";
}

}  // namespace sotto
