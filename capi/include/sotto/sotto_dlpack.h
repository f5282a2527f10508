/* sotto_dlpack.h - turns a DLPack tensor (DLTensor) into a sotto_buffer. Header only, C99.
 *
 * dlpack.h is not needed: the tensor is passed as a pointer to void and read through
 * sotto_dlpack_view, which has DLTensor's layout. That layout has not changed since DLPack 0.2 and
 * is part of its ABI promise. To be used with a DLManagedTensor, pass &managed->dl_tensor; the
 * buffer borrows its memory, so keep the managed tensor alive until the operation has completed.
 */
#ifndef SOTTO_SOTTO_DLPACK_H
#define SOTTO_SOTTO_DLPACK_H

#include <string.h>

#include "sotto.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The fields of a DLTensor, in its order. */
typedef struct sotto_dlpack_view {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code; /* 0 int, 1 unsigned, 2 float, 4 bfloat */
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;   /* ndim numbers */
  int64_t* strides; /* in elements; NULL: compact, row-major */
  uint64_t byte_offset;
} sotto_dlpack_view;

/* Where DLPack's header is known too, the two layouts are compared while compiling. */
#if defined(DLPACK_VERSION) || defined(DLPACK_MAJOR_VERSION)
typedef char sotto_dlpack_same_size[sizeof(DLTensor) == sizeof(sotto_dlpack_view) ? 1 : -1];
typedef char sotto_dlpack_same_shape[offsetof(DLTensor, shape) == offsetof(sotto_dlpack_view, shape)
                                         ? 1
                                         : -1];
typedef char sotto_dlpack_same_offset
    [offsetof(DLTensor, byte_offset) == offsetof(sotto_dlpack_view, byte_offset) ? 1 : -1];
#endif

/* Elements of the tensor, or SOTTO_E_INVALID_ARGUMENT (bad shape) or SOTTO_E_UNSUPPORTED (gaps or
 * another order). */
static inline sotto_status sotto_dlpack_count(const sotto_dlpack_view* view, uint64_t* out_count,
                                              const char** out_reason) {
  uint64_t count = 1;
  int32_t i;
  if (view->ndim < 0 || (view->ndim > 0 && view->shape == NULL)) {
    *out_reason = "ndim is negative or shape is NULL";
    return SOTTO_E_INVALID_ARGUMENT;
  }
  for (i = 0; i < view->ndim; ++i) {
    if (view->shape[i] < 0) {
      *out_reason = "a dimension is negative";
      return SOTTO_E_INVALID_ARGUMENT;
    }
    if (view->shape[i] == 0) { /* no elements, whatever the other dimensions and strides are */
      *out_count = 0;
      return SOTTO_OK;
    }
  }
  for (i = view->ndim - 1; i >= 0; --i) {
    if (view->strides != NULL && view->shape[i] != 1 && (uint64_t)view->strides[i] != count) {
      *out_reason = "the tensor is strided; make it contiguous (row-major without gaps) first";
      return SOTTO_E_UNSUPPORTED;
    }
    if (count > (uint64_t)INT64_MAX / (uint64_t)view->shape[i]) {
      *out_reason = "the dimensions multiply to more than 2^63 - 1 elements";
      return SOTTO_E_INVALID_ARGUMENT;
    }
    count *= (uint64_t)view->shape[i];
  }
  *out_count = count;
  return SOTTO_OK;
}

/* Describes a contiguous DLPack tensor as a sotto_buffer. The dtype and device numbers are passed
 * on as they are: a call that gets the buffer refuses those it does not know.
 *   dl_tensor  [in]  a DLTensor; its memory is borrowed
 *   out_buffer [out] written only on success; data includes byte_offset
 *   out_reason [out] NULL, or receives a static text on failure ("" on success); sotto_last_error
 * is not touched Threads: any. Blocks: no. Stream: none. Errors: INVALID_ARGUMENT (NULL, bad
 * shape), UNSUPPORTED (strided input). Since: 0.1 */
static inline sotto_status sotto_buffer_from_dlpack(const void* dl_tensor, sotto_buffer* out_buffer,
                                                    const char** out_reason) {
  sotto_dlpack_view view;
  uint64_t count = 0;
  const char* reason = "";
  sotto_status status = SOTTO_OK;
  if (dl_tensor == NULL || out_buffer == NULL) {
    reason = "dl_tensor or out_buffer is NULL";
    status = SOTTO_E_INVALID_ARGUMENT;
  } else {
    memcpy(&view, dl_tensor, sizeof view);
    status = sotto_dlpack_count(&view, &count, &reason);
  }
  if (status == SOTTO_OK && count != 0 && view.data == NULL) {
    reason = "data is NULL though the tensor has elements";
    status = SOTTO_E_INVALID_ARGUMENT;
  }
  if (status == SOTTO_OK) {
    memset(out_buffer, 0, sizeof *out_buffer);
    out_buffer->data =
        view.data == NULL ? NULL : (void*)((unsigned char*)view.data + view.byte_offset);
    out_buffer->count = count;
    out_buffer->dtype = (uint32_t)view.dtype_code | (uint32_t)view.dtype_bits << 8 |
                        (uint32_t)view.dtype_lanes << 16;
    out_buffer->device_type = view.device_type;
    out_buffer->device_id = view.device_id;
  }
  if (out_reason != NULL) *out_reason = reason;
  return status;
}

#ifdef __cplusplus
}
#endif

#endif /* SOTTO_SOTTO_DLPACK_H */
