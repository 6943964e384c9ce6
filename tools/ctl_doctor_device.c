/* SPDX-License-Identifier: MIT */
/* Doctor: GPUs, their driver and their links. */
#include "proto/prt_memory.h"
#include "proto/prt_mps.h"
#include "tools/ctl_doctor.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define PCI        "/sys/bus/pci/devices"
#define LINK_SHARE 0.6 /* of PCIe's rate: below it something is wrong */
/* Bytes of a copy that fills the link: what the driver spends on one (3 to 6 us) is little of its time. */
#define LINK_COPY_MIN (1u << 20)

static double number_of(const struct doctor *d, const char *address, const char *file)
{
    char path[512], text[64];
    snprintf(path, sizeof path, PCI "/%.64s/%s", address, file);
    return prt_text_read(d->root, path, text, sizeof text) ? strtod(text, NULL) : 0;
}

static bool is_gpu(const struct doctor *d, const char *address)
{
    char path[512], text[64];
    snprintf(path, sizeof path, PCI "/%.64s/vendor", address);
    if (!prt_text_read(d->root, path, text, sizeof text) || strtoul(text, NULL, 16) != 0x10de)
        return false;
    snprintf(path, sizeof path, PCI "/%.64s/class", address);
    /* 0x03xxxx: display and 3D controllers; others of this vendor are sound and switches */
    return prt_text_read(d->root, path, text, sizeof text) && strtoul(text, NULL, 16) >> 16 == 3;
}

static int by_address(const void *a, const void *b)
{
    return strcmp(((const struct doctor_gpu *)a)->address, ((const struct doctor_gpu *)b)->address);
}

void doctor_find_gpus(struct doctor *d)
{
    char path[512], text[64];
    snprintf(path, sizeof path, "%.400s" PCI, d->root);
    DIR *dir = opendir(path);
    if (!dir)
        return;
    for (struct dirent *e; d->gpus < DOCTOR_GPUS && (e = readdir(dir));) {
        if (e->d_name[0] == '.' || strlen(e->d_name) >= sizeof d->gpu->address || !is_gpu(d, e->d_name))
            continue;
        struct doctor_gpu *g = &d->gpu[d->gpus++];
        *g = (struct doctor_gpu){.node = -1};
        snprintf(g->address, sizeof g->address, "%.31s", e->d_name);
        snprintf(path, sizeof path, PCI "/%.64s/numa_node", g->address);
        if (prt_text_read(d->root, path, text, sizeof text))
            g->node = atoi(text);
        g->speed = number_of(d, g->address, "current_link_speed");
        g->speed_max = number_of(d, g->address, "max_link_speed");
        g->width = (unsigned)number_of(d, g->address, "current_link_width");
        g->width_max = (unsigned)number_of(d, g->address, "max_link_width");
    }
    closedir(dir);
    qsort(d->gpu, d->gpus, sizeof *d->gpu, by_address);
}

/* dlsym hands out object pointers; POSIX makes them functions. */
static void resolve(void *library, const char *name, void *ret_function)
{
    void *found = dlsym(library, name);
    memcpy(ret_function, &found, sizeof found);
}

typedef int (*get_address_fn)(const char *symbol, void **ret, int version, uint64_t flags, int *ret_status);

/* As the loader of expertd asks for them. */
static bool address_of(get_address_fn get_address, const char *name, void *ret_function)
{
    void *found = NULL;
    int status = 0;
    if (get_address(name, &found, 2000, 0, &status) || status || !found)
        return false;
    memcpy(ret_function, &found, sizeof found);
    return true;
}

void doctor_check_driver(struct doctor *d)
{
    static const char check[] = "driver";
    void *library = dlopen(d->library, RTLD_NOW | RTLD_LOCAL); /* never closed: it has exit handlers */
    if (!library) {
        if (d->gpus)
            doctor_say(
                d, DOCTOR_PROBLEM, check,
                "GPU %s is there, but %s can't be opened: install NVIDIA's driver (in a container: start "
                "it with the GPU, --gpus all)",
                d->gpu[0].address, d->library);
        else
            doctor_say(
                d, DOCTOR_WARNING, check,
                "no CUDA driver (%s) and no NVIDIA GPU: everything is computed on the host device; install "
                "the driver if there should be a GPU",
                d->library);
        return;
    }
    int (*version_of)(int *), (*init)(unsigned) = NULL, (*count_of)(int *) = NULL, version = 0, count = 0;
    get_address_fn get_address;
    resolve(library, "cuDriverGetVersion", &version_of);
    resolve(library, "cuGetProcAddress_v2", &get_address);
    if (!version_of || version_of(&version)) {
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "%s is no CUDA driver: it does not say its version; reinstall it", d->library);
        return;
    }
    int major = version / 1000, minor = version % 1000 / 10;
    if (version < DOCTOR_DRIVER_MIN) {
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "CUDA driver %d.%d is too old: %d.%d or later is needed, update NVIDIA's driver", major,
                   minor, DOCTOR_DRIVER_MIN / 1000, DOCTOR_DRIVER_MIN % 1000 / 10);
        return;
    }
    if (!get_address || !address_of(get_address, "cuInit", &init) ||
        !address_of(get_address, "cuDeviceGetCount", &count_of)) {
        doctor_say(d, DOCTOR_PROBLEM, check,
                   "CUDA driver %d.%d lacks cuInit or cuDeviceGetCount: reinstall it", major, minor);
        return;
    }
    int rc = init(0);
    if (!rc)
        rc = count_of(&count);
    if (rc || count < 1) {
        doctor_say(
            d, DOCTOR_PROBLEM, check,
            "CUDA driver %d.%d shows no device (error %d): see nvidia-smi, CUDA_VISIBLE_DEVICES and the "
            "rights on /dev/nvidia*",
            major, minor, rc);
        return;
    }
    d->driver = true;
    doctor_say(d, DOCTOR_OK, check, "CUDA driver %d.%d, %d device%s", major, minor, count,
               count == 1 ? "" : "s");
}

/* The GPU that most workers share, with their number. */
static uint32_t shared_gpu(const struct doctor *d, uint32_t *ret_workers)
{
    uint32_t gpu = 0;
    *ret_workers = 0;
    for (uint32_t i = 0; d->instance && i < d->instance->workers; i++) {
        const struct shm_store_worker *a = &d->instance->worker[i].row;
        uint32_t n = 0;
        for (uint32_t k = 0; a->device == PRT_DEVICE_CUDA && k < d->instance->workers; k++)
            n += d->instance->worker[k].row.device == PRT_DEVICE_CUDA &&
                 d->instance->worker[k].row.device_index == a->device_index;
        if (n > *ret_workers)
            *ret_workers = n, gpu = a->device_index;
    }
    return gpu;
}

void doctor_check_mps(struct doctor *d)
{
    static const char check[] = "mps";
    char where[256];
    uint32_t workers, gpu = shared_gpu(d, &workers);
    bool found = prt_mps_found(where, sizeof where);
    if (found)
        doctor_say(d, DOCTOR_OK, check, "a control daemon answers in %.200s", where);
    else if (workers > 1)
        doctor_say(
            d, DOCTOR_WARNING, check,
            "%u workers share GPU %u and no MPS control daemon answers in %.120s: they take turns of about "
            "2 ms and lose a fifth; run nvidia-cuda-mps-control -d before expertd and the workers",
            workers, gpu, where);
    else
        doctor_say(d, DOCTOR_OK, check, "no control daemon in %.200s; only workers that share a GPU want one",
                   where);
}

/* Bytes a second that a link carries at most, coding counted. */
static double rate_of(double speed, unsigned width)
{
    return speed * 1e9 / 8 * width * (speed < 6 ? 8.0 / 10 : 128.0 / 130);
}

static void check_gpu_link(struct doctor *d, const struct doctor_gpu *g)
{
    static const char check[] = "link";
    if (!g->width || !g->speed) {
        doctor_say(d, DOCTOR_WARNING, check,
                   "GPU %s: sysfs does not say its PCIe link: look with nvidia-smi -q", g->address);
        return;
    }
    if (g->width < g->width_max) {
        doctor_say(
            d, DOCTOR_WARNING, check,
            "GPU %s: PCIe x%u of x%u lanes, %.1f GB/s at most: put it into a slot with all lanes, reseat "
            "it, look for bifurcation in the firmware's settings",
            g->address, g->width, g->width_max, rate_of(g->speed_max, g->width) / 1e9);
        return;
    }
    doctor_say(d, DOCTOR_OK, check, "GPU %s: PCIe %g GT/s x%u, %.1f GB/s at most%s", g->address, g->speed_max,
               g->width, rate_of(g->speed_max, g->width) / 1e9,
               g->speed < g->speed_max ? " (slower now: an idle link saves power)" : "");
}

/* Counted by reason, without what did not go over the link. */
static double over_link(const struct ctl_worker *w, const char *name, uint32_t resident_word)
{
    return (double)(shm_counter_total(shm_counter_find(SHM_BLOCK_LINK, name), w->link) -
                    w->link[resident_word]);
}

/* What a running expertd's links did. */
static void check_measured(struct doctor *d, const struct ctl_worker *w)
{
    static const char check[] = "link";
    uint64_t busy_ns = w->link[SHM_LINK_WORD_LINK_BUSY_NS], peak = w->link[SHM_LINK_WORD_LINK_PEAK];
    uint32_t pid = atomic_load(&w->row.pid);
    if (!w->mapped || !busy_ns || !peak)
        return;
    double bytes = over_link(w, "link_bytes", SHM_LINK_WORD_LINK_BYTES + SHM_COPY_REASON_RESIDENT);
    double copies = over_link(w, "link_copies", SHM_LINK_WORD_LINK_COPIES + SHM_COPY_REASON_RESIDENT);
    double possible = 0;
    for (uint32_t i = 0; w->row.device == PRT_DEVICE_CUDA && i < d->gpus; i++) {
        double rate = rate_of(d->gpu[i].speed_max, d->gpu[i].width);
        possible = !possible || rate < possible ? rate : possible;
    }
    if (w->link[SHM_LINK_WORD_LINK_PACE])
        doctor_say(d, DOCTOR_WARNING, check,
                   "worker %u: its link is paced to %.3g GB/s: expertctl configure --worker %u --link-gbps 0 "
                   "lifts it",
                   pid, (double)w->link[SHM_LINK_WORD_LINK_PACE] / 1e9, pid);
    else if (possible > 0 && bytes < copies * LINK_COPY_MIN)
        doctor_say(
            d, DOCTOR_OK, check,
            "worker %u: %.1f GB/s while busy: its copies of %.0f KiB are too small to tell of the link", pid,
            bytes / (double)busy_ns, bytes / copies / 1024);
    else if (possible > 0 && (double)peak < LINK_SHARE * possible)
        doctor_say(
            d, DOCTOR_WARNING, check,
            "worker %u: %.1f GB/s while busy, %.1f at its best, of %.1f that PCIe carries: look at the "
            "findings on numa and memlock, and at what else uses the link",
            pid, bytes / (double)busy_ns, (double)peak / 1e9, possible / 1e9);
    else
        doctor_say(d, DOCTOR_OK, check, "worker %u: measured %.2f GB/s while busy, %.2f at its best", pid,
                   bytes / (double)busy_ns, (double)peak / 1e9);
}

void doctor_check_link(struct doctor *d)
{
    for (uint32_t i = 0; i < d->gpus; i++)
        check_gpu_link(d, &d->gpu[i]);
    if (!d->gpus)
        doctor_say(d, DOCTOR_OK, "link", "no GPU: no PCIe link to look at");
    for (uint32_t i = 0; d->instance && i < d->instance->workers; i++)
        check_measured(d, &d->instance->worker[i]);
}
