/* SPDX-License-Identifier: MIT */
#include "inferd/inf_head.h"

/* What was added and not made yet. */
struct rows {
    struct run {
        uint32_t span, position, rows;
    } run[INF_LOGIT_ROWS];
    uint32_t runs, n, first;
};

static int make(const struct inf_pass *p, uint32_t vocab, const struct inf_head *head, struct rows *r)
{
    const float *logits;
    int rc = r->n ? head->make(head->ctx, r->first, r->n, &logits) : 0;
    if (rc)
        return rc;
    for (uint32_t i = 0; p->on_logits && i < r->runs; i++) {
        const struct run *run = &r->run[i];
        p->on_logits(p->ctx, run->span, run->position, run->rows, logits);
        logits += (size_t)run->rows * vocab;
    }
    r->runs = r->n = 0;
    return 0;
}

int inf_head_walk(const struct inf_pass *p, uint32_t vocab, uint32_t most, bool in_order,
                  const struct inf_head *head)
{
    struct rows r = {.n = 0};
    uint32_t first = 0; /* row of the span */
    int rc;
    for (uint32_t i = 0; i < p->spans; first += p->span[i++].tokens) {
        const struct inf_pass_span *s = &p->span[i];
        for (uint32_t t = s->first_logit, rows; t < s->tokens; t += rows) {
            if ((r.n == most || (in_order && r.first + r.n != first + t)) && (rc = make(p, vocab, head, &r)))
                return rc;
            const uint32_t room = most - r.n;
            rows = s->tokens - t < room ? s->tokens - t : room;
            if (!r.n)
                r.first = first + t;
            if ((rc = head->add(head->ctx, first + t, rows, r.n)))
                return rc;
            r.run[r.runs++] = (struct run){i, s->position + t, rows};
            r.n += rows;
        }
    }
    return make(p, vocab, head, &r);
}
