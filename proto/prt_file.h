/* SPDX-License-Identifier: MIT */
/*
 * Files shared between processes, and the identity of processes: sealed
 * segments, checked mappings, a peer's descriptor, pidfds.
 *
 * A segment is a memfd whose size is sealed, so that no peer can pull pages
 * away under a mapping (SIGBUS). A process is named by pid and start time
 * together, so that a reused pid is never mistaken for the peer.
 */
#ifndef PRT_FILE_H
#define PRT_FILE_H

#include "shm/shm_error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Creates a memfd of `bytes` (> 0), seals its size (SHRINK, GROW, SEAL), maps it read-write. The caller
 * owns descriptor (close-on-exec) and mapping (munmap bytes); both are needed: peers open the descriptor
 * through /proc. ret_base may be NULL: not mapped. */
int prt_segment_create(const char *name, uint64_t bytes, int *ret_fd, void **ret_base, struct shm_error *err);

/* Maps the first `bytes` of fd shared, after checking that the file is at least that long. `name` is for
 * the error line. The caller unmaps. */
int prt_file_map(int fd, const char *name, uint64_t bytes, bool writable, void **ret_base,
                 struct shm_error *err);

/* Opens path (no symbolic link, regular file, ours or root's) and maps all of it, at least min_bytes.
 * The descriptor is closed again. */
int prt_file_map_path(const char *path, uint64_t min_bytes, bool writable, void **ret_base,
                      uint64_t *ret_bytes, struct shm_error *err);

/* Opens descriptor `fd` of process pid read-write, as a new description: it must be a memfd with its size
 * sealed, exactly `bytes` long (0: any length but none). `what` names it in the error line ("control
 * segment"). The caller closes. Nothing that the peer substitutes meanwhile (pipe, device, file on a slow
 * file system) is ever opened. */
int prt_peer_open(pid_t pid, uint32_t fd, uint64_t bytes, const char *what, int *ret_fd,
                  struct shm_error *err);

/* Start time of a process: clock ticks since boot, /proc/PID/stat field 22. 0, -ESRCH, or another errno. */
int prt_process_start(pid_t pid, uint64_t *ret_start);

/* That very process exists and is not a zombie. */
bool prt_process_alive(pid_t pid, uint64_t start);

/* By SIGSTOP or a debugger. */
bool prt_process_stopped(pid_t pid);

/* Effective user of a process. 0 or -ESRCH. */
int prt_process_uid(pid_t pid, uid_t *ret_uid);

/* A pidfd of that very process (readable when it ends), close-on-exec. 0, -ESRCH, or another errno. */
int prt_pidfd_open(pid_t pid, uint64_t start, int *ret_fd);

/* Makes sure that descriptors 0, 1 and 2 are taken, before anything else is opened: a program started with
 * one of them closed would otherwise get a segment or an arena under that number, and its output would go
 * there. What was closed stays useless: reading 0, writing 1 or 2 gives EBADF. Does nothing when all are
 * open. */
void prt_file_standard(void);

/* Not zero, not seen before: for epochs. */
uint64_t prt_random_epoch(void);

#endif
