"""Makes the batch script of an elastic run as a Slurm job (`autopar launch slurm`).

The script runs on the first node of the job. The script starts the supervisor there,
and on each node an agent (`autopar worker`) that starts workers. The supervisor and
each agent are separate job steps of Slurm.

- The job is submitted with ``--no-kill``. With this option, if a node fails, Slurm
  removes it from the job and kills the job step on it, and the job goes on. Without the
  option Slurm ends the whole job (sbatch(1)).
- With ``--no-kill`` a job also survives the failure of its first node, although the
  batch script is then gone (tried with Slurm 22.05). The agents' job steps detect this
  and requeue the job.
- Shortly before the time limit, Slurm sends the script a signal, and the script makes
  the supervisor save the run. The run then ends with the status `SUSPENDED`, and the
  script requeues the job.
- If an administrator drains a node, the agent on it gets SIGTERM and leaves the run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from autopar.errors import InputError, RunError
from autopar.whole_files import export_whole

# The exit status of a run that was saved and will continue later.
SUSPENDED = 75
# Slurm checks time limits only at intervals of this many seconds. So Slurm may send the
# signal this much earlier.
_SIGNAL_EARLY_S = 60
# Options of sbatch that the script sets itself -> what the user should do instead of
# giving them.
_TAKEN = {
    **dict.fromkeys(("-N", "--nodes"), "use --nodes of autopar launch slurm"),
    **dict.fromkeys(
        ("-n", "--ntasks", "--ntasks-per-node"),
        "each node has one agent; use --slots for workers",
    ),
    **dict.fromkeys(("-t", "--time"), "use --time of autopar launch slurm"),
    "--signal": "use --grace-signal",
    **dict.fromkeys(
        ("-k", "--no-kill", "--requeue", "--no-requeue"),
        "the script goes on after lost nodes and needs it as it is",
    ),
    **dict.fromkeys(
        ("-a", "--array"), "the jobs of an array would share the run's folder"
    ),
    "--wrap": "the script is the job",
}
# Slurm's formats of a time, in which days come before a dash (sbatch(1), --time).
_TIMES = (
    (re.compile(r"(\d+)"), (60,)),
    (re.compile(r"(\d+):(\d+)"), (60, 1)),
    (re.compile(r"(\d+):(\d+):(\d+)"), (3600, 60, 1)),
    (re.compile(r"(\d+)-(\d+)"), (86400, 3600)),
    (re.compile(r"(\d+)-(\d+):(\d+)"), (86400, 3600, 60)),
    (re.compile(r"(\d+)-(\d+):(\d+):(\d+)"), (86400, 3600, 60, 1)),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The settings of an elastic run as a Slurm job.

    Attributes:
      script: path of the training script, and its own arguments.
      nodes: smallest and largest number of nodes.
      slots: number of workers on each node.
      time: time limit in one of Slurm's formats; '': the partition's limit.
      signal_s: the state is saved this many seconds before the time limit.
      place: the folder in which the script runs; all nodes must have access to it.
      folder: folder of the run, relative to ``place``; all nodes must have access to
        it.
      sbatch: further options of sbatch, such as ``--partition=gpu``.
      run: further options of `autopar run`, such as ``--devices=4``.
      command: command that runs autopar.
      look_s: seconds between two queries whether nodes are draining or have failed.

    Raises:
      InputError: an option is wrong.
    """

    script: tuple[str, ...]
    nodes: tuple[int, int]
    slots: int = 1
    time: str = ""
    signal_s: int = 120
    place: pathlib.Path
    folder: pathlib.Path = pathlib.Path("autopar-run")
    sbatch: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-m", "autopar")
    look_s: int = 15

    def __post_init__(self) -> None:
        """Checks the options."""
        if self.time and seconds_of(self.time) <= self.signal_s + _SIGNAL_EARLY_S:
            raise InputError(
                f"--time {self.time} leaves no time to train: the state is saved "
                f"{self.signal_s} s before the limit, and Slurm may signal "
                f"{_SIGNAL_EARLY_S} s earlier. Give a later limit, or a smaller "
                "--grace-signal."
            )
        for option in self.sbatch:
            for word in _words_of(
                "--sbatch", option, "sbatch, such as --partition=gpu"
            ):
                # The value of a one-letter option may follow it without a space, as in
                # -N4.
                name = word.partition("=")[0] if word.startswith("--") else word[:2]
                if name in _TAKEN:
                    raise InputError(f"--sbatch {option!r}: {_TAKEN[name]}.")
        for option in self.run:
            _words_of("--run", option, "autopar run, such as --devices=4")


def read_nodes(text: str) -> tuple[int, int]:
    """Reads the smallest and the largest number of nodes from a text.

    Raises:
      InputError: the text is neither a number nor a range.

    >>> read_nodes("2-8"), read_nodes("4")
    ((2, 8), (4, 4))
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise InputError(
            f"--nodes {text}: expected a number of nodes, or the fewest and the most, "
            "such as --nodes 2-8."
        )
    return least, most


def seconds_of(time: str) -> float:
    """Converts a time limit in one of Slurm's formats to seconds.

    Raises:
      InputError: the text is not in any of these formats.

    >>> seconds_of("90"), seconds_of("1-00:30")
    (5400, 88200)
    >>> seconds_of("UNLIMITED")
    inf
    """
    if time.lower() in ("infinite", "unlimited", "0"):
        return float("inf")
    for form, units in _TIMES:
        if found := form.fullmatch(time):
            return sum(int(n) * s for n, s in zip(found.groups(), units, strict=True))
    raise InputError(
        f"--time {time}: expected minutes, or hours:minutes:seconds, or "
        "days-hours:minutes:seconds, such as --time 4:00:00."
    )


def _words_of(flag: str, option: str, kind: str) -> list[str]:
    """Splits the text of an option for another program into words.

    Raises:
      InputError: the text is not an option, or has more than one line.
    """
    # The script contains the option in a comment, which a line break would end.
    wrong = f"{flag} {option!r}: expected an option of {kind}"
    try:
        words = shlex.split(option)
    except ValueError as error:
        raise InputError(f"{wrong}; in this one there is {error}.") from error
    if not option.isprintable() or not words or not words[0].startswith("-"):
        raise InputError(f"{wrong}.")
    return words


def job_script(job: SlurmJob) -> str:
    """The text of a job's batch script."""
    least, most = job.nodes
    name = re.sub(r"[^\w.-]+", "_", pathlib.Path(job.script[0]).stem) or "autopar"
    options = [
        f"--job-name={name}",
        f"--nodes={least}-{most}",
        *([f"--time={job.time}"] if job.time else []),
        f"--signal=B:USR1@{job.signal_s}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        *job.sbatch,
    ]
    settings = {
        "place": shlex.quote(str(job.place)),
        "folder": shlex.quote(str(job.folder)),
        "autopar": _array(job.command),
        "run": _array([word for option in job.run for word in shlex.split(option)]),
        "script": _array(job.script),
        "slots": str(job.slots),
        "least": str(least),
        "most": str(most),
        "look": str(job.look_s),
    }
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            *(f"{name}={value}" for name, value in settings.items()),
            _BODY,
        ]
    )


def _array(words: Sequence[str]) -> str:
    return f"({shlex.join(words)})"


def write_script(job: SlurmJob, path: pathlib.Path) -> None:
    """Writes the batch script of a job to a file.

    Raises:
      InputError: the file cannot be written.
    """
    try:
        export_whole(path, job_script(job).encode())
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}. Name another file with --out."
        ) from error


def submit(job: SlurmJob) -> str:
    """Submits a job to Slurm. Returns the output of sbatch, which contains the number
    of the job.

    Raises:
      InputError: sbatch is not installed.
      RunError: sbatch refuses the job.
    """
    try:
        done = subprocess.run(
            ["sbatch"],
            input=job_script(job),
            cwd=job.place,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise InputError(
            "there is no sbatch on this machine. Write the script with --out, without "
            "--submit, and give it to sbatch where Slurm is."
        ) from error
    if done.returncode:
        raise RunError(
            f"sbatch refuses the job: {done.stderr.strip()} See the script with --out, "
            "and change options with --sbatch."
        )
    return done.stdout.strip()


_BODY = r"""
# Written by `autopar launch slurm`. The folders above are on a file system that all
# nodes share.

say() { echo "autopar slurm: $*" >&2; }

# Name, address and state of each node of a list; nothing where Slurm does not answer.
describe_nodes() {
    scontrol --oneliner show node "$1" 2>/dev/null | awk '{
        name = address = state = ""
        for (i = 1; i <= NF; i++) {
            if (name == "" && sub(/^NodeName=/, "", $i)) name = $i
            else if (address == "" && sub(/^NodeAddr=/, "", $i)) address = $i
            else if (state == "" && sub(/^State=/, "", $i)) state = $i
        }
        print name, address, state
    }'
}

# The address of this node on the way to another one of the job, as its own name may
# lead to loopback; of one node: that in Slurm.
own_address() {
    local name address state own=$first found=''
    while read -r name address state; do
        if [[ $name == "$first" ]]; then
            own=$address
        elif [[ ! $found ]]; then
            address=$(getent ahostsv4 "$address" || getent ahosts "$address")
            found=$(ip -oneline route get "${address%%[[:space:]]*}" 2>/dev/null |
                sed -n 's/.* src \([^ ]*\).*/\1/p')
        fi
    done < <(describe_nodes "$SLURM_JOB_NODELIST")
    echo "${found:-$own}"
}

# Whether the supervisor is there. Where it is not, and Slurm does not hear of the first
# node either, this script is gone with it, and the job is requeued by another node.
check_supervisor() {
    local name address state
    timeout 5 bash -c ': <>"/dev/tcp/$0/$1"' "$2" "$3" 2>/dev/null && return
    read -r name address state < <(describe_nodes "$1")
    case $state in
        *DOWN* | *NOT_RESPONDING* | *FAIL* | *\**)
            scontrol requeue incomplete "$SLURM_JOB_ID"
            ;;
    esac
    return 1
}

# What a step on a node does: it runs the agent, which is told to leave by SIGURG, as
# any other process of the step ignores that.
work() {
    local first=$1 host=$2 port=$3 look=$4 agent code next=$((SECONDS + 4 * $4))
    shift 4
    "$@" &
    agent=$!
    trap 'kill -TERM "$agent" 2>/dev/null' URG
    while kill -0 "$agent" 2>/dev/null; do
        if ((SECONDS >= next)); then
            check_supervisor "$first" "$host" "$port"
            next=$((SECONDS + look))
        fi
        sleep 1
    done
    wait "$agent"
    code=$?
    ((code == 0)) && exit 0
    # The end of this script ends the step, so this ends, too.
    until check_supervisor "$first" "$host" "$port"; do sleep "$look"; done
    exit "$code"
}

# The state is saved, and the run ends with 75; asked again until it has.
suspend() {
    suspending=yes
    kill -USR1 "$supervisor" 2>/dev/null
}

start_supervisor() {
    ((starts += 1))
    (
        trap '' USR1 # until the supervisor listens for it
        exec "${autopar[@]}" run --listen "$supervisor_at" --secret "$secret" \
            --processes "$((SLURM_JOB_NUM_NODES * slots))" --min 1 \
            --max "$((most * slots))" --folder "$folder" "${run[@]}" "${script[@]}"
    ) &
    supervisor=$!
}

# Starts the agent of a node, again where it failed.
join() {
    local step=${steps[$1]-}
    if [[ $step ]]; then
        [[ $step == ended ]] || kill -0 "$step" 2>/dev/null && return
        if [[ ${left[$1]-} ]]; then
            failures[$1]=0
        elif wait "$step"; then
            steps[$1]=ended # with the run
            return
        elif failures[$1]=$((${failures[$1]-0} + 1)) && ((${failures[$1]} > 5)); then
            steps[$1]=ended
            say "the agent of $1 failed 6 times; the node is given up"
            return
        fi
    fi
    left[$1]=
    local functions
    functions=$(declare -f describe_nodes check_supervisor work)
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --job-name="autopar-$1" \
        --input=none bash -c "$functions; work \"\$@\"" work "$first" "$host" "$port" \
        "$look" "${autopar[@]}" worker --supervisor "$supervisor_at" \
        --secret "$secret" --slots "$slots" --folder "$folder" &
    steps[$1]=$!
}

# Has the workers of a node leave.
leave() {
    local step
    [[ ${steps[$1]-} && ! ${left[$1]-} ]] || return
    step=$(squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format="%i %j" \
        2>/dev/null | awk -v name="autopar-$1" '$2 == name { print $1 }')
    [[ $step ]] || return
    say "$1 drains; its workers leave"
    left[$1]=yes
    scancel --signal=URG "$step" 2>/dev/null
}

# Goes with the nodes of the job: some fail, drain, or come back.
look() {
    local nodes found name address state usable=() leaving=()
    # This node may be cut off, and the job have started again elsewhere.
    if [[ $(<"$folder/owner") != "$owner" ]]; then
        say "a later start of the job, or another job, has $folder; this one ends"
        failed=yes
        kill "$supervisor"
        return
    fi
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N 2>/dev/null)
    found=$(describe_nodes "$nodes")
    [[ $nodes && $found ]] || return # Slurm does not answer now
    while read -r name address state; do
        case $state in
            *DRAIN* | *DOWN* | *FAIL*) leaving+=("$name") ;;
            *) usable+=("$name") ;;
        esac
    done <<<"$found"
    if [[ $suspending ]]; then
        suspend
    elif [[ " ${leaving[*]} " == *" $first "* ]]; then
        say "$first drains, where the supervisor is: the run is saved and requeued"
        suspend
    elif ((${#usable[@]} < least)); then
        say "${#usable[@]} of $least nodes are left: the run is saved and requeued"
        suspend
    else
        for name in "${leaving[@]}"; do leave "$name"; done
        for name in "${usable[@]}"; do join "$name"; done
        # A supervisor that takes up where the first node failed wants as many workers
        # as the last world had.
        if [[ $resumed ]] && ((SECONDS > 10)); then
            timeout 30 "${autopar[@]}" workers --folder "$folder" \
                --processes "$((${#usable[@]} * slots))" >/dev/null 2>&1 && resumed=''
        fi
        for name in "${usable[@]}"; do
            [[ ${steps[$name]-} == ended && ${failures[$name]-0} -gt 5 ]] || return
        done
        say "no agent can be started: see their errors above"
        failed=yes
        kill "$supervisor"
    fi
}

cd -- "$place" || exit 2
mkdir -p -- "$folder" || exit 2
secret=$folder/secret.pem
if [[ ! -s $secret ]]; then
    (umask 077 && "${autopar[@]}" secret "$secret" >/dev/null) || exit 2
fi
chmod 600 -- "$secret" || exit 2
[[ ${SLURM_CPUS_PER_TASK-} ]] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

say "start ${SLURM_RESTART_COUNT:-0} of the job, on $SLURM_JOB_NODELIST"
owner=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
echo "$owner" >"$folder/owner"
declare -A steps left failures
suspending='' failed='' starts=0
resumed=${SLURM_RESTART_COUNT-}
first=$SLURMD_NODENAME
host=$(own_address)
port=$((20000 + SLURM_JOB_ID % 12000))
supervisor_at=$host:$port
[[ $host == *:* ]] && supervisor_at=[$host]:$port

trap suspend USR1
start_supervisor
next=0
while :; do
    if ! kill -0 "$supervisor" 2>/dev/null; then
        wait "$supervisor"
        code=$?
        [[ $failed ]] && exit 1
        ((code > 128 && code != 130 && starts < 10)) || break
        say "the supervisor died by signal $((code - 128)); another one starts"
        start_supervisor
    fi
    if ((SECONDS >= next)); then
        look
        next=$((SECONDS + look))
    fi
    sleep 1
done

# The agents end by themselves; the end of this script would kill them.
for ((i = 0; i < 20; i++)); do
    [[ $(jobs -pr) ]] || break
    sleep 1
done
if ((code == 75)); then
    if scontrol requeue incomplete "$SLURM_JOB_ID"; then
        sleep 60 # it ends this script
    else
        say "the run is saved, but Slurm does not requeue the job: submit it again"
    fi
fi
exit "$code"
"""
