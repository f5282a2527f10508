#include "capi/src/handles.h"

namespace sotto::capi {

// Pools are never destroyed.
template <>
ObjectPool<sotto_context>& pool_of() {
  static auto* const pool = new ObjectPool<sotto_context>("context", "destroyed");
  return *pool;
}
template <>
ObjectPool<sotto_comm>& pool_of() {
  static auto* const pool = new ObjectPool<sotto_comm>("comm", "destroyed");
  return *pool;
}
template <>
ObjectPool<sotto_codec>& pool_of() {
  static auto* const pool = new ObjectPool<sotto_codec>("codec", "destroyed");
  return *pool;
}
template <>
ObjectPool<sotto_optim>& pool_of() {
  static auto* const pool = new ObjectPool<sotto_optim>("optim", "destroyed");
  return *pool;
}
template <>
ObjectPool<sotto_outer>& pool_of() {
  static auto* const pool = new ObjectPool<sotto_outer>("outer", "destroyed");
  return *pool;
}
template <>
ObjectPool<sotto_overlap>& pool_of() {
  static auto* const pool = new ObjectPool<sotto_overlap>("overlap", "destroyed");
  return *pool;
}

}  // namespace sotto::capi
