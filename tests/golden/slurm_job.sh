#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2-8
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append

place=/data
folder=autopar-run
autopar=(autopar)
run=(--devices=4)
script=(train.py --rate 0.1)
slots=2
least=2
most=8
look=15
signal=120
suspended=75
given_up=69

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

# Whether Slurm does not hear of a node.
is_down() {
    local name address state
    read -r name address state < <(describe_nodes "$1")
    [[ $state == *DOWN* || $state == *NOT_RESPONDING* || $state == *FAIL* ||
        $state == *\** ]]
}

# The number of an address.
resolve() {
    local found
    found=$(getent ahostsv4 "$1" || getent ahosts "$1")
    echo "${found%%[[:space:]]*}"
}

# The address of this node on the way to another one of the job, as its own name may
# lead to loopback; of one node: that in Slurm.
own_address() {
    local name address state own=$self found=''
    while read -r name address state; do
        if [[ $name == "$self" ]]; then
            own=$address
        elif [[ ! $found ]]; then
            found=$(ip -oneline route get "$(resolve "$address")" 2>/dev/null |
                sed -n 's/.* src \([^ ]*\).*/\1/p')
        fi
    done < <(describe_nodes "$SLURM_JOB_NODELIST")
    echo "${found:-$own}"
}

add_call() {
    local host=$2
    [[ $host == *:* ]] && host=[$host]
    call_nodes+=("$1")
    calls+=("$host:$((20000 + SLURM_JOB_ID * 4 % 12000 + ${#calls[@]}))")
}

# The addresses that agents call: that of the supervisor, and those of up to three nodes
# that may take its place. Of two hosts, the second could not decide that it does.
choose_calls() {
    local name address state
    add_call "$self" "$(own_address)"
    ((SLURM_JOB_NUM_NODES > 2)) || return
    while read -r name address state; do
        if [[ $name != "$self" ]] && ((${#calls[@]} < 4)); then
            add_call "$name" "$(resolve "$address")"
        fi
    done < <(describe_nodes "$SLURM_JOB_NODELIST")
}

# Makes this node the one that leads: start of the job, node, address, folder.
own_run() {
    owner="$start $self $call $run_folder"
    echo "$owner" >"$folder/owner.$self"
    mv -- "$folder/owner.$self" "$folder/owner"
}

# Starts a function of this script as a job step on a node.
start_step() {
    local name=$1-$2 node=$2 program
    shift 2
    program=$(
        declare -p folder autopar run script slots least most look signal suspended \
            given_up start secret calls call_nodes processes first
        declare -f
    )
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --job-name="$name" \
        --input=none bash -c "$program; set_up; \"\$@\"" autopar "$@" &
}

set_up() {
    declare -gA steps left failures faults
    suspending='' failed='' replaced='' standby='' resumed='' starts=0 code=''
}

# The output of a step does not go by the node that started it, which may fail.
write_output() { exec >>"$folder/output.$SLURMD_NODENAME" 2>&1; }

# Whether the supervisor is there.
has_supervisor() {
    local host=${1%:*}
    host=${host#[}
    timeout 5 bash -c ': <>"/dev/tcp/$0/$1"' "${host%]}" "${1##*:}" 2>/dev/null
}

# The step of an agent. It is told to leave by SIGURG, as any other process of the step
# ignores that.
work() {
    local agent code leads node call
    write_output
    "${autopar[@]}" worker --supervisor "$(IFS=,; echo "${calls[*]}")" \
        --secret "$secret" --slots "$slots" --folder "$folder" &
    agent=$!
    trap 'kill -TERM "$agent" 2>/dev/null' URG
    while kill -0 "$agent" 2>/dev/null; do sleep 1; done
    wait "$agent"
    code=$?
    ((code == 0)) && exit 0
    # The node that leads starts an agent again. Where that node is gone, and no standby
    # has taken over while the agent waited, the job starts again.
    while read -r leads node call _ <"$folder/owner" && [[ $leads == "$start" ]]; do
        has_supervisor "$call" && break
        is_down "$node" && scontrol requeue incomplete "$SLURM_JOB_ID"
        sleep "$look"
    done
    exit "$code"
}

# The step of a standby, which leads once it has taken the run over.
stand_by() {
    local log before
    write_output
    self=$SLURMD_NODENAME call=${calls[$1]} run_folder=$folder/$start.$SLURMD_NODENAME
    log=$run_folder/log.jsonl
    before=$(count_takeovers "$log")
    # The steps that this one starts would bind their processes as this one is bound.
    unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
    trap suspend USR1
    start_supervisor --standby
    until (($(count_takeovers "$log") > before)); do
        if ! kill -0 "$supervisor" 2>/dev/null; then
            wait "$supervisor"
            exit
        fi
        sleep 1
    done
    own_run
    say "$self leads the run now, in $run_folder"
    lead
    [[ $code ]] || exit 0 # another node leads now
    ((code == suspended || code == given_up)) && start_again
    end_job
}

count_takeovers() { cat -- "$1" 2>/dev/null | grep -c '"event": "take over"'; }

# Has the batch script end with the status of the run, now or in another start.
end_job() {
    local name address state nodes waits=''
    echo "$SLURM_JOB_ID $code" >"$folder/ended.new"
    mv -- "$folder/ended.new" "$folder/ended"
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N 2>/dev/null)
    while read -r name address state; do
        [[ $name == "$first" ]] && waits=120
    done < <(describe_nodes "$nodes")
    sleep "${waits:-0}"
    scontrol requeue incomplete "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"
    sleep 60
    exit "$code"
}

start_again() {
    if scontrol requeue incomplete "$SLURM_JOB_ID"; then
        sleep 60 # it ends this script
    else
        say "Slurm does not requeue the job: submit it again to go on with the run"
    fi
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
        exec "${autopar[@]}" run "$@" --listen "$call" --secret "$secret" \
            --processes "$processes" --min 1 --max "$((most * slots))" \
            --folder "$run_folder" "${run[@]}" "${script[@]}"
    ) &
    supervisor=$!
}

# The steps of the job with this name.
find_steps() {
    squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format="%i %j" 2>/dev/null |
        awk -v name="$1" '$2 == name { print $1 }'
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
    elif [[ $(find_steps "autopar-$1") ]]; then
        return # another node has started it, which led before
    fi
    left[$1]=
    start_step autopar "$1" work
    steps[$1]=$!
}

# Has the workers of a node leave.
leave() {
    local step
    [[ ${left[$1]-} ]] && return
    step=$(find_steps "autopar-$1")
    [[ $step ]] || return
    say "$1 drains; its workers leave"
    left[$1]=yes
    scancel --signal=URG "$step" 2>/dev/null
}

# Has one of the nodes that agents call stand by.
keep_standby() {
    local k node
    if [[ $standby ]]; then
        if ! kill -0 "$standby" 2>/dev/null; then
            node=$standby_node
            wait "$standby" || faults[$node]=$((${faults[$node]-0} + 1))
        elif [[ " $* " == *" $standby_node "* ]]; then
            return
        else
            scancel "$(find_steps "standby-$standby_node")" 2>/dev/null
        fi
        standby=
    fi
    for k in "${!calls[@]}"; do
        node=${call_nodes[k]}
        if [[ $node != "$self" && " $* " == *" $node "* ]] &&
            ((${faults[$node]-0} < 3)); then
            start_step standby "$node" stand_by "$k"
            standby=$! standby_node=$node
            return
        fi
    done
}

# Whether this node leads. It may be cut off, and another one lead, which its agents
# then join; or the job may have started again.
check_owner() {
    local leads node rest
    read -r leads node rest <"$folder/owner"
    [[ "$leads $node $rest" == "$owner" ]] && return
    replaced=yes
    if [[ $leads == "$start" ]]; then
        say "$node leads the run now"
        kill -KILL "$supervisor" 2>/dev/null # its workers go on under the other one
    else
        say "a later start of the job, or another job, has $folder; this one ends"
        kill "$supervisor" 2>/dev/null
    fi
    return 1
}

# Goes with the nodes of the job: some fail, drain, or come back.
look() {
    local nodes found name address state end usable=() leaving=()
    check_owner || return
    read -r nodes end < <(squeue --noheader --jobs="$SLURM_JOB_ID" \
        --format="%N %e" 2>/dev/null)
    found=$(describe_nodes "$nodes")
    [[ $nodes && $found ]] || return # Slurm does not answer now
    while read -r name address state; do
        case $state in
            *DRAIN* | *DOWN* | *FAIL*) leaving+=("$name") ;;
            *) usable+=("$name") ;;
        esac
    done <<<"$found"
    [[ $end == [0-9]* ]] && end=$(date --date="$end" +%s) &&
        ((end - $(date +%s) < signal)) && suspending=yes
    if [[ $suspending ]]; then
        suspend
    elif [[ " ${leaving[*]} " == *" $self "* ]]; then
        say "$self drains, where the supervisor is: the run is saved and requeued"
        suspend
    elif ((${#usable[@]} < least)); then
        say "${#usable[@]} of $least nodes are left: the run is saved and requeued"
        suspend
    else
        for name in "${leaving[@]}"; do leave "$name"; done
        for name in "${usable[@]}"; do join "$name"; done
        ((${#calls[@]} > 1)) && keep_standby "${usable[@]}"
        # A supervisor that takes up where the first node failed wants as many workers
        # as the last world had.
        if [[ $resumed ]] && ((SECONDS > 10)); then
            timeout 30 "${autopar[@]}" workers --folder "$run_folder" \
                --processes "$((${#usable[@]} * slots))" >/dev/null 2>&1 && resumed=''
        fi
        for name in "${usable[@]}"; do
            [[ ${steps[$name]-} == ended && ${failures[$name]-0} -gt 5 ]] || return
        done
        say "no agent can be started: see their errors in $folder/output.*"
        failed=yes
        kill "$supervisor"
    fi
}

# Leads the run until it ends; sets its status, or none if another node leads now.
lead() {
    local next=0 i
    while :; do
        if ! kill -0 "$supervisor" 2>/dev/null; then
            wait "$supervisor"
            code=$?
            [[ $failed ]] && exit 1
            ((code == given_up)) && sleep "$look"
            check_owner
            [[ $replaced ]] && code='' && return
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
}

# Ends this script if the run has ended in another start of the job, or under the lead
# of another node.
end_with_run() {
    local job code
    read -r job code 2>/dev/null <"$folder/ended" && [[ $job == "$SLURM_JOB_ID" ]] ||
        return
    rm -- "$folder/ended"
    say "the run has ended with status $code"
    exit "$code"
}

# The batch script of a job whose run another node leads now.
follow() {
    local leads
    trap '' USR1
    while read -r leads _ <"$folder/owner" && [[ $leads == "$start" ]]; do
        end_with_run
        sleep 1
    done
    exit 1 # a later start of the job, or another job, has the folder
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
end_with_run
start=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
first=$SLURMD_NODENAME self=$SLURMD_NODENAME
processes=$((SLURM_JOB_NUM_NODES * slots))
calls=() call_nodes=()
choose_calls
call=${calls[0]}
# The folder of the last supervisor, which was a standby if a node had failed.
read -r _ _ _ run_folder 2>/dev/null <"$folder/owner"
run_folder=${run_folder:-$folder}
own_run

set_up
resumed=${SLURM_RESTART_COUNT-}
trap suspend USR1
# The agents of an earlier start are gone: none is asked who leads.
start_supervisor --anew
lead
[[ $code ]] || follow
((code == suspended || code == given_up)) && start_again
exit "$code"

