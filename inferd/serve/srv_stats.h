/* SPDX-License-Identifier: MIT */
/*
 * Numbers of a server's life: block `server` of shm/counters.spec, in a
 * segment that tools read, added to by both threads, read as Prometheus text
 * and JSON. Nothing here blocks for long.
 */
#ifndef SRV_STATS_H
#define SRV_STATS_H

#include "inferd/inf_conversation.h"
#include "inferd/serve/srv_job.h"
#include "shm/shm_server.h"

#include <jansson.h>
#include <stdio.h>

enum srv_endpoint {
    SRV_AT_CHAT,
    SRV_AT_COMPLETIONS,
    SRV_AT_MESSAGES,
    SRV_AT_MODELS,
    SRV_AT_OTHER,
    SRV_AT_COUNT
};

struct srv_stats;

struct srv_stats *srv_stats_new(void); /* NULL: no memory */
void srv_stats_free(struct srv_stats **stats);

/* Where the numbers are; the queue (srv_queue_show) and the HTTP thread keep their own there. */
struct shm_server *srv_stats_segment(struct srv_stats *s);
/* Its descriptor, for tools; 0: none. */
uint32_t srv_stats_fd(const struct srv_stats *s);

void srv_stats_response(struct srv_stats *s, enum srv_endpoint endpoint, int status);
void srv_stats_job(struct srv_stats *s, const struct srv_result *result);
void srv_stats_gap(struct srv_stats *s, uint64_t ns); /* between two tokens of an answer */
void srv_stats_chunk(struct srv_stats *s, const struct inf_chunk *chunk, bool generated);
/* A pass: of pieces of n prompts, or a step of n answers. */
void srv_stats_pass(struct srv_stats *s, unsigned n, bool generated);
void srv_stats_attached(struct srv_stats *s); /* to another life of expertd */

/* The counters as Prometheus text: HELP, TYPE and samples. */
void srv_stats_write(struct srv_stats *s, FILE *f);

/* The same as an object of totals. */
json_t *srv_stats_json(struct srv_stats *s);

/* The last reason why a prompt's stream was held off; SHM_HELD_NONE: none. */
uint32_t srv_stats_held_off(struct srv_stats *s);

#endif
