#!/usr/bin/env bash
# Runs a command with a Slurm of its own, whose three nodes are this host: real slurmctld, slurmd and munge, to try what
# uses Slurm without a cluster. Needs root and Debian's packages: apt-get install slurmctld slurmd slurm-client munge
#   scripts/slurm_lab.sh COMMAND ...
#   scripts/slurm_lab.sh recipes/minicts/run.sh --nj 3 jobs=slurm
#   scripts/slurm_lab.sh srun -N 2 --ntasks-per-node 2 .venv/bin/python -m asr_am.stages.train launcher=torchrun learners=4 ...
#   scripts/slurm_lab.sh srun -N 2 sh -c '.venv/bin/python -m asr_am.stages.train launcher=process learners=4 launcher.nodes=2
#       launcher.node_rank=$SLURM_NODEID launcher.address=127.0.0.1:29500 launcher.key_file=team.key strategy=adpsgd ...'
#   scripts/slurm_lab.sh recipes/minicts/run.sh --stage 6 strategy=sync,bmuf hydra/launcher=slurm ...    (extra `sweeps`)
# There is no accounting, so submitit warns about sacct, and then goes by what jobs have written.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 1; }
[ "$(id -u)" = 0 ] || { echo "$0: needs root" >&2; exit 1; }
for program in munged slurmctld slurmd; do
    PATH=$PATH:/usr/sbin command -v "$program" >/dev/null ||
        { echo "$0: no $program; apt-get install slurmctld slurmd slurm-client munge" >&2; exit 1; }
done
PATH=$PATH:/usr/sbin
exec 9>/tmp/slurm_lab.lock                 # one at a time: they use the same ports
flock 9
lab=$(mktemp -d /tmp/slurm_lab.XXXX)
mkdir "$lab"/{state,node1,node2,node3}
dd if=/dev/urandom of="$lab/munge.key" bs=128 count=1 status=none
chmod 600 "$lab/munge.key"
cat >"$lab/slurm.conf" <<END
ClusterName=lab
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthInfo=socket=$lab/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/%n
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/%n.pid
SlurmctldLogFile=$lab/slurmctld.log
SlurmdLogFile=$lab/%n.log
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node[1-3] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[17001-17003] CPUs=$(nproc) RealMemory=$(($(getconf _PHYS_PAGES) * $(getconf PAGE_SIZE) >> 20))
PartitionName=all Nodes=node[1-3] Default=YES State=UP
END
export SLURM_CONF=$lab/slurm.conf MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}     # node1 is a name for Slurm only
ready=
stop() {
    [ -z "$ready" ] || scancel --full --signal=KILL --state=RUNNING --user="$(id -un)" 2>/dev/null || true
    for pid in "$lab"/*.pid; do [ ! -e "$pid" ] || kill "$(cat "$pid")" 2>/dev/null || true; done
    sleep 1
    [ -z "$ready" ] || rm -rf "$lab"       # else its logs say why it did not start
}
trap stop EXIT
munged --force --key-file="$lab/munge.key" --socket="$lab/munge.socket" --pid-file="$lab/munged.pid" \
    --log-file="$lab/munged.log" --seed-file="$lab/munged.seed" 9>&-
slurmctld 9>&-
for node in node1 node2 node3; do slurmd -N "$node" 9>&-; done
for _ in $(seq 30); do
    [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 3 ] && ready=yes && break
    sleep 1
done
[ -n "$ready" ] || { echo "$0: the nodes do not start; see" "$lab"/*.log >&2; exit 1; }
"$@" 9>&-
