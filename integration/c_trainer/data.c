#include "data.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common.h"
#include "rng.h"

enum { BYTES_MIN = 2000000, SEEN_MIN = 50, PATH_SIZE = 4096 };

/* ---- finding files ---- */

typedef struct FileList {
  char** paths;
  size_t n, capacity;
} FileList;

static void list_add(FileList* list, const char* path) {
  if (list->n == list->capacity) {
    list->capacity = list->capacity ? 2 * list->capacity : 64;
    list->paths = realloc(list->paths, list->capacity * sizeof *list->paths);
  }
  char* copy = list->paths ? malloc(strlen(path) + 1) : NULL;
  if (!copy) die("--data: out of memory");
  list->paths[list->n++] = strcpy(copy, path);
}

static void list_free(FileList* list) {
  for (size_t i = 0; i < list->n; ++i) free(list->paths[i]);
  free(list->paths);
}

static int is_python(const char* name) {
  const size_t n = strlen(name);
  return n > 3 && strcmp(name + n - 3, ".py") == 0;
}

/* Adds the .py files of a directory. Links are not followed, so no file is read twice. */
static void list_directory(FileList* list, const char* directory, int recursive) {
  DIR* dir = opendir(directory);
  if (!dir) die("--data: cannot open directory \"%s\": %s", directory, strerror(errno));
  for (struct dirent* entry; (entry = readdir(dir)) != NULL;) {
    char path[PATH_SIZE];
    struct stat info;
    if (entry->d_name[0] == '.') continue;
    if (snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) >= (int)sizeof path) {
      die("--data: path too long below \"%s\"", directory);
    }
    if (lstat(path, &info) != 0) die("--data: cannot read \"%s\": %s", path, strerror(errno));
    if (S_ISDIR(info.st_mode) && recursive) list_directory(list, path, 1);
    if (S_ISREG(info.st_mode) && is_python(entry->d_name)) list_add(list, path);
  }
  closedir(dir);
}

static int by_path(const void* a, const void* b) {
  return strcmp(*(char* const*)a, *(char* const*)b);
}

static void list_path(FileList* list, char* path) {
  struct stat info;
  if (stat(path, &info) != 0) die("--data: cannot read \"%s\": %s", path, strerror(errno));
  if (!S_ISDIR(info.st_mode)) {
    list_add(list, path);
    return;
  }
  const size_t before = list->n;
  for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; --n) path[n - 1] = '\0';
  list_directory(list, path, 1);
  if (list->n == before) die("--data: no .py file in directory \"%s\"", path);
  qsort(list->paths + before, list->n - before, sizeof *list->paths, by_path);
}

/* Modules directly in /usr/lib/python3.N with the largest N; packages in folders vary from machine
 * to machine. */
static void list_default(FileList* list, char* label, size_t size) {
  DIR* dir = opendir("/usr/lib");
  int best = -1;
  for (struct dirent* entry; dir && (entry = readdir(dir)) != NULL;) {
    int minor;
    if (sscanf(entry->d_name, "python3.%d", &minor) == 1 && minor > best) best = minor;
  }
  if (dir) closedir(dir);
  if (best < 0)
    die("no Python library in /usr/lib/python3.*: name text files or directories with --data");
  snprintf(label, size, "/usr/lib/python3.%d", best);
  list_directory(list, label, 0);
  qsort(list->paths, list->n, sizeof *list->paths, by_path);
}

/* ---- reading ---- */

typedef struct Text {
  unsigned char* bytes;
  size_t n, capacity;
} Text;

static void append_file(Text* text, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) die("--data: cannot open \"%s\": %s", path, strerror(errno));
  for (;;) {
    if (text->capacity - text->n < 65536) {
      text->capacity = 2 * text->capacity + (1 << 20);
      text->bytes = realloc(text->bytes, text->capacity);
      if (!text->bytes) die("--data: out of memory at \"%s\" (%zu bytes so far)", path, text->n);
    }
    const size_t got = fread(text->bytes + text->n, 1, text->capacity - text->n, file);
    text->n += got;
    if (got == 0) break;
  }
  if (ferror(file)) die("--data: cannot read \"%s\": %s", path, strerror(errno));
  fclose(file);
}

static void append_list(Text* text, const FileList* list, const char* label, int verbose) {
  const size_t before = text->n;
  for (size_t i = 0; i < list->n; ++i) append_file(text, list->paths[i]);
  if (verbose) {
    printf("data: %s: %zu file%s, %.2f MB\n", label, list->n, list->n == 1 ? "" : "s",
           (double)(text->n - before) / 1e6);
  }
}

/* ---- tokens ---- */

static double entropy_of(const uint16_t* tokens, size_t n, int vocab) {
  size_t seen[258] = {0};
  double entropy = 0;
  for (size_t i = 0; i < n; ++i) ++seen[tokens[i]];
  for (int t = 0; t < vocab; ++t) {
    const double p = (double)seen[t] / (double)n;
    if (seen[t] > 0) entropy -= p * log(p);
  }
  return entropy;
}

static void tokenize(Data* data, const Text* text) {
  size_t seen[256] = {0};
  int token_of[256], next = 0;
  data->held_out = text->n / 20;
  data->train = text->n - data->held_out;
  for (size_t i = 0; i < data->train; ++i) ++seen[text->bytes[i]];
  for (int b = 0; b < 256; ++b) token_of[b] = seen[b] >= SEEN_MIN ? next++ : -1;
  data->unknown = next;
  data->mask = next + 1;
  data->vocab = next + 2;
  data->tokens = malloc(text->n * sizeof *data->tokens);
  if (!data->tokens) die("--data: out of memory for %zu tokens", text->n);
  for (size_t i = 0; i < text->n; ++i) {
    const int token = token_of[text->bytes[i]];
    data->tokens[i] = (uint16_t)(token < 0 ? data->unknown : token);
  }
  data->entropy = entropy_of(data->tokens + data->train, data->held_out, data->vocab);
  data->hash = hash_bytes(HASH_START, text->bytes, text->n);
}

void data_load(Data* data, char* const* paths, int n, int verbose) {
  Text text = {NULL, 0, 0};
  memset(data, 0, sizeof *data);
  for (int i = 0; i < (n > 0 ? n : 1); ++i) {
    FileList list = {NULL, 0, 0};
    char label[PATH_SIZE];
    if (n > 0) {
      snprintf(label, sizeof label, "%s", paths[i]);
      list_path(&list, label);
    } else {
      list_default(&list, label, sizeof label);
    }
    append_list(&text, &list, label, verbose);
    data->files += (int)list.n;
    list_free(&list);
  }
  if (text.n < BYTES_MIN) {
    die("--data: %zu bytes in %d file(s); at least %d bytes are needed to train on", text.n,
        data->files, BYTES_MIN);
  }
  if (text.n > UINT32_MAX)
    die("--data: %zu bytes; at most %lu can be used", text.n, (unsigned long)UINT32_MAX);
  tokenize(data, &text);
  free(text.bytes);
  if (verbose) {
    printf("data: %zu bytes to train on, %zu held out; %d tokens; unigram entropy %.3f nats\n",
           data->train, data->held_out, data->vocab, data->entropy);
  }
}

void data_free(Data* data) { free(data->tokens); }

/* ---- batches ---- */

/* Copies a window into place `slot` and masks it: of the chosen positions 80 % become the mask
 * token, 10 % a random token, 10 % stay as they are. */
static void place(const Data* data, const ModelShape* s, const uint16_t* window, Rng* rng,
                  Batch* batch, int slot) {
  const size_t first = (size_t)slot * (size_t)s->positions,
               first_masked = (size_t)slot * (size_t)s->masked;
  uint16_t* tokens = batch->tokens + first;
  memcpy(tokens, window, (size_t)s->positions * sizeof *tokens);
  int32_t* rows = batch->rows + first_masked;
  for (int m = 0; m < s->masked; ++m) {
    /* Draw among the positions still free, then step over those already chosen, which are kept in
     * order. */
    int32_t row = (int32_t)first + (int32_t)rng_below(rng, (uint32_t)(s->positions - m));
    int at = 0;
    for (; at < m && rows[at] <= row; ++at) ++row;
    memmove(rows + at + 1, rows + at, (size_t)(m - at) * sizeof *rows);
    rows[at] = row;
  }
  for (int m = 0; m < s->masked; ++m) {
    uint16_t* token = batch->tokens + rows[m];
    batch->targets[first_masked + (size_t)m] = *token;
    const uint32_t what = rng_below(rng, 10);
    if (what < 8) *token = (uint16_t)data->mask;
    if (what == 8) *token = (uint16_t)rng_below(rng, (uint32_t)data->mask);
  }
}

void data_train_batch(const Data* data, const ModelShape* shape, uint64_t seed, uint64_t step,
                      int rank, Batch* batch) {
  Rng rng = rng_make(seed, RNG_TRAIN, step, (uint64_t)rank);
  const uint32_t starts = (uint32_t)(data->train - (size_t)shape->positions + 1);
  for (int i = 0; i < batch->sequences; ++i) {
    place(data, shape, data->tokens + rng_below(&rng, starts), &rng, batch, i);
  }
}

void data_eval_sequence(const Data* data, const ModelShape* shape, int which, size_t i,
                        Batch* batch, int slot) {
  Rng rng = rng_make(0, which == EVAL_ALL ? RNG_HELD_OUT : RNG_EVAL, i, 0);
  const uint16_t* held_out = data->tokens + data->train;
  const uint32_t starts = (uint32_t)(data->held_out - (size_t)shape->positions + 1);
  const size_t start = which == EVAL_ALL ? i * (size_t)shape->positions : rng_below(&rng, starts);
  place(data, shape, held_out + start, &rng, batch, slot);
}

size_t data_held_out_windows(const Data* data, const ModelShape* shape) {
  return data->held_out / (size_t)shape->positions;
}
