/* SPDX-License-Identifier: MIT */
/* Writes the seed corpus of fuzz_gguf: seed_gguf OUTDIR (the files are committed in corpus/gguf). */
#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/gguf_build.h"

static int save(const char *dir, const char *name, struct gb_bytes f)
{
    char path[1024];
    FILE *out;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    out = fopen(path, "wb");
    if (!out || fwrite(f.data, 1, f.len, out) != f.len || fclose(out) != 0) {
        fprintf(stderr, "%s: cannot be written\n", path);
        return 1;
    }
    free(f.data);
    return 0;
}

static struct gb_bytes model(const struct gb_model *opt, uint32_t version)
{
    struct gb b;
    struct gb_bytes f;

    gb_init(&b);
    b.version = version;
    gb_model(&b, opt);
    f = gb_finish(&b);
    gb_free(&b);
    return f;
}

/* Every value type, nested arrays, a large alignment, no tensors to speak of. */
static struct gb_bytes values(void)
{
    static const uint64_t dims[1] = {2};
    static const int32_t ints[2] = {-1, 5};
    struct gb b;
    struct gb_bytes f;

    gb_init(&b);
    for (uint32_t type = 0; type < 13; type++) {
        char key[3] = {'k', (char)('a' + type), '\0'};

        if (type != 8 && type != 9)
            gb_key(&b, key, type, "\1\0\0\0\0\0\0\0",
                   type >= 10               ? 8
                   : type >= 4 && type <= 6 ? 4
                   : type == 2 || type == 3 ? 2
                                            : 1);
    }
    gb_u32(&b, "general.alignment", 64);
    b.alignment = 64;
    gb_str(&b, "text", "abc");
    gb_strs(&b, "texts", "s", 3);
    gb_i32s(&b, "ints", ints, 2);
    gb_key(&b, "nest", 9, NULL, 0);
    gb_put_u32(&b.kv, 9);
    gb_put_u64(&b.kv, 2);
    for (int i = 0; i < 2; i++) {
        gb_put_u32(&b.kv, 8);
        gb_put_u64(&b.kv, 1);
        gb_put_str(&b.kv, "deep");
    }
    gb_tensor(&b, "x", 0, 1, dims);
    gb_tensor(&b, "y", 1, 1, dims);
    f = gb_finish(&b);
    gb_free(&b);
    return f;
}

int main(int argc, char **argv)
{
    struct gb_bytes a, b, both = {0};

    if (argc != 2) {
        fprintf(stderr, "usage: %s OUTDIR\n", argv[0]);
        return 1;
    }
    a = model(&(struct gb_model){.shard = 0, .shards = 2}, 3);
    b = model(&(struct gb_model){.shard = 1, .shards = 2}, 3);
    gb_put(&both, "SHRD", 4);
    gb_put_u32(&both, (uint32_t)a.len);
    gb_put(&both, a.data, a.len);
    gb_put(&both, b.data, b.len);
    free(a.data);
    free(b.data);
    return save(argv[1], "model-v3", model(&(struct gb_model){0}, 3)) |
           save(argv[1], "model-v2-untied", model(&(struct gb_model){.untied = 1}, 2)) |
           save(argv[1], "shards", both) | save(argv[1], "values", values());
}
