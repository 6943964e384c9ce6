/* SPDX-License-Identifier: MIT */
/* expert-top: the terminal, the keys and the options. What is shown: top_model.c, top_draw.c. */
#include "tools/top.h"

#include "proto/prt_file.h"

#include <argp.h>
#include <errno.h>
#include <ncurses.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

const char *argp_program_version = "expert-top " EXPERTD_VERSION;
error_t argp_err_exit_status = 2;

#define DELAY_MIN 0.05
#define DELAY_MAX 60.0

static volatile sig_atomic_t interrupted;

static void on_signal(int signo)
{
    (void)signo;
    interrupted = 1;
}

struct options {
    const char *runtime_dir, *instance;
    bool once, json;
    uint64_t count, rows, cols;
    struct top_state state;
};

enum { OPT_RUNTIME_DIR = 0x100, OPT_ONCE, OPT_JSON, OPT_SIZE };

static const struct argp_option argp_options[] = {
    {"instance", 'i', "NAME", 0, "Instance to look at (default: default)", 0},
    {"runtime-dir", OPT_RUNTIME_DIR, "DIR", 0,
     "Where instances live (default: $XDG_RUNTIME_DIR, /run for root)", 0},
    {"delay", 'd', "SECONDS", 0, "Between two looks, 0.05 to 60 (default: 1)", 0},
    {"count", 'n', "N", 0, "End after N looks", 0},
    {"worker", 'p', "PID", 0, "Begin close to this worker", 0},
    {"once", OPT_ONCE, 0, 0, "Print one screen as text and end", 0},
    {"json", OPT_JSON, 0, 0, "Print one look as a JSON value and end", 0},
    {"size", OPT_SIZE, "COLSxROWS", 0, "With --once: the screen (default: the terminal's, else 80x24)", 0},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct options *o = state->input;
    struct shm_error err = {0};
    int rc = 0;
    switch (key) {
    case 'i':
        o->instance = arg;
        break;
    case OPT_RUNTIME_DIR:
        o->runtime_dir = arg;
        break;
    case 'd':
        rc = shm_real_parse("--delay", arg, DELAY_MIN, DELAY_MAX, &o->state.delay_s, &err);
        break;
    case 'n':
        rc = shm_number_parse("--count", arg, 1, UINT32_MAX, &o->count, &err);
        break;
    case 'p':
        rc = shm_number_parse("--worker", arg, 1, 4194304, &o->state.session, &err); /* a pid for now */
        o->state.view = TOP_WORKER;
        break;
    case OPT_ONCE:
        o->once = true;
        break;
    case OPT_JSON:
        o->json = true;
        break;
    case OPT_SIZE: {
        char *x = strchr(arg, 'x');
        char cols[16] = "";
        if (x)
            snprintf(cols, sizeof cols, "%.*s", (int)(x - arg), arg);
        rc = shm_number_parse("--size", cols, 1, 1000, &o->cols, &err);
        if (!rc)
            rc = shm_number_parse("--size", x + 1, 1, 1000, &o->rows, &err);
        break;
    }
    case ARGP_KEY_ARG:
        argp_error(state, "what is '%s' for? There are options only", arg);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    if (rc)
        argp_error(state, "%s", shm_error_text(&err));
    return 0;
}

/* The worker that --worker names. */
static void choose_by_pid(struct options *o, const struct top_look *l)
{
    for (uint32_t i = 0; i < l->workers; i++)
        if (atomic_load(&l->worker[i].w->row.pid) == o->state.session) {
            o->state.session = l->worker[i].w->row.session;
            return;
        }
    o->state.session = 0;
}

static void print_screen(const struct top_screen *s)
{
    for (int row = 0; row < s->rows; row++) {
        const char *line = s->cell + (size_t)row * (size_t)s->cols;
        int n = s->cols;
        while (n && line[n - 1] == ' ')
            n--;
        printf("%.*s\n", n, line);
    }
}

static json_t *json_real_or_null(double v)
{
    return v < 0 ? json_null() : json_real(v);
}

static void print_json(const struct top_look *l)
{
    json_t *o = json_object(), *list = json_array();
    json_object_set_new(o, "instance", ctl_json_text(l->now->store->instance, SHM_NAME_BYTES));
    json_object_set_new(o, "store", ctl_json_counters(SHM_BLOCK_STORE, l->now->counters, NULL, false));
    for (uint32_t i = 0; i < l->workers; i++) {
        const struct top_worker *t = &l->worker[i];
        json_t *w = ctl_json_worker(t->w);
        if (t->w->mapped) {
            json_object_set_new(w, "link_bytes_per_second", json_real(t->link_bytes_s));
            json_object_set_new(w, "tokens_per_second", json_real(t->tokens_s));
            json_object_set_new(w, "busy", json_real_or_null(t->busy));
            json_object_set_new(w, "overlap", json_real_or_null(t->overlap));
            json_object_set_new(w, "waste", json_real_or_null(t->waste));
            json_object_set_new(w, "waiting", json_real_or_null(t->wait));
            if (t->w->serves)
                json_object_set_new(w, "server",
                                    ctl_json_counters(SHM_BLOCK_SERVER, t->w->server, NULL, false));
        }
        json_array_append_new(list, w);
    }
    json_object_set_new(o, "workers", list);
    ctl_json_print(o);
}

static void pause_s(double s)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)s, .tv_nsec = (long)((s - (double)(time_t)s) * 1e9)},
              NULL);
}

/* Text or JSON to standard output: two looks, a moment apart, so that there are rates. */
static int print_once(struct options *o, struct top_model *m)
{
    const struct top_look *l = top_model_look(m, &o->state);
    if (!l->problem[0]) {
        pause_s(o->state.delay_s < 0.5 ? o->state.delay_s : 0.5);
        l = top_model_look(m, &o->state);
    }
    if (l->problem[0]) {
        fprintf(stderr, "expert-top: %s\n", l->problem);
        return CTL_EXIT_ATTACH;
    }
    choose_by_pid(o, l);
    int status = l->now->liveness == PRT_STALE ? CTL_EXIT_PROBLEM : CTL_EXIT_OK;
    if (o->json) {
        print_json(l);
        return status;
    }
    struct winsize size = {.ws_row = 24, .ws_col = 80};
    if (isatty(STDOUT_FILENO))
        ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    struct top_screen s = {0};
    if (top_screen_resize(&s, o->rows ? (int)o->rows : size.ws_row, o->cols ? (int)o->cols : size.ws_col))
        return CTL_EXIT_PROBLEM;
    top_draw(l, &o->state, &s);
    print_screen(&s);
    top_screen_free(&s);
    return status;
}

static attr_t attributes(unsigned a)
{
    return (a & TOP_BOLD ? A_BOLD : 0) | (a & TOP_REVERSE ? A_REVERSE : 0) | (a & TOP_DIM ? A_DIM : 0) |
           (a & TOP_WARN ? (has_colors() ? (attr_t)COLOR_PAIR(1) : A_UNDERLINE) : 0);
}

/* Runs of one attribute at a time; ncurses sends what has changed. */
static void show(const struct top_screen *s)
{
    for (int row = 0; row < s->rows; row++) {
        size_t base = (size_t)row * (size_t)s->cols;
        for (int col = 0; col < s->cols;) {
            int end = col + 1;
            while (end < s->cols && s->attr[base + (size_t)end] == s->attr[base + (size_t)col])
                end++;
            attrset(attributes(s->attr[base + (size_t)col]));
            mvaddnstr(row, col, s->cell + base + col, end - col);
            col = end;
        }
    }
    move(s->rows - 1, 0);
    refresh();
}

static void choose(struct top_state *state, const struct top_look *l, int by)
{
    if (!l->workers)
        return;
    int at = (int)top_selected(l, state) + by;
    at = at < 0 ? 0 : at >= (int)l->workers ? (int)l->workers - 1 : at;
    state->session = l->worker[at].w->row.session;
}

/* Returns false to end. */
static bool on_key(struct top_state *state, const struct top_look *l, int key)
{
    if (key == 'Q')
        return false;
    if (state->view == TOP_HELP) {
        state->view = TOP_OVERVIEW;
        return true;
    }
    bool worker = state->view == TOP_WORKER;
    int by = key == KEY_DOWN || key == 'j' ? 1
             : key == KEY_UP || key == 'k' ? -1
             : key == KEY_NPAGE            ? 10
             : key == KEY_PPAGE            ? -10
                                           : 0;
    if (by && worker)
        state->scroll = state->scroll + by < 0                ? 0
                        : state->scroll + by > SHM_LAYERS_MAX ? SHM_LAYERS_MAX
                                                              : state->scroll + by;
    else if (by)
        choose(state, l, by);
    switch (key) {
    case 'q':
    case 27: /* Esc */
    case KEY_BACKSPACE:
        state->view = TOP_OVERVIEW;
        return worker || key != 'q';
    case '\n':
    case '\r':
    case KEY_ENTER:
        choose(state, l, 0);
        state->view = TOP_WORKER;
        state->scroll = 0;
        break;
    case 'n':
        if (l->workers && top_selected(l, state) + 1 == l->workers)
            state->session = l->worker[0].w->row.session;
        else
            choose(state, l, 1);
        break;
    case 's':
        state->sort = (state->sort + 1) % TOP_SORTS;
        break;
    case 'r':
        state->reverse = !state->reverse;
        break;
    case ' ':
    case 'f':
        state->frozen = !state->frozen;
        break;
    case '+':
    case '=':
        state->delay_s = state->delay_s / 2 < DELAY_MIN ? DELAY_MIN : state->delay_s / 2;
        break;
    case '-':
        state->delay_s = state->delay_s * 2 > DELAY_MAX ? DELAY_MAX : state->delay_s * 2;
        break;
    case 'h':
    case '?':
        state->view = TOP_HELP;
        break;
    default:
        break;
    }
    return true;
}

static int run(struct options *o, struct top_model *m)
{
    struct sigaction sa = {.sa_handler = on_signal};
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL);
    SCREEN *terminal = newterm(NULL, stdout, stdin);
    if (!terminal) {
        fprintf(stderr, "expert-top: the terminal '%s' is not known: set TERM, or use --once\n",
                getenv("TERM") ? getenv("TERM") : "");
        return CTL_EXIT_PROBLEM;
    }
    if (has_colors()) {
        start_color();
        use_default_colors();
        init_pair(1, COLOR_RED, -1);
    }
    cbreak();
    noecho();
    curs_set(0);
    set_escdelay(50);
    keypad(stdscr, TRUE);
    struct top_screen s = {0};
    const struct top_look *l = top_model_look(m, &o->state);
    if (o->state.session)
        choose_by_pid(o, l);
    uint64_t next_ns = shm_now_ns();
    for (uint64_t looks = 1; !interrupted;) {
        if (top_screen_resize(&s, LINES, COLS))
            break;
        top_draw(l, &o->state, &s);
        show(&s);
        if (o->count && looks >= o->count)
            break;
        next_ns += (uint64_t)(o->state.delay_s * 1e9);
        uint64_t now_ns = shm_now_ns();
        if (next_ns < now_ns) /* late, or was stopped: no burst */
            next_ns = now_ns;
        timeout((int)((next_ns - now_ns) / 1000000));
        int key = getch();
        if (key == ERR || key == KEY_RESIZE) {
            if (key == KEY_RESIZE)
                erase(), clearok(stdscr, TRUE);
            if (key == ERR && !o->state.frozen)
                l = top_model_look(m, &o->state), looks++;
            else if (key == KEY_RESIZE)
                next_ns -= (uint64_t)(o->state.delay_s * 1e9);
            continue;
        }
        next_ns -= (uint64_t)(o->state.delay_s * 1e9); /* a key does not postpone the look */
        if (!on_key(&o->state, l, key))
            break;
        if (!o->state.frozen && (key == 's' || key == 'r'))
            l = top_model_look(m, &o->state); /* in its new order */
        erase();
    }
    endwin();
    delscreen(terminal);
    top_screen_free(&s);
    return CTL_EXIT_OK;
}

int main(int argc, char **argv)
{
    prt_file_standard();
    static const struct argp argp = {
        argp_options,
        parse,
        NULL,
        "Shows expertd, its workers, links, rings and layers live. Only reads shared memory.\v"
        "Keys: up and down choose a worker, enter looks closer, s sorts, space freezes, h tells the others. "
        "Exit status: 0 as it should be, 1 a problem was seen, 2 can't attach.",
        NULL,
        NULL,
        NULL};
    struct options o = {.state = {.delay_s = 1}};
    argp_parse(&argp, argc, argv, 0, NULL, &o);
    if (!o.once && !o.json && !isatty(STDOUT_FILENO)) {
        fprintf(stderr, "expert-top: standard output is no terminal: use --once or --json\n");
        return 2;
    }
    struct top_model *m = top_model_new(o.runtime_dir, o.instance);
    if (!m) {
        fprintf(stderr, "expert-top: no memory; free some\n");
        return CTL_EXIT_PROBLEM;
    }
    int status = o.once || o.json ? print_once(&o, m) : run(&o, m);
    top_model_free(&m);
    if (fflush(stdout) || ferror(stdout))
        status = CTL_EXIT_PROBLEM;
    return status;
}
