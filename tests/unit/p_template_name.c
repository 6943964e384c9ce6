/* SPDX-License-Identifier: MIT */
/* Prints the family of the chat template on standard input: make_template_goldens.py --check uses it. */
#include "inferd/inf_template.h"

#include <stdio.h>

int main(void)
{
    static char text[1 << 20];
    struct shm_error err = {0};
    const struct inf_template *t = NULL;
    size_t n = fread(text, 1, sizeof text, stdin);
    if (inf_template_find(text, n, NULL, &err, &t))
        fprintf(stderr, "%s\n", shm_error_text(&err));
    puts(t ? inf_template_name(t) : "unknown");
    return 0;
}
