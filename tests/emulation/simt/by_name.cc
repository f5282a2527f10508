// A test tool, to be preloaded: a library that nvcc has built launches host stubs, which the fake
// CUDA runtime knows by the mangled names of their kernels. The kernels compiled for the emulator
// have the same names; all that libsotto_cuda_emulated.so has are registered here.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "cuda/kernels/tables.h"
#include "tests/emulation/simt/registry.h"

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "simt: emulated kernels by name: %s\n", what);
  std::abort();
}

// Symbols of a shared object: a GNU hash table has no count, but the last chain ends with the last
// symbol.
uint32_t symbol_count(const uint32_t* hash) {
  const uint32_t buckets = hash[0], first = hash[1], bloom_words = hash[2];
  const uint32_t* bucket = hash + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
  const uint32_t* chain = bucket + buckets;
  uint32_t last = *std::max_element(bucket, bucket + buckets);
  if (last < first) return first;
  while ((chain[last - first] & 1) == 0) ++last;
  return last + 1;
}

// Every kernel has Params, by value, as its one parameter.
bool is_kernel(std::string_view mangled) {
  constexpr std::string_view kSpace = "_ZN5sotto4cuda";
  return mangled.starts_with(kSpace) &&
         (mangled.ends_with("ENS0_6ParamsE") || mangled.ends_with("EvNS0_6ParamsE"));
}

struct Registration {
  Registration() {
    void* library = dlopen("libsotto_cuda_emulated.so", RTLD_NOW);
    link_map* map = nullptr;
    if (library == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) fail(dlerror());
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    const uint32_t* hash = nullptr;
    for (const ElfW(Dyn)* entry = map->l_ld; entry->d_tag != DT_NULL; ++entry) {
      if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<ElfW(Sym)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_GNU_HASH) hash = reinterpret_cast<uint32_t*>(entry->d_un.d_ptr);
    }
    if (symbols == nullptr || names == nullptr || hash == nullptr) fail("no symbol table");
    size_t found = 0;
    for (uint32_t i = 1; i < symbol_count(hash); ++i) {
      const char* name = names + symbols[i].st_name;
      if (symbols[i].st_shndx == SHN_UNDEF || !is_kernel(name)) continue;
      const auto kernel =
          reinterpret_cast<void (*)(sotto::cuda::Params)>(map->l_addr + symbols[i].st_value);
      simt::register_kernel_name(name, kernel);
      ++found;
    }
    if (found == 0) fail("libsotto_cuda_emulated.so has none");
  }
};
const Registration registration;

}  // namespace
