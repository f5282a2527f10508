// Lifetimes of the handles of sotto.hpp.
#include <malloc.h>

#include <memory>
#include <thread>
#include <type_traits>

#include "tests/cpp/world.h"
#include "tests/support/sanitized.h"

namespace cpp_test {
namespace {

template <class T>
constexpr bool kMoveOnly =
    std::is_nothrow_default_constructible_v<T>&& std::is_nothrow_move_constructible_v<T>&&
        std::is_nothrow_move_assignable_v<T> &&
    !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T> &&
    std::is_nothrow_destructible_v<T>;
static_assert(kMoveOnly<context> && kMoveOnly<comm> && kMoveOnly<op> && kMoveOnly<codec>);
static_assert(kMoveOnly<optim> && kMoveOnly<outer> && kMoveOnly<overlap>);
static_assert(kMoveOnly<group> && kMoveOnly<overlap_round>);
static_assert(std::is_base_of_v<std::runtime_error, error>);

// Everything that a program may hold, of one rank.
struct Objects {
  std::vector<float> weights = std::vector<float>(8), gradients = std::vector<float>(8, 1.0f);
  std::vector<float> anchored = std::vector<float>(8);
  Alone alone;
  sotto::codec codec = codec::create(alone.ranks, R"({"type": "int8"})", buffer_like<float>(8));
  sotto::optim optim = optim::create(alone.ranks, kAdam, params());
  sotto::outer outer =
      outer::create(alone.ranks, R"({"preset": "local_sgd", "period": 2})", outer_params());
  sotto::overlap overlap = overlap::create(alone.ranks, "{}", gradients);

  std::vector<param> params() { return {param("w", weights).grad(gradients)}; }
  std::vector<param> outer_params() { return {param("w", anchored)}; }
};

template <class T>
void moves(T& object) {
  auto* const c = object.get();
  ASSERT_NE(c, nullptr);
  T other(std::move(object));
  EXPECT_FALSE(object);
  EXPECT_EQ(other.get(), c);
  T third;
  EXPECT_FALSE(third);
  third = std::move(other);
  EXPECT_EQ(third.get(), c);
  T& itself = third;
  third = std::move(itself);
  EXPECT_EQ(third.get(), c);
  object = std::move(third);
  EXPECT_TRUE(object);
}

TEST(CppHandles, EveryHandleMoves) {
  Objects o;
  moves(o.alone.ctx);
  moves(o.alone.ranks);
  moves(o.codec);
  moves(o.optim);
  moves(o.outer);
  moves(o.overlap);
  op step = o.optim.step();
  moves(step);
  step.wait();
  group collected = o.alone.ranks.group();
  group here(std::move(collected));
  here.all_reduce(o.weights);
  group there;
  there = std::move(here);
  op ended = there.end();
  ended.wait();
  overlap_round round = o.overlap.begin();
  overlap_round other(std::move(round));
  round = std::move(other);
  round.ready(0);
  round.finish();
  round.wait();
  EXPECT_EQ(o.weights[0], -0.1f);
}

// What a handle owned is destroyed when another is moved into its place.
TEST(CppHandles, AssignmentDestroysTheOldOne) {
  Alone a, b;
  sotto_context* const old = a.ctx.get();
  comm ranks = std::move(a.ranks);
  a.ctx = std::move(b.ctx);
  EXPECT_EQ(sotto_context_poll(old, 0), SOTTO_E_INVALID_ARGUMENT);
  a.ctx.poll();
  EXPECT_EQ(ranks.size(), 1);
}

// Empty handles, closed ones and those moved from are refused by every function, and closing
// nothing is nothing.
TEST(CppHandles, EmptyOnesAreRefused) {
  Alone alone;
  comm empty;
  float x[2] = {};
  FAILS(empty.rank(), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
  FAILS(wait(empty.all_reduce(x)), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
  FAILS(empty.group(), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
  FAILS(optim().step(), SOTTO_E_INVALID_ARGUMENT, "optim is NULL");
  FAILS(outer().info(), SOTTO_E_INVALID_ARGUMENT, "outer is NULL");
  FAILS(overlap().begin(), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(overlap_round().ready(0), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(codec().state_export(state_mode::exact), SOTTO_E_INVALID_ARGUMENT, "codec is NULL");
  FAILS(context().poll(), SOTTO_E_INVALID_ARGUMENT, "context is NULL");
  FAILS(op().wait(), SOTTO_E_INVALID_ARGUMENT, "operation is NULL");
  // Not without a codec in place of an empty one.
  FAILS(wait(alone.ranks.all_reduce(x, call().encode(codec()))), SOTTO_E_INVALID_ARGUMENT, "codec");
  EXPECT_EQ(op().error().code(), SOTTO_E_INVALID_ARGUMENT);
  EXPECT_EQ(empty.error().code(), SOTTO_E_INVALID_ARGUMENT);
  empty.close();
  op().detach();
  alone.ranks.close();
  alone.ranks.close();
  FAILS(alone.ranks.size(), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
  alone.ctx.close();
  FAILS(comm::create(alone.ctx), SOTTO_E_INVALID_ARGUMENT, "context is NULL");
}

// A handle that another one of the C interface has destroyed: the destructor is refused, quietly.
TEST(CppHandles, ReleaseGivesTheOwnershipAway) {
  Alone alone;
  sotto_comm* const c = alone.ranks.release();
  EXPECT_FALSE(alone.ranks);
  comm again(c);
  EXPECT_EQ(again.size(), 1);
  EXPECT_EQ(sotto_comm_destroy(c), SOTTO_OK);
  FAILS(again.close(), SOTTO_E_INVALID_ARGUMENT, "has been destroyed before");
}

// The order of destruction does not matter: parents first, children first, mixed.
TEST(CppHandles, AnyOrderOfDestruction) {
  const std::function<void(Objects&)> drops[] = {
      [](Objects& o) { o.alone.ctx = context(); }, [](Objects& o) { o.alone.ranks = comm(); },
      [](Objects& o) { o.codec = codec(); },       [](Objects& o) { o.optim = optim(); },
      [](Objects& o) { o.outer = outer(); },       [](Objects& o) { o.overlap = overlap(); },
  };
  const int n = 6;
  for (int first = 0; first < n; ++first) {
    for (int stride : {1, 5}) {  // forwards and backwards
      Objects o;
      op step = o.optim.step();
      overlap_round round = o.overlap.begin();
      for (int i = 0; i < n; ++i) drops[(first + i * stride) % n](o);
      EXPECT_TRUE(step.wait_for(std::chrono::seconds(20)));
      FAILS(round.wait(), SOTTO_E_CANCELLED, "");
    }
  }
}

TEST(CppHandles, CloseSaysWhatTheDestructorKeepsToItself) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       float x[4] = {};
                       if (ranks.rank() == 1) {
                         ranks.abort("enough of it");
                         return;
                       }
                       FAILS(wait(ranks.all_reduce(x)), SOTTO_E_ABORTED, "enough of it");
                       const status cause = ranks.error();
                       require(cause.code() == SOTTO_E_ABORTED, cause.message());
                       require(cause.name() == std::string("ABORTED"), cause.name());
                       require(cause.message() == "ABORTED: " + cause.text(), cause.message());
                       FAILS(ranks.close(), SOTTO_E_ABORTED, "enough of it");
                       require(!ranks, "closed");
                     }),
            "");
}

// In a callback nothing can be destroyed: the handle stays, and close() can be called again.
TEST(CppHandles, CallbacksDestroyNothing) {
  Alone alone, other;
  struct Seen {
    comm* ranks;
    sotto_status code;
    std::string text;
  } seen{&other.ranks, SOTTO_OK, ""};
  float x[2] = {};
  op reduced = alone.ranks.all_reduce(x, call().on_done(
                                             [](void* user, sotto_status) {
                                               auto* const s = static_cast<Seen*>(user);
                                               try {
                                                 s->ranks->close();
                                               } catch (const error& e) {
                                                 s->code = e.code(), s->text = e.what();
                                               }
                                             },
                                             &seen));
  reduced.wait();
  EXPECT_EQ(seen.code, SOTTO_E_INVALID_STATE);
  EXPECT_NE(seen.text.find("callback"), std::string::npos) << seen.text;
  EXPECT_TRUE(other.ranks);
  EXPECT_EQ(other.ranks.size(), 1);
}

// An op that goes out of scope has ended: the memory that it wrote may go with it.
TEST(CppHandles, DroppedOperationsHaveEnded) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       for (int i = 0; i < 50; ++i) {
                         auto x = std::make_unique<std::vector<float>>(5000, 1.0f);
                         { const op dropped = ranks.all_reduce(*x); }
                         require((*x)[0] == 2.0f && x->back() == 2.0f, "sums");
                         x.reset();
                       }
                       require(ranks.counters().ops_completed == 50, "all have ended");
                     }),
            "");
}

// An exception that passes by does so too, at most when the operation's deadline is over.
TEST(CppHandles, AnOperationIsWaitedForAtMostItsDeadline) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       float x[4] = {};
                       if (ranks.rank() == 1) {  // makes no call
                         while (ranks.error().ok())
                           std::this_thread::sleep_for(std::chrono::milliseconds(5));
                         return;
                       }
                       {
                         const op dropped =
                             ranks.all_reduce(x, call().timeout(std::chrono::milliseconds(200)));
                       }
                       require(ranks.error().code() == SOTTO_E_TIMEOUT, ranks.error().message());
                     }),
            "");
}

// A detached operation goes on; its memory outlives the comm.
TEST(CppHandles, DetachedOperationsGoOn) {
  std::vector<std::vector<float>> x(2, std::vector<float>(3000, 1.0f));
  EXPECT_EQ(on_ranks(2,
                     [&](comm& ranks) {
                       op started = ranks.all_reduce(x[static_cast<size_t>(ranks.rank())]);
                       started.detach();
                       require(!started, "given up");
                       FAILS(started.wait(), SOTTO_E_INVALID_ARGUMENT, "operation is NULL");
                       ranks.close();  // waits for it
                     }),
            "");
  EXPECT_EQ(x[0][2999], 2.0f);
  EXPECT_EQ(x[1][0], 2.0f);
}

// A round that is dropped is withdrawn, and the next is as any.
TEST(CppHandles, DroppedRoundsAreWithdrawn) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       std::vector<float> g(600, 1.0f), h(700, 1.0f);
                       const sotto_buffer both[] = {buffer_of(g), buffer_of(h)};
                       overlap averages = overlap::create(ranks, "{}", both);
                       const std::uint64_t all[] = {0, 1};
                       for (int i = 0; i < 3; ++i) {
                         if (ranks.rank() == 0) {
                           const overlap_round dropped = averages.begin();
                         } else {
                           overlap_round round = averages.begin();
                           round.ready(all);
                           round.finish();
                           FAILS(round.wait(), SOTTO_E_CANCELLED, "the round was dropped");
                         }
                       }
                       g.assign(600, 1.0f + static_cast<float>(ranks.rank())),
                           h = std::vector<float>(700, 3.0f);
                       const sotto_buffer now[] = {buffer_of(g), buffer_of(h)};
                       overlap_round round = averages.begin();
                       round.ready(all, now);
                       round.finish();
                       round.wait();
                       require(g[599] == 1.5f && h[0] == 3.0f, "means");
                     }),
            "");
}

// A group that is dropped, as where an exception passes by, starts nothing, and the next is as any.
TEST(CppHandles, DroppedGroupsStartNothing) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       const std::int32_t peer = 1 - ranks.rank();
                       float out = 1.0f + static_cast<float>(ranks.rank()), in = 0;
                       try {
                         group half = ranks.group();
                         half.send(buffer_of(&out, 1), peer);
                         throw std::runtime_error("on one's way");
                       } catch (const std::runtime_error&) {
                       }
                       {
                         group replaced = ranks.group();
                         replaced.recv(buffer_of(&in, 1), peer);
                         replaced = group();
                         wait(ranks.barrier());
                       }
                       require(ranks.counters().ops_completed == 1 && in == 0.0f, "the barrier");
                       group both = ranks.group();
                       both.send(buffer_of(&out, 1), peer);
                       both.recv(buffer_of(&in, 1), peer);
                       both.end().wait();
                       require(in == 2.0f - static_cast<float>(ranks.rank()), "received");
                     }),
            "");
}

// 1000 cycles leave nothing behind: neither memory of the heap nor handles.
TEST(CppHandles, ThousandCyclesWithoutALeak) {
  const auto cycles = [](int n) {
    for (int i = 0; i < n; ++i) {
      Objects o;
      wait(o.optim.step());
      wait(o.alone.ranks.all_reduce(o.gradients, call().encode(o.codec).reduce(reduce_op::mean)));
      overlap_round round = o.overlap.begin();
      EXPECT_FALSE(o.optim.state_export(state_mode::exact).empty());
      try {
        static_cast<void>(o.alone.ranks.report("no such kind"));
      } catch (const error&) {
      }
    }
  };
  if (kSanitized) return cycles(100);  // leaks are the sanitizer's to count
  cycles(100);
  const auto before = ::mallinfo2();
  cycles(1000);
  const auto after = ::mallinfo2();
  EXPECT_LT(after.uordblks + after.hblkhd, before.uordblks + before.hblkhd + 100'000);
}

}  // namespace
}  // namespace cpp_test
