/* One rank of an MPI library. What it is told: sides.py. Argument: the control socket. */
#include <inttypes.h>
#include <math.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static FILE* commands;
static FILE* replies;
static int rank, ranks;
static int count; /* elements of in and out */
static float* in;
static float* out;

static void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  if (replies != NULL) {
    fputs("{\"error\": \"", replies);
    vfprintf(replies, format, args);
    fputs("\"}\n", replies);
    fflush(replies);
  }
  va_end(args);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void connect_control(const char* path) {
  struct sockaddr_un address;
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof address) != 0) {
    perror(path);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  commands = fdopen(fd, "r");
  replies = fdopen(dup(fd), "w");
}

static float input(uint64_t i, int r) {
  uint32_t code = (uint32_t)(i * 2654435761u + (uint64_t)r * 2246822519u);
  code = (code ^ code >> 15) * 3266489917u;
  return (float)(code >> 16) / 32768.0f - 1.0f;
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void reduce(void) { MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }

static void size(int n) {
  free(in);
  free(out);
  in = malloc((size_t)n * sizeof *in);
  out = calloc((size_t)n, sizeof *out);
  if (in == NULL || out == NULL) fail("no memory for %d elements", n);
  count = n;
  for (int i = 0; i < n; ++i) in[i] = input((uint64_t)i, rank);
  fputs("{}\n", replies);
}

static void check(void) {
  reduce();
  uint64_t checksum = UINT64_C(14695981039346656037); /* FNV-1a over words */
  double worst = 0, squares = 0, of_mean = 0;
  for (int i = 0; i < count; ++i) {
    uint32_t word;
    memcpy(&word, &out[i], sizeof word);
    checksum = (checksum ^ word) * UINT64_C(1099511628211);
    double mean = 0;
    for (int r = 0; r < ranks; ++r) mean += input((uint64_t)i, r);
    mean /= ranks;
    const double off = (double)out[i] / ranks - mean;
    if (!(fabs(off) <= worst)) worst = fabs(off);
    squares += off * off;
    of_mean += mean * mean;
  }
  if (!isfinite(squares)) worst = squares = 1e30;
  fprintf(replies, "{\"checksum\": \"%016" PRIx64 "\", \"error_max\": %.9g, \"error_rms\": %.9g}\n",
          checksum, worst, of_mean > 0 ? sqrt(squares / of_mean) : 0);
}

static void series(int dropped, int counted) {
  for (int i = 0; i < dropped; ++i) reduce();
  MPI_Barrier(MPI_COMM_WORLD);
  const int64_t start = now_ns();
  for (int i = 0; i < counted; ++i) reduce();
  fprintf(replies, "{\"ns\": %" PRId64 "}\n", now_ns() - start);
}

static void singles(int counted) {
  int64_t* times = malloc((size_t)counted * sizeof *times);
  if (times == NULL) fail("no memory for %d times", counted);
  for (int i = 0; i < counted; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const int64_t start = now_ns();
    reduce();
    times[i] = now_ns() - start;
  }
  fputs("{\"ns\": [", replies);
  for (int i = 0; i < counted; ++i) fprintf(replies, "%s%" PRId64, i == 0 ? "" : ", ", times[i]);
  fputs("]}\n", replies);
  free(times);
}

static void obey(const char* line) {
  int a = 0, b = 0;
  if (sscanf(line, "size %d", &a) == 1 && a > 0) {
    size(a);
  } else if (strcmp(line, "check fp32\n") == 0) {
    check();
  } else if (sscanf(line, "series fp32 %d %d", &a, &b) == 2 && a >= 0 && b > 0) {
    series(a, b);
  } else if (sscanf(line, "singles fp32 %d", &a) == 1 && a > 0) {
    singles(a);
  } else {
    fail("a command that this rank does not know");
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 2) fail("expected the control socket");
  size_t room = 0;
  char* line = NULL;
  int one = 1, sum = 0;
  MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD); /* connections are there */
  connect_control(argv[1]);
  fprintf(replies, "{\"rank\": %d, \"pid\": %d}\n", rank, (int)getpid());
  fflush(replies);
  while (getline(&line, &room, commands) > 0) {
    obey(line);
    fflush(replies);
  }
  free(line);
  MPI_Finalize();
  return 0;
}
