#include "core/base/dtype.h"

namespace sotto {

bool dtype_known(uint32_t code) {
  switch (static_cast<Dtype>(code)) {
    case Dtype::kI8:
    case Dtype::kI16:
    case Dtype::kI32:
    case Dtype::kI64:
    case Dtype::kU8:
    case Dtype::kU16:
    case Dtype::kU32:
    case Dtype::kU64:
    case Dtype::kF16:
    case Dtype::kF32:
    case Dtype::kF64:
    case Dtype::kBF16: return true;
  }
  return false;
}

std::string_view dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kI8: return "int8";
    case Dtype::kI16: return "int16";
    case Dtype::kI32: return "int32";
    case Dtype::kI64: return "int64";
    case Dtype::kU8: return "uint8";
    case Dtype::kU16: return "uint16";
    case Dtype::kU32: return "uint32";
    case Dtype::kU64: return "uint64";
    case Dtype::kF16: return "fp16";
    case Dtype::kF32: return "fp32";
    case Dtype::kF64: return "fp64";
    case Dtype::kBF16: return "bf16";
  }
  return "unknown";
}

}  // namespace sotto
