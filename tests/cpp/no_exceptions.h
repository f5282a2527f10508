// A training that is compiled without exceptions, in C++11.
#pragma once

#include <string>

// "" or what went wrong.
std::string trained_without_exceptions();
