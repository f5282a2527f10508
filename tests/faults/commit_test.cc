// A step that returned OK is done: its rank has the parameters and the state of a run in which
// nothing happened, bit for bit. A step that failed has changed nothing. Whatever happens to
// another rank, and whenever: at every message of a step, on ranks that are threads; at any moment,
// on ranks that are processes over TCP.
//
// SOTTO_TEST_COMMIT_CASES=5000 runs about as many cases; by default there are some 500.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>

#include <barrier>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "core/base/hash.h"
#include "core/overlap/overlap.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/process_comm.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

// How many times as many cases as the gate has.
uint64_t thoroughness() {
  const char* const cases = std::getenv("SOTTO_TEST_COMMIT_CASES");
  return cases == nullptr ? 1 : std::max<uint64_t>(1, std::strtoull(cases, nullptr, 10) / 500);
}

struct Kind {
  const char* name;
  const char* json;
  int before = 1;     // steps before the one that is disturbed
  bool half = false;  // float16 gradients, a model copy, a micro-batch before each step
  bool late = false;  // gradients arrive while the step runs: one that fails leaves all bits
};

constexpr const char* kOnebitAdam =
    R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}})";
constexpr const char* kOnebitLamb =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}}})";
// Updates 1 to 3: variance, compressed gradient, variance. The variance is frozen then: first local
// steps, then ones that synchronise.
constexpr const char* kZeroOne =
    R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3,
        "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2}}})";

constexpr Kind kKinds[] = {
    {"SGD", R"({"optimizer": {"type": "SGD", "params": {"lr": 1.0}}})"},
    {"SGD_momentum", R"({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})"},
    {"AdamW", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})"},
    {"Lion", R"({"optimizer": {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}}})"},
    {"AdamW_clipped",
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})"},
    {"AdamW_half",
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_accumulation_steps": 2,
         "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true, "loss_scale": 8}})",
     1, true},
    {"Adam_fp8",
     R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "sotto": {"state_dtype": "fp8"}})"},
    {"Adam_int8",
     R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
         "sotto": {"gradient_codec": {"type": "int8"}}})"},
    {"Adam_topk",
     R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
         "sotto": {"gradient_codec": {"type": "topk", "block": 64, "k": 8}}})"},
    {"Adam_topk_two_phase",
     R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
         "sotto": {"gradient_codec": {"type": "topk", "block": 64, "k": 8,
                                      "exchange": "two_phase"}}})"},
    {"Adam_onebit",
     R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}}, "gradient_clipping": 1.0,
         "sotto": {"gradient_codec": {"type": "onebit"}}})"},
    {"Lamb", R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}})"},
    {"OnebitAdam_warmup", kOnebitAdam, 0},
    {"OnebitAdam_first", kOnebitAdam, 2},
    {"OnebitAdam", kOnebitAdam, 3},
    {"OnebitAdam_partly",
     R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}},
         "sotto": {"param_groups": [{}, {"non_freeze": true}]}})",
     3},
    {"OnebitLamb_warmup", kOnebitLamb, 0},
    {"OnebitLamb_first", kOnebitLamb, 2},
    {"OnebitLamb", kOnebitLamb, 3},
    {"ZeroOne_variance", kZeroOne, 0},
    {"ZeroOne_gradient", kZeroOne, 2},
    {"ZeroOne_local", kZeroOne, 3},
    {"ZeroOne_sync", kZeroOne, 6},
    {"AdamW_late", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})", 1, false, true},
    {"Adam_int8_late",
     R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
         "sotto": {"gradient_codec": {"type": "int8"}}})",
     1, false, true},
    {"OnebitLamb_late",
     R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}},
         "sotto": {"granularity": "bucket", "bucket_elements": 16384}})",
     3, false, true},
    {"ZeroOne_sync_late", kZeroOne, 6, false, true},
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

const Kind& kind_named(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (name == kind.name) return kind;
  }
  throw RankError("there is no kind " + name);
}

// A rank's model and its optimizer.
class Model {
 public:
  Model(const Kind& kind, int rank, uint64_t count)
      : kind_(kind), rank_(rank), counts_{count - count / 3, count / 3} {}

  Status create(const std::shared_ptr<Comm>& comm) {
    std::vector<ParamSpec> specs;
    for (uint32_t t = 0; t < 2; ++t) {
      p_[t].assign(counts_[t], 0.5f);
      g_[t].resize(counts_[t]);
      half_[t].resize(counts_[t]);
      copy_[t].resize(counts_[t]);
      const bool grouped = std::string_view(kind_.json).find("param_groups") != std::string::npos;
      ParamSpec spec{"p" + std::to_string(t),
                     counts_[t],
                     grouped ? t : 0,
                     p_[t].data(),
                     g_[t].data(),
                     nullptr};
      if (kind_.half) {
        spec.grad = half_[t].data();
        spec.grad_dtype = Dtype::kF16;
        spec.copy = copy_[t].data();
      }
      specs.push_back(std::move(spec));
    }
    SOTTO_ASSIGN(optimizer_, Optimizer::create(comm, kind_.json, std::move(specs)));
    if (kind_.late) {
      SOTTO_ASSIGN(overlap_, Overlap::create_step(optimizer_, R"({"order": "registered"})"));
    }
    return ok_status();
  }

  // The step after `done` others. timeout_us: 0 is the comm's.
  Status step(uint64_t done, int64_t timeout_us = 0) {
    if (kind_.half) {
      set_gradients(done * 2 + 1);
      SOTTO_TRY(wait(optimizer_->accumulate({})));
    }
    set_gradients(done * 2);
    CallOptions options;
    options.timeout_us = timeout_us;
    return overlap_ == nullptr ? wait(optimizer_->step(options)) : round(options);
  }

  // Of everything; behind a step that has failed without error feedback, which is taken back up to
  // its rounding, unless gradients are late.
  Result<uint64_t> hash(bool ok) {
    SOTTO_ASSIGN(const OptimSnapshot snapshot, optimizer_->snapshot(ok || kind_.late));
    const std::vector<std::byte> blob = encode_optim(snapshot);
    uint64_t parts[5] = {hash64(blob.data(), blob.size())};
    for (uint32_t t = 0; t < 2; ++t) {
      parts[1 + t] = hash64(p_[t].data(), p_[t].size() * 4);
      parts[3 + t] = hash64(copy_[t].data(), copy_[t].size() * 2);
    }
    return hash64(parts, sizeof parts);
  }

 private:
  void set_gradients(uint64_t k) {
    for (uint32_t t = 0; t < 2; ++t) {
      for (uint64_t i = 0; i < counts_[t]; ++i) {
        const auto value = static_cast<float>(
            static_cast<int>((i * 31 + k * 17 + static_cast<uint64_t>(rank_) * 7) % 23) - 11);
        g_[t][i] = value;
        if (kind_.half) half_[t][i] = static_cast<uint16_t>((i + k) % 3 == 0 ? 0x4900 : 0xc400);
      }
    }
  }
  Status round(const CallOptions& options) {
    const Result<OpRef> op = overlap_->begin(options, ReduceOp::kMean);
    for (const uint64_t t : {1, 0}) {
      if (op.ok()) (void)overlap_->ready({&t, 1}, {}, std::nullopt);
    }
    if (op.ok()) (void)overlap_->finish();
    return wait(op);
  }
  Status wait(const Result<OpRef>& op) {
    if (!op.ok()) return op.status();
    return optimizer_->comm()->engine().wait(*op, -1);
  }

  const Kind& kind_;
  const int rank_;
  const uint64_t counts_[2];
  std::vector<float> p_[2], g_[2];
  std::vector<uint16_t> half_[2], copy_[2];
  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<Overlap> overlap_;  // null: steps begin when all gradients are there
};

// ---- Threads: at every message of a step ----

struct Outcome {
  Status status;
  uint64_t before = 0, after = 0;  // hashes: without error feedback; after OK with it
  uint64_t sends = 0;              // of the disturbed step
};

struct Disturbance {
  int rank = -1;  // none
  FaultKind kind = FaultKind::kLosePeer;
  uint64_t send = 0;  // of the step
  uint64_t seed = 1;
};

// Ranks as threads, each with its own script. timeout_us: of the disturbed step.
std::vector<Outcome> run(const Kind& kind, const std::string& transport, int size, uint64_t count,
                         const Disturbance& d, int64_t timeout_us) {
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<std::shared_ptr<FaultState>> states;
  WorldOptions world;
  world.size = size;
  world.transport = transport;
  world.params.segment_bytes = 8 * 1024;
  world.params.heartbeat_ms = 50;
  world.wrap_backends = [&](int32_t rank, BackendFactories* backends) {
    FaultScript script{.seed = d.seed, .max_delay_polls = 3};
    if (rank == d.rank) script.faults = {{d.kind, d.send}};
    const auto& state = states.emplace_back(std::make_shared<FaultState>());
    state->counts = false;
    make_faulty(&(*backends)[transport], script, state);
  };
  std::barrier all_there(size);
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    const auto rank = static_cast<size_t>(comm->rank());
    Outcome& out = outcomes[rank];
    Model model(kind, comm->rank(), count);
    SOTTO_TRY(model.create(comm));
    for (int k = 0; k < kind.before; ++k) SOTTO_TRY(model.step(static_cast<uint64_t>(k)));
    SOTTO_ASSIGN(out.before, model.hash(false));
    all_there.arrive_and_wait();
    FaultState& state = *states[rank];
    state.counts = true;
    out.status = model.step(static_cast<uint64_t>(kind.before), timeout_us);
    out.sends = state.sends;
    SOTTO_ASSIGN(out.after, model.hash(out.status.ok()));
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  return outcomes;
}

// Returns how many ranks have ended with OK.
int expect_old_or_new(const std::vector<Outcome>& undisturbed, const std::vector<Outcome>& got) {
  int ok = 0;
  for (size_t r = 0; r < got.size(); ++r) {
    ok += got[r].status.ok();
    if (got[r].status.ok()) {
      EXPECT_EQ(got[r].after, undisturbed[r].after) << "rank " << r << " said OK";
    } else {
      EXPECT_EQ(got[r].after, got[r].before) << "rank " << r << ": " << got[r].status.text();
    }
    EXPECT_EQ(got[r].before, undisturbed[r].before) << "rank " << r;
  }
  return ok;
}

class CommitAtEveryMessage : public testing::TestWithParam<Kind> {
 protected:
  // `cases` of the disturbances that there are, or all if there are less.
  static void expect(const std::string& transport, int size, FaultKind fault, int64_t timeout_us,
                     uint64_t cases) {
    constexpr uint64_t kCount = 37'503;
    const Kind& kind = GetParam();
    const std::vector<Outcome> whole = run(kind, transport, size, kCount, {}, 60'000'000);
    for (const Outcome& rank : whole) ASSERT_TRUE(rank.status.ok()) << rank.status.text();
    std::vector<std::pair<int, uint64_t>> places;
    for (int r = 0; r < size; ++r) {
      for (uint64_t send = 0; send < whole[static_cast<size_t>(r)].sends; ++send)
        places.emplace_back(r, send);
    }
    std::mt19937 random(static_cast<uint32_t>(size) * 7 + (transport == "tcp"));
    std::shuffle(places.begin(), places.end(), random);
    places.resize(std::min<uint64_t>(places.size(), cases * thoroughness()));
    for (const auto& [rank, send] : places) {
      SCOPED_TRACE(fmt::format("{} over {}, {} ranks: send {} of rank {}", kind.name, transport,
                               size, send, rank));
      expect_old_or_new(
          whole, run(kind, transport, size, kCount, {rank, fault, send, send + 1}, timeout_us));
      if (HasFailure()) return;
    }
  }
};

// Sanitizers make everything slower.
constexpr uint64_t kCases = kSanitized ? 2 : 5;

TEST_P(CommitAtEveryMessage, ALostPeer) {
  for (const int size : {2, 3, 4})
    expect("inproc", size, FaultKind::kLosePeer, 20'000'000, kCases - (size == 4 ? 1 : 0));
}

TEST_P(CommitAtEveryMessage, ALostPeerOverTcp) {
  for (const int size : {2, 3}) expect("tcp", size, FaultKind::kLosePeer, 20'000'000, kCases - 1);
}

// A rank that stands still: what it was to send never comes.
TEST_P(CommitAtEveryMessage, AMessageThatNeverComes) {
  expect("inproc", 3, FaultKind::kDrop, 300'000, kSanitized ? 0 : 1);
}

std::string name_of(const testing::TestParamInfo<Kind>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Kinds, CommitAtEveryMessage, testing::ValuesIn(kKinds), name_of);

// ---- Processes: at any moment ----

constexpr uint64_t kMostSteps = 40;  // where a reset may have harmed nothing

// A comm of processes over TCP, as far as it comes.
Result<std::shared_ptr<Comm>> create_comm(const ProcessRank& self, const KillTask& task) {
  Params params;
  params.transport = "tcp";
  params.heartbeat_ms = 100;
  return create_by_file(self, params, task.timeout_us, task.id_file);
}

// Ends one of this process's connections, as a broken network does.
void reset_a_connection(uint32_t seed) {
  std::vector<int> sockets;
  for (int fd = 3; fd < 256; ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 &&
        (peer.ss_family == AF_INET || peer.ss_family == AF_INET6))
      sockets.push_back(fd);
  }
  if (!sockets.empty()) shutdown(sockets[seed % sockets.size()], SHUT_RDWR);
}

// Steps until one fails; says how many have not, and the hash of what is there then. The task is
// kind,count,fault,seed.
SOTTO_RANK_MAIN(commit) {
  const KillTask task = KillTask::parse(self);
  const size_t first = task.what.find(','), second = task.what.find(',', first + 1),
               third = task.what.find(',', second + 1);
  const Kind& kind = kind_named(task.what.substr(0, first));
  const uint64_t count = std::stoull(task.what.substr(first + 1));
  const bool resets = task.what.substr(second + 1, third - second - 1) == "reset";
  const auto seed = static_cast<uint32_t>(std::stoul(task.what.substr(third + 1)));
  Result<std::shared_ptr<Comm>> comm = create_comm(self, task);
  require(comm.ok(), comm.status().text());
  Model model(kind, self.rank, count);
  Status status = model.create(*comm);
  std::thread breaker;
  uint64_t done = 0;
  for (; status.ok() && (!resets || done < kMostSteps); done += status.ok()) {
    if (done == 1) self.at("working");
    if (done == 1 && resets && self.rank == task.victim) {
      breaker = std::thread([seed] {
        std::this_thread::sleep_for(std::chrono::microseconds(seed % 20'011));
        reset_a_connection(seed);
      });
    }
    status = model.step(done);
  }
  if (breaker.joinable()) breaker.join();
  Result<uint64_t> hash = model.hash(false);
  require(hash.ok(), hash.status().text());
  self.say(fmt::format("{} {} {} {}", done, *hash, code_name(status.code()), status.text()));
  return 0;
}

// What ranks have after each number of steps, of a run in which nothing happens: by rank, then by
// steps.
class Reference {
 public:
  Reference(const Kind& kind, int size, uint64_t count)
      : kind_(kind), size_(size), count_(count), hashes_(static_cast<size_t>(size)) {}
  uint64_t hash(int rank, uint64_t steps) {
    if (hashes_[0].size() <= steps) compute(steps);
    return hashes_[static_cast<size_t>(rank)][steps];
  }

 private:
  void compute(uint64_t steps) {
    for (auto& of_rank : hashes_) of_rank.clear();
    WorldOptions world;
    world.size = size_;
    world.timeout_us = 60'000'000;
    const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
      Model model(kind_, comm->rank(), count_);
      SOTTO_TRY(model.create(comm));
      std::vector<uint64_t>& of_rank = hashes_[static_cast<size_t>(comm->rank())];
      for (uint64_t k = 0;; ++k) {
        SOTTO_ASSIGN(const uint64_t hash, model.hash(false));
        of_rank.push_back(hash);
        if (k == steps) return ok_status();
        SOTTO_TRY(model.step(k));
      }
    });
    require(status.ok(), status.text());
  }

  const Kind& kind_;
  const int size_;
  const uint64_t count_;
  std::vector<std::vector<uint64_t>> hashes_;
};

struct ProcessCase {
  const Kind& kind;
  const char* fault;  // kill, stop, reset
  int size;
  uint64_t count;
  uint32_t seed;
};

void run_process_case(const ProcessCase& c) {
  SCOPED_TRACE(fmt::format("{}, {} parameters, {} ranks, {} with seed {}", c.kind.name, c.count,
                           c.size, c.fault, c.seed));
  const std::string file =
      fmt::format("{}sotto-commit-{}-{}", testing::TempDir(), getpid(), c.seed);
  const int victim = static_cast<int>(c.seed / 3) % c.size;
  ProcessOptions options;
  const bool stops = std::string_view(c.fault) == "stop";
  options.argument =
      KillTask{file, fmt::format("{},{},{},{}", c.kind.name, c.count, c.fault, c.seed), victim,
               stops ? kStopTimeoutUs : kKillTimeoutUs}
          .argument();
  options.timeout_ms = 200'000;
  const auto remove_files = [&] {
    for (const char* more : {"", ".new"}) std::remove((file + more).c_str());
  };
  remove_files();
  Processes ranks("commit", c.size, options);
  const bool resets = std::string_view(c.fault) == "reset";
  const int signal = stops ? SIGSTOP : SIGKILL;
  if (!resets) {
    ranks.await(victim, "working");
    std::this_thread::sleep_for(std::chrono::microseconds(c.seed * 7919 % 20'011));
    ranks.kill(victim, signal);
  }
  Reference reference(c.kind, c.size, c.count);
  for (int r = 0; r < c.size; ++r) {
    if (!resets && r == victim) continue;
    const std::string text = ranks.message(r);
    const uint64_t steps = std::stoull(text);
    const uint64_t hash = std::stoull(text.substr(text.find(' ')));
    EXPECT_EQ(hash, reference.hash(r, steps)) << "rank " << r << ": " << text;
    if (!resets) {
      EXPECT_EQ(text.find(" OK "), std::string::npos) << text;
    }
  }
  if (stops) ranks.kill(victim, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  remove_files();
}

class CommitAtAnyMoment : public testing::TestWithParam<Kind> {};

// Every kind with some numbers of ranks and sizes, which the seed draws.
TEST_P(CommitAtAnyMoment, OfADeathAResetOrAHalt) {
  const auto index = static_cast<uint32_t>(&kind_named(GetParam().name) - kKinds);
  const uint64_t cases = (kSanitized ? 1 : 2) * thoroughness();
  for (uint32_t i = 0; i < cases; ++i) {
    std::mt19937 random(index * 1000 + i);
    // A halt takes the time-out; one in twenty has one.
    const char* const fault = (index + i) % 20 == 7 ? "stop" : i % 2 == 0 ? "kill" : "reset";
    const uint64_t least = kSanitized ? 40'000 : 150'000;  // whose step takes as long
    const uint64_t most = random() % 8 != 0 ? 4 * least : kSanitized ? 600'000 : 4'000'000;
    run_process_case({kind_named(GetParam().name), fault, 2 + static_cast<int>(random() % 3),
                      least + random() % (most - least + 1),
                      static_cast<uint32_t>(random() % 1'000'000)});
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CommitAtAnyMoment, testing::ValuesIn(kKinds), name_of);

}  // namespace
}  // namespace sotto::test
