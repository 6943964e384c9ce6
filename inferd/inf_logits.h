/* SPDX-License-Identifier: MIT */
/*
 * What tests compare with reference outputs: ids, logits, routing, greedy
 * continuation of one read. One JSON object and a newline:
 *
 *   ids            [id, ...]
 *   logits         [{"position": p, "logits": [vocab numbers]}, ...]   float32, 9 digits
 *   hash           XXH3-64 of the logits of all tokens read                         (--hash)
 *   routes         [layer][token * experts_used] expert ids, highest weight first   (--routes)
 *   route_weights  likewise
 *   greedy         {"ids": [...], "margins": [...], "text": "..."}                  (-n)
 *   stream         as in the JSON of run
 *
 * Positions count from the first token of the read.
 */
#ifndef INF_LOGITS_H
#define INF_LOGITS_H

#include "inferd/inf_conversation.h"
#include "inferd/inf_options.h"

#include <stdio.h>

/* Reads ids behind what the conversation holds and prints. On a failure f may hold half an object; errors
 * are those of inf_read, -EINVAL for --positions and --ids, -E2BIG, -EIO. */
int inf_logits_print(const struct inf_options *options, struct inf_engine *engine,
                     struct inf_conversation *conversation, const struct inf_ids *ids, FILE *f,
                     struct shm_error *err);

#endif
