// Rows 5 to 9: Adam, with low-precision state too, LAMB, 1-bit Adam, 1-bit LAMB, each with float32
// and with bfloat16 gradients. With the latter there is no table of its own: the same targets,
// bytes counted anew.
#include <fmt/core.h>

#include <cstring>

#include "tests/perf/benchmarks.h"
#include "tests/perf/workload.h"
#include "tests/perf/yardsticks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 13;
// Parameters and direction of a tensor of this size stay in a cache between the passes of LAMB.
constexpr uint64_t kTile = 65536;

uint64_t blocks_of(uint64_t n) { return (n + kNormBlock - 1) / kNormBlock; }

// What each kernel reads of the only group.
struct Scalars {
  GroupScalars shared;
  AdamGroupScalars adam;
  LambGroupScalars lamb;
  OnebitLambGroupScalars onebit_lamb;
};

Scalars group_scalars() {
  Scalars s;
  for (GroupScalars* group :
       std::initializer_list<GroupScalars*>{&s.shared, &s.adam, &s.lamb, &s.onebit_lamb}) {
    group->lr = 1e-4;
    group->b1 = 0.9f;
    group->one_minus_b1 = static_cast<float>(1 - 0.9);
    group->b2 = 0.999f;
    group->one_minus_b2 = static_cast<float>(1 - 0.999);
    group->eps = 1e-8f;
    group->weight_decay = 0.01f;
  }
  s.adam.c1 = 0.4f;
  s.adam.c2 = 0.005f;
  s.lamb.lamb_lr = 1e-4;
  s.lamb.max_coeff = 10;
  s.lamb.min_coeff = 0.01;
  s.lamb.coeff_beta = 0.9;
  s.onebit_lamb.factor_max = 4;
  s.onebit_lamb.factor_min = 0.5;
  s.onebit_lamb.factor_threshold = 0.1;
  return s;
}

constexpr Dtype kGradients[] = {Dtype::kF32, Dtype::kBF16};

// "AdamW", or "AdamW, bf16 g".
std::string variant_of(const std::string& name, Dtype gradients) {
  return gradients == Dtype::kF32 ? name : name + ", bf16 g";
}
// Traffic with float32 gradients less what narrower ones save.
double bytes_with(Dtype gradients, double bytes) {
  return bytes - 4 + static_cast<double>(dtype_bytes(gradients));
}

// State of an optimizer over n elements, in tensors of `tensor` elements that follow each other in
// memory.
struct Model {
  Model(const Options& options, SimdLevel level, uint64_t count, uint64_t tensor_size,
        Dtype gradients)
      : work(options, level),
        n(count),
        tensor(std::min(tensor_size, count)),
        g(work.random(n, 11)),
        p(work.random(n, 12)),
        m(work.random(n, 13, 0.1f)),
        v(work.positive(n, 14, 0.01f, 1e-4f)),
        scalars(work.zeros<Scalars>(1)),
        states(work.zeros<TensorState>(tensors())),
        steps(work.zeros<TensorStep>(tensors())),
        sums_a(work.zeros<float>(blocks_of(tensor))),
        sums_b(work.zeros<float>(blocks_of(tensor))),
        maxima(work.zeros<float>(blocks_of(tensor))) {
    *scalars = group_scalars();
    for (uint64_t t = 0; t < tensors(); ++t) {
      states[t] = {0.2, 1.0, 1.0};
      const uint64_t size = std::min(tensor, n - t * tensor);
      std::vector<std::vector<Piece>> cut = work.pieces(size, size);
      for (std::vector<Piece>& table : cut) {
        for (Piece& piece : table) {
          piece.flat += t * tensor;
          piece.tensor = static_cast<uint32_t>(t);
        }
      }
      tables.push_back(cut);
    }
    p_list = work.list_of(tensors_of(p));
    directions = g_list = work.list_of(tensors_of(g));
    if (gradients == Dtype::kBF16) low_precision_gradients();
    tensor_args.ranges = &range;
    tensor_args.n = 1;
  }
  uint64_t tensors() const { return (n + tensor - 1) / tensor; }
  std::vector<void*> tensors_of(float* array) const {
    std::vector<void*> out;
    for (uint64_t t = 0; t < tensors(); ++t) out.push_back(array + t * tensor);
    return out;
  }

  // As in a step: float32 directions find no place in 16 bits and get a buffer that all tensors
  // share. It is where g was.
  void low_precision_gradients() {
    source.source = Dtype::kBF16;
    auto* narrow = work.zeros<uint16_t>(n);
    for (uint64_t i = 0; i < n; ++i) narrow[i] = f32_to_bf16(g[i]);
    std::vector<void*> lists;
    for (uint64_t t = 0; t < tensors(); ++t) lists.push_back(narrow + t * tensor);
    g_list = work.list_of(lists);
    directions = work.list_of(std::vector<void*>(tensors(), g));
  }

  void adam() {
    for (const auto& t : tables) {
      work.run(KernelId::kAdam, {g_list, m, v, p_list, &scalars->adam, nullptr, nullptr}, &source,
               t);
    }
  }
  // Directions take the place of float32 gradients, as in a step that has averaged them itself.
  void lamb() {
    for (uint64_t t = 0; t < tensors(); ++t) {
      range.blocks = blocks_of(std::min(tensor, n - t * tensor));
      range.tensor = static_cast<uint32_t>(t);
      work.run(KernelId::kLambMoments,
               {g_list, m, v, p_list, sums_a, sums_b, &scalars->lamb, nullptr, nullptr, directions},
               &source, tables[t]);
      work.run(KernelId::kLambScalars, {sums_a, sums_b, &scalars->lamb, states, steps},
               &tensor_args);
      work.run(KernelId::kLambUpdate, {directions, p_list, steps}, nullptr, tables[t]);
    }
  }

  Workload work;
  uint64_t n, tensor;
  float *g, *p, *m, *v;
  Scalars* scalars;
  TensorState* states;
  TensorStep* steps;
  float *sums_a, *sums_b, *maxima;
  void* p_list = nullptr;
  void* g_list = nullptr;
  void* directions = nullptr;
  std::vector<std::vector<std::vector<Piece>>> tables;  // of each tensor
  SourceArgs source{};
  NormRange range;
  TensorArgs tensor_args{};
};

// Adam with low-precision state in place of m and v.
struct LowPrecisionModel : Model {
  LowPrecisionModel(const Options& options, SimdLevel level, uint64_t count, StateType type,
                    Dtype gradients)
      : Model(options, level, count, count, gradients),
        bytes(n * state_type_bytes(type)),
        m_codes(work.zeros<uint8_t>(bytes)),
        v_codes(work.zeros<uint8_t>(bytes)),
        m_exponents(work.zeros<uint8_t>(blocks_of(n) * kStateBlocksPerNormBlock)),
        v_exponents(work.zeros<uint8_t>(blocks_of(n) * kStateBlocksPerNormBlock)),
        step(work.zeros<uint64_t>(1)) {
    args.source = gradients;
    args.state = type;
  }
  void low_precision_adam() {
    ++*step;
    for (const auto& t : tables) {
      work.run(KernelId::kAdamLowPrecision,
               {g_list, m_codes, v_codes, p_list, &scalars->adam, nullptr, nullptr, step,
                m_exponents, v_exponents},
               &args, t);
    }
  }

  uint64_t bytes;
  uint8_t *m_codes, *v_codes, *m_exponents, *v_exponents;
  uint64_t* step;
  LowPrecisionArgs args;
};

std::string check_low_precision(const Options& options, StateType type, Dtype gradients) {
  LowPrecisionModel ours(options, options.simd, kCheckElements, type, gradients);
  LowPrecisionModel reference({.threads = 1}, SimdLevel::kScalar, kCheckElements, type, gradients);
  for (int i = 0; i < 3; ++i) {
    ours.low_precision_adam();
    reference.low_precision_adam();
  }
  std::string e = difference("p", ours.p, reference.p, 4 * ours.n);
  if (e.empty()) e = difference("m", ours.m_codes, reference.m_codes, ours.bytes);
  if (e.empty()) e = difference("v", ours.v_codes, reference.v_codes, ours.bytes);
  return e;
}

template <class Step>
std::string check_model(const Options& options, uint64_t tensor, Dtype gradients,
                        const Step& step) {
  Model ours(options, options.simd, kCheckElements, tensor, gradients);
  Model reference({.threads = 1}, SimdLevel::kScalar, kCheckElements, tensor, gradients);
  for (int i = 0; i < 2; ++i) {
    step(ours);
    step(reference);
  }
  std::string e = difference("p", ours.p, reference.p, 4 * ours.n);
  if (e.empty()) e = difference("m", ours.m, reference.m, 4 * ours.n);
  if (e.empty()) e = difference("v", ours.v, reference.v, 4 * ours.n);
  return e;
}

// The local work of one compressed step of 1-bit LAMB or 1-bit Adam with W = 4: the encoder over
// everything, the server over a quarter, both passes (Adam: the second) over everything, momentum
// as bits. Bits of old and new momentum change places from step to step.
struct CompressedModel : Model {
  static constexpr uint32_t kWorld = 4;

  CompressedModel(const Options& options, SimdLevel level, uint64_t count, uint64_t tensor_size,
                  Dtype gradients)
      : Model(options, level, count, tensor_size, gradients),
        chunk((n + kWorld * 512 - 1) / (kWorld * 512) * 512),
        c(work.random(n, 15, 0.1f)),
        den(work.positive(n, 16, 0.1f, 0.01f)),
        server_c(work.random(chunk, 17, 0.1f)),
        worker_bits(work.zeros<uint8_t>(chunk * kWorld / 8 + 8)),
        rows(work.random_bits(kWorld * (chunk / 8 + 8), 18)),
        server_bits(work.zeros<uint8_t>(chunk / 8 + 8)),
        worker_scale(work.zeros<float>(1)),
        server_scale(work.zeros<float>(1)),
        worker_sums(work.zeros<float>(kWorld * blocks_of(chunk))),
        server_sums(work.zeros<float>(blocks_of(chunk))),
        flags(work.zeros<uint32_t>(1)),
        counts(work.zeros<uint64_t>(2)),
        messages(work.zeros<uint8_t>(kWorld * scale_message_bytes(1))),
        message(work.zeros<uint8_t>(scale_message_bytes(1))) {
    for (int k = 0; k < 2; ++k)
      bits[k] = work.random_bits(chunk * kWorld / 8 + 8, 19 + static_cast<uint64_t>(k));
    *worker_scale = *server_scale = 0.05f;
    counts[0] = n;
    counts[1] = std::min(chunk, n);
    for (uint32_t r = 0; r < kWorld; ++r) {
      const float s = 0.05f + 0.001f * static_cast<float>(r);
      std::memcpy(messages + r * scale_message_bytes(1), &s, 4);
    }
    by_chunk = work.pieces(n, chunk);
    server_pieces = work.pieces(std::min(chunk, n), chunk);
    for (uint64_t t = 0; t < tensors(); ++t) by_tensor.push_back(tensor_pieces(t));
    server.instances = 1;
    encode.scale = server.scale = ScaleKind::kL2;
    encode.source = gradients;
    server.row_bytes = chunk / 8 + 8;
    server.world = kWorld;
    worker_range.blocks = blocks_of(n);
    server_range.blocks = blocks_of(std::min(chunk, n));
  }

  // Pieces of tensor t, cut at chunk borders too, blocks counted from the tensor's start.
  std::vector<std::vector<Piece>> tensor_pieces(uint64_t t) const {
    std::vector<Piece> all;
    const uint64_t begin = t * tensor, end = std::min(n, begin + tensor);
    for (uint64_t at = begin; at < end;) {
      Piece piece;
      piece.flat = piece.offset = at;
      piece.count = std::min(end - at, chunk - at % chunk);
      piece.chunk = static_cast<uint32_t>(at / chunk);
      piece.block = (at - begin) / kNormBlock;
      piece.lane = static_cast<uint32_t>((at - begin) % kNormBlock);
      all.push_back(piece);
      at += piece.count;
    }
    return cut_pieces(all, work.split_elements());
  }

  // Up to what the ranks have averaged.
  void exchange(uint8_t* old_bits) {
    work.run(KernelId::kOnebitLambEncode,
             {g_list, nullptr, old_bits, messages, c, worker_scale, worker_bits, worker_sums,
              nullptr, flags, &scalars->shared, states, nullptr},
             &encode, by_chunk);
    finish(&worker_range, worker_sums, counts, worker_scale);
    work.run(KernelId::kOnebitServer,
             {rows, messages, server_c, server_scale, server_bits, server_sums, nullptr, server_c},
             &server, server_pieces);
    finish(&server_range, server_sums, counts + 1, server_scale);
  }
  void onebit_adam() {
    exchange(bits[turn]);
    turn = 1 - turn;
    work.run(KernelId::kStepSizes, {&scalars->shared, steps}, &tensor_args);
    update(bits[turn], 0);
  }
  void onebit_lamb() {
    uint8_t* old_bits = bits[turn];
    uint8_t* new_bits = bits[1 - turn];
    turn = 1 - turn;
    exchange(old_bits);
    for (uint64_t t = 0; t < tensors(); ++t) {
      // Here all tensors share one list entry, and the numbers of each are at the start of what its
      // kernels see.
      range.blocks = blocks_of(std::min(tensor, n - t * tensor));
      work.run(KernelId::kOnebitLambFactor,
               {nullptr, new_bits, messages, nullptr, old_bits, messages, v, den, p_list, nullptr,
                sums_a, sums_b, maxima, &scalars->shared, states + t},
               nullptr, by_tensor[t]);
      work.run(KernelId::kOnebitLambScalars,
               {sums_a, sums_b, maxima, &scalars->onebit_lamb, states + t, steps + t},
               &tensor_args);
      update(new_bits, t);
    }
  }
  void update(uint8_t* new_bits, uint64_t t) {
    work.run(KernelId::kMomentumUpdate,
             {nullptr, new_bits, messages, den, p_list, nullptr, &scalars->shared, steps + t,
              states + t},
             nullptr, by_tensor[t]);
  }
  void finish(NormRange* over, float* sums, uint64_t* count, float* scale) {
    NormArgs norm{};
    norm.ranges = over;
    norm.n = 1;
    norm.scale = ScaleKind::kL2;
    work.run(KernelId::kNormFinish, {sums, count, scale, message, flags}, &norm);
  }

  uint64_t chunk;
  float *c, *den, *server_c;
  uint8_t *worker_bits, *rows, *server_bits;
  float *worker_scale, *server_scale, *worker_sums, *server_sums;
  uint32_t* flags;
  uint64_t* counts;
  uint8_t *messages, *message;
  uint8_t* bits[2] = {};
  int turn = 0;
  std::vector<std::vector<Piece>> by_chunk, server_pieces;
  std::vector<std::vector<std::vector<Piece>>> by_tensor;
  EncodeArgs encode{};
  ServerArgs server{};
  NormRange worker_range, server_range;
};

template <class Step>
std::string check_compressed(const Options& options, uint64_t tensor, Dtype gradients,
                             const Step& step) {
  CompressedModel ours(options, options.simd, kCheckElements, tensor, gradients);
  CompressedModel reference({.threads = 1}, SimdLevel::kScalar, kCheckElements, tensor, gradients);
  for (int i = 0; i < 2; ++i) {
    step(ours);
    step(reference);
  }
  std::string e = difference("p", ours.p, reference.p, 4 * ours.n);
  if (e.empty()) e = difference("vf", ours.v, reference.v, 4 * ours.n);
  if (e.empty()) e = difference("c", ours.c, reference.c, 4 * ours.n);
  if (e.empty()) e = difference("server c", ours.server_c, reference.server_c, 4 * ours.chunk);
  return e;
}

}  // namespace

void optim_adam(const Options& options, std::vector<Measurement>* out) {
  for (const Dtype gradients : kGradients) {
    Model ours(options, options.simd, options.n, options.n, gradients);
    Model other(options, options.simd, options.n, options.n, Dtype::kF32);
    Case work;
    work.row = 5;
    work.benchmark = "optim_adam";
    work.variant = variant_of("AdamW", gradients);
    work.dtype = dtype_name(gradients);
    work.yardstick_name = "4 in 3 out";
    work.n = options.n;
    work.bytes_per_element = bytes_with(gradients, 28);
    work.share = work.bytes_per_element / 28;
    work.target = 1.03;
    work.ours = [&] { ours.adam(); };
    work.yardstick = [&] {
      in_shares(options, other.n, [&](uint64_t i, uint64_t n) {
        four_loads_three_stores(other.g + i, other.m + i, other.v + i, other.p + i, n);
      });
    };
    work.error = check_model(options, kCheckElements, gradients, [](Model& m) { m.adam(); });
    measure_into(work, options, out);
  }
}

// Row 6. Against the same step with float32 state, of which the bytes are 20 / 28 and 16 / 28.
void optim_adam_low_precision(const Options& options, std::vector<Measurement>* out) {
  for (const auto& [type, gradients] : {std::pair(StateType::kBf16, kGradients[0]),
                                        {StateType::kBf16, kGradients[1]},
                                        {StateType::kFp8, kGradients[0]},
                                        {StateType::kFp8, kGradients[1]}}) {
    LowPrecisionModel ours(options, options.simd, options.n, type, gradients);
    Model other(options, options.simd, options.n, options.n, gradients);
    Case work;
    work.row = 6;
    work.benchmark = "optim_adam_low_precision";
    work.variant = variant_of(fmt::format("{} state", state_type_name(type)), gradients);
    work.dtype = dtype_name(gradients);
    work.yardstick_name = "our Adam";
    work.n = options.n;
    work.bytes_per_element =
        bytes_with(gradients, 12 + 4 * static_cast<double>(state_type_bytes(type)));
    work.target = type == StateType::kBf16 ? 1 / 1.33 : 1 / 1.6;
    work.ours = [&] { ours.low_precision_adam(); };
    work.yardstick = [&] { other.adam(); };
    work.error = check_low_precision(options, type, gradients);
    measure_into(work, options, out);
  }
}

void optim_lamb(const Options& options, std::vector<Measurement>* out) {
  for (const auto& [tiled, gradients] : {std::pair(true, kGradients[0]),
                                         {false, kGradients[0]},
                                         {true, kGradients[1]},
                                         {false, kGradients[1]}}) {
    const uint64_t tensor = tiled ? kTile : options.n;
    Model ours(options, options.simd, options.n, tensor, gradients);
    Model other(options, options.simd, options.n, tensor, gradients);
    Case work;
    work.row = 7;
    work.benchmark = "optim_lamb";
    work.variant = variant_of(tiled ? "tile" : "large", gradients);
    work.dtype = dtype_name(gradients);
    work.yardstick_name = "our Adam";
    work.n = options.n;
    work.bytes_per_element = bytes_with(gradients, tiled ? 32 : 40);
    work.target = tiled ? 1.10 : 1.45;
    work.ours = [&] { ours.lamb(); };
    work.yardstick = [&] { other.adam(); };
    work.error =
        check_model(options, tiled ? kTile : kCheckElements, gradients, [](Model& m) { m.lamb(); });
    measure_into(work, options, out);
  }
}

// Encoder and server of a compressed step, bytes per element.
constexpr double kExchangeBytes = 12.25 + (8.125 + 4 / 8.0) / 4;

void optim_onebit_adam(const Options& options, std::vector<Measurement>* out) {
  for (const Dtype gradients : kGradients) {
    CompressedModel ours(options, options.simd, options.n, options.n, gradients);
    Model other(options, options.simd, options.n, options.n, gradients);
    Case work;
    work.row = 8;
    work.benchmark = "optim_1bit_adam";
    work.variant = variant_of("local", gradients);
    work.dtype = dtype_name(gradients);
    work.yardstick_name = "our Adam";
    work.n = options.n;
    work.bytes_per_element = bytes_with(gradients, kExchangeBytes + 12.125);
    work.target = 1.00;
    work.ours = [&] { ours.onebit_adam(); };
    work.yardstick = [&] { other.adam(); };
    work.error = check_compressed(options, kCheckElements, gradients,
                                  [](CompressedModel& m) { m.onebit_adam(); });
    measure_into(work, options, out);
  }
}

void optim_onebit_lamb(const Options& options, std::vector<Measurement>* out) {
  for (const auto& [tiled, gradients] : {std::pair(false, kGradients[0]),
                                         {true, kGradients[0]},
                                         {false, kGradients[1]},
                                         {true, kGradients[1]}}) {
    const uint64_t tensor = tiled ? kTile : options.n;
    CompressedModel ours(options, options.simd, options.n, tensor, gradients);
    Model other(options, options.simd, options.n, tensor, gradients);
    Case work;
    work.row = 9;
    work.benchmark = "optim_1bit_lamb";
    work.variant = variant_of(tiled ? "tile" : "large", gradients);
    work.dtype = dtype_name(gradients);
    work.yardstick_name = "our LAMB";
    work.n = options.n;
    work.bytes_per_element = bytes_with(gradients, kExchangeBytes + (tiled ? 20.25 : 28.375));
    work.target = tiled ? 1.30 : 1.10;
    work.ours = [&] { ours.onebit_lamb(); };
    work.yardstick = [&] { other.lamb(); };
    work.error =
        check_compressed(options, tensor, gradients, [](CompressedModel& m) { m.onebit_lamb(); });
    measure_into(work, options, out);
  }
}

}  // namespace sotto::perf
