/* SPDX-License-Identifier: MIT */
/*
 * Driver of a fuzz target without libFuzzer:
 *
 *     fuzz_X [-n MUTATIONS] [-s SEED] FILE|DIR...
 *
 * Runs each file as it is, then MUTATIONS (20000) mutated copies of them. The
 * same seed gives the same inputs. Before each run the input's number is kept in a
 * place that a crash handler prints, so that "-o NUMBER" writes that input to
 * crash.bin and runs only it.
 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"

#define FILES_MAX     4096
#define FILE_BYTES    (16u << 20)
#define GROW_MAX      64 /* bytes inserted in one step */
#define STEPS_MAX     6
#define MUTATIONS     20000
#define SEED          1
#define RUN_SECONDS   90 /* of one input: more is a hang */
#define NOTHING_ALONE UINT64_MAX

struct input {
    uint8_t *data;
    size_t size;
};

static struct input files[FILES_MAX];
static size_t n_files;
static volatile uint64_t current, seed_shown;

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t below(uint64_t *state, size_t n)
{
    return n ? next_random(state) % n : 0;
}

static void crashed(int sig)
{
    char line[128];
    int n =
        snprintf(line, sizeof(line), "signal %d on input %llu (repeat with -s %llu -o %llu)\n", sig,
                 (unsigned long long)current, (unsigned long long)seed_shown, (unsigned long long)current);

    if (write(2, line, (size_t)n) < 0)
        _exit(2);
    _exit(1);
}

static void load_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    struct input *in = &files[n_files];
    long size;

    if (!f || fseek(f, 0, SEEK_END) < 0 || (size = ftell(f)) < 0 || size > (long)FILE_BYTES ||
        n_files == FILES_MAX) {
        fprintf(stderr, "%s: cannot be read, or too large\n", path);
        exit(1);
    }
    rewind(f);
    in->size = (size_t)size;
    in->data = malloc(in->size + 1);
    if (!in->data || fread(in->data, 1, in->size, f) != in->size) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    fclose(f);
    n_files++;
}

static int no_dot(const struct dirent *d)
{
    return d->d_name[0] != '.';
}

static void load(const char *path)
{
    struct dirent **names;
    struct stat st;
    int n;

    if (stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) {
        load_file(path);
        return;
    }
    n = scandir(path, &names, no_dot, alphasort);
    if (n <= 0) {
        fprintf(stderr, "%s: no inputs\n", path);
        exit(1);
    }
    for (int i = 0; i < n; i++) {
        char full[1024];

        snprintf(full, sizeof(full), "%s/%s", path, names[i]->d_name);
        load_file(full);
        free(names[i]);
    }
    free(names);
}

/* Changes data (room for size + GROW_MAX) once; returns the new size. Half of the
 * places are in the first quarter, where headers are. */
static size_t mutate(uint8_t *data, size_t size, uint64_t *rng)
{
    static const uint64_t odd[] = {0,          1,          2,         3,          4,          8,
                                   0x7f,       0xff,       0x7fff,    0xffff,     0x7fffffff, 0x80000000,
                                   0xffffffff, 1ull << 32, INT64_MAX, 1ull << 63, UINT64_MAX, UINT64_MAX - 7,
                                   1ull << 60, 1ull << 61, 1ull << 62};
    size_t at = below(rng, below(rng, 2) ? size / 4 + 1 : size + 1), n;
    uint64_t v;

    switch (below(rng, 9)) {
    case 0: /* a bit */
        if (at < size)
            data[at] ^= (uint8_t)(1u << below(rng, 8));
        break;
    case 1: /* a byte */
        if (at < size)
            data[at] = (uint8_t)next_random(rng);
        break;
    case 2: /* a word of an odd value */
    case 3:
        v = odd[below(rng, sizeof(odd) / sizeof(odd[0]))];
        n = below(rng, 2) ? 8 : 4;
        if (size >= n && at <= size - n)
            memcpy(data + at, &v, n);
        break;
    case 4: /* a little more or less */
        if (at < size)
            data[at] = (uint8_t)(data[at] + below(rng, 7) - 3);
        break;
    case 5: /* cut off */
        size = at;
        break;
    case 6: /* take out */
        n = below(rng, GROW_MAX);
        if (size >= n && at <= size - n) {
            memmove(data + at, data + at + n, size - n - at);
            size -= n;
        }
        break;
    case 7: /* put in */
        n = below(rng, GROW_MAX);
        if (at <= size) {
            memmove(data + at + n, data + at, size - at);
            for (size_t i = 0; i < n; i++)
                data[at + i] = (uint8_t)next_random(rng);
            size += n;
        }
        break;
    default: /* copy from elsewhere in the input */
        n = below(rng, GROW_MAX);
        v = below(rng, size + 1);
        if (size >= n && at <= size - n && v <= size - n)
            memmove(data + at, data + v, n);
        break;
    }
    return size;
}

/* Runs on an exact copy, so that a read beyond the end is seen. */
static void run(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);

    if (!copy)
        exit(1);
    memcpy(copy, data, size);
    alarm(RUN_SECONDS);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void save(const uint8_t *data, size_t size)
{
    FILE *f = fopen("crash.bin", "wb");

    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0)
        fprintf(stderr, "cannot write crash.bin\n");
}

int main(int argc, char **argv)
{
    uint64_t n = MUTATIONS, seed = SEED, alone = NOTHING_ALONE;
    uint8_t *buf = malloc(FILE_BYTES + STEPS_MAX * GROW_MAX);
    int c;

    while ((c = getopt(argc, argv, "n:s:o:")) != -1) {
        uint64_t v = c == '?' ? 0 : strtoull(optarg, NULL, 0);

        if (c == '?')
            return 1;
        *(c == 'n' ? &n : c == 's' ? &seed : &alone) = v;
    }
    for (int i = optind; i < argc; i++)
        load(argv[i]);
    if (!buf || n_files == 0) {
        fprintf(stderr, "usage: %s [-n MUTATIONS] [-s SEED] [-o NUMBER] FILE|DIR...\n", argv[0]);
        return 1;
    }
    seed_shown = seed;
    signal(SIGALRM, crashed);
    signal(SIGABRT, crashed);
    signal(SIGSEGV, crashed);
    signal(SIGBUS, crashed);
    signal(SIGFPE, crashed);
    for (uint64_t i = 0; i < n_files + n; i++) {
        const struct input *in = &files[i % n_files];
        uint64_t rng = seed * 0x100000001b3u + i;
        size_t size = in->size;

        current = i;
        if (alone != NOTHING_ALONE && i != alone)
            continue;
        memcpy(buf, in->data, size);
        if (i >= n_files)
            for (size_t k = 1 + below(&rng, STEPS_MAX); k > 0; k--)
                size = mutate(buf, size, &rng);
        if (i == alone)
            save(buf, size);
        run(buf, size);
    }
    printf("%zu files, %llu mutations, seed %llu\n", n_files, (unsigned long long)n,
           (unsigned long long)seed);
    for (size_t i = 0; i < n_files; i++)
        free(files[i].data);
    free(buf);
    return 0;
}
