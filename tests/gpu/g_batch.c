/* SPDX-License-Identifier: MIT */
/*
 * g_batch RUNTIME_DIR INSTANCE [--device host|cuda:N] [--small] [--floor N] [--ring N]: a worker of a running
 * expertd reads sequences alone and several in a pass: the same bits. Prompts and answers apart, as on any
 * device; across the border of two blocks. --small: few and short ones, for a GPU that a CPU plays. Exit
 * status 0 or 1, 77: no such device.
 */
#include "tests/unit/batch_check.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    bool small = false;
    struct inf_engine_config config = {.gpu = -1, .device = INF_DEVICE_CUDA, .conversations = 32};
    struct inf_engine *e = NULL;
    struct shm_error err = {0};
    if (argc < 3) {
        fprintf(
            stderr,
            "usage: g_batch RUNTIME_DIR INSTANCE [--device host|cuda:N] [--small] [--floor N] [--ring N]\n");
        return 2;
    }
    for (int i = 3; i < argc; i++) {
        small |= !strcmp(argv[i], "--small");
        if (!strcmp(argv[i], "host"))
            config.device = INF_DEVICE_HOST;
        if (!strncmp(argv[i], "cuda:", 5))
            config.gpu = atoi(argv[i] + 5);
        if (!strcmp(argv[i - 1], "--floor"))
            config.store.floor = (uint32_t)atoi(argv[i]);
        if (!strcmp(argv[i - 1], "--ring"))
            config.store.ring = (uint32_t)atoi(argv[i]);
    }
    config.store.runtime_dir = argv[1];
    config.store.instance = argv[2];
    config.store.name = "g_batch";
    config.chunk = small ? 16 : 256;
    config.ctx = small ? 256 : 1024;
    config.kv_tokens = small ? 10 * INF_KV_BLOCK : 200 * INF_KV_BLOCK;
    int rc = inf_engine_open(&config, &err, &e);
    if (rc) {
        fprintf(stderr, "g_batch: %s\n", err.code ? shm_error_text(&err) : strerror(-rc));
        return rc == -ENOENT || rc == -ENODEV ? 77 : 1;
    }
    struct batch_setup set = {.sequences = small ? 2 : 16,
                              .prompt_max = small ? 2 : 140,
                              .answers = small ? 1 : 8,
                              .together = small ? 2 : 16,
                              .seed = 5,
                              .from = small ? INF_KV_BLOCK - 2 : 0,
                              .whole = small,
                              .cuts = !small};
    uint32_t together = batch_check(e, &set);
    if (!small) { /* more rows than a launch of generated tokens may have, where it has a bound */
        set.sequences = set.together = 32;
        set.prompt_max = 9;
        set.from = 5 * INF_KV_BLOCK - 3;
        set.cuts = false;
        together += batch_check(e, &set);
    }
    printf("%s: %u passes of several sequences, the same bits as alone\n", e->device->text, together);
    inf_engine_close(&e);
    return 0;
}
