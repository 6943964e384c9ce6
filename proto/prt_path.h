/* SPDX-License-Identifier: MIT */
/*
 * Where an instance of expertd lives: <runtime>/expertd/<instance>/, mode
 * 0700, with its socket, store, events, lock, log and (unless placed elsewhere) arena.
 *
 * Trust rests on that directory: whoever may enter it may speak to expertd.
 * It is therefore refused when somebody else owns it or could write in it.
 * This module makes and checks paths; it opens none of the files.
 */
#ifndef PRT_PATH_H
#define PRT_PATH_H

#include "shm/shm_error.h"

#define PRT_INSTANCE_DEFAULT "default"
#define PRT_INSTANCE_MAX     32   /* characters, [a-z0-9_-] */
#define PRT_PATH_BYTES       1024 /* equals SHM_PATH_BYTES */
#define PRT_SOCKET_BYTES     108  /* of sockaddr_un; nanomsg aborts on longer ones */

struct prt_paths {
    char instance[PRT_INSTANCE_MAX + 1];
    char runtime[PRT_PATH_BYTES]; /* absolute, without a trailing slash */
    char dir[PRT_PATH_BYTES];     /* runtime/expertd/instance */
    char socket[PRT_SOCKET_BYTES];
    char store[PRT_PATH_BYTES];
    char events[PRT_PATH_BYTES];
    char lock[PRT_PATH_BYTES];
    char log[PRT_PATH_BYTES]; /* stderr of an expertd that was started in the background */
};

/* 1-32 characters [a-z0-9_-]. Returns 0 or -EINVAL. */
int prt_path_check_instance(const char *instance, struct shm_error *err);

/* Fills the paths. runtime_dir NULL: $XDG_RUNTIME_DIR, else /run for root, else -ENOENT naming
 * --runtime-dir. instance NULL: "default". Touches no file. -EINVAL, -ENAMETOOLONG. */
int prt_paths_make(const char *runtime_dir, const char *instance, struct prt_paths *ret_paths,
                   struct shm_error *err);

/* The instance directory is there, ours, and closed to others. Returns 0, -ENOENT, -ENOTDIR, -EPERM. */
int prt_paths_check(const struct prt_paths *paths, struct shm_error *err);

/* Creates it (runtime/expertd too) with mode 0700, then checks. The runtime directory itself must exist. */
int prt_paths_create(const struct prt_paths *paths, struct shm_error *err);

#endif
