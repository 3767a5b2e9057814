"""Text about images by a model of a run, against the model's own logits without a cache; and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from diloco_jax.cli import inference
from diloco_jax.cli import main as cli
from diloco_jax.runtime.model.evaluation import Evaluator
from diloco_jax.runtime.records.checkpoint import save_parameters
from diloco_jax.runtime.records.files import CHECKPOINTS, CONFIG_FILE
from diloco_jax.settings.run import RunConfig
from diloco_jax.settings.text import parse
from diloco_jax.tools.inference.prompt import prompt_of
from diloco_jax.tools.inference.writer import Writing
from diloco_jax.training.data.images import cut_image
from diloco_jax.training.data.tokenizer import open_tokenizer
from diloco_jax.training.models.config import SEEING_DECODER
from tests.extras import absent
from tests.runtime.helpers import SMALL, merged
from tests.tools.inference.known import Known

pillow = pytest.importorskip("PIL.Image", reason=absent("data"))

CONTEXT = 48
BEGIN, IMAGE, END = 256, 257, 258
ARGS: dict[str, Any] = {
    "vocab_size": 260, "dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 24,
    "seq_len_max": 64, "image_token": IMAGE, "image_begin": BEGIN, "image_end": END,
    "pattern": ["local", "global"], "kinds": {"local": {"window": 8, "see_images": True}, "global": {}},
    "tower": {"dim": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "mlp_dim": 24, "positions": 16},
}  # fmt: skip


def values_of(folder: Path, module: str = SEEING_DECODER, **args: Any) -> dict[str, Any]:
    (folder / "text").write_text("some text of no importance\n" * 2000)
    data = {"path": str(folder / "text"), "images": {"soft_tokens": 6}}
    return {
        **merged(SMALL, {"train": {"seq_len": CONTEXT}, "data": data}),
        "model": {"module": module, "args": args or ARGS},
    }


def config_of(folder: Path, module: str = SEEING_DECODER, **args: Any) -> RunConfig:
    return parse(values_of(folder, module, **args), "the test")


def images_in(folder: Path) -> list[Path]:
    """A wide image, with 5 x 1 soft tokens, and a nearly square one with 2 x 2."""
    rng = np.random.default_rng(0)
    for name, shape in (("wide.png", (40, 230, 3)), ("square.jpg", (90, 80, 3))):
        pillow.fromarray(rng.integers(0, 256, shape, np.uint8)).save(folder / name)
    return [folder / "wide.png", folder / "square.jpg"]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, quick_compiler: None) -> Known:
    return Known(values_of(tmp_path_factory.mktemp("known")))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, known: Known) -> Path:
    """The folder of a run with this model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(known.settings))
    save_parameters(folder / CHECKPOINTS, known.parameters, {"global_step": 7})
    return folder


def test_what_it_writes_about_images_is_likeliest(
    tmp_path: Path, known: Known, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, prompt = images_in(tmp_path), "a<|image|>bc<|image|>d"
    # Over two pieces, both with the program of 32 tokens.
    written = "".join(known.language.write(prompt, 20, Writing(), files))
    cut = [cut_image(np.asarray(pillow.open(file).convert("RGB")), 6) for file in files]
    places = [[BEGIN, *[IMAGE] * one.soft_tokens, END] for one in cut]
    ids = [ord("a"), *places[0], *b"bc", *places[1], ord("d")]
    arrays = {
        "patches": np.stack([one.pixels for one in cut])[None],
        "patch_positions": np.stack([one.positions for one in cut])[None],
    }
    for _ in range(20):
        ids.append(int(known.logits(ids, CONTEXT, **arrays)[-1, :256].argmax()))
    assert written == bytes(ids[-20:]).decode(errors="replace")

    # The command passes files, text and options on, and prints what a terminal can show.
    words = ["sample", str(run), "--temperature", "0", "--tokens", "20", "--json", "--image", *map(str, files)]
    assert cli.main([*words, "--prompt", prompt]) == 0
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in written)
    assert json.loads(capsys.readouterr().out) == {"prompt": prompt, "text": shown, "global_step": 7}


def test_without_a_prompt_the_text_begins_behind_the_image(
    tmp_path: Path, known: Known, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple[Any, ...]]()

    def write(prompt: str, count: int, how: Writing, files: list[Path]) -> list[str]:
        ids = prompt_of(known.config, known.language.tokenizer, prompt, files).ids if files else None
        asked.append((ids, count, how, files))
        return ["written"]

    monkeypatch.setattr(inference, "_language", lambda run: (SimpleNamespace(write=write), 7))
    file = images_in(tmp_path)[0]
    for prompt in ([], ["--prompt", "<|image|>"], ["--prompt", ""]):
        assert cli.main(["sample", "run", "--image", str(file), "--tokens", "2", *prompt]) == 0
    assert asked == 3 * [([BEGIN, *[IMAGE] * 5, END], 2, Writing(0.7), [file])]
    assert capsys.readouterr().out == "written\n<|image|>written\nwritten\n"
    # Without an image, a prompt is needed; the default is the start of a line.
    assert cli.main(["sample", "run", "--prompt", ""]) == 2 and len(asked) == 3
    assert cli.main(["sample", "run"]) == 0 and asked[3][1] == 200


def test_images_are_where_the_text_has_them_or_before_it(tmp_path: Path) -> None:
    config, files, tokenizer = config_of(tmp_path), images_in(tmp_path), open_tokenizer("bytes")
    ids, arrays = prompt_of(config, tokenizer, "x", files)
    first, second = ([BEGIN, *[IMAGE] * count, END] for count in (5, 4))
    assert ids == [*first, *second, ord("x")]
    assert prompt_of(config, tokenizer, "x<|image|>", files[:1]).ids == [ord("x"), *first]
    assert {name: value.shape for name, value in arrays.items()} == {
        "patches": (1, 2, 54, 768), "patch_positions": (1, 2, 54, 2)
    }  # fmt: skip


def test_what_cannot_be_seen_is_refused(
    tmp_path: Path, known: Known, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, files, tokenizer = known.config, images_in(tmp_path), open_tokenizer("bytes")
    (tmp_path / "broken.png").write_bytes(files[0].read_bytes()[:200])
    plain = {**SMALL["model"]["args"], "seq_len_max": 64}
    decoder = config_of(tmp_path, "diloco_jax.training.models.decoder:Decoder", **plain)
    other = config_of(tmp_path, **{**ARGS, "tower": {**ARGS["tower"], "patch_size": 8}})
    for seen, text, given, message in (
        (decoder, "x", files, r"--image needs a model with a vision tower, but .*:Decoder'; import Gemma 4 with"),
        (other, "x", files, r"tower has patch_size 8 and pool 3, but images are cut into patches of 16"),
        (config, "x", [tmp_path / "no.png"], r"no.png cannot be read: No such file or directory; correct the path"),
        (config, "x", [tmp_path / "broken.png"], r"broken.png cannot be used: it is not a whole PNG"),
        (config, "x", [Path("/dev/zero")], r"/dev/zero cannot be used: it has 67,108,865 bytes, and the limit is"),
        (config, "<|image|>x", files, r"have the image token 1 times \(id 257, .*, but there are 2 images"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_of(seen, tokenizer, text, given)
    with pytest.raises(ValueError, match=r"has 8 tokens with its images, and 42 more .* leaves room for 49"):
        next(known.language.write("x", 42, Writing(), files[:1]))
    # The command prints what is wrong. A config is the model that its run would start with.
    monkeypatch.setattr(Evaluator, "initial_parameters", lambda _: iter(known.parameters.items()))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(known.settings))
    assert cli.main(["sample", str(path), "--image", str(tmp_path / "no.png"), "--tokens", "5"]) != 0
    assert "no.png cannot be read" in capsys.readouterr().err
