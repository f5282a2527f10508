#include "log.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "blas.h"
#include "common.h"

const char* const kStageNames[N_STAGES] = {"full precision", "compressed", "local", "outer",
                                           "skipped"};

/* JSON has no NaN and no infinity. */
static void put_number(FILE* file, const char* name, double value) {
  if (isfinite(value)) {
    fprintf(file, ", \"%s\": %.9g", name, value);
  } else {
    fprintf(file, ", \"%s\": null", name);
  }
}

static void put_list(FILE* file, const char* name, const int64_t* values, int n) {
  fprintf(file, ",\n  \"%s\": [", name);
  for (int i = 0; i < n; ++i) fprintf(file, "%s%" PRId64, i ? ", " : "", values[i]);
  fputc(']', file);
}

static void put_text(FILE* file, const char* text) {
  fputc('"', file);
  for (const unsigned char* p = (const unsigned char*)text; *p; ++p) {
    if (*p == '"' || *p == '\\') fputc('\\', file);
    if (*p < 0x20) {
      fprintf(file, "\\u%04x", *p);
    } else {
      fputc(*p, file);
    }
  }
  fputc('"', file);
}

void log_open(Log* log, const Options* options, const Totals* totals) {
  const int on_terminal = isatty(STDOUT_FILENO);
  memset(log, 0, sizeof *log);
  log->options = options;
  log->redraw = strcmp(options->progress, "off") == 0 ? -1 : on_terminal;
  if (strcmp(options->progress, "line") == 0) log->redraw = 1;
  if (strcmp(options->progress, "plain") == 0) log->redraw = 0;
  log->shown_ns = now_ns();
  if (options->summary) { /* known before the training */
    FILE* file = fopen(options->summary, "a");
    if (!file || fclose(file) != 0)
      die("--summary: cannot open \"%s\": %s", options->summary, strerror(errno));
  }
  if (!options->log) return;
  log->file = fopen(options->log, totals ? "r+" : "w");
  if (!log->file && totals && errno == ENOENT) log->file = fopen(options->log, "w");
  if (!log->file) die("--log: cannot open \"%s\": %s", options->log, strerror(errno));
  if (!totals) return;
  fseeko(log->file, 0, SEEK_END);
  if (ftello(log->file) > totals->log_bytes &&
      ftruncate(fileno(log->file), (off_t)totals->log_bytes) != 0) {
    die("--log: cannot shorten \"%s\" to the checkpoint: %s", options->log, strerror(errno));
  }
  fseeko(log->file, 0, SEEK_END);
}

static void check_written(Log* log) {
  if (log->file && (fflush(log->file) != 0 || ferror(log->file))) {
    die("--log: cannot write \"%s\": %s", log->options->log, strerror(errno));
  }
}

/* ---- progress ---- */

/* Columns that a redrawn line may fill: one that wraps cannot be redrawn. */
static size_t line_width(void) {
  struct winsize size;
  const int known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? (size_t)size.ws_col - 1 : 79;
}

static void show_progress(Log* log, const Totals* totals, const StepRecord* r) {
  char text[512], skipped[48] = "";
  const int64_t steps = log->options->steps, now = now_ns();
  const double left_s = (double)(steps - (int64_t)totals->step) * log->step_ns / 1e9;
  const int last = (int64_t)totals->step == steps;
  const int64_t pause = log->redraw == 1 ? 200000000 : INT64_C(10000000000);
  if (log->redraw < 0 || (!last && now - log->shown_ns < pause)) return;
  log->shown_ns = now;
  if (totals->skipped) snprintf(skipped, sizeof skipped, " (%" PRIu64 " skipped)", totals->skipped);
  snprintf(text, sizeof text,
           "%s: step %" PRIu64 "/%" PRId64
           ", loss %.3f, %.0f samples/s, %.1f MB sent, %s%s, %d:%02d left",
           log->options->name, totals->step, steps, r->loss, (double)r->batch * 1e9 / log->step_ns,
           (double)totals->payload_sent / 1e6, kStageNames[r->stage], skipped, (int)left_s / 60,
           (int)left_s % 60);
  if (log->redraw == 1) {
    printf("\r%.*s\x1b[K%s", (int)line_width(), text, last ? "\n" : "");
  } else {
    printf("%s\n", text);
  }
  fflush(stdout);
}

void log_note(Log* log, const char* text) {
  printf("%s%s: %s\n", log->redraw == 1 ? "\r\x1b[K" : "", log->options->name, text);
  fflush(stdout);
}

/* ---- JSON lines ---- */

void log_step(Log* log, const Totals* totals, const StepRecord* r) {
  const double weight = log->step_ns > 0 ? 0.05 : 1;
  log->step_ns += weight * (r->step_ms * 1e6 - log->step_ns);
  show_progress(log, totals, r);
  FILE* file = log->file;
  if (!file) return;
  fprintf(file, "{\"step\": %" PRIu64 ", \"samples\": %" PRIu64, totals->step, r->samples);
  put_number(file, "loss", r->loss);
  put_number(file, "lr", r->lr);
  fprintf(file, ", \"stage\": \"%s\"", kStageNames[r->stage]);
  if (r->stage == SKIPPED) fputs(", \"skipped\": true", file);
  put_number(file, "loss_scale", r->loss_scale);
  put_number(file, "clock_s", (double)totals->running_ns / 1e9);
  put_number(file, "step_ms", r->step_ms);
  put_number(file, "compute_ms", r->compute_ms);
  put_number(file, "codec_ms", r->codec_ms);
  put_number(file, "comm_ms", r->comm_ms);
  fprintf(file, ", \"payload_bytes\": %" PRIu64, r->payload_bytes);
  put_number(file, "grad_norm", r->grad_norm);
  fputs("}\n", file);
}

void log_eval(Log* log, const Totals* totals, uint64_t samples) {
  if (!log->file) return;
  fprintf(log->file, "{\"step\": %" PRIu64 ", \"samples\": %" PRIu64, totals->step, samples);
  put_number(log->file, "clock_s", (double)totals->running_ns / 1e9);
  put_number(log->file, "eval_loss", totals->eval_loss);
  fputs("}\n", log->file);
  check_written(log);
}

int64_t log_flush(Log* log) {
  check_written(log);
  return log->file ? (int64_t)ftello(log->file) : 0;
}

void log_close(Log* log) {
  check_written(log);
  if (log->file) fclose(log->file);
  log->file = NULL;
}

/* ---- summary ---- */

static void put_stages(FILE* file, const Totals* totals) {
  fprintf(file, ",\n  \"stages\": [");
  for (int i = 0, n = 0; i < N_STAGES; ++i) {
    if (totals->stage_steps[i] == 0) continue;
    fprintf(file, "%s{\"stage\": \"%s\", \"steps\": %" PRIu64 ", \"wall_s\": %.6f}",
            n++ ? ", " : "", kStageNames[i], totals->stage_steps[i],
            (double)totals->stage_ns[i] / 1e9);
  }
  fputc(']', file);
}

static void put_summary(FILE* file, const Options* options, const Summary* s) {
  fputs("{\n  \"name\": ", file);
  put_text(file, options->name);
  fprintf(file,
          ", \"seed\": %" PRId64 ", \"steps\": %" PRIu64 ", \"skipped_steps\": %" PRIu64
          ", \"ranks\": %d",
          options->seed, s->totals->step, s->totals->skipped, s->world);
  fprintf(file, ",\n  \"parameters\": %" PRId64 ", \"samples_per_step\": %" PRId64, s->n_params,
          s->batch);
  put_number(file, "val_loss", s->val_loss);
  fprintf(file, ", \"held_out_sequences\": %" PRIu64, s->held_out_sequences);
  put_number(file, "eval_loss", s->eval_loss);
  put_number(file, "unigram_entropy", s->unigram_entropy);
  fputs(",\n  \"clock\": \"monotonic, rank 0; evaluation and checkpoints left out\"", file);
  put_number(file, "wall_s", s->wall_s);
  put_number(file, "compute_s", s->compute_s);
  put_number(file, "codec_s", s->codec_s);
  put_number(file, "exposed_comm_s", s->exposed_comm_s);
  put_stages(file, s->totals);
  if (s->outer_period) fprintf(file, ",\n  \"outer_period\": %" PRIu64, s->outer_period);
  put_list(file, "payload_bytes_sent", s->payload_sent, s->world);
  put_list(file, "payload_bytes_planned", s->payload_planned, s->world);
  put_list(file, "header_bytes_sent", s->header_sent, s->world);
  put_list(file, "payload_bytes_between_hosts", s->between_hosts, s->world);
  fputs(",\n  \"blas_kernels\": ", file);
  put_text(file, blas_kernels());
  fprintf(file, ", \"params_hash\": \"%016" PRIx64 "\"\n}\n", s->params_hash);
}

void log_summary(const Options* options, const Summary* summary) {
  const char* path = options->summary;
  if (!path) return;
  FILE* file = fopen(path, "w");
  if (!file) die("--summary: cannot open \"%s\": %s", path, strerror(errno));
  put_summary(file, options, summary);
  const int failed = ferror(file);
  if (fclose(file) != 0 || failed) die("--summary: cannot write \"%s\": %s", path, strerror(errno));
}
