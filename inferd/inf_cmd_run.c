/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cmd.h"
#include "inferd/inf_turn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int inf_cmd_run(int argc, char **argv)
{
    struct inf_options o;
    struct inf_engine *engine = NULL;
    struct inf_talk talk = {0};
    struct inf_turn turn = {0};
    struct inf_ids ids = {0};
    struct shm_error err = {0};
    uint64_t start_ns = shm_now_ns();
    inf_options_parse(argc, argv, INF_GROUP_ENGINE | INF_GROUP_PROMPT | INF_GROUP_SAMPLING | INF_GROUP_REPORT,
                      "Reads a prompt and writes an answer.", &o);
    inf_cancel_install();
    int status = inf_cmd_open(&o, &engine, &ids);
    if (status)
        return status;
    int rc = inf_talk_open(engine, &o, &err, &talk);
    if (rc || (rc = inf_turn_run(&talk, ids.ids, ids.n, &turn, &err))) {
        status = inf_cmd_fail(rc, &err);
        goto out;
    }
    if (o.json) {
        json_t *j = inf_turn_json(&talk, &turn);
        json_object_set_new(j, "start_to_first_ms",
                            json_real((double)(shm_now_ns() - start_ns - turn.answer_ns) / 1e6));
        json_dumpf(j, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
        putchar('\n');
        json_decref(j);
    } else {
        putchar('\n');
        fflush(stdout);
        if (!o.quiet)
            inf_turn_report(&talk, &turn, stderr);
    }
    status = turn.stop == INF_STOP_CANCELLED ? 130 : 0;
    if (fflush(stdout) || ferror(stdout))
        status = 1;
out:
    inf_turn_clear(&turn);
    inf_talk_close(&talk);
    inf_ids_clear(&ids);
    inf_engine_close(&engine);
    return status;
}
