/* SPDX-License-Identifier: MIT */
/* /v1/status and /metrics. */
#include "inferd/serve/srv_server.h"

#include "proto/prt_mps.h"
#include "shm/shm_bell.h"
#include "shm/shm_word.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct jobs {
    json_t *running;
    uint64_t now_ns;
    double oldest_s; /* of those that wait */
};

static void see_job(void *ctx, const struct srv_job *job, bool running)
{
    struct jobs *jobs = ctx;
    double age_s = (double)(jobs->now_ns - job->submit_ns) / 1e9;
    if (!running) {
        if (age_s > jobs->oldest_s)
            jobs->oldest_s = age_s;
        return;
    }
    uint32_t written = atomic_load(&job->written), cached = atomic_load(&job->cached);
    json_array_append_new(jobs->running,
                          json_pack("{s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:f}", "number",
                                    (json_int_t)job->number, "phase", written ? "answering" : "reading",
                                    "prompt_tokens", (json_int_t)job->prompt.n, "cached_tokens",
                                    (json_int_t)cached, "read_tokens", (json_int_t)atomic_load(&job->read),
                                    "written_tokens", (json_int_t)written, "max_tokens",
                                    (json_int_t)job->max_tokens, "age_s", age_s));
}

static json_t *expertd_json(const struct srv_server *s, const struct srv_status *t)
{
    bool attached = t->state == SRV_READY;
    uint32_t held_off = srv_stats_held_off(s->stats);
    return json_pack("{s:b, s:I, s:s, s:s, s:I, s:I, s:f, s:I, s:I, s:s?, s:f}", "attached", attached,
                     "session", (json_int_t)t->session, "policy", shm_policy_name(t->settings.policy),
                     "order", shm_order_name(t->settings.order), "depth", (json_int_t)t->settings.depth,
                     "floor", (json_int_t)t->settings.floor, "link_gbps", t->settings.link_gbps, "ring_slots",
                     (json_int_t)t->ring, "ring_bytes", (json_int_t)t->ring_bytes, "held_off",
                     shm_held_off_text(held_off), "attach_ms", (double)t->attach_ns / 1e6);
}

/* Whether workers that share this one's GPU would do so by MPS; null on the host device. */
static json_t *mps_json(const struct srv_info *info)
{
    char where[256];
    return strncmp(info->device, "host", 4) == 0 ? json_null()
                                                 : json_boolean(prt_mps_found(where, sizeof where));
}

json_t *srv_status_json(struct srv_server *s)
{
    struct srv_status *t = malloc(sizeof *t);
    if (!t)
        return NULL;
    srv_engine_status(s->engine, t);
    const struct srv_info *info = srv_engine_info(s->engine);
    struct srv_counts c = srv_queue_counts(s->queue);
    const struct srv_http_counters *h = srv_http_counters(s->http);
    struct jobs jobs = {.running = json_array(), .now_ns = shm_now_ns()};
    srv_queue_each(s->queue, see_job, &jobs);
    json_t *j =
        json_pack("{s:s, s:s, s:s, s:I, s:f}", "state", s->draining ? "draining" : srv_state_name(t->state),
                  "reason", t->error, "version", EXPERTD_VERSION, "pid", (json_int_t)getpid(), "uptime_s",
                  (double)(jobs.now_ns - s->start_ns) / 1e9);
    json_object_set_new(j, "expertd", expertd_json(s, t));
    if (info)
        json_object_set_new(
            j, "worker",
            json_pack("{s:o, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s?}", "mps",
                      mps_json(info), "model", srv_model_name(s), "device", info->device, "device_note",
                      info->device_note, "ctx", (json_int_t)info->ctx, "chunk", (json_int_t)info->chunk,
                      "kv_tokens", (json_int_t)info->kv_tokens, "parallel", (json_int_t)info->parallel,
                      "layers", (json_int_t)info->layers, "experts", (json_int_t)info->experts,
                      "experts_used", (json_int_t)info->experts_used, "vocab", (json_int_t)info->vocab,
                      "chat_template", s->chat ? inf_template_name(s->chat) : NULL));
    json_object_set_new(j, "residency",
                        json_pack("{s:I, s:I, s:I}", "experts_per_layer", (json_int_t)t->resident, "bytes",
                                  (json_int_t)t->resident_bytes, "activation_bytes",
                                  (json_int_t)t->activation_bytes));
    json_object_set_new(
        j, "kv",
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "block_tokens", (json_int_t)INF_KV_BLOCK, "blocks",
                  (json_int_t)t->kv.blocks, "free", (json_int_t)t->kv.free, "kept",
                  (json_int_t)t->prefix.kept_blocks, "reserved", (json_int_t)t->kv.reserved, "evicted",
                  (json_int_t)t->prefix.evicted, "bytes", (json_int_t)(t->kv.blocks * t->kv.block_bytes)));
    const struct inf_prefix_stats *p = &t->prefix;
    json_object_set_new(
        j, "prefix",
        json_pack("{s:I, s:I, s:I, s:I, s:s, s:s?, s:I, s:I, s:I, s:I, s:I, s:f, s:I}", "prompts",
                  (json_int_t)p->prompts, "hits", (json_int_t)p->hits, "hit_tokens",
                  (json_int_t)p->hit_tokens, "miss_tokens", (json_int_t)p->miss_tokens, "park", p->park,
                  "park_reason", p->park_reason[0] ? p->park_reason : NULL, "parked_blocks",
                  (json_int_t)p->parked, "loaded_blocks", (json_int_t)p->loaded, "unparked_blocks",
                  (json_int_t)p->unparked_blocks, "damaged_blocks", (json_int_t)p->park_damaged,
                  "ignored_blocks", (json_int_t)p->park_ignored, "park_ms", (double)p->park_ns / 1e6,
                  "park_bytes", (json_int_t)p->park_bytes));
    json_object_set_new(j, "running", jobs.running);
    json_object_set_new(j, "queue",
                        json_pack("{s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:f}", "waiting",
                                  (json_int_t)c.waiting, "limit", (json_int_t)c.limit, "oldest_s",
                                  jobs.oldest_s, "submitted", (json_int_t)c.submitted, "refused",
                                  (json_int_t)c.refused, "done", (json_int_t)c.done, "cancelled",
                                  (json_int_t)c.cancelled, "mean_s", c.mean_s));
    json_object_set_new(j, "http",
                        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "connections", (json_int_t)h->connections,
                                  "busy", (json_int_t)h->busy, "requests", (json_int_t)h->requests,
                                  "clients_gone", (json_int_t)h->gone, "slow_readers", (json_int_t)h->slow,
                                  "refused", (json_int_t)h->refused));
    json_object_set_new(j, "totals", srv_stats_json(s->stats));
    free(t);
    return j;
}

void srv_status_count(struct srv_server *s)
{
    struct srv_status *t = malloc(sizeof *t);
    if (!t)
        return;
    srv_engine_status(s->engine, t);
    struct shm_server_counters *c = &srv_stats_segment(s->stats)->counters;
    const struct srv_http_counters *h = srv_http_counters(s->http);
    shm_counter_set(&c->ready, t->state == SRV_READY && !s->draining);
    shm_counter_set(&c->expertd_attached, t->state == SRV_READY);
    shm_counter_set(&c->kv_blocks, t->kv.blocks);
    shm_counter_set(&c->kv_free_blocks, t->kv.free);
    shm_counter_set(&c->kv_kept_blocks, t->prefix.kept_blocks);
    shm_counter_set(&c->kv_reserved_blocks, t->kv.reserved);
    shm_counter_set(&c->kv_evicted_blocks, t->prefix.evicted);
    shm_counter_set(&c->prefix_prompts, t->prefix.prompts);
    shm_counter_set(&c->prefix_hits, t->prefix.hits);
    shm_counter_set(&c->parked_blocks, t->prefix.parked);
    shm_counter_set(&c->park_loaded_blocks, t->prefix.loaded);
    shm_counter_set(&c->kv_bytes, t->kv.blocks * t->kv.block_bytes);
    shm_counter_set(&c->resident_bytes, t->resident_bytes);
    shm_counter_set(&c->http_connections, h->connections);
    shm_counter_set(&c->http_requests, h->requests);
    shm_counter_set(&c->http_clients_gone, h->gone);
    shm_counter_set(&c->http_slow_readers, h->slow);
    shm_counter_set(&c->http_refused, h->refused);
    free(t);
}

char *srv_metrics_text(struct srv_server *s, size_t *ret_bytes)
{
    char *text = NULL;
    FILE *f = open_memstream(&text, ret_bytes);
    if (!f)
        return NULL;
    srv_status_count(s);
    srv_stats_write(s->stats, f);
    if (fclose(f)) {
        free(text);
        return NULL;
    }
    return text;
}
