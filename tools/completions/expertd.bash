# SPDX-License-Identifier: MIT
# bash completion for expertd, inferd, expertctl, expert-top, expert-bench and mkmodel. No helper of bash-completion is used, so
# it works by `source` alone, too. tests/e2e/test_help.py holds it against every program's --help.

# Names of instances under the runtime directory.
_expertd_instances() {
    local top=${XDG_RUNTIME_DIR:-/run} i
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ ${COMP_WORDS[i]} == --runtime-dir ]] && top=${COMP_WORDS[i + 1]}
    done
    local dir
    for dir in "$top"/expertd/*/; do
        [[ -d $dir ]] && basename "$dir"
    done
}

# Fills COMPREPLY with the words that fit.
_expertd_words() {
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2")
}

_expertd_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen "$1" -- "$2")
}

_expertd_complete() {
    local program=${1##*/} cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
    # --option=value arrives as three words
    if [[ $cur == "=" ]]; then
        cur=
    elif [[ $prev == "=" ]]; then
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi

    local common="-? --help --usage -V --version" commands= options=
    case $program in
    expertd)
        options="-m --model -i --instance --runtime-dir --arena-dir --pin --no-keep --park --memory-budget --device --stream --depth --floor
            --order --link-gbps --link-latency-us --batch --watchdog-ms --io --io-depth --trace --trace-file
            --drain-ms --log-level -q --quiet --ready-fd"
        ;;
    inferd)
        commands="run chat serve logits tokenize measure"
        local engine="-i --instance --runtime-dir --model --device --chunk --ctx --threads --ring --stream --order
            --depth --floor --link-gbps --link-latency-us --resident --poison --profile --watchdog -v --verbose"
        local prompt="--prompt --prompt-file --system --chat-template --thinking --raw" report="--json --hash --quiet"
        local likely="--temperature --top-k --top-p --min-p --repeat-penalty"
        local sampling="-n $likely --seed --ignore-eos"
        local server="--listen --log-level --api-key-file --cors --model-name --chat-template --parallel --kv-tokens --answer-gap-ms
            --exact-prefix --queue --connections --max-tokens --header-kb --body-mb --send-kb --read-seconds
            --write-seconds --drain-seconds --resume-seconds"
        case ${COMP_WORDS[1]} in
        run) options="$engine $prompt $sampling $report" ;;
        chat) options="$engine --system --chat-template --thinking $sampling $report --url --api-key-file" ;;
        serve) options="$engine $likely $server" ;;
        logits) options="$engine $prompt -n --ids --positions --routes --reads --keep $report" ;;
        tokenize | measure) options="$engine $prompt" ;;
        *) common="--help --version" ;;
        esac
        ;;
    expertctl)
        commands="status workers rings trace counters metrics verify doctor configure drain stop evict"
        options="-i --instance --runtime-dir --json -w --watch -p --worker -n --count --seconds --list --detail -o --output
            --listen --deadline -m --model --arena-dir -a --all --session --stream --order --depth --floor --link-gbps
            --link-latency-us"
        ;;
    expert-bench)
        options="--model -i --instance --runtime-dir --prompt --prompt-file --tokens -n --pairs --seconds --generate
            --bits --link-gbps --link-latency-us --ring --chunk --floor --ctx --resident --threads --inferd --expertd
            --trace-file --json -q --quiet"
        commands="serve"
        [[ ${COMP_WORDS[1]} == serve ]] && options="--conversations --rate --count -n --pairs --seconds --turns
            --prompt-tokens --turn-tokens --system-tokens --max-tokens --may-end --pause --seed --model --api-key-file
            --timeout --retries --json -q --quiet"
        ;;
    expert-top)
        options="-i --instance --runtime-dir -d --delay -n --count -p --worker --once --json --size"
        ;;
    mkmodel)
        options="--simulate --text --json --preset --layers --hidden --heads --kv-heads --head-dim --experts --topk
            --ffn --vocab --ctx --rope-base --experts-type --down-type --attn-type --embd-type --skew --seed
            --threads"
        ;;
    esac

    case $prev in
    --model | -m | --prompt-file | --reads | --inferd | --expertd | --trace-file | --api-key-file | --output | -o) _expertd_files -f "$cur" ;;
    --runtime-dir | --arena-dir) _expertd_files -d "$cur" ;;
    --instance | -i) _expertd_words "$(_expertd_instances 2>/dev/null)" "$cur" ;;
    --device) _expertd_words "auto host cuda" "$cur" ;;
    --stream) _expertd_words "full routed" "$cur" ;;
    --order) _expertd_words "index recent predicted" "$cur" ;;
    --pin) _expertd_words "auto require off" "$cur" ;;
    --io) _expertd_words "auto uring pread" "$cur" ;;
    --log-level) _expertd_words "error warning info debug" "$cur" ;;
    --bits) _expertd_words "all last none" "$cur" ;;
    --positions) _expertd_words "last all" "$cur" ;;
    --preset) _expertd_words "tiny qwen3-30b-a3b story" "$cur" ;;
    --experts-type | --down-type | --attn-type | --embd-type)
        _expertd_words "F32 F16 BF16 Q8_0 Q4_0 Q4_K Q5_K Q6_K" "$cur"
        ;;
    *)
        if [[ $cur == -* ]]; then
            _expertd_words "$options $common" "$cur"
        elif [[ $program == expert-bench ]]; then
            _expertd_words "$commands full routed/index routed/recent routed/predicted demand ahead oracle" "$cur"
        elif [[ $program == mkmodel ]]; then
            _expertd_files -f "$cur"
        elif [[ $program == expertctl && " ${COMP_WORDS[*]:1:COMP_CWORD-1} " == *" workers "* ]]; then
            _expertd_words "drain restart" "$cur"
        elif [[ $program == expertctl && $prev == trace ]]; then
            _expertd_words "chunks show record export" "$cur"
        elif [[ $program == expertctl && $prev =~ ^(show|record|export)$ ]]; then
            _expertd_files -f "$cur"
        elif [[ $program == expertctl && $prev == evict ]]; then
            _expertd_words "$(_expertd_instances 2>/dev/null)" "$cur"
        elif ((COMP_CWORD == 1)) || [[ $program == expertctl ]]; then
            _expertd_words "$commands" "$cur"
        fi
        ;;
    esac
}

complete -o bashdefault -F _expertd_complete expertd inferd expertctl expert-top expert-bench mkmodel
