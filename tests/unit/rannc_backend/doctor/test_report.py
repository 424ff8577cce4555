"""The report of the doctor has what helps, and nothing that looks secret."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.cli import doctor as cli_doctor
from rannc_backend.cli.main import main
from rannc_backend.doctor import redaction, report
from rannc_backend.doctor.findings import Finding

FINDINGS = [
    Finding(name="Python", status="ok", text="3.11"),
    Finding(
        name="two ranks",
        status="problem",
        text="failed",
        cure="do this.",
        details="line 1\nHF_TOKEN=hf_abcdefghijklmn\nlast",
    ),
]
SECRETS = {
    "NCCL_AUTH_TOKEN": "nccl-s3cret-1",
    "RANNC_API_KEY": "rannc-s3cret-2",
    "OMPI_MCA_password": "ompi-s3cret-3",
    "SLURM_JWT_SECRET": "slurm-s3cret-4",
    "CUDA_CREDENTIALS": "cuda-s3cret-5",
    "HTTPS_PROXY": "http://somebody:proxy-s3cret-6@proxy.example:3128",
    "TORCH_MIRROR": "https://user:torch-s3cret-7@example.org/simple?signature=query-s3cret-8",
    "NCCL_NET_PLUGIN": "/opt/plug?x=nccl-s3cret-1",
    "MASTER_ADDR": "10.0.0.1",
}


@pytest.fixture
def path_variable(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with an nvidia-smi, and no mpirun."""
    folder = tmp_path_factory.mktemp("programs")
    program = folder / "nvidia-smi"
    says = ["  Serial Number : 12345", "Driver Version: 570", "PASSWORD=tail-s3cret-9"]
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in says)]), encoding="utf-8")
    program.chmod(0o755)
    return f"{folder}:/bin"


@pytest.mark.parametrize("name", ["report.txt", "report.json"])
def test_what_looks_secret_is_left_out(tmp_path: Path, path_variable: str, name: str) -> None:
    path = tmp_path / name
    environ = {**SECRETS, "PATH": path_variable, "NCCL_DEBUG": "INFO", "HOME": "/home/me"}
    report.write_report(str(path), FINDINGS, environ)
    text = path.read_text(encoding="utf-8")
    assert "s3cret" not in text and "hf_abc" not in text and "somebody" not in text and "/home/me" not in text
    assert "12345" not in text and "Driver Version: 570" in text
    for kept in ("NCCL_DEBUG", "10.0.0.1", "do this.", "line 1", "unknown option 'RANNC_API_KEY'", "last"):
        assert kept in text, kept
    if name.endswith(".json"):
        assert json.loads(text)["environment"]["NCCL_DEBUG"] == "INFO"
    assert sorted(each.name for each in tmp_path.iterdir()) == [name]


def test_options_say_where_they_come_from() -> None:
    content = report.report_content(
        FINDINGS, {"RANNC_PIPELINE_NUM": "4", "RANNC_CONF_DIR": os.environ["RANNC_CONF_DIR"]}
    )
    assert "pipeline_num = 4 (environment RANNC_PIPELINE_NUM)" in content["options"]
    assert content["versions"]["torch"]


def test_last_lines_of_logs(tmp_path: Path) -> None:
    log = tmp_path / "rannc.log"
    log.write_text(
        "".join(f"line {number}\n" for number in range(5000)) + "token: log-s3cret\n", encoding="utf-8"
    )
    (tmp_path / "logging.toml").write_text(
        "[[sink]]\n"
        'name = "f"\n'
        'type = "basic_file_sink_st"\n'
        f'filename = "{log}"\n[[logger]]\nname = "root"\nsinks = ["f"]\nlevel = "info"\n'
    )
    found = report.report_content([], {"RANNC_CONF_DIR": str(tmp_path)})["logs"]
    assert list(found) == [str(log)], found
    assert (
        "line 4999" in found[str(log)]
        and "line 10\n" not in found[str(log)]
        and "s3cret" not in found[str(log)]
    )
    os.unlink(log)
    os.mkfifo(log)
    assert "a pipe" in report.report_content([], {"RANNC_CONF_DIR": str(tmp_path)})["logs"][str(log)]


secret_names = st.sampled_from(
    ["{}_TOKEN", "{}KEY", "my_{}_password", "{}_SECRET", "AUTH_{}", "{}_PASS"]
).flatmap(lambda form: st.sampled_from(["A", "NCCL", "RANNC", "X9"]).map(form.format))
secrets = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="\"'"), min_size=6, max_size=30
).map("zQ{}".format)
forms = st.sampled_from(
    ["{n}={s}", '"{n}": "{s}"', "--{n} {s}", "{n}: {s}", "http://u:{s}@h/p", "x {s} y", "Bearer {s}"]
)


@given(name=secret_names, secret=secrets, form=forms)
def test_a_value_of_a_secret_name_stands_nowhere(name: str, secret: str, form: str) -> None:
    text = form.format(n=name, s=secret)
    assert secret not in redaction.redacted(text, redaction.secret_values({name: secret}))
    content = redaction.redacted_all(
        {"a": [text, {name: secret}], text: 3}, redaction.secret_values({name: secret})
    )
    assert secret not in str(content)


@pytest.mark.parametrize(
    "text",
    [
        "http://me:s3cret@proxy:1/x",
        "https://s3cret@host",
        "Authorization: Bearer s3cret.s3cret",
        "api_key = 's3cret s3cret'",
        "--password s3cret",
        "hf_s3cretS3cret",
        "eyJs3crets3cret.s3crets3cret.s3cret",
        "-----BEGIN RSA PRIVATE KEY-----\ns3cret\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\ns3cret",
        "GET /x?sig=s3cret&y=s3cret",
    ],
)
def test_shapes_of_secrets(text: str) -> None:
    assert "s3cret" not in redaction.redacted(text, []), redaction.redacted(text, [])


def test_plain_texts_stay() -> None:
    plain = "rank 1 of 2 (host vm): /usr/lib/libmpi.so.12, mpirun -np 2, 10.0.0.1:4711, loss 1.25 at step 3"
    assert redaction.redacted(plain, []) == plain
    assert not redaction.is_secret_name("PWD") and not redaction.is_secret_name("NCCL_DEBUG")


def test_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_doctor, "host_findings", lambda environ: iter(FINDINGS))
    path = tmp_path / "report.txt"
    path.write_text("old")
    path.chmod(0o600)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--no-ranks", "--report", str(path)])
    assert caught.value.code == 1 and "problem  two ranks: failed" in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and str(path) in capsys.readouterr().err
    for bad in (tmp_path, tmp_path / "missing" / "report.txt"):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", "--no-ranks", "--report", str(bad)])
        assert caught.value.code == 2 and "option --report" in capsys.readouterr().err
