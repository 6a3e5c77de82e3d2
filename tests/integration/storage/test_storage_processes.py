"""Real processes against one folder: killed writers, rival writers, and what an import of storage costs."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from storage.errors import CorruptObjectError, ObjectMissingError
from storage.policies import publish_policy, resolve_policy
from storage.rollouts import read_rollouts, shard_manifests
from storage.store import open_store
from storage.verify import Severity, verify_run
from tests.helpers.storage_builders import RUN, new_run, policy_files

ROOT = Path(__file__).parents[3]

WRITER = textwrap.dedent(
    """
    import sys
    from storage.policies import publish_policy
    from storage.rollouts import find_shard, write_rollouts
    from storage.store import open_store
    from tests.helpers.storage_builders import RUN, policy_files, rollout_rows

    store = open_store(sys.argv[1])
    print("ready", flush=True)
    for iteration in range(40):
        for shard in range(2):
            if find_shard(store, RUN, iteration, shard, input_fingerprint="f") is None:
                rows = rollout_rows(range(2 * shard, 2 * shard + 2), iteration=iteration)
                write_rollouts(store, RUN, iteration, shard, 2, rows, input_fingerprint="f", created_by="test")
        publish_policy(store, RUN, iteration, policy_files(iteration), created_by="test")
        print(iteration, flush=True)
    """
)


def _start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(root)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_writer_killed_at_random_points_leaves_only_whole_artefacts_and_ends_complete(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    new_run(store)
    chance = random.Random(20260102)
    for _ in range(4):
        process = _start(tmp_path)
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 12)):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        report = verify_run(store, RUN)
        torn = [finding.message for finding in report.findings if finding.severity is Severity.ERROR]
        assert all("are not committed" in message for message in torn), torn
        for iteration in range(40):
            try:
                assert read_rollouts(store, RUN, iteration).num_rows == 8
            except ObjectMissingError:
                break
    with _start(tmp_path) as process:
        assert process.wait() == 0
    ids = [name for k in range(40) for name in read_rollouts(store, RUN, k, columns=["row_id"])["row_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == 320
    assert resolve_policy(store, RUN).version == 39
    assert verify_run(store, RUN).is_good


def test_rival_writers_of_the_same_work_agree_on_one_result(tmp_path: Path) -> None:
    new_run(open_store(str(tmp_path)))
    processes = [_start(tmp_path) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    store = open_store(str(tmp_path))
    assert any(process.returncode == 0 for process in processes), outputs
    assert [resolve_policy(store, RUN, k).version for k in range(40)] == list(range(40))
    for iteration in range(40):
        assert len(shard_manifests(store, RUN, iteration)) == 2
        assert read_rollouts(store, RUN, iteration).num_rows == 8


def test_reader_beside_a_writer_never_sees_a_torn_policy(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    publish_policy(store, RUN, 0, policy_files(0), created_by="test")
    process = _start(tmp_path)
    assert process.stdout is not None
    seen = set()
    while process.poll() is None:
        try:
            policy = resolve_policy(store, RUN)
        except CorruptObjectError:  # head moved between the two reads would be a fault
            process.kill()
            raise
        model = store.read_bytes(policy.manifest.part("model.safetensors").path)
        assert model == policy_files(policy.version)["model.safetensors"]
        seen.add(policy.version)
    process.stdout.close()
    assert process.returncode == 0
    assert resolve_policy(store, RUN).version == 39
    assert seen


def test_import_of_storage_loads_no_heavy_package() -> None:
    code = (
        "import pkgutil, importlib, sys, storage\n"
        "for module in pkgutil.iter_modules(storage.__path__, 'storage.'): importlib.import_module(module.name)\n"
        "heavy = {'torch', 'airflow', 'pyarrow', 'duckdb', 's3fs', 'botocore', 'pandas', 'plans', 'stages'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
