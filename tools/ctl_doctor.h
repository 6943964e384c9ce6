/* SPDX-License-Identifier: MIT */
/*
 * expertctl doctor: what this host has for expertd and its workers, one
 * finding a line. Looks only; the disk is read for at most half a second.
 *
 * Each check is a function that adds findings. All read /proc, /sys and
 * /dev/shm below `root`, and ask the kernel and the driver through `uring` and
 * `library`: seams, so that tests provoke each finding with a tree of their own.
 */
#ifndef CTL_DOCTOR_H
#define CTL_DOCTOR_H

#include "proto/prt_path.h"
#include "tools/ctl.h"

#include <sys/vfs.h>

#define DOCTOR_FINDINGS   96
#define DOCTOR_TEXT_BYTES 512
#define DOCTOR_DRIVER_MIN 12000 /* as KRN_CUDA_DRIVER_MIN */
#define DOCTOR_GPUS       16
#define DOCTOR_SLOW_DISK  0.3e9

enum doctor_grade { DOCTOR_OK, DOCTOR_WARNING, DOCTOR_PROBLEM, DOCTOR_GRADES };

struct doctor_finding {
    const char *check;
    enum doctor_grade grade;
    char text[DOCTOR_TEXT_BYTES];
};

/* An NVIDIA GPU as sysfs shows it. Numbers are 0 (node: -1) where it doesn't say. */
struct doctor_gpu {
    char address[32]; /* 0000:17:00.0 */
    int node;
    double speed, speed_max; /* GT/s */
    unsigned width, width_max;
};

/* What a model file says of its needs. */
struct doctor_model {
    uint64_t file_bytes;     /* of all shards */
    uint64_t arena_bytes;    /* about */
    uint64_t kv_token_bytes; /* of one token, 2 bytes a number (CUDA); 0: not known */
    uint64_t context;        /* tokens; 0: not known */
    uint32_t shards;
};

struct doctor {
    const char *root;                    /* "" */
    const char *library;                 /* of the driver */
    double slow_disk_bytes_s;            /* below it a disk is called slow */
    int (*uring)(void);                  /* 0: io_uring works, or a negative errno */
    const char *model_path, *arena_dir;  /* NULL: none, chosen */
    const struct prt_paths *paths;       /* of the instance; NULL: no runtime directory */
    const struct ctl_snapshot *instance; /* NULL: none ever ran */
    struct doctor_gpu gpu[DOCTOR_GPUS];
    uint32_t gpus;
    bool driver;               /* usable, with a device */
    bool known;                /* model was read */
    bool held;                 /* its arena is there already */
    struct doctor_model model; /* of model_path */
    struct doctor_finding finding[DOCTOR_FINDINGS];
    uint32_t findings;
};

/* One finding; what does not fit any more is left out, the last place tells so. */
void doctor_say(struct doctor *d, enum doctor_grade grade, const char *check, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Runs all checks, in the order of the manual page. */
void doctor_examine(struct doctor *d);

/* ctl_doctor_device.c */
void doctor_find_gpus(struct doctor *d);
void doctor_check_driver(struct doctor *d);
void doctor_check_mps(struct doctor *d);
void doctor_check_link(struct doctor *d);
/* ctl_doctor_system.c */
void doctor_check_ipc(struct doctor *d);
void doctor_check_memlock(struct doctor *d);
void doctor_check_pages(struct doctor *d);
void doctor_check_uring(struct doctor *d);
void doctor_check_numa(struct doctor *d);
/* ctl_doctor_model.c */
void doctor_check_model(struct doctor *d); /* before space and memory */
void doctor_check_space(struct doctor *d);
void doctor_check_memory(struct doctor *d);
void doctor_check_held(struct doctor *d);
void doctor_check_disk(struct doctor *d);
/* The arena's folder and its file system, as expertd would choose it. False: it can't be looked at. */
bool doctor_arena_place(const struct doctor *d, char dir[PRT_PATH_BYTES + 512], struct statfs *ret_fs);

/* What a model file (of a split one: any shard) needs, by its header. Of every shard it is checked that all
 * is there. 0, or a negative errno with one line. */
int doctor_read_model(const char *path, struct doctor_model *ret_model, struct shm_error *err);

/* io_uring_setup of the real kernel. */
int doctor_probe_uring(void);

/* The command. Returns an exit status. */
int ctl_doctor(const struct ctl_options *options, struct shm_error *err);

#endif
