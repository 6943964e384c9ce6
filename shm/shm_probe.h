/* SPDX-License-Identifier: MIT */
/*
 * Probes for tracers outside of the program (USDT): a named no-op with its
 * arguments noted beside the code, found by bpftrace, perf and gdb. Where
 * sys/sdt.h was not there at build time they are nothing at all.
 *
 * The functions that write events (exd_event.h, inf_event.h, the host link)
 * hold the probes; nobody else needs this header.
 */
#ifndef SHM_PROBE_H
#define SHM_PROBE_H

#ifdef EXPERTD_PROBES
#define SDT_USE_VARIADIC
#include <sys/sdt.h>
#define SHM_PROBE(provider, name, ...) STAP_PROBEV(provider, name, __VA_ARGS__)
#else
#define SHM_PROBE(provider, name, ...) ((void)0)
#endif

#endif
