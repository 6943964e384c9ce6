/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cuda.h"

#include <stdlib.h>

struct inf_cuda_profile {
    uint32_t n, room; /* stamps of this pass; events there are */
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
        grown->n = grown->room = 0;
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

void inf_cuda_profile_begin(struct inf_cuda *c)
{
    if (c->profile)
        c->profile->n = 0;
    inf_cuda_stamp(c, INF_STEP_IDLE);
}

void inf_cuda_profile_collect(struct inf_cuda *c)
{
    struct inf_times *t = &c->base.times;
    uint64_t *const sum[] = {[INF_STEP_IDLE] = &t->idle_ns,           [INF_STEP_HEAD] = &t->head_ns,
                             [INF_STEP_ATTENTION] = &t->attention_ns, [INF_STEP_ROUTER] = &t->router_ns,
                             [INF_STEP_STALL] = &t->stall_ns,         [INF_STEP_EXPERTS] = &t->experts_ns};
    struct inf_cuda_profile *p = c->profile;
    for (uint32_t i = 1; p && i < p->n; i++) {
        float ms = 0;
        if (krn_cuda.event_elapsed(&ms, p->stamp[i - 1].event, p->stamp[i].event) == KRN_CUDA_SUCCESS)
            *sum[p->stamp[i].step] += (uint64_t)((double)ms * 1e6);
    }
    if (p)
        p->n = 0;
}

void inf_cuda_profile_free(struct inf_cuda *c)
{
    for (uint32_t i = 0; c->profile && i < c->profile->room; i++)
        krn_cuda.event_destroy(c->profile->stamp[i].event);
    free(c->profile);
    c->profile = NULL;
}
