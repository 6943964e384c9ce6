/* SPDX-License-Identifier: MIT */
/* Where an arena lives: directory and lock. */
#include "expertd/exd_arena_priv.h"
#include "proto/prt_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define LOCK_WAIT_MS 500 /* a killed expertd holds its lock until its memory is unmapped */
#define RACE_TRIES   100 /* each lost one means that another expertd just removed the directory */

/* Makes dir (0700) unless it is there; either way it must be a directory of ours
 * that nobody else may enter. */
static int private_dir(const char *dir, struct shm_error *err)
{
    struct stat st;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return shm_error_set(err, errno, "arena directory %s: cannot create it: %m", dir);
    if (lstat(dir, &st) != 0)
        return shm_error_set(err, errno, "arena directory %s: %m", dir);
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || st.st_mode & 077)
        return shm_error_set(
            err, EPERM,
            "arena directory %s: is not a directory that only user %u may enter: remove it, or "
            "choose another with --arena-dir",
            dir, (unsigned)geteuid());
    return 0;
}

static int join(char *to, const char *dir, const char *name, struct shm_error *err)
{
    if (snprintf(to, EXD_ARENA_PATH_MAX, "%s/%s", dir, name) >= EXD_ARENA_PATH_MAX - 16)
        return shm_error_set(err, ENAMETOOLONG, "arena directory %s/%s: path is too long", dir, name);
    return 0;
}

/* /dev/shm/expertd-UID/INSTANCE-HASH: instances of one name under two runtime directories are two. */
static int shm_dir(const char *instance, const char *instance_dir, char *to, struct shm_error *err)
{
    enum exd_fs fs;
    char user[64], name[NAME_MAX], real[PATH_MAX];
    if (!realpath(instance_dir, real))
        return shm_error_set(err, errno, "instance directory %s: %m", instance_dir);
    snprintf(name, sizeof name, "%.200s-%08x", instance, (unsigned)XXH3_64bits(real, strlen(real)));
    int rc = exd_limits_fs("/dev/shm", &fs);
    if (rc || fs != EXD_FS_TMPFS)
        return shm_error_set(err, ENOTDIR, "/dev/shm: is not a tmpfs");
    snprintf(user, sizeof user, "/dev/shm/expertd-%u", (unsigned)geteuid());
    if ((rc = private_dir(user, err)) || (rc = join(to, user, name, err)))
        return rc;
    return private_dir(to, err);
}

static int pick_dir(const struct exd_arena_config *c, struct exd_place *p, struct shm_error *err)
{
    const char *name = c->instance;
    char top[PATH_MAX];
    int rc;
    if (!*name || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
        return shm_error_set(err, EINVAL, "instance '%s': is not a plain name", name);
    if (c->arena_dir) {
        if (!realpath(c->arena_dir, top))
            return shm_error_set(
                err, errno, "--arena-dir %s: %m; name a directory that is there, on a tmpfs or hugetlbfs",
                c->arena_dir);
        p->own_dir = true;
        if ((rc = join(p->dir, top, name, err)))
            return rc;
        return private_dir(p->dir, err);
    }
    enum exd_fs fs;
    if ((rc = exd_limits_fs(c->instance_dir, &fs)))
        return shm_error_set(err, rc, "instance directory %s: %s", c->instance_dir, strerror(-rc));
    struct shm_error why = {0};
    if (fs == EXD_FS_OTHER) {
        p->own_dir = p->user_dir = true;
        for (int try = 0; try < RACE_TRIES; try++) {
            rc = shm_dir(name, c->instance_dir, p->dir, &why);
            if (rc == 0)
                return 0;
            if (rc != -ENOENT)
                break;
        }
        p->own_dir = p->user_dir = false;
        snprintf(
            p->warning, sizeof p->warning,
            "arena is on a disk file system, which makes it slow: no memory file system to be had (%.150s)",
            shm_error_text(&why));
    }
    if (!realpath(c->instance_dir, top))
        return shm_error_set(err, errno, "instance directory %s: %m", c->instance_dir);
    if (snprintf(p->dir, sizeof p->dir, "%s", top) >= EXD_ARENA_PATH_MAX - 16)
        return shm_error_set(err, ENAMETOOLONG, "instance directory %s: path is too long", top);
    return 0;
}

static int take_lock(struct exd_place *p, struct shm_error *err)
{
    int rc = prt_lock_take(p->dir_fd, EXD_ARENA_LOCK, LOCK_WAIT_MS, &p->lock_fd);
    if (rc != -EBUSY)
        return rc ? shm_error_set(err, rc, "arena lock %s/%s: %s", p->dir, EXD_ARENA_LOCK, strerror(-rc)) : 0;
    char who[48] = "another process";
    int pid = prt_lock_holder(p->dir_fd, EXD_ARENA_LOCK);
    if (pid)
        snprintf(who, sizeof who, "process %d", pid);
    return shm_error_set(err, EBUSY,
                         "arena %s/%s: in use by %s: stop that expertd, or use another --instance", p->dir,
                         EXD_ARENA_FILE, who);
}

/* -ENOENT, too, when another expertd removes a directory between our making it and our lock in it. */
static int try_place(const struct exd_arena_config *config, struct exd_place *ret_place,
                     struct shm_error *err)
{
    struct exd_place p = {.dir_fd = -1, .lock_fd = -1};
    int rc = pick_dir(config, &p, err);
    if (rc)
        return rc;
    p.dir_fd = open(p.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (p.dir_fd < 0)
        return shm_error_set(err, errno, "arena directory %s: %m", p.dir);
    if ((rc = exd_limits_fs(p.dir, &p.fs)))
        rc = shm_error_set(err, rc, "arena directory %s: %s", p.dir, strerror(-rc));
    else
        rc = take_lock(&p, err);
    if (rc) {
        close(p.dir_fd);
        return rc;
    }
    if (p.fs == EXD_FS_OTHER && !*p.warning)
        snprintf(p.warning, sizeof p.warning,
                 "arena is on a disk file system, which makes it slow: choose a tmpfs with --arena-dir");
    *ret_place = p;
    return 0;
}

int exd_place_open(const struct exd_arena_config *config, struct exd_place *ret_place, struct shm_error *err)
{
    int rc = -ENOENT;
    for (int try = 0; rc == -ENOENT && try < RACE_TRIES; try++)
        rc = try_place(config, ret_place, err);
    return rc;
}

void exd_place_close(struct exd_place *place, bool remove)
{
    if (remove)
        unlinkat(place->dir_fd, EXD_ARENA_LOCK, 0);
    /* Both stay when something else is in them. Who makes one meanwhile tries again: exd_place_open. */
    if (remove && place->own_dir && rmdir(place->dir) == 0 && place->user_dir) {
        *strrchr(place->dir, '/') = '\0';
        rmdir(place->dir);
    }
    close(place->lock_fd);
    close(place->dir_fd);
    place->lock_fd = place->dir_fd = -1;
}
