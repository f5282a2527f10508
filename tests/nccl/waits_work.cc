#include "tests/nccl/waits_work.h"

#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "tests/cuda/device_memory.h"

namespace sotto::test {
namespace {

constexpr size_t kN = kWorkElements;

float number(size_t i, int rank, int round) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank * 5 + round * 3)) % 41) - 20.0f;
}

// In each round, at once: a sum of NCCL's own, a compressed mean, one of the host's tensors in
// between, and the caller's stream in front and behind.
class Collectives final : public Work {
 public:
  Collectives(const WorkKind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : kind_(kind), place_(place), comm_(comm), timeout_us_(timeout_us) {
    s_ = tensors_.add(sum_);
    m_ = tensors_.add(mean_);
    for (int round = 0; round < kind_.rounds; ++round) {
      for (auto* all : {&given_, &seen_sum_, &seen_mean_}) {
        (*all)[round].resize(kN);
        for (size_t i = 0; i < kN; ++i) (*all)[round][i] = number(i, place_.rank, round);
        tensors_.add((*all)[round]);
      }
    }
    tensors_.sync();
    OK(sotto_codec_create(comm_, kind.codec, &m_, 1, &codec_));
  }
  ~Collectives() override { (void)sotto_codec_destroy(codec_); }

  std::string round(int round) override {
    tensors_.copy(sum_, given_[round]);
    tensors_.copy(mean_, given_[round]);
    std::vector<int32_t> on_host(3, place_.rank + round);
    const sotto_buffer h = buffer(on_host);
    sotto_call plain = tensors_.call();
    plain.timeout_us = timeout_us_;
    sotto_call compressed = plain;
    compressed.codec = codec_;
    OK(sotto_all_reduce(comm_, &s_, &s_, 1, &plain, &ops_.emplace_back()));
    OK(sotto_all_reduce(comm_, &h, &h, 1, nullptr, &ops_.emplace_back()));
    OK(sotto_all_reduce(comm_, &m_, &m_, 1, &compressed, &ops_.emplace_back()));
    OK(sotto_op_stream_wait(ops_[0], tensors_.stream()));
    tensors_.copy(seen_sum_[round], sum_);
    OK(sotto_op_stream_wait(ops_[2], tensors_.stream()));
    tensors_.copy(seen_mean_[round], mean_);
    for (sotto_op* op : ops_) OK(sotto_op_wait(op, -1));
    for (sotto_op* op : std::exchange(ops_, {})) OK(sotto_op_release(op));
    tensors_.sync();
    return bytes_of(on_host);
  }
  std::string seen() override {
    tensors_.download();
    std::string all;
    for (int round = 0; round < kind_.rounds; ++round)
      all += bytes_of(seen_sum_[round]) + bytes_of(seen_mean_[round]);
    return all;
  }
  void end() override {
    for (sotto_op* op : ops_) {
      (void)sotto_op_wait(op, -1);
      OK(sotto_op_release(op));
    }
  }

 private:
  const WorkKind& kind_;
  const ProcessRank& place_;
  sotto_comm* comm_;
  const int64_t timeout_us_;
  Tensors tensors_{Where::kCuda};
  std::vector<float> sum_ = std::vector<float>(kN), mean_ = std::vector<float>(kN);
  sotto_buffer s_ = {}, m_ = {};
  std::vector<float> given_[kMaxRounds], seen_sum_[kMaxRounds], seen_mean_[kMaxRounds];
  sotto_codec* codec_ = nullptr;
  std::vector<sotto_op*> ops_;
};

// Both gradients become ready, the second one first, and the rank has no more or withdraws. Each is
// made on the stream that `make` returns.
void make_and_end(sotto_overlap* overlap, const WorkKind& kind, int rank, int round,
                  const std::function<cudaStream_t(uint64_t t)>& make) {
  for (uint64_t t = 2; t-- > 0;) OK(sotto_overlap_ready(overlap, &t, nullptr, 1, make(t)));
  if (kind.withdrawn_by[round] == 1 + rank) {
    OK(sotto_overlap_withdraw(overlap, fmt::format("round {}", round).c_str()));
  } else {
    OK(sotto_overlap_finish(overlap));
  }
}

// Has one operation at a time.
class OneByOne : public Work {
 public:
  OneByOne(const WorkKind& kind, const ProcessRank& place, int64_t timeout_us)
      : kind_(kind), place_(place), timeout_us_(timeout_us) {}
  void end() override {
    if (op_ == nullptr) return;
    (void)sotto_op_wait(op_, -1);
    OK(sotto_op_release(op_));
  }

 protected:
  sotto_call call_behind(const Tensors& tensors) const {
    sotto_call call = tensors.call();
    call.timeout_us = timeout_us_;
    return call;
  }
  // What the operation says.
  std::string finish(sotto_status expected) {
    const sotto_status status = sotto_op_wait(op_, -1);
    const std::string says = status == SOTTO_OK ? "" : sotto_last_error();
    OK(sotto_op_release(std::exchange(op_, nullptr)));
    require(status == expected, fmt::format("{} {}", sotto_status_name(status), says));
    return says;
  }

  const WorkKind& kind_;
  const ProcessRank& place_;
  const int64_t timeout_us_;
  sotto_op* op_ = nullptr;
};

// A step per round, the caller's stream in front and behind. Gradients that become ready one by one
// have another stream.
class Training final : public OneByOne {
 public:
  Training(const WorkKind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : OneByOne(kind, place, timeout_us) {
    sotto_param params[2] = {};
    for (size_t t = 0; t < 2; ++t) {
      p_[t].resize(kCounts[t]);
      g_[t].resize(kCounts[t]);
      for (size_t i = 0; i < kCounts[t]; ++i) p_[t][i] = 0.01f * static_cast<float>(i % 97) - 0.3f;
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = tensors_.add(p_[t]);
      params[t].grad = gradients().add(g_[t]);
      for (int round = 0; round < kind_.rounds; ++round) {
        given_[round][t].resize(kCounts[t]);
        for (size_t i = 0; i < kCounts[t]; ++i) given_[round][t][i] = number(i, place.rank, round);
        if (t == 0 && kind_.nan_of_rank[round] == place.rank)
          given_[round][t][place.rank == 0 ? kCounts[t] - 5 : 5] = NAN;
        gradients().add(given_[round][t]);
        for (auto* seen : {&before_[round][t], &seen_[round][t]}) {
          seen->resize(kCounts[t]);
          tensors_.add(*seen);
        }
      }
    }
    tensors_.sync();
    gradients().sync();
    OK(sotto_optim_create(comm, kind.optimizer, params, 2, &optim_));
    if (kind.overlap != nullptr) OK(sotto_overlap_create_step(optim_, kind.overlap, &overlap_));
  }
  ~Training() override {
    (void)sotto_overlap_destroy(overlap_);
    (void)sotto_optim_destroy(optim_);
  }

  std::string round(int round) override {
    const sotto_call call = call_behind(tensors_);
    for (size_t t = 0; t < 2; ++t) tensors_.copy(before_[round][t], p_[t]);
    const auto make = [&](uint64_t t) {
      gradients().copy(g_[t], given_[round][t]);
      return gradients().stream();
    };
    if (overlap_ == nullptr) {
      for (const uint64_t t : {0, 1}) make(t);
      OK(sotto_optim_step(optim_, &call, &op_));
    } else {
      OK(sotto_overlap_begin(overlap_, &call, &op_));
      make_and_end(overlap_, kind_, place_.rank, round, make);
    }
    OK(sotto_op_stream_wait(op_, tensors_.stream()));
    for (size_t t = 0; t < 2; ++t) tensors_.copy(seen_[round][t], p_[t]);
    const std::string says = finish(kind_.status(round));
    tensors_.sync();
    gradients().sync();
    return says;
  }
  std::string seen() override {
    tensors_.download();
    std::string all;
    for (int round = 0; round < kind_.rounds; ++round) {
      for (const auto& seen : {before_[round], seen_[round]})
        all += bytes_of(seen[0]) + bytes_of(seen[1]);
    }
    return all + bytes_of(p_[0]) + bytes_of(p_[1]);
  }

 private:
  static constexpr size_t kCounts[2] = {kN, 17};

  Tensors& gradients() { return kind_.overlap == nullptr ? tensors_ : gradients_; }

  Tensors tensors_{Where::kCuda}, gradients_{Where::kCuda};
  std::vector<float> p_[2], g_[2];
  std::vector<float> given_[kMaxRounds][2], before_[kMaxRounds][2], seen_[kMaxRounds][2];
  sotto_optim* optim_ = nullptr;
  sotto_overlap* overlap_ = nullptr;  // null: steps begin when all gradients are there
};

// A round of an overlap per round: each of two gradients becomes ready on a stream of its own, on
// which it is seen behind the round.
class Rounds final : public OneByOne {
 public:
  Rounds(const WorkKind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : OneByOne(kind, place, timeout_us) {
    sotto_buffer like[2];
    for (size_t t = 0; t < 2; ++t) {
      Gradient& g = gradients_[t];
      like[t] = g.tensors.add(g.values);
      for (int round = 0; round < kind_.rounds; ++round) {
        g.given[round].resize(kN);
        g.seen[round].resize(kN);
        for (size_t i = 0; i < kN; ++i) g.given[round][i] = number(i + t, place.rank, round);
        if (kind_.nan_of_rank[round] == place.rank) g.given[round][5] = NAN;
        g.tensors.add(g.given[round]);
        g.tensors.add(g.seen[round]);
      }
      g.tensors.sync();
    }
    OK(sotto_overlap_create(comm, kind.overlap, like, 2, &overlap_));
  }
  ~Rounds() override { (void)sotto_overlap_destroy(overlap_); }

  std::string round(int round) override {
    const sotto_call call = call_behind(gradients_[0].tensors);
    OK(sotto_overlap_begin(overlap_, &call, &op_));
    make_and_end(overlap_, kind_, place_.rank, round, [&](uint64_t t) {
      Gradient& g = gradients_[t];
      g.tensors.copy(g.values, g.given[round]);
      return g.tensors.stream();
    });
    for (Gradient& g : gradients_) {
      OK(sotto_op_stream_wait(op_, g.tensors.stream()));
      // Else gradients are undefined.
      if (kind_.status(round) == SOTTO_OK) g.tensors.copy(g.seen[round], g.values);
    }
    const std::string says = finish(kind_.status(round));
    for (Gradient& g : gradients_) g.tensors.sync();
    return says;
  }
  std::string seen() override {
    std::string all;
    for (Gradient& g : gradients_) {
      g.tensors.download();
      for (int round = 0; round < kind_.rounds; ++round) all += bytes_of(g.seen[round]);
    }
    return all;
  }

 private:
  struct Gradient {
    Tensors tensors{Where::kCuda};
    std::vector<float> values = std::vector<float>(kN), given[kMaxRounds], seen[kMaxRounds];
  };

  Gradient gradients_[2];
  sotto_overlap* overlap_ = nullptr;
};

// An inner step and what follows on it per round, the caller's stream in front and behind. A round
// sees the end of the average that it has launched.
class OuterSteps final : public OneByOne {
 public:
  OuterSteps(const WorkKind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : OneByOne(kind, place, timeout_us) {
    for (size_t i = 0; i < kN; ++i) p_[i] = 0.01f * static_cast<float>(i % 97) - 0.3f;
    sotto_param param = {};
    param.struct_size = sizeof(sotto_param);
    param.param = tensors_.add(p_);
    for (int round = 0; round < kind_.rounds; ++round) {
      given_[round].resize(kN);
      seen_[round].resize(kN);
      for (size_t i = 0; i < kN; ++i) given_[round][i] = number(i, place.rank, round);
      tensors_.add(given_[round]);
      tensors_.add(seen_[round]);
    }
    tensors_.sync();
    OK(sotto_outer_create(comm, kind.outer, &param, 1, &outer_));
  }
  ~OuterSteps() override { (void)sotto_outer_destroy(outer_); }

  std::string round(int round) override {
    tensors_.copy(p_, given_[round]);
    const sotto_call call = call_behind(tensors_);
    OK(sotto_outer_vote(outer_, 1u << (2 * round + place_.rank)));  // goes with the average
    OK(sotto_outer_step(outer_, &call, &op_));
    OK(sotto_op_stream_wait(op_, tensors_.stream()));
    tensors_.copy(seen_[round], p_);
    finish(SOTTO_OK);
    uint64_t length = 0;
    OK(sotto_outer_state_export(outer_, SOTTO_STATE_EXACT, nullptr, 0, &length));
    tensors_.sync();
    sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
    OK(sotto_outer_get_info(outer_, &info));
    return fmt::format("{} {} {};", info.votes, info.delta_norm, info.step_norm);
  }
  std::string seen() override {
    tensors_.download();
    std::string all;
    for (int round = 0; round < kind_.rounds; ++round) all += bytes_of(seen_[round]);
    return all;
  }

 private:
  Tensors tensors_{Where::kCuda};
  std::vector<float> p_ = std::vector<float>(kN), given_[kMaxRounds], seen_[kMaxRounds];
  sotto_outer* outer_ = nullptr;
};

}  // namespace

std::unique_ptr<Work> make_work(const WorkKind& kind, const ProcessRank& place, sotto_comm* comm,
                                int64_t timeout_us) {
  if (kind.codec != nullptr) return std::make_unique<Collectives>(kind, place, comm, timeout_us);
  if (kind.outer != nullptr) return std::make_unique<OuterSteps>(kind, place, comm, timeout_us);
  if (kind.optimizer != nullptr) return std::make_unique<Training>(kind, place, comm, timeout_us);
  return std::make_unique<Rounds>(kind, place, comm, timeout_us);
}

}  // namespace sotto::test
