/* SPDX-License-Identifier: MIT */
/* The park's file, and its memory. */
#include "expertd/exd_log.h"
#include "expertd/exd_park_priv.h"
#include "proto/prt_file.h"
#include "proto/prt_path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int exd_park_take_memory(struct exd_park *p, uint64_t end)
{
    if (end <= p->held_bytes)
        return 0;
    if (end > p->limit_bytes)
        return -ENOSPC;
    int rc;
    if (p->allocate)
        rc = p->allocate(p->allocate_ctx, p->fd, p->held_bytes, end - p->held_bytes);
    else
        rc = fallocate(p->fd, 0, (off_t)p->held_bytes, (off_t)(end - p->held_bytes)) < 0 ? -errno : 0;
    if (rc < 0) {
        if (rc == -EINTR)
            return rc;
        exd_log(EXD_LOG_WARNING,
                "park: no more memory for it (%s): it stays at %.1f MB of the %.1f MB it may have",
                strerror(-rc), (double)p->held_bytes / 1e6, (double)p->bytes / 1e6);
        p->limit_bytes = p->held_bytes;
        return -ENOSPC;
    }
    p->held_bytes = end;
    return 0;
}

void exd_park_sweep(const char *dir)
{
    char path[PRT_PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/" EXD_PARK_FILE, dir) < (int)sizeof path)
        unlink(path);
}

int exd_park_open(const struct exd_park_config *c, struct exd_park **ret_park, struct shm_error *err)
{
    struct exd_park *p = calloc(1, sizeof *p);
    if (!p)
        return shm_error_set(err, ENOMEM, "park: no memory; free some");
    int rc = 0;
    p->fd = -1;
    if (snprintf(p->path, sizeof p->path, "%s/" EXD_PARK_FILE, c->dir) >= (int)sizeof p->path) {
        rc = shm_error_set(err, ENAMETOOLONG, "park: %s is too long a path", c->dir);
        goto fail;
    }
    exd_park_sweep(c->dir);
    p->fd = open(p->path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (p->fd < 0) {
        rc = shm_error_set(err, errno, "park %s: cannot be made: %s%s", p->path, strerror(errno),
                           shm_error_remedy(errno));
        goto fail;
    }
    if (ftruncate(p->fd, (off_t)c->bytes) < 0) {
        rc = shm_error_set(err, errno, "park %s: cannot be made %llu bytes long: %s%s", p->path,
                           (unsigned long long)c->bytes, strerror(errno), shm_error_remedy(errno));
        unlink(p->path);
        goto fail;
    }
    p->bytes = p->limit_bytes = c->bytes;
    p->allocate = c->allocate;
    p->allocate_ctx = c->ctx;
    p->seed = prt_random_epoch();
    memcpy(p->model, c->model, sizeof p->model);
    *ret_park = p;
    return 0;
fail:
    if (p->fd >= 0)
        close(p->fd);
    free(p);
    return rc;
}

void exd_park_close(struct exd_park **park)
{
    struct exd_park *p = *park;
    if (!p)
        return;
    unlink(p->path);
    close(p->fd);
    free(p->block);
    free(p->by_key);
    free(p->by_parent);
    free(p);
    *park = NULL;
}

void exd_park_stats(const struct exd_park *p, struct exd_park_stats *ret_stats)
{
    *ret_stats = (struct exd_park_stats){.bytes = p->bytes,
                                         .held_bytes = p->held_bytes,
                                         .kept = p->kept,
                                         .held = p->pins,
                                         .reserved = p->reserved,
                                         .committed = p->committed,
                                         .found = p->found,
                                         .ignored = p->ignored,
                                         .evicted = p->evicted,
                                         .wrong = p->wrong};
}

const char *exd_park_path(const struct exd_park *p)
{
    return p->path;
}
