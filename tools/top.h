/* SPDX-License-Identifier: MIT */
/*
 * expert-top: what is shown, apart from the terminal it is shown on.
 *
 * A look copies shared memory through read-only mappings (ctl.h) and keeps
 * some seconds of earlier ones for rates. Drawing fills a grid of characters
 * of any size, clipped; the terminal or standard output takes it from there.
 */
#ifndef TOP_H
#define TOP_H

#include "tools/ctl.h"

#define TOP_WINDOW_NS UINT64_C(3000000000) /* rates are over this time, or as long as was looked */
#define TOP_PASTS     24

/* Attributes of a cell. */
#define TOP_PLAIN   0u
#define TOP_BOLD    1u
#define TOP_REVERSE 2u
#define TOP_WARN    4u /* red where there are colours */
#define TOP_DIM     8u

struct top_screen {
    int rows, cols;
    char *cell;          /* [rows][cols], ASCII */
    unsigned char *attr; /* likewise */
};

int top_screen_resize(struct top_screen *s, int rows, int cols); /* clears; 0 or -ENOMEM */
void top_screen_free(struct top_screen *s);

enum top_sort {
    TOP_BY_PID,
    TOP_BY_NAME,
    TOP_BY_LINK,
    TOP_BY_BUSY,
    TOP_BY_WASTE,
    TOP_BY_WAIT,
    TOP_BY_AGE,
    TOP_SORTS
};
enum top_view { TOP_OVERVIEW, TOP_WORKER, TOP_HELP };

/* What the user chose. */
struct top_state {
    enum top_view view;
    enum top_sort sort;
    bool reverse, frozen;
    uint64_t session; /* selected worker; 0: the first */
    int scroll;       /* rows of the worker's view */
    double delay_s;
};

/* Numbers of one worker, of the last seconds. */
struct top_worker {
    const struct ctl_worker *w;
    double link_bytes_s, tokens_s;                        /* copied a second, running streams included */
    double link, busy, waste, overlap, wait, hit, routed; /* shares; negative: not known */
    double age_s;                                         /* without progress in a stream */
    const uint64_t *before;
};

struct top_look {
    struct ctl_snapshot *now;
    struct top_worker worker[SHM_STORE_WORKERS]; /* sorted */
    uint32_t workers;
    char problem[SHM_ERROR_TEXT_BYTES]; /* not empty: there is no instance to look at */
};

struct top_model;

/* runtime_dir and instance are borrowed; NULL: default. NULL: no memory. */
struct top_model *top_model_new(const char *runtime_dir, const char *instance);
void top_model_free(struct top_model **model);

/* Looks anew. Never blocks; the result is the model's, until the next look. */
const struct top_look *top_model_look(struct top_model *model, const struct top_state *state);

/* Draws the last look: as the state says, whatever the size. */
void top_draw(const struct top_look *look, const struct top_state *state, struct top_screen *screen);

/* The row of the selected worker in look->worker. */
uint32_t top_selected(const struct top_look *look, const struct top_state *state);

#endif
