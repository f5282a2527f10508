#define SOTTO_HASH_FUNCTIONS kHashBaseline
#include "core/base/hash_functions-inl.h"
