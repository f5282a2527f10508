// Between the files that read "sotto.outer": the settings while they are read, and what is checked
// when all keys are known.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "core/config/outer_presets.h"
#include "core/config/reader.h"

namespace sotto {

struct OuterReading {
  const ObjectReader& reader;
  const OuterPreset& preset;
  Findings& findings;
  OuterConfig outer;

  // Path of the first of these keys that the file has; of the first one if it has none.
  std::string path_of(std::initializer_list<std::string_view> keys) const;
};

// Whether the file has what the preset leaves to it, and delay, period and fragments fit.
Status check_outer_schedule(const OuterReading& r);
// Gives neutral values to what other settings leave without effect. Says so where the file has the
// key.
void settle_idle_outer(OuterReading& r);
// Numbers that are still to be given, and what cannot be combined.
Status check_outer_numbers(const OuterReading& r);
Status check_outer_choices(const OuterReading& r);
// The floor and the common gap, as far as the file leaves them open.
Status settle_outer_penalty(OuterReading& r);
void warn_of_outer(const OuterReading& r);

}  // namespace sotto
