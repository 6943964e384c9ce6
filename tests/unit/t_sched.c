/* SPDX-License-Identifier: MIT */
/* What the scheduler decides: shares of a pass, its length beside answers, room for a job; and the queue
 * below it. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "inferd/serve/srv_job.h"
#include "inferd/serve/srv_sched.h"

TestSuite(share, .timeout = 30);
TestSuite(length, .timeout = 30);
TestSuite(rounds, .timeout = 60);
TestSuite(queue, .timeout = 30);

static void shares(const struct srv_prompt *p, unsigned n, uint32_t tokens, const uint32_t *want)
{
    uint32_t got[SRV_PARALLEL_MAX];
    srv_sched_share(p, n, tokens, got);
    for (unsigned i = 0; i < n; i++)
        cr_expect_eq(got[i], want[i], "prompt %u of %u, %u tokens: %u, not %u", i, n, tokens, got[i],
                     want[i]);
}

Test(share, is_even_between_clients_and_in_order_within_one)
{
    const struct srv_prompt two[] = {{0, 1, 1000}, {1, 2, 1000}};
    shares(two, 2, 600, (uint32_t[]){300, 300});
    shares(two, 2, 601, (uint32_t[]){301, 300});
    shares(two, 2, 5000, (uint32_t[]){1000, 1000});
    shares(two, 2, 1, (uint32_t[]){1, 0});
    shares(two, 2, 0, (uint32_t[]){0, 0});
    const struct srv_prompt small[] = {{0, 1, 1000}, {1, 2, 10}, {2, 3, 1000}};
    shares(small, 3, 410, (uint32_t[]){200, 10, 200});
    /* Five prompts of one client take no more than its only prompt takes of another. */
    const struct srv_prompt many[] = {{0, 9, 100}, {0, 2, 100}, {0, 3, 100},
                                      {0, 4, 100}, {0, 5, 100}, {1, 6, 300}};
    shares(many, 6, 400, (uint32_t[]){0, 100, 100, 0, 0, 200});
    shares(many, 6, 500, (uint32_t[]){0, 100, 100, 50, 0, 250});
    shares(many, 6, 800, (uint32_t[]){100, 100, 100, 100, 100, 300});
}

/* Whatever comes: nothing is left over, nobody gets more than asked for, and a client that wants more has at
 * least as much as any other, but for the rest of the division. */
Test(share, of_anything)
{
    srand(1);
    for (int round = 0; round < 3000; round++) {
        struct srv_prompt p[SRV_PARALLEL_MAX];
        uint32_t got[SRV_PARALLEL_MAX], tokens = (uint32_t)(rand() % (round % 2 ? 3000 : 40));
        uint64_t total = 0, sum = 0, want[SRV_PARALLEL_MAX] = {0}, has[SRV_PARALLEL_MAX] = {0};
        unsigned n = 1 + (unsigned)rand() % SRV_PARALLEL_MAX,
                 clients = 1 + (unsigned)rand() % SRV_PARALLEL_MAX;
        bool most = false, order = false, even = false;
        for (unsigned i = 0; i < n; i++) {
            p[i] = (struct srv_prompt){(unsigned)rand() % clients, i, 1 + (uint32_t)rand() % 200};
            want[p[i].client] += p[i].rest;
            total += p[i].rest;
        }
        srv_sched_share(p, n, tokens, got);
        for (unsigned i = 0; i < n; i++) {
            most |= got[i] > p[i].rest;
            has[p[i].client] += got[i];
            sum += got[i];
            for (unsigned k = 0; k < i; k++)
                order |= p[k].client == p[i].client && got[i] && got[k] != p[k].rest;
        }
        for (unsigned c = 0; c < SRV_PARALLEL_MAX; c++)
            for (unsigned d = 0; d < SRV_PARALLEL_MAX && has[c] < want[c]; d++)
                even |= has[d] > has[c] + 1;
        cr_assert(!most && !order && !even && sum == (total < tokens ? total : tokens),
                  "round %d: %u prompts of %u clients, %u tokens: %d %d %d, %lu given", round, n, clients,
                  tokens, most, order, even, (unsigned long)sum);
    }
}

static struct srv_speed line(double fixed_ns, double each_ns)
{
    struct srv_speed speed = {0};
    for (uint32_t t = 100; t <= 2000; t += 100)
        srv_speed_note(&speed, t, (uint64_t)(fixed_ns + each_ns * t));
    return speed;
}

Test(length, the_speed_is_a_line)
{
    double fixed, each;
    struct srv_speed speed = {0};
    cr_expect(!srv_speed_fit(&speed, &fixed, &each));
    srv_speed_note(&speed, 500, 1000000);
    cr_assert(srv_speed_fit(&speed, &fixed, &each));
    cr_expect(fixed == 0 && fabs(each - 2000) < 1e-6);
    speed = line(5e6, 3000);
    cr_assert(srv_speed_fit(&speed, &fixed, &each));
    cr_expect(fabs(fixed - 5e6) < 1e3 && fabs(each - 3000) < 1, "%g %g", fixed, each);
    /* Long passes that took less than short ones, or none at all: nothing is negative. */
    speed = (struct srv_speed){0};
    srv_speed_note(&speed, 100, 3000000);
    srv_speed_note(&speed, 1000, 1000000);
    cr_assert(srv_speed_fit(&speed, &fixed, &each));
    cr_expect(fixed >= 0 && each >= 0);
    speed = (struct srv_speed){0};
    srv_speed_note(&speed, 100, 1000);
    srv_speed_note(&speed, 1000, 100000000);
    cr_assert(srv_speed_fit(&speed, &fixed, &each));
    cr_expect(fixed >= 0 && each >= 0);
    /* What was true an hour ago counts little. */
    speed = line(5e6, 3000);
    for (int i = 0; i < 60; i++)
        srv_speed_note(&speed, 100 + 50 * (uint32_t)i, 30000 * (100 + 50 * (uint64_t)i));
    cr_assert(srv_speed_fit(&speed, &fixed, &each));
    cr_expect(fabs(each - 30000) < 300, "%g", each);
}

Test(length, is_what_the_gap_leaves)
{
    const struct srv_speed speed = line(5e6, 100000), none = {0}, link = line(140e6, 33000);
    struct srv_load l = {
        .rest = 100000, .chunk = 4096, .floor = 1024, .gap_ns = 200000000, .step_ns = 20000000};
    cr_expect_eq(srv_sched_tokens(&l, &speed), 4000, "no answer waits: 25 passes of a length");
    l.answers = 3;
    uint32_t tokens = srv_sched_tokens(&l, &speed);
    cr_expect(tokens > 1700 && tokens <= 1750, "(200 - 20 - 5) ms / 0.1 ms: %u", tokens);
    cr_expect_eq(srv_sched_tokens(&l, &none), 256, "no speed is known: %u", srv_sched_tokens(&l, &none));
    l.gap_ns = 0;
    cr_expect_eq(srv_sched_tokens(&l, &speed), 4000, "any gap will do");
    l.gap_ns = 10000000;
    tokens = srv_sched_tokens(&l, &speed);
    cr_expect(tokens >= 49 && tokens <= 51, "half of a pass is what it costs anyway: %u", tokens);
    tokens = srv_sched_tokens(&l, &link);
    cr_expect(tokens > 1000 && tokens <= 1024, "a link has nothing from less than the floor: %u", tokens);
    l.gap_ns = 250000000;
    tokens = srv_sched_tokens(&l, &link);
    cr_expect(tokens > 2600 && tokens < 2750, "%u", tokens);
    l.rest = 17;
    cr_expect_eq(srv_sched_tokens(&l, &speed), 17);
    l.rest = 4097;
    l.answers = 0;
    cr_expect_eq(srv_sched_tokens(&l, &speed), 2049, "no short rest");
    l.chunk = 1;
    cr_expect_eq(srv_sched_tokens(&l, &speed), 1);
    l.rest = 0;
    cr_expect_eq(srv_sched_tokens(&l, &speed), 0);
}

/* A fake engine: rounds of reads and steps over time. */
struct job {
    struct srv_prompt prompt;
    unsigned answer; /* tokens left to write */
    uint64_t token_ns, gap_ns, read_at;
};

/* Runs n jobs, all there at once, to their end; the reads of the passes cost fixed + each * tokens. */
static void run(struct job *job, unsigned n, double fixed_ns, double each_ns, uint64_t gap_ns)
{
    struct srv_speed speed = {0};
    uint64_t now = 0, step = 0;
    for (unsigned round = 1, left = n; left; round++) {
        if (round > 100000)
            cr_assert_fail("no end");
        struct srv_prompt p[SRV_PARALLEL_MAX];
        unsigned at[SRV_PARALLEL_MAX], reading = 0, answering = 0;
        uint32_t got[SRV_PARALLEL_MAX];
        struct srv_load l = {.gap_ns = gap_ns, .step_ns = step, .chunk = 4096, .floor = 1024};
        for (unsigned i = 0; i < n; i++) {
            l.rest += job[i].prompt.rest;
            if (job[i].prompt.rest) {
                at[reading] = i;
                p[reading++] = job[i].prompt;
            } else {
                l.answers += job[i].answer > 0;
            }
        }
        if (reading) {
            uint32_t tokens = srv_sched_tokens(&l, &speed);
            if (!tokens || tokens > l.chunk)
                cr_assert_fail("%u tokens", tokens);
            srv_sched_share(p, reading, tokens, got);
            uint64_t took = (uint64_t)((fixed_ns + each_ns * tokens) * (0.95 + 0.1 * rand() / RAND_MAX));
            srv_speed_note(&speed, tokens, took);
            now += took;
            for (unsigned i = 0; i < reading; i++) {
                struct job *j = &job[at[i]];
                j->prompt.rest -= got[i];
                if (!j->prompt.rest) {
                    j->token_ns = now;
                    j->read_at = round;
                }
            }
        }
        left = 0;
        for (unsigned i = 0; i < n; i++)
            answering += !job[i].prompt.rest && job[i].answer;
        step = answering ? 10000000 + 200000 * answering : 0;
        now += step;
        for (unsigned i = 0; i < n; i++) {
            struct job *j = &job[i];
            left += j->prompt.rest || j->answer;
            if (j->prompt.rest || !j->answer)
                continue;
            if (round > 20 && now - j->token_ns > j->gap_ns) /* by then a speed is known */
                j->gap_ns = now - j->token_ns;
            j->token_ns = now;
            j->answer--;
        }
    }
}

Test(rounds, answers_go_on_beside_long_prompts)
{
    struct job job[12] = {0};
    srand(2);
    for (unsigned i = 0; i < 12; i++) {
        job[i].prompt = (struct srv_prompt){i % 4, i, i < 8 ? 20 + i : 30000};
        job[i].answer = 400;
    }
    run(job, 12, 8e6, 50000, 150000000);
    for (unsigned i = 0; i < 12; i++) {
        cr_expect_leq(job[i].gap_ns, 180000000, "job %u: %.1f ms", i, (double)job[i].gap_ns / 1e6);
        if (i < 8)
            cr_expect_leq(job[i].read_at, 2, "job %u: short prompts don't wait for long ones", i);
    }
}

Test(rounds, no_client_keeps_another_waiting)
{
    struct job job[60] = {0};
    for (unsigned i = 0; i < 60; i++) {
        job[i].prompt = (struct srv_prompt){0, i, 3000};
        job[i].answer = 5;
    }
    job[59].prompt = (struct srv_prompt){1, 1000, 2500};
    run(job, 60, 5e6, 20000, 200000000);
    cr_expect_leq(job[59].read_at, 60, "in its 120th of the time, not in its 60th: round %lu",
                  (unsigned long)job[59].read_at);
    uint64_t last = 0;
    for (unsigned i = 0; i < 59; i++) {
        cr_expect(job[i].read_at >= last, "those of one client end in order");
        last = job[i].read_at;
    }
    cr_expect_gt(last, 2 * job[59].read_at);
}

Test(rounds, room_for_a_job)
{
    cr_expect_eq(srv_sched_need(100, 10, 1000), 109, "the last token is not read");
    cr_expect_eq(srv_sched_need(100, 1, 1000), 100);
    cr_expect_eq(srv_sched_need(100, 0, 1000), 100);
    cr_expect_eq(srv_sched_need(100, UINT64_MAX, 1000), 1000);
    cr_expect_eq(srv_sched_need(999, 1000, 1000), 1000);
}

static struct srv_job *submit(struct srv_queue *q, const char *client, uint32_t max_tokens)
{
    struct srv_job *j = srv_job_new();
    strcpy(j->client, client);
    j->max_tokens = max_tokens;
    cr_assert_eq(srv_queue_submit(q, j), 0);
    return j;
}

static bool fits(void *ctx, const struct srv_job *job)
{
    return job->max_tokens <= *(const uint32_t *)ctx;
}

static void end(struct srv_queue *q, struct srv_job *job)
{
    const struct srv_result result = {.end = SRV_END_LENGTH};
    srv_queue_end(q, job, &result);
}

Test(queue, what_does_not_fit_stays_the_next)
{
    struct srv_queue *q;
    uint32_t room = 10;
    cr_assert_eq(srv_queue_create(8, &q), 0);
    srv_queue_open(q);
    struct srv_job *job[] = {submit(q, "a", 5), submit(q, "a", 50), submit(q, "b", 20), submit(q, "a", 1)};
    cr_expect_eq(srv_queue_take(q, 0, fits, &room), job[0]);
    cr_expect_null(srv_queue_take(q, 0, fits, &room), "b's turn, and it is too large");
    cr_expect_eq(srv_queue_counts(q).waiting, 3);
    room = 20;
    cr_expect_eq(srv_queue_take(q, 0, fits, &room), job[2]);
    cr_expect_null(srv_queue_take(q, 0, fits, &room), "no small one goes before it");
    room = 100;
    cr_expect_eq(srv_queue_take(q, 0, fits, &room), job[1]);
    cr_expect_eq(srv_queue_take(q, 0, NULL, NULL), job[3]);
    for (int i = 0; i < 4; i++) {
        end(q, job[i]);
        srv_job_release(q, &job[i]);
    }
    srv_queue_destroy(&q);
}

Test(queue, a_pass_is_broken_off_when_all_of_it_is_cancelled)
{
    struct srv_queue *q;
    cr_assert_eq(srv_queue_create(8, &q), 0);
    srv_queue_open(q);
    struct srv_job *job[3];
    for (int i = 0; i < 3; i++) {
        job[i] = submit(q, "a", 1);
        cr_assert_eq(srv_queue_take(q, 0, NULL, NULL), job[i]);
    }
    _Atomic bool *interrupt = srv_queue_interrupt(q);
    srv_queue_pass(q, job, 2);
    srv_queue_cancel(q, job[0]);
    cr_expect(!atomic_load(interrupt), "one of two still wants it");
    srv_queue_cancel(q, job[1]);
    cr_expect(atomic_load(interrupt), "the third one is not in it");
    srv_queue_pass(q, NULL, 0);
    cr_expect(!atomic_load(interrupt));
    srv_queue_pass(q, &job[1], 2);
    cr_expect(!atomic_load(interrupt));
    end(q, job[2]);
    cr_expect(atomic_load(interrupt), "the other one has ended");
    srv_queue_pass(q, &job[0], 1);
    cr_expect(atomic_load(interrupt), "cancelled before it began");
    for (int i = 0; i < 3; i++) {
        if (i < 2)
            end(q, job[i]);
        srv_job_release(q, &job[i]);
    }
    srv_queue_destroy(&q);
}
