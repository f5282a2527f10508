// Row 29: the 1-bit codec on a CUDA device, as a share of a copy within the device.
#include "tests/perf/gpu/gpu_benchmarks.h"

namespace sotto::perf {
namespace {

constexpr uint64_t kCheckElements = (1 << 20) + 13;

uint64_t blocks_of(uint64_t n) { return (n + kNormBlock - 1) / kNormBlock; }

// What one rank alone does in a 1-bit all-reduce of n elements: encode, serve, decode.
template <class Work>
struct Codec {
  Codec(Work& device, uint64_t count)
      : work(device),
        n(count),
        x(work.random(n, 1)),
        c(work.random(n, 2)),
        server_c(work.random(n, 4)),
        y(work.template zeros<float>(n)),
        x_list(work.list_of({x})),
        y_list(work.list_of({y})),
        bits(work.template zeros<uint8_t>(n / 8 + 1)),
        server_bits(work.template zeros<uint8_t>(n / 8 + 1)),
        sums(work.template zeros<float>(blocks_of(n))),
        scales(work.template zeros<float>(2)),
        valid_count(work.template zeros<uint64_t>(1)),
        flags(work.template zeros<uint32_t>(1)),
        messages(work.template zeros<uint8_t>(2 * scale_message_bytes(1))),
        pieces(work.pieces(n, n)) {
    work.put(valid_count, &n, sizeof n);
    encode_args.scale = server_args.scale = ScaleKind::kL2;
    server_args.row_bytes = n / 8 + 1;
    server_args.instances = 1;
    server_args.world = 1;
    range.blocks = blocks_of(n);
    norm.ranges = server_norm.ranges = &range;
    norm.n = server_norm.n = 1;
    norm.scale = server_norm.scale = ScaleKind::kL2;
  }
  void encode() {
    work.run(KernelId::kOnebitEncode, {x_list, c, scales, bits, sums, nullptr, flags, nullptr},
             &encode_args, pieces);
    work.run(KernelId::kNormFinish, {sums, valid_count, scales, messages, flags}, &norm);
  }
  void serve() {
    work.run(KernelId::kOnebitServer,
             {bits, messages, server_c, scales + 1, server_bits, sums, nullptr, server_c},
             &server_args, pieces);
    work.run(KernelId::kNormFinish,
             {sums, valid_count, scales + 1, messages + scale_message_bytes(1), flags},
             &server_norm);
  }
  void decode() {
    work.run(KernelId::kOnebitDecode,
             {server_bits, messages + scale_message_bytes(1), y_list, nullptr}, nullptr, pieces);
  }

  Work& work;
  const uint64_t n;
  float *x, *c, *server_c, *y;
  void *x_list, *y_list;
  uint8_t *bits, *server_bits;
  float *sums, *scales;
  uint64_t* valid_count;
  uint32_t* flags;
  uint8_t* messages;
  std::vector<std::vector<Piece>> pieces;
  EncodeArgs encode_args{};
  ServerArgs server_args{};
  NormRange range;
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
  if (e.empty()) e = device_difference(gpu, "server c", ours.server_c, reference.server_c, 4 * n);
  if (e.empty()) e = device_difference(gpu, "y", ours.y, reference.y, 4 * n);
  return e;
}

}  // namespace

void gpu_codec(const std::shared_ptr<Device>& device, const Options& options,
               std::vector<Measurement>* out) {
  const std::string error = check(device, options);
  GpuWork gpu(device);
  Codec<GpuWork> ours(gpu, options.n);
  const auto measure_as = [&](const char* variant, double bytes, const std::function<void()>& f) {
    Case work;
    work.row = 29;
    work.benchmark = "gpu_codec";
    work.variant = variant;
    work.yardstick_name = "device copy";
    work.n = options.n;
    work.bytes_per_element = bytes;
    work.share = bytes / 8;
    work.target = 1 / 0.90;
    work.ours_ms = [&gpu, f] { return gpu.milliseconds(f); };
    work.yardstick_ms = [&] {
      return gpu.milliseconds([&] { gpu.copy(ours.y, ours.x, 4 * ours.n); });
    };
    work.error = error;
    measure_into(work, options, out);
  };
  measure_as("encode", 12.125, [&] { ours.encode(); });
  measure_as("serve, W=1", 8.25, [&] { ours.serve(); });
  measure_as("decode", 4.125, [&] { ours.decode(); });
}

std::string device_difference(GpuWork& gpu, const char* what, const void* on_device,
                              const void* on_host, uint64_t bytes) {
  std::vector<std::byte> copy(bytes);
  gpu.get(copy.data(), on_device, bytes);
  return difference(what, copy.data(), on_host, bytes);
}

}  // namespace sotto::perf
