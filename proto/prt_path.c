/* SPDX-License-Identifier: MIT */
#include "proto/prt_path.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int prt_path_check_instance(const char *instance, struct shm_error *err)
{
    size_t n = strnlen(instance, PRT_INSTANCE_MAX + 1);
    bool ok = n >= 1 && n <= PRT_INSTANCE_MAX;
    for (size_t i = 0; ok && i < n; i++) {
        char c = instance[i];
        ok = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
    }
    if (!ok)
        return shm_error_set(err, EINVAL,
                             "instance name '%.40s' must be 1 to %d characters of a-z, 0-9, _ and -",
                             instance, PRT_INSTANCE_MAX);
    return 0;
}

static int runtime_dir_of(const char *option, char out[PRT_PATH_BYTES], struct shm_error *err)
{
    const char *dir = option && option[0] ? option : getenv("XDG_RUNTIME_DIR");
    if ((!dir || !dir[0]) && geteuid() == 0)
        dir = "/run";
    if (!dir || !dir[0])
        return shm_error_set(
            err, ENOENT, "no runtime directory: XDG_RUNTIME_DIR is not set; give one with --runtime-dir DIR");
    int n;
    if (dir[0] == '/') {
        n = snprintf(out, PRT_PATH_BYTES, "%s", dir);
    } else {
        char here[PRT_PATH_BYTES];
        if (!getcwd(here, sizeof(here)))
            return shm_error_set(err, errno, "runtime directory '%s': current directory: %s", dir,
                                 strerror(errno));
        n = snprintf(out, PRT_PATH_BYTES, "%s/%s", here, dir);
    }
    if (n >= PRT_PATH_BYTES)
        return shm_error_set(err, ENAMETOOLONG, "runtime directory '%.100s...' is too long (%d bytes)", dir,
                             n);
    while (n > 1 && out[n - 1] == '/')
        out[--n] = '\0';
    return 0;
}

static int join(char *out, size_t capacity, const struct prt_paths *p, const char *file)
{
    const char *top = strcmp(p->runtime, "/") == 0 ? "" : p->runtime;
    int n = snprintf(out, capacity, "%s/expertd/%s%s", top, p->instance, file);
    return n < 0 ? (int)capacity : n;
}

int prt_paths_make(const char *runtime_dir, const char *instance, struct prt_paths *ret_paths,
                   struct shm_error *err)
{
    struct prt_paths p = {0};
    const char *name = instance ? instance : PRT_INSTANCE_DEFAULT;
    int rc = prt_path_check_instance(name, err);
    if (rc < 0)
        return rc;
    memcpy(p.instance, name, strlen(name) + 1);
    rc = runtime_dir_of(runtime_dir, p.runtime, err);
    if (rc < 0)
        return rc;
    /* the socket is the tightest: a longer path would abort the library below */
    int n = join(p.socket, sizeof(p.socket), &p, "/control.sock");
    if (n >= (int)sizeof(p.socket))
        return shm_error_set(
            err, ENAMETOOLONG,
            "runtime directory '%.150s' is too long: the socket's path would have %d bytes, at "
            "most %d fit; give a shorter one with --runtime-dir DIR",
            p.runtime, n, PRT_SOCKET_BYTES - 1);
    if (join(p.dir, sizeof(p.dir), &p, "") >= (int)sizeof(p.dir) ||
        join(p.store, sizeof(p.store), &p, "/store") >= (int)sizeof(p.store) ||
        join(p.events, sizeof(p.events), &p, "/events") >= (int)sizeof(p.events) ||
        join(p.lock, sizeof(p.lock), &p, "/lock") >= (int)sizeof(p.lock) ||
        join(p.log, sizeof(p.log), &p, "/expertd.log") >= (int)sizeof(p.log))
        return shm_error_set(err, ENAMETOOLONG, "runtime directory '%.150s' is too long", p.runtime);
    *ret_paths = p;
    return 0;
}

static int check_dir(const char *path, bool ours, struct shm_error *err)
{
    struct stat st;
    if (lstat(path, &st) < 0) {
        if (errno == ENOENT)
            return shm_error_set(
                err, ENOENT,
                "%s: no such directory: no expertd was started here; is it another --instance or "
                "--runtime-dir?",
                path);
        return shm_error_set(err, errno, "%s: %s", path, strerror(errno));
    }
    if (!S_ISDIR(st.st_mode))
        return shm_error_set(err, ENOTDIR,
                             "%s is not a directory: remove it, or choose another --runtime-dir", path);
    if (st.st_uid != geteuid() && (ours || st.st_uid != 0))
        return shm_error_set(err, EPERM,
                             "%s belongs to user %u, not to %u: choose another --instance or --runtime-dir",
                             path, (unsigned)st.st_uid, (unsigned)geteuid());
    if (ours && st.st_mode & 022)
        return shm_error_set(err, EPERM, "%s may be written by others (mode %04o): chmod 700 it", path,
                             (unsigned)(st.st_mode & 07777));
    return 0;
}

int prt_paths_check(const struct prt_paths *paths, struct shm_error *err)
{
    return check_dir(paths->dir, true, err);
}

int prt_paths_create(const struct prt_paths *paths, struct shm_error *err)
{
    struct stat st;
    if (stat(paths->runtime, &st) < 0)
        return shm_error_set(err, errno,
                             "runtime directory %s: %s; create it or give another with --runtime-dir",
                             paths->runtime, strerror(errno));
    char parent[PRT_PATH_BYTES];
    memcpy(parent, paths->dir, sizeof(parent));
    *strrchr(parent, '/') = '\0';
    const char *dirs[] = {parent, paths->dir};
    for (size_t i = 0; i < 2; i++) {
        if (mkdir(dirs[i], 0700) < 0 && errno != EEXIST)
            return shm_error_set(err, errno, "cannot create %s: %s; give another place with --runtime-dir",
                                 dirs[i], strerror(errno));
        int rc = check_dir(dirs[i], true, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}
