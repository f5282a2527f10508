#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common.h"

enum { PATH_SIZE = 4096 };

typedef struct Header {
  char magic[8]; /* changes with the layout of this file */
  RunKey key;
  Totals totals;
  uint64_t state_bytes;
} Header;

static const char kMagic[8] = {'S', 'O', 'T', 'T', 'O', 'C', 'T', '4'};

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static int
fail(Failure* failure, const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(failure->text, sizeof failure->text, format, args);
  va_end(args);
  return 0;
}

static void slot_name(char* name, size_t size, int64_t slot, int64_t rank) {
  snprintf(name, size, "slot%" PRId64 ".rank%" PRId64, slot, rank);
}

/* ---- writing ---- */

static int write_all(int fd, const void* bytes, uint64_t n) {
  for (const char* p = bytes; n > 0;) {
    const ssize_t written = write(fd, p, n);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return 0;
    p += written;
    n -= (uint64_t)written;
  }
  return 1;
}

/* A rename is durable once the directory is. */
static int sync_directory(const char* directory) {
  const int fd = open(directory, O_RDONLY);
  const int ok = fd >= 0 && fsync(fd) == 0;
  if (fd >= 0) close(fd);
  return ok;
}

typedef struct Part {
  const void* bytes;
  uint64_t n;
} Part;

/* Replaces directory/name by the parts, all or nothing. */
static int write_file(const char* directory, const char* name, const Part* parts, int n,
                      Failure* failure) {
  char path[PATH_SIZE], temporary[PATH_SIZE];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  if (snprintf(temporary, sizeof temporary, "%s/%s.tmp", directory, name) >=
      (int)sizeof temporary) {
    return fail(failure, "path too long: %.200s...", directory);
  }
  const int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0) return fail(failure, "cannot create \"%s\": %s", temporary, strerror(errno));
  int ok = 1;
  for (int i = 0; i < n && ok; ++i) ok = write_all(fd, parts[i].bytes, parts[i].n);
  ok = ok && fsync(fd) == 0;
  const int error = errno; /* of the first call that failed */
  ok = close(fd) == 0 && ok;
  if (ok && rename(temporary, path) == 0 && sync_directory(directory)) return 1;
  fail(failure, "cannot write \"%s\": %s; the last complete checkpoint is unharmed", path,
       strerror(ok ? errno : error));
  unlink(temporary);
  return 0;
}

int checkpoint_prepare(const char* directory, Failure* failure) {
  if (mkdir(directory, 0755) != 0 && errno != EEXIST) {
    return fail(failure, "--save: cannot make directory \"%s\": %s", directory, strerror(errno));
  }
  if (access(directory, W_OK | X_OK) != 0) {
    return fail(failure, "--save: cannot write to directory \"%s\": %s", directory,
                strerror(errno));
  }
  return 1;
}

int checkpoint_write(const char* directory, int64_t slot, const RunKey* key, const Totals* totals,
                     const void* state, uint64_t state_bytes, Failure* failure) {
  Header header;
  memset(&header, 0, sizeof header);
  memcpy(header.magic, kMagic, sizeof kMagic);
  header.key = *key;
  header.totals = *totals;
  header.state_bytes = state_bytes;
  const uint64_t hash =
      hash_bytes(hash_bytes(HASH_START, &header, sizeof header), state, state_bytes);
  const Part parts[] = {{&header, sizeof header}, {state, state_bytes}, {&hash, sizeof hash}};
  char name[64], path[PATH_SIZE];
  slot_name(name, sizeof name, slot, key->rank);
  snprintf(path, sizeof path, "%s/%s", directory, name);
  unlink(path); /* older than the last complete checkpoint; frees room for the new one */
  return write_file(directory, name, parts, 3, failure);
}

int latest_write(const char* directory, const Latest* latest, Failure* failure) {
  char text[128];
  const int n = snprintf(text, sizeof text, "{\"step\": %" PRId64 ", \"slot\": %" PRId64 "}\n",
                         latest->step, latest->slot);
  const Part part = {text, (uint64_t)n};
  return write_file(directory, "latest", &part, 1, failure);
}

/* ---- reading ---- */

int latest_read(const char* directory, Latest* latest, Failure* failure) {
  char path[PATH_SIZE];
  snprintf(path, sizeof path, "%s/latest", directory);
  latest->step = -1;
  latest->slot = 1;
  FILE* file = fopen(path, "r");
  if (!file && errno == ENOENT) return 1;
  if (!file) return fail(failure, "cannot open \"%s\": %s", path, strerror(errno));
  const int got =
      fscanf(file, "{\"step\": %" SCNd64 ", \"slot\": %" SCNd64 "}", &latest->step, &latest->slot);
  fclose(file);
  if (got != 2 || latest->step < 0 || latest->slot < 0 || latest->slot > 1) {
    return fail(failure, "\"%s\" is damaged", path);
  }
  return 1;
}

/* Names the first part in which a checkpoint's run differs from this one. */
static int compare_keys(const RunKey* saved, const RunKey* now, const char* path,
                        Failure* failure) {
  static const char* const kNames[] = {"number of ranks", "rank",        "--seed",   "micro-batch",
                                       "accumulation",    "--width",     "--layers", "--heads",
                                       "--mlp",           "--positions", "--masked"};
  const int64_t *a = &saved->world, *b = &now->world;
  for (size_t i = 0; i < sizeof kNames / sizeof kNames[0]; ++i) {
    if (a[i] == b[i]) continue;
    return fail(failure,
                "checkpoint \"%s\" is of another run: %s was %" PRId64 ", now it is %" PRId64, path,
                kNames[i], a[i], b[i]);
  }
  if (saved->data_hash != now->data_hash)
    return fail(failure, "checkpoint \"%s\" is of a run on other data", path);
  return 1;
}

static int read_parts(FILE* file, const char* path, Header* header, void** state,
                      Failure* failure) {
  struct stat info;
  if (fread(header, sizeof *header, 1, file) != 1 ||
      memcmp(header->magic, kMagic, sizeof kMagic) != 0) {
    return fail(failure, "\"%s\" is not a checkpoint of this program", path);
  }
  uint64_t hash = 0;
  const uint64_t expected = sizeof *header + header->state_bytes + sizeof hash;
  if (fstat(fileno(file), &info) != 0 || (uint64_t)info.st_size != expected) {
    return fail(failure, "checkpoint \"%s\" has %lld bytes instead of %" PRIu64, path,
                (long long)info.st_size, expected);
  }
  *state = malloc(header->state_bytes ? header->state_bytes : 1);
  if (!*state) return fail(failure, "out of memory for checkpoint \"%s\"", path);
  const int complete = fread(*state, 1, header->state_bytes, file) == header->state_bytes &&
                       fread(&hash, sizeof hash, 1, file) == 1;
  const uint64_t found =
      hash_bytes(hash_bytes(HASH_START, header, sizeof *header), *state, header->state_bytes);
  if (complete && hash == found) return 1;
  free(*state);
  return fail(failure, "checkpoint \"%s\" is damaged (checksum)", path);
}

int checkpoint_read(const char* directory, int64_t slot, const RunKey* key, Totals* totals,
                    void** state, uint64_t* state_bytes, Failure* failure) {
  char name[64], path[PATH_SIZE];
  Header header;
  slot_name(name, sizeof name, slot, key->rank);
  snprintf(path, sizeof path, "%s/%s", directory, name);
  FILE* file = fopen(path, "rb");
  if (!file) return fail(failure, "cannot open checkpoint \"%s\": %s", path, strerror(errno));
  int ok = read_parts(file, path, &header, state, failure);
  fclose(file);
  if (ok && !compare_keys(&header.key, key, path, failure)) {
    free(*state);
    ok = 0;
  }
  if (!ok) return 0;
  *totals = header.totals;
  *state_bytes = header.state_bytes;
  return 1;
}
