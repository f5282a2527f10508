// sotto_dlpack.h: DLTensor to sotto_buffer, without and with DLPack's own header.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// DLPack's declarations, as its header has them, so that the header's comparison of layouts is
// compiled.
extern "C" {
typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;
}
#define DLPACK_MAJOR_VERSION 1

#include "sotto/sotto_dlpack.h"

namespace {

struct Tensor {
  std::vector<float> memory = std::vector<float>(64);
  std::vector<int64_t> shape, strides;
  DLTensor dl{};

  Tensor(std::vector<int64_t> dims, std::vector<int64_t> steps)
      : shape(std::move(dims)), strides(std::move(steps)) {
    dl.data = memory.data();
    dl.device = {kDLCPU, 0};
    dl.ndim = static_cast<int32_t>(shape.size());
    dl.dtype = {2, 32, 1};
    dl.shape = shape.data();
    dl.strides = strides.empty() ? nullptr : strides.data();
  }
};

struct Outcome {
  sotto_status status;
  std::string reason;
  sotto_buffer buffer;
};

Outcome convert(const void* tensor) {
  Outcome outcome{};
  const char* reason = nullptr;
  outcome.status = sotto_buffer_from_dlpack(tensor, &outcome.buffer, &reason);
  outcome.reason = reason == nullptr ? "none" : reason;
  return outcome;
}

Outcome convert(const Tensor& tensor) { return convert(&tensor.dl); }

TEST(Dlpack, ContiguousTensor) {
  Tensor t({2, 3, 4}, {12, 4, 1});
  t.dl.byte_offset = 16;
  const Outcome got = convert(&t.dl);
  ASSERT_EQ(got.status, SOTTO_OK) << got.reason;
  EXPECT_EQ(got.reason, "");
  EXPECT_EQ(got.buffer.data, t.memory.data() + 4);
  EXPECT_EQ(got.buffer.count, 24u);
  EXPECT_EQ(got.buffer.dtype, SOTTO_FLOAT32);
  EXPECT_EQ(got.buffer.device_type, SOTTO_DEVICE_CPU);
  EXPECT_EQ(got.buffer.device_id, 0);
  EXPECT_EQ(got.buffer.flags, 0u);
}

TEST(Dlpack, EveryDtypeHasDlpacksNumbers) {
  const struct {
    DLDataType dl;
    sotto_dtype sotto;
  } dtypes[] = {{{0, 32, 1}, SOTTO_INT32},   {{0, 64, 1}, SOTTO_INT64},
                {{1, 8, 1}, SOTTO_UINT8},    {{2, 16, 1}, SOTTO_FLOAT16},
                {{2, 32, 1}, SOTTO_FLOAT32}, {{2, 64, 1}, SOTTO_FLOAT64},
                {{4, 16, 1}, SOTTO_BFLOAT16}};
  for (const auto& dtype : dtypes) {
    Tensor t({3}, {});
    t.dl.dtype = dtype.dl;
    EXPECT_EQ(convert(&t.dl).buffer.dtype, dtype.sotto);
  }
}

TEST(Dlpack, DeviceIsPassedOn) {
  Tensor t({3}, {});
  t.dl.device = {kDLCUDA, 5};
  EXPECT_EQ(convert(&t.dl).buffer.device_type, 2);
  EXPECT_EQ(convert(&t.dl).buffer.device_id, 5);
}

TEST(Dlpack, StridesThatDoNotMatterAreAccepted) {
  EXPECT_EQ(convert(Tensor({2, 3}, {})).buffer.count, 6u);            // none: compact
  EXPECT_EQ(convert(Tensor({1, 5}, {77, 1})).status, SOTTO_OK);       // dimension of one element
  EXPECT_EQ(convert(Tensor({4, 0, 2}, {9, 9, 9})).status, SOTTO_OK);  // no elements
  EXPECT_EQ(convert(Tensor({4, 0, 2}, {9, 9, 9})).buffer.count, 0u);
  Tensor scalar({}, {});
  EXPECT_EQ(convert(&scalar.dl).buffer.count, 1u);
  Tensor empty({0}, {});
  empty.dl.data = nullptr;
  empty.dl.byte_offset = 8;
  EXPECT_EQ(convert(&empty.dl).status, SOTTO_OK);
  EXPECT_EQ(convert(&empty.dl).buffer.data, nullptr);
}

TEST(Dlpack, StridedInputIsRefused) {
  for (const auto& strides : std::vector<std::vector<int64_t>>{{1, 2}, {6, 2}, {-3, 1}, {3, 0}}) {
    Tensor t({2, 3}, strides);
    const Outcome got = convert(&t.dl);
    EXPECT_EQ(got.status, SOTTO_E_UNSUPPORTED);
    EXPECT_EQ(got.reason,
              "the tensor is strided; make it contiguous (row-major without gaps) first");
    EXPECT_EQ(got.buffer.data, nullptr);  // not written
  }
}

TEST(Dlpack, BadInputIsRefused) {
  Tensor negative({2, -1}, {}), huge({int64_t{1} << 40, int64_t{1} << 40}, {}), no_shape({2}, {}),
      no_data({2}, {});
  no_shape.dl.shape = nullptr;
  no_data.dl.data = nullptr;
  for (const DLTensor* dl : {&negative.dl, &huge.dl, &no_shape.dl, &no_data.dl}) {
    const Outcome got = convert(dl);
    EXPECT_EQ(got.status, SOTTO_E_INVALID_ARGUMENT);
    EXPECT_NE(got.reason, "");
  }
  EXPECT_EQ(convert(nullptr).status, SOTTO_E_INVALID_ARGUMENT);
  Tensor good({2}, {});
  EXPECT_EQ(sotto_buffer_from_dlpack(&good.dl, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT);
}

}  // namespace
