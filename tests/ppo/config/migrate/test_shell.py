"""Launch scripts as a shell would read them: checked against bash itself."""

import json
import subprocess
import sys

import pytest

from ppo.config.migrate.shell import ShellError, commands_of

SHOWN = "import json,sys; print(json.dumps(sys.argv[1:]))"

SCRIPT = r"""
# a comment with a "quote
name='one two'   # and another behind
size=$((1024 * 2)); longest=$(((size + 8) * 2))
ROOT=${ROOT:-"$HOME/data"}
UNSET=${NOTHING:-} ; NODES=${NODES:=4}
files="['$HOME/a b.parquet', '${ROOT}/b.parquet']"
ALGORITHM=(
    algorithm.adv_estimator=grpo  # of the list
    "with.spaces=a b"
)
EXTRA="x.y=1   z.w=2"
EXTRA+=" v=3"
ALGORITHM+=(more.k='c d' $((size / 2)))
EMPTY=()
export QUOTED="say \"$name\" \$name `true`"
cat > /dev/null <<'END'
data.bad=1 "
END
FIRST=1 run data.files="$files" "${ALGORITHM[@]}" "${EMPTY[@]}" ${EMPTY[*]} $EXTRA $UNSET \
    a=${size} b=$longest l=['console','wandb'] +p="${ROOT}/$name" q='$name' "$QUOTED" \
    e="" f=a\ b "$@" n=$NODES/$(( -size + 3 )) w=${name}s ${UNSET:+no} ${name:+yes} 2> /dev/null
"""


def test_words_are_those_that_bash_makes():
    run = f"run() {{ {sys.executable} -c '{SHOWN}' \"$@\"; }}\n"
    bash = subprocess.run(
        ["bash", "-c", run + SCRIPT], capture_output=True, text=True, env={"HOME": "~"}, check=True
    )
    (words,) = [command for command in commands_of(SCRIPT) if command[0] == "run"]
    expected = json.loads(bash.stdout)
    # what a command would print is not known here
    assert words[1:] == [
        word.replace('one two" $name ', 'one two" $name `true`') for word in expected
    ]


def test_what_only_a_run_would_tell_stays_as_it_is_written():
    (command,) = commands_of("run a=$MISSING b=${X##*/} c=$(date +%s) d=`hostname` e=$((x + y))")
    assert command[1:] == ["a=${MISSING}", "b=${X##*/}", "c=$(date +%s)", "d=`hostname`",
                           "e=$((x + y))"]  # fmt: skip
    assert commands_of("X=1\nrun $X", {"X": "2"}) == [["run", "2"]]  # what is given wins


def test_branches_are_all_read():
    script = "if [ $A = b ]; then\n X=1\nelse X=2\nfi\nfor i in 1 2; do run $X; done"
    assert ["run", "2"] in commands_of(script)


@pytest.mark.parametrize(
    "text",
    ["run 'a", 'run "a', 'run "a\\', "A=(a b", "A=(a <", "run ${a", "run $((1", "run $(a"],
)
def test_what_does_not_end_is_an_error(text):
    with pytest.raises(ShellError):
        commands_of(text)
