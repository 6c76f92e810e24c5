"""What a job is made of, and what is refused before anything is submitted; jobs of this machine for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distrag.cluster.app import build_ranks, read_spec
from distrag.cluster.environment import parse_pairs, split_list
from distrag.cluster.jobs import open_runner, parse_handle
from distrag.cluster.resources import Ask, build_resource, parse_memory
from distrag.cluster.sizes import Size, parse_size
from distrag.cluster.submit import dry_run, read_options
from tests.launch.cluster import ROOT, Site, run_distrag, wait_until

COMPONENTS = ROOT / "launch" / "components.py"


@pytest.mark.parametrize(
    ("text", "size"), [("2", Size(1, 2, 1)), ("1x2", Size(1, 2, 1)), ("1:2x4", Size(2, 4, 1)), ("16x8", Size(16, 8, 16))]
)
def test_job_sizes_are_read(text: str, size: Size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["1x0", "1x2x3", "0x1", "ax2", "", "x2", "2:1x4", "0:2x1", "1:2", "-1x2", "1.5x2", "0"])
def test_other_job_sizes_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="the job size") as caught:
        parse_size(text)
    assert len(str(caught.value).splitlines()) == 1


def script_of(size: str, *words: str, **asked: Any) -> str:
    with open_runner() as runner:
        app = build_ranks("train", ["--config", "c.yaml", *words], read_spec(size, **asked))
        return str(dry_run(runner, app, "slurm", read_options(runner, "slurm", ["partition=low", "account=mine"])))


def requests_of(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.startswith("#SBATCH --")]


def test_slurm_is_asked_for_what_was_given() -> None:
    lines = requests_of(script_of("2x2", cpu=8, gpu=2, memory="64GiB"))
    assert len(lines) == 2
    for line in lines:
        words = line.split()
        assert {"--cpus-per-task=8", "--gpus-per-task=2", "--mem=65536", "--ntasks-per-node=1", "--requeue"} <= set(words)
        assert {"--partition=low", "--account=mine", "--open-mode=append"} <= set(words)
    (line,) = requests_of(script_of("1x8", resource="gpu_h100_8"))
    assert {"--cpus-per-task=192", "--gpus-per-task=8", f"--mem={1900 * 1024}"} <= set(line.split())


def test_without_settings_slurm_is_asked_for_a_core_a_rank_and_no_memory() -> None:
    script = script_of("2x2")
    for line in requests_of(script):
        assert "--mem" not in line
        assert "--gpus" not in line
        assert "--cpus-per-task=2" in line
    assert script.count("srun ") == 1
    assert script.rstrip().endswith("exit $exitcode")
    assert subprocess.run(["bash", "-n"], input=script[script.index("#!/bin/bash") :], text=True).returncode == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"resource": "gpu_h100_9"}, "did you mean 'gpu_h100_8'"),
        ({"memory": "lots"}, "such as 64GiB"),
        ({"cpu": -1}, "--cpu"),
        ({"gpu": 1}, "a GPU for each rank"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"mounts": ["src=a"]}, "type=volume"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_ranks("train", [], read_spec("1x2", **asked))


def test_memory_is_read() -> None:
    assert [parse_memory(text) for text in ("900", "900MiB", "1.5G", "2 TB")] == [900, 900, 1536, 2 * 1024 * 1024]
    assert build_resource(Ask("cpu_small", memory="1GiB"), Size(1, 1, 1)).memMB == 1024


def test_environment_lists_keep_what_is_quoted() -> None:
    assert parse_pairs(split_list("A=1,B='x,y=z', C=\"a b\",D=,E==x")) == {"A": "1", "B": "x,y=z", "C": "a b", "D": "", "E": "=x"}
    for text in ("A", "1A=2", "=x", "A=1,b"):
        with pytest.raises(ValueError, match="Not an environment variable"):
            parse_pairs(split_list(text))
    with pytest.raises(ValueError, match="quotes in pairs"):
        split_list("A='x")


def test_unknown_options_and_handles_are_refused() -> None:
    with open_runner() as runner, pytest.raises(ValueError, match="did you mean 'partition'"):
        read_options(runner, "slurm", ["partiton=low"])
    for text in ("12a", "slurm://", "slurm://x", "sge://distrag/1", "local_cwd://distrag/train-x"):
        with pytest.raises(ValueError, match="job"):
            parse_handle(text)
    assert parse_handle("12") == "slurm://distrag/12"


def test_a_job_that_cannot_train_is_refused_before_it_is_submitted(site: Site) -> None:
    submit = ["submit", "--config", str(site.config), "-s", "local_cwd", "-j", "1x2"]
    for words, said in (
        (["--data.path", "nowhere"], "nowhere"),
        (["--encoder.name", "sasrek"], "sasrec"),
        (["--memory", "1MiB", "--model.dim", "512"], "less memory"),
        (["--train.device", "cuda"], "wants GPUs"),
        (["-j", "1x2x3"], "the job size '1x2x3'"),
        (["-s", "slrum"], "did you mean 'slurm'"),
    ):
        done = run_distrag(*submit, *words, cwd=site.folder)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not (site.folder / "run").exists()


def test_a_job_of_this_machine_is_followed_to_its_end(site: Site) -> None:
    words = ["submit", "--config", str(site.config), "-s", "local_cwd", "--unchecked", "--train.run_dir", "a run"]
    done = run_distrag(*words, "-j", "1x2", cwd=site.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-2].endswith(": succeeded")
    assert len(site.losses("a run")) == 30
    failed = run_distrag(*words, "-j", "1x2", "--max-restarts", "0", "--data.path", "nowhere", cwd=site.folder)
    assert failed.returncode == 1
    assert "failed" in failed.stdout.splitlines()[-2]


def test_ctrl_c_ends_a_job_of_this_machine_after_a_save(site: Site) -> None:
    words = ["submit", "--config", str(site.config), "-j", "1x2", "-s", "local_cwd", "--unchecked", "--train.max_steps", "100000"]
    command = [sys.executable, "-m", "distrag", *words, "--train.run_dir", "job"]
    with subprocess.Popen(command, cwd=site.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: len(site.losses("job")) > 3)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    step = site.losses("job")[-1][0]
    wait_until(lambda: (site.folder / "job" / "checkpoints" / f"step-{step}").is_dir(), 30)


def test_a_pod_that_is_started_again_goes_on_with_its_run(site: Site) -> None:
    words = ["train", "--config", str(site.config), "--train.run_dir", "job"]
    command, environ = [sys.executable, "-m", "distrag", *words], {**os.environ, "TORCHX_JOB_ID": "kubernetes://distrag/ns:train-1"}
    long = [*command, "--train.max_steps", "100000"]
    with subprocess.Popen(long, cwd=site.folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: any((site.folder / "job" / "checkpoints").glob("step-?")))
        process.kill()
    done = run_distrag(*words, "--train.max_steps", "40", cwd=site.folder, TORCHX_JOB_ID="kubernetes://distrag/ns:train-1")
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line)["kind"] for line in (site.folder / "job" / "metrics.jsonl").read_text().splitlines()]
    assert "resume" in kinds
    assert not (site.folder / "job.1").exists()


def torchx(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", "from torchx.cli.main import main; main()", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHXCONFIG": str(ROOT / "launch" / "torchxconfig")}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_the_components_run_on_this_machine(site: Site) -> None:
    rows = site.folder / "rows.csv"
    rows.write_text("user,item,time\n" + "".join(f"{n % 40},{n * n % 17},{n}\n" for n in range(800)))
    words = ["--source", str(rows), "--out", "made", "--user", "user", "--item", "item", "--time", "time", "--config", str(site.config)]
    both = torchx(
        "run", "-s", "local_cwd", f"{COMPONENTS}:prepare_and_train", *words, "-j", "1x2", "--", "--train.run_dir", "a run", cwd=site.folder
    )
    assert both.returncode == 0, both.stdout + both.stderr
    assert (site.folder / "a run" / "result.json").exists()
    scored = torchx("run", "-s", "local_cwd", f"{COMPONENTS}:evaluate", "--run", "a run", "-j", "2", cwd=site.folder)
    assert scored.returncode == 0, scored.stdout + scored.stderr
    assert "ndcg@10" in scored.stdout + scored.stderr
    planned = torchx("run", "-s", "local_cwd", f"{COMPONENTS}:plan", "--config", str(site.config), "--world_size", "4", cwd=site.folder)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "steps an epoch" in planned.stdout + planned.stderr


def test_torchx_shows_the_components_arguments_and_refuses_a_size_in_one_line(site: Site) -> None:
    helped = torchx("run", "-s", "local_cwd", f"{COMPONENTS}:train", "--help", cwd=site.folder)
    assert "job size: RANKS, MACHINESxRANKS or" in " ".join(helped.stdout.split())
    refused = torchx("run", "-s", "local_cwd", f"{COMPONENTS}:train", "--config", "c.yaml", "-j", "1x0", cwd=site.folder)
    assert refused.returncode == 1
    assert [line for line in refused.stderr.splitlines() if "1x0" in line][-1].startswith("distrag: the job size '1x0'")
    assert "Traceback" not in refused.stderr
