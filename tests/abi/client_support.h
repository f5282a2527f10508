/* What the client programs of this folder share: they are C, link nothing of the library and open
 * it as a plug-in of a framework would, with RTLD_NOW | RTLD_LOCAL. */
#ifndef SOTTO_TESTS_ABI_CLIENT_SUPPORT_H
#define SOTTO_TESTS_ABI_CLIENT_SUPPORT_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program with the place and the text, as a client that cannot go on. */
#define REQUIRE(condition, text)                                                  \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, (text)); \
      exit(1);                                                                    \
    }                                                                             \
  } while (0)

static void* open_library(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != NULL, dlerror());
  return library;
}

/* A function pointer cannot be cast from void* in ISO C: it is copied. */
static void find_symbol(void* library, const char* name, void* out_function, size_t bytes) {
  void* symbol = dlsym(library, name);
  REQUIRE(symbol != NULL, name);
  memcpy(out_function, &symbol, bytes);
}

#define DECLARE_SYMBOL(name) __typeof__(&sotto_##name) name;
#define FIND_SYMBOL(name) find_symbol(library, "sotto_" #name, &api.name, sizeof api.name);

#endif /* SOTTO_TESTS_ABI_CLIENT_SUPPORT_H */
