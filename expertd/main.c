/* SPDX-License-Identifier: MIT */
#include "expertd/exd_daemon.h"
#include "expertd/exd_log.h"
#include "proto/prt_file.h"

int main(int argc, char **argv)
{
    prt_file_standard();
    struct exd_options options;
    struct shm_error err = {0};
    if (exd_options_parse(argc, argv, &options, &err) < 0) {
        exd_log(EXD_LOG_ERROR, "%s", shm_error_text(&err));
        return 2;
    }
    return exd_daemon_run(&options);
}
