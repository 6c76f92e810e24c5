"""The command line as a user meets it: real processes, real files, and one loss curve for 1, 2 and 4 of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def call(*words: object, ranks: int = 0, good: bool = True, cwd: Path = ROOT) -> str:
    """Runs `distrag ...` (under torchrun with `ranks` processes); returns what it printed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launch, "-m", "distrag", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment, check=False)
    assert (done.returncode == 0) == good, done.stdout + done.stderr
    return done.stdout if good else done.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    call("prepare", "synthetic", "--out", folder / "store", "--num-samples", 300, "--num-items", 60, "--seed", 3)
    return folder / "store"


def small(run_dir: Path, **more: object) -> list[str]:
    keys = {
        "data.max_len": 30,
        "batching.global_tokens": 600,
        "model.dim": 16,
        "encoder.num_layers": 1,
        "tables.shard_rows": 1,
        "train.max_steps": 12,
        "train.log_every": 1,
        "train.eval_every": 12,
        "train.tensorboard": "false",
        "train.device": "cpu",
        "train.run_dir": run_dir,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_help_answers_in_under_a_second_and_names_every_command() -> None:
    fastest = 9.0
    for _ in range(3):
        started = time.perf_counter()
        text = call("--help")
        fastest = min(fastest, time.perf_counter() - started)
    assert fastest < 1.0
    assert all(f"  {name}" in text for name in ("prepare", "stats", "plan", "train", "evaluate", "bench", "report"))


def test_one_two_and_four_processes_log_the_same_loss_at_every_step(store: Path, tmp_path: Path) -> None:
    call("train", f"--data.path={store}", *small(tmp_path / "0"))
    expected = losses(tmp_path / "0")
    assert len(expected) == 12
    for ranks in (1, 2, 4):
        call("train", f"--data.path={store}", *small(tmp_path / str(ranks)), ranks=ranks)
        assert losses(tmp_path / str(ranks)) == pytest.approx(expected, abs=1e-5)
    call("train", f"--data.path={store}", "--debug", *small(tmp_path / "debug"))
    assert losses(tmp_path / "debug") == pytest.approx(expected, abs=1e-6)


def test_from_a_parquet_file_to_evaluated_runs(tmp_path: Path) -> None:
    rows = [[f"film-{(user * 7 + i) % 23}" for i in range(user % 9)] for user in range(90)]
    pq.write_table(pa.table({"user_id": list(range(90)), "item_id": rows}), tmp_path / "histories.parquet")
    call("prepare", tmp_path / "histories.parquet", "--out", tmp_path / "store")
    numbers = json.loads(call("stats", tmp_path / "store", "--json", "--verify"))
    assert numbers
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({"data": {"path": str(tmp_path / "store")}, "encoder": {"name": "gru"}, "train": {"num_epochs": 1}})
    )
    plan = json.loads(call("plan", tmp_path / "c.yaml", "--world-size", 3, "--json"))
    assert plan["num_samples"] == 90
    call("train", "--config", tmp_path / "c.yaml", *small(tmp_path / "run"))
    alone = json.loads(call("evaluate", tmp_path / "run", "--json"))
    both = json.loads(call("evaluate", tmp_path / "run", "--json", ranks=2, cwd=tmp_path))
    assert both == pytest.approx(alone)
    assert "hr@3" in json.loads(call("evaluate", tmp_path / "run", "--part", "valid", "--ks", 3, "--json"))
    floor = json.loads(call("evaluate", "--popularity", "train", "--data", tmp_path / "store", "--json"))
    assert floor["users"] == alone["users"]
    assert call("report", tmp_path / "run").strip().endswith("report.html")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean 'train'"),
        (["train", "--optim.lrr=1"], "did you mean 'optim.lr'"),
        (["train", "--data.path=nowhere", "--train.max_steps=1"], "nowhere"),
        (["prepare", "nowhere.parquet", "--out", "unused-folder"], "nowhere.parquet"),
        (["stats", "nowhere"], "nowhere"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate"], "Nothing to evaluate"),
        (["report", "nowhere"], "nowhere"),
        (["plan", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "configs/mine.yaml"], "write --config configs/mine.yaml"),
        (["train", "--optim.betas=[0.9, 2]"], "optim.betas"),
        (["evaluate", "--popularity", "all", "--data", "nowhere", "--ks", "0"], "--ks"),
    ],
)
def test_mistakes_end_in_one_clear_message(words: list[str], message: str, tmp_path: Path) -> None:
    text = call(*words, good=False, cwd=tmp_path)
    assert message in text
    assert "Traceback" not in text


def test_debug_keeps_the_traceback(tmp_path: Path) -> None:
    for word in ("--debug", "--debug=true"):
        text = call("train", "--data.path=nowhere", "--train.max_steps=1", word, good=False, cwd=tmp_path)
        assert "Traceback" in text
        assert "to do:" in text
    text = call("train", "--data.path=nowhere", "--train.max_steps=1", "--debug=false", good=False, cwd=tmp_path)
    assert "Traceback" not in text


def test_help_of_training_tells_what_encoders_take_by_default() -> None:
    text = " ".join(call("train", "--help").split())
    assert "transformer blocks (self_attention 1, sasrec 2)" in text


@pytest.mark.parametrize(
    ("words", "number", "seconds", "code"),
    [
        (["prepare", "synthetic", "--out", "store", "--num-samples", "3000000"], signal.SIGINT, 1.0, 130),
        (["prepare", "synthetic", "--out", "store", "--num-samples", "3000000"], signal.SIGTERM, 1.0, 143),
        (["plan", "configs/quickstart.yaml"], signal.SIGINT, 0.3, 130),
        (["plan", "configs/quickstart.yaml"], signal.SIGTERM, 0.3, 143),
        (["evaluate", "--popularity", "train", "--data", "nowhere"], signal.SIGINT, 0.3, 130),
        (["train", "--config", "configs/quickstart.yaml"], signal.SIGTERM, 0.3, 75),
    ],
)
def test_a_command_that_is_stopped_ends_at_once_and_leaves_nothing(
    words: list[str], number: int, seconds: float, code: int, tmp_path: Path
) -> None:
    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so do its children

    command = [sys.executable, "-m", "distrag", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=listen
    ) as process:
        while not _catches(process.pid, signal.SIGTERM):
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, "")
    assert list(tmp_path.iterdir()) == []


def _catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)
