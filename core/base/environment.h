// Variables of this process that other libraries read when they are loaded.
//
// Threads: any.
#pragma once

#include <initializer_list>
#include <utility>

namespace sotto {

// Sets those of the variables (name, value) that are not set. Other threads may read variables
// meanwhile, also with a getenv that began before: setenv would free memory under it. No thread may
// set one.
void set_if_unset(std::initializer_list<std::pair<const char*, const char*>> variables);

}  // namespace sotto
