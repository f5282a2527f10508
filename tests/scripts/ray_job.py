"""Runs integration/launchers/ray_train.py on a Ray cluster of two nodes, both this machine, one of which dies and is replaced.

    ray_job.py FOLDER

The exit code is 77 where Ray cannot start a cluster, with the reason in the last line of the output. What was seen goes to
FOLDER/answer.json:
    stopped     rank and process that were in the middle of step STOP on the node that died
    killed_s    when the node was killed (as time.time())
    met         what the other ranks raised: type, text, rank and when, and their silence limit
    metrics     of the last checkpoint, with the path of it
    reference   loss of rank 0 in the last step of a run on two threads, without Ray, checkpoints or deaths
    different   parameters whose bits in the last checkpoint are not those of that run
"""

import concurrent.futures
import json
import os
import signal
import sys
import time
import unittest.mock
from pathlib import Path

import ray
import ray.cluster_utils
import ray_train
import torch
from ranks import thread_ranks
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

import sotto
from sotto.deepspeed import files

STEPS, EVERY, STOP = 24, 6, 15
LIMIT_S = 300
MET_S = 40  # for the other ranks to meet the death of one
NO_CLUSTER = 77  # exit code: Ray itself does not start here


def note(path, **content):
    """Writes a file that is whole or not there."""
    path.with_suffix(".partial").write_text(json.dumps(content), encoding="utf-8")
    path.with_suffix(".partial").rename(path)


def watched(folder, victim):
    """The program's loop; a rank on node `victim` stops in step STOP, once. What ranks raise is noted."""
    def loop(job):
        plain = ray_train.batch

        def batch(step, rank, samples):
            doomed = ray.get_runtime_context().get_node_id() == victim
            if doomed and step == STOP:
                note(folder / "stopped.json", rank=rank, process=os.getpid())
                time.sleep(LIMIT_S)  # a node that is killed does not wake up
            return plain(step, rank, samples)

        with unittest.mock.patch.object(ray_train, "batch", batch):
            try:
                ray_train.train(job)
            except sotto.SottoError as error:
                rank = ray.train.get_context().get_world_rank()
                note(folder / f"met{rank}.json", rank=rank, type=type(error).__name__, text=str(error), at_s=time.time(),
                     silence_limit_ms=os.environ.get("SOTTO_SILENCE_LIMIT_MS"))
                raise

    return loop


def write_config(path):
    """1-bit Adam, compressed from step 5 on: before the first checkpoint."""
    config = sotto.config_resolve(ray_train.CONFIG)
    config["optimizer"]["params"]["freeze_step"] = 5
    config["scheduler"]["params"].update(warmup_num_steps=3, total_num_steps=100)
    note(path, **config)


def children(process):
    """Numbers of its child processes."""
    return [int(word) for task in Path(f"/proc/{process}/task").iterdir() for word in (task / "children").read_text().split()]


def wait_for(folder, pattern, limit_s):
    """Whether a file of this name is there, in time."""
    end = time.monotonic() + limit_s
    while not any(folder.glob(pattern)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def replace_when_stopped(cluster, node, folder):
    """Kills a node, its raylet and its workers, when a rank on it has stopped; adds another one. Returns when it was killed."""
    if not wait_for(folder, "stopped.json", LIMIT_S):
        raise TimeoutError(f"no rank reached step {STOP} in {LIMIT_S} s")
    raylet = node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid
    # Ray ends the other ranks as soon as it knows. A raylet that is stopped tells nobody until they have met the death.
    os.kill(raylet, signal.SIGSTOP)
    killed_s = time.time()
    for process in children(raylet):
        os.kill(process, signal.SIGKILL)
    wait_for(folder, "met*.json", MET_S)
    os.kill(raylet, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    return killed_s


def reference(config):
    """Loss of rank 0's last step, and the parameters, of an undisturbed run on threads."""
    torch.manual_seed(0)
    models = [ray_train.Model() for _ in range(2)]

    def run(comm):
        engine = ray_train.engine_of(models[comm.rank], config, comm)
        losses = [loss for _, loss in ray_train.steps(engine, STEPS)]
        engine.close()
        return losses[-1]

    loss = thread_ranks(2, run)[0]
    return loss, models[0].state_dict()


def start_cluster():
    """The cluster, and the node that is to die. Ends the program where Ray cannot start one."""
    head = {"num_cpus": 1, "include_dashboard": False}
    try:
        cluster = ray.cluster_utils.Cluster(initialize_head=True, connect=True, head_node_args=head)
        return cluster, cluster.add_node(num_cpus=1)
    except Exception as error:  # pylint: disable=broad-exception-caught  # Ray raises of many types
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(NO_CLUSTER)


def main():
    folder = Path(sys.argv[1])
    write_config(folder / "config.json")
    cluster, node = start_cluster()
    words = [f"--{name}={value}" for name, value in (
        ("storage", folder / "results"), ("config", folder / "config.json"), ("steps", STEPS), ("every", EVERY))]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # nodes are started by the main thread alone
        try:
            job = pool.submit(ray_train.main, words, watched(folder, node.node_id))
            killed_s = replace_when_stopped(cluster, node, folder)
            result = job.result(LIMIT_S)
        finally:
            ray.shutdown()  # ends the job, whatever it waits for
            cluster.shutdown()
    path = Path(result.checkpoint.path)
    loss, parameters = reference(ray_train.configuration(folder / "config.json"))
    saved = files.read(path / f"global_step{STEPS}" / files.MODEL_FILE)["module"]
    note(folder / "answer.json", killed_s=killed_s, stopped=json.loads((folder / "stopped.json").read_text()),
         met=[json.loads(file.read_text()) for file in sorted(folder.glob("met*.json"))],
         metrics={**result.metrics, "path": str(path)}, reference=loss,
         different=[name for name, value in parameters.items() if not torch.equal(value, saved[name])])


if __name__ == "__main__":
    main()
