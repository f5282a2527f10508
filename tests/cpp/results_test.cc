// Results in place of exceptions: in a program without exceptions, and where they are not wanted.
#define SOTTO_CPP_NO_EXCEPTIONS
#include <gtest/gtest.h>
#include <sotto/sotto.hpp>

#include <type_traits>

#include "tests/cpp/no_exceptions.h"

namespace {

static_assert(
    std::is_same_v<decltype(std::declval<sotto::comm&>().barrier()), sotto::result<sotto::op>>);
static_assert(std::is_nothrow_move_constructible_v<sotto::result<sotto::op>> ||
              std::is_move_constructible_v<sotto::result<sotto::op>>);
static_assert(!std::is_copy_constructible_v<sotto::result<sotto::comm>>);

TEST(CppResults, AProgramWithoutExceptions) { EXPECT_EQ(trained_without_exceptions(), ""); }

// Beside files of the same program that use exceptions (all other tests).
TEST(CppResults, AProgramThatDoesNotWantThem) {
  sotto::result<sotto::context> context = sotto::context::create();
  ASSERT_TRUE(context) << context.error().message();
  sotto::result<sotto::comm> comm = sotto::comm::create(*context, sotto::comm_config().rank(0, 1));
  ASSERT_TRUE(comm) << comm.error().message();
  EXPECT_EQ(comm->rank().value(), 0);
  double x[] = {1, 2};
  EXPECT_TRUE(sotto::wait(comm->all_reduce(x)).ok());
  const auto failed = sotto::wait(comm->broadcast(x, 7));
  EXPECT_EQ(failed.code(), SOTTO_E_INVALID_ARGUMENT);
  EXPECT_NE(failed.text().find("root"), std::string::npos) << failed.text();
  const auto ended = comm->barrier();
  EXPECT_TRUE(ended->error().in_progress() || ended->error().ok());
  sotto::comm taken = comm.take();
  EXPECT_FALSE(comm.value());
  EXPECT_TRUE(taken.close().ok());
}

}  // namespace
