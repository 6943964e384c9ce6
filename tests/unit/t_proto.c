/* SPDX-License-Identifier: MIT */
/* Control messages, paths, shared files and the replay table, within one process. */
#include "proto/prt_channel.h"
#include "proto/prt_client.h"
#include "proto/prt_file.h"
#include "proto/prt_path.h"
#include "proto/prt_replay.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

TestSuite(proto, .timeout = 20);

static struct prt_attach_request attach_request(void)
{
    struct prt_attach_request r = {.pid = 42,
                                   .device = PRT_DEVICE_HOST,
                                   .start = 7,
                                   .name = "w",
                                   .control_fd = 3,
                                   .ring_fd = 4,
                                   .layers = 5,
                                   .experts = 48,
                                   .ring = 8,
                                   .group_entries = 4,
                                   .groups_per_layer = 12,
                                   .slot_bytes = 1024};
    prt_attach_request_encode(&r, 11, 12);
    return r;
}

Test(proto, request_round_trip)
{
    struct prt_attach_request r = attach_request(), got;
    struct shm_error err = {0};
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), 0, "%s", err.text);
    cr_assert_eq(memcmp(&r, &got, sizeof(r)), 0);
    cr_assert_eq(got.header.epoch, 11);
    cr_assert_eq(got.header.id, 12);
    cr_assert_eq(got.header.type, PRT_ATTACH);
}

Test(proto, every_length_but_the_right_one_is_refused)
{
    uint8_t bytes[sizeof(struct prt_attach_request) + 64] = {0};
    struct prt_attach_request r = attach_request(), got = {.pid = 99};
    struct shm_error err;
    memcpy(bytes, &r, sizeof(r));
    for (size_t n = 0; n < sizeof(bytes); n++) {
        if (n == sizeof(r))
            continue;
        err.code = 0;
        cr_assert_lt(prt_attach_request_decode(bytes, n, &got, &err), 0, "%zu bytes were taken", n);
        cr_assert(err.code < 0 && err.text[0], "%zu bytes: no line", n);
        /* also when the header says that it is right */
        struct prt_request_header h;
        memcpy(&h, bytes, sizeof(h));
        h.total_bytes = (uint32_t)n;
        uint8_t lying[sizeof(bytes)];
        memcpy(lying, bytes, sizeof(bytes));
        memcpy(lying, &h, sizeof(h));
        cr_assert_lt(prt_attach_request_decode(lying, n, &got, &err), 0, "%zu bytes were taken", n);
    }
    cr_assert_eq(got.pid, 99, "a refusal wrote its output");
}

Test(proto, garbage_is_refused)
{
    uint32_t seed = 1;
    struct shm_error err;
    for (int i = 0; i < 20000; i++) {
        uint8_t bytes[sizeof(struct prt_attach_reply)];
        size_t n = 0;
        for (; n < sizeof(bytes); n++) {
            seed = seed * 1664525u + 1013904223u;
            bytes[n] = (uint8_t)(seed >> 24);
        }
        n = (seed >> 8) % sizeof(bytes);
        struct prt_attach_request request;
        struct prt_attach_reply reply;
        struct prt_hello_reply hello;
        cr_assert_lt(prt_attach_request_decode(bytes, n, &request, &err), 0);
        cr_assert_lt(prt_attach_reply_decode(bytes, n, &reply, &err), 0);
        cr_assert_lt(prt_hello_reply_decode(bytes, n, &hello, &err), 0);
    }
}

Test(proto, ranges_are_checked_and_named)
{
    struct shm_error err;
    struct prt_attach_request got;
#define REFUSED(field, value)                                                                                \
    do {                                                                                                     \
        struct prt_attach_request r_ = attach_request();                                                     \
        r_.field = (value);                                                                                  \
        cr_assert_eq(prt_attach_request_decode(&r_, sizeof(r_), &got, &err), -ERANGE, #field);               \
        cr_assert(strstr(err.text, #field), "%s", err.text);                                                 \
    } while (0)
    REFUSED(pid, 0);
    REFUSED(pid, 4194305);
    REFUSED(device, 0);
    REFUSED(device, 3);
    REFUSED(layers, 0);
    REFUSED(layers, 513);
    REFUSED(experts, 1025);
    REFUSED(ring, 0);
    REFUSED(ring, UINT32_MAX);
    REFUSED(reserved, 1);
    REFUSED(slot_bytes, 255);
    REFUSED(slot_bytes, UINT64_MAX);
    REFUSED(order, 4);
    REFUSED(policy, 3);
    REFUSED(link_gbps, -1.5);
    REFUSED(link_gbps, __builtin_nan(""));
    REFUSED(link_gbps, __builtin_inf());
    REFUSED(link_latency_us, 1e7);
    struct prt_attach_request r = attach_request();
    r.name[0] = '\0';
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -ERANGE);
    cr_assert(strstr(err.text, "name"), "%s", err.text);
    memset(r.name, 'x', sizeof(r.name));
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -ERANGE);
}

Test(proto, header_fields_are_checked)
{
    struct shm_error err;
    struct prt_request_header h;
    struct prt_attach_request r = attach_request(), got;
    r.header.magic++;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EBADMSG);
    r = attach_request(), r.header.epoch = 0;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EBADMSG);
    r = attach_request(), r.header.id = 0;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EBADMSG);
    r = attach_request(), r.header.reserved = 1;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EBADMSG);
    r = attach_request(), r.header.total_bytes--;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EBADMSG);
    r = attach_request(), r.header.type = PRT_DETACH;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EBADMSG);
    r = attach_request(), r.header.version = 77;
    cr_assert_eq(prt_attach_request_decode(&r, sizeof(r), &got, &err), -EPROTO);
    cr_assert(strstr(err.text, "77") && strstr(err.text, "version 3"), "%s", err.text);
    cr_assert_eq(prt_request_peek(&r, sizeof(r), PRT_VERSION, &h, &err), -EPROTO);
    cr_assert(h.epoch == 11 && h.id == 12, "an answer to another version cannot be addressed");
}

Test(proto, replies)
{
    struct shm_error err = {0};
    struct prt_attach_request request = attach_request();
    struct prt_attach_reply reply = {.session = 5, .arena_path = "/x", .policy = 1, .order = 1, .depth = 1},
                            got;
    prt_attach_reply_encode(&reply, &request.header, 0, "not sent");
    cr_assert_eq(prt_attach_reply_decode(&reply, sizeof(reply), &got, &err), 0, "%s", err.text);
    cr_assert(got.session == 5 && got.header.epoch == 11 && got.header.id == 12 && !got.header.error[0]);
    reply.depth = 0;
    cr_assert_eq(prt_attach_reply_decode(&reply, sizeof(reply), &got, &err), -ERANGE);
    /* a refusal has a body of zeros, or none at all */
    struct prt_attach_reply refusal = {0};
    prt_attach_reply_encode(&refusal, &request.header, -EBUSY, "full");
    cr_assert_eq(prt_attach_reply_decode(&refusal, sizeof(refusal), &got, &err), 0, "%s", err.text);
    cr_assert(got.header.status == -EBUSY && strcmp(got.header.error, "full") == 0);
    refusal.header.total_bytes = sizeof(refusal.header);
    memset(&got, 0xff, sizeof(got));
    cr_assert_eq(prt_attach_reply_decode(&refusal, sizeof(refusal.header), &got, &err), 0, "%s", err.text);
    cr_assert_eq(got.session, 0);
    refusal.header.status = 1;
    cr_assert_eq(prt_attach_reply_decode(&refusal, sizeof(refusal.header), &got, &err), -EBADMSG);
    /* a reply of another version: its own line, which names both */
    refusal.header.status = -EPROTO;
    refusal.header.version = 1;
    snprintf(refusal.header.error, sizeof(refusal.header.error), "version 2 was spoken to a version 1");
    cr_assert_eq(prt_attach_reply_decode(&refusal, sizeof(refusal.header), &got, &err), -EPROTO);
    cr_assert_str_eq(err.text, "version 2 was spoken to a version 1");
}

Test(proto, replay_table)
{
    struct prt_replay *t = prt_replay_new();
    size_t n = 0;
    cr_assert_null(prt_replay_find(t, 1, 1, &n));
    cr_assert_null(prt_replay_find(t, 0, 0, &n), "a free entry was found");
    cr_assert_eq(prt_replay_add(t, 1, 1, "one", 4), 0);
    cr_assert_eq(prt_replay_add(t, 2, 1, "two", 4), 0);
    cr_assert_str_eq(prt_replay_find(t, 1, 1, &n), "one");
    cr_assert_str_eq(prt_replay_find(t, 2, 1, &n), "two");
    cr_assert_eq(n, 4);
    cr_assert_null(prt_replay_find(t, 1, 2, &n));
    for (uint64_t id = 2; id < 2 + PRT_REPLAY_ENTRIES - 2; id++)
        prt_replay_add(t, 1, id, "x", 2);
    cr_assert_not_null(prt_replay_find(t, 1, 1, &n), "given up too early");
    prt_replay_add(t, 1, 5000, "x", 2);
    cr_assert_null(prt_replay_find(t, 1, 1, &n), "the oldest goes first");
    cr_assert_not_null(prt_replay_find(t, 2, 1, &n));
    prt_replay_free(&t);
    prt_replay_free(&t);
}

Test(proto, instance_names)
{
    struct shm_error err;
    const char *good[] = {"a", "default", "a-b_0", "0123456789abcdef0123456789abcdef"};
    const char *bad[] = {"", "A", "a/b", "..", "a b", "a\n", "\xc3\xa4", "0123456789abcdef0123456789abcdef0"};
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++)
        cr_assert_eq(prt_path_check_instance(good[i], &err), 0, "%s", good[i]);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        cr_assert_eq(prt_path_check_instance(bad[i], &err), -EINVAL, "%s", bad[i]);
}

Test(proto, paths)
{
    struct prt_paths p;
    struct shm_error err = {0};
    cr_assert_eq(prt_paths_make("/x/", NULL, &p, &err), 0);
    cr_assert_str_eq(p.dir, "/x/expertd/default");
    cr_assert_str_eq(p.socket, "/x/expertd/default/control.sock");
    cr_assert_str_eq(p.store, "/x/expertd/default/store");
    setenv("XDG_RUNTIME_DIR", "/run/user/1", 1);
    cr_assert_eq(prt_paths_make(NULL, "i", &p, &err), 0);
    cr_assert_str_eq(p.dir, "/run/user/1/expertd/i");
    unsetenv("XDG_RUNTIME_DIR");
    int rc = prt_paths_make(NULL, "i", &p, &err);
    if (geteuid() == 0)
        cr_assert_str_eq(p.dir, "/run/expertd/i");
    else
        cr_assert(rc == -ENOENT && strstr(err.text, "--runtime-dir"));
    /* 107 bytes of socket path fit, 108 abort the library below */
    char dir[2048] = "/";
    size_t fits = PRT_SOCKET_BYTES - 1 - strlen("/expertd/default/control.sock");
    memset(dir + 1, 'd', fits - 1);
    cr_assert_eq(prt_paths_make(dir, NULL, &p, &err), 0, "%s", err.text);
    cr_assert_eq(strlen(p.socket), PRT_SOCKET_BYTES - 1);
    dir[fits] = 'd';
    cr_assert_eq(prt_paths_make(dir, NULL, &p, &err), -ENAMETOOLONG);
    cr_assert(strstr(err.text, "--runtime-dir"));
    memset(dir + 1, 'd', sizeof(dir) - 2);
    cr_assert_eq(prt_paths_make(dir, NULL, &p, &err), -ENAMETOOLONG);
    struct prt_server *server = NULL;
    cr_assert_eq(prt_server_open(dir, &server, &err), -ENAMETOOLONG);
}

Test(proto, directories)
{
    char dir[64] = "/tmp/t_proto-XXXXXX", parent[80];
    struct prt_paths p;
    struct shm_error err = {0};
    struct stat st;
    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(prt_paths_make(dir, "one", &p, &err), 0);
    cr_assert_eq(prt_paths_check(&p, &err), -ENOENT);
    umask(0);
    cr_assert_eq(prt_paths_create(&p, &err), 0, "%s", err.text);
    cr_assert_eq(prt_paths_create(&p, &err), 0, "twice: %s", err.text);
    cr_assert(stat(p.dir, &st) == 0 && (st.st_mode & 0777) == 0700);
    chmod(p.dir, 0777);
    cr_assert_eq(prt_paths_check(&p, &err), -EPERM);
    cr_assert(strstr(err.text, "chmod"), "%s", err.text);
    chmod(p.dir, 0700);
    if (geteuid() == 0) {
        cr_assert_eq(chown(p.dir, 12345, 12345), 0);
        cr_assert_eq(prt_paths_check(&p, &err), -EPERM);
        cr_assert(strstr(err.text, "12345"), "%s", err.text);
    }
    rmdir(p.dir);
    cr_assert_eq(symlink("/tmp", p.dir), 0);
    cr_assert_eq(prt_paths_create(&p, &err), -ENOTDIR, "a link was followed");
    unlink(p.dir);
    snprintf(parent, sizeof(parent), "%s/expertd", dir);
    rmdir(parent);
    rmdir(dir);
    cr_assert_eq(prt_paths_create(&p, &err), -ENOENT);
    cr_assert(strstr(err.text, "--runtime-dir"), "%s", err.text);
}

Test(proto, segments)
{
    struct shm_error err = {0};
    void *base = NULL, *again = NULL;
    int fd, peer;
    cr_assert_eq(prt_segment_create("t", 8192, &fd, &base, &err), 0, "%s", err.text);
    cr_assert_lt(ftruncate(fd, 4096), 0, "it shrank");
    cr_assert_lt(ftruncate(fd, 16384), 0, "it grew");
    cr_assert_lt(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0, "it took another seal");
    cr_assert(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    cr_assert_eq(prt_peer_open(getpid(), (uint32_t)fd, 8192, "t", &peer, &err), 0, "%s", err.text);
    cr_assert(fcntl(peer, F_GETFD) & FD_CLOEXEC);
    cr_assert_eq(prt_file_map(peer, "t", 8192, true, &again, &err), 0, "%s", err.text);
    ((char *)base)[5000] = 'x';
    cr_assert_eq(((char *)again)[5000], 'x');
    cr_assert_eq(prt_file_map(peer, "t", 8193, true, &again, &err), -EBADMSG);
    close(peer);
    cr_assert_eq(prt_peer_open(getpid(), (uint32_t)fd, 8191, "t", &peer, &err), -EINVAL);
    cr_assert_lt(prt_segment_create("t", 0, &peer, NULL, &err), 0);
    cr_assert_lt(prt_segment_create("t", UINT64_MAX, &peer, NULL, &err), 0);
}

Test(proto, mapped_paths)
{
    char path[64] = "/tmp/t_proto-XXXXXX", link[80];
    struct shm_error err;
    void *base;
    uint64_t bytes;
    int fd = mkstemp(path);
    cr_assert_eq(write(fd, "0123456789", 10), 10);
    cr_assert_eq(prt_file_map_path(path, 10, false, &base, &bytes, &err), 0);
    cr_assert_eq(bytes, 10);
    cr_assert_eq(prt_file_map_path(path, 11, false, &base, &bytes, &err), -EBADMSG);
    snprintf(link, sizeof(link), "%s.link", path);
    cr_assert_eq(symlink(path, link), 0);
    cr_assert_eq(prt_file_map_path(link, 1, false, &base, &bytes, &err), -ELOOP);
    unlink(link);
    cr_assert_eq(mkfifo(link, 0600), 0);
    cr_assert_lt(prt_file_map_path(link, 1, false, &base, &bytes, &err), 0, "a pipe was mapped");
    unlink(link);
    unlink(path);
    cr_assert_eq(prt_file_map_path(path, 1, false, &base, &bytes, &err), -ENOENT);
}

Test(proto, processes)
{
    uint64_t start = 0, of_child = 0;
    int pidfd;
    cr_assert_eq(prt_process_start(getpid(), &start), 0);
    cr_assert_neq(start, 0);
    cr_assert(prt_process_alive(getpid(), start));
    cr_assert_not(prt_process_alive(getpid(), start + 1));
    cr_assert_not(prt_process_alive(0, start));
    cr_assert_not(prt_process_alive(-1, start));
    cr_assert_eq(prt_pidfd_open(getpid(), start + 1, &pidfd), -ESRCH);
    pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    cr_assert_eq(prt_process_start(pid, &of_child), 0);
    cr_assert_eq(prt_pidfd_open(pid, of_child, &pidfd), 0);
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    cr_assert_eq(poll(&p, 1, 0), 0);
    kill(pid, SIGKILL);
    cr_assert_eq(poll(&p, 1, 5000), 1);
    cr_assert_not(prt_process_alive(pid, of_child), "a zombie lives");
    waitpid(pid, NULL, 0);
    cr_assert_eq(prt_process_start(pid, &of_child), -ESRCH);
}

/* One request answered on a thread: what arrives twice is answered twice by the caller's table. */
static void *serve(void *arg)
{
    struct prt_server *server = arg;
    uint8_t bytes[4096];
    size_t n;
    for (int answered = 0; answered < 2;) {
        struct pollfd p = {.fd = prt_server_fd(server), .events = POLLIN};
        poll(&p, 1, 5000);
        int rc = prt_server_receive(server, bytes, sizeof(bytes), &n);
        if (rc == -EAGAIN)
            continue;
        prt_server_reply(server, bytes, n);
        answered++;
    }
    return NULL;
}

Test(proto, channel)
{
    char dir[64] = "/tmp/t_proto-XXXXXX", path[100];
    struct prt_server *server = NULL, *second = NULL;
    struct prt_channel *channel = NULL;
    struct shm_error err = {0};
    struct stat st;
    size_t n;
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/s", dir);
    umask(0);
    cr_assert_eq(prt_server_open(path, &server, &err), 0, "%s", err.text);
    cr_assert(stat(path, &st) == 0 && (st.st_mode & 077) == 0, "others may connect");
    cr_assert_eq(umask(0), 0, "umask was not restored");
    cr_assert_eq(prt_server_open(path, &second, &err), -EADDRINUSE, "two servers at one path");
    uint8_t buffer[64];
    cr_assert_eq(prt_server_receive(server, buffer, sizeof(buffer), &n), -EAGAIN);
    cr_assert_eq(prt_channel_connect(path, &channel, &err), 0, "%s", err.text);
    cr_assert_eq(prt_channel_request(channel, "early", 5, buffer, sizeof(buffer), &n, -1, 50), -ETIMEDOUT);
    cr_assert_eq(prt_server_receive(server, buffer, sizeof(buffer), &n), 0);
    prt_server_reply(server, "late", 4); /* superseded: must not be taken for the answer to the next */
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, serve, server), 0);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(prt_channel_request(channel, "hello", 5, buffer, sizeof(buffer), &n, -1, 5000), 0);
        cr_assert(n == 5 && memcmp(buffer, "hello", 5) == 0, "%.*s", (int)n, (char *)buffer);
    }
    pthread_join(thread, NULL);
    prt_channel_close(&channel);
    prt_server_close(&server);
    cr_assert_lt(stat(path, &st), 0, "the socket file stays");
    rmdir(dir);
}

Test(proto, client_without_expertd)
{
    char dir[64] = "/tmp/t_proto-XXXXXX", path[128];
    struct prt_client *client = NULL;
    struct prt_paths p;
    struct shm_error err = {0};
    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(prt_client_open(dir, NULL, 0, &client, &err), -ENOENT);
    cr_assert(strstr(err.text, "expertd --model"), "%s", err.text);
    cr_assert_eq(prt_paths_make(dir, NULL, &p, &err), 0);
    cr_assert_eq(prt_paths_create(&p, &err), 0);
    cr_assert_eq(prt_client_open(dir, NULL, 0, &client, &err), -ENOENT);
    int fd = open(p.store, O_RDWR | O_CREAT, 0600);
    cr_assert_eq(prt_client_open(dir, NULL, 0, &client, &err), -EBADMSG, "an empty store");
    cr_assert_eq(ftruncate(fd, sizeof(struct shm_store)), 0);
    cr_assert_lt(prt_client_open(dir, NULL, 0, &client, &err), 0, "a store of zeros");
    for (int i = -1; i <= 1; i += 2) { /* a whole one whose layout is shorter, or longer */
        struct shm_store store = {0};
        shm_header_init(&store.header, SHM_STORE_MAGIC, (uint64_t)((int)sizeof store + 64 * i), 1, 1);
        shm_header_publish(&store.header, 1);
        cr_assert_eq(ftruncate(fd, (off_t)((int)sizeof store + 64 * i)), 0);
        cr_assert_eq(pwrite(fd, &store.header, sizeof store.header, 0), (ssize_t)sizeof store.header);
        cr_assert_eq(prt_client_open(dir, NULL, 0, &client, &err), -EPROTO);
        cr_assert(strstr(err.text, "version"), "%s", err.text);
    }
    cr_assert_null(client);
    unlink(p.store);
    rmdir(p.dir);
    snprintf(path, sizeof(path), "%s/expertd", dir);
    rmdir(path);
    rmdir(dir);
}
