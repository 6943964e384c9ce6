/* SPDX-License-Identifier: MIT */
/*
 * The newcomer's way: --model FILE instead of an instance. Finds the running
 * expertd that holds that file, or starts one in the background.
 */
#ifndef INF_LAUNCH_H
#define INF_LAUNCH_H

#include "proto/prt_path.h"
#include "shm/shm_error.h"

#include <stdatomic.h>
#include <stdbool.h>

/* Writes the name of an instance that serves model_path, started if need be.
 * instance: that one and no other (NULL: `default`, or one named after the file
 * where `default` serves another). quiet: nothing is said on stderr. Blocks while
 * a started expertd loads, bounded by its progress; cancel ends that. Errors: -ENOENT no such file or no
 * expertd program; -EADDRINUSE the instance serves another file; -ECHILD
 * expertd ended (its last line is given). */
int inf_launch(const char *runtime_dir, const char *instance, const char *model_path, bool quiet,
               _Atomic bool *cancel, char ret_instance[PRT_INSTANCE_MAX + 1], struct shm_error *err);

#endif
