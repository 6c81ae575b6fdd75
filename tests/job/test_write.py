"""Jobs written back as TOML."""

import stat
from pathlib import Path

import pytest
from hypothesis import given

from isthmus.errors import FieldError, JobError, UserError
from isthmus.job import Job, PipelineStrategy, load_job
from isthmus.job.load import dump_job, parse_job, update_job_file
from tests.job.strategies import jobs, with_jobs

EXAMPLE = Path(__file__).parents[2] / "examples" / "two-clouds.toml"
LINK = "link.east-west"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(EXAMPLE.read_text())
    return file


@with_jobs
@given(jobs())
def test_dumped_job_loads_back_to_an_equal_one(job: Job) -> None:
    again = parse_job(dump_job(job), file=Path("dumped.toml"))
    assert again == job
    assert again.digest == job.digest


def test_dump_writes_units_and_defaults() -> None:
    text = dump_job(load_job(EXAMPLE))
    for line in ('bandwidth = "200 Mbps"', 'rtt = "40 ms"', 'heartbeat_timeout = "30 s"', 'every = "5 min"'):
        assert line in text.splitlines()


def test_update_changes_the_figures_and_nothing_else(job_file: Path) -> None:
    before = job_file.read_text().splitlines()
    figures = {
        "bandwidth": ["198.8 Mbps", "91 Mbps"],
        "rtt": "41.23 ms",
        "jitter": "700 us",
        "handling": "1.25 ms",
    }
    update_job_file(job_file, {LINK: figures})
    after = job_file.read_text().splitlines()
    changed = [line for line in after if line not in before]
    assert [line.partition("#")[0].rstrip() for line in changed] == [
        'bandwidth = ["198.8 Mbps", "91 Mbps"]',
        'rtt = "41.23 ms"',
        'jitter = "700 us"',
        'handling = "1.25 ms"',
    ]
    kept = [line for line in before if line in after]
    assert len(kept) == len(before) - 2
    assert [comment for line in before if (comment := line.partition("#")[2])] == [
        comment for line in after if (comment := line.partition("#")[2])
    ]


def test_updated_file_loads_and_is_still_the_same_job(job_file: Path) -> None:
    digest = load_job(job_file).digest
    figures = {"bandwidth": "150 Mbps", "handling": "2 ms", "connection_bandwidth": "40 Mbps"}
    update_job_file(job_file, {LINK: figures})
    job = load_job(job_file)
    assert job.link[0].handling_s == 0.002
    assert job.link[0].bandwidth_bps == (150e6, 150e6)
    assert job.link[0].connection_bps == 40e6
    assert job.link[0].rtt_s == 0.04
    assert job.digest == digest


def test_update_finds_links_written_inline(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'name = "x"\ncloud = [{name = "east", listen = "h:1"}, {name = "west"}]\n'
        'link = [{between = ["east", "west"]}]  # inline\n'
    )
    update_job_file(file, {LINK: {"rtt": "50 ms"}})
    assert load_job(file).link[0].rtt_s == 0.05
    assert file.read_text().endswith("# inline\n")


def test_update_makes_sections_that_the_file_lacks(job_file: Path) -> None:
    strategy = {"kind": "pipeline", "layers": [3, 4]}
    update_job_file(job_file, {"strategy": strategy, "cloud.west": {"sharding": "full"}})
    job = load_job(job_file)
    assert (job.strategy, job.cloud[1].sharding) == (
        PipelineStrategy(kind="pipeline", layers=(3, 4)),
        "full",
    )
    assert "[strategy]\n" in job_file.read_text()


def test_update_keeps_mode_line_ends_and_symbolic_links(job_file: Path, tmp_path: Path) -> None:
    job_file.write_bytes(EXAMPLE.read_bytes().replace(b"\n", b"\r\n"))
    job_file.chmod(0o640)
    pointer = tmp_path / "pointer.toml"
    pointer.symlink_to(job_file)
    update_job_file(pointer, {LINK: {"rtt": "50 ms"}})
    assert pointer.is_symlink()
    assert stat.S_IMODE(job_file.stat().st_mode) == 0o640
    lines = job_file.read_bytes().splitlines(keepends=True)
    assert b'rtt = "50 ms"' in lines[-1]
    assert all(line.endswith(b"\r\n") for line in lines)


def test_update_of_an_unknown_link_is_refused_and_changes_nothing(job_file: Path) -> None:
    before = job_file.read_bytes()
    with pytest.raises(FieldError, match="link has no entry 'east-north'"):
        update_job_file(job_file, {LINK: {"rtt": "1 s"}, "link.east-north": {"rtt": "1 s"}})
    assert job_file.read_bytes() == before


def test_figures_that_make_no_job_change_nothing(job_file: Path) -> None:
    before = job_file.read_bytes()
    with pytest.raises(JobError):
        update_job_file(job_file, {LINK: {"bandwidth": "0 bps"}})
    assert job_file.read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_no_other(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = job_file.read_bytes()
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        update_job_file(job_file, {LINK: {"rtt": "50 ms"}})
    assert job_file.read_bytes() == before
    assert list(job_file.parent.iterdir()) == [job_file]
