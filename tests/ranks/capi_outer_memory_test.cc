// Parameters of outer optimizers that move in memory, at the C ABI.
#include <vector>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

// Parameters that lie elsewhere give what they give in their first place.
TEST(CapiOuterMemory, ParametersThatMove) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        const std::string json = mean_json(R"("period": 2)");
                        OuterModel fixed(1, SOTTO_FLOAT16), first(1, SOTTO_FLOAT16);
                        sotto_outer* const a = new_outer(self, json, fixed);
                        sotto_outer* const b = new_outer(self, json, first);
                        std::vector<float> places[2] = {first.weights[0], first.weights[1]};
                        std::vector<uint16_t> copies[2] = {first.copies[0], first.copies[1]};
                        for (int k = 0; k < 7; ++k) {
                          const auto x = static_cast<float>(self.rank + k);
                          fixed.add(x);
                          for (std::vector<float>& place : places) {
                            for (float& v : place) v += x;
                          }
                          step(a);
                          std::vector<float> next[2] = {places[0], places[1]};
                          std::vector<uint16_t> next_copies[2] = {copies[0], copies[1]};
                          for (std::vector<float>& old : places) old.assign(old.size(), 1e30f);
                          const sotto_buffer params[] = {buffer(next[0]), buffer(next[1])};
                          sotto_buffer halves[] = {buffer(next_copies[0]), buffer(next_copies[1])};
                          for (sotto_buffer& h : halves) h.dtype = SOTTO_FLOAT16;
                          OK(sotto_outer_set_params(b, params, halves, 2));
                          step(b);
                          for (size_t t = 0; t < 2; ++t) {
                            require(fixed.weights[t] == next[t], "equal parameters");
                            require(fixed.copies[t] == next_copies[t], "equal model copies");
                            places[t].swap(next[t]);
                            copies[t].swap(next_copies[t]);
                          }
                        }
                        OK(sotto_outer_destroy(a));
                        OK(sotto_outer_destroy(b));
                      }),
            "");
}

TEST(CapiOuterMemory, BadPlaces) {
  EXPECT_EQ(
      run_world(
          1, {},
          [](Member& self) {
            OuterModel model;
            sotto_outer* const outer =
                new_outer(self, mean_json(R"("period": 2, "delay": 0)"), model);
            std::vector<float> places[2] = {model.weights[0], model.weights[1]}, more(37);
            sotto_buffer params[] = {buffer(places[0]), buffer(places[1])};
            FAILS(sotto_outer_set_params(outer, params, nullptr, 1), SOTTO_E_INVALID_ARGUMENT,
                  "n is 1; it has to be 2");
            FAILS(sotto_outer_set_params(outer, nullptr, nullptr, 2), SOTTO_E_INVALID_ARGUMENT,
                  "params is NULL");
            FAILS(sotto_outer_set_params(outer, params, params, 2), SOTTO_E_INVALID_ARGUMENT,
                  "overlap");
            const sotto_buffer copies[] = {{}, buffer(more)};
            FAILS(sotto_outer_set_params(outer, params, copies, 2), SOTTO_E_INVALID_ARGUMENT,
                  "model_copies[1], of parameter \"b\", has 37 elements; none was registered");
            params[1].count = 36;
            FAILS(sotto_outer_set_params(outer, params, nullptr, 2), SOTTO_E_INVALID_ARGUMENT,
                  "params[1], of parameter \"b\", has 36 elements of fp32; registered were 37");
            for (int k = 0; k < 2; ++k) {
              model.add(1);
              step(outer);
            }
            same(model.read(), 3, "the parameters, where they were");
            OK(sotto_outer_destroy(outer));
          }),
      "");
  FAILS(sotto_outer_set_params(nullptr, nullptr, nullptr, 1), SOTTO_E_INVALID_ARGUMENT, "NULL");
}

}  // namespace
}  // namespace sotto::test
