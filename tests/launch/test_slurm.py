"""Jobs on a real Slurm: trained, followed, cancelled, pre-empted, queued again, resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.cluster import ROOT, Site, Slurm, run_distrag, wait_until

pytestmark = pytest.mark.slurm


def alone(site: Site, run: str, *words: str) -> list[tuple[int, float]]:
    done = run_distrag("train", "--config", str(site.config), "--train.run_dir", run, *words, cwd=site.folder)
    assert done.returncode == 0, done.stderr
    return site.losses(run)


@pytest.mark.parametrize("size", ["1x2", "2x1"])
def test_a_watched_job_trains_what_one_process_trains(slurm: Slurm, site: Site, size: str) -> None:
    words = ["submit", "--config", str(site.config), "-j", size, "--memory", "1500MiB", "--watch", "--train.run_dir", "job"]
    done = slurm.distrag(*words, cwd=site.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps an epoch" in done.stdout  # the plan, before anything is submitted
    front = "" if size == "1x2" else "train/[01] \\| "  # torchrun may make either machine the first
    assert re.search(rf"(?m)^{front}\[0\]:test, from the best step", done.stdout)
    assert "succeeded (COMPLETED)" in done.stdout.splitlines()[-2 if size == "1x2" else -3]
    expected = alone(site, "alone")
    assert [step for step, _ in site.losses("job")] == [step for step, _ in expected]
    assert [loss for _, loss in site.losses("job")] == pytest.approx([loss for _, loss in expected], rel=1e-6)


@pytest.mark.parametrize("size", ["1x2", "2x1"])
def test_a_pre_empted_job_is_queued_again_and_equals_an_uninterrupted_one(slurm: Slurm, site: Site, size: str) -> None:
    words = ("--train.max_steps", "300", "--train.eval_every", "100", "--train.save_every", "50")
    handle = slurm.submit(site, size, "--max-restarts", "0", "--train.run_dir", "job", *words)
    wait_until(lambda: len(site.losses("job")) > 5)
    slurm.pre_empt()
    slurm.start_now(handle)
    done = slurm.distrag("jobs", "logs", handle, "--follow", cwd=Path("/"))  # found from any folder
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGTERM: the run stops after this step" in done.stdout  # what was printed before is still there
    assert "resumed (train) after step" in done.stdout
    straight = slurm.submit(site, size, "--train.run_dir", "straight", *words)
    assert slurm.distrag("jobs", "logs", straight, "--follow", cwd=site.folder).returncode == 0
    assert site.losses("job") == site.losses("straight")


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm: Slurm, site: Site) -> None:
    handle = slurm.submit(site, "1x2", "--max-retries", "2", "--train.max_steps", "100000", "--train.run_dir", "job")
    wait_until(lambda: len(site.losses("job")) > 3)
    assert slurm.distrag("jobs", "cancel", handle, cwd=site.folder).returncode == 0
    wait_until(lambda: "CANCELLED" in slurm.state(handle))
    told = slurm.distrag("jobs", "status", handle, "--json", cwd=site.folder)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert (found["state"], found["replicas"][0]["state"]) == ("cancelled", "cancelled")
    step = site.losses("job")[-1][0]
    assert (site.folder / "job" / "checkpoints" / f"step-{step}").is_dir()
    again = slurm.distrag("jobs", "cancel", handle, cwd=site.folder)
    assert "had ended before: cancelled" in again.stdout
    assert handle in slurm.distrag("jobs", "list", cwd=site.folder).stdout


def test_a_job_that_is_refused_is_not_started_again(slurm: Slurm, site: Site) -> None:
    words = ("--max-restarts", "0", "--max-retries", "2", "--train.run_dir", "job", "--data.path", "nowhere")
    handle = slurm.submit(site, "1x2", *words)
    done = slurm.distrag("jobs", "logs", handle, "--follow", cwd=site.folder)
    assert done.returncode == 1
    assert "nowhere" in done.stdout
    assert slurm.state(handle) == "FAILED"


def test_an_unknown_job_ends_within_seconds(slurm: Slurm, site: Site) -> None:
    for what in ("status", "logs", "cancel"):
        before = time.monotonic()
        done = slurm.distrag("jobs", what, "slurm://distrag/4711", cwd=site.folder)
        assert done.returncode == 2
        assert "There is no such job" in done.stderr
        assert time.monotonic() - before < 15  # of which importing torch may take most on a busy machine


def test_environment_values_and_words_arrive_as_they_were_given(slurm: Slurm, site: Site) -> None:
    odd = site.folder / "a,b=c d"
    odd.mkdir()
    dump = "import json, os, sys\njson.dump([sys.argv, dict(os.environ)], open(os.environ['DUMP'] + str(os.getpid()), 'w'))\n"
    (odd / "sitecustomize.py").write_text(dump)
    path = f"{odd}:{ROOT}"
    words = ["--env", f"PYTHONPATH={path}", "--env", f"DUMP={site.folder}/dump-", "--env", "ODD==1,2=$HOME '\"x", "--env", "EMPTY="]
    handle = slurm.submit(site, "1x2", *words, "--train.run_dir", "a run of $HOME")
    assert slurm.distrag("jobs", "logs", handle, "--follow", cwd=site.folder).returncode == 0
    seen = [json.loads(each.read_text()) for each in site.folder.glob("dump-*")]
    ranks = [(argv, environ) for argv, environ in seen if "RANK" in environ]
    assert {environ["RANK"] for _, environ in ranks} >= {"0", "1"}
    for _, environ in ranks:
        assert (environ["ODD"], environ["EMPTY"], environ["PYTHONPATH"]) == ("=1,2=$HOME '\"x", "", path)
        assert environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert (site.folder / "a run of $HOME" / "result.json").exists()


def test_torchx_itself_runs_the_component_and_tells_of_a_cancelled_job(slurm: Slurm, site: Site) -> None:
    environ = {**os.environ, **slurm.environ, "OMP_NUM_THREADS": "1"}

    def torchx(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from torchx.cli.main import main; main()", *words]
        return subprocess.run(command, cwd=site.folder, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)

    component = f"{ROOT / 'launch' / 'components.py'}:train"
    words = [
        "--config",
        str(site.config),
        "-j",
        "1x2",
        "--memory",
        "1500MiB",
        "--",
        "--train.run_dir",
        "job",
        "--train.max_steps",
        "100000",
    ]
    done = torchx("run", "-s", "slurm", "--workspace", "", component, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    handle = done.stdout.split()[-1]
    wait_until(lambda: len(site.losses("job")) > 3)
    assert torchx("cancel", handle).returncode == 0
    wait_until(lambda: "CANCELLED" in slurm.state(handle))
    told = torchx("status", handle)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "CANCELLED" in told.stdout
