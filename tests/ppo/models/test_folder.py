"""A hub name as a folder: what is fetched, from a hub on this machine; the small files in it."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from ppo.errors import InputError
from ppo.models.folder import files_to_keep, model_folder, read_generation_config
from sharding.mesh import Mesh, ParallelDims, build_mesh, init_distributed

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {
    *("config.json", "generation_config.json", "tokenizer_config.json", "merges.txt", "vocab.json"),
    *("tokenizer.model", "chat_template.jinja", "modeling_own.py", "spm.spm", "qwen.tiktoken"),
}
REPOSITORIES = {
    "us/safe": SMALL
    | {"model.safetensors", "pytorch_model.bin", "original/w.safetensors", "a.png"},
    "us/old": SMALL | {"pytorch_model.bin", "training_args.bin", "model.onnx"},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download needs."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.strip("/").partition("?")[0]
        body = b"{}"
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        files = sorted(REPOSITORIES.get(name, ()))
        if "/tree/" in path:
            oid = sha1(body).hexdigest()
            tree = [{"type": "file", "path": file, "size": len(body), "oid": oid} for file in files]
            body = json.dumps(tree).encode()
        elif path.startswith("api/"):
            siblings = [{"rfilename": file} for file in files]
            body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200 if files else 404)
        if not files:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield
    server.shutdown()
    thread.join()


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with init_distributed(torch.device("cpu")):
        yield build_mesh(ParallelDims(world_size=1, ranks_per_node=1), torch.device("cpu"))


def files_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_everything_that_a_folder_needs_is_fetched_and_nothing_else(hub, mesh, tmp_path):
    fetched = model_folder("us/safe", mesh, tmp_path)
    assert files_of(fetched) == SMALL | {"model.safetensors"}
    fetched = model_folder("us/old", mesh, tmp_path)  # without safetensors
    assert files_of(fetched) == SMALL | {"pytorch_model.bin"}
    with pytest.raises(InputError, match="model us/none: no such folder here, and the hub says"):
        model_folder("us/none", mesh, tmp_path)


@pytest.mark.parametrize("text", [b'{"eos_token_id": [1, ', b"[1]", b"\xff"])
def test_a_broken_generation_config_is_one_error_at_the_start(tmp_path, mesh, text):
    (tmp_path / "generation_config.json").write_bytes(text)
    with pytest.raises(InputError, match=r"generation_config\.json: (cannot be read|is no JSON)"):
        model_folder(str(tmp_path), mesh, tmp_path)


def test_a_folder_without_generation_config_has_nothing_to_keep(tmp_path):
    assert read_generation_config(tmp_path) == {} and files_to_keep(tmp_path) == []
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [1, 2]}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [1, 2]}
    assert files_to_keep(tmp_path) == [path]
