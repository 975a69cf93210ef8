"""The servers of `crmatch label` and `crmatch serve`: what they write and answer, and what they refuse."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock, Timeout
from PIL import Image

from conftest import TINY_OPTIONS, Command, Trained
from crmatch.data.folder.load import load_folder
from crmatch.predict.model import load
from crmatch.report.labeling import LabelingSite, read_folder
from crmatch.report.model_site import ModelSite
from crmatch.report.server import LocalServer
from finished import HOSTILE_NAMES, write_photos
from local_server import ask, cards_of, open_browser_with, served

pytestmark = pytest.mark.process


def open_site(folder: Path) -> LabelingSite:
    file = folder / "labels.csv"
    return LabelingSite(folder, file, read_folder(folder, file, folder.parent / "cache", None), None, "crmatch train photos")


def labels_in(folder: Path) -> dict[str, str]:
    lines = csv.DictReader(io.StringIO((folder / "labels.csv").read_text()))
    return {line["path"]: line["label"] for line in lines}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = write_photos(tmp_path / "photos", labeled=4, unlabeled=6, test=2)
    shutil.copy(folder / "labeled" / "across" / "00.jpg", folder / "labeled" / "down" / "same.jpg")
    (folder / "unlabeled" / "broken.jpg").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, Path]]:
    """A server that no test may bring to write anything, and its folder."""
    folder = write_photos(tmp_path_factory.mktemp("guarded") / "photos", labeled=4, unlabeled=6)
    (folder.parent / "secret.jpg").write_bytes((folder / "unlabeled" / "04.jpg").read_bytes())
    with served(open_site(folder)) as server:
        yield server, folder
    assert not (folder / "labels.csv").exists()


def test_every_choice_is_in_the_file_before_it_is_confirmed(photos: Path) -> None:
    with served(open_site(photos)) as server:
        status, page, _ = ask(server.address, "")
        row = {card["n"]: card["i"] for card in cards_of(page)}
        assert status == 200
        assert len(row) == 11  # labeled and unlabeled ones, but neither test pictures nor the broken one
        labels = {card["n"]: card["l"] for card in cards_of(page)}
        assert list(labels.values())[:6] == [None] * 6  # first those without a label
        assert labels["labeled/across/00.jpg"] == "across"
        groups = {card["n"] for card in cards_of(page) if "x" in card}
        assert groups == {"labeled/across/00.jpg", "labeled/down/same.jpg"}  # the same picture with two labels

        def give(label: str | None, *names: str) -> int:
            return ask(server.address, "labels", {"label": label, "pictures": [row[name] for name in names]})[0]

        assert give("across", "unlabeled/04.jpg", "unlabeled/05.jpg") == 200
        assert give(" a new class ", "unlabeled/06.jpg") == 200
        assert give("", "unlabeled/07.jpg") == 200
        assert give("-", "labeled/down/same.jpg") == 200
        expected = dict.fromkeys(["unlabeled/04.jpg", "unlabeled/05.jpg"], "across")
        expected |= {"unlabeled/06.jpg": "a new class", "unlabeled/07.jpg": "", "labeled/down/same.jpg": "-"}
        assert labels_in(photos) == expected
        assert give(None, "unlabeled/05.jpg") == 200
        assert give("", "labeled/across/00.jpg") == 400  # its directory names its class
        del expected["unlabeled/05.jpg"]
        assert labels_in(photos) == expected
        shown = {card["n"]: card["l"] for card in cards_of(ask(server.address, "")[1])}
        assert shown == {**labels, **expected}
    pictures = load_folder(photos, 16, photos.parent / "cache")  # training sees the same
    assert pictures.train.class_names == ("a new class", "across", "down")
    assert sorted(pictures.train.labels.tolist()) == [-2, -1, -1, -1, -1, 0, 1, 1, 1, 2, 2]
    assert {card["n"]: card["l"] for card in cards_of(open_site(photos).get("", "").content)} == shown  # type: ignore[union-attr]


def test_class_directories_at_the_top_keep_their_labels_when_labels_csv_begins(tmp_path: Path) -> None:
    """A labels.csv that names none of the directories makes the folder one heap, so a new one repeats their labels."""
    folder = write_photos(tmp_path / "photos", labeled=4, unlabeled=6)
    for directory in (folder / "labeled").iterdir():
        directory.rename(folder / directory.name)
    (folder / "labeled").rmdir()
    site = open_site(folder)
    row = next(row for row, card in site._cards.items() if card["l"] is None)
    assert site.post("labels", json.dumps({"label": "new", "pictures": [row]}).encode()) is not None
    train = read_folder(folder, folder / "labels.csv", tmp_path / "cache", None).train
    assert set(train.class_names) == {"across", "down", "new"}
    assert (train.labels >= 0).sum() == 5


def test_requests_without_the_token_or_for_another_host_get_nothing(guarded: tuple[LocalServer, Path]) -> None:
    server, _ = guarded
    right, port = server.address, server.server_port
    assert ask(right, "", Host=f"localhost:{port}")[0] == 200
    choice = {"label": "across", "pictures": [0]}
    for address, host in [
        (f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}"),
        (right[:-3] + "/", f"127.0.0.1:{port}"),
        (f"http://127.0.0.1:{port}/x/", f"127.0.0.1:{port}"),
        (right, "evil.example"),
        (right, f"evil.example:{port}"),
        (right, "127.0.0.1"),
    ]:
        for path, body in (("", None), ("picture/0", None), ("labels", choice), ("done", {})):
            status, said, _ = ask(address, path, body, Host=host)
            assert status == 403, (address, host, path)
            assert "photos" not in json.dumps(said)
    assert not server.ended
    policy = ask(right, "")[2]["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "path",
    ["picture/99", "picture/-1", "picture/../secret.jpg", "picture/%2e%2e/secret.jpg", "../secret.jpg", "labels.csv",
     "thumbnail/", "picture/0/../../../secret.jpg", "picture//etc/passwd", "picture/00000000000000000000"],
)  # fmt: skip
def test_no_other_file_is_served(guarded: tuple[LocalServer, Path], path: str) -> None:
    status, _, headers = ask(guarded[0].address, path)
    assert status in (403, 404)
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'"x"', b'{"label": "cat"}', b'{"label": "cat", "pictures": []}', b'{"label": 3, "pictures": [0]}',
     b'{"label": "cat", "pictures": [true]}', b'{"label": "cat", "pictures": ["../../x.jpg"]}',
     b'{"label": "cat", "pictures": [11]}', b'{"label": "cat", "pictures": [-1]}', b'{"label": "cat", "pictures": [1e99]}',
     b'{"label": "a\\nb", "pictures": [0]}', b'{"label": "\\ud800", "pictures": [0]}',
     b'{"label": "cat", "pictures": [0], "x": 1}',
     json.dumps({"label": "x" * 101, "pictures": [0]}).encode(), b"\xff\xfe", b"[" * 100_000],
)  # fmt: skip
def test_a_wrong_request_changes_nothing(guarded: tuple[LocalServer, Path], body: bytes) -> None:
    status, said, _ = ask(guarded[0].address, "labels", body)
    assert (status, list(said)) == (400, ["error"])
    assert not (guarded[1] / "labels.csv").exists()


def test_large_bodies_and_unknown_paths_are_refused(guarded: tuple[LocalServer, Path]) -> None:
    server, _ = guarded
    assert ask(server.address, "labels", b" " * ((1 << 20) + 1))[0] == 413
    assert ask(server.address, "labels.csv", {})[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.putrequest("POST", f"/{server.token}/labels")
    connection.endheaders()
    assert connection.getresponse().status == 413  # no length given
    connection.close()


def test_pictures_are_upright_shrunk_and_encoded_again(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", unlabeled=2)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 2400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "unlabeled" / "large.jpg", exif=exif)
    Image.new("I;16", (20, 10), 40_000).save(folder / "unlabeled" / "deep.png")
    site = open_site(folder)
    row = {card["n"].rpartition("/")[2]: card["i"] for card in cards_of(site.get("", "").content)}  # type: ignore[union-attr]
    sizes = {}
    for name in ("large.jpg", "deep.png"):
        for kind in ("thumbnail", "picture"):
            answer = site.get(f"{kind}/{row[name]}", "")
            assert answer is not None
            assert answer.kind == "image/jpeg"
            sizes[name, kind] = Image.open(io.BytesIO(answer.content)).size
    assert sizes[("large.jpg", "picture")] == (667, 1600)
    assert sizes[("large.jpg", "thumbnail")] == (107, 256)
    assert sizes[("deep.png", "picture")] == (20, 10)
    (folder / "unlabeled" / "large.jpg").write_text("root:x:0:0:")  # changed meanwhile, e.g. to a link to something else
    with served(site) as server:
        assert ask(server.address, f"picture/{row['large.jpg']}")[0] == 400


def test_hostile_names_are_text(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", labeled=4)
    names = ["<script><img src=x onerror=alert(1)>.jpg", "a'b\"c&.jpg", "ü\n.jpg", "__proto__.jpg"]
    (folder / "unlabeled").mkdir()
    for name in names:
        shutil.copy(folder / "labeled" / "down" / "01.jpg", folder / "unlabeled" / name)
    site = open_site(folder)
    page = site.get("", "NONCE").content.decode()  # type: ignore[union-attr]
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img src=x" not in page
    row = {card["n"]: card["i"] for card in cards_of(page.encode())}
    for number, name in enumerate(names):
        site.post(
            "labels", json.dumps({"label": [*HOSTILE_NAMES, "x"][number], "pictures": [row[f"unlabeled/{name}"]]}).encode()
        )
    assert labels_in(folder) == {f"unlabeled/{name}": label for name, label in zip(names, [*HOSTILE_NAMES, "x"], strict=True)}
    assert set(HOSTILE_NAMES) <= {*load_folder(folder, 16, tmp_path / "cache").train.class_names}


def test_a_folder_without_any_label_is_labeled_trained_and_labeled_again(
    crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures = write_photos(tmp_path / "all", unlabeled=20)
    (pictures / "unlabeled").rename(tmp_path / "photos")  # nothing but pictures

    def label(address: str) -> None:
        cards = cards_of(ask(address, "")[1])
        for card in [card for card in cards if card["l"] is None][:4]:
            side = "down" if int(card["n"][:2]) % 2 else "across"
            assert ask(address, "labels", {"label": side, "pictures": [card["i"]]})[0] == 200
        assert ask(address, "done", {})[0] == 200

    errors = open_browser_with(monkeypatch, label)
    said = crmatch("label", "photos")
    assert (said.code, errors) == (0, [])
    assert said.out.splitlines()[-1] == "Next: crmatch train photos --name round1"
    assert f"4 labeled: {tmp_path / 'photos' / 'labels.csv'}" in said.out
    assert crmatch("train", "photos", "--name", "round1", "--no-baseline", *TINY_OPTIONS).code == 0
    again = crmatch("label", "photos", "--train")  # finds the run of the folder, and trains when it is done
    assert (again.code, errors) == (0, []), again.err
    assert "4 more labels" in again.out
    assert "Saved in runs/photos/round2" in again.out
    assert labels_in(tmp_path / "photos") == {
        path: "down" if int(path[:2]) % 2 else "across" for path in labels_in(tmp_path / "photos")
    }
    assert len(labels_in(tmp_path / "photos")) == 8


def test_the_server_stops_when_idle_and_by_a_signal_and_one_is_enough(
    crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained
) -> None:
    folder = write_photos(tmp_path / "photos", labeled=4, unlabeled=4)
    idle = crmatch("label", folder, "--no-browser", "--idle", 0.01, "--data-dir", tmp_path / "cache")
    assert idle.code == 0
    assert "Stopped after 0.01 minutes without a request." in idle.out
    assert "nothing was labeled" in idle.out

    (lock,) = (tmp_path / "cache").glob("labeling-*.lock")
    with FileLock(lock):
        second = crmatch("label", folder, "--no-browser", "--data-dir", tmp_path / "cache")
    assert (second.code, second.err.splitlines()[1]) == (4, "Use its page, or stop it first.")

    def interrupt(address: str) -> None:
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)
        os.kill(os.getpid(), signal.SIGINT)

    errors = open_browser_with(monkeypatch, interrupt)
    begin = time.monotonic()
    stopped = crmatch("label", folder, "--data-dir", tmp_path / "cache")
    assert (stopped.code, errors) == (0, [])
    assert time.monotonic() - begin < 20
    assert "Next: crmatch train" in stopped.out
    refused = crmatch("label", trained.run, "--no-browser")
    assert refused.code == 2
    assert "crmatch review" in refused.err
    (tmp_path / "empty").mkdir()
    assert "has no pictures" in crmatch("label", tmp_path / "empty").err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = crmatch("serve", trained.run, "--port", taken.getsockname()[1])
    assert (busy.code, busy.err.splitlines()[1]) == (2, "Use another --port.")


def test_serve_answers_pictures_with_probabilities_and_others_with_a_message(trained: Trained, tmp_path: Path) -> None:
    model = load(trained.run)
    file = write_photos(tmp_path, some=1) / "some" / "00.jpg"
    with served(ModelSite(model, "<b>stripes</b>")) as server:
        status, found, _ = ask(server.address, "predict", file.read_bytes())
        assert status == 200
        values = [one["probability"] for one in found["classes"]]
        assert values == sorted(values, reverse=True)
        expected = dict(zip(model.class_names, model.predict_probabilities(file)[0].tolist(), strict=True))
        assert {one["class"]: one["probability"] for one in found["classes"]} == pytest.approx(expected, abs=1e-6)
        for body in (b"", b"no picture", file.read_bytes()[:300]):
            status, said, _ = ask(server.address, "predict", body)
            assert (status, list(said)) == (400, ["error"])
        assert ask(server.address, "predict", b" " * ((50 << 20) + 1))[0] == 413
        assert ask(server.address, "elsewhere", file.read_bytes())[0] == 404
        page = ask(server.address, "")[1].decode()
        assert "&lt;b&gt;stripes" in page
        assert "<b>stripes" not in page


def test_the_command_serve_prints_an_address_for_programs(
    crmatch: Command, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_photos(tmp_path, some=1) / "some" / "00.jpg"

    def post(address: str) -> None:
        assert ask(address, "predict", file.read_bytes())[0] == 200
        os.kill(os.getpid(), signal.SIGINT)

    errors = open_browser_with(monkeypatch, post)
    said = crmatch("serve", trained.run)
    assert (said.code, errors) == (0, [])
    assert "curl --data-binary @photo.jpg http://127.0.0.1:" in said.out
