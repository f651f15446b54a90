"""A real two-node Slurm on this machine, started and ended by a test.

Everything lives in one folder, munge's key and socket too: nothing under /etc is read or written.
Needs the Debian packages slurm-wlm and munge. Both nodes, n1 and n2, are this machine.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")

CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until the credential of its first start has expired: 2 minutes by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class LocalSlurm:
    """Commands of a running Slurm."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **environment: str) -> str:
        """Output of a client command. Raises CalledProcessError."""
        result = subprocess.run(
            command,
            env={**self.environment, **environment},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return result.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` knows: JobState, ExitCode, Restarts, ..."""
        words = self.run("scontrol", "-o", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job_id: str, *states: str, timeout_s: float) -> dict[str, str]:
        """The job once it is in one of the states. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(job_id))["JobState"] not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {job['JobState']}, not {states}: {job}")
            time.sleep(0.5)
        return job


def is_configured() -> bool:
    """Whether this machine belongs to a Slurm cluster already."""
    places = (Path("/etc/slurm/slurm.conf"), Path("/etc/slurm-llnl/slurm.conf"))
    return "SLURM_CONF" in os.environ or any(place.exists() for place in places)


def missing_programs() -> list[str]:
    """Programs that apt-get install slurm-wlm munge would bring."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextmanager
def local_slurm(folder: Path) -> Iterator[LocalSlurm]:
    """Start munge, the controller and two nodes; end them, and what is left of jobs, after."""
    for name in ("spool/n1", "spool/n2", "state"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname()
    conf = CONF.format(folder=folder, host=host, user=getpass.getuser(), ports=_free_ports(3))
    (folder / "slurm.conf").write_text(conf)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    slurm = LocalSlurm(folder)
    try:
        _start_munge(folder)
        slurm.run("slurmctld", "-f", str(folder / "slurm.conf"))
        for node in ("n1", "n2"):
            slurm.run("slurmd", "-N", node, "-f", str(folder / "slurm.conf"))
        _wait_until_idle(slurm)
        yield slurm
        for job in slurm.run("squeue", "--noheader", "--format=%A").split():
            slurm.run("scancel", "--signal=KILL", "--full", job)
            slurm.run("scancel", job)
            slurm.wait_for(job, "CANCELLED", "FAILED", "COMPLETED", "TIMEOUT", timeout_s=90)
    finally:
        for file in (*folder.glob("slurmd.*.pid"), *folder.glob("slurmctld.pid"),
                     *folder.glob("munged.pid")):  # fmt: skip
            _end(int(file.read_text()))


def _start_munge(folder: Path) -> None:
    options = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munged.seed",
    }
    arguments = [f"--{option}={folder / name}" for option, name in options.items()]
    # --force: pytest's folders are private, munged would like its socket's to be open to all
    subprocess.run(["munged", "--force", *arguments], check=True, capture_output=True, timeout=60)


def _wait_until_idle(slurm: LocalSlurm, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        states = slurm.run("sinfo", "--noheader", "--Node", "--format=%t").split()
        if states == ["idle", "idle"]:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the nodes are {states}")
        time.sleep(0.2)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
