/* SPDX-License-Identifier: MIT */
#include "inferd/inf_cmd.h"

#include <errno.h>
#include <stdio.h>

/* Text to token ids, as `run` would read it. One JSON array. */
int inf_cmd_tokenize(int argc, char **argv)
{
    struct inf_options o;
    struct inf_engine *engine = NULL;
    struct inf_ids ids = {0};
    struct shm_error err = {0};
    inf_options_parse(argc, argv, INF_GROUP_ENGINE | INF_GROUP_PROMPT,
                      "Prints the token ids of a prompt as a JSON array.", &o);
    o.quiet = true;
    inf_cancel_install();
    int status = inf_cmd_open(&o, &engine, &ids);
    if (status)
        return status;
    putchar('[');
    for (size_t i = 0; i < ids.n; i++)
        printf("%s%d", i ? "," : "", ids.ids[i]);
    fputs("]\n", stdout);
    if (fflush(stdout) || ferror(stdout))
        status = inf_cmd_fail(shm_error_set(&err, EIO, "standard output cannot be written"), &err);
    inf_ids_clear(&ids);
    inf_engine_close(&engine);
    return status;
}
