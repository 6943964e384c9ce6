/* SPDX-License-Identifier: MIT */
/*
 * Which logits of a pass are made together: rows of several spans, up to as many as there is room for. The
 * arithmetic is the device's.
 */
#ifndef INF_HEAD_H
#define INF_HEAD_H

#include "inferd/inf_device.h"

struct inf_head {
    void *ctx;
    /* Rows row .. row + rows - 1 of the pass become the at-th and next ones of those to come. */
    int (*add)(void *ctx, uint32_t row, uint32_t rows, uint32_t at);
    /* The logits of all rows added since the last call, of which the first is row `first` of the pass. */
    int (*make)(void *ctx, uint32_t first, uint32_t rows, const float **ret_logits);
};

/* All logits that the pass wants, [rows][vocab] handed to p->on_logits (which may be NULL); at most `most`
 * (<= INF_LOGIT_ROWS) rows at once, `in_order`: only such as follow each other in the pass. Returns what add
 * or make do when they fail. */
int inf_head_walk(const struct inf_pass *p, uint32_t vocab, uint32_t most, bool in_order,
                  const struct inf_head *head);

#endif
