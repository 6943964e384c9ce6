/* SPDX-License-Identifier: MIT */
/* expertctl evict: gives back the memory of an instance's arena. */
#include "proto/prt_claim.h"
#include "proto/prt_file.h"
#include "proto/prt_lock.h"
#include "proto/prt_memory.h"
#include "tools/ctl.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define STOP_MS 10000
#define LOCK_MS 10000

struct names {
    char text[256];
    uint32_t n;
};

static void add_name(struct names *names, uint32_t pid, const char *name)
{
    size_t used = strlen(names->text);
    if (names->n++ < 8)
        snprintf(names->text + used, sizeof names->text - used, "%s%u (%.16s)", used ? ", " : "", pid, name);
}

/* Processes of ours that have the file mapped: workers that outlived their expertd hold its memory. */
static void find_mappers(const char *path, struct names *names)
{
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && (e = readdir(d));) {
        char file[64], line[PRT_PATH_BYTES + 256], name[32] = "?";
        unsigned long pid = strtoul(e->d_name, NULL, 10);
        bool maps = false;
        if (!pid || pid == (unsigned long)getpid())
            continue;
        snprintf(file, sizeof file, "/proc/%lu/maps", pid);
        FILE *f = fopen(file, "re");
        while (f && !maps && fgets(line, sizeof line, f)) {
            char *at = strchr(line, '/');
            if (at) {
                at[strcspn(at, "\n")] = 0;
                maps = strcmp(at, path) == 0;
            }
        }
        if (f)
            fclose(f);
        if (!maps)
            continue;
        snprintf(file, sizeof file, "/proc/%lu/comm", pid);
        if ((f = fopen(file, "re"))) {
            if (!fgets(name, sizeof name, f))
                name[0] = 0;
            fclose(f);
        }
        name[strcspn(name, "\n")] = 0;
        add_name(names, (uint32_t)pid, name);
    }
    if (d)
        closedir(d);
}

/* A running instance ends, if it was drained and nobody is attached. */
static int end_running(const struct ctl_options *o, const struct prt_claim *claim, struct shm_error *err)
{
    struct prt_client *client = NULL;
    struct names names = {0};
    int rc = prt_client_open(o->runtime_dir, o->instance, 0, &client, err);
    if (rc)
        return rc;
    const char *instance = prt_client_paths(client)->instance;
    for (uint32_t i = 0; i < SHM_STORE_WORKERS; i++) {
        struct shm_store_worker row = {0}; /* stays so where it keeps changing */
        rc = prt_client_worker(client, i, &row);
        for (int retry = 0; rc == -EAGAIN && retry < 100; retry++)
            rc = prt_client_worker(client, i, &row);
        if (rc != -ENOENT)
            add_name(&names, atomic_load(&row.pid), row.name);
    }
    rc = 0;
    if (names.n)
        rc = shm_error_set(err, EBUSY,
                           "evict: %u workers use instance %s: %s: end them first, then 'expertctl drain'",
                           names.n, instance, names.text);
    else if (atomic_load(&prt_client_store(client)->state) != SHM_STORE_DRAINING)
        rc = shm_error_set(
            err, EBUSY,
            "evict: instance %s runs (pid %u) and takes workers: 'expertctl -i %s drain' first, or end it "
            "with stop",
            instance, claim->pid, instance);
    else
        rc = prt_client_stop(client, STOP_MS, true, err);
    prt_client_close(&client);
    return rc;
}

/* The files, and the directories that were made for them. */
static int drop(const struct prt_paths *paths, const char *arena, struct shm_error *err)
{
    char dir[PRT_PATH_BYTES], park[PRT_PATH_BYTES + 8], user[64];
    struct stat a, b;
    int lock = -1;
    snprintf(dir, sizeof dir, "%s", arena);
    char *slash = strrchr(dir, '/');
    if (dir[0] != '/' || !slash || strcmp(slash, "/arena") != 0)
        return shm_error_set(err, EBADMSG,
                             "evict: '%.200s' is no path of an arena: the claim in %.200s is damaged", arena,
                             paths->dir);
    *slash = 0;
    int dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (dir_fd < 0)
        return shm_error_set(err, errno, "evict: %.300s: %s", dir, strerror(errno));
    int rc = prt_lock_take(dir_fd, PRT_ARENA_LOCK, 0, &lock); /* who holds it owns the files */
    if (rc == -EBUSY)
        shm_error_set(err, EBUSY, "evict: %.300s/arena is in use by an expertd that starts: stop it first",
                      dir);
    else if (rc)
        shm_error_set(err, rc, "evict: %.300s/" PRT_ARENA_LOCK ": %s", dir, strerror(-rc));
    if (rc) {
        close(dir_fd);
        return rc;
    }
    if (unlinkat(dir_fd, PRT_ARENA_FILE, 0) != 0 && errno != ENOENT) /* killed before it was in place */
        rc = shm_error_set(err, errno, "evict: %.300s: %s", arena, strerror(errno));
    unlinkat(dir_fd, PRT_ARENA_NEW, 0);
    unlinkat(dir_fd, PRT_PARK_FILE, 0); /* of one that was killed */
    snprintf(park, sizeof park, "%s/" PRT_PARK_FILE, paths->dir);
    unlink(park);
    unlinkat(dir_fd, PRT_ARENA_LOCK, 0);
    bool own =
        fstat(dir_fd, &a) == 0 && (stat(paths->dir, &b) != 0 || a.st_ino != b.st_ino || a.st_dev != b.st_dev);
    if (own && rmdir(dir) == 0) {
        slash = strrchr(dir, '/');
        *slash = 0;
        snprintf(user, sizeof user, "/dev/shm/expertd-%u", (unsigned)geteuid());
        if (strcmp(dir, user) == 0)
            rmdir(dir); /* with the last one in it */
    }
    close(lock);
    close(dir_fd);
    return rc;
}

/* Under the lock of the claims: an expertd that starts waits for it with its own. */
static int give_back(const struct prt_paths *paths, struct prt_claim *ret_claim, struct shm_error *err)
{
    struct names names = {0};
    struct shm_error why = {0};
    int rc = prt_claim_read(paths, ret_claim, &why);
    if (rc == -ENOENT) { /* nothing was kept (--no-keep) */
        ret_claim->held_bytes = 0;
        return 0;
    }
    if (rc)
        return *err = why, rc;
    if (ret_claim->running)
        return shm_error_set(err, EBUSY, "evict: instance %s was started again (pid %u): stop it first",
                             paths->instance, ret_claim->pid);
    find_mappers(ret_claim->arena_path, &names);
    if (names.n)
        return shm_error_set(err, EBUSY,
                             "evict: %u processes still have the arena of instance %s mapped: %s: end them "
                             "first",
                             names.n, paths->instance, names.text);
    if (ret_claim->held_bytes && (rc = drop(paths, ret_claim->arena_path, err)))
        return rc;
    prt_claim_remove(paths);
    return 0;
}

int ctl_evict(const struct ctl_options *o, struct shm_error *err)
{
    struct prt_paths paths;
    struct prt_claim claim;
    int lock = -1;
    int rc = prt_paths_make(o->runtime_dir, o->instance, &paths, err);
    if (!rc)
        rc = prt_paths_check(&paths, err);
    if (rc)
        return CTL_EXIT_ATTACH;
    rc = prt_claim_read(&paths, &claim, err);
    if (rc == -ENOENT || (!rc && !claim.running && !claim.held_bytes)) {
        shm_error_set(err, ENOENT, "evict: instance %s holds no arena", paths.instance);
        return CTL_EXIT_PROBLEM;
    }
    if (!rc && claim.running) {
        rc = end_running(o, &claim, err);
        *err = rc ? *err : (struct shm_error){0}; /* that it ended before it had answered is no failure */
    }
    if (rc || prt_claim_lock(&paths, LOCK_MS, &lock, err))
        return CTL_EXIT_PROBLEM;
    rc = give_back(&paths, &claim, err);
    close(lock);
    if (rc)
        return CTL_EXIT_PROBLEM;
    char size[24];
    prt_size_text(claim.held_bytes, size);
    if (o->json)
        ctl_json_print(json_pack("{s:b, s:s, s:I, s:o}", "evict", true, "instance", paths.instance, "bytes",
                                 (json_int_t)claim.held_bytes, "path",
                                 ctl_json_text(claim.arena_path, sizeof claim.arena_path)));
    else
        printf("instance %s: %s given back, %s\n", paths.instance, size, claim.arena_path);
    return CTL_EXIT_OK;
}
