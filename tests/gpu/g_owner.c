/* SPDX-License-Identifier: MIT */
#include "tests/gpu/g_owner.h"

#include "kernels/krn_fatbin.h"
#include "shm/shm_bell.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define TAIL (2u << 20)

/* ---- the test's side ---- */

int owner_start(const char *argv0, struct owner *ret_owner)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        return -errno;
    pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        return -errno;
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(126);
        char number[16];
        snprintf(number, sizeof(number), "%d", fds[1]);
        fcntl(fds[1], F_SETFD, 0);
        execl("/proc/self/exe", argv0, "--owner", number, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    *ret_owner = (struct owner){.pid = pid, .fd = fds[0]};
    return 0;
}

int owner_send(struct owner *o, const struct owner_message *m)
{
    return send(o->fd, m, sizeof(*m), MSG_NOSIGNAL) == (ssize_t)sizeof(*m) ? 0 : -EPIPE;
}

int owner_receive(struct owner *o, struct owner_message *ret_m)
{
    return recv(o->fd, ret_m, sizeof(*ret_m), 0) == (ssize_t)sizeof(*ret_m) ? ret_m->status : -EPIPE;
}

int owner_call(struct owner *o, struct owner_message *m)
{
    int rc = owner_send(o, m);
    return rc < 0 ? rc : owner_receive(o, m);
}

int owner_open(struct owner *o, uint64_t slots, uint64_t slot_bytes)
{
    struct owner_message m = {.command = OWNER_OPEN, .slots = slots, .slot_bytes = slot_bytes};
    int rc = owner_call(o, &m);
    if (rc < 0)
        return rc;
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)o->pid, m.words_fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *words = fd < 0 ? MAP_FAILED
                         : mmap(NULL, sizeof(struct owner_words), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (words == MAP_FAILED)
        return -EIO;
    o->words = words;
    o->opened = m;
    return 0;
}

void owner_end(struct owner *o, bool kill_it)
{
    if (kill_it)
        kill(o->pid, SIGKILL);
    else
        owner_send(o, &(struct owner_message){.command = OWNER_END});
    waitpid(o->pid, NULL, 0);
    close(o->fd);
    if (o->words)
        munmap(o->words, sizeof(struct owner_words));
    *o = (struct owner){.fd = -1};
}

/* ---- the owner's ---- */

struct self {
    struct krn_cuda_device *device;
    krn_cuda_ptr ring, wrong, words_device;
    uint64_t slots, slot_bytes;
    void *stream, *busy_stream, *module, *check, *spin, *publish;
    struct owner_words *words;
    uint32_t *copy;
    int words_fd;
};

static int die(const char *what)
{
    fprintf(stderr, "owner: %s: %s %s\n", what, krn_cuda_detail()->name, krn_cuda_detail()->text);
    return -EIO;
}

static int open_ring(struct self *s, struct owner_message *m)
{
    struct shm_error err = {0};
    uint64_t begin_ns = shm_now_ns();
    int rc = krn_cuda_device_open(0, &s->device, &err);
    if (rc < 0) {
        fprintf(stderr, "owner: %s\n", err.text);
        return rc;
    }
    s->slots = m->slots;
    s->slot_bytes = m->slot_bytes;
    uint64_t ring_bytes = m->slots * m->slot_bytes;
    uint64_t bytes = (ring_bytes + 2 * (uint64_t)TAIL) / TAIL * TAIL;
    s->words_fd = memfd_create("owner-words", MFD_CLOEXEC);
    if (s->words_fd < 0 || ftruncate(s->words_fd, 8192) < 0)
        return -errno;
    s->words = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, s->words_fd, 0);
    s->copy = malloc(m->slot_bytes);
    krn_cuda_ptr flag;
    m->flag_offset = (ring_bytes + 255) / 256 * 256;
    if (s->words == MAP_FAILED || !s->copy || KRN_CUDA(mem_alloc, &s->ring, bytes) < 0 ||
        KRN_CUDA(mem_alloc, &s->wrong, TAIL) < 0 || KRN_CUDA(stream_create, &s->stream, 1) < 0 ||
        KRN_CUDA(stream_create, &s->busy_stream, 1) < 0)
        return die("memory");
    flag = s->ring + m->flag_offset;
    if (KRN_CUDA(memset_8_async, s->ring, 0xdb, ring_bytes, s->stream) < 0 ||
        KRN_CUDA(memset_8_async, flag, 0, 64, s->stream) < 0 ||
        KRN_CUDA(memset_8_async, s->wrong, 0, 4096, s->stream) < 0 ||
        KRN_CUDA(stream_synchronize, s->stream) < 0)
        return die("memset");
    if (KRN_CUDA(host_register, s->words, 8192, KRN_CUDA_HOST_PORTABLE | KRN_CUDA_HOST_DEVICEMAP) < 0 ||
        KRN_CUDA(host_pointer, &s->words_device, s->words, 0) < 0)
        return die("register");
    if (KRN_CUDA(ipc_get, &m->handle, s->ring) < 0)
        return die("handle");
    if (krn_fatbin_find("krn_publish") &&
        (krn_cuda_module("krn_publish", &s->module, &err) < 0 ||
         krn_cuda_kernel(s->module, "krn_check_stamp", 0, &s->check, &err) < 0 ||
         krn_cuda_kernel(s->module, "krn_spin", 0, &s->spin, &err) < 0 ||
         krn_cuda_kernel(s->module, "krn_publish", 0, &s->publish, &err) < 0)) {
        fprintf(stderr, "owner: %s\n", err.text);
        return -EIO;
    }
    memcpy(m->uuid.bytes, s->device->uuid, 16);
    m->words_fd = s->words_fd;
    m->open_ns = shm_now_ns() - begin_ns;
    return 0;
}

static int check_by_kernel(struct self *s, struct owner_message *m)
{
    krn_cuda_ptr flag = s->ring + (s->slots * s->slot_bytes + 255) / 256 * 256;
    for (uint64_t i = m->first; i < m->first + m->count; i++) {
        krn_cuda_ptr slot = s->ring + i % s->slots * s->slot_bytes;
        uint32_t stamp = stamp_of(i, m->blobs);
        void *arguments[] = {&slot, &m->words, &stamp, &s->wrong};
        if (KRN_CUDA(wait_32, s->stream, flag, (uint32_t)i + 1, KRN_CUDA_WAIT_GEQ) < 0 ||
            KRN_CUDA(launch, s->check, 128, 1, 1, 256, 1, 1, 0, s->stream, arguments, NULL) < 0 ||
            KRN_CUDA(write_64, s->stream, s->words_device + offsetof(struct owner_words, released), i + 1,
                     0) < 0)
            return die("check");
    }
    if (KRN_CUDA(copy_out_async, s->copy, s->wrong, 8, s->stream) < 0 ||
        KRN_CUDA(stream_synchronize, s->stream) < 0)
        return die("check");
    memcpy(&m->result, s->copy, 8);
    return 0;
}

static int check_by_copy(struct self *s, struct owner_message *m)
{
    krn_cuda_ptr flag = s->ring + (s->slots * s->slot_bytes + 255) / 256 * 256;
    m->result = 0;
    for (uint64_t i = m->first; i < m->first + m->count; i++) {
        krn_cuda_ptr slot = s->ring + i % s->slots * s->slot_bytes;
        if (KRN_CUDA(wait_32, s->stream, flag, (uint32_t)i + 1, KRN_CUDA_WAIT_GEQ) < 0 ||
            KRN_CUDA(copy_out_async, s->copy, slot, m->words * 4, s->stream) < 0 ||
            KRN_CUDA(stream_synchronize, s->stream) < 0)
            return die("check");
        for (uint64_t w = 0; w < m->words; w++)
            m->result += s->copy[w] != stamp_of(i, m->blobs);
        atomic_store_explicit(&s->words->released, i + 1, memory_order_release);
    }
    return 0;
}

/* Full-chip kernels of 1 ms, two deep, until the next message is there. */
static int be_busy(struct self *s, int fd, struct owner_message *m)
{
    uint64_t ns = 1000000;
    void *arguments[] = {&ns, &s->wrong};
    struct owner_message peek;
    void *event[2];
    m->result = 0;
    if (!s->spin || KRN_CUDA(event_create, &event[0], 2) < 0 || KRN_CUDA(event_create, &event[1], 2) < 0)
        return die("busy");
    while (recv(fd, &peek, sizeof(peek), MSG_PEEK | MSG_DONTWAIT) < 0) {
        if (m->result > 1 && KRN_CUDA(event_synchronize, event[m->result % 2]) < 0)
            return die("busy");
        if (KRN_CUDA(launch, s->spin, (unsigned)s->device->multiprocessors, 1, 1, 1024, 1, 1, 0,
                     s->busy_stream, arguments, NULL) < 0 ||
            KRN_CUDA(event_record, event[m->result % 2], s->busy_stream) < 0)
            return die("busy");
        m->result++;
    }
    return KRN_CUDA(stream_synchronize, s->busy_stream);
}

/* counts[e] = e % 3: the mask and the tokens that the kernel publishes follow. */
static int publish(struct self *s, struct owner_message *m)
{
    uint32_t experts = 128, block = 128;
    for (uint32_t e = 0; e < experts; e++)
        s->copy[e] = e % 3;
    krn_cuda_ptr counts = s->wrong + 8192, base = s->words_device;
    krn_cuda_ptr mask = base + offsetof(struct owner_words, mask);
    krn_cuda_ptr tokens = base + offsetof(struct owner_words, tokens);
    krn_cuda_ptr seq = base + offsetof(struct owner_words, route_seq);
    void *arguments[] = {&counts, &experts, &mask, &tokens, &seq, &m->first};
    if (!s->publish || KRN_CUDA(copy_in_async, counts, s->copy, experts * 4, s->stream) < 0 ||
        KRN_CUDA(launch, s->publish, 1, 1, 1, block, 1, 1, 0, s->stream, arguments, NULL) < 0 ||
        KRN_CUDA(stream_synchronize, s->stream) < 0)
        return die("publish");
    return 0;
}

int owner_main(int fd)
{
    struct self s = {0};
    struct owner_message m;
    while (recv(fd, &m, sizeof(m), 0) == (ssize_t)sizeof(m) && m.command != OWNER_END) {
        size_t free_bytes = 0, total;
        switch ((enum owner_command)m.command) {
        case OWNER_OPEN:
            m.status = open_ring(&s, &m);
            break;
        case OWNER_CHECK:
            m.status = m.kernels && s.check ? check_by_kernel(&s, &m) : check_by_copy(&s, &m);
            break;
        case OWNER_BUSY:
            send(fd, &m, sizeof(m), MSG_NOSIGNAL); /* begun */
            m.status = be_busy(&s, fd, &m);
            break;
        case OWNER_PUBLISH:
            m.status = publish(&s, &m);
            break;
        case OWNER_FREE_BYTES:
            m.status = KRN_CUDA(memory_info, &free_bytes, &total);
            m.result = free_bytes;
            break;
        case OWNER_IDLE:
        case OWNER_END:
            m.status = 0;
            break;
        }
        send(fd, &m, sizeof(m), MSG_NOSIGNAL);
    }
    free(s.copy);
    krn_cuda_device_close(&s.device);
    return 0;
}
