// Rounds of an overlap on every kind of world: the bits of one all-reduce of all gradients, in
// whatever order they are ready, and rounds that ranks withdraw from.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "tests/conformance/overlap_worlds.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/overlap_model.h"

namespace sotto::test {
namespace {

const std::string kSmall = R"({"first_bucket_bytes": 100, "bucket_bytes": 45000})";
const std::string kZero = R"({"first_bucket_bytes": 100, "bucket_bytes": 45000, "unused": "zero"})";

std::vector<uint64_t> shuffled(size_t n, uint32_t seed) {
  std::vector<uint64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

class Overlaps : public OverlapWorlds {};

// Every rank in an order of its own, several at a time.
void round_in_any_order(OverlapModel& model, const Values& mine, uint32_t seed, ReduceOp reduce) {
  std::mt19937 random(seed);
  const OpRef op = model.begin(reduce);
  const std::vector<uint64_t> order = shuffled(model.size(), seed);
  for (size_t i = 0; i < order.size();) {
    const size_t n = std::min<size_t>(1 + random() % 3, order.size() - i);
    model.ready(mine, std::span(order).subspan(i, n));
    if (op->done()) throw RankError("done before the last gradient");
    i += n;
  }
  checked(model.overlap().finish());
  checked(model.wait(op));
}

TEST_P(Overlaps, HaveTheBitsOfOneAllReduce) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const bool moves : {false, true}) {
      OverlapModel model(comm, kSmall, OverlapModel::mixed_shapes(), moves);
      if (model.overlap().buckets().size() < 3) throw RankError("too few buckets");
      for (uint64_t round = 0; round < 4; ++round) {
        const ReduceOp reduce = round % 2 == 0 ? ReduceOp::kMean : ReduceOp::kSum;
        const Values mine = model.values(comm->rank(), round);
        const Values wanted = model.all_reduced(mine, reduce);
        if (moves) model.place_anew();
        round_in_any_order(model, mine, static_cast<uint32_t>(comm->rank() * 100) + round, reduce);
        same_values(model.read(), wanted, "round " + std::to_string(round));
      }
      if (model.overlap().info().rounds != 4) throw RankError("not 4 rounds");
    }
  });
}

TEST_P(Overlaps, OrderOfRegistrationGivesTheSameBits) {
  run([](const std::shared_ptr<Comm>& comm) {
    OverlapModel model(comm, R"({"order": "registered", "bucket_bytes": 40000})",
                       OverlapModel::mixed_shapes());
    const Values mine = model.values(comm->rank(), 7);
    const Values wanted = model.all_reduced(mine, ReduceOp::kMean);
    round_in_any_order(model, mine, 3 + static_cast<uint32_t>(comm->rank()), ReduceOp::kMean);
    same_values(model.read(), wanted, "registered");
  });
}

// The same as an all-reduce of converted gradients. One rank sends nothing.
TEST_P(Overlaps, TravelAsTheWireSays) {
  run([](const std::shared_ptr<Comm>& comm) {
    const std::vector<OverlapModel::Shape> shapes = OverlapModel::mixed_shapes();
    for (const auto& [word, wire] :
         {std::pair("fp32", Dtype::kF32), {"fp16", Dtype::kF16}, {"bf16", Dtype::kBF16}}) {
      const std::string json =
          fmt::format(R"({{"first_bucket_bytes": 1, "bucket_bytes": 90000, "wire": "{}"}})", word);
      OverlapModel model(comm, json, shapes);
      std::vector<OverlapModel::Shape> other = shapes;
      for (OverlapModel::Shape& s : other) s.dtype = wire;
      OverlapModel peer(comm, kSmall, other);
      const Values mine = model.values(comm->rank(), 1);
      Values sent(shapes.size());
      for (size_t t = 0; t < shapes.size(); ++t)
        sent[t] = converted(mine[t], shapes[t].dtype, wire);
      Values wanted = peer.all_reduced(sent, ReduceOp::kMean);
      if (comm->size() == 1) wanted = mine;
      for (size_t t = 0; t < shapes.size() && comm->size() > 1; ++t)
        wanted[t] = converted(wanted[t], wire, shapes[t].dtype);
      round_in_any_order(model, mine, 5 + static_cast<uint32_t>(comm->rank()), ReduceOp::kMean);
      same_values(model.read(), wanted, word);
    }
  });
}

TEST_P(Overlaps, AreMarkedByManyThreads) {
  run([](const std::shared_ptr<Comm>& comm) {
    const std::vector<OverlapModel::Shape> shapes =
        OverlapModel::floats(std::vector<uint64_t>(48, 1'111));
    OverlapModel model(comm, R"({"first_bucket_bytes": 9000, "bucket_bytes": 20000})", shapes);
    for (uint64_t round = 0; round < 3; ++round) {
      const Values mine = model.values(comm->rank(), round);
      const Values wanted = model.all_reduced(mine, ReduceOp::kMean);
      for (size_t t = 0; t < shapes.size(); ++t) model.write(t, mine[t]);
      const OpRef op = model.begin();
      std::vector<std::thread> threads;
      std::atomic<int> failures{0};
      for (uint64_t k = 0; k < 8; ++k) {
        threads.emplace_back([&, k] {
          for (uint64_t t = k; t < 48; t += 8) {
            if (!model.overlap().ready({&t, 1}, {}, std::nullopt).ok()) ++failures;
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      if (failures != 0) throw RankError("a mark was refused");
      checked(model.overlap().finish());
      checked(model.wait(op));
      same_values(model.read(), wanted, "threads");
    }
  });
}

// From the second round that ends well on; the first one is withdrawn.
TEST_P(Overlaps, UseTheOrderOfRank0) {
  run([](const std::shared_ptr<Comm>& comm) {
    const std::string json =
        R"({"first_bucket_bytes": 100, "bucket_bytes": 45000, "order": "observed"})";
    OverlapModel model(comm, json, OverlapModel::mixed_shapes());
    const auto order_of = [](int32_t rank, uint64_t round) {
      return shuffled(9, static_cast<uint32_t>(31 * round) + static_cast<uint32_t>(rank));
    };
    for (uint64_t round = 0; round < 5; ++round) {
      const Values mine = model.values(comm->rank(), round);
      const Values wanted = model.all_reduced(mine, ReduceOp::kMean);
      const OpRef op = model.begin();
      if (model.overlap().info().layout != (round < 2 ? 0 : 1)) throw RankError("layout");
      for (const uint64_t t : order_of(comm->rank(), round)) model.ready(mine, {&t, 1});
      checked(round == 0 ? model.overlap().withdraw("no") : model.overlap().finish());
      const Status ended = model.wait(op);
      if (round == 0) {
        if (ended.code() != Code::kCancelled) throw RankError(ended.text());
        continue;
      }
      checked(ended);
      same_values(model.read(), wanted, "round " + std::to_string(round));
    }
    std::vector<OverlapTensor> tensors;
    for (const OverlapModel::Shape& s : OverlapModel::mixed_shapes())
      tensors.push_back({s.count, s.dtype, nullptr});
    const std::vector<uint64_t> first = order_of(0, 1);
    const std::vector<OverlapBucket> buckets = cut_buckets(
        tensors, std::vector<uint32_t>(first.begin(), first.end()), model.overlap().config());
    if (!std::ranges::equal(buckets, model.overlap().buckets(), {}, &OverlapBucket::tensors,
                            &OverlapBucket::tensors))
      throw RankError("other buckets");
    if (model.overlap().info().buckets != buckets.size()) throw RankError("number of buckets");
  });
}

// Memory for what is on its way is that of some buckets, however many there are.
TEST_P(Overlaps, HoldMemoryOfAFewBuckets) {
  run([](const std::shared_ptr<Comm>& comm) {
    const auto held = [&](size_t buckets) {
      OverlapModel model(comm, R"({"first_bucket_bytes": 1, "bucket_bytes": 1})",
                         OverlapModel::floats(std::vector<uint64_t>(buckets, 30'000)));
      for (uint64_t round = 0; round < 2; ++round) {
        const Values mine = model.values(comm->rank(), round);
        const Values wanted = model.all_reduced(mine, ReduceOp::kMean);
        round_in_any_order(model, mine, static_cast<uint32_t>(comm->rank()), ReduceOp::kMean);
        same_values(model.read(), wanted, "many buckets");
      }
      return model.overlap().info().state_bytes;
    };
    // Beside it there are slots of a few bytes; messages that are staged have memory of their own.
    if (!comm->context()->device()->caps().host_memory) return;
    const uint64_t some = held(6), many = held(24);
    if (many > some + 100'000) throw RankError(fmt::format("{} and {} bytes", some, many));
  });
}

// Half of them named, half left to the end; ranks differ.
TEST_P(Overlaps, CountWhatIsUnusedAsZero) {
  run([](const std::shared_ptr<Comm>& comm) {
    OverlapModel model(comm, kZero, OverlapModel::mixed_shapes());
    for (uint64_t round = 0; round < 3; ++round) {
      Values mine = model.values(comm->rank(), round);
      std::vector<uint64_t> named, used;
      for (uint64_t t = 0; t < model.size(); ++t) {
        const uint64_t kind = (t + static_cast<uint64_t>(comm->rank()) + round) % 3;
        if (kind == 2) used.push_back(t);
        if (kind == 0) named.push_back(t);
        if (kind != 2) mine[t].assign(mine[t].size(), std::byte{0});
      }
      const Values wanted = model.all_reduced(mine, ReduceOp::kMean);
      for (size_t t = 0; t < model.size(); ++t)
        model.write(t, std::vector<std::byte>(model.bytes(t), std::byte{0x55}));
      const OpRef op = model.begin();
      checked(model.overlap().unused(named));
      model.ready(mine, used);
      checked(model.overlap().finish());
      checked(model.wait(op));
      same_values(model.read(), wanted, "unused");
    }
  });
}

// Memory that this rank does not name stays as it is, and the others get the average.
TEST_P(Overlaps, UnusedGradientsWithoutMemoryAreLeftOut) {
  run([](const std::shared_ptr<Comm>& comm) {
    OverlapModel model(comm, kZero, OverlapModel::mixed_shapes(), true);
    for (uint64_t round = 0; round < 2; ++round) {
      const bool leaves = comm->rank() == 0;
      Values mine = leaves ? model.zeros() : model.values(comm->rank(), round);
      Values wanted = model.all_reduced(mine, ReduceOp::kMean);
      for (size_t t = 0; t < model.size() && leaves; ++t) {
        wanted[t].assign(model.bytes(t), std::byte{0x55});
        model.write(t, wanted[t]);
      }
      const OpRef op = model.begin();
      if (!leaves) model.ready(mine, shuffled(model.size(), 1));
      checked(model.overlap().finish());
      checked(model.wait(op));
      same_values(model.read(), wanted, "without memory");
    }
  });
}

// At every moment of a round, by one rank or by several. The round behind it is as any.
TEST_P(Overlaps, EndOnAllRanksWhenOneWithdraws) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const bool moves : {false, true}) {
      OverlapModel model(comm, kSmall, OverlapModel::mixed_shapes(), moves);
      const int32_t last = comm->size() - 1;
      const uint64_t rounds_before = model.overlap().info().rounds;
      uint64_t good = 0;
      for (uint64_t marks = 0; marks <= model.size(); marks += 3) {
        const Values mine = model.values(comm->rank(), marks);
        const OpRef op = model.begin();
        const bool first_too = marks == 3;
        if (comm->rank() == last || (first_too && comm->rank() == 0)) {
          const std::vector<uint64_t> order = shuffled(model.size(), 4);
          model.ready(mine, std::span(order).first(marks));
          checked(model.overlap().withdraw(fmt::format("out of memory after {}", marks)));
        } else {
          model.ready(mine, shuffled(model.size(), static_cast<uint32_t>(comm->rank())));
          checked(model.overlap().finish());
        }
        const Status ended = model.wait(op);
        const std::string who = first_too && last != 0 ? fmt::format("ranks 0, {} have", last)
                                                       : fmt::format("rank {} has", last);
        const std::string text = fmt::format(
            "overlap round {}: {} withdrawn: out of memory after {}; gradients are undefined, the "
            "group is healthy",
            2 * good + 1, who, marks);
        if (ended.code() != Code::kCancelled || ended.text() != text)
          throw RankError(fmt::format("{}: {}", code_name(ended.code()), ended.text()));
        const Values next = model.values(comm->rank(), 50 + marks);
        const Values wanted = model.all_reduced(next, ReduceOp::kMean);
        round_in_any_order(model, next, static_cast<uint32_t>(marks), ReduceOp::kMean);
        same_values(model.read(), wanted, "the round behind it");
        ++good;
      }
      if (model.overlap().info().rounds != rounds_before + good)
        throw RankError("a round that was withdrawn counts");
    }
  });
}

// Collectives of the caller go on meanwhile, with results of both to the bit.
TEST_P(Overlaps, CollectivesGoOnBesideThem) {
  run([](const std::shared_ptr<Comm>& comm) {
    OverlapModel model(comm, kSmall, OverlapModel::floats({5, 20'000, 1, 3'000, 60'003}));
    for (uint64_t round = 0; round < 3; ++round) {
      const Values mine = model.values(comm->rank(), round);
      const Values wanted = model.all_reduced(mine, ReduceOp::kMean);
      const OpRef op = model.begin();
      for (uint64_t t = 0; t < model.size(); ++t) {
        std::vector<float> data(30'000, static_cast<float>(comm->rank()));
        checked(all_reduce(comm, data));
        const auto size = static_cast<float>(comm->size());
        if (data != std::vector<float>(30'000, size * (size - 1) / 2))
          throw RankError("the collective is wrong");
        model.ready(mine, {&t, 1});
      }
      checked(model.overlap().finish());
      checked(model.wait(op));
      same_values(model.read(), wanted, "beside collectives");
    }
  });
}

// A rank that is gone ends the round with its cause, and what is marked then is told so.
TEST_P(Overlaps, EndWithTheFirstCauseOfAFailure) {
  run([](const std::shared_ptr<Comm>& comm) {
    OverlapModel model(comm, kSmall, OverlapModel::mixed_shapes());
    const Values mine = model.values(comm->rank(), 0);
    const OpRef op = model.begin();
    const uint64_t some[] = {4, 1};
    model.ready(mine, some);
    (void)comm->barrier();  // all have begun, unless the next line was faster
    if (comm->rank() == 0) comm->abort("enough");
    const Status ended = model.wait(op);
    if (ended.code() != Code::kAborted) throw RankError(ended.text());
    const uint64_t next[] = {5};
    const Status marked = model.overlap().ready(next, {}, std::nullopt);
    if (marked.code() != Code::kAborted ||
        !marked.text().starts_with("round 1 of this overlap has ended: "))
      throw RankError(marked.text());
    if (model.overlap().finish().code() != Code::kAborted) throw RankError("finish");
    if (model.overlap().withdraw("no").code() != Code::kAborted) throw RankError("withdraw");
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Overlaps,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 2, 3)),
                         [](const auto& named) {
                           return fmt::format("{}_{}", std::get<0>(named.param),
                                              std::get<1>(named.param));
                         });

}  // namespace
}  // namespace sotto::test
