#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Turns what expert-bench --json says (standard input) into a Markdown table, as README.md has it. Argument "decode":
what was written behind the reads instead."""
import json
import sys

o = json.load(sys.stdin)
decode = "decode" in sys.argv[1:]
print(f"{o['device']}; ring {o['ring']} slots; link peak {o['peak_gbps']:.2f} GB/s ({o['peak_from']})\n")
if decode:
    print("| behind | setting | tokens/s | MB a token | share of the link's bound | issuer us/copy |\n|---|---|---|---|---|---|")
else:
    print("| read | setting | ms (low..high) | tokens/s | ratio to the first (low..high) | routed | GB copied | waste | link "
          "efficiency | issuer us/copy |\n|---|---|---|---|---|---|---|---|---|---|")
for read in o["reads"]:
    name = f"{read['tokens']:,} tokens" + (f" behind {read['at']:,}" if read["at"] else "")
    for s in read["settings"]:
        setting = s["setting"]
        if decode:
            if not s["identical_pair"]:
                mb = s["decode_bytes_per_token"] / 1e6
                bound = o["peak_gbps"] * 1e3 / mb if mb and o["peak_gbps"] else 0
                share = f"{100 * s['decode_tokens_per_s'] / bound:.0f}% of {bound:.0f}" if bound else ""
                print(f"| {name} | {setting} | {s['decode_tokens_per_s']:.1f} | {mb:,.0f} | {share} | {s['decode_issuer_us_per_copy']:.1f} |")
            continue
        ms, ratio = s["read_ms"], s["ratio"]
        print(f"| {name} | {setting} | {ms['median']:.1f} ({ms['low']:.1f}..{ms['high']:.1f}) | {s['tokens_per_s']:,.0f} | "
              f"{ratio['median']:.3f} ({ratio['low']:.3f}..{ratio['high']:.3f}) | {100 * s['routed_share']:.1f}% | "
              f"{s['bytes_copied'] / 1e9:.2f} | {100 * s['waste']:.1f}% | {100 * s['link_efficiency']:.1f}% | "
              f"{s['issuer_us_per_copy']:.1f} |")
        name = ""
print(f"\n{min(r['rounds'] for r in o['reads'])} to {max(r['rounds'] for r in o['reads'])} interleaved rounds; logits "
      + ("of the last token equal under all settings" if o["same_bits"] else "DIFFER"))
