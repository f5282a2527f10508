// Overlaps on every kind of world.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>

#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/ranks.h"

namespace sotto::test {

// A kind of world and a number of ranks.
class OverlapWorlds : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {
  const CallsOutOfOrder inputs_;

 protected:
  ~OverlapWorlds() override { EXPECT_TRUE(take_ordered_violations().empty()); }
  // rank_params: WorldOptions::rank_params.
  void run(const std::function<void(const std::shared_ptr<Comm>&)>& body,
           std::function<void(int32_t rank, Params*)> rank_params = nullptr) {
    const auto caught_errors = [&](const std::shared_ptr<Comm>& comm) -> Status {
      try {
        body(comm);
      } catch (const RankError& e) {
        comm->abort(e.what());
        return error(Code::kInternal, "{}", e.what());
      }
      return ok_status();
    };
    WorldOptions world = world_of(std::get<0>(GetParam()), std::get<1>(GetParam()));
    world.rank_params = std::move(rank_params);
    const Status status = run_world(std::move(world), caught_errors);
    EXPECT_TRUE(status.ok()) << status.text();
  }
};

}  // namespace sotto::test
