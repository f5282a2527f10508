// Overlaps with a codec on every kind of world: the bits of a codec per bucket, and error feedback
// that only rounds change which end well.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "core/codec/codec.h"
#include "core/state/overlap_state.h"
#include "tests/conformance/overlap_worlds.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/overlap_model.h"

namespace sotto::test {
namespace {

const std::vector<uint64_t> kCounts{20'001, 5, 0, 3'000, 9'333, 1, 4'345, 12'000};

std::string with_codec(const std::string& codec) {
  return R"({"first_bucket_bytes": 100, "bucket_bytes": 45000, "codec": )" + codec + "}";
}

class OverlapCodec : public OverlapWorlds {};

// A codec of its own for each bucket of an overlap.
class CodecPerBucket {
 public:
  CodecPerBucket(const std::shared_ptr<Comm>& comm, const std::string& json,
                 const std::vector<OverlapBucket>& buckets)
      : comm_(comm), access_(comm->context()->engine(), comm->context()->device()) {
    for (const OverlapBucket& bucket : buckets) {
      std::vector<uint64_t> counts;
      for (const uint32_t t : bucket.tensors) counts.push_back(kCounts[t]);
      const std::vector<Dtype> types(counts.size(), Dtype::kF32);
      codecs_.push_back(checked(Codec::create(comm, json, counts, types)));
      lists_.push_back(bucket.tensors);
    }
  }
  Values mean(const Values& mine) {
    Values out(mine.size());
    for (size_t b = 0; b < codecs_.size(); ++b) {
      std::vector<DeviceArray> memory;
      SmallVector<void*> places;
      for (const uint32_t t : lists_[b]) {
        memory.push_back(checked(DeviceArray::make(access_.device(), mine[t].size())));
        checked(access_.upload(memory.back().data(), std::span<const std::byte>(mine[t])));
        places.push_back(memory.back().data());
      }
      checked(comm_->finish(codecs_[b]->all_reduce(places, places, {})));
      for (size_t i = 0; i < places.size(); ++i) {
        const uint32_t t = lists_[b][i];
        out[t] = checked(access_.download<std::byte>(places[i], mine[t].size()));
      }
    }
    return out;
  }

 private:
  std::shared_ptr<Comm> comm_;
  DeviceAccess access_;
  std::vector<std::shared_ptr<Codec>> codecs_;
  std::vector<std::vector<uint32_t>> lists_;
};

void round_of(OverlapModel& model, const Values& mine, uint64_t seed) {
  const OpRef op = model.begin();
  std::vector<uint64_t> order(model.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::shuffle(order.begin(), order.end(), random);
  for (const uint64_t t : order) model.ready(mine, {&t, 1});
  checked(model.overlap().finish());
  checked(model.wait(op));
}

const char* const kCodecs[] = {
    R"({"type": "onebit", "granularity": "flat"})",
    R"({"type": "onebit", "granularity": "tensor", "scale": "l1"})",
    R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192})",
    R"({"type": "int8"})",
    R"({"type": "int4", "block": 32})",
    R"({"type": "bf16"})",
    R"({"type": "fp16", "residual": true})",
    R"({"type": "topk", "block": 256, "k": 16})",
    R"({"type": "topk", "block": 64, "k": 4, "exchange": "two_phase", "k_server": 16})",
};

TEST_P(OverlapCodec, HasTheBitsOfACodecPerBucket) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* codec : kCodecs) {
      OverlapModel model(comm, with_codec(codec), OverlapModel::floats(kCounts));
      CodecPerBucket peer(comm, codec, model.overlap().buckets());
      for (uint64_t round = 0; round < 4; ++round) {
        const Values mine = model.values(comm->rank(), round);
        const Values wanted = peer.mean(mine);
        round_of(model, mine, round * 7 + static_cast<uint64_t>(comm->rank()));
        same_values(model.read(), wanted, fmt::format("{}, round {}", codec, round));
      }
    }
  });
}

// 16-bit gradients are what float32 ones of the same values become.
TEST_P(OverlapCodec, WidensAndNarrowsGradients) {
  run([](const std::shared_ptr<Comm>& comm) {
    const std::vector<OverlapModel::Shape> mixed = OverlapModel::mixed_shapes();
    std::vector<OverlapModel::Shape> wide = mixed;
    for (OverlapModel::Shape& s : wide) s.dtype = Dtype::kF32;
    // One bucket for both: gradients of a type are next to each other in it.
    const std::string json = R"({"first_bucket_bytes": 100000000, "codec": "int8"})";
    OverlapModel model(comm, json, mixed);
    const std::vector<uint32_t> order = model.overlap().buckets().at(0).tensors;
    std::vector<OverlapModel::Shape> sorted;
    for (const uint32_t t : order) sorted.push_back(wide[t]);
    OverlapModel peer(
        comm, R"({"first_bucket_bytes": 100000000, "codec": "int8", "order": "registered"})",
        sorted);
    for (uint64_t round = 0; round < 3; ++round) {
      const Values mine = model.values(comm->rank(), round);
      Values widened(sorted.size());
      for (size_t i = 0; i < order.size(); ++i)
        widened[i] = converted(mine[order[i]], mixed[order[i]].dtype, Dtype::kF32);
      round_of(peer, widened, round);
      const Values means = peer.read();
      Values wanted(mixed.size());
      for (size_t i = 0; i < order.size(); ++i)
        wanted[order[i]] = converted(means[i], Dtype::kF32, mixed[order[i]].dtype);
      round_of(model, mine, round + 5);
      same_values(model.read(), wanted, "16 bits");
    }
  });
}

// NaN in the gradient that comes last, a withdrawal, both: as if the round had not been.
TEST_P(OverlapCodec, KeepsErrorFeedbackIfARoundDoesNotEndWell) {
  if (std::get<1>(GetParam()) == 1) return;  // nothing is compressed
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* codec : {kCodecs[0], kCodecs[2], kCodecs[3]}) {
      OverlapModel model(comm, with_codec(codec), OverlapModel::floats(kCounts));
      CodecPerBucket peer(comm, codec, model.overlap().buckets());
      const int32_t last = comm->size() - 1;
      for (uint64_t round = 0; round < 4; ++round) {
        const Values mine = model.values(comm->rank(), round);
        const Values wanted = peer.mean(mine);
        round_of(model, mine, round);
        same_values(model.read(), wanted, fmt::format("{}, round {}", codec, round));
        const auto before = checked(export_state(model.overlap(), StateMode::kExact));
        // The last bucket has gradient 0.
        Values bad = model.values(comm->rank(), 100 + round);
        const float nan = std::numeric_limits<float>::quiet_NaN();
        if (comm->rank() == last && round != 2) std::memcpy(&bad[0][4 * 19'000], &nan, 4);
        const OpRef op = model.begin();
        for (uint64_t t = model.size(); t-- > 0;) model.ready(bad, {&t, 1});
        const bool withdraws = comm->rank() == 0 && round >= 2;
        checked(withdraws ? model.overlap().withdraw("no") : model.overlap().finish());
        const Status ended = model.wait(op);
        const std::string begin = fmt::format("overlap round {}: ", 2 * round + 2);
        const std::string who =
            round >= 2 ? "rank 0 has withdrawn: no; gradients are undefined"
                       : fmt::format(" in the gradients of rank {}; gradients are undefined", last);
        const Code code = round >= 2 ? Code::kCancelled : Code::kNonfinite;
        if (ended.code() != code || !ended.text().starts_with(begin) ||
            ended.text().find(who) == std::string::npos)
          throw RankError(ended.text());
        if (checked(export_state(model.overlap(), StateMode::kExact)) != before)
          throw RankError(fmt::format("{}: error feedback has changed", codec));
      }
    }
  });
}

// Every rank at every moment of a round.
TEST_P(OverlapCodec, KeepsErrorFeedbackWheneverARankWithdraws) {
  if (std::get<1>(GetParam()) == 1) return;  // nothing is compressed
  run([](const std::shared_ptr<Comm>& comm) {
    OverlapModel model(comm, with_codec(kCodecs[1]), OverlapModel::floats(kCounts));
    CodecPerBucket peer(comm, kCodecs[1], model.overlap().buckets());
    const Values first = model.values(comm->rank(), 0), last = model.values(comm->rank(), 1);
    (void)peer.mean(first);
    round_of(model, first, 1);
    const auto before = checked(export_state(model.overlap(), StateMode::kExact));
    for (uint64_t marks = 0; marks <= model.size(); ++marks) {
      const Values mine = model.values(comm->rank(), 10 + marks);
      const bool withdraws =
          marks % static_cast<uint64_t>(comm->size()) == static_cast<uint64_t>(comm->rank());
      const OpRef op = model.begin();
      for (uint64_t t = model.size(); t-- > (withdraws ? model.size() - marks : 0);)
        model.ready(mine, {&t, 1});
      checked(withdraws ? model.overlap().withdraw("no") : model.overlap().finish());
      const Status ended = model.wait(op);
      if (ended.code() != Code::kCancelled) throw RankError(ended.text());
      if (checked(export_state(model.overlap(), StateMode::kExact)) != before)
        throw RankError(fmt::format("error feedback has changed after {} marks", marks));
    }
    const Values wanted = peer.mean(last);
    round_of(model, last, 2);
    same_values(model.read(), wanted, "behind withdrawals");
  });
}

TEST_P(OverlapCodec, GoesOnFromItsState) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* codec : {kCodecs[1], kCodecs[4]}) {
      OverlapModel model(comm, with_codec(codec), OverlapModel::floats(kCounts));
      for (uint64_t round = 0; round < 2; ++round)
        round_of(model, model.values(comm->rank(), round), round);
      const auto exact = checked(export_state(model.overlap(), StateMode::kExact));
      const auto mean = checked(export_state(model.overlap(), StateMode::kMean));
      if (mean.size() != checked(mean_state_bytes(model.overlap()))) throw RankError("bytes");
      const Values next = model.values(comm->rank(), 9);
      round_of(model, next, 9);
      const Values wanted = model.read();
      OverlapModel other(comm, with_codec(codec), OverlapModel::floats(kCounts));
      checked(import_state(other.overlap(), StateMode::kExact, exact));
      round_of(other, next, 4);
      same_values(other.read(), wanted, codec);
      // The mean belongs to no buckets: there and back it is the same.
      OverlapModel cut(
          comm,
          R"({"first_bucket_bytes": 1, "bucket_bytes": 1, "codec": )" + std::string(codec) + "}",
          OverlapModel::floats(kCounts));
      checked(import_state(cut.overlap(), StateMode::kMean, mean));
      const Status refused = import_state(cut.overlap(), StateMode::kExact, exact);
      if (!refused.text().starts_with("the state is of other buckets: "))
        throw RankError(refused.text());
      checked(import_state(cut.overlap(), StateMode::kMean, mean));
      if (checked(export_state(cut.overlap(), StateMode::kMean)) != mean)
        throw RankError(fmt::format("{}: the mean has changed", codec));
      // Without error feedback: as new.
      OverlapModel fresh(comm, with_codec(codec), OverlapModel::floats(kCounts));
      round_of(fresh, next, 2);
      checked(import_state(other.overlap(), StateMode::kReset, mean));
      round_of(other, next, 3);
      same_values(other.read(), fresh.read(), "reset");
    }
  });
}

// What is left over of each gradient follows it to other buckets.
TEST_P(OverlapCodec, MovesErrorFeedbackToTheObservedOrder) {
  if (std::get<1>(GetParam()) == 1) return;  // nothing is compressed
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* codec : {kCodecs[0], kCodecs[3], kCodecs[5], kCodecs[7]}) {
      const std::string json = R"({"first_bucket_bytes": 100, "bucket_bytes": 45000, )"
                               R"("order": "observed", "codec": )" +
                               std::string(codec) + "}";
      OverlapModel model(comm, json, OverlapModel::floats(kCounts));
      const std::vector<OverlapBucket> before = model.overlap().buckets();
      round_of(model, model.values(comm->rank(), 0), 17 + static_cast<uint64_t>(comm->rank()));
      const auto errors = checked(export_state(model.overlap(), StateMode::kMean));
      const OpRef op = model.begin();
      checked(model.overlap().withdraw("to look"));
      if (model.wait(op).code() != Code::kCancelled) throw RankError("not withdrawn");
      const auto alike = [](const OverlapBucket& a, const OverlapBucket& b) {
        return a.tensors == b.tensors;
      };
      if (model.overlap().info().layout != 1 ||
          std::ranges::equal(before, model.overlap().buckets(), alike))
        throw RankError("the same buckets");
      if (checked(export_state(model.overlap(), StateMode::kMean)) != errors)
        throw RankError(fmt::format("{}: other errors", codec));
      // A state has its buckets with it.
      round_of(model, model.values(comm->rank(), 1), 2);
      const auto state = checked(export_state(model.overlap(), StateMode::kExact));
      OverlapModel other(comm, json, OverlapModel::floats(kCounts));
      checked(import_state(other.overlap(), StateMode::kExact, state));
      const Values next = model.values(comm->rank(), 2);
      round_of(model, next, 3);
      round_of(other, next, 4);
      same_values(other.read(), model.read(), codec);
      if (other.overlap().info().layout != 1) throw RankError("layout");
    }
  });
}

// Two hosts of two ranks each.
class OverlapHierarchy : public OverlapWorlds {
 protected:
  void run_on_hosts(const std::string& collectives,
                    const std::function<void(const std::shared_ptr<Comm>&)>& body) {
    run(body, [collectives](int32_t rank, Params* params) {
      params->host_id = rank == 0 || rank == 3 ? "a" : "b";
      params->hierarchy = collectives;
    });
  }
};

std::string in_levels(const std::string& codec, const char* hierarchy) {
  return fmt::format(R"({}, "hierarchy": "{}"}})", codec.substr(0, codec.size() - 1), hierarchy);
}

// Buckets are compressed between hosts; a rank that withdraws, and NaN on any rank, change nothing.
TEST_P(OverlapHierarchy, HasTheBitsOfACodecPerBucket) {
  run_on_hosts("flat", [](const std::shared_ptr<Comm>& comm) {
    for (const char* of_type : {kCodecs[0], kCodecs[2], kCodecs[3], kCodecs[6]}) {
      for (const char* hierarchy : {"sharded", "leader"}) {
        const std::string codec = in_levels(of_type, hierarchy);
        OverlapModel model(comm, with_codec(codec), OverlapModel::floats(kCounts));
        CodecPerBucket peer(comm, codec, model.overlap().buckets());
        for (uint64_t round = 0; round < 4; ++round) {
          const Values mine = model.values(comm->rank(), round);
          const Values wanted = peer.mean(mine);
          round_of(model, mine, round * 7 + static_cast<uint64_t>(comm->rank()));
          same_values(model.read(), wanted, fmt::format("{}, round {}", codec, round));
          const auto before = checked(export_state(model.overlap(), StateMode::kExact));
          Values bad = model.values(comm->rank(), 100 + round);
          const float nan = std::numeric_limits<float>::quiet_NaN();
          if (comm->rank() == static_cast<int32_t>(round)) std::memcpy(&bad[0][0], &nan, 4);
          const OpRef op = model.begin();
          for (uint64_t t = model.size(); t-- > 0;) model.ready(bad, {&t, 1});
          checked(model.overlap().finish());
          const std::string host = round == 1 || round == 2 ? "1" : "0";
          const Status ended = model.wait(op);
          if (ended.text().find("in the gradients of a rank on the host of rank " + host + "; ") ==
              std::string::npos)
            throw RankError(ended.text());
          if (checked(export_state(model.overlap(), StateMode::kExact)) != before)
            throw RankError(codec + ": error feedback has changed");
        }
      }
    }
  });
}

TEST_P(OverlapHierarchy, KeepsWhatIsLeftOver) {
  run_on_hosts("flat", [](const std::shared_ptr<Comm>& comm) {
    for (const char* hierarchy : {"sharded", "leader"}) {
      const std::string codec = in_levels(kCodecs[3], hierarchy);
      const std::string json = R"({"first_bucket_bytes": 100, "bucket_bytes": 45000, )"
                               R"("order": "observed", "codec": )" +
                               codec + "}";
      OverlapModel model(comm, json, OverlapModel::floats(kCounts));
      round_of(model, model.values(comm->rank(), 0), 17);
      const auto mean = checked(export_state(model.overlap(), StateMode::kMean));
      const OpRef op = model.begin();
      checked(model.overlap().withdraw("to look"));
      if (model.wait(op).code() != Code::kCancelled) throw RankError("not withdrawn");
      if (model.overlap().info().layout != 1) throw RankError("the same buckets");
      if (checked(export_state(model.overlap(), StateMode::kMean)) != mean)
        throw RankError(codec + ": other errors in the observed order");
      round_of(model, model.values(comm->rank(), 1), 3);
      const auto exact = checked(export_state(model.overlap(), StateMode::kExact));
      OverlapModel other(comm, json, OverlapModel::floats(kCounts));
      checked(import_state(other.overlap(), StateMode::kExact, exact));
      const Values next = model.values(comm->rank(), 2);
      round_of(model, next, 4);
      round_of(other, next, 5);
      same_values(other.read(), model.read(), codec);
      OverlapModel flat(comm, with_codec(kCodecs[3]), OverlapModel::floats(kCounts));
      const Status refused = import_state(flat.overlap(), StateMode::kExact, exact);
      if (refused.text().find("is of the hierarchy") == std::string::npos &&
          refused.text().find("is of other buckets") == std::string::npos)
        throw RankError(refused.text());
      checked(import_state(flat.overlap(), StateMode::kMean, mean));
    }
  });
}

// Without a codec averages are the comm's collectives.
TEST_P(OverlapHierarchy, AveragesAsTheCommDoes) {
  for (const char* hierarchy : {"sharded", "leader"}) {
    run_on_hosts(hierarchy, [](const std::shared_ptr<Comm>& comm) {
      for (const char* json : {R"({"first_bucket_bytes": 100, "bucket_bytes": 60000})",
                               R"({"first_bucket_bytes": 1, "bucket_bytes": 1000000})"}) {
        OverlapModel model(comm, json, OverlapModel::mixed_shapes());
        for (const ReduceOp reduce : {ReduceOp::kMean, ReduceOp::kSum}) {
          const Values mine = model.values(comm->rank(), 5);
          const Values wanted = model.all_reduced(mine, reduce);
          const OpRef op = model.begin(reduce);
          for (uint64_t t = 0; t < model.size(); ++t) model.ready(mine, {&t, 1});
          checked(model.overlap().finish());
          checked(model.wait(op));
          same_values(model.read(), wanted, json);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OverlapHierarchy,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(4)),
                         [](const auto& named) { return std::get<0>(named.param); });

INSTANTIATE_TEST_SUITE_P(Worlds, OverlapCodec,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& named) {
                           return fmt::format("{}_{}", std::get<0>(named.param),
                                              std::get<1>(named.param));
                         });

}  // namespace
}  // namespace sotto::test
