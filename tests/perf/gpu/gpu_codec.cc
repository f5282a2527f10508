// Row 29: the 1-bit codec on a CUDA device, as a share of a copy within the device.
#include <cmath>
#include <random>

#include "tests/perf/gpu/gpu_benchmarks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 13;
constexpr uint32_t kWorld = 4;

uint64_t blocks_of(uint64_t n) { return (n + kNormBlock - 1) / kNormBlock; }
uint64_t chunk_of(uint64_t n) { return (n / kWorld + 511) / 512 * 512; }

// What rank 0 of kWorld computes in a 1-bit all-reduce of n elements: encode all, serve a chunk,
// decode all. The other ranks' chunk in its rows is that which it would have sent them, and what
// the other servers have sent is noise.
template <class Work>
struct Codec {
  Codec(Work& device, uint64_t count)
      : work(device),
        n(count),
        chunk(chunk_of(n)),
        x(work.random(n, 1)),
        c(work.random(n, 2)),
        server_c(work.random(chunk, 4)),
        y(work.template zeros<float>(n)),
        x_list(work.list_of({x})),
        y_list(work.list_of({y})),
        bits(work.template zeros<uint8_t>(kWorld * chunk / 8)),
        result_bits(work.template zeros<uint8_t>(kWorld * chunk / 8)),
        sums(work.template zeros<float>(blocks_of(n))),
        mixed_sums(work.template zeros<float>(blocks_of(n))),
        server_sums(work.template zeros<float>(blocks_of(chunk))),
        scales(work.template zeros<float>(2)),
        valid_counts(work.template zeros<uint64_t>(2)),
        flags(work.template zeros<uint32_t>(1)),
        messages(work.template zeros<uint8_t>(kWorld * scale_message_bytes(1))),
        results(work.template zeros<uint8_t>(kWorld * scale_message_bytes(1))),
        pieces(work.pieces(n, n)),
        server_pieces(work.pieces(chunk, chunk)),
        result_pieces(work.pieces(n, chunk)) {
    for (std::vector<Piece>& table : result_pieces) {
      for (Piece& p : table) p.message = 2 * p.chunk;
    }
    encode_args.scale = server_args.scale = ScaleKind::kL2;
    server_args.row_bytes = chunk / 8;
    server_args.instances = 1;
    server_args.world = kWorld;
    range.blocks = blocks_of(n);
    server_range.blocks = blocks_of(chunk);
    norm.ranges = &range;
    server_norm.ranges = &server_range;
    norm.n = server_norm.n = 1;
    norm.scale = server_norm.scale = ScaleKind::kL2;
    fill();
  }
  void encode() { encode(sums); }
  // As if gradients were of so different sizes that sums of norm blocks have to be added in order.
  void encode_mixed() { encode(mixed_sums); }
  void serve() {
    work.run(KernelId::kOnebitServer,
             {bits, messages, server_c, scales + 1, result_bits, server_sums, nullptr, server_c},
             &server_args, server_pieces);
    work.run(KernelId::kNormFinish, {server_sums, valid_counts + 1, scales + 1, results, flags},
             &server_norm);
  }
  void decode() {
    work.run(KernelId::kOnebitDecode, {result_bits, results, y_list, nullptr}, nullptr,
             result_pieces);
  }

  void encode(float* norms) {
    work.run(KernelId::kOnebitEncode, {x_list, c, scales, bits, sums, nullptr, flags, nullptr},
             &encode_args, pieces);
    work.run(KernelId::kNormFinish, {norms, valid_counts, scales, messages, flags}, &norm);
  }
  void fill() {
    const uint64_t counts[] = {n, chunk};
    work.put(valid_counts, counts, sizeof counts);
    std::vector<float> mixed(blocks_of(n));
    for (size_t b = 0; b < mixed.size(); ++b)
      mixed[b] = std::ldexp(1.0f + static_cast<float>(b % 1001), static_cast<int>(b * 7919 % 61));
    work.put(mixed_sums, mixed.data(), 4 * mixed.size());
    std::mt19937 engine(5);
    std::vector<uint32_t> noise(kWorld * chunk / 32);
    for (uint32_t& word : noise) word = static_cast<uint32_t>(engine());
    work.put(result_bits, noise.data(), 4 * noise.size());
    for (uint32_t r = 0; r < kWorld; ++r) {
      const float scale = 1.0f + 0.1f * static_cast<float>(r);
      for (uint8_t* area : {messages, results})
        work.put(area + r * scale_message_bytes(1), &scale, sizeof scale);
    }
  }

  Work& work;
  const uint64_t n, chunk;
  float *x, *c, *server_c, *y;
  void *x_list, *y_list;
  uint8_t *bits, *result_bits;
  float *sums, *mixed_sums, *server_sums, *scales;
  uint64_t* valid_counts;
  uint32_t* flags;
  uint8_t *messages, *results;
  std::vector<std::vector<Piece>> pieces, server_pieces, result_pieces;
  EncodeArgs encode_args{};
  ServerArgs server_args{};
  NormRange range, server_range;
  NormArgs norm{}, server_norm{};
};

std::string check(const std::shared_ptr<Device>& device, const Options& options) {
  const uint64_t n = std::min(options.n, kCheckElements);
  GpuWork gpu(device);
  Workload cpu(options, SimdLevel::kScalar);
  Codec ours(gpu, n);
  Codec reference(cpu, n);
  for (int step = 0; step < 2; ++step) {
    ours.encode(), ours.serve(), ours.decode();
    reference.encode(), reference.serve(), reference.decode();
  }
  std::string e = device_difference(gpu, "c", ours.c, reference.c, 4 * n);
  if (e.empty())
    e = device_difference(gpu, "server c", ours.server_c, reference.server_c, 4 * ours.chunk);
  if (e.empty()) e = device_difference(gpu, "y", ours.y, reference.y, 4 * n);
  ours.encode_mixed(), reference.encode_mixed();
  if (e.empty()) e = device_difference(gpu, "mixed scale", ours.scales, reference.scales, 4);
  return e;
}

}  // namespace

void gpu_codec(const std::shared_ptr<Device>& device, const Options& options,
               std::vector<Measurement>* out) {
  const std::string error = check(device, options);
  GpuWork gpu(device);
  Codec<GpuWork> ours(gpu, options.n);
  const auto measure_as = [&](const char* variant, uint64_t n, double bytes,
                              const std::function<void()>& f) {
    Case work;
    work.row = 29;
    work.benchmark = "gpu_codec";
    work.variant = variant;
    work.yardstick_name = "device copy";
    work.n = n;
    work.bytes_per_element = bytes;
    work.share = bytes / 8;
    work.target = 1 / 0.90;
    work.ours_ms = [&gpu, f] { return gpu.milliseconds(f); };
    work.yardstick_ms = [&, n] {
      return gpu.milliseconds([&] { gpu.copy(ours.y, ours.x, 4 * n); });
    };
    work.error = error;
    measure_into(work, options, out);
  };
  measure_as("encode", ours.n, 12.125, [&] { ours.encode(); });
  measure_as("encode, mixed", ours.n, 12.125, [&] { ours.encode_mixed(); });
  measure_as("serve, W=4", ours.chunk, 8.125 + kWorld / 8.0, [&] { ours.serve(); });
  measure_as("decode, W=4", ours.n, 4.125, [&] { ours.decode(); });
}

Turn gpu_codec_turn(const std::shared_ptr<Device>& device, const Options& options) {
  struct State {
    State(const std::shared_ptr<Device>& device, uint64_t n) : gpu(device), codec(gpu, n) {}
    GpuWork gpu;
    Codec<GpuWork> codec;
  };
  auto state = std::make_shared<State>(device, options.n);
  return [state] {
    Codec<GpuWork>& codec = state->codec;
    return state->gpu.milliseconds([&] { codec.encode(), codec.serve(), codec.decode(); });
  };
}

std::string device_difference(GpuWork& gpu, const char* what, const void* on_device,
                              const void* on_host, uint64_t bytes) {
  std::vector<std::byte> copy(bytes);
  gpu.get(copy.data(), on_device, bytes);
  return difference(what, copy.data(), on_host, bytes);
}

}  // namespace sotto::perf
