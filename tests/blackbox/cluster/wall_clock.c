/* Preloaded into a member: its wall clock is off by as many seconds as the file at SKEG_TEST_WALL_CLOCK says, eight bytes
 * that may change at any time. Its other clocks are right. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *off_by;

__attribute__((constructor)) static void map_file(void) {
    int file = open(getenv("SKEG_TEST_WALL_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (file < 0 || mapped == MAP_FAILED) abort();
    close(file);
    off_by = mapped;
}

static int64_t seconds_off(void) { return off_by ? *off_by : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds_off();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += seconds_off();
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}

/* Waits until a time that was reckoned by the wrong clock; the kernel goes by the right one. */
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    /* By version: without one an older form of it may be found, which takes another condition. */
    static const char *const versions[] = {"GLIBC_2.3.2", "GLIBC_2.17"};
    for (int at = 0; at < 2 && !real; at++) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", versions[at]);
    if (!real) abort();
    struct timespec rightly = *until;
    struct timespec monotonic;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &monotonic);
    /* A wait by the monotonic clock is for a time that is less than the years since 1970. */
    if (until->tv_sec > monotonic.tv_sec + 1000000000) rightly.tv_sec -= seconds_off();
    return real(cond, mutex, &rightly);
}
