// Preloaded into a test's process: after faults_arm(root, n, mode), the n-th call of the C library that changes files
// under `root` kills the process (mode 1), a write after half of its bytes; or it and all later ones find the disk full
// (mode 2), a write after half of its bytes. faults_seen() says how many calls there were.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static long due = 0, seen = 0;
static int mode = 0;

void faults_arm(const char *under, long n, int how) {
  snprintf(root, sizeof root, "%s", under);
  due = n, mode = how;
  if (how) seen = 0;
}

long faults_seen(void) { return seen; }

static int is_due(const char *path) {
  if (!mode || !path || !strstr(path, root)) return 0;
  ++seen;
  return mode == 1 ? seen == due : seen >= due;
}

static int is_due_at(int descriptor) {
  char link[64], path[4096];
  if (!mode) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_due(path);
}

static int fail(void) {
  if (mode == 1) {
    kill(getpid(), SIGKILL);
    pause();
  }
  errno = ENOSPC;
  return -1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
  if (!is_due_at(fd)) return NEXT(write)(fd, data, size);
  if (size > 1 && (mode == 1 || seen == due)) {
    ssize_t half = NEXT(write)(fd, data, size / 2);
    return mode == 1 ? fail() : half;
  }
  return fail();
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  return is_due_at(fd) ? fail() : NEXT(writev)(fd, parts, count);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  return is_due_at(fd) ? fail() : NEXT(pwrite64)(fd, data, size, at);
}

#define OPENS(name)                                             \
  int name(const char *path, int flags, ...) {                  \
    va_list rest;                                               \
    va_start(rest, flags);                                      \
    mode_t bits = flags & O_CREAT ? va_arg(rest, mode_t) : 0;   \
    va_end(rest);                                               \
    if ((flags & O_CREAT) && is_due(path)) return fail();       \
    return NEXT(name)(path, flags, bits);                       \
  }
OPENS(open)
OPENS(open64)

int ftruncate64(int fd, off64_t size) { return is_due_at(fd) ? fail() : NEXT(ftruncate64)(fd, size); }
int fsync(int fd) { return is_due_at(fd) ? fail() : NEXT(fsync)(fd); }
int rename(const char *from, const char *to) { return is_due(from) ? fail() : NEXT(rename)(from, to); }
int link(const char *from, const char *to) { return is_due(from) ? fail() : NEXT(link)(from, to); }
int mkdir(const char *path, mode_t bits) { return is_due(path) ? fail() : NEXT(mkdir)(path, bits); }

int unlink(const char *path) {
  // A full disk lets files be removed.
  if (mode == 1 && is_due(path)) return fail();
  return NEXT(unlink)(path);
}
