/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include <stdlib.h>

#define SAMPLE 8u /* layers, of which one is looked at closely */

struct inf_cuda_profile {
    uint32_t n, room; /* stamps of this pass; events there are */
    uint32_t passes;
    struct stamp {
        void *event;
        enum inf_cuda_step step;
    } stamp[];
};

/* One more event than there was; false: no memory, this stamp is left out. */
static bool more(struct inf_cuda *c)
{
    struct inf_cuda_profile *p = c->profile;
    uint32_t room = p ? p->room : 0;
    struct inf_cuda_profile *grown =
        room % 256 ? p : realloc(p, sizeof *p + (room + 256) * sizeof p->stamp[0]);
    if (!grown)
        return false;
    if (!p)
        grown->n = grown->room = grown->passes = 0;
    c->profile = grown;
    if (krn_cuda.event_create(&grown->stamp[room].event, 0))
        return false;
    grown->room++;
    return true;
}

void inf_cuda_stamp(struct inf_cuda *c, enum inf_cuda_step step)
{
    struct inf_cuda_profile *p = c->profile;
    if (!c->base.profile || c->broken || ((!p || p->n == p->room) && !more(c)))
        return;
    p = c->profile;
    p->stamp[p->n].step = step;
    if (!krn_cuda.event_record(p->stamp[p->n].event, c->stream))
        p->n++;
}

void inf_cuda_stamp_group(struct inf_cuda *c, uint32_t layer, enum inf_cuda_step step)
{
    bool close = c->profile && layer % SAMPLE == c->profile->passes % SAMPLE;
    if (close == (step != INF_STEP_STREAMED))
        inf_cuda_stamp(c, step);
}

void inf_cuda_profile_begin(struct inf_cuda *c)
{
    if (c->profile)
        c->profile->n = 0;
    inf_cuda_stamp(c, INF_STEP_IDLE);
}

void inf_cuda_profile_collect(struct inf_cuda *c)
{
    struct inf_times *t = &c->base.times;
    struct inf_cuda_profile *p = c->profile;
    uint64_t sum[INF_STEP_STREAMED + 1] = {0};
    double stall_ns = 0, experts_ns = 0, before_ns = 0; /* of groups looked at */
    for (uint32_t i = 1; p && i < p->n; i++) {
        float ms = 0;
        if (krn_cuda.event_elapsed(&ms, p->stamp[i - 1].event, p->stamp[i].event) != KRN_CUDA_SUCCESS)
            ms = 0;
        double ns = (double)ms * 1e6;
        sum[p->stamp[i].step] += (uint64_t)ns;
        if (p->stamp[i].step == INF_STEP_EXPERTS && p->stamp[i - 1].step == INF_STEP_STALL) {
            stall_ns += before_ns;
            experts_ns += ns;
        }
        before_ns = ns;
    }
    double share = stall_ns > 0 ? stall_ns / (stall_ns + experts_ns) : 0;
    uint64_t split_ns = (uint64_t)(share * (double)sum[INF_STEP_STREAMED]);
    t->idle_ns += sum[INF_STEP_IDLE];
    t->head_ns += sum[INF_STEP_HEAD];
    t->attention_ns += sum[INF_STEP_ATTENTION];
    t->router_ns += sum[INF_STEP_ROUTER];
    t->stall_ns += sum[INF_STEP_STALL] + split_ns;
    t->experts_ns += sum[INF_STEP_EXPERTS] + sum[INF_STEP_STREAMED] - split_ns;
    if (p) {
        p->n = 0;
        p->passes++;
    }
}

void inf_cuda_profile_free(struct inf_cuda *c)
{
    for (uint32_t i = 0; c->profile && i < c->profile->room; i++)
        krn_cuda.event_destroy(c->profile->stamp[i].event);
    free(c->profile);
    c->profile = NULL;
}
