/* SPDX-License-Identifier: MIT */
/* The layout that processes of different builds share, spelled out. No code: it compiles or it does not. What
 * fails here needs a new magic of its segment (SHM_STORE_MAGIC, SHM_WORKER_MAGIC, SHM_EVENT_MAGIC,
 * SHM_ARENA_MAGIC) with the new numbers. */
#include "shm/shm_arena.h"
#include "shm/shm_event.h"
#include "shm/shm_park.h"
#include "shm/shm_server.h"
#include "shm/shm_store.h"
#include "shm/shm_worker.h"

#define AT(type, field, offset)                                                                              \
    _Static_assert(offsetof(struct type, field) == (offset), "a new magic, please")
#define SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), "a new magic, please")

SIZE(shm_header, 64);
AT(shm_header, magic, 0);
AT(shm_header, header_bytes, 8);
AT(shm_header, writer_pid, 12);
AT(shm_header, writer_start, 16);
AT(shm_header, features, 24);
AT(shm_header, total_bytes, 32);
AT(shm_header, epoch, 40);
AT(shm_header, created_ns, 48);
AT(shm_header, counters, 56);

SIZE(shm_bell, 8);
AT(shm_bell, count, 0);
AT(shm_bell, waiters, 4);

SIZE(shm_geometry, 32);
AT(shm_geometry, layers, 0);
AT(shm_geometry, experts, 4);
AT(shm_geometry, ring, 8);
AT(shm_geometry, group_entries, 12);
AT(shm_geometry, groups_per_layer, 16);
AT(shm_geometry, slot_bytes, 24);

SIZE(shm_descriptor, 32);
AT(shm_descriptor, seq, 0);
AT(shm_descriptor, group_base, 8);
AT(shm_descriptor, tokens, 16);
AT(shm_descriptor, position, 20);
AT(shm_descriptor, flags, 24);

SIZE(shm_report, 160);
AT(shm_report, generation, 0);
AT(shm_report, seq, 8);
AT(shm_report, tokens, 16);
AT(shm_report, policy, 20);
AT(shm_report, order, 24);
AT(shm_report, depth, 28);
AT(shm_report, ring, 32);
AT(shm_report, held_off, 36);
AT(shm_report, result, 40);
AT(shm_report, layers, 44);
AT(shm_report, routed, 48);
AT(shm_report, entries, 56);
AT(shm_report, copied, 64);
AT(shm_report, dropped, 72);
AT(shm_report, wasted, 80);
AT(shm_report, bytes, 88);
AT(shm_report, wasted_bytes, 96);
AT(shm_report, link_ns, 104);
AT(shm_report, span_ns, 112);
AT(shm_report, wait_ns, 120);
AT(shm_report, outstanding_max, 128);
AT(shm_report, cpu_ns, 136);

SIZE(shm_worker, 12416);
AT(shm_worker, header, 0);
AT(shm_worker, geometry, 64);
AT(shm_worker, stream_seq, 128);
AT(shm_worker, released_groups, 136);
AT(shm_worker, cancel_seq, 144);
AT(shm_worker, wait_ns, 152);
AT(shm_worker, layer, 160);
AT(shm_worker, descriptor, 192);
AT(shm_worker, issuer_bell, 256);
AT(shm_worker, landed_bell, 264);
AT(shm_worker, landed_groups, 320);
AT(shm_worker, done_seq, 384);
AT(shm_worker, result, 392);
AT(shm_worker, detached, 396);
AT(shm_worker, issued_entries, 400);
AT(shm_worker, landed_entries, 408);
AT(shm_worker, dropped_entries, 416);
AT(shm_worker, issue_layer, 424);
AT(shm_worker, policy, 432);
AT(shm_worker, order, 436);
AT(shm_worker, depth, 440);
AT(shm_worker, held_off, 444);
AT(shm_worker, error_text, 448);
AT(shm_worker, report, 960);
AT(shm_worker, link, 11200);
AT(shm_worker, compute, 12224);
AT(shm_worker, server_fd, 12352);
AT(shm_worker, trace_fd, 12356);

SIZE(shm_route, 192);
AT(shm_route, seq, 0);
AT(shm_route, published_ns, 8);
AT(shm_route, mask, 16);

SIZE(shm_store_worker, 144);
AT(shm_store_worker, pid, 0);
AT(shm_store_worker, control_fd, 4);
AT(shm_store_worker, start, 8);
AT(shm_store_worker, session, 16);
AT(shm_store_worker, attached_ns, 24);
AT(shm_store_worker, name, 32);
AT(shm_store_worker, layers, 96);
AT(shm_store_worker, experts, 100);
AT(shm_store_worker, ring, 104);
AT(shm_store_worker, groups_per_layer, 108);
AT(shm_store_worker, slot_bytes, 112);
AT(shm_store_worker, device, 120);
AT(shm_store_worker, device_index, 124);

SIZE(shm_store, 12800);
AT(shm_store, header, 0);
AT(shm_store, state, 64);
AT(shm_store, instance, 72);
AT(shm_store, model_path, 136);
AT(shm_store, model_name, 1160);
AT(shm_store, arena_path, 1288);
AT(shm_store, fingerprint, 2312);
AT(shm_store, arena_bytes, 2328);
AT(shm_store, pinned, 2336);
AT(shm_store, huge_pages, 2340);
AT(shm_store, reader, 2344);
AT(shm_store, detail, 2472);
AT(shm_store, policy, 2728);
AT(shm_store, order, 2732);
AT(shm_store, depth, 2736);
AT(shm_store, floor, 2740);
AT(shm_store, link_gbps, 2744);
AT(shm_store, link_latency_us, 2752);
AT(shm_store, heartbeat_ns, 2760);
AT(shm_store, device, 2768);
AT(shm_store, park_note, 2896);
AT(shm_store, counters, 3072);
AT(shm_store, worker, 3584);

SIZE(shm_server, 2176);
AT(shm_server, oldest_ns, 64);
AT(shm_server, counters, 128);

SIZE(shm_event_field, 24);
AT(shm_event_field, name, 0);
AT(shm_event_field, offset, 16);
AT(shm_event_field, bytes, 17);
AT(shm_event_field, format, 18);
AT(shm_event_field, set, 19);

SIZE(shm_event_info, 192);
AT(shm_event_info, name, 0);
AT(shm_event_info, span, 24);
AT(shm_event_info, kind, 40);
AT(shm_event_info, phase, 41);
AT(shm_event_info, fields, 42);
AT(shm_event_info, field, 48);

SIZE(shm_event_value, 32);
AT(shm_event_value, set, 0);
AT(shm_event_value, value, 4);
AT(shm_event_value, name, 8);

SIZE(shm_event_ring, 192);
AT(shm_event_ring, next, 0);
AT(shm_event_ring, offset, 64);
AT(shm_event_ring, capacity, 72);
AT(shm_event_ring, first, 80);
AT(shm_event_ring, owned, 88);
AT(shm_event_ring, pid, 92);
AT(shm_event_ring, session, 96);
AT(shm_event_ring, thread, 104);
AT(shm_event_ring, name, 120);

SIZE(shm_event_segment, 192);
AT(shm_event_segment, header, 0);
AT(shm_event_segment, program, 64);
AT(shm_event_segment, realtime_ns, 80);
AT(shm_event_segment, infos, 88);
AT(shm_event_segment, info_bytes, 92);
AT(shm_event_segment, values, 96);
AT(shm_event_segment, value_bytes, 100);
AT(shm_event_segment, rings, 104);
AT(shm_event_segment, ring_bytes, 108);
AT(shm_event_segment, event_bytes, 112);
AT(shm_event_segment, infos_offset, 120);
AT(shm_event_segment, values_offset, 128);
AT(shm_event_segment, rings_offset, 136);

SIZE(shm_park_head, 1024);
AT(shm_park_head, key, 0);
AT(shm_park_head, parent, 16);
AT(shm_park_head, block_bytes, 32);
AT(shm_park_head, tokens, 40);
AT(shm_park_head, exact, 44);
AT(shm_park_head, ids, 48);

SIZE(shm_arena, 224);
AT(shm_arena, header, 0);
AT(shm_arena, state, 64);
AT(shm_arena, generation, 72);
AT(shm_arena, fingerprint, 80);
AT(shm_arena, catalog_offset, 96);
AT(shm_arena, catalog_bytes, 104);
AT(shm_arena, catalog_sum, 112);
AT(shm_arena, sums_offset, 120);
AT(shm_arena, sums_sum, 128);
AT(shm_arena, ready_offset, 136);
AT(shm_arena, data_offset, 144);
AT(shm_arena, data_bytes, 152);

SIZE(shm_string, 8);
AT(shm_string, offset, 0);
AT(shm_string, bytes, 4);

SIZE(shm_tensor, 120);
AT(shm_tensor, name, 0);
AT(shm_tensor, type, 64);
AT(shm_tensor, n_dims, 68);
AT(shm_tensor, dim, 72);
AT(shm_tensor, offset, 104);
AT(shm_tensor, bytes, 112);

SIZE(shm_part, 24);
AT(shm_part, type, 0);
AT(shm_part, rows, 4);
AT(shm_part, cols, 8);
AT(shm_part, offset, 12);
AT(shm_part, bytes, 16);

SIZE(shm_layer, 96);
AT(shm_layer, blobs_offset, 0);
AT(shm_layer, blob_bytes, 8);
AT(shm_layer, blob_stride, 16);
AT(shm_layer, gate, 24);
AT(shm_layer, up, 48);
AT(shm_layer, down, 72);

SIZE(shm_hparams, 240);
AT(shm_hparams, architecture, 0);
AT(shm_hparams, name, 32);
AT(shm_hparams, layers, 160);
AT(shm_hparams, hidden, 164);
AT(shm_hparams, vocab, 168);
AT(shm_hparams, context, 172);
AT(shm_hparams, heads, 176);
AT(shm_hparams, kv_heads, 180);
AT(shm_hparams, head_dim, 184);
AT(shm_hparams, value_dim, 188);
AT(shm_hparams, experts, 192);
AT(shm_hparams, experts_used, 196);
AT(shm_hparams, expert_ffn, 200);
AT(shm_hparams, norm_topk, 204);
AT(shm_hparams, rms_eps, 208);
AT(shm_hparams, rope_base, 212);
AT(shm_hparams, tied_head, 216);

SIZE(shm_strings, 24);
AT(shm_strings, count, 0);
AT(shm_strings, offsets, 8);
AT(shm_strings, bytes, 16);

SIZE(shm_tokenizer, 112);
AT(shm_tokenizer, model, 0);
AT(shm_tokenizer, pre, 8);
AT(shm_tokenizer, chat_template, 16);
AT(shm_tokenizer, tokens, 24);
AT(shm_tokenizer, merges, 48);
AT(shm_tokenizer, types, 72);
AT(shm_tokenizer, bos, 80);
AT(shm_tokenizer, eos, 84);
AT(shm_tokenizer, add_bos, 92);
AT(shm_tokenizer, eot, 96);
AT(shm_tokenizer, add_space_prefix, 100);
AT(shm_tokenizer, scores, 104);

SIZE(shm_catalog, 376);
AT(shm_catalog, hparams, 0);
AT(shm_catalog, n_dense, 240);
AT(shm_catalog, n_layers, 244);
AT(shm_catalog, dense, 248);
AT(shm_catalog, layers, 256);
AT(shm_catalog, tokenizer, 264);
