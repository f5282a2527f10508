#include "core/config/volume.h"

#include <algorithm>

#include "core/base/shares.h"
#include "core/config/optimizer_types.h"

namespace sotto {
namespace {

// Chunk length in elements of n elements that share a scale.
uint64_t chunk_of(uint64_t n, uint64_t w, uint64_t align) {
  return align * ((n + align * w - 1) / (align * w));
}

// Elements with padding, as far as sums of their bytes stay in 64 bits. Only a chunk_align out of
// all proportion to the tensors comes near.
constexpr uint64_t kMaxFlat = uint64_t{1} << 57;

uint64_t bounded_product(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kMaxFlat : std::min(product, kMaxFlat);
}

// m or v, as if the parameters were one tensor: elements, and for fp8 an exponent byte per block,
// of which every 8192 elements have 32.
uint64_t moment_bytes(StateType type, uint64_t flat, uint64_t n_params) {
  const uint64_t exponents = type == StateType::kFp8 ? (n_params + 8191) / 8192 * 32 : 0;
  return state_type_bytes(type) * flat + exponents;
}

// Bytes of one tensor, of the rank that has the most.
struct SparseBytes {
  uint64_t sent = 0;
  uint64_t scratch = 0;
};
SparseBytes sparse_sizes(const SparseSettings& s, uint64_t n, uint64_t w) {
  const uint64_t all = sparse_bytes(s, n), blocks = sparse_blocks(s, n);
  if (!s.has_servers()) return {bounded_product(w - 1, all), bounded_product(w, all)};
  const SparseSettings server = server_settings(s, w);
  SparseBytes most;
  for (uint64_t r = 0; r < w; ++r) {
    const uint64_t begin = share_begin(blocks, r, w) * s.block;
    const uint64_t end = std::min(n, share_begin(blocks, r + 1, w) * s.block);
    const auto own = [&](const SparseSettings& settings) {
      return is_dense(s, n) ? 4 * (end - begin) : coded_bytes(settings, end - begin);
    };
    most.sent = std::max(most.sent, all - own(s) + bounded_product(w - 1, own(server)));
    // What goes to others, what ranks send of the own part, its mean, and all results.
    most.scratch = std::max(most.scratch, all - own(s) + bounded_product(w, own(s)) +
                                              4 * (end - begin) + sparse_bytes(server, n));
  }
  return most;
}

// Gradients are converted before they are averaged. Those of bf16 models have the averages' type.
bool converts_gradients(const Config& config) {
  if (config.prescale_gradients || config.gradient_predivide_factor != 1) return true;
  if (!config.communication_data_type || (config.bf16_enabled && !config.grad_accum_dtype))
    return false;
  const Dtype own =
      config.grad_accum_dtype.value_or(config.fp16.enabled ? Dtype::kF16 : Dtype::kF32);
  return *config.communication_data_type != own;
}

// Averages are multiplied, into float32, before they are used.
bool scales_averages(const Config& config, uint64_t world) {
  const double factor = config.gradient_predivide_factor;
  return !config.prescale_gradients && factor != 1 && factor != static_cast<double>(world);
}

// Where the parts of others arrive (plan/direct.h): whole messages, as many as the limit allows.
uint64_t window_scratch(uint64_t element_bytes, uint64_t n, uint64_t world) {
  const uint64_t held = kHeldWindowBytes / kHeldWindows / world;
  const uint64_t longest = (n + world - 1) / world * element_bytes;
  const uint64_t window =
      std::min(kWindowUnitBytes * std::max<uint64_t>(1, held / kWindowUnitBytes), longest);
  if (window == 0) return 0;
  const uint64_t count = std::min((longest + window - 1) / window, kHeldWindows);
  return bounded_product(count * world, window);
}

// What a full-precision average needs: its summands, if they are not the gradients themselves, the
// averages, their multiples, and windows of what arrives.
uint64_t average_scratch(const Config& config, uint64_t n, uint64_t world) {
  const uint64_t element = communication_bytes(config), bytes = element * n;
  return bytes + window_scratch(element, n, world) + (converts_gradients(config) ? bytes : 0) +
         (scales_averages(config, world) ? 4 * n : 0);
}

// Of a type that keeps directions: averages of float32 give their place to them.
uint64_t direction_scratch(const Config& config, uint64_t n, uint64_t world) {
  const bool own =
      world > 1 && (communication_bytes(config) == 4 || scales_averages(config, world));
  return own ? 0 : 4 * n;
}

bool is_16_bit(const Config& config) { return config.fp16.enabled || config.bf16_enabled; }

}  // namespace

uint64_t full_precision_bytes(uint64_t n, uint64_t w, uint64_t element_bytes) {
  const uint64_t factor = 2 * element_bytes * (w - 1);
  return n / w * factor + (n % w * factor + w - 1) / w;
}

CompressedSizes compressed_sizes(const CodecSettings& codec, uint64_t n, uint64_t w) {
  CompressedSizes s;
  const uint64_t align = codec.chunk_align;
  if (codec.granularity == Granularity::kBucket) {
    const uint64_t bucket = codec.bucket_elements;
    s.chunk =
        bounded_product(n / bucket, chunk_of(bucket, w, align)) + chunk_of(n % bucket, w, align);
  } else {
    s.chunk = chunk_of(n, w, align);
  }
  s.chunk = std::min(s.chunk, kMaxFlat / w);
  s.flat = s.chunk * w;
  if (codec.row().sparse) {
    s.payload = sparse_sizes(codec.sparse, n, w).sent;
  } else {
    s.payload = 2 * (w - 1) * codec.unit().bytes_of(s.chunk);
  }
  return s;
}

uint64_t gradient_bytes(const Config& config) {
  if (config.grad_accum_dtype) return dtype_bytes(*config.grad_accum_dtype);
  return config.fp16.enabled ? 2 : 4;  // DeepSpeed accumulates the gradients of bf16 models in fp32
}

uint64_t communication_bytes(const Config& config) {
  if (config.communication_data_type) return dtype_bytes(*config.communication_data_type);
  // All gradients that are registered have this type then, and without it the model's.
  if (config.grad_accum_dtype) return dtype_bytes(*config.grad_accum_dtype);
  return is_16_bit(config) ? 2 : 4;
}

OuterBytes outer_bytes(const OuterConfig& outer, uint64_t n, uint64_t w) {
  OuterBytes b;
  if (depends_on_hosts(outer.hierarchy, w)) return b;
  const uint64_t count = outer.fragments.count;
  // Also of lists of any sizes.
  if (!outer.codec) b.period = full_precision_bytes(n, w, 4);
  if (count > 1 && !outer.fragments.lists.empty()) return b;
  const uint64_t elements = n / count + (n % count == 0 ? 0 : 1);
  b.dense_launch = full_precision_bytes(elements, w, 4);
  b.launch = outer.codec ? compressed_sizes(*outer.codec, elements, w).payload : b.dense_launch;
  if (outer.codec) b.period = bounded_product(count, *b.launch);
  return b;
}

const Stages& stages_of(const Config& config) {
  return config.sotto.outer ? outer_stages() : optimizer_type(config.optimizer.kind).stages();
}

UpdateCounts count_updates(const Config& config, uint64_t updates) {
  return stages_of(config).count(config, updates);
}

uint64_t MemoryBytes::state() const {
  uint64_t bytes = m + v + residuals + bits + scratch;
  for (const auto& [name, array] : arrays) bytes += array;
  return bytes;
}

MemoryBytes memory_bytes(const Config& config, uint64_t world, uint64_t n_params) {
  const OptimizerKind kind = config.optimizer.kind;
  MemoryBytes b;
  b.parameters = 4 * n_params;
  b.model_copy = is_16_bit(config) ? 2 * n_params : 0;
  b.gradients = gradient_bytes(config) * n_params;
  if (kind == OptimizerKind::kNone) return b;
  const std::optional<CodecSettings> codec = config.compression(world);
  const CompressedSizes sizes =
      compressed_sizes(codec.value_or(CodecSettings{}), n_params, codec ? world : 1);
  const uint64_t floats = 4 * sizes.flat;
  const uint64_t moment = moment_bytes(config.sotto.state_dtype, sizes.flat, n_params);
  const OptimizerType& type = optimizer_type(kind);
  if (type.variance) b.v = moment;
  if (type.has_betas || config.optimizer.params.sgd.momentum > 0) b.m = moment;
  const bool averages = world > 1 && (!codec || type.one_bit);
  if (averages) b.scratch = average_scratch(config, n_params, world);
  if (type.directions && (!codec || type.one_bit || world == 1))
    b.scratch += direction_scratch(config, n_params, world);
  if (!codec) return b;
  // The server's errors before and after a step.
  if (codec->residual) b.residuals = floats;
  if (codec->server_residual()) b.residuals += 2 * 4 * sizes.chunk;
  const bool sparse = codec->row().sparse;
  const uint64_t payload = sparse ? 0 : codec->unit().bytes_of(sizes.flat);
  const bool scales = codec->row().scales;
  if (scales) b.bits = 2 * payload;
  // The payloads of all ranks, or what goes out and comes in. Steps of all stages share scratch.
  if (world > 1) {
    b.scratch = std::max(
        b.scratch, sparse ? sparse_sizes(codec->sparse, n_params, world).scratch : 2 * payload);
  }
  if (!type.one_bit) {
    // Averages, and results that are no part of the state.
    if (world > 1) b.scratch += 4 * n_params + (scales ? 0 : payload);
    return b;
  }
  for (const std::string_view name : type.late_arrays) {
    if (!name.empty()) b.arrays.emplace_back(name, floats);
  }
  // A rank alone decodes what it encodes.
  if (world == 1) b.scratch = std::max(b.scratch, 4 * n_params);
  if (config.sotto.zero_variance_policy == ZeroVariancePolicy::kMask) b.bits += sizes.flat / 8;
  return b;
}

}  // namespace sotto
