#include "options.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

typedef enum { TEXT, NUMBER, SWITCH, PATHS } Kind;

typedef struct Flag {
  const char* name;
  Kind kind;
  size_t offset; /* of the field in Options */
  int64_t min, max;
  const char* help;
} Flag;

#define FIELD(f) offsetof(Options, f)
static const Flag kFlags[] = {
    {"--config", TEXT, FIELD(config), 0, 0, "FILE    DeepSpeed JSON configuration (required)"},
    {"--data", PATHS, FIELD(data), 0, 0,
     "PATH... text files, or directories searched for .py files; at least 2 MB\n"
     "                          (default: the modules of this machine's Python library)"},
    {"--steps", NUMBER, FIELD(steps), 1, INT64_C(1) << 40, "N       optimizer steps (3600)"},
    {"--seed", NUMBER, FIELD(seed), 0, INT64_MAX, "N       of the parameters and batches (1)"},
    {"--micro-batch", NUMBER, FIELD(micro_batch), 1, 65536,
     "N       sequences per rank and micro-batch (the configuration's)"},
    {"--accumulation", NUMBER, FIELD(accumulation), 1, 65536,
     "N       micro-batches per step (the configuration's)"},
    {"--width", NUMBER, FIELD(width), 1, 65536, "N       of the model (64)"},
    {"--layers", NUMBER, FIELD(layers), 1, 1024, "N       encoder layers (3)"},
    {"--heads", NUMBER, FIELD(heads), 1, 1024, "N       attention heads (4)"},
    {"--mlp", NUMBER, FIELD(mlp), 1, 1 << 20, "N       width inside the MLP (256)"},
    {"--positions", NUMBER, FIELD(positions), 2, 4096, "N       tokens per sequence (64)"},
    {"--masked", NUMBER, FIELD(masked), 1, 4095, "N       of them masked (10)"},
    {"--eval-every", NUMBER, FIELD(eval_every), 1, INT64_C(1) << 40,
     "N       steps between evaluations (40)"},
    {"--eval-sequences", NUMBER, FIELD(eval_sequences), 1, 1 << 24,
     "N       held-out sequences in an evaluation (1024)"},
    {"--log", TEXT, FIELD(log), 0, 0, "FILE    JSON lines, one per step"},
    {"--summary", TEXT, FIELD(summary), 0, 0, "FILE    JSON with the figures of the whole run"},
    {"--record", TEXT, FIELD(record), 0, 0,
     "PREFIX  write start values and gradients of every step to PREFIX.rank0, ..."},
    {"--save", TEXT, FIELD(save), 0, 0, "DIR     write checkpoints here, the last at the end"},
    {"--save-every", NUMBER, FIELD(save_every), 1, INT64_C(1) << 40,
     "N       steps between checkpoints (only at the end)"},
    {"--resume", SWITCH, FIELD(resume), 0, 0,
     "        continue from the checkpoint in the --save directory"},
    {"--name", TEXT, FIELD(name), 0, 0, "TEXT    of the run, in its outputs (run)"},
    {"--progress", TEXT, FIELD(progress), 0, 0,
     "HOW     line: redrawn; plain: a line every 10 s; off; auto (line on a terminal)"},
};
enum { N_FLAGS = sizeof kFlags / sizeof kFlags[0] };

static void usage(void) {
  printf(
      "Trains a byte-level masked language model on several ranks with Sotto.\n"
      "usage: sotto-run -n RANKS -- sotto-c-trainer --config FILE [options]\n\n");
  for (int i = 0; i < N_FLAGS; ++i) printf("  %-16s %s\n", kFlags[i].name, kFlags[i].help);
  printf("  %-16s         this text\n", "--help");
}

static int64_t parse_number(const Flag* flag, const char* text) {
  char* end;
  errno = 0;
  const long long value = strtoll(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || value < flag->min || value > flag->max) {
    die("%s: \"%s\" is not an integer from %lld to %lld", flag->name, text, (long long)flag->min,
        (long long)flag->max);
  }
  return value;
}

/* Stores the flag's value and returns how many words of args (which follow the flag) it took. */
static int store(Options* options, const Flag* flag, char** args, int n) {
  char* field = (char*)options + flag->offset;
  if (flag->kind == SWITCH) {
    *(int*)field = 1;
    return 0;
  }
  if (n == 0 || strncmp(args[0], "--", 2) == 0) die("%s needs a value; see --help", flag->name);
  if (flag->kind == TEXT) *(const char**)field = args[0];
  if (flag->kind == NUMBER) *(int64_t*)field = parse_number(flag, args[0]);
  if (flag->kind != PATHS) return 1;
  *(char***)field = args;
  for (options->n_data = 0; options->n_data < n && strncmp(args[options->n_data], "--", 2) != 0;)
    ++options->n_data;
  return options->n_data;
}

static void check(const Options* o) {
  if (!o->config) die("--config FILE is required; see --help");
  if (o->width % o->heads != 0) {
    die("--width %lld is not a multiple of --heads %lld", (long long)o->width, (long long)o->heads);
  }
  if (o->masked > o->positions) {
    die("--masked %lld is more than --positions %lld", (long long)o->masked,
        (long long)o->positions);
  }
  if ((o->resume || o->save_every) && !o->save) die("--resume and --save-every need --save DIR");
  if (o->record && o->resume) die("--record needs the start of a run: without --resume");
  const char* how[] = {"auto", "line", "plain", "off"};
  for (int i = 0; i < 4; ++i) {
    if (strcmp(o->progress, how[i]) == 0) return;
  }
  die("--progress: \"%s\" is not auto, line, plain or off", o->progress);
}

void options_parse(Options* options, int argc, char** argv) {
  const Options defaults = {.name = "run",
                            .steps = 3600,
                            .seed = 1,
                            .eval_every = 40,
                            .eval_sequences = 1024,
                            .width = 64,
                            .layers = 3,
                            .heads = 4,
                            .mlp = 256,
                            .positions = 64,
                            .masked = 10,
                            .progress = "auto"};
  *options = defaults;
  for (int i = 1; i < argc; ++i) {
    const Flag* flag = NULL;
    for (int f = 0; f < N_FLAGS; ++f) {
      if (strcmp(argv[i], kFlags[f].name) == 0) flag = &kFlags[f];
    }
    if (strcmp(argv[i], "--help") == 0) {
      usage();
      exit(0);
    }
    if (!flag) die("unknown argument \"%s\"; see --help", argv[i]);
    i += store(options, flag, argv + i + 1, argc - i - 1);
  }
  check(options);
}
