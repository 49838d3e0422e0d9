# Options and the `stage` command of every recipe. Sourced by recipes/<corpus>/run.sh as
#   source .../scripts/recipe.sh CORPUS "$@"
# A recipe may define options of its own before that, in arrays that map an option to an override: path_options (an
# existing file or directory), value_options (one word), flag_options (NAME=VALUE, without argument).
# shellcheck shell=bash
set -euo pipefail
running=                                   # process of the stage that works

preempted() {
    echo "ERROR asked to end by a signal; the same command continues" >&2
    exit 75
}

forward() {                                # SIGNAL: to the stage, as Slurm may send it to this shell alone
    [ -n "$running" ] || preempted
    kill -"$1" "$running" 2>/dev/null || true
}

trap 'forward USR1' USR1                   # the stage that gets one saves a checkpoint and ends with status 75
trap 'forward USR2' USR2
started_in=$PWD                            # paths in options are relative to it
export ASR_AM_STARTED_IN=$PWD              # and those in files too, as a last resort
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for kind in path_options value_options flag_options; do
    declare -p "$kind" >/dev/null 2>&1 || declare -A "$kind"
done

corpus=$1
shift

usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "recipes/$corpus/run.sh"
    cat <<END
usage: recipes/$corpus/run.sh [options] [hydra.override=value ...]
  --stage N        first stage to run (default 0)
  --stop-stage N   last stage to run (default 10)
  --nj N           parallel jobs (default: number of processors)
  --plain          no progress bar and no lines per learner on a terminal: a line every half minute, as in a log
  --help           this text
stages: 0 data, 1 lang, 2 features, 3 align, 4 speaker, 5 egs, 6 train, 7 decode,
        8 rescore (with rescore=true), 9 score, 10 report
Overrides are those of conf/, e.g. model.cells=256 train.batch_size=512. Lists sweep: seed=1,2,3 train.batch_size=64,128
Sweeps over options that are not in a run's name need one: model.layers=2,3 'run=l\${model.layers}-s\${seed}'
END
}

fail() {
    echo "recipes/$corpus/run.sh: $1 (--help shows the options)" >&2
    exit 1
}

integer() {                           # NAME VALUE
    [[ $2 =~ ^[0-9]{1,9}$ ]] || fail "$1 takes a non-negative integer, not '$2'"
}

existing_path() {                          # NAME PATH: the absolute path, quoted for Hydra
    local path
    path=$(cd "$started_in" && realpath -e "$2" 2>/dev/null) || fail "$1: '$2' does not exist"
    case $path in
        *'${'* | *\\) fail "$1: '$path' contains \${ or ends in \\, which Hydra cannot read; rename it" ;;
    esac
    echo "'${path//\'/\\\'}'"
}

first=0 last=10 jobs=$(env -u OMP_NUM_THREADS nproc) overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) usage; exit 0 ;;
        --plain) export ASR_AM_PLAIN=1; shift ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;      # --stage=6
        --stage | --stop-stage | --nj)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case $1 in
                --stage) integer "$1" "$2"; first=$2 ;;
                --stop-stage) integer "$1" "$2"; last=$2 ;;
                --nj) integer "$1" "$2"; [ "$2" -ge 1 ] || fail "--nj must be at least 1"; jobs=$2 ;;
            esac
            shift 2 ;;
        --*)
            if [ -n "${flag_options[$1]-}" ]; then
                overrides+=("${flag_options[$1]}"); shift; continue
            fi
            [ -n "${path_options[$1]-}${value_options[$1]-}" ] ||
                fail "unknown option '$1'; settings of conf/ are given as name=value, such as train.epochs=3"
            [ $# -ge 2 ] || fail "$1 needs a value"
            if [ -n "${path_options[$1]-}" ]; then
                overrides+=("${path_options[$1]}=$(existing_path "$1" "$2")")
            else
                [[ $2 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
                    fail "$1 takes one word of letters, digits, . _ and -, not '$2'"
                [ "${#2}" -le 100 ] || fail "$1 takes a word of at most 100 characters, not of ${#2}"
                if [ "$1" = --name ]; then
                    [ ! -e "recipes/$2/run.sh" ] || fail "--name $2 is taken by recipes/$2; choose another name"
                    overrides+=("${value_options[$1]}='$2'")     # quoted, so that Hydra reads 2024, 1e3 or null as text
                else
                    overrides+=("${value_options[$1]}=$2")
                fi
            fi
            shift 2 ;;
        -*) fail "unknown option '$1'" ;;
        ?*=* | "~"?*) overrides+=("$1"); shift ;;
        *) fail "'$1' is neither an option nor an override of the form name=value" ;;
    esac
done
[ "$first" -le 10 ] || fail "--stage: there is no stage $first"
[ "$last" -ge "$first" ] || fail "--stop-stage $last comes before --stage $first"

scripts/setup.sh
PATH=$PWD/.venv/bin:$PATH
export PYTHONUTF8=1                        # files are UTF-8 in every locale, those that libraries write too
export PYTHONUNBUFFERED=1 ASR_AM_RECIPE=$$   # a stage ends when this shell does
export ASR_AM_FIRST_STAGE=$first           # the outputs of stages from this one on must stay those of this command

overridden() {                             # NAME: true if the user gave a value for it
    local override
    for override in "${overrides[@]}"; do
        [ "${override%%=*}" = "$1" ] && return 0
    done
    return 1
}

checked=
check_overrides() {                        # once, before the first stage
    [ -z "$checked" ] || return 0
    checked=yes
    if [ "${#overrides[@]}" -gt 0 ]; then
        in_foreground python -m asr_am.stages.check "$first" "$last" corpus="$corpus" nj="$jobs" "${overrides[@]}"
    fi
}

in_foreground() {                          # COMMAND ...: returns its status. Traps act at once, not at its end
    local status known=0
    trap : INT                             # Ctrl-C ends the command, and this shell by its status
    (trap - INT QUIT; exec "$@") <&0 &     # which a command in the background would ignore
    running=$!
    while wait "$running" && status=0 || status=$?; kill -0 "$running" 2>/dev/null; do :; done
    if [ "$status" -gt 128 ]; then         # perhaps of a trap, at the moment when the command ended
        wait "$running" 2>/dev/null || known=$?
        [ "$known" = 127 ] || status=$known
    fi
    running=
    trap - INT
    case $status in
        $((128 + $(kill -l USR1))) | $((128 + $(kill -l USR2)))) preempted ;;      # before Python has begun
    esac
    return "$status"
}

stage() {                                  # NUMBER NAME [DEFAULT_OVERRIDE ...]
    local number=$1 name=$2 defaults=() default
    shift 2
    if [ "$number" -lt "$first" ] || [ "$number" -gt "$last" ]; then
        return 0
    fi
    for default in "$@"; do
        overridden "${default%%=*}" || defaults+=("$default")
    done
    check_overrides
    echo "stage $number: $name"
    in_foreground python -m "asr_am.stages.$name" --multirun corpus="$corpus" nj="$jobs" "${defaults[@]}" "${overrides[@]}"
    [ "$name" != report ] || in_foreground python -m asr_am.stages.closing corpus="$corpus" "${defaults[@]}" "${overrides[@]}"
}
