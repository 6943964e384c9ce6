# SPDX-License-Identifier: MIT
"""--help, manual pages and completion say the same; versions; wrong command lines."""
import re
import shutil
import subprocess

import pytest

from conftest import BUILD, EXPERTCTL, EXPERTD, INFERD, MKMODEL, SLOW, TOP

BENCH = BUILD / "tools/expert-bench"
PROGRAMS = {"expertd": (EXPERTD, 8), "inferd": (INFERD, 1), "expertctl": (EXPERTCTL, 1), "expert-bench": (BENCH, 1),
            "mkmodel": (MKMODEL, 1)}
if (BUILD / "tools/expert-top").exists():  # built where ncurses is
    PROGRAMS["expert-top"] = (BUILD / "tools/expert-top", 1)
INFERD_COMMANDS = ["run", "chat", "serve", "logits", "tokenize", "measure"]
# program, its command
CASES = [(p, None) for p in PROGRAMS if p != "inferd"] + [("inferd", c) for c in INFERD_COMMANDS] + [("expert-bench", "serve")]
COMPLETION = TOP / "tools/completions/expertd.bash"


def call(program, *argv):
    return subprocess.run([str(PROGRAMS[program][0]), *argv], capture_output=True, text=True, timeout=20 * SLOW,
                          stdin=subprocess.DEVNULL)


def help_options(program, command):
    """{"--instance", "-i", ...} of what argp prints."""
    r = call(program, *([command] if command else []), "--help")
    assert r.returncode == 0, r.stderr
    found = set()
    for line in r.stdout.splitlines():
        m = re.match(r" {2,6}(-[\w?])?(?: \w+)?(?:, )?(--[a-z][\w-]*)?", line)
        if m and line.strip().startswith("-"):
            found |= {o for o in m.groups() if o}
    assert "--help" in found and len(found) > 8, r.stdout
    return found


def page(program):
    return (TOP / f"tools/man/{program}.{PROGRAMS[program][1]}.scd").read_text().replace("\\_", "_")


def manual_options(program, command):
    """Options that the page defines; of programs with commands those under headings that name the command."""
    found, applies = set(), True
    if program == "expert-bench":
        command = command or "reads"
    for line in page(program).splitlines():
        if line.startswith("#"):
            names = re.search(r"\((.*)\)", line)
            applies = not (command and names) or command in re.split(", *", names.group(1))
        elif re.match(r"\*-[-\w?]", line) and applies:
            found |= set(re.findall(r"\*(--?[\w?][\w-]*)\*", line))
    return found


@pytest.mark.parametrize("program,command", CASES)
def test_manual_page_and_help_agree(program, command):
    shown, documented = help_options(program, command), manual_options(program, command)
    assert shown - documented == set(), "options that the manual page lacks"
    assert documented - shown == set(), "options that don't exist"


@pytest.mark.parametrize("program,command", CASES)
def test_completion_knows_each_option(program, command):
    words = f"{program} {command} -" if command else f"{program} -"
    script = f"""
        source {COMPLETION}
        COMP_WORDS=({words}) COMP_CWORD={len(words.split()) - 1}
        _expertd_complete {program}
        printf '%s\\n' "${{COMPREPLY[@]}}"
        complete -p {program} >/dev/null || exit 1"""
    r = subprocess.run(["bash", "-f", "-c", script], capture_output=True, text=True, timeout=20)
    assert r.returncode == 0 and not r.stderr, r.stderr
    assert set(r.stdout.split()) == help_options(program, command)


@pytest.mark.parametrize("program", ["inferd", "expertctl"])
def test_completion_and_manual_know_each_command(program):
    script = f"source {COMPLETION}; COMP_WORDS=({program} ''); COMP_CWORD=1; _expertd_complete {program}; " \
             "echo ${COMPREPLY[@]}"
    offered = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20).stdout.split()
    text = call(program, "--help").stdout
    shown = re.findall(r"^ +([a-z]+)  +\w", text[text.index("Commands:" if program == "expertctl" else "Usage"):], re.M)
    section = page(program).split("# COMMANDS")[1].split("# OPTIONS")[0]
    assert offered == shown == re.findall(r"^\*([a-z]+)\*$", section, re.M)


def test_completion_of_values():
    def complete(*words):
        quoted = " ".join(f"'{w}'" for w in words)
        script = f"source {COMPLETION}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; " \
                 f"_expertd_complete {words[0]}; echo ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20).stdout.split()
    assert complete("expertd", "--order", "") == ["index", "recent", "predicted"]
    assert complete("inferd", "run", "--stream", "=", "f") == ["full"]
    assert complete("expertd", "--io", "=") == ["auto", "uring", "pread"]
    assert complete("expertctl", "--json", "st") == ["status", "stop"]
    assert f"{COMPLETION}" in complete("expertd", "--model", str(COMPLETION)[:-3])


@pytest.mark.skipif(not shutil.which("scdoc"), reason="no scdoc")
@pytest.mark.parametrize("program", PROGRAMS)
def test_manual_page_is_well_formed(program):
    source = TOP / f"tools/man/{program}.{PROGRAMS[program][1]}.scd"
    r = subprocess.run(["scdoc"], stdin=open(source), capture_output=True, text=True)
    assert r.returncode == 0 and not r.stderr, r.stderr
    assert r.stdout.count(".SH") > 4


@pytest.mark.parametrize("program", PROGRAMS)
def test_version_is_the_projects(program):
    version = re.search(r"version: '([\d.]+)'", (TOP / "meson.build").read_text()).group(1)
    for option in ("--version", "-V"):
        r = call(program, option)
        assert (r.returncode, r.stdout) == (0, f"{program} {version}\n")


WRONG = [
    ("expertd", ["--no-such-option"], "no-such-option"),
    ("expertd", ["model.gguf"], "--model"),
    ("expertd", [], "--model"),
    ("expertd", ["--model", "x", "--order", "best"], "predicted"),
    ("expertd", ["--model", "x", "--floor", "0"], "floor"),
    ("expertd", ["--model", "x", "--device", "cuda:x"], "--device"),
    ("expertd", ["--model", "x", "--ready-fd", "77"], "--ready-fd"),
    ("inferd", ["--no-such-option"], "no-such-option"),
    ("inferd", ["sing"], "run"),
    ("inferd", [], "run"),
    ("inferd", ["run", "--no-such-option"], "no-such-option"),
    ("inferd", ["run", "--order", "best"], "predicted"),
    ("inferd", ["run", "--floor", "0"], "floor"),
    ("inferd", ["run", "--device", "cuda:x"], "--device"),
    ("inferd", ["run", "--top-p", "2"], "top-p"),
    ("inferd", ["run", "--repeat-penalty", "0"], "penalty"),
    ("inferd", ["run", "--chat-template", "best"], "chatml"),
    ("inferd", ["serve", "--temperature", "-1"], "temperature"),
    ("inferd", ["chat", "hello"], "hello"),
    ("inferd", ["serve", "hello"], "hello"),
    ("inferd", ["serve", "--queue", "0"], "queue"),
    ("expertctl", ["--no-such-option"], "no-such-option"),
    ("expertctl", ["sing"], "sing"),
    ("expertctl", ["status", "stop"], "one command"),
    ("expertctl", [], "command"),
    ("expertctl", ["status", "--watch", "never"], "watch"),
    ("expertctl", ["trace", "--count", "-3"], "count"),
    ("expertctl", ["evict", "a", "-i", "b"], "one instance at a time, not both 'a' and --instance 'b'"),
    ("expertctl", ["-i", "b", "evict", "a"], "not both 'a'"),
    ("expertctl", ["configure", "--order", "best"], "predicted"),
    ("expertctl", ["configure", "--floor", "0"], "floor"),
    ("expert-bench", ["--no-such-option"], "no-such-option"),
    ("expert-bench", ["--prompt", "x", "fast"], "fast"),
    ("expert-bench", ["--prompt", "x", "--pairs", "0"], "pairs"),
    ("expert-bench", ["full"], "--prompt"),
    ("expert-bench", ["serve", "--no-such-option"], "no-such-option"),
    ("expert-bench", ["serve", "x"], "http://"),
    ("mkmodel", ["--no-such-option"], "no-such-option"),
    ("mkmodel", [], "file"),
    ("mkmodel", ["--layers", "0", "x"], "layers"),
]


@pytest.mark.parametrize("program,argv,word", WRONG, ids=[" ".join([p, *a]) for p, a, _ in WRONG])
def test_wrong_command_line(program, argv, word):
    r = call(program, *argv)
    assert r.returncode == 2
    assert not r.stdout
    lines = r.stderr.replace("more\ninformation", "more information").splitlines()
    assert word in r.stderr and f"{program}" in r.stderr, r.stderr
    if argv:  # without any, the commands may be listed
        assert len(lines) <= 2, r.stderr
        assert len(lines) == 1 or lines[1].startswith("Try "), r.stderr


def test_shared_options_have_one_name():
    """The same thing has the same name in every program."""
    sets = {p: help_options(p, c) for p, c in CASES if c in (None, "run")}
    for option in ("--instance", "--runtime-dir"):
        assert all(option in s for p, s in sets.items() if p != "mkmodel")
    for option in ("--stream", "--order", "--depth", "--floor", "--link-gbps", "--link-latency-us", "--device"):
        assert option in sets["expertd"] and option in sets["inferd"]
